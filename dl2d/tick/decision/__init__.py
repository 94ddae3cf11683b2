"""Parts of stage decide: the decision of the policy, of two policies in a canary, or of the scheduler in charge."""
