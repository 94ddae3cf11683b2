"""How tasks are submitted as jobs: with which options, in which partitions, by sbatch, slurmrestd or pyslurm."""
