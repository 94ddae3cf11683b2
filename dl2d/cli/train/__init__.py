"""``dl2d train``: the command, and a module for each design and source of workloads."""
