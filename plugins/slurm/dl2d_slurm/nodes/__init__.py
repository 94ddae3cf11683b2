"""Nodes as sinfo lists them, and on which of them a job may run."""
