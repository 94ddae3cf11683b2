"""Barriers of scripts with a loop of their own: all workers wait for each other, and hold up nobody who trains."""

from __future__ import annotations

import time

from pslite.coordinator import work_reassignment
from pslite.coordinator.coordinator_context import Job
from pslite.coordinator.job_state import MemberState
from pslite.net.messages import AtBarrier, BarrierOpen

#: how long a worker waits at a barrier while others train until these do its part
_AWAY_SECONDS = 1.0


def arrive(_job: Job, member: MemberState, _message: AtBarrier) -> None:
    """A worker waits for all others."""
    member.at_barrier, member.barrier_since = True, time.monotonic()


def check(job: Job, now: float) -> None:
    """Let the workers go on that wait at a barrier, once all do; a newcomer passes those of the beginning alone.

    Before the first plan those count that have not described the job, since the others wait for that plan.  A worker
    that a plan adds counts from its first step on, one that it removes up to its last step.

    Whoever waits while others train is away: these do its part, so that it holds nobody up, until all wait.
    """
    state = job.state
    workers = [m for m in state.present() if m.role == "worker"]
    waiting = [m for m in workers if m.state == "joined" and m.seated and not m.described]
    pending = state.pending
    others = pending.newcomers() - pending.pushed.keys() | pending.drained if pending is not None else set()
    members = [m for m in workers if m.state != "joined" and not m.finished and m.task not in others]
    groups = [[m] for m in waiting] if state.plan is not None else [waiting]
    if state.plan is not None and members:
        if not all(m.at_barrier for m in members):
            late = {m.task for m in members if m.at_barrier and now - m.barrier_since >= _AWAY_SECONDS}
            work_reassignment.set_away(job, late | state.away())
        elif state.away():
            work_reassignment.set_away(job, set())
        elif state.reassignment is None:
            groups.append(members)
    for group in groups:
        if group and all(m.at_barrier for m in group):
            for member in group:
                member.channel.send(BarrierOpen(missed_steps=member.missed_steps))
                member.at_barrier = member.missed_steps = False
