"""Experiments: versioned comparisons of policies over workloads and seeds, with a reproducible report."""
