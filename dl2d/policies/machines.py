"""Room machine by machine, for policies that choose where tasks go themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import add, le, sub

import numpy as np

from dl2d.core.cluster import Node
from dl2d.core.resources import Resources

#: Amounts in the order of ``Machines.resources``, in thousandths.
Vector = tuple[int, ...]


class Machines:
    """What is free on each node that takes tasks, in node order. A machine is known by its place in that order."""

    def __init__(self, nodes: Sequence[Node], room: Mapping[str, Resources], demands: Iterable[Resources]) -> None:
        """``room`` is what is free by node; only nodes in it count. ``demands`` are all that will be asked about."""
        nodes = [node for node in nodes if node.name in room]
        listed = {*(node.capacity for node in nodes), *demands}
        self.resources = sorted({name for resources in listed for name, _ in resources.thousandths})
        self._vectors: dict[Resources, Vector] = {}
        self.names = [node.name for node in nodes]
        self.places = {name: place for place, name in enumerate(self.names)}
        self.capacity = [self.vector(node.capacity) for node in nodes]
        self.free = [self.vector(room[name]) for name in self.names]
        shape = (len(nodes), len(self.resources))
        self._free = np.array(self.free, dtype=np.int64).reshape(shape).T.copy()
        #: Machines of which the matrix is behind.
        self._changed: set[int] = set()
        #: By demand, a machine before which none has room for it.
        self._first: dict[Vector, int] = {}

    def vector(self, resources: Resources) -> Vector:
        """Amounts in the order of ``resources``."""
        vector = self._vectors.get(resources)
        if vector is None:
            given = dict(resources.thousandths)
            vector = self._vectors[resources] = tuple(given.get(name, 0) for name in self.resources)
        return vector

    def fits(self, place: int, demand: Vector) -> bool:
        """Whether a machine has room."""
        return all(map(le, demand, self.free[place]))

    def first_with_room(self, demand: Vector) -> int | None:
        """First machine with room. Cheap where it is the same as last time; otherwise O(machines), vectorised."""
        start = self._first.get(demand, 0)
        if start < len(self.names) and not self.fits(start, demand):
            if self._changed:
                places = list(self._changed)
                self._free[:, places] = np.array([self.free[place] for place in places], dtype=np.int64).T
                self._changed.clear()
            fitting = np.ones(len(self.names) - start, dtype=bool)
            for wanted, free in zip(demand, self._free, strict=True):
                if wanted:
                    fitting &= free[start:] >= wanted
            start = start + int(fitting.argmax()) if fitting.any() else len(self.names)
        self._first[demand] = start
        return start if start < len(self.names) else None

    def take(self, place: int, demand: Vector) -> None:
        """Take room on a machine."""
        self.free[place] = tuple(map(sub, self.free[place], demand))
        self._changed.add(place)

    def give_back(self, place: int, demand: Vector) -> None:
        """Undo ``take``."""
        self.free[place] = tuple(map(add, self.free[place], demand))
        self._changed.add(place)
        for known, first in self._first.items():
            self._first[known] = min(first, place)

    def copy(self) -> Machines:
        """Another set of machines with the same room."""
        other = object.__new__(Machines)
        other.__dict__ = self.__dict__ | {
            "free": list(self.free),
            "_free": self._free.copy(),
            "_first": dict(self._first),
            "_changed": set(self._changed),
        }
        return other
