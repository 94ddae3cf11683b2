"""Tasks on nodes: which fit, where, and what is missing when they don't."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dl2d.core.cluster import Node, NodeState, Task
from dl2d.core.decision import Constraint
from dl2d.core.jobs import Allocation, Job, JobKey, Role
from dl2d.core.resources import NO_RESOURCES, Resources, Shortfall

Scores = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]


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

    One ``add`` costs a constant number of vector operations over all nodes.
    """

    def __init__(self, nodes: Sequence[Node], scores: Scores, *, incumbents: Iterable[Task] = ()) -> None:
        """``node.used`` counts as taken for good: pass what others hold (see ``for_decision``), or what all hold."""
        self._nodes = tuple(nodes)
        self._scores = scores
        self._index = {node.name: place for place, node in enumerate(self._nodes)}
        incumbents = tuple(incumbents)
        names = {name for node in self._nodes for name, _ in node.capacity.thousandths}
        self._names = sorted(names | {name for task in incumbents for name, _ in task.demand.thousandths})
        self._capacity = self._matrix([node.capacity for node in self._nodes])
        self._used = self._matrix([node.used for node in self._nodes])
        self._up = np.array([node.state is NodeState.UP for node in self._nodes], dtype=bool)
        self._reserved = np.zeros_like(self._used)
        self._incumbents: dict[tuple[JobKey, Role], list[tuple[int, NDArray[np.int64]]]] = defaultdict(list)
        for task in sorted(incumbents, key=lambda task: task.number, reverse=True):
            place = self._index.get(task.node)
            if place is not None:
                demand = self._vector(task.demand)[0]
                self._incumbents[task.job, task.role].append((place, demand))
                self._reserved[place] += demand
        self._vectors: dict[Resources, tuple[NDArray[np.int64], bool]] = {}

    @classmethod
    def for_decision(cls, nodes: Sequence[Node], tasks: Iterable[Task], scores: Scores) -> Packing:
        """A packing in which all our tasks may be given anew: only what others hold is taken.

        ``node.used`` must count all of ``tasks``. Tasks that are meant to stay are the incumbents.
        """
        tasks = tuple(tasks)
        ours: dict[str, list[Resources]] = defaultdict(list)
        for task in tasks:
            ours[task.node].append(task.demand)
        others = [
            Node(node.name, node.capacity, node.used.minus(Resources.total(ours.get(node.name, ()))), node.state)
            for node in nodes
        ]
        return cls(others, scores, incumbents=[task for task in tasks if task.state.wanted])

    def add(self, job: Job, delta: Allocation) -> Blocked | None:
        """Add tasks of a job, all or none; returns what stood in the way."""
        done: list[tuple[int, NDArray[np.int64], tuple[JobKey, Role] | None]] = []
        for role in (Role.WORKER, Role.PS):
            for _ in range(delta.count(role)):
                step = self._take_up(job, role) or self._place_new(job, role)
                if isinstance(step, Blocked):
                    self._undo(done)
                    return step
                done.append(step)
        return None

    def place(self, demand: Resources, role: Role) -> str | Blocked:
        """Add one new task; returns its node, or what stood in the way."""
        vector, known = self._cached(demand)
        place = self._choose(vector) if known else None
        if place is None:
            return self._why_not(demand, role)
        self._used[place] += vector
        return self._nodes[place].name

    def room(self) -> dict[str, Resources]:
        """What is free on each node that takes tasks."""
        free = self._capacity - self._used
        return {node.name: self._resources(free[place]) for place, node in enumerate(self._nodes) if self._up[place]}

    def remove(self, node: str, demand: Resources) -> None:
        """Take a task placed by ``place`` out again."""
        self._used[self._index[node]] -= self._cached(demand)[0]

    def _take_up(self, job: Job, role: Role) -> tuple[int, NDArray[np.int64], tuple[JobKey, Role]] | None:
        waiting = self._incumbents.get((job.key, role))
        if not waiting:
            return None
        place, demand = waiting[-1]
        if (self._used[place] + demand > self._capacity[place]).any():
            return None
        waiting.pop()
        self._used[place] += demand
        self._reserved[place] -= demand
        return place, demand, (job.key, role)

    def _place_new(self, job: Job, role: Role) -> tuple[int, NDArray[np.int64], None] | Blocked:
        demand = job.request.demand(role)
        vector, known = self._cached(demand)
        place = self._choose(vector) if known else None
        if place is None:
            return self._why_not(demand, role)
        self._used[place] += vector
        return place, vector, None

    def _choose(self, demand: NDArray[np.int64]) -> int | None:
        room = self._capacity - self._used - demand
        fits = (room >= 0).all(axis=1) & self._up
        if not fits.any():
            return None
        clear = fits & (room >= self._reserved).all(axis=1)
        candidates = clear if clear.any() else fits
        scores = np.where(candidates, self._scores(self._used, self._capacity, demand), np.inf)
        return int(scores.argmin())

    def _undo(self, done: list[tuple[int, NDArray[np.int64], tuple[JobKey, Role] | None]]) -> None:
        for place, demand, incumbent in reversed(done):
            self._used[place] -= demand
            if incumbent is not None:
                self._reserved[place] += demand
                self._incumbents[incumbent].append((place, demand))

    def _why_not(self, demand: Resources, role: Role) -> Blocked:
        """Name the binding constraint, on the node that lacks the least (as a fraction of the demand)."""
        up = [place for place, ok in enumerate(self._up) if ok]
        if not up:
            return Blocked(role, Constraint.CAPACITY, "", demand.shortfalls(NO_RESOURCES))
        nearest = min(up, key=lambda place: (_lack(demand, self._nodes[place].capacity), place))
        missing = demand.shortfalls(self._nodes[nearest].capacity)
        if missing:
            return Blocked(role, Constraint.INFEASIBLE, self._nodes[nearest].name, missing)
        free = {place: self._resources(self._capacity[place] - self._used[place]) for place in up}
        nearest = min(up, key=lambda place: (_lack(demand, free[place]), place))
        in_total = demand.shortfalls(Resources.total(free.values()))
        constraint = Constraint.CAPACITY if in_total else Constraint.FRAGMENTED
        return Blocked(role, constraint, self._nodes[nearest].name, demand.shortfalls(free[nearest]))

    def _cached(self, demand: Resources) -> tuple[NDArray[np.int64], bool]:
        if demand not in self._vectors:
            self._vectors[demand] = self._vector(demand)
        return self._vectors[demand]

    def _vector(self, amounts: Resources) -> tuple[NDArray[np.int64], bool]:
        """Amounts in the order of ``_names``, and whether all that is asked for exists on some node."""
        given = dict(amounts.thousandths)
        return np.array([given.get(name, 0) for name in self._names], dtype=np.int64), given.keys() <= set(self._names)

    def _matrix(self, rows: Sequence[Resources]) -> NDArray[np.int64]:
        matrix = np.zeros((len(rows), len(self._names)), dtype=np.int64)
        for row, amounts in enumerate(rows):
            matrix[row] = self._vector(amounts)[0]
        return matrix

    def _resources(self, row: NDArray[np.int64]) -> Resources:
        return Resources(
            tuple((name, int(amount)) for name, amount in zip(self._names, row, strict=True) if amount > 0)
        )


def _lack(demand: Resources, room: Resources) -> float:
    return sum((short.wanted - short.had) / short.wanted for short in demand.shortfalls(room))
