from __future__ import annotations

from dataclasses import replace

import hypothesis
import pytest
from policies.snapshots import NO_PS, a_job, a_snapshot, ask, cluster, given, snapshots

from dl2d.core.cluster import Node
from dl2d.core.decision import Constraint
from dl2d.core.jobs import NOTHING, Allocation, Progress
from dl2d.core.json_codec import encode
from dl2d.core.resources import Resources
from dl2d.policies.srtf import Srtf
from dl2d.tick.policy_check.decision_check import check_decision

ONE = {"worker": Resources.of(cpu=1), **NO_PS}


def jobs_of(*shapes):
    """(epochs, samples per epoch, epochs done, measured samples/s, model)"""
    return [
        replace(
            a_job(number, **ONE, epochs=epochs, samples_per_epoch=samples, model=model),
            progress=Progress(epoch=done, samples_per_second=speed),
        )
        for number, (epochs, samples, done, speed, model) in enumerate(shapes, start=1)
    ]


@pytest.mark.parametrize(
    ("shapes", "first"),
    [
        pytest.param([(10, 100, 0, None, "a"), (5, 100, 0, None, "a")], 1, id="less work"),
        pytest.param([(10, 100, 8, None, "a"), (5, 100, 0, None, "a")], 0, id="less work left"),
        pytest.param([(10, 100, 0, 50.0, "a"), (5, 100, 0, 10.0, "a")], 0, id="more work, but faster"),
        pytest.param([(5, 100, 0, 10.0, "a"), (5, 100, 0, None, "b")], 0, id="unmeasured: the mean of all, and a tie"),
        pytest.param(
            [(5, 100, 0, 10.0, "a"), (5, 100, 0, 90.0, "b"), (4, 100, 0, None, "b")], 2, id="unmeasured: its own type"
        ),
        pytest.param([(5, 100, 0, None, "a"), (5, 100, 0, None, "a")], 0, id="equal: who came first"),
    ],
)
def test_the_shortest_is_served_first(shapes, first) -> None:
    got = given(Srtf(), a_snapshot(jobs_of(*shapes), cluster(1, cpu=3)))
    assert got == [(3, 0) if number == first else NOTHING for number in range(len(shapes))]


def test_a_running_job_falls_back_to_its_floor_for_a_shorter_one() -> None:
    jobs = jobs_of((100, 100, 1, 10.0, "a"), (1, 100, 0, None, "a"))
    snapshot = a_snapshot(jobs, cluster(1, cpu=4), {0: Allocation(4, 0)})
    assert given(Srtf(), snapshot) == [(1, 0), (3, 0)]


def test_who_waits_is_told_for_whom_and_why() -> None:
    nodes = [Node("n0", Resources.of(cpu=2), used=Resources.of(cpu=1))]
    decision = ask(Srtf(), a_snapshot(jobs_of((10, 100, 0, 10.0, "a"), (5, 100, 0, 10.0, "a")), nodes))
    reason = decision.jobs[0].reason
    assert reason.constraint is Constraint.QUEUE
    assert "waits for 2 (job 2), which has less left (50 s)" in reason.text
    assert decision.measure == "remaining seconds"
    assert [entry.alternatives[0].score for entry in decision.jobs] == [100.0, 50.0]


def test_by_fraction_the_length_does_not_count() -> None:
    jobs = jobs_of((1000, 100, 900, None, "a"), (1, 100, 0.5, None, "a"))
    assert given(Srtf(by_fraction=True), a_snapshot(jobs, cluster(1, cpu=2))) == [(2, 0), NOTHING]


@hypothesis.given(snapshots)
def test_whatever_it_is_shown_it_decides_within_bounds_and_always_the_same(snapshot) -> None:
    decision = ask(Srtf(), snapshot)
    check_decision(decision, snapshot)
    assert encode(decision) == encode(ask(Srtf(), snapshot))
