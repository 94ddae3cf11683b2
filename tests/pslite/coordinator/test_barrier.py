"""Barriers: who is waited for."""

from __future__ import annotations

from coordinator.jobs import job

from pslite.coordinator import barrier
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
