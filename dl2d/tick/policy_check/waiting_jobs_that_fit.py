"""Needless waits: finds jobs that wait although each of them would fit into free resources.

A policy that works leaves no such job waiting for long. A tick therefore reports them, and sets a policy aside that
leaves them waiting for ``Context.idle_seconds``. When room appears for a job between two decisions, and jobs of others
wait, the policy is asked again (``jobs_with_room``), once for each job until it is decided anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Constraint, Decision, JobDecision
from dl2d.core.jobs import NOTHING, TASK_ROLES, Job, JobKey
from dl2d.core.packing.bin_packing import JobDemand, Packing, job_demand
from dl2d.core.packing.room_in_limits import LimitRoom
from dl2d.core.placement import Placement
from dl2d.core.plan_of_starts_and_stops import Plan

#: Constraints by which the guard keeps a job waiting, which is not the policy's fault.
_GUARD_CONSTRAINTS = frozenset(
    {
        Constraint.LIMIT,
        Constraint.COOLDOWN,
        Constraint.CHURN,
        Constraint.BACKOFF,
        Constraint.SILENT,
        Constraint.CLAIM,
        Constraint.HELD_BACK,
    }
)

#: Maximum part of the time between two ticks that counts as waiting.
MAX_GAP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class NeedlessWait:
    """Jobs that wait although they fit into free resources, and for how long there have been such jobs."""

    jobs: tuple[JobKey, ...] = ()
    #: For how long every tick has found such jobs (not always the same ones).
    seconds: float = 0.0
    #: When the last tick found them; seconds on a monotonic clock.
    at: float = 0.0

    def after(self, jobs: tuple[JobKey, ...], now: float) -> NeedlessWait:
        """The record after a tick found ``jobs``; ``now``: seconds on a monotonic clock.

        Of the time between two ticks no more than ``MAX_GAP_SECONDS`` counts: no policy decides while ticks fail or the
        daemon stands still.
        """
        if not jobs or not self.jobs:
            return NeedlessWait(jobs, at=now)
        return NeedlessWait(jobs, self.seconds + min(now - self.at, MAX_GAP_SECONDS), now)


def startable_waiting_jobs(
    snapshot: Snapshot,
    decision: Decision,
    plan: Plan,
    placement: Placement,
) -> tuple[JobKey, ...]:
    """Elastic jobs that have nothing and are given nothing although each would fit beside the plan's starts.

    A job that may wait for its turn in a queue does not count: a policy that keeps the order of a queue leaves room for
    its first job. A learned one that imitates it gives no reason, so it cannot be distinguished from one that leaves
    jobs out by mistake. A job may be the first of a queue, of those that may use some of the same nodes, if it

    - has no tasks, was given a size and is deferred;
    - or waits and does not fit now, but would fit into the empty cluster.

    Jobs that are larger than the empty cluster, that the guard or a limit keeps waiting, or whose coordinator is silent
    do not count.
    """
    answers = [entry for entry in decision.jobs if not _is_limited_by_guard(entry)]
    waiting = _allowed_by_limits(_waiting_jobs(snapshot, answers), snapshot, decision)
    if not waiting:
        return ()
    held, may_use, every = snapshot.held(), snapshot.may_use(), frozenset(node.name for node in snapshot.nodes)
    #: The nodes that each first job of a queue may use.
    queued_for = {may_use.get(item.job, every) for item in plan.deferred if held.get(item.job) == NOTHING}
    if every in queued_for:
        return ()
    free = Packing(snapshot.nodes, placement, node_sets=snapshot.node_sets)
    for start in plan.starts:
        free.place_on(start.node, start.demand)
    startable = _fitting(waiting, free, snapshot)
    if len(startable) < len(waiting):
        first = _fitting([job for job in waiting if job.key not in startable], free.empty(), snapshot)
        queued_for |= {may_use.get(job, every) for job in first}
    kept_free: frozenset[str] = frozenset().union(*queued_for)
    return tuple(
        job.key for job in waiting if job.key in startable and kept_free.isdisjoint(may_use.get(job.key, every))
    )


def jobs_with_room(snapshot: Snapshot, decision: Decision, placement: Placement) -> frozenset[JobKey]:
    """Elastic jobs that have nothing and are given nothing although each fits beside what the other jobs are given.

    A job whose coordinator is silent gets no new tasks.
    """
    waiting = _allowed_by_limits(_waiting_jobs(snapshot, decision.jobs), snapshot, decision)
    if not waiting:
        return frozenset()
    held, silent = snapshot.held(), set(snapshot.silent)
    requests = {job.key: job.request for job in snapshot.jobs if job.key not in silent}
    free = Packing(snapshot.nodes, placement, node_sets=snapshot.node_sets)
    for entry in decision.jobs:
        if entry.job not in requests:
            continue
        for role in TASK_ROLES:
            if (missing := entry.allocation.count(role) - held[entry.job].count(role)) > 0:
                free.place_all(requests[entry.job].demand(role), role, missing, entry.job)
    return _fitting(waiting, free, snapshot)


def _waiting_jobs(snapshot: Snapshot, answers: Iterable[JobDecision]) -> list[Job]:
    """Elastic jobs that have nothing and to which one of these answers gives nothing; in the snapshot's order."""
    given_nothing = {entry.job for entry in answers if entry.allocation == NOTHING} - set(snapshot.silent)
    if not given_nothing:
        return []
    held = snapshot.held()
    return [job for job in snapshot.jobs if job.key in given_nothing and not job.static and held[job.key] == NOTHING]


def _allowed_by_limits(waiting: Sequence[Job], snapshot: Snapshot, decision: Decision) -> Sequence[Job]:
    """Those of the jobs whose limits leave enough for their minimum size beside what the decision gives."""
    if not waiting or not snapshot.limits:
        return waiting
    room, allocations = LimitRoom(snapshot.limits), decision.allocations()
    for job in snapshot.jobs:
        room.take(job, allocations.get(job.key, NOTHING))
    return [job for job in waiting if room.blocked(job, job.request.min_size) is None]


def _fitting(jobs: Iterable[Job], packing: Packing, snapshot: Snapshot) -> frozenset[JobKey]:
    """Those of the jobs of which each would fit alone, at its minimum size."""
    may_use = snapshot.may_use()
    alike: dict[JobDemand, list[Job]] = defaultdict(list)
    for job in jobs:
        alike[job_demand(job.request, job.request.min_size, may_use.get(job.key))].append(job)
    return frozenset(
        job.key for some in alike.values() if packing.fits(some[0], some[0].request.min_size) for job in some
    )


def _is_limited_by_guard(entry: JobDecision) -> bool:
    return any(reason.constraint in _GUARD_CONSTRAINTS for reason in entry.guarded)
