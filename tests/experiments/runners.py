"""Runners of cells that child processes can import."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from dl2d.core.errors import PolicyError
from dl2d.core.jobs import Allocation
from dl2d.experiments.run_simulation import Cell, Finished, Result
from dl2d.simulation.result_time_series import SlotSeries


def quick(cell: Cell) -> Finished:
    """A result that tells its cell, without a simulation."""
    worth = float(cell.seed + 1) * (2 if cell.policy == "drf" else 3)
    return Finished(
        case=cell.case.name,
        policy=cell.policy,
        seed=cell.seed,
        result=Result(
            slot_seconds=60.0, slots=5, avg_jct=worth, avg_jct_plain=worth + 1, makespan=2 * worth, bound=1.0,
            scarce="gpu", utilisation={"gpu": 0.5}, resizes=4, jobs={"1": worth - 0.5, "2": worth + 0.5},
        ),
        series=SlotSeries(
            slots=(0, 1, 4), waiting=(1, 0, 0), running=(1, 2, 1), workers=(2, 3, 1), ps=(1, 2, cell.seed),
            utilisation={"gpu": (0.5, 1.0, 0.25)},
            allocations=(
                {"2": Allocation(2, 1)}, {"2": Allocation(1, 1), "10": Allocation(2, 1)},
                {"10": Allocation(1, cell.seed)},
            ) if cell.keeps_allocations else (),
        ),
    )  # fmt: skip


def spoiled(cell: Cell) -> Finished:
    """FIFO fails on seed 1."""
    if (cell.policy, cell.seed) == ("fifo", 1):
        raise PolicyError("cannot decide")
    return quick(cell)


def broken(cell: Cell) -> Finished:
    """FIFO has a defect."""
    return quick(cell) if cell.policy != "fifo" else {}["nothing"]


def deadly(cell: Cell) -> Finished:
    """The process of FIFO's seed 1 is killed."""
    if (cell.policy, cell.seed) == ("fifo", 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return quick(cell)


def endless(cell: Cell) -> Finished:
    """Leaves its process's id where the workload's name says, and never ends, but for seed 0."""
    if cell.seed:
        (Path(cell.case.name) / str(os.getpid())).touch()
        signal.pause()
    return quick(cell)
