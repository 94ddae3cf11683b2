from __future__ import annotations

import hypothesis
import pytest
from msgspec import structs
from policies.snapshots import NO_PS, a_job, a_snapshot, ask, cluster, given, snapshots

from dl2d.core.cluster import Node, NodeState
from dl2d.core.decision import Constraint
from dl2d.core.jobs import NOTHING, Allocation
from dl2d.core.json_codec import encode
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.resources import Resources
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.common.greedy_allocation import next_bundle
from dl2d.policies.fifo import Fifo
from dl2d.tick.policy_check.decision_check import check_decision

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
            [{**ONE, "min_workers": 5}, ONE], cluster(1, cpu=4), [NOTHING, (4, 0)], id="larger than the cluster"
        ),
        pytest.param(
            [{"worker": Resources.of(gpu=3), "min_workers": 3, **NO_PS}, {**ONE, "worker": Resources.of(gpu=1)}],
            cluster(2, gpu=5),
            [NOTHING, (10, 0)],
            id="larger than the nodes",
        ),
        pytest.param(
            [{**ONE, "allowed_workers": (2, 12)}, ONE], cluster(1, cpu=8), [(2, 0), (6, 0)], id="never so large"
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
    """A job that runs keeps its floor, and the first waits for that."""
    jobs = [a_job(number, **ONE | {"min_workers": least}) for number, least in enumerate((1, 8, 1))]
    decision = ask(Fifo(), a_snapshot([*jobs[1:], jobs[0]], cluster(1, cpu=8), held={2: Allocation(1, 0)}))
    constraints = [entry.reason.constraint for entry in decision.jobs]
    assert constraints == [Constraint.CAPACITY, Constraint.QUEUE, Constraint.QUEUE]
    assert decision.jobs[1].reason.text == "waits for 1 (job 1), which came first and has no room to grow"


@pytest.mark.parametrize("down", [False, True])
def test_a_job_that_waits_for_others_keeps_later_ones_waiting_and_one_that_waits_for_a_node_does_not(
    down: bool,
) -> None:
    """Jobs that are not dl2d's end as well: what they hold is waited for."""
    nodes = [Node(f"n{number}", Resources.of(cpu=4), used=Resources.of(cpu=number)) for number in range(2)]
    nodes[1] = structs.replace(nodes[1], state=NodeState.DOWN if down else NodeState.UP)
    snapshot = a_snapshot([a_job(1, **ONE | {"min_workers": 8}), a_job(2, **ONE)], nodes)
    assert given(Fifo(), snapshot) == [NOTHING, (4, 0) if down else NOTHING]


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
    """After the first job that was stopped for want of room that the empty nodes have, nobody is given anything."""
    stopped = False
    for job, entry in zip(snapshot.jobs, ask(Fifo(), snapshot).jobs, strict=True):
        assert not stopped or (entry.allocation, entry.reason.constraint) == (NOTHING, Constraint.QUEUE)
        if entry.reason.constraint in (Constraint.CAPACITY, Constraint.FRAGMENTED):
            step = next_bundle(job, entry.allocation)
            assert step is not None
            stopped |= Packing(snapshot.nodes, LoadBalance()).fits(job, entry.allocation.plus(step))
