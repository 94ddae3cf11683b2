"""State of the search for nodes to vacate: room on each node and tasks that may leave, with undo."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from dl2d.core.cluster import Snapshot, Task, TaskGroup
from dl2d.core.jobs import TASK_ROLES, Allocation, JobKey, Role
from dl2d.core.packing.bin_packing import JobDemand, job_demand
from dl2d.core.packing.task_leaving_order import leaving_order, rank_0_worker
from dl2d.core.resource_manager import Claim, RmListing
from dl2d.core.resources import Resources
from dl2d.tick.vacating.elastic_jobs_that_yield import ElasticJobs


class NodeRoom:
    """Room on each node when all draining tasks have left, and how many tasks each job can spare."""

    def __init__(
        self, snapshot: Snapshot, listing: RmListing, jobs: ElasticJobs, allocations: Mapping[JobKey, Allocation]
    ) -> None:
        self._jobs = jobs
        # Nodes that no elastic job may use take no tasks in the snapshot.
        self.capacity = {node.name: node.capacity for node in listing.nodes if node.is_open}
        self.may_use = snapshot.may_use()
        room_of_tasks: dict[str, list[Resources]] = defaultdict(list)
        wanted_on: dict[str, list[Task]] = defaultdict(list)
        groups: dict[TaskGroup, list[Task]] = defaultdict(list)
        for task in snapshot.tasks:
            room_of_tasks[task.node].append(task.room)
            if task.state.wanted:
                wanted_on[task.node].append(task)
                groups[task.group].append(task)
        #: The worker of rank 0 of each job; it leaves last.
        self.rank_0_workers = {rank_0_worker(tasks) for (_, role), tasks in groups.items() if role is Role.WORKER}
        #: Tasks on each node that are meant to run, in the order in which they leave.
        self.tasks_on = {
            node.name: tuple(sorted(wanted_on.get(node.name, ()), key=self._leaving_order)) for node in listing.nodes
        }
        #: What foreign jobs use on each node.
        self.used_by_foreign_jobs = {
            node.name: node.used.minus(Resources.total(room_of_tasks.get(node.name, ()))) for node in snapshot.nodes
        }
        #: What is used on each node: by foreign jobs, and by what the search has placed there so far (claims, moved
        #: tasks, and tasks that jobs lack).
        self._taken = dict(self.used_by_foreign_jobs)
        #: What is held on a node for claims that start later: it is free for no task and no share of a node. Claims to
        #: whole nodes do not count it: their jobs may end before that, and reservations may begin.
        self._held_for_later: dict[str, Resources] = defaultdict(Resources)
        floors = dict(snapshot.floors)
        #: Of each group, how many tasks it has above its floor, and how many it was decided to have above it. If it has
        #: more than was decided, the others are replacements of tasks that move.
        self._above_floor: dict[TaskGroup, int] = {}
        self._decided_above_floor: dict[TaskGroup, int] = {}
        for key, held in snapshot.held().items():
            floor = floors.get(key, jobs.requests[key].min_size)
            for role in TASK_ROLES:
                group, least = (key, role), floor.count(role)
                self._above_floor[group] = max(held.count(role) - least, 0)
                self._decided_above_floor[group] = allocations.get(key, held).count(role) - least
        #: Jobs without tasks whose minimum size has room (``take_lacked``).
        self.with_minimum: set[JobKey] = set()
        #: Changes that can be undone: mapping, key and former value.
        self._undo_log: list[tuple[dict[Any, Any], Any, Any]] = []
        #: What is free on nodes, in thousandths, where it was asked for since it changed last.
        self._free: dict[str, dict[str, int]] = {}

    def _leaving_order(self, task: Task) -> tuple[bool, bool, int]:
        return task in self.rank_0_workers, *leaving_order(task)

    @property
    def undo_point(self) -> int:
        """The state of now, for ``undo``."""
        return len(self._undo_log)

    def undo(self, undo_point: int) -> None:
        """Take back all changes since that state."""
        while len(self._undo_log) > undo_point:
            mapping, key, value = self._undo_log.pop()
            mapping[key] = value
            self._free.pop(key, None)

    def change(self, mapping: dict[Any, Any], key: Any, value: object) -> None:
        """Change a value in a mapping such that ``undo`` takes it back."""
        self._undo_log.append((mapping, key, mapping[key]))
        mapping[key] = value
        self._free.pop(key, None)

    def use(self, node: str, room: Resources) -> None:
        """Take room on a node, whether it is free or not."""
        self.change(self._taken, node, self._taken[node] + room)

    def hold_for_later(self, node: str, room: Resources) -> None:
        """Hold room on a node for a claim that starts later."""
        self.change(self._held_for_later, node, self._held_for_later[node] + room)

    def is_held_for_later(self, node: str) -> bool:
        """Whether room on a node is held for a claim that starts later."""
        return bool(self._held_for_later[node].thousandths)

    def ignore_foreign_jobs(self, node: str) -> Resources:
        """Count as free what foreign jobs use on a node; returns it, for ``use``."""
        others = self.used_by_foreign_jobs[node]
        self.change(self._taken, node, self._taken[node].minus(others))
        return others

    def remove(self, node: str, task: Task) -> None:
        """Take a task off a node."""
        self.change(self.tasks_on, node, tuple(other for other in self.tasks_on[node] if other is not task))

    def can_spare(self, task: Task) -> bool:
        """Whether the job of a task has more of its role than its floor."""
        return self._above_floor.get(task.group, 0) > 0

    def can_spare_for_good(self, task: Task) -> bool:
        """The same, by what is decided for the job: a replacement of a task that moves would be started again."""
        return self.can_spare(task) and self._decided_above_floor[task.group] > 0

    def spare(self, task: Task) -> None:
        """Count a task as gone from its job."""
        group = task.group
        self.change(self._above_floor, group, self._above_floor[group] - 1)

    def fits(self, demand: Resources, node: str) -> bool:
        """Whether a demand is free on a node."""
        free = self._free_on(node)
        for name, amount in demand.thousandths:  # noqa: SIM110 - a generator takes longer, and this is asked often
            if free.get(name, 0) < amount:
                return False
        return True

    def free(self, node: str) -> Resources:
        """What is free on a node."""
        return Resources(tuple((name, amount) for name, amount in sorted(self._free_on(node).items()) if amount > 0))

    def _free_on(self, node: str) -> Mapping[str, int]:
        """What is free on a node, in thousandths; negative where more is used than it has."""
        free = self._free.get(node)
        if free is None:
            free = dict(self.capacity[node].thousandths)
            for used in (self._taken[node], self._held_for_later[node], *(task.room for task in self.tasks_on[node])):
                for name, amount in used.thousandths:
                    free[name] = free.get(name, 0) - amount
            self._free[node] = free
        return free

    def leavers(self, node: str, share: Resources | None, claim: Claim) -> list[Task] | None:
        """Tasks of jobs that yield to a claim, without which its share of a node is free; None if there are none such.

        ``share``: None if the claim takes the whole node.
        """

        def yields(task: Task) -> bool:
            return self._jobs.yields(task.job, claim)

        if share is not None:
            return self._without_which_fits(share, node, yields)
        here = self.tasks_on[node]
        return None if self._taken[node].thousandths or not all(map(yields, here)) else list(here)

    def _without_which_fits(self, demand: Resources, node: str, may_leave: Callable[[Task], bool]) -> list[Task] | None:
        """Tasks without which a demand is free on a node, of those that may leave; None if that is not enough."""
        free = self._free_on(node)
        short = {name: amount - free.get(name, 0) for name, amount in demand.thousandths if amount > free.get(name, 0)}
        leavers: list[Task] = []
        for task in self.tasks_on[node] if short else ():
            if may_leave(task) and any(name in short for name, _ in task.room.thousandths):
                leavers.append(task)
                for name, amount in task.room.thousandths:
                    if name in short:
                        short[name] -= amount
                short = {name: amount for name, amount in short.items() if amount > 0}
            if not short:
                break
        return None if short else leavers

    def take(
        self, key: JobKey, demand: Resources, nodes: Collection[str], may_leave: Callable[[Task], bool] | None
    ) -> bool:
        """Take a demand of a job on the first node where it is free, or else where tasks that may leave make room."""
        allowed = self.may_use.get(key)
        if allowed is not None:
            nodes = [name for name in nodes if name in allowed]
        found = next((name for name in nodes if self.fits(demand, name)), None)
        if found is None and may_leave is not None and any(self._above_floor.values()):
            with_tasks = (name for name in nodes if self.tasks_on[name])
            found = next((name for name in with_tasks if self._make_room(name, demand, may_leave)), None)
        if found is not None:
            self.use(found, demand)
        return found is not None

    def _make_room(self, node: str, demand: Resources, may_leave: Callable[[Task], bool]) -> bool:
        """Let tasks leave a node, so that a demand fits there; no worker of rank 0 leaves for that (``place``)."""
        undo_point = self.undo_point
        leavers = self._without_which_fits(
            demand, node, lambda task: may_leave(task) and task not in self.rank_0_workers
        )
        for task in leavers or ():
            if not may_leave(task):
                self.undo(undo_point)
                return False
            group = task.group
            self.change(self._decided_above_floor, group, self._decided_above_floor[group] - 1)
            self.spare(task)
            self.remove(node, task)
        return leavers is not None

    def take_lacked(self, keys: Iterable[JobKey], claimed: Collection[str], passed_over: Collection[JobKey]) -> None:
        """Take the room of what jobs lack where it is free or others can spare it; of a minimum size all or nothing.

        Nodes that claims had in the last tick (``claimed``) come last, so that claims do not go from node to node. Jobs
        that the policy has ``passed_over`` take only free room, and none on these nodes.
        """
        failed = set[tuple[JobDemand, bool, bool]]()
        first = [name for name in self.capacity if name not in claimed]
        last = [name for name in self.capacity if name in claimed]
        for key in keys:
            request, only_free, whole = self._jobs.requests[key], key in passed_over, key in self._jobs.without_tasks
            lacked = job_demand(request, self._jobs.lacks[key], self.may_use.get(key)), only_free, whole
            if lacked in failed:
                continue
            nodes, may_leave = ([first], None) if only_free else ([first, last], self.can_spare_for_good)
            if not self._take_lacked(key, nodes, may_leave):
                failed.add(lacked)  # room only becomes less
            elif whole:
                self.with_minimum.add(key)

    def _take_lacked(
        self, key: JobKey, nodes: Iterable[Collection[str]], may_leave: Callable[[Task], bool] | None
    ) -> bool:
        """Take the room of what a job lacks; returns whether any was found."""
        undo_point = self.undo_point
        for role in TASK_ROLES:
            demand = self._jobs.requests[key].demand(role)
            for _ in range(self._jobs.lacks[key].count(role)):
                if any(self.take(key, demand, names, may_leave) for names in nodes):
                    continue
                if key in self._jobs.without_tasks:
                    self.undo(undo_point)
                    return False
                break
        return self.undo_point > undo_point
