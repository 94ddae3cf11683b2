"""Pure values: resources, jobs, the cluster as seen, decisions, plans and outcomes. No I/O, no torch."""
