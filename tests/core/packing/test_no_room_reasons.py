from __future__ import annotations

import pytest

from dl2d.core.cluster import Node, NodeSet, NodeState
from dl2d.core.decision import Constraint
from dl2d.core.jobs import JobKey, Role
from dl2d.core.packing.no_room_reasons import NoRoomReasons
from dl2d.core.packing.node_classes import NodeClasses
from dl2d.core.packing.resource_vectors import ResourceVectors
from dl2d.core.placement import Placement
from dl2d.core.resources import Resources
from dl2d.placement.dl2_paper import Dl2Paper
from dl2d.placement.load_balance import LoadBalance

BOUND = JobKey("c", "1", 1)
SETS = (NodeSet((BOUND,), frozenset({"b"}), "a reason"),)


class Cluster:
    """Two nodes, one with four CPUs and one with eight, of which some are used."""

    def __init__(self, *used: int, state: NodeState = NodeState.UP, placement: Placement | None = None) -> None:
        nodes = [Node(name, Resources.of(cpu=cpu), state=state) for name, cpu in (("a", 4), ("b", 8))]
        self.vectors = ResourceVectors([node.capacity for node in nodes], SETS)
        self.classes = NodeClasses(placement or LoadBalance(), *self.vectors.sizes)
        member_of = self.vectors.member_of()
        for node, cpu in zip(nodes, used, strict=True):
            capacity = self.vectors.amounts(node.capacity)
            node_class = self.classes.of(capacity, (1000 * cpu,), (0,), member_of.get(node.name, 0))
            self.classes.append(node_class, takes_tasks=state is NodeState.UP)
        self.reasons = NoRoomReasons(nodes, placement or LoadBalance(), self.classes, self.vectors)

    def use(self, node: int, cpu: int) -> None:
        before = self.classes.class_of[node]
        self.classes.move((node,), self.classes.of(before.capacity, (1000 * cpu,), (0,), before.member_of))

    def why(self, cpu: int, job: JobKey | None = None) -> tuple[Constraint, str, str]:
        found = self.reasons.reason(Resources.of(cpu=cpu), Role.WORKER, job)
        return found.constraint, found.nearest, "; ".join(map(str, found.shortfalls))


@pytest.mark.parametrize(
    ("used", "cpu", "expected"),
    [
        pytest.param((4, 7), 2, (Constraint.CAPACITY, "b", "cpu: wanted 2, had 1"), id="all nodes together have less"),
        pytest.param((3, 6), 3, (Constraint.FRAGMENTED, "b", "cpu: wanted 3, had 2"), id="two nodes together have it"),
        pytest.param((0, 0), 9, (Constraint.INFEASIBLE, "b", "cpu: wanted 9, had 8"), id="no node is so large"),
    ],
)
def test_the_constraint_is_named_on_the_node_that_lacks_the_least(used, cpu, expected) -> None:
    assert Cluster(*used).why(cpu) == expected


def test_where_no_node_takes_tasks_all_is_missing() -> None:
    assert Cluster(0, 0, state=NodeState.DRAINING).why(1) == (Constraint.CAPACITY, "", "cpu: wanted 1, had 0")


def test_only_nodes_that_the_job_may_use_count() -> None:
    cluster = Cluster(3, 8)
    assert cluster.why(2)[1] == "a"
    assert cluster.why(2, BOUND) == (Constraint.CAPACITY, "b", "cpu: wanted 2, had 0")
    assert cluster.reasons.reason(Resources.of(cpu=2), Role.PS, BOUND).may_use == SETS[0].text(2)


def test_where_only_the_first_node_is_tried_the_reason_is_what_that_lacks() -> None:
    assert Cluster(3, 4).why(5)[1] == "b"
    assert Cluster(3, 4, placement=Dl2Paper()).why(5) == (Constraint.FRAGMENTED, "a", "cpu: wanted 5, had 1")


def test_reasons_follow_the_nodes() -> None:
    """As tasks are added another node is the nearest; when one was taken out, that is to be said."""
    cluster = Cluster(3, 6)
    assert cluster.why(3)[1] == "b"
    cluster.use(1, 8)
    assert cluster.why(3) == (Constraint.CAPACITY, "a", "cpu: wanted 3, had 1")
    cluster.use(1, 6)
    cluster.reasons.forget_nearest()
    assert cluster.why(3)[1] == "b"
