"""Processes of a job and their surroundings: what starts coordinators, their supervisors, and task agents."""
