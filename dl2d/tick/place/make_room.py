"""Making room: chooses tasks that leave, or move, so that waiting ones fit on a node. Pure.

A decision counts tasks, but a task needs its resources on one node: four GPUs free on four nodes are none for a task of
two. Which tasks of a shrinking job leave therefore depends on the tasks that wait, and a task may be moved to let a
larger one in.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from dl2d.core.cluster import Task, TaskState
from dl2d.core.jobs import JobKey, Role
from dl2d.core.resources import NO_RESOURCES, Resources

#: A task's kind: tasks of one job and role are alike, so it does not matter which of them leaves.
Kind = tuple[JobKey, Role]

#: Maximum number of waiting tasks for which room is made in one tick; the others wait for the next.
MAX_WAITING_TASKS = 64


@dataclass(frozen=True, slots=True)
class WaitingTask:
    """A task that was decided on and fits on no node."""

    kind: Kind
    demand: Resources


@dataclass(frozen=True, slots=True)
class RoomMade:
    """Tasks whose leaving or moving makes room."""

    #: Tasks of shrinking jobs that should be the ones to leave.
    leaving: tuple[Task, ...]
    #: Tasks that another of their kind should replace, and the node where it has room that nobody else waits for.
    moving: tuple[tuple[Task, str], ...]


def make_room(
    wants: Sequence[WaitingTask],
    room: Mapping[str, Resources],
    tasks: Iterable[Task],
    surplus: Mapping[Kind, int],
) -> RoomMade:
    """Choose what leaves or moves, one waiting task after the other, with the fewest and newest tasks disturbed.

    Parameters
    ----------
    wants
        Waiting tasks, in the order in which they should be served.
    room
        What is free on each node that takes tasks, or will be once tasks that are leaving already have left.
    tasks
        Tasks that are meant to stay members, by node.
    surplus
        How many tasks of a kind have to leave anyway.
    """
    if not wants:
        return RoomMade((), ())
    cluster = _Cluster(room, tasks, surplus)
    settled = {want.kind for want in wants}
    leaving: list[Task] = []
    moving: list[tuple[Task, str]] = []
    #: Demands for which no room could be made; forgotten when anything changes.
    hopeless: set[Resources] = set()
    for want in wants[:MAX_WAITING_TASKS]:
        demand = want.demand
        if demand in hopeless:
            continue
        node = cluster.first_with_room(demand)
        if node is None and (found := cluster.fewest_leavers(demand)) is not None:
            node, victims = found
            cluster.clear(node, victims)
            leaving += victims
        if node is not None:
            cluster.take(node, demand)
            hopeless.clear()
        elif (mover := cluster.mover(demand, settled)) is not None:
            cluster.move(*mover)
            cluster.take(mover[0].node, demand)
            moving.append(mover)
            hopeless.clear()
        else:
            hopeless.add(demand)
    return RoomMade(tuple(leaving), tuple(moving))


def leaving_order(task: Task) -> tuple[bool, int]:
    """Order in which tasks of a kind leave: those that have not begun, then the newest."""
    begun = task.state.rank >= TaskState.JOINED.rank
    return begun, -task.number


class _Cluster:
    """Free resources and tasks by node while room is made. Answers are kept until the node they are about changes."""

    def __init__(self, room: Mapping[str, Resources], tasks: Iterable[Task], surplus: Mapping[Kind, int]) -> None:
        self._free = dict(room)
        self._names = list(room)
        self._place = {name: place for place, name in enumerate(self._names)}
        #: How many tasks of a kind have yet to leave.
        self._left = Counter({kind: count for kind, count in surplus.items() if count > 0})
        self._tasks = [task for task in tasks if task.node in self._free]
        #: Tasks of these kinds by node, those that leave first before others.
        self._may_leave = _by_node(task for task in self._tasks if (task.job, task.role) in self._left)
        self._leaving_places = sorted(self._place[name] for name in self._may_leave)
        #: By demand and place, whether it fits, and whose leaving would make it fit.
        self._fits: dict[Resources, list[bool]] = {}
        self._leavers: dict[Resources, dict[int, _Leavers]] = {}

    def first_with_room(self, demand: Resources) -> str | None:
        place = _first(self._fitting(demand), 0)
        return None if place is None else self._names[place]

    def fewest_leavers(self, demand: Resources) -> tuple[str, Sequence[Task]] | None:
        """The node where the fewest surplus tasks, then the newest, would have to leave, and those tasks."""
        if not self._leaving_places:
            return None
        known = self._leavers.setdefault(demand, {})
        for place in self._leaving_places:
            if place not in known:
                known[place] = self._leavers_of(demand, self._names[place])
        # Some may count on surplus tasks that were used elsewhere since. That can only make an answer worse, so it is
        # enough to compute the best one again until it holds.
        while True:
            place = min(self._leaving_places, key=lambda place: known[place].rank)
            leavers = known[place]
            if all(self._left[kind] >= count for kind, count in leavers.kinds):
                return (self._names[place], leavers.tasks) if leavers.tasks else None
            known[place] = self._leavers_of(demand, self._names[place])

    def clear(self, node: str, victims: Iterable[Task]) -> None:
        """Take out tasks that leave."""
        for task in victims:
            self._left[task.job, task.role] -= 1
            self._drop(task)
            self._free[node] += task.demand
        self._changed(node)

    def take(self, node: str, demand: Resources) -> None:
        self._free[node] = self._free[node].minus(demand)
        self._changed(node)

    def move(self, task: Task, target: str) -> None:
        """Put a task on another node."""
        self._drop(task)
        self._free[task.node] += task.demand
        self.take(target, task.demand)
        self._changed(task.node)

    def mover(self, demand: Resources, settled: Collection[Kind]) -> tuple[Task, str] | None:
        """A task whose place the demand could have, and a node with room for it now; none of ``settled`` kinds."""
        #: By demand the first two nodes with room: one of them is another than the task's own.
        firsts: dict[Resources, tuple[str | None, str | None]] = {}
        for node, tasks in self._on_node.items():
            #: By demand, where a task of this node could go to make room; None where that is nowhere.
            targets: dict[Resources, str | None] = {}
            for task in tasks:
                if task.demand not in targets:
                    if task.demand not in firsts:
                        firsts[task.demand] = self._first_two_with_room(task.demand)
                    first, second = firsts[task.demand]
                    other = second if first == node else first
                    makes_room = other is not None and demand.fits_in(self._free[node] + task.demand)
                    targets[task.demand] = other if makes_room else None
                target = targets[task.demand]
                if target is None or task.state is not TaskState.CONFIRMED:
                    continue
                kind = task.job, task.role
                if kind not in settled and self._left[kind] <= 0:
                    return task, target
        return None

    @cached_property
    def _on_node(self) -> dict[str, list[Task]]:
        """All tasks by node; put in order when the first move is looked for."""
        return _by_node(self._tasks)

    def _drop(self, task: Task) -> None:
        self._tasks.remove(task)
        if "_on_node" in self.__dict__:
            self._on_node[task.node].remove(task)
        if task in self._may_leave.get(task.node, ()):
            self._may_leave[task.node].remove(task)

    def _first_two_with_room(self, demand: Resources) -> tuple[str | None, str | None]:
        fits = self._fitting(demand)
        first = _first(fits, 0)
        second = None if first is None else _first(fits, first + 1)
        return None if first is None else self._names[first], None if second is None else self._names[second]

    def _fitting(self, demand: Resources) -> list[bool]:
        if demand not in self._fits:
            self._fits[demand] = [demand.fits_in(free) for free in self._free.values()]
        return self._fits[demand]

    def _changed(self, node: str) -> None:
        place = self._place[node]
        for demand, fits in self._fits.items():
            fits[place] = demand.fits_in(self._free[node])
        for known in self._leavers.values():
            known.pop(place, None)

    def _leavers_of(self, demand: Resources, node: str) -> _Leavers:
        """Fewest surplus tasks of a node whose leaving lets the demand in (greedily, those that help most first)."""
        have = dict(self._free[node].thousandths)
        short = {name: amount - have.get(name, 0) for name, amount in demand.thousandths if amount > have.get(name, 0)}
        tasks = list(self._may_leave[node])
        victims: list[Task] = []
        kinds: dict[Kind, int] = {}
        while short:
            best, helped = None, 0
            for task in tasks:
                helps = sum([name in short for name, _ in task.demand.thousandths])
                if helps > helped and self._left[kind := (task.job, task.role)] > kinds.get(kind, 0):
                    best, helped = task, helps
            if best is None:
                return _NO_LEAVERS
            kind = best.job, best.role
            kinds[kind] = kinds.get(kind, 0) + 1
            victims.append(best)
            tasks.remove(best)
            for name, amount in best.demand.thousandths:
                if name in short:
                    short[name] -= amount
            short = {name: amount for name, amount in short.items() if amount > 0}
        newest = min([task.number for task in victims], default=0)
        return _Leavers(tuple(victims), tuple(kinds.items()), (len(victims), -newest))


@dataclass(frozen=True, slots=True)
class _Leavers:
    """Tasks whose leaving makes room on a node, none where it cannot be made; how many of each kind; rank."""

    tasks: tuple[Task, ...] = ()
    kinds: tuple[tuple[Kind, int], ...] = ()
    rank: tuple[float, int] = (math.inf, 0)


_NO_LEAVERS = _Leavers()


def _by_node(tasks: Iterable[Task]) -> dict[str, list[Task]]:
    """Tasks by node, those first that leave first."""
    found: dict[str, list[Task]] = {}
    for task in sorted(tasks, key=leaving_order):
        found.setdefault(task.node, []).append(task)
    return found


def _first(fits: list[bool], since: int) -> int | None:
    try:
        return fits.index(True, since)
    except ValueError:
        return None


def free_after_leaving(
    room: Mapping[str, Resources], tasks: Iterable[Task], leaving: Iterable[Task] = ()
) -> dict[str, Resources]:
    """What is free on each node, and what will be when the tasks that are on their way out have left.

    ``leaving`` are tasks that are about to be sent the same way.
    """
    gone: dict[str, list[Resources]] = defaultdict(list)
    for task in chain((task for task in tasks if not task.state.wanted), leaving):
        gone[task.node].append(task.demand)
    return {name: Resources.total((here, *gone.get(name, (NO_RESOURCES,)))) for name, here in room.items()}
