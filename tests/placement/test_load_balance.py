from __future__ import annotations

import pytest

from dl2d.placement.load_balance import LoadBalance


@pytest.mark.parametrize(
    ("used", "capacities", "first"),
    [
        pytest.param(
            [(4000, 0), (2000, 0), (4000, 0)], [(8000, 2000), (8000, 2000), (16000, 2000)], 1, id="least used"
        ),
        pytest.param([(0, 0)] * 3, [(8000, 2000)] * 3, 0, id="the first of equals"),
        pytest.param([(2000, 0), (2000, 0)], [(8000, 2000), (16000, 2000)], 1, id="as a fraction of the node"),
        pytest.param([(8000, 10**6), (0, 2 * 10**6)], [(8000, 64 * 10**6)] * 2, 1, id="MiB do not drown cores"),
        pytest.param([(0, 1000), (1000, 0)], [(8000, 2000), (8000, 2000)], 1, id="every type counts alike"),
        pytest.param([(4000, 0), (3000, 0)], [(8000, 0), (8000, 2000)], 1, id="what a node has none of does not count"),
    ],
)
def test_the_least_used_node_comes_first(used, capacities, first) -> None:
    loads = [LoadBalance().load(taken, whole) for taken, whole in zip(used, capacities, strict=True)]
    assert loads.index(min(loads)) == first
