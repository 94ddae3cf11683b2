"""Target nodes: the nodes that a decision names for its jobs' tasks, compared with those where the tasks run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from dl2d.core.cluster import Task, TaskGroup
from dl2d.core.decision import Constraint, Decision
from dl2d.core.jobs import TASK_ROLES, JobKey
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.packing.room_in_limits import Blocked
from dl2d.core.packing.task_leaving_order import LeavingOrder
from dl2d.core.packing.tasks_that_make_room import TaskGroups
from dl2d.core.resources import NO_RESOURCES, Resources


class NamedNodes:
    """The named nodes that have not got their task yet, and the tasks that leave because they run on other nodes."""

    def __init__(
        self,
        decision: Decision,
        groups: TaskGroups,
        packing: Packing,
        rank_0_workers: Collection[Task],
        leaving_order: LeavingOrder,
        overused: Mapping[str, Resources],
        vacating: Collection[Task] = (),
        may_use: Mapping[JobKey, frozenset[str]] = MappingProxyType({}),
    ) -> None:
        """``overused``: by how much more is used than a node has, where claims take room that ``vacating`` hold."""
        self._packing = packing
        self._overused = overused
        self._vacating = vacating
        self._draining = groups.draining
        self._may_use = may_use
        #: Named nodes on which no task of the group runs or starts yet.
        self._unfilled: dict[TaskGroup, list[str]] = defaultdict(list)
        for key, role, node in decision.nodes:
            self._unfilled[key, role].append(node)
        #: Tasks that leave, of the groups whose leaving tasks are chosen here rather than by ``make_room``.
        self.leaving: dict[TaskGroup, list[Task]] = {}
        #: See ``free_later``; None until it is needed.
        self._free_later: dict[str, Resources] | None = None
        for group, group_tasks in groups.wanted.items() if decision.nodes else ():
            count = groups.surplus.get(group, 0)
            if group in self._unfilled or count == len(group_tasks):
                elsewhere = self._match_running(group, group_tasks)
                ordered = sorted(
                    group_tasks,
                    key=lambda task: (
                        task not in vacating,
                        task in rank_0_workers,
                        task.id not in elsewhere,
                        *leaving_order(task),
                    ),
                )
                self.leaving[group] = ordered[:count]

    def has_nodes_for(self, job: JobKey) -> bool:
        """Whether the decision names nodes for new tasks of a job."""
        return any(self._unfilled.get((job, role)) for role in TASK_ROLES)

    def place(self, group: TaskGroup, demand: Resources) -> str | Blocked | None:
        """Add a new task to the packing on the next named node of its group where it will have room.

        Returns the node, or what the task waits for if its room is not free yet, or None if no such node is left.
        """
        nodes = self._unfilled.get(group)
        while nodes:
            node = nodes.pop(0)
            free_later = self.free_later()
            if node not in free_later or not demand.fits_in(free_later[node]):
                continue
            if node not in self._may_use.get(group[0], free_later):
                continue
            self.reserve(node, demand)
            if self._packing.place_on(node, demand, group[0]):
                return node
            return Blocked(group[1], Constraint.CAPACITY, node, demand.shortfalls(self._packing.room_on(node)))
        return None

    def reserve(self, node: str, demand: Resources) -> None:
        """Take resources off what will be free on a node, for a task that starts or waits there."""
        # If it is not computed yet, there is nothing to change: ``packing.room()`` has the placed tasks.
        if self._free_later is not None and node in self._free_later:
            self._free_later[node] = self._free_later[node].minus(demand)

    def release(self, node: str, demand: Resources) -> None:
        """Undo ``reserve`` for a task that is not started after all."""
        if self._free_later is not None and node in self._free_later:
            self._free_later[node] += demand

    def free_later(self) -> dict[str, Resources]:
        """What will be free on each node when all tasks that leave have left, without what is reserved."""
        if self._free_later is None:
            freed: dict[str, list[Resources]] = defaultdict(list)
            for task in {*self._draining, *self._vacating, *chain(*self.leaving.values())}:
                freed[task.node].append(task.room)
            self._free_later = {
                node: Resources.total((free, *freed.get(node, (NO_RESOURCES,)))).minus(
                    self._overused.get(node, NO_RESOURCES)
                )
                for node, free in self._packing.room().items()
            }
        return self._free_later

    def _match_running(self, group: TaskGroup, tasks: Sequence[Task]) -> set[str]:
        """Remove the named nodes on which tasks of the group run; returns the ids of the tasks that run elsewhere."""
        named = Counter(self._unfilled.get(group, ()))
        elsewhere = set()
        for task in sorted(tasks, key=lambda task: task.number):
            if named[task.node] > 0:
                named[task.node] -= 1
                self._unfilled[group].remove(task.node)
            else:
                elsewhere.add(task.id)
        return elsewhere
