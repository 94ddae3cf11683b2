"""DL2 as its paper designs it: the policy, its networks, what they are shown and what they may do."""
