"""Parts of several policies: greedy allocation, predicted speeds, checkpoints of learned policies."""
