from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Architecture, Consistency
from dl2d.throughput.shared import _together
from dl2d.throughput.sizes import Group, Sizes


def one_by_one(at: NDArray[np.float64], most: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """What ``_together`` says, from numpy's own."""
    cells = 16.0
    distinct, places = np.unique(at, axis=0, return_inverse=True)
    while len(distinct) > most:
        distinct, places = np.unique(np.round(at * cells) / cells, axis=0, return_inverse=True)
        cells /= 2.0
    return distinct, places


def test_sizes_are_taken_together_as_rows_are_made_distinct() -> None:
    rng, group = np.random.default_rng(3), Group(Architecture.PS, Consistency.SYNC)
    for _ in range(300):
        largest = int(rng.choice([3, 16, 300]))
        parts = [
            Sizes(group, rng.integers(0, largest + 1, (int(rng.integers(1, 60)), 2))) for _ in range(rng.integers(1, 8))
        ]
        distinct, places = _together(parts, 96)
        wanted, of = one_by_one(np.concatenate([part.at for part in parts]), 96)
        np.testing.assert_array_equal(distinct, wanted)
        np.testing.assert_array_equal(places, of)
