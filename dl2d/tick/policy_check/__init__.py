"""Calls of a policy and checks of what it decides: time limit, failures, completeness, jobs that it does not start."""
