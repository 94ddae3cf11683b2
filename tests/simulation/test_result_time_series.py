from __future__ import annotations

import pytest
from simulation.test_replay import make, run

from dl2d.core.jobs import Allocation
from dl2d.policies.fifo import Fifo


def test_the_series_of_two_jobs_worked_by_hand() -> None:
    """One node of 8 CPUs and 8 GPUs. The first holds all of it for a slot, the second then shrinks to nothing else.

    Slot 0: job 1 has 2 bundles (8 CPU, 8 GPU), job 2 waits. Slot 1: job 2 has 1 bundle (4 CPU, 4 GPU).
    """
    jobs = [{"epochs": 2.0, "max_workers": 2, "max_ps": 2}, {"epochs": 1.0, "max_workers": 1, "max_ps": 1}]
    done = run(make(jobs, nodes=1), Fifo(), keep_series=True)
    series = done.series
    assert series is not None
    assert series.slots == (0, 1)
    assert (series.waiting, series.running) == ((1, 0), (1, 1))
    assert (series.workers, series.ps) == ((2, 1), (2, 1))
    assert series.utilisation == {"cpu": (1.0, 0.5), "gpu": (1.0, 0.5)}
    assert series.allocations == ({"1": Allocation(2, 2)}, {"2": Allocation(1, 1)})
    assert done.utilisation == {"cpu": 0.75, "gpu": 0.75}
    assert done.resizes == 0


def test_changes_of_size_are_counted_after_the_first_start() -> None:
    """Alone on the node the first has two bundles; it shrinks when the second comes, and grows when that has ended."""
    jobs = [
        {"epochs": 8.0, "max_workers": 2, "max_ps": 2},
        {"epochs": 1.0, "max_workers": 1, "max_ps": 1, "submit_slot": 1},
    ]
    done = run(make(jobs, nodes=1), keep_series=True)
    assert done.series is not None
    assert [held["1"].workers for held in done.series.allocations] == [2, 1, 2, 2, 2]
    assert [job.resizes for job in done.jobs] == [2, 0]
    assert done.resizes == 2


def test_slots_without_a_job_are_left_out_and_count_as_idle() -> None:
    """Slots 0 and 9 of ten are full: a fifth of the time."""
    jobs = [
        {"epochs": 2.0, "max_workers": 2, "max_ps": 2},
        {"epochs": 2.0, "max_workers": 2, "max_ps": 2, "submit_slot": 9},
    ]
    done = run(make(jobs, nodes=1), keep_series=True)
    assert done.series is not None
    assert done.series.slots == (0, 9)
    assert done.utilisation["gpu"] == pytest.approx(0.2)


def test_without_asking_there_is_no_series() -> None:
    assert run(make([{}])).series is None
