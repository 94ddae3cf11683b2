"""Jobs as squeue and sacct list them, sharing with those that wait, and how jobs are stopped."""
