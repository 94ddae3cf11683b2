"""Trials of a policy before it is used: on recorded days of the site, generated loads and workloads."""
