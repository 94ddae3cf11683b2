from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from throughput.test_gaussian_process import a_kind

from dl2d.core.jobs import Allocation, Architecture
from dl2d.core.measured import MeasuredSpeeds, SpeedPoint
from dl2d.throughput.observations import Table

_points = st.builds(
    SpeedPoint,
    st.builds(Allocation, st.integers(1, 4), st.integers(0, 4)),
    st.sampled_from([0.0, 1.0, 2.0, float("inf")]),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from([0.0, 7.5]),
    st.just(0.0),
    st.sampled_from([0.0, 3.0]),
)
_measured = st.dictionaries(st.sampled_from("abcd"), st.lists(_points, max_size=6), max_size=4).map(
    lambda points: [MeasuredSpeeds(a_kind(model), tuple(own)) for model, own in points.items()]
)


@given(_measured)
def test_points_come_back_in_the_order_of_sizes(measured: list[MeasuredSpeeds]) -> None:
    """Whatever order they had, distinct or not; kinds without points, and none at all."""
    assert list(Table.of(measured).measured()) == [
        MeasuredSpeeds(speeds.kind, tuple(sorted(speeds.points))) for speeds in measured
    ]


@given(_measured, st.data())
def test_some_points_and_some_kinds(measured: list[MeasuredSpeeds], data: st.DataObject) -> None:
    table = Table.of(measured)
    kinds = tuple(data.draw(st.permutations([*table.kinds, a_kind("new")])))
    fast = table.some(table.rows[:, 2] > 1.0).among(kinds).measured()
    points = {speeds.kind: sorted(point for point in speeds.points if point[1] > 1.0) for speeds in measured}
    assert fast == tuple(MeasuredSpeeds(kind, tuple(points.get(kind, ()))) for kind in kinds)


@given(_measured, _measured)
def test_points_are_found_by_kind_and_size(one: list[MeasuredSpeeds], other: list[MeasuredSpeeds]) -> None:
    kinds = tuple(sorted({speeds.kind for speeds in [*one, *other]}))
    known, asked = Table.of(one).among(kinds), Table.of(other).among(kinds)
    places, there = known.find(asked)
    sizes = [(speeds.kind, *point.allocation) for speeds in known.measured() for point in speeds.points]
    wanted = [(speeds.kind, *point.allocation) for speeds in asked.measured() for point in speeds.points]
    assert there.tolist() == [size in sizes for size in wanted]
    assert [sizes[place] for place in places[there].tolist()] == [size for size in wanted if size in sizes]
    assert sizes == sorted(sizes)
    together = np.insert(known.codes, places, asked.codes)
    assert (together[1:] >= together[:-1]).all(), "in order where they would be"


def test_what_grids_say_of_points() -> None:
    """All-reduce jobs have one row, whatever servers; beyond the bounds nothing is said, nor of an unknown kind."""
    ring = a_kind("ring", architecture=Architecture.ALLREDUCE)
    table = Table.of(
        MeasuredSpeeds(kind, tuple(SpeedPoint(Allocation(*size), 1.0, 1) for size in sizes))
        for kind, sizes in {
            a_kind("m"): [(1, 1), (2, 1), (3, 1)],
            a_kind("n"): [(1, 1)],
            ring: [(2, 0), (2, 1), (9, 0)],
        }.items()
    )
    grids = {a_kind("m"): np.array([[0.0, 0.0, 0.0], [0.0, 5.0, 6.0]]), ring: np.array([[0.0, 7.0, 8.0]])}
    assert table.in_grids(grids).tolist() == [5.0, 6.0, 0.0, 0.0, 8.0, 8.0, 0.0]
    assert table.in_grids({}).tolist() == [0.0] * 7
