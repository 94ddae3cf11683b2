from __future__ import annotations

import pytest
from simulation.test_replay import make

from dl2d.simulation.completion_time_lower_bound import Bound, lower_bound
from dl2d.simulation.workload.workload_file import read_workload


def bound(given) -> Bound:
    return lower_bound(read_workload(given))


def test_a_lone_job_is_bound_by_its_best_size() -> None:
    """2 samples/s with 2 workers, 100 s a slot, 100 samples an epoch: 2 epochs a slot."""
    found = bound(make([{"epochs": 5.0, "max_workers": 2, "max_ps": 2}]))
    assert found.best_size == found.avg_jct == 2.5


def test_jobs_that_share_too_little_are_bound_by_it() -> None:
    """An epoch costs at least 4 GPU x 1 slot / 1 epoch; one node has 8: two epochs of all jobs together in a slot.

    On that one machine the jobs of 2 epochs take a slot each: ends at 1, 2, 3, 4 slots.
    """
    found = bound(make([{"epochs": 2.0, "max_workers": 2, "max_ps": 2}] * 4, nodes=1))
    assert (found.capacity, found.resource) == (2.5, "gpu")
    assert found.best_size == 1.0
    assert found.avg_jct == 2.5


def test_a_short_job_that_comes_later_goes_first() -> None:
    """Lengths 3 and 1 slots on one machine, the short one a slot later: it ends at 2, the long one at 4."""
    jobs = [
        {"epochs": 6.0, "max_workers": 2, "max_ps": 2},
        {"epochs": 2.0, "max_workers": 2, "max_ps": 2, "submit_slot": 1},
    ]
    assert bound(make(jobs, nodes=1)).capacity == pytest.approx((4 + 1) / 2)
