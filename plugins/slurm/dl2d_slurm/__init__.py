"""The Slurm resource manager of dl2d, through Slurm's own commands; see docs/slurm.md."""

from __future__ import annotations
