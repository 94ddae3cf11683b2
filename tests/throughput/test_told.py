from __future__ import annotations

import numpy as np
from throughput.test_gaussian_process import a_kind

from dl2d.core.jobs import Allocation
from dl2d.core.measured import MeasuredSpeeds, SpeedPoint
from dl2d.throughput.observations import Table
from dl2d.throughput.sizes import Atlas, group_of
from dl2d.throughput.told import Kind, kinds_of


def test_sizes_that_count_for_others_are_the_same_whatever_was_before() -> None:
    """News of one size at a time, of some 60: other speeds, other counts, sizes that are new."""
    rng, kind = np.random.default_rng(5), a_kind("m")
    known = {
        (w, p): SpeedPoint(Allocation(w, p), float(np.exp(rng.normal(0, 0.3))), 2, 1)
        for w in range(1, 9)
        for p in range(1, 8)
    }
    atlas = Atlas(group_of(kind))
    before: Kind | None = None
    for _ in range(120):
        w, p = rng.integers(1, 18, 2).tolist() if rng.random() < 0.2 else rng.integers(1, 8, 2).tolist()
        known[w, p] = SpeedPoint(Allocation(w, p), float(np.exp(rng.normal(0, 0.5))), int(rng.integers(1, 5)), 1)
        points = tuple(sorted(known.values()))
        table = Table.of([MeasuredSpeeds(kind, points)])
        [before] = kinds_of(table, 0.05, atlas, [before])
        [alone] = kinds_of(table, 0.05, Atlas(group_of(kind)), [None])
        assert before.alone is not None
        assert alone.alone is not None
        for one, other in ((before.kept, alone.kept), (before.alone, alone.alone)):
            np.testing.assert_array_equal(one.sizes.counts, other.sizes.counts)
            np.testing.assert_array_equal(one.logs, other.logs)
            np.testing.assert_array_equal(one.noise, other.noise)
            np.testing.assert_array_equal(one.single, other.single)
        assert before.level == alone.level
