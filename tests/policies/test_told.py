from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.test_belief import a_kind

from dl2d.core.jobs import Allocation
from dl2d.core.measured import SpeedPoint
from dl2d.policies.sizes import Atlas, group_of
from dl2d.policies.told import Kind, Table

_points = st.builds(
    SpeedPoint,
    st.builds(Allocation, st.integers(1, 4), st.integers(0, 4)),
    st.sampled_from([0.0, 1.0, 2.0, float("inf")]),
    st.integers(1, 3),
    st.integers(0, 2),
)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.lists(_points, max_size=8), st.booleans()), min_size=1, max_size=5))
def test_a_table_from_the_one_before_is_the_one_from_points_alone(news: list[tuple[list[SpeedPoint], bool]]) -> None:
    """Whether points are in order or not, distinct or not, say something or not."""
    known: dict[Allocation, SpeedPoint] = {}
    table: Table | None = None
    for points, in_order in news:
        known |= {point.allocation: point for point in points}
        now = tuple(sorted(known.values())) if in_order else (*known.values(), *points[:1])
        table, alone = Table.of(a_kind("m"), now, table), Table.of(a_kind("m"), now, None)
        np.testing.assert_array_equal(table.rows, alone.rows)
        assert table.in_order == alone.in_order
        assert not alone.in_order or [tuple(row) for row in table.counts] == [point.allocation for point in now]


def test_sizes_that_count_for_others_are_the_same_whatever_was_before() -> None:
    """News of one size at a time, of some 60: other speeds, other counts, sizes that are new."""
    rng, kind = np.random.default_rng(5), a_kind("m")
    known = {
        (w, p): SpeedPoint(Allocation(w, p), float(np.exp(rng.normal(0, 0.3))), 2, 1)
        for w in range(1, 9)
        for p in range(1, 8)
    }
    atlas, before = Atlas(group_of(kind)), None
    for _ in range(120):
        w, p = rng.integers(1, 18, 2).tolist() if rng.random() < 0.2 else rng.integers(1, 8, 2).tolist()
        known[w, p] = SpeedPoint(Allocation(w, p), float(np.exp(rng.normal(0, 0.5))), int(rng.integers(1, 5)), 1)
        points = tuple(sorted(known.values()))
        before = Kind.of(Table.of(kind, points, before and before.table), 0.05, atlas, before)
        alone = Kind.of(Table.of(kind, points, None), 0.05, Atlas(group_of(kind)), None)
        assert before.alone is not None
        assert alone.alone is not None
        for one, other in ((before.kept, alone.kept), (before.alone, alone.alone)):
            np.testing.assert_array_equal(one.sizes.counts, other.sizes.counts)
            np.testing.assert_array_equal(one.logs, other.logs)
            np.testing.assert_array_equal(one.noise, other.noise)
            np.testing.assert_array_equal(one.single, other.single)
        assert before.level == alone.level
