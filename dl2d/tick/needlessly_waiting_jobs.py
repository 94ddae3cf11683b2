"""Needless waits: finds jobs that wait although each of them would fit into free resources. Pure.

A policy that works leaves no such job waiting for long. A tick therefore reports them, and sets a policy aside that
leaves them waiting for ``Context.idle_seconds``. When room appears for a job between two decisions, and jobs of others
wait, the policy is asked again (``jobs_with_room``), once for each job.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from dl2d.core.cluster import Node, Snapshot
from dl2d.core.decision import Constraint, Decision, JobDecision
from dl2d.core.jobs import NOTHING, TASK_ROLES, Allocation, Job, JobKey
from dl2d.core.packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.core.task_starts_and_stops import Plan

#: Constraints by which the guard keeps a job waiting, which is not the policy's fault.
_GUARD_CONSTRAINTS = frozenset(
    {Constraint.LIMIT, Constraint.COOLDOWN, Constraint.CHURN, Constraint.BACKOFF, Constraint.SILENT, Constraint.CLAIM}
)

#: What decides whether a job fits: demands, minimum size, and the nodes that it may use.
_StartSize = tuple[Resources, Resources, Allocation, frozenset[str] | None]

#: Maximum part of the time between two ticks that counts as waiting.
MAX_GAP_SECONDS: Final = 60.0


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
    *,
    silent: Collection[JobKey] = (),
) -> tuple[JobKey, ...]:
    """Elastic jobs that have nothing and are given nothing although each would fit beside the plan's starts.

    Empty in two cases, since the other jobs may then wait for their turn in a queue:

    - a job without tasks was given a size and is deferred;
    - a waiting job does not fit now, but would fit into the empty cluster.

    Jobs that are larger than the empty cluster, that the guard keeps waiting or whose coordinator is silent do not
    count.
    """
    given_nothing = {
        entry.job for entry in decision.jobs if entry.allocation == NOTHING and not _is_limited_by_guard(entry)
    }
    if not given_nothing:
        return ()
    held = snapshot.held()
    waiting = [
        job
        for job in snapshot.jobs
        if job.key in given_nothing and not job.static and job.key not in silent and held[job.key] == NOTHING
    ]
    if not waiting or any(held[item.job] == NOTHING for item in plan.deferred if item.job in held):
        return ()
    free = Packing(snapshot.nodes, placement, node_sets=snapshot.node_sets)
    for start in plan.starts:
        free.place_on(start.node, start.demand)
    empty: Packing | None = None
    #: Whether a job fits now, and whether it would fit into the empty cluster.
    fits: dict[_StartSize, tuple[bool, bool]] = {}
    may_use = snapshot.may_use()
    startable = []
    for job in waiting:
        request = job.request
        start_size = _start_size(job, may_use)
        if start_size not in fits:
            fits_now = free.fits(job, request.min_size)
            if not fits_now and empty is None:
                nodes = [_emptied(node) for node in snapshot.nodes]
                empty = Packing(nodes, placement, node_sets=snapshot.node_sets)
            fits[start_size] = fits_now, empty is None or fits_now or empty.fits(job, request.min_size)
        fits_now, fits_empty = fits[start_size]
        if fits_now:
            startable.append(job.key)
        elif fits_empty:
            return ()
    return tuple(startable)


def jobs_with_room(
    snapshot: Snapshot, decision: Decision, placement: Placement, *, silent: Collection[JobKey] = ()
) -> frozenset[JobKey]:
    """Elastic jobs that have nothing and are given nothing although each fits beside what the other jobs are given."""
    held, jobs = snapshot.held(), {job.key: job for job in snapshot.jobs}
    given = {entry.job: entry.allocation for entry in decision.jobs if entry.job in jobs}
    waiting = [
        jobs[key]
        for key, size in given.items()
        if size == held[key] == NOTHING and not jobs[key].static and key not in silent
    ]
    if not waiting:
        return frozenset()
    free = Packing(snapshot.nodes, placement, node_sets=snapshot.node_sets)
    for key, size in given.items():
        for role in TASK_ROLES:
            if (missing := size.count(role) - held[key].count(role)) > 0:
                free.place_all(jobs[key].request.demand(role), role, missing, key)
    may_use, fits = snapshot.may_use(), dict[_StartSize, bool]()
    with_room = set()
    for job in waiting:
        start_size = _start_size(job, may_use)
        if start_size not in fits:
            fits[start_size] = free.fits(job, job.request.min_size)
        if fits[start_size]:
            with_room.add(job.key)
    return frozenset(with_room)


def _start_size(job: Job, may_use: Mapping[JobKey, frozenset[str]]) -> _StartSize:
    request = job.request
    return request.worker, request.ps, request.min_size, may_use.get(job.key)


def _is_limited_by_guard(entry: JobDecision) -> bool:
    return any(reason.constraint in _GUARD_CONSTRAINTS for reason in entry.guarded)


def _emptied(node: Node) -> Node:
    return Node(node.name, node.capacity, NO_RESOURCES, node.state)
