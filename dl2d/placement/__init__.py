"""Placements: which node a task goes to. One file each, one interface (``dl2d.core.policy.Placement``)."""
