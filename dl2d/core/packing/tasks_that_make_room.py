"""Making room: chooses the tasks that leave or move so that waiting tasks fit on a node.

A decision says how many tasks a job has, but each task needs its resources on one node: one free GPU on each of four
nodes does not help a task that needs two. Therefore the tasks that wait determine which tasks of a shrinking job leave,
and a task may be moved to another node, or several of a node, to make room for a larger one.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from dl2d.core.cluster import Snapshot, Task, TaskGroup, TaskState
from dl2d.core.decision import Decision
from dl2d.core.jobs import TASK_ROLES, JobKey
from dl2d.core.packing.task_leaving_order import leaving_order
from dl2d.core.resources import NO_RESOURCES, Resources

#: Maximum number of waiting tasks for which room is made in one tick; the others wait for the next.
MAX_WAITING_TASKS = 64

#: Maximum number of tasks that move for one waiting task: a worker and a server for each GPU of a node with 8 GPUs.
MAX_MOVES = 16

#: Maximum number of nodes that are examined for such moves.
MAX_EXAMINED_NODES = 100


@dataclass(frozen=True, slots=True)
class TaskGroups:
    """The tasks of a snapshot by job and role, beside what was decided."""

    #: Tasks that are meant to run.
    wanted: Mapping[TaskGroup, list[Task]]
    #: How many of these have to leave, since fewer were decided.
    surplus: Mapping[TaskGroup, int]
    #: Tasks that leave already, and hold their resources until then.
    draining: Sequence[Task]

    @classmethod
    def of(cls, snapshot: Snapshot, decision: Decision) -> TaskGroups:
        """Group the tasks of a snapshot."""
        allocations, held = decision.allocations(), snapshot.held()
        wanted: dict[TaskGroup, list[Task]] = defaultdict(list)
        for task in snapshot.tasks:
            if task.state.wanted:
                wanted[task.group].append(task)
        surplus = {
            (job.key, role): max(held[job.key].count(role) - allocations[job.key].count(role), 0)
            for job in snapshot.jobs
            if job.key in allocations
            for role in TASK_ROLES
        }
        return cls(wanted, surplus, tuple(task for task in snapshot.tasks if not task.state.wanted))


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
    #: Waiting tasks for which no room was made, those beyond ``MAX_WAITING_TASKS`` included.
    without_room: tuple[WaitingTask, ...] = ()


def make_room(
    waiting: Sequence[WaitingTask],
    free: Mapping[str, Resources],
    tasks: Iterable[Task],
    surplus: Mapping[TaskGroup, int],
    may_use: Mapping[JobKey, frozenset[str]] = MappingProxyType({}),
) -> RoomMade:
    """Choose the tasks that leave or move, for one waiting task after the other.

    A waiting task gets the first node with room; else the node where the fewest surplus tasks have to leave; else, of
    the ``MAX_EXAMINED_NODES`` that lack least, one where few other tasks have to move, at most ``MAX_MOVES``. Of nodes
    where equally many have to leave, it gets the one where the lowest number among these tasks is highest
    (``Task.number``, which counts the tasks of a job and role).

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
    cluster = _Cluster(free, tasks, surplus, may_use, {task.group for task in waiting})
    leaving: list[Task] = []
    moving: list[tuple[Task, str]] = []
    without_room = list(waiting[MAX_WAITING_TASKS:])
    #: Demands for which no room could be made since the cluster last changed.
    without_room_now: set[_Wanted] = set()
    for task in waiting[:MAX_WAITING_TASKS]:
        demand = _Wanted(task.demand, may_use.get(task.group[0]))
        if demand in without_room_now:
            without_room.append(task)
            continue
        node = cluster.first_with_room(demand)
        if node is None and (cheapest := cluster.fewest_leavers(demand)) is not None:
            node, leavers = cheapest
            cluster.remove(node, leavers)
            leaving += leavers
        if node is None and (vacated := cluster.few_moves(demand)) is not None:
            node = vacated.node
            cluster.remove(node, vacated.leaving)
            leaving += vacated.leaving
            for move in vacated.moving:
                cluster.move(*move)
            moving += vacated.moving
        if node is None:
            without_room_now.add(demand)
            without_room.append(task)
        else:
            cluster.reserve(node, task.demand)
            without_room_now.clear()
    return RoomMade(tuple(leaving), tuple(moving), tuple(without_room))


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
        waiting: Collection[TaskGroup],
    ) -> None:
        self._may_use = may_use
        self._waiting = waiting
        self._free = dict(free)
        self._names = list(free)
        self._index = {name: index for index, name in enumerate(self._names)}
        #: How many tasks of a group still have to leave.
        self._surplus = Counter({group: count for group, count in surplus.items() if count > 0})
        self._tasks = {(task.job, task.id): task for task in tasks if task.node in self._free}
        #: Tasks of these groups by node, in the order in which they leave.
        self._leavable = _by_node(task for task in self._tasks.values() if task.group in self._surplus)
        self._leavable_nodes = sorted(self._leavable, key=self._index.__getitem__)
        #: By demand, whether it fits on each node, in the order of the nodes.
        self._fits: dict[_Wanted, list[bool]] = {}
        #: By demand and node, the tasks whose leaving makes it fit.
        self._leavers: dict[_Wanted, dict[str, _Leavers]] = {}
        #: By demand, what it lacks on each node, in the order of the nodes.
        self._lacks: dict[_Wanted, list[float]] = {}

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
            self._surplus[task.group] -= 1
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

    def few_moves(self, demand: _Wanted) -> _Vacated | None:
        """A node where few tasks have to move so that a demand fits, with the surplus tasks that leave it.

        ``MAX_EXAMINED_NODES`` are examined, those that lack least for the demand. What leaving tasks still hold on
        other nodes counts as free there. Only confirmed tasks move, and none of a group that waits for room itself.
        """
        if demand not in self._lacks:
            self._lacks[demand] = [self._lack(demand, node) for node in self._names]
        lacks = self._lacks[demand]
        best: _Vacated | None = None
        for index in heapq.nsmallest(MAX_EXAMINED_NODES, range(len(lacks)), key=lacks.__getitem__):
            most = MAX_MOVES if best is None else len(best.moving) - 1
            if most < 1 or math.isinf(lacks[index]):
                break
            best = self._vacate(self._names[index], demand, most) or best
        return best

    def _lack(self, wanted: _Wanted, node: str) -> float:
        """What a demand lacks on a node, as a part of each resource, summed; inf if the tasks there hold less."""
        if not wanted.fits(node, self._free[node] + Resources.total(task.room for task in self._on_node.get(node, ()))):
            return math.inf
        free = dict(self._free[node].thousandths)
        return sum(max(amount - free.get(name, 0), 0) / amount for name, amount in wanted.demand.thousandths)

    def _vacate(self, node: str, demand: _Wanted, most: int) -> _Vacated | None:
        """Few tasks of a node whose leaving and moving makes a demand fit; None if more than ``most`` have to move."""
        free = self._free[node]
        surplus = self._surplus.copy()
        leaving: list[Task] = []
        movable: list[Task] = []
        for task in self._on_node[node]:
            group = task.group
            if surplus[group] > 0:
                surplus[group] -= 1
                leaving.append(task)
                free += task.room
            elif task.state is TaskState.CONFIRMED and group not in self._waiting:
                movable.append(task)
        #: What tasks that move take on other nodes.
        taken: dict[str, Resources] = {}
        moving: list[tuple[Task, str]] = []
        alone = next((task for task in movable if demand.fits(node, free + task.room)), None)
        for task in movable if alone is None else (alone, *movable):
            if demand.fits(node, free):
                break
            lacking = {short.resource for short in demand.demand.shortfalls(free)}
            if lacking.isdisjoint(name for name, _ in task.room.thousandths):
                continue
            if (target := self._target(task, taken)) is not None:
                taken[target] = taken.get(target, NO_RESOURCES) + task.demand
                moving.append((task, target))
                free += task.room
        # Those that are not needed, since others have more room, stay.
        for move in tuple(moving):
            if demand.fits(node, free.minus(move[0].room)):
                moving.remove(move)
                free = free.minus(move[0].room)
        for task in tuple(leaving):
            if demand.fits(node, free.minus(task.room)):
                leaving.remove(task)
                free = free.minus(task.room)
        return _Vacated(node, leaving, moving) if demand.fits(node, free) and 0 < len(moving) <= most else None

    def _target(self, task: Task, taken: Mapping[str, Resources]) -> str | None:
        """The first other node with room for a task beside what is ``taken`` there."""
        wanted = _Wanted(task.demand, self._may_use.get(task.job))
        fits = self._fitting(wanted)
        node = self._first(fits, 0)
        while node is not None and (
            node == task.node or (node in taken and not wanted.fits(node, self._free[node].minus(taken[node])))
        ):
            node = self._first(fits, self._index[node] + 1)
        return node

    @cached_property
    def _on_node(self) -> dict[str, list[Task]]:
        """Tasks that may leave or move, by node; sorted when a move is first looked for."""
        return _by_node(
            task
            for task in self._tasks.values()
            if task.group in self._surplus or (task.state is TaskState.CONFIRMED and task.group not in self._waiting)
        )

    def _drop(self, task: Task) -> None:
        del self._tasks[task.job, task.id]
        if "_on_node" in self.__dict__:
            self._on_node[task.node].remove(task)
        if task in self._leavable.get(task.node, ()):
            self._leavable[task.node].remove(task)

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
        for demand, lacks in self._lacks.items():
            lacks[index] = self._lack(demand, node)

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
                group = task.group
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


@dataclass(frozen=True, slots=True)
class _Vacated:
    """Tasks of a node that leave, and others with the node that each moves to."""

    node: str
    leaving: Sequence[Task]
    moving: Sequence[tuple[Task, str]]


def _by_node(tasks: Iterable[Task]) -> dict[str, list[Task]]:
    """Tasks by node, in the order in which they leave."""
    by_node: dict[str, list[Task]] = {}
    for task in sorted(tasks, key=leaving_order):
        by_node.setdefault(task.node, []).append(task)
    return by_node
