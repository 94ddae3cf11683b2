"""Policies: how many tasks each job should have. One file each, one interface (``dl2d.core.policy.Policy``)."""
