"""Which demands the nodes of a listing can meet. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from dl2d.core.cluster import Node
from dl2d.core.resources import Resources


class NodeSizes:
    """Names of the nodes of one listing, and a node of each size.

    Results are kept, so the time of all checks grows with the number of distinct demands times that of distinct sizes,
    not with the numbers of tasks and nodes.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.names: set[str] = set()
        self._examples: dict[Resources, str] = {}
        for node in nodes:
            self.names.add(node.name)
            self._examples.setdefault(node.capacity, node.name)
        self._obstacles: dict[Resources, str] = {}

    def obstacle(self, demand: Resources) -> str:
        """Why no node can ever meet a demand; empty if one can, or if there is no node."""
        if demand not in self._obstacles:
            self._obstacles[demand] = self._find_obstacle(demand)
        return self._obstacles[demand]

    def _find_obstacle(self, demand: Resources) -> str:
        missing = {name: demand.shortfalls(capacity) for capacity, name in self._examples.items()}
        if not missing or not all(missing.values()):
            return ""
        nearest, short = min(missing.items(), key=lambda item: len(item[1]))
        return f"{nearest} has too little {'; '.join(map(str, short))}"
