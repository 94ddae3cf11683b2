"""The Slurm resource manager of dl2d, by Slurm's commands, slurmrestd or pyslurm; see docs/slurm.md."""
