"""What ``dl2d check`` finds out about a Slurm cluster: advice on its configuration and limits, and a probe job."""
