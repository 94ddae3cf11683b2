"""Who takes part in the job: joining, plans, dismissals, and the work of members that left."""
