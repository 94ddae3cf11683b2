from __future__ import annotations

import pytest

from dl2d.core.cluster import Node
from dl2d.core.jobs import Role
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.resources import Resources
from dl2d.placement.best_fit import BestFit


@pytest.mark.parametrize(
    ("used", "capacities", "first"),
    [
        pytest.param([(4000, 0), (2000, 0)], [(8000, 2000)] * 2, 0, id="least left"),
        pytest.param([(0, 0)] * 3, [(8000, 2000)] * 3, 0, id="the first of equals"),
        pytest.param([(2000, 0), (2000, 0)], [(16000, 2000), (8000, 2000)], 1, id="as a fraction of the node"),
        pytest.param([(0, 0), (0, 0)], [(8000, 2000), (16000, 0)], 1, id="what a node has none of is no room"),
    ],
)
def test_the_fullest_node_comes_first(used, capacities, first) -> None:
    loads = [BestFit().load(taken, whole) for taken, whole in zip(used, capacities, strict=True)]
    assert loads.index(min(loads)) == first


def test_small_tasks_leave_whole_nodes_to_a_large_one() -> None:
    packing = Packing([Node(f"n{number}", Resources.of(cpu=4)) for number in range(3)], BestFit())
    sizes = [1, 2, 4, 2, 1]
    assert [packing.place(Resources.of(cpu=size), Role.WORKER) for size in sizes] == ["n0", "n0", "n1", "n2", "n0"]
