"""A site's recorded days and decisions as data for learning. Pure: what the store recorded in, workloads out."""
