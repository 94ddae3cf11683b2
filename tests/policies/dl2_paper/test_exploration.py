"""Exploration on a cluster: some jobs have a drawn size, so that their speed there is measured."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from policies.dl2_paper.test_policy import a_checkpoint
from policies.snapshots import NO_PS, a_job, a_snapshot, ask, cluster

from dl2d.core.jobs import Allocation
from dl2d.policies.dl2_paper.exploration import drawn_size
from dl2d.policies.dl2_paper.policy import Dl2PaperPolicy
from dl2d.tick.policy_check.decision_check import check_decision


def test_a_job_explores_as_often_as_asked_for_and_every_size_within_its_bounds_alike() -> None:
    job = a_job(1, min_workers=2, max_workers=4, min_ps=1, max_ps=3)
    assert {drawn_size(job, slot, 0.0) for slot in range(100)} == {None}
    some = [drawn_size(job, slot, 0.25) for slot in range(4000)]
    assert sum(size is not None for size in some) / 4000 == pytest.approx(0.25, abs=0.03)
    every = Counter(drawn_size(job, slot, 1.0) for slot in range(4000))
    assert set(every) == {Allocation(workers, ps) for workers in (2, 3, 4) for ps in (1, 2, 3)}
    assert min(every.values()) > 350


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"allowed_workers": (1, 4), "max_ps": 1}, {Allocation(1, 1), Allocation(4, 1)}),
        ({**NO_PS, "max_workers": 2}, {Allocation(1, 0), Allocation(2, 0)}),
    ],
    ids=["some worker counts", "no PSs"],
)
def test_a_drawn_size_is_one_that_the_job_can_run_with(bounds: dict[str, Any], expected: set[Allocation]) -> None:
    assert {drawn_size(a_job(1, **bounds), slot, 1.0) for slot in range(200)} == expected


def test_a_job_of_fixed_size_does_not_explore() -> None:
    job = a_job(1, static=True)
    assert {drawn_size(job, slot, 1.0) for slot in range(100)} == {None}


def test_the_policy_gives_jobs_the_drawn_sizes_and_says_why() -> None:
    snapshot = a_snapshot([a_job(number) for number in range(1, 7)], cluster(8, cpu=16, gpu=8))
    drawn = [drawn_size(job, snapshot.slot, 1.0) for job in snapshot.jobs]
    assert len(set(drawn)) > 2
    decision = ask(Dl2PaperPolicy(a_checkpoint(resources=["cpu", "gpu"]), exploration=1.0), snapshot)
    check_decision(decision, snapshot)
    assert [entry.allocation for entry in decision.jobs] == drawn
    reasons = {entry.reason.text for entry in decision.jobs if entry.allocation != (4, 4)}
    assert all(text.endswith("in this slot for its speed to be measured (exploration)") for text in reasons)


def test_a_job_with_no_room_for_the_drawn_size_has_what_the_network_gives_it_within_that_size() -> None:
    snapshot = a_snapshot([a_job(number) for number in range(1, 7)], cluster(1, cpu=24, gpu=8))
    decision = ask(Dl2PaperPolicy(a_checkpoint(resources=["cpu", "gpu"]), exploration=1.0), snapshot)
    check_decision(decision, snapshot)
    for job, entry in zip(snapshot.jobs, decision.jobs, strict=True):
        drawn = drawn_size(job, snapshot.slot, 1.0)
        assert drawn is not None
        assert entry.allocation.workers <= drawn.workers
        assert entry.allocation.ps <= drawn.ps
