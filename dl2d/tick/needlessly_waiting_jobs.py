"""Needless waits: finds jobs that wait although each of them would fit into free resources. Pure.

A policy that works leaves no such job waiting for long. A tick therefore reports them, and sets a policy aside that
leaves them waiting for ``Context.idle_seconds``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from dl2d.core.cluster import Node, Snapshot
from dl2d.core.decision import Constraint, Decision, JobDecision
from dl2d.core.jobs import NOTHING, Allocation, JobKey
from dl2d.core.packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.core.task_starts_and_stops import Plan

#: Constraints by which the guard keeps a job waiting, which is not the policy's fault.
_GUARD_CONSTRAINTS = frozenset(
    {Constraint.LIMIT, Constraint.COOLDOWN, Constraint.CHURN, Constraint.BACKOFF, Constraint.SILENT, Constraint.CLAIM}
)


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

    Jobs that are larger than the empty cluster, that the guard holds back or whose coordinator is silent do not count.
    """
    given_nothing = {entry.job for entry in decision.jobs if entry.allocation == NOTHING and not _is_held_back(entry)}
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
    #: By demands, minimum size and nodes that it may use: whether a job fits now, and whether it would fit into the
    #: empty cluster.
    fits: dict[tuple[Resources, Resources, Allocation, frozenset[str] | None], tuple[bool, bool]] = {}
    may_use = snapshot.may_use()
    startable = []
    for job in waiting:
        request = job.request
        start_size = request.worker, request.ps, request.min_size, may_use.get(job.key)
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


def _is_held_back(entry: JobDecision) -> bool:
    return any(reason.constraint in _GUARD_CONSTRAINTS for reason in entry.guarded)


def _emptied(node: Node) -> Node:
    return Node(node.name, node.capacity, NO_RESOURCES, node.state)
