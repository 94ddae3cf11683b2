"""Making room: chooses the tasks that leave or move so that waiting tasks fit on a node. Pure.

A decision says how many tasks a job has, but each task needs its resources on one node: one free GPU on each of four
nodes does not help a task that needs two. Therefore the tasks that wait determine which tasks of a shrinking job leave,
and a task may be moved to another node to make room for a larger one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from dl2d.core.cluster import Task, TaskState
from dl2d.core.jobs import JobKey, Role
from dl2d.core.resources import Resources
from dl2d.tick.place.task_leaving_order import leaving_order

#: The tasks of one job and role. They are alike, so a job may lose any of them.
TaskGroup = tuple[JobKey, Role]

#: Maximum number of waiting tasks for which room is made in one tick; the others wait for the next.
MAX_WAITING_TASKS = 64


@dataclass(frozen=True, slots=True)
class WaitingTask:
    """A task that was decided on and has not started."""

    group: TaskGroup
    demand: Resources


@dataclass(frozen=True, slots=True)
class RoomMade:
    """Tasks that make room for waiting ones."""

    #: Tasks of shrinking jobs that leave.
    leaving: tuple[Task, ...]
    #: Tasks that move, each with the node where its replacement has room that no waiting task needs.
    moving: tuple[tuple[Task, str], ...]


def make_room(
    waiting: Sequence[WaitingTask],
    free: Mapping[str, Resources],
    tasks: Iterable[Task],
    surplus: Mapping[TaskGroup, int],
    may_use: Mapping[JobKey, frozenset[str]] = MappingProxyType({}),
) -> RoomMade:
    """Choose the tasks that leave or move, for one waiting task after the other.

    A waiting task gets the first node with room; else the node where the fewest surplus tasks have to leave; else that
    of a task that can move. Of nodes where equally many have to leave, it gets the one where the lowest number among
    these tasks is highest (``Task.number``, which counts the tasks of a job and role).

    Parameters
    ----------
    waiting
        Waiting tasks, in the order in which they get room.
    free
        What is free on each node that takes tasks, or will be when draining tasks have ended.
    tasks
        Tasks that may leave or move.
    surplus
        How many tasks of a group have to leave in any case.
    may_use
        The nodes that each job may use, without jobs that may use all.
    """
    cluster = _Cluster(free, tasks, surplus, may_use)
    waiting_groups = {task.group for task in waiting}
    leaving: list[Task] = []
    moving: list[tuple[Task, str]] = []
    #: Demands for which no room could be made since the cluster last changed.
    hopeless: set[_Wanted] = set()
    for task in waiting[:MAX_WAITING_TASKS]:
        demand = _Wanted(task.demand, may_use.get(task.group[0]))
        if demand in hopeless:
            continue
        node = cluster.first_with_room(demand)
        if node is None and (cheapest := cluster.fewest_leavers(demand)) is not None:
            node, leavers = cheapest
            cluster.remove(node, leavers)
            leaving += leavers
        if node is None and (move := cluster.find_move(demand, waiting_groups)) is not None:
            node = move[0].node
            cluster.move(*move)
            moving.append(move)
        if node is None:
            hopeless.add(demand)
        else:
            cluster.reserve(node, task.demand)
            hopeless.clear()
    return RoomMade(tuple(leaving), tuple(moving))


class _Wanted(NamedTuple):
    """Room that a task needs on one of the nodes that its job may use; None: on any."""

    demand: Resources
    nodes: frozenset[str] | None

    def fits(self, node: str, free: Resources) -> bool:
        """Whether a node that has so much free is one of them and has the room."""
        return (self.nodes is None or node in self.nodes) and self.demand.fits_in(free)


class _Cluster:
    """Free resources and tasks of each node while room is made. Results are cached until their node changes."""

    def __init__(
        self,
        free: Mapping[str, Resources],
        tasks: Iterable[Task],
        surplus: Mapping[TaskGroup, int],
        may_use: Mapping[JobKey, frozenset[str]],
    ) -> None:
        self._may_use = may_use
        self._free = dict(free)
        self._names = list(free)
        self._index = {name: index for index, name in enumerate(self._names)}
        #: How many tasks of a group still have to leave.
        self._surplus = Counter({group: count for group, count in surplus.items() if count > 0})
        self._tasks = [task for task in tasks if task.node in self._free]
        #: Tasks of these groups by node, in the order in which they leave.
        self._leavable = _by_node(task for task in self._tasks if (task.job, task.role) in self._surplus)
        self._leavable_nodes = sorted(self._leavable, key=self._index.__getitem__)
        #: By demand, whether it fits on each node, in the order of the nodes.
        self._fits: dict[_Wanted, list[bool]] = {}
        #: By demand and node, the tasks whose leaving makes it fit.
        self._leavers: dict[_Wanted, dict[str, _Leavers]] = {}

    def first_with_room(self, demand: _Wanted) -> str | None:
        """The first node on which a demand fits now."""
        return self._first(self._fitting(demand), 0)

    def fewest_leavers(self, demand: _Wanted) -> tuple[str, Sequence[Task]] | None:
        """The node where the fewest surplus tasks have to leave (see ``make_room``), and those tasks."""
        if not self._leavable_nodes:
            return None
        cached = self._leavers.setdefault(demand, {})
        for node in self._leavable_nodes:
            if node not in cached:
                cached[node] = self._leavers_of(demand, node)
        # Cached results may count on surplus tasks that have left other nodes since. Such a result can only become
        # worse, so it is enough to compute the best one again until it is up to date.
        while True:
            node = min(self._leavable_nodes, key=lambda node: cached[node].rank)
            leavers = cached[node]
            if all(self._surplus[group] >= count for group, count in leavers.groups):
                return (node, leavers.tasks) if leavers.tasks else None
            cached[node] = self._leavers_of(demand, node)

    def remove(self, node: str, tasks: Iterable[Task]) -> None:
        """Take out surplus tasks of a node, which leave."""
        for task in tasks:
            self._surplus[task.job, task.role] -= 1
            self._drop(task)
            self._free[node] += task.room
        self._changed(node)

    def reserve(self, node: str, demand: Resources) -> None:
        """Take resources off what is free on a node."""
        self._free[node] = self._free[node].minus(demand)
        self._changed(node)

    def move(self, task: Task, target: str) -> None:
        """Take a task off its node, which has its room free then, and reserve its demand on another one."""
        self._drop(task)
        self._free[task.node] += task.room
        self._changed(task.node)
        self.reserve(target, task.demand)

    def find_move(self, demand: _Wanted, waiting_groups: Collection[TaskGroup]) -> tuple[Task, str] | None:
        """A task without which a demand fits on its node, and another node that has room for the task.

        What leaving tasks still hold on the other node counts as free. Only confirmed tasks move, and none of a group
        that waits for room itself or that has tasks leaving.
        """
        #: By demand of a task, the first two nodes that have room for it, at least one of which is not its own.
        first_two: dict[_Wanted, tuple[str | None, str | None]] = {}
        for node, tasks in self._on_node.items():
            #: By demand and room of a task of this node, where it can move to make room; None if it cannot.
            targets: dict[tuple[_Wanted, Resources], str | None] = {}
            for task in tasks:
                moved = _Wanted(task.demand, self._may_use.get(task.job))
                alike = moved, task.room
                if alike not in targets:
                    if moved not in first_two:
                        first_two[moved] = self._first_two_with_room(moved)
                    first, second = first_two[moved]
                    target = second if first == node else first
                    makes_room = target is not None and demand.fits(node, self._free[node] + task.room)
                    targets[alike] = target if makes_room else None
                target = targets[alike]
                if target is None or task.state is not TaskState.CONFIRMED:
                    continue
                group = task.job, task.role
                if group not in waiting_groups and self._surplus[group] <= 0:
                    return task, target
        return None

    @cached_property
    def _on_node(self) -> dict[str, list[Task]]:
        """All tasks by node; sorted when a move is first looked for."""
        return _by_node(self._tasks)

    def _drop(self, task: Task) -> None:
        self._tasks.remove(task)
        if "_on_node" in self.__dict__:
            self._on_node[task.node].remove(task)
        if task in self._leavable.get(task.node, ()):
            self._leavable[task.node].remove(task)

    def _first_two_with_room(self, demand: _Wanted) -> tuple[str | None, str | None]:
        fits = self._fitting(demand)
        first = self._first(fits, 0)
        return first, None if first is None else self._first(fits, self._index[first] + 1)

    def _first(self, fits: list[bool], start: int) -> str | None:
        """The first node from index ``start`` on for which ``fits`` holds."""
        try:
            return self._names[fits.index(True, start)]
        except ValueError:
            return None

    def _fitting(self, demand: _Wanted) -> list[bool]:
        if demand not in self._fits:
            self._fits[demand] = [demand.fits(node, free) for node, free in self._free.items()]
        return self._fits[demand]

    def _changed(self, node: str) -> None:
        """Bring the caches up to date after what is free on a node changed."""
        index = self._index[node]
        for demand, fits in self._fits.items():
            fits[index] = demand.fits(node, self._free[node])
        for cached in self._leavers.values():
            cached.pop(node, None)

    def _leavers_of(self, wanted: _Wanted, node: str) -> _Leavers:
        """Few surplus tasks of a node whose leaving makes a demand fit, chosen greedily.

        The task that has the most of the resources that are missing is chosen first.
        """
        if wanted.nodes is not None and node not in wanted.nodes:
            return _NO_LEAVERS
        free, demand = dict(self._free[node].thousandths), wanted.demand
        short = {name: amount - free.get(name, 0) for name, amount in demand.thousandths if amount > free.get(name, 0)}
        candidates = list(self._leavable[node])
        leavers: list[Task] = []
        groups: Counter[TaskGroup] = Counter()
        while short:
            best, most_helped = None, 0
            for task in candidates:
                helped = sum([name in short for name, _ in task.room.thousandths])
                group = task.job, task.role
                if helped > most_helped and self._surplus[group] > groups[group]:
                    best, most_helped = task, helped
            if best is None:
                return _NO_LEAVERS
            groups[best.job, best.role] += 1
            leavers.append(best)
            candidates.remove(best)
            for name, amount in best.room.thousandths:
                if name in short:
                    short[name] -= amount
            short = {name: amount for name, amount in short.items() if amount > 0}
        lowest = min([task.number for task in leavers], default=0)
        return _Leavers(tuple(leavers), tuple(groups.items()), (len(leavers), -lowest))


@dataclass(frozen=True, slots=True)
class _Leavers:
    """Tasks whose leaving makes a demand fit on a node."""

    #: Empty if no tasks can do so.
    tasks: tuple[Task, ...] = ()
    #: How many of the tasks are of each group.
    groups: tuple[tuple[TaskGroup, int], ...] = ()
    #: The node with the lowest rank is chosen: number of tasks, then minus the lowest number among them.
    rank: tuple[float, int] = (math.inf, 0)


_NO_LEAVERS = _Leavers()


def _by_node(tasks: Iterable[Task]) -> dict[str, list[Task]]:
    """Tasks by node, in the order in which they leave."""
    by_node: dict[str, list[Task]] = {}
    for task in sorted(tasks, key=leaving_order):
        by_node.setdefault(task.node, []).append(task)
    return by_node
