"""Nodes in classes of equal capacity and use: which node comes first in a placement's order, and what all of them have.

A cluster has few kinds of machines and jobs few kinds of tasks, so most nodes equal others in what they have, hold and
have reserved. Whether a task fits, and where a node stands in the order, is worked out once for a class of such nodes.

Some jobs may use only a set of the nodes. A demand ends with the number of its job's set, and a node has the numbers of
its sets as a bit mask, so that the cost of a comparison does not grow with the number of sets.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from operator import add, le, sub

import numpy as np
from numpy.typing import NDArray

from dl2d.core.placement import Placement

#: Amounts in thousandths, of each resource of the cluster in one order. In a demand the number of a set of nodes
#: follows, or ``EVERY_NODE``.
Vector = tuple[int, ...]
EVERY_NODE = -1

#: Classes that are looked at for the first node with room; beyond them all nodes are compared at once, vectorised.
MAX_LOOKED_AT = 64


@dataclass(slots=True, eq=False)
class NodeClass:
    """Nodes with equal capacity, use and reserved room that belong to the same sets of nodes."""

    number: int
    capacity: Vector
    used: Vector
    reserved: Vector
    #: The sets of nodes that they belong to, as a bit mask.
    member_of: int
    #: Place in the placement's order.
    load: float
    #: What is free, never below 0; and what is left of that when all that is reserved is taken.
    free: Vector
    unreserved: Vector
    #: A heap of the nodes of this class that take tasks. Some may have gone to other classes since, and some stand
    #: there more than once.
    nodes: list[int] = field(default_factory=list)
    #: The class of one of these nodes after a task of some demand was added, or one took up its reserved room.
    with_task: dict[Vector, NodeClass] = field(default_factory=dict)
    with_reserved: dict[Vector, NodeClass] = field(default_factory=dict)
    #: Whether it stands in the order of classes.
    listed: bool = False

    def fits(self, demand: Vector, *, unreserved: bool = False) -> bool:
        """Whether a node of this class belongs to the set of a demand and has room for it."""
        if (node_set := demand[-1]) != EVERY_NODE and not self.member_of >> node_set & 1:
            return False
        return all(map(le, demand, self.unreserved if unreserved else self.free))

    def first(self, class_of: Sequence[NodeClass]) -> int | None:
        """First node of this class, or None where it has none; afterwards it is ``nodes[0]``."""
        nodes = self.nodes
        while nodes and class_of[nodes[0]] is not self:
            heapq.heappop(nodes)
        return nodes[0] if nodes else None


class _Matrices:
    """Room on all nodes as matrices of shape (resources, nodes), for questions that no order answers."""

    def __init__(self, class_of: Sequence[NodeClass], takes_tasks: Sequence[bool], resources: int, sets: int) -> None:
        self._shown = list(class_of)
        self.takes_tasks = np.array(takes_tasks, dtype=np.bool_)
        self.capacity, self.free, self._unreserved = (
            np.array(amounts, dtype=np.int64).reshape(len(class_of), resources).T.copy()
            for amounts in (
                [each.capacity for each in class_of],
                [each.free for each in class_of],
                [each.unreserved for each in class_of],
            )
        )
        self._loads = np.array([each.load for each in class_of])
        #: Bit masks of sets, eight in each row of shape (nodes,); they never change.
        length = -(-sets // 8)
        masks = b"".join(each.member_of.to_bytes(length, "little") for each in class_of)
        self._member_of = np.frombuffer(masks, dtype=np.uint8).reshape(len(class_of), length).T.copy()
        #: What is free on nodes that take tasks, in all.
        self.total = [0] * resources
        taking = Counter(each for each, takes in zip(class_of, takes_tasks, strict=True) if takes)
        for node_class, count in taking.items():
            self.total = [had + count * more for had, more in zip(self.total, node_class.free, strict=True)]
        #: The same whenever each node is of the same class, and otherwise another.
        self.fingerprint = 0

    def update(self, nodes: Iterable[int], class_of: Sequence[NodeClass]) -> None:
        """Show nodes as they are now."""
        changed = [node for node in nodes if class_of[node] is not self._shown[node]]
        if not changed:
            return
        for node in changed:
            before, after = self._shown[node], class_of[node]
            self._shown[node] = after
            self.fingerprint ^= hash((node, before.number)) ^ hash((node, after.number))
            if self.takes_tasks[node]:
                for place, (less, more) in enumerate(zip(before.free, after.free, strict=True)):
                    self.total[place] += more - less
        self.free[:, changed] = np.array([class_of[node].free for node in changed], dtype=np.int64).T
        self._unreserved[:, changed] = np.array([class_of[node].unreserved for node in changed], dtype=np.int64).T
        self._loads[changed] = [class_of[node].load for node in changed]

    def first(self, demand: Vector, *, unreserved: bool) -> int | None:
        """First node in the placement's order with room for a demand."""
        fits = self._fits(demand, unreserved=unreserved)
        return int(np.where(fits, self._loads, np.inf).argmin()) if fits.any() else None

    def first_node(self, demand: Vector) -> int:
        """First of the nodes that take such tasks in the placement's order, full or not."""
        return int(np.where(self.eligible(demand), self._loads, np.inf).argmin())

    def eligible(self, demand: Vector) -> NDArray[np.bool_]:
        """Which nodes take tasks and belong to the set of a demand."""
        if (node_set := demand[-1]) == EVERY_NODE:
            return self.takes_tasks
        members: NDArray[np.bool_] = (self._member_of[node_set // 8] >> node_set % 8 & 1).astype(np.bool_)
        return self.takes_tasks & members

    def free_for(self, demand: Vector) -> Sequence[int]:
        """What is free on the nodes that take such tasks, in all."""
        if demand[-1] == EVERY_NODE:
            return self.total
        free: list[int] = self.free[:, self.eligible(demand)].sum(axis=1).tolist()
        return free

    def in_order(self, demand: Vector) -> list[int]:
        """All nodes with room for a demand in the placement's order."""
        nodes = np.flatnonzero(self._fits(demand, unreserved=False))
        ordered: list[int] = nodes[np.argsort(self._loads[nodes], kind="stable")].tolist()
        return ordered

    def _fits(self, demand: Vector, *, unreserved: bool) -> NDArray[np.bool_]:
        fits = self.eligible(demand).copy()
        for wanted, has in zip(demand, self._unreserved if unreserved else self.free, strict=False):
            if wanted:
                fits &= has >= wanted
        return fits

    def nearest(self, demand: Vector, room: NDArray[np.int64]) -> int:
        """Node that takes such tasks and whose room lacks the least of a demand, as a fraction of it."""
        wanted = np.array(demand[:-1], dtype=np.float64)
        asked = wanted > 0
        lack = (np.maximum(wanted[asked, None] - room[asked], 0) / wanted[asked, None]).sum(axis=0)
        return int(np.where(self.eligible(demand), lack, np.inf).argmin())


class NodeClasses:
    """Nodes, each known by its number, while tasks are added to them.

    The classes that have nodes are kept in the placement's order. A task goes to the first node of the first class with
    room, so equal tasks go to equal nodes in turn.
    """

    def __init__(self, placement: Placement, resources: int, sets: int = 0) -> None:
        """Nodes are added afterwards, in their order; there are these numbers of resources and sets of nodes."""
        self._placement = placement
        self._sets = sets
        self._zero = (0,) * resources
        #: The class of each node.
        self.class_of: list[NodeClass] = []
        self.takes_tasks: list[bool] = []
        self._classes: dict[tuple[Vector, Vector, Vector, int], NodeClass] = {}
        #: By load. Some have no node any more; those without room for what is least asked for of each resource are
        #: not in it.
        self._order: list[tuple[float, int, NodeClass]] = []
        self._asked: set[Vector] = set()
        self._least_asked: Vector = ()
        #: Nodes that came to a class and do not stand in its heap yet, and the least load of these.
        self._moved: set[int] = set()
        self._moved_load = math.inf
        #: Nodes of which the matrices are not up to date.
        self._changed: set[int] = set()
        self._matrices: _Matrices | None = None

    def of(self, capacity: Vector, used: Vector, reserved: Vector, member_of: int = 0) -> NodeClass:
        """The class of nodes with this capacity, use and reserved room that belong to these sets."""
        known = self._classes.get((capacity, used, reserved, member_of))
        if known is None:
            free = tuple(map(max, map(sub, capacity, used), self._zero))
            unreserved = tuple(map(max, map(sub, free, reserved), self._zero))
            load = self._placement.load(used, capacity)
            known = NodeClass(len(self._classes), capacity, used, reserved, member_of, load, free, unreserved)
            self._classes[capacity, used, reserved, member_of] = known
        return known

    def append(self, node_class: NodeClass, *, takes_tasks: bool) -> None:
        """Add a node."""
        if takes_tasks:
            node_class.nodes.append(len(self.class_of))  # ascending, so that it is a heap
        self.class_of.append(node_class)
        self.takes_tasks.append(takes_tasks)

    def with_task(self, node_class: NodeClass, demand: Vector) -> NodeClass:
        """The class of a node of some class after a task was added to it."""
        after = node_class.with_task.get(demand)
        if after is None:
            used = tuple(map(add, node_class.used, demand))
            after = self.of(node_class.capacity, used, node_class.reserved, node_class.member_of)
            node_class.with_task[demand] = after
        return after

    def with_reserved(self, node_class: NodeClass, demand: Vector) -> NodeClass:
        """The class of a node of some class after a task was added for which room was reserved on it."""
        after = node_class.with_reserved.get(demand)
        if after is None:
            used, reserved = tuple(map(add, node_class.used, demand)), tuple(map(sub, node_class.reserved, demand))
            after = self.of(node_class.capacity, used, reserved, node_class.member_of)
            node_class.with_reserved[demand] = after
        return after

    def move(self, nodes: Sequence[int], to: NodeClass) -> None:
        """Have nodes be of another class."""
        for node in nodes:
            self.class_of[node] = to
        self._moved.update(nodes)
        self._moved_load = min(self._moved_load, to.load)
        if self._matrices is not None:
            self._changed.update(nodes)

    def next_nodes(self, demand: Vector, count: int, *, unreserved: bool) -> Sequence[int]:
        """The nodes to which the next of some equal tasks go: one or more of one class, none where there is no room."""
        first_node_only = self._placement.first_node_only
        asked = (*self._zero, demand[-1]) if first_node_only else demand
        node = self._first(asked, unreserved=unreserved)
        if node is None or (first_node_only and not self.class_of[node].fits(demand)):
            return ()
        nodes, node_class = [node], self.class_of[node]
        if count == 1 or self.with_task(node_class, demand).load <= node_class.load:
            return nodes
        # A node that got a task comes after all that are as it was: they are taken in turn.
        end = self._first_of_others(node_class, asked, unreserved=unreserved)
        while len(nodes) < count and (following := node_class.first(self.class_of)) is not None and following < end:
            heapq.heappop(node_class.nodes)
            if following > nodes[-1]:
                nodes.append(following)
        return nodes

    def in_order(self, demand: Vector) -> Generator[int]:
        """All nodes with room in the placement's order. Nothing may be moved before the generator is closed."""
        self._list(demand)
        self._settle()
        passed: set[int] = set()
        try:
            while (found := self._search(demand, unreserved=False))[0] is not None:
                node = heapq.heappop(found[0].nodes)
                if node not in passed:
                    passed.add(node)
                    yield node
            if not found[1]:
                yield from (node for node in self.matrices().in_order(demand) if node not in passed)
        finally:
            self._moved |= passed
            self._moved_load = -math.inf

    def _first(self, demand: Vector, *, unreserved: bool) -> int | None:
        """First node with room in the placement's order."""
        self._list(demand)
        found, complete = self._search(demand, unreserved=unreserved)
        if self._moved and (found is None or found.load >= self._moved_load):
            self._settle()
            found, complete = self._search(demand, unreserved=unreserved)
        if found is None and not complete:
            return self.matrices().first(demand, unreserved=unreserved)
        return None if found is None else found.nodes[0]

    def _search(self, demand: Vector, *, unreserved: bool) -> tuple[NodeClass | None, bool]:
        """The class of the first node with room, as far as classes are looked at; and whether that is all of them."""
        order, place = self._order, 0
        best: NodeClass | None = None
        while place < len(order) and (place < MAX_LOOKED_AT or best is not None):
            load, _, node_class = order[place]
            if best is not None and load > best.load:
                break
            first = node_class.first(self.class_of)
            fits = first is not None and node_class.fits(demand, unreserved=unreserved)
            if fits and (best is None or node_class.nodes[0] < best.nodes[0]):
                best = node_class
            if first is None or (not fits and not node_class.fits(self._least_asked)):
                node_class.listed = False
                del order[place]
            else:
                place += 1
        return best, place == len(order)

    def _first_of_others(self, node_class: NodeClass, demand: Vector, *, unreserved: bool) -> float:
        """First node with room of all other classes with the same load."""
        end = math.inf
        for load, _, other in self._order:
            if load > node_class.load:
                break
            if other is not node_class and load == node_class.load and other.fits(demand, unreserved=unreserved):
                first = other.first(self.class_of)
                end = end if first is None else min(end, first)
        return end

    def _list(self, demand: Vector) -> None:
        """Have all classes with room for a demand stand in the order."""
        amounts = demand[:-1]
        if amounts not in self._asked:
            self._asked.add(amounts)
            self._least_asked = (*map(min, zip(*self._asked, strict=False)), EVERY_NODE)
            for node_class in self._classes.values():
                self._enter(node_class)

    def _enter(self, node_class: NodeClass) -> None:
        if not node_class.listed and node_class.nodes and node_class.fits(self._least_asked):
            node_class.listed = True
            bisect.insort(self._order, (node_class.load, node_class.number, node_class))

    def _settle(self) -> None:
        """Have nodes that moved stand in the heaps of their classes."""
        for node in sorted(self._moved):
            if self.takes_tasks[node]:
                node_class = self.class_of[node]
                heapq.heappush(node_class.nodes, node)
                self._enter(node_class)
        self._moved.clear()
        self._moved_load = math.inf

    def matrices(self) -> _Matrices:
        """Room on all nodes, up to date."""
        if self._matrices is None:
            self._matrices = _Matrices(self.class_of, self.takes_tasks, len(self._zero), self._sets)
        elif self._changed:
            self._matrices.update(self._changed, self.class_of)
            self._changed.clear()
        return self._matrices
