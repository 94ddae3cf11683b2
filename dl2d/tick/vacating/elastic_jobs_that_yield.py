"""Which elastic jobs yield to a claim, and which lack tasks and come before it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dl2d.core.cluster import Snapshot
from dl2d.core.jobs import NOTHING, Allocation, JobKey
from dl2d.core.resource_manager import Claim, GrowthLimit, RmListing


class ElasticJobs:
    """The elastic jobs whose anchors are listed. Silent ones (``Snapshot.silent``) keep their tasks."""

    def __init__(self, snapshot: Snapshot, listing: RmListing) -> None:
        by_handle = {job.anchor: job.key for job in snapshot.jobs if job.anchor and not job.static}
        self.anchors = {by_handle[each.handle]: each for each in listing.jobs if each.handle in by_handle}
        #: Their priorities, in ascending order. Jobs that yield to a claim yield to all between the same two of them.
        self.priorities = sorted({anchor.priority for anchor in self.anchors.values()})
        self.requests = {job.key: job.request for job in snapshot.jobs}
        held, floors = snapshot.held(), dict(snapshot.floors)
        #: Jobs that have nothing.
        self.without_tasks = {key for key in self.anchors if held[key] == NOTHING}
        #: What jobs lack: of their minimum sizes if they have nothing, else of their floors.
        self.lacks = {
            key: self.requests[key].min_size if held[key] == NOTHING else floors.get(key, NOTHING).beyond(held[key])
            for key in self.anchors
        }
        self._may_use = snapshot.may_use()
        self._all_nodes = frozenset(node.name for node in listing.nodes if node.is_open)
        self._silent = frozenset(snapshot.silent)

    def yields(self, key: JobKey, claim: Claim) -> bool:
        """Whether a job gives up tasks to a claim."""
        anchor = self.anchors.get(key)
        return anchor is not None and key not in self._silent and anchor.yields_to(claim)

    def all_yield_on(self, nodes: Collection[str], claim: Claim) -> bool:
        """Whether all jobs that may use any of these nodes yield to a claim; silent ones count like others."""
        names = frozenset(nodes)
        return all(
            anchor.yields_to(claim) or names.isdisjoint(self._may_use.get(key, self._all_nodes))
            for key, anchor in self.anchors.items()
        )

    def waiting(self, growth_limits: Iterable[GrowthLimit], backing_off: Collection[JobKey]) -> list[JobKey]:
        """Jobs that lack tasks (``lacks``), by priority: those that come before a claim of lower priority.

        Of equal priority those that lack tasks of their floors come first. Without those of which no tasks can start:
        they are silent or ``backing_off``, or a limit leaves too little. Of the floor of a running job as many tasks
        count as a limit leaves (``lacks`` is then these), and all in limits beyond which tasks of floors start.
        """
        waiting = {
            anchor.handle: key
            for key, anchor in self.anchors.items()
            if any(self.lacks[key]) and key not in backing_off and key not in self._silent
        }
        for limit in growth_limits if waiting else ():
            for handle in limit.anchors & waiting.keys():
                key = waiting[handle]
                self.lacks[key] = self._startable(key, limit)
                if not any(self.lacks[key]):
                    del waiting[handle]
        return sorted(waiting.values(), key=lambda key: (-self.anchors[key].priority, key in self.without_tasks))

    def _startable(self, key: JobKey, limit: GrowthLimit) -> Allocation:
        """What of the tasks that a job lacks can start in a limit; of a minimum size all or nothing."""
        request, lacks, is_floor = self.requests[key], self.lacks[key], key not in self.without_tasks
        if is_floor and (limit.floors_may_exceed or not limit.enforced):
            return lacks
        if not is_floor:
            return lacks if limit.allows(request.demand_of(lacks), sum(lacks)) else NOTHING
        found = NOTHING
        for one in (Allocation(1, 0), Allocation(0, 1)):
            while lacks.covers(more := found.plus(one)) and limit.allows(request.demand_of(more), sum(more)):
                found = more
        return found
