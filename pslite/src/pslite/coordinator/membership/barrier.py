"""Barriers of scripts with a loop of their own: all workers wait for each other, and hold up nobody who trains."""

from __future__ import annotations

import time

from pslite.coordinator.membership import work_reassignment
from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.job_state import JobState, MemberState
from pslite.net.messages import AtBarrier, BarrierOpen

#: a worker that has waited at a barrier for so many seconds while others train is away: these do its part
_AWAY_SECONDS = 1.0


def arrive(_job: Job, member: MemberState, _message: AtBarrier) -> None:
    """A worker waits for all others."""
    member.at_barrier, member.barrier_since = True, time.monotonic()


def check(job: Job, now: float) -> None:
    """Open the barrier once all workers wait that have to come to it.

    Before the first plan these are the workers that have not described the job, as the others wait for that plan.
    Later they are the workers that train; a newcomer passes the barriers at the beginning of its script alone.

    A worker that waits for long while others train is away: the others do its part, so that it does not delay them.
    """
    state = job.state
    workers = [m for m in state.present() if m.role == "worker"]
    newcomers = [m for m in workers if m.state == "joined" and m.seated and not m.described]
    if state.plan is None:
        _open_if_all_wait(newcomers)
        return
    for newcomer in newcomers:
        _open_if_all_wait([newcomer])
    training = _training(state, workers)
    if not all(m.at_barrier for m in training):
        away = {m.task for m in training if m.at_barrier and now - m.barrier_since >= _AWAY_SECONDS}
        work_reassignment.set_away(job, away | state.away())
    elif training and state.away():
        work_reassignment.set_away(job, set())
    elif state.reassignment is None:
        _open_if_all_wait(training)


def _training(state: JobState, workers: list[MemberState]) -> list[MemberState]:
    """Return the workers that train: one that a plan adds from its first step on, one that it removes to its last.

    Workers in no plan do not train: they were dismissed, or are of the run before, and their processes end.
    """
    pending = state.pending
    names = state.workers_in_force()
    if pending is not None:
        names -= (pending.newcomers() - pending.pushed.keys()) | pending.drained
    return [m for m in workers if m.task in names and not m.finished]


def _open_if_all_wait(workers: list[MemberState]) -> None:
    if all(worker.at_barrier for worker in workers):
        for worker in workers:
            worker.channel.send(BarrierOpen(missed_steps=worker.missed_steps))
            worker.at_barrier = worker.missed_steps = False
