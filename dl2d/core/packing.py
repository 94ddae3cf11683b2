"""Tasks on nodes: which fit, where, and what is missing when they don't."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dl2d.core.cluster import Node, NodeState, Task
from dl2d.core.decision import Constraint
from dl2d.core.jobs import Allocation, Job, JobKey, Role
from dl2d.core.placement import Placement
from dl2d.core.resources import NO_RESOURCES, Resources, Shortfall

#: A node in a heap: its place in the order, which one it is, and its count of changes when it was put in.
_Entry = tuple[float, int, int]
#: The demand that every node has room for.
_ANY: tuple[int, ...] = ()

#: A task that was added: its node, its demand, and whose incumbent it was.
_Step = tuple[int, tuple[int, ...], tuple[JobKey, Role] | None]


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why a task has no room: on the node that comes nearest, what is wanted and what there is."""

    role: Role
    constraint: Constraint
    nearest: str
    shortfalls: tuple[Shortfall, ...]

    def __str__(self) -> str:
        missing = "; ".join(map(str, self.shortfalls)) or "no node takes tasks"
        match self.constraint:
            case Constraint.INFEASIBLE:
                return f"a {self.role} is larger than any node ({missing} on {self.nearest or 'every node'})"
            case Constraint.FRAGMENTED:
                return f"no single node has room for a {self.role} ({missing} on {self.nearest})"
            case _:
                return f"no room for a {self.role} ({missing} on {self.nearest or 'every node'})"


class Packing:
    """Room on nodes while tasks are added, in exact thousandths.

    Tasks that run already (``incumbents``) are not in the packing at first. When their job is given tasks again, they
    are taken up where they are; until then new tasks keep out of their way as long as there is other room.

    For each demand that was asked for, the nodes with room for it are kept in a heap by the placement's order. Adding a
    task costs O(demands x log nodes), asking for a new demand O(nodes), and so does saying why there is no room.
    """

    def __init__(self, nodes: Sequence[Node], placement: Placement, *, incumbents: Iterable[Task] = ()) -> None:
        """``node.used`` counts as taken for good: pass what others hold (see ``for_decision``), or what all hold."""
        self._nodes = tuple(nodes)
        self._placement = placement
        self._index = {node.name: place for place, node in enumerate(self._nodes)}
        incumbents = tuple(incumbents)
        names = {name for node in self._nodes for name, _ in node.capacity.thousandths}
        self._names = sorted(names | {name for task in incumbents for name, _ in task.demand.thousandths})
        self._vectors: dict[Resources, tuple[int, ...] | None] = {}
        self._capacity = [self._amounts(node.capacity) for node in self._nodes]
        self._used = [list(self._amounts(node.used)) for node in self._nodes]
        self._reserved = [[0] * len(self._names) for _ in self._nodes]
        #: How many incumbents wait to be taken up again: without any, nothing is reserved.
        self._waiting = 0
        self._incumbents: dict[tuple[JobKey, Role], list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        for task in sorted(incumbents, key=lambda task: task.number, reverse=True):
            place = self._index.get(task.node)
            if place is not None:
                demand = self._amounts(task.demand)
                self._incumbents[task.job, task.role].append((place, demand))
                self._reserve(place, demand, 1)
        #: Counts the changes of each node: an entry of a heap with an older count is stale.
        self._stamps = [0] * len(self._nodes)
        self._heaps: dict[tuple[int, ...], list[_Entry]] = {}
        if placement.head_only:
            self._heaps[_ANY] = self._heap_of(_ANY)
        #: Numbers what is used where: the same steps lead to the same state, so that a reason is found once in each.
        self._states = itertools.count(1)
        self._state = 0
        self._reached: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._reasons: dict[tuple[int, Resources, Role], Blocked] = {}
        #: The same amounts as matrices, for questions about all nodes at once; shape (nodes, resources).
        self._capacities = np.array(self._capacity, dtype=np.int64).reshape(len(self._nodes), len(self._names))
        self._taken = np.array(self._used, dtype=np.int64).reshape(self._capacities.shape)
        self._up = np.array([node.state is NodeState.UP for node in self._nodes], dtype=bool)

    @classmethod
    def for_decision(cls, nodes: Sequence[Node], tasks: Iterable[Task], placement: Placement) -> Packing:
        """A packing in which all our tasks may be given anew: only what others hold is taken.

        ``node.used`` must count all of ``tasks``. Tasks that are meant to stay are the incumbents.
        """
        tasks = tuple(tasks)
        ours: dict[str, list[Resources]] = defaultdict(list)
        for task in tasks:
            ours[task.node].append(task.demand)
        others = [
            Node(node.name, node.capacity, node.used.minus(Resources.total(ours[node.name])), node.state)
            if node.name in ours
            else node
            for node in nodes
        ]
        return cls(others, placement, incumbents=[task for task in tasks if task.state.wanted])

    def add(self, job: Job, delta: Allocation) -> Blocked | None:
        """Add tasks of a job, all or none; returns what stood in the way."""
        done: list[_Step] = []
        before = self._state
        for role in (Role.WORKER, Role.PS):
            demand = job.request.demand(role)
            for _ in range(delta.count(role)):
                step = self._take_up(job.key, role) or self._place_new(demand, role)
                if isinstance(step, Blocked):
                    for taken in reversed(done):
                        self._undo(taken)
                    self._state = before
                    return step
                done.append(step)
        return None

    def place(self, demand: Resources, role: Role) -> str | Blocked:
        """Add one new task; returns its node, or what stood in the way."""
        step = self._place_new(demand, role)
        return step if isinstance(step, Blocked) else self._nodes[step[0]].name

    def room(self) -> dict[str, Resources]:
        """What is free on each node that takes tasks."""
        return {node.name: self._free(place) for place, node in enumerate(self._nodes) if node.state is NodeState.UP}

    def remove(self, node: str, demand: Resources) -> None:
        """Take a task placed by ``place`` out again."""
        self._undo((self._index[node], self._amounts(demand), None))
        self._state = next(self._states)

    def _take_up(self, job: JobKey, role: Role) -> _Step | None:
        waiting = self._incumbents.get((job, role))
        if not waiting:
            return None
        place, demand = waiting[-1]
        if not self._fits(place, demand):
            return None
        waiting.pop()
        self._reserve(place, demand, -1)
        self._take(place, demand)
        return place, demand, (job, role)

    def _place_new(self, demand: Resources, role: Role) -> _Step | Blocked:
        vector = self._vector(demand)
        place = None if vector is None else self._choose(vector)
        if vector is None or place is None:
            asked = (self._state, demand, role)
            if asked not in self._reasons:
                self._reasons[asked] = self._why_not(demand, role)
            return self._reasons[asked]
        self._take(place, vector)
        return place, vector, None

    def _choose(self, demand: tuple[int, ...]) -> int | None:
        """First node in the order with room, out of the way of incumbents where there is such a one."""
        if self._placement.head_only:
            head = self._head(self._heaps[_ANY])
            return head if head is not None and self._fits(head, demand) else None
        heap = self._heaps.get(demand)
        if heap is None:
            heap = self._heaps[demand] = self._heap_of(demand)
        first = self._head(heap)
        if first is None or not self._waiting or self._is_clear(first, demand):
            return first
        passed: list[_Entry] = []
        chosen = None
        while chosen is None and (place := self._head(heap)) is not None:
            if self._is_clear(place, demand):
                chosen = place
            else:
                passed.append(heapq.heappop(heap))
        for entry in passed:
            heapq.heappush(heap, entry)
        return first if chosen is None else chosen

    def _head(self, heap: list[_Entry]) -> int | None:
        """First node of a heap, or None; stale entries on the way are dropped."""
        while heap and heap[0][2] != self._stamps[heap[0][1]]:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def _heap_of(self, demand: tuple[int, ...]) -> list[_Entry]:
        heap = [
            (self._placement.load(self._used[place], self._capacity[place]), place, self._stamps[place])
            for place, node in enumerate(self._nodes)
            if node.state is NodeState.UP and self._fits(place, demand)
        ]
        heapq.heapify(heap)
        return heap

    def _fits(self, place: int, demand: tuple[int, ...]) -> bool:
        used, capacity = self._used[place], self._capacity[place]
        return all(
            wanted <= whole - taken for wanted, taken, whole in zip(demand, used, capacity, strict=False) if wanted
        )

    def _is_clear(self, place: int, demand: tuple[int, ...]) -> bool:
        used, capacity, reserved = self._used[place], self._capacity[place], self._reserved[place]
        return all(
            wanted + kept <= whole - taken
            for wanted, taken, whole, kept in zip(demand, used, capacity, reserved, strict=True)
            if wanted
        )

    def _take(self, place: int, demand: tuple[int, ...]) -> None:
        step = (self._state, place, demand)
        if step not in self._reached:
            self._reached[step] = next(self._states)
        self._state = self._reached[step]
        used = self._used[place]
        for number, wanted in enumerate(demand):
            used[number] += wanted
        self._moved(place)

    def _undo(self, step: _Step) -> None:
        place, demand, incumbent = step
        used = self._used[place]
        for number, wanted in enumerate(demand):
            used[number] -= wanted
        self._moved(place)
        if incumbent is not None:
            self._incumbents[incumbent].append((place, demand))
            self._reserve(place, demand, 1)

    def _moved(self, place: int) -> None:
        self._taken[place] = self._used[place]
        self._stamps[place] += 1
        if self._nodes[place].state is not NodeState.UP:
            return
        entry = (self._placement.load(self._used[place], self._capacity[place]), place, self._stamps[place])
        for demand, heap in self._heaps.items():
            if self._fits(place, demand):
                heapq.heappush(heap, entry)

    def _reserve(self, place: int, demand: tuple[int, ...], sign: int) -> None:
        reserved = self._reserved[place]
        for number, wanted in enumerate(demand):
            reserved[number] += sign * wanted
        self._waiting += sign

    def _why_not(self, demand: Resources, role: Role) -> Blocked:
        """Name the binding constraint, on the node that lacks the least (as a fraction of the demand)."""
        if not self._up.any():
            return Blocked(role, Constraint.CAPACITY, "", demand.shortfalls(NO_RESOURCES))
        nearest = self._nodes[self._nearest(demand, self._capacities)]
        missing = demand.shortfalls(nearest.capacity)
        if missing:
            return Blocked(role, Constraint.INFEASIBLE, nearest.name, missing)
        free = np.maximum(self._capacities - self._taken, 0)
        place = self._nearest(demand, free)
        total = free[self._up].sum(axis=0)
        in_total = any(wanted > had for wanted, had in zip(self._amounts(demand), total, strict=True))
        constraint = Constraint.CAPACITY if in_total else Constraint.FRAGMENTED
        return Blocked(role, constraint, self._nodes[place].name, demand.shortfalls(self._free(place)))

    def _nearest(self, demand: Resources, room: NDArray[np.int64]) -> int:
        """Node that takes tasks and lacks the least of a demand, as a fraction of it; the first of equals."""
        wanted = np.array(self._amounts(demand), dtype=np.float64)
        asked = wanted > 0
        lack = (np.maximum(wanted - room, 0)[:, asked] / wanted[asked]).sum(axis=1)
        return int(np.where(self._up, lack, np.inf).argmin())

    def _vector(self, demand: Resources) -> tuple[int, ...] | None:
        """Amounts in the order of ``_names``, or None where no node has any of something that is asked for."""
        if demand not in self._vectors:
            known = {name for name, _ in demand.thousandths} <= set(self._names)
            self._vectors[demand] = self._amounts(demand) if known else None
        return self._vectors[demand]

    def _amounts(self, resources: Resources) -> tuple[int, ...]:
        given = dict(resources.thousandths)
        return tuple(given.get(name, 0) for name in self._names)

    def _free(self, place: int) -> Resources:
        free = zip(self._names, self._capacity[place], self._used[place], strict=True)
        return Resources(tuple((name, whole - taken) for name, whole, taken in free if whole > taken))
