"""Barriers: who is waited for."""

from __future__ import annotations

import pytest
from coordinator.jobs import JOINED, job, sent, spec

from pslite.coordinator.membership import barrier
from pslite.coordinator.state.job_state import PendingPlan
from pslite.job.membership_plan import make_plan
from pslite.net.messages import BarrierOpen


def test_a_worker_that_waits_for_the_first_plan_is_not_waited_for_at_a_barrier_of_the_beginning():
    """Where the job has gone back, a newcomer may have passed the barrier, as one of a job under way does."""
    a_job, _ = job(["worker-0", "worker-1"])
    first, newcomer = a_job.state.members.values()
    for seat, worker in enumerate((first, newcomer)):
        worker.state, worker.seat = "joined", seat
    first.described, first.at_barrier = False, True
    barrier.check(a_job, 0.0)
    assert [type(message) for message in first.channel.unconfirmed] == [BarrierOpen]
    assert not newcomer.channel.unconfirmed
    # of two that have not described the job, one waits for the other
    first.at_barrier, newcomer.described = True, False
    barrier.check(a_job, 0.0)
    assert len(first.channel.unconfirmed) == 1


@pytest.mark.parametrize("left_over", ["dismissed", "of the run before"])
def test_a_worker_that_ends_and_is_in_no_plan_delays_no_barrier(left_over):
    a_job, _ = job(["worker-0", "worker-1", "ps-0"], plan=["worker-0", "ps-0"])
    trains, leaves, _ = a_job.state.members.values()
    if left_over == "dismissed":
        leaves.dismiss("no longer wanted")
    else:  # its script had ended before the others'
        leaves.state, leaves.finished_at, leaves.outdated = "active", JOINED, True
    trains.at_barrier = True
    barrier.check(a_job, 0.0)
    assert sent(a_job, "worker-0") == ["BarrierOpen"]


def test_a_leaving_worker_trains_on_alone_while_all_that_stay_wait_at_a_barrier():
    """They came there after the plan without it was committed, before its first version."""
    tasks = ["worker-0", "worker-1", "worker-2", "ps-0"]
    a_job, _ = job(tasks, plan=tasks, described=spec(mode="open", epochs=0))
    state = a_job.state
    stays, also_leaves, leaves, server = state.members.values()
    workers, servers = [stays.plan_entry()], [server.plan_entry()]
    plan = make_plan(2, state.blocks, workers, servers, state.plan, replicas=False)
    state.pending = PendingPlan(plan, state.plan, began=0.0, phase="committed")
    for worker in (stays, also_leaves):
        worker.at_barrier = True
    barrier.check(a_job, 2.0)
    assert state.away() == {"worker-0", "worker-1"}
    assert set(state.reassigned[1].values()) == {"worker-2"}
    state.pending.drained.add(leaves.task)
    barrier.check(a_job, 2.1)
    state.reassignment = None  # the server has accepted it
    barrier.check(a_job, 2.2)
    assert [sent(a_job, worker.task).count("BarrierOpen") for worker in (stays, also_leaves, leaves)] == [1, 1, 0]
