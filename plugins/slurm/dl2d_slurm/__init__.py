"""The Slurm resource manager of dl2d, by Slurm's commands and, if so configured, slurmrestd; see docs/slurm.md."""
