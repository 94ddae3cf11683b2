"""Idle cluster: detects jobs that wait although each of them would fit into free resources. Pure.

No sound policy leaves them waiting for long: a tick reports it, and after a while has the fallback decide.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dl2d.core.cluster import Node, Snapshot
from dl2d.core.decision import Constraint, Decision, JobDecision
from dl2d.core.jobs import NOTHING, Allocation, JobKey
from dl2d.core.packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.core.tick_plan import Plan

#: Rules of the guard that hold a job back: it is not the policy that leaves it waiting.
_GUARD_CONSTRAINTS = frozenset({Constraint.LIMIT, Constraint.COOLDOWN, Constraint.CHURN, Constraint.SILENT})


@dataclass(frozen=True, slots=True)
class IdleWaiting:
    """Jobs that wait although they fit into free resources, and since when some do."""

    jobs: tuple[JobKey, ...] = ()
    #: When some began to wait, and when that was last seen; seconds since 1970.
    since: float = 0.0
    at: float = 0.0

    @property
    def seconds(self) -> float:
        """How long some have waited."""
        return self.at - self.since

    def after(self, jobs: tuple[JobKey, ...], at: float) -> IdleWaiting:
        """The next observation. A clock that was set back starts the count anew."""
        if not jobs:
            return IdleWaiting()
        return IdleWaiting(jobs, self.since if self.jobs and self.since <= at else at, at)


def idle_jobs(
    snapshot: Snapshot,
    decision: Decision,
    plan: Plan,
    placement: Placement,
    *,
    silent: Collection[JobKey] = (),
) -> tuple[JobKey, ...]:
    """Elastic jobs that have nothing and are given nothing, where every one of them would fit beside the plan's starts.

    Empty where one of them waits for resources: others may wait behind it in turn, as FIFO has it. Jobs that are larger
    than the empty cluster, that the guard holds back or whose coordinator is silent do not count.
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
    left = Packing(snapshot.nodes, placement)
    for start in plan.starts:
        left.place_on(start.node, start.demand)
    empty: Packing | None = None
    #: By what a job starts with: whether there is room now, or would be in the empty cluster.
    known: dict[tuple[Resources, Resources, Allocation], tuple[bool, bool]] = {}
    idle = []
    for job in waiting:
        request = job.request
        kind = request.worker, request.ps, request.least
        if kind not in known:
            now = left.fits(job, request.least)
            if not now and empty is None:
                empty = Packing([_emptied(node) for node in snapshot.nodes], placement)
            known[kind] = now, empty is None or now or empty.fits(job, request.least)
        now, ever = known[kind]
        if now:
            idle.append(job.key)
        elif ever:
            return ()
    return tuple(idle)


def _is_held_back(entry: JobDecision) -> bool:
    return any(reason.constraint in _GUARD_CONSTRAINTS for reason in entry.guarded)


def _emptied(node: Node) -> Node:
    return Node(node.name, node.capacity, NO_RESOURCES, node.state)
