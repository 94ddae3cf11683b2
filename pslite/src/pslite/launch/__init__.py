"""Processes of a job and their surroundings: dl2-run, the launcher with its coordinators, task agents."""
