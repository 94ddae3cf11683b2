"""What a job keeps on disk: checkpoints and the coordinator log."""
