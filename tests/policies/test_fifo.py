from __future__ import annotations

import hypothesis
import pytest
from policies.snapshots import NO_PS, a_job, a_snapshot, ask, cluster, given, snapshots

from dl2d.core.decision import Constraint
from dl2d.core.jobs import NOTHING, Allocation
from dl2d.core.json_codec import encode
from dl2d.core.resources import Resources
from dl2d.policies.fifo import Fifo
from dl2d.tick.decision_check import check_decision

ONE = {"worker": Resources.of(cpu=1), **NO_PS}


@pytest.mark.parametrize(
    ("jobs", "nodes", "want"),
    [
        pytest.param([{}, {}], cluster(4, cpu=8, gpu=2), [(4, 4), (4, 4)], id="both fit"),
        pytest.param([{"max_workers": 6, "max_ps": 6}, {}], cluster(4, cpu=8, gpu=2), [(6, 6), (2, 2)], id="the rest"),
        pytest.param([{**ONE, "max_workers": 9}, ONE], cluster(1, cpu=8), [(8, 0), NOTHING], id="nothing overtakes"),
        pytest.param([{**ONE, "max_workers": 8}, ONE], cluster(1, cpu=8), [(8, 0), NOTHING], id="full to the brim"),
        pytest.param(
            [{"worker": Resources.of(gpu=3)}, {}], cluster(2, cpu=9, gpu=2), [NOTHING, (4, 4)], id="impossible"
        ),
        pytest.param(
            [{**ONE, "min_workers": 5}, ONE], cluster(1, cpu=4), [NOTHING, NOTHING], id="the head waits whole"
        ),
        pytest.param([{**ONE, "allowed_workers": (1, 2, 4)}], cluster(1, cpu=7), [(4, 0)], id="allowed sizes"),
        pytest.param([{"max_ps": 1}], cluster(4, cpu=8, gpu=2), [(4, 1)], id="fewer servers than workers"),
        pytest.param([], [], [], id="nothing at all"),
    ],
)
def test_by_hand(jobs, nodes, want) -> None:
    snapshot = a_snapshot([a_job(number, **job) for number, job in enumerate(jobs, start=1)], nodes)
    assert given(Fifo(), snapshot) == want


def test_who_waits_is_told_for_whom() -> None:
    decision = ask(Fifo(), a_snapshot([a_job(1, **ONE), a_job(2, **ONE)], cluster(1, cpu=8)))
    assert [entry.reason.constraint for entry in decision.jobs] == [Constraint.CAPACITY, Constraint.QUEUE]
    assert decision.jobs[1].reason.text == "waits for 1 (job 1), which came first and has no room to grow"


def test_a_running_job_keeps_its_floor_though_others_came_first() -> None:
    snapshot = a_snapshot([a_job(1, **ONE), a_job(2, **ONE)], cluster(1, cpu=8), held={1: Allocation(5, 0)})
    assert given(Fifo(), snapshot) == [(7, 0), (1, 0)]


def test_numbers_are_not_words() -> None:
    """Job 9 came before job 10 in the same second."""
    jobs = [a_job(9, **ONE), a_job(10, **ONE)]
    assert given(Fifo(), a_snapshot(jobs, cluster(1, cpu=3))) == [(3, 0), NOTHING]


@hypothesis.given(snapshots)
def test_whatever_is_shown_the_answer_is_one_and_always_the_same(snapshot) -> None:
    decision = ask(Fifo(), snapshot)
    check_decision(decision, snapshot)
    assert encode(decision) == encode(ask(Fifo(), snapshot))


@hypothesis.given(snapshots)
def test_nobody_overtakes(snapshot) -> None:
    """After the first job that was stopped for want of room nobody is given anything."""
    stopped = False
    for entry in ask(Fifo(), snapshot).jobs:
        assert not stopped or (entry.allocation, entry.reason.constraint) == (NOTHING, Constraint.QUEUE)
        stopped |= entry.reason.constraint in (Constraint.CAPACITY, Constraint.FRAGMENTED)
