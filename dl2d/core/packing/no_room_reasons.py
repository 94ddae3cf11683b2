"""Why no node has room for a task: the binding constraint, on the node that lacks the least of the demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dl2d.core.cluster import Node
from dl2d.core.decision import Constraint
from dl2d.core.jobs import JobKey, Role
from dl2d.core.packing.node_classes import NodeClass, NodeClasses, Vector
from dl2d.core.packing.resource_vectors import ResourceVectors
from dl2d.core.packing.room_in_limits import Blocked
from dl2d.core.placement import Placement
from dl2d.core.resources import NO_RESOURCES, Resources


class NoRoomReasons:
    """Finds the reasons, each once for a state of the nodes."""

    def __init__(
        self, nodes: Sequence[Node], placement: Placement, classes: NodeClasses, vectors: ResourceVectors
    ) -> None:
        """The ``classes`` are those of the ``nodes``."""
        self._nodes, self._placement, self._classes, self._vectors = nodes, placement, classes, vectors
        #: Which node lacks the least of a demand when empty; and now, with its class then. The latter holds as long as
        #: the node is of that class and nothing was taken out: the others lack as much as they did, or more.
        self._nearest_empty: dict[Vector, int] = {}
        self._nearest: dict[Vector, tuple[int, NodeClass]] = {}
        #: Reasons that were found, by the state of the nodes.
        self._found: dict[tuple[int, Resources, Role, int], Blocked] = {}

    def forget_nearest(self) -> None:
        """Take note that something was taken out."""
        self._nearest.clear()

    def reason(self, demand: Resources, role: Role, job: JobKey | None) -> Blocked:
        """Name what stands in the way of a task that has no room on the nodes that its job may use."""
        matrices, node_set = self._classes.matrices(), self._vectors.node_set(job)
        asked = matrices.fingerprint, demand, role, node_set
        if asked not in self._found:
            vector = (*self._vectors.amounts(demand), node_set)
            if not matrices.eligible(vector).any():
                found = Blocked(role, Constraint.CAPACITY, "", demand.shortfalls(NO_RESOURCES))
            else:
                found = self._infeasible(demand, vector, role) or self._no_room(demand, vector, role)
            may_use = self._vectors.may_use(node_set, len(self._nodes))
            self._found[asked] = replace(found, may_use=may_use) if may_use else found
        return self._found[asked]

    def _infeasible(self, demand: Resources, vector: Vector, role: Role) -> Blocked | None:
        """Why a task fits on no node even if that is empty, or None where it does on one."""
        if vector not in self._nearest_empty:
            matrices = self._classes.matrices()
            self._nearest_empty[vector] = matrices.nearest(vector, matrices.capacity)
        node = self._nodes[self._nearest_empty[vector]]
        missing = demand.shortfalls(node.capacity)
        return Blocked(role, Constraint.INFEASIBLE, node.name, missing) if missing else None

    def _no_room(self, demand: Resources, vector: Vector, role: Role) -> Blocked:
        """Why a task that fits on some empty node fits on none as they are, or not on the first if only that counts."""
        matrices = self._classes.matrices()
        if self._placement.first_node_only:
            number = matrices.first_node(vector)
        else:
            number, then = self._nearest.get(vector, (-1, None))
            if then is None or self._classes.class_of[number] is not then:
                number = matrices.nearest(vector, matrices.free)
                self._nearest[vector] = number, self._classes.class_of[number]
        in_total = any(wanted > had for wanted, had in zip(vector[:-1], matrices.free_for(vector), strict=True))
        constraint = Constraint.CAPACITY if in_total else Constraint.FRAGMENTED
        free = self._vectors.resources(self._classes.class_of[number].free)
        return Blocked(role, constraint, self._nodes[number].name, demand.shortfalls(free))
