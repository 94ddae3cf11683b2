"""How Slurm's commands are run, how many RPCs they may send, and how their output is read."""
