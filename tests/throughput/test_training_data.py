"""From what a snapshot has to what the model is conditioned on."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from throughput.test_gaussian_process import SMOOTH, SPREAD, a_kind, a_request, fitted, of_model, told

from dl2d.core.jobs import Allocation
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds, SpeedPoint
from dl2d.throughput.training_data import (
    as_measured,
    as_points,
    by_kind,
    calibration,
    informative,
    merged,
    merged_kinds,
    speeds_at,
    without_drift,
)

KIND = a_kind("m")
SPEEDS = {(workers, ps): workers / (1 + 0.1 * ps) for workers in (1, 2, 3) for ps in (1, 2, 3)}
NIGHT = 1000.0

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


def measured(speeds: dict[tuple[int, int], float]) -> MeasuredSpeeds:
    return told("m", speeds, 100)


@given(st.dictionaries(st.sampled_from("abcd"), st.lists(_points, max_size=6), max_size=4))
def test_points_come_back_in_the_order_of_sizes(points: dict[str, list[SpeedPoint]]) -> None:
    speeds = [MeasuredSpeeds(a_kind(model), tuple(own)) for model, own in points.items()]
    assert list(as_measured(by_kind(speeds))) == [MeasuredSpeeds(one.kind, tuple(sorted(one.points))) for one in speeds]


def test_what_a_grid_says_of_points() -> None:
    """All-reduce jobs have one row, whatever servers; beyond the bounds nothing is said."""
    grid = np.array([[0.0, 0.0, 0.0], [0.0, 5.0, 6.0]])
    points = as_points(SpeedPoint(Allocation(*size), 1.0, 1) for size in [(1, 1), (2, 1), (2, 2), (3, 1)])
    assert speeds_at(grid, points).tolist() == [5.0, 6.0, 0.0, 0.0]
    ring = as_points(SpeedPoint(Allocation(*size), 1.0, 1) for size in [(2, 0), (2, 1), (9, 0)])
    assert speeds_at(np.array([[0.0, 7.0, 8.0]]), ring).tolist() == [8.0, 8.0, 0.0]


def point(
    workers: int, speed: float, *, at: float = 1.0, since: float = 1.0, previous_speed: float = 0.0
) -> SpeedPoint:
    return SpeedPoint(Allocation(workers, 1), speed, 5, 2, at, since, previous_speed)


def now(*points: SpeedPoint) -> list[SpeedPoint]:
    [speeds] = mended(MeasuredSpeeds(a_kind("m"), points))
    return list(speeds.points)


def mended(*speeds: MeasuredSpeeds) -> tuple[MeasuredSpeeds, ...]:
    return as_measured({kind: without_drift(points) for kind, points in by_kind(speeds).items()})


def test_without_changes_all_is_as_measured_but_for_the_times() -> None:
    assert now(point(1, 10.0), point(2, 20.0, at=5.0)) == [
        SpeedPoint(Allocation(1, 1), 10.0, 5, 2),
        SpeedPoint(Allocation(2, 1), 20.0, 5, 2),
    ]


def test_what_was_measured_before_a_change_changes_as_much_and_counts_once() -> None:
    """Sizes 2 and 3 went to 0.7 and 0.8 of what they were; size 1 was not seen since; size 4 was measured after."""
    found = now(
        point(1, 10.0, at=900.0),
        point(2, 14.0, at=1200.0, since=NIGHT, previous_speed=20.0),
        point(3, 24.0, at=1100.0, since=NIGHT + 10, previous_speed=30.0),
        point(4, 40.0, at=1300.0, since=1300.0),
    )
    median = (0.7 * 0.8) ** 0.5
    assert found[0] == SpeedPoint(Allocation(1, 1), pytest.approx(10.0 * median), 1, 2)
    assert [each.samples_per_second for each in found[1:]] == [14.0, 24.0, 40.0]
    assert [each.measurements for each in found[1:]] == [5, 5, 5]


def test_a_speed_that_had_been_wrong_says_nothing_of_others() -> None:
    found = now(point(1, 10.0, at=900.0), point(2, 20.0, at=1200.0, since=NIGHT, previous_speed=200.0), point(3, 0.0))
    assert [each.samples_per_second for each in found] == [10.0, 20.0, 0.0]


def test_another_kind_does_not_change() -> None:
    changed = MeasuredSpeeds(a_kind("m"), (point(2, 14.0, at=1200.0, since=NIGHT, previous_speed=20.0),))
    still = MeasuredSpeeds(a_kind("n"), (point(2, 14.0),))
    assert mended(changed, still)[1].points == (SpeedPoint(Allocation(2, 1), 14.0, 5, 2),)


def test_after_a_night_one_size_tells_of_all_and_the_best_stays_the_best() -> None:
    model = SMOOTH["a"]
    seen = of_model("m", model, [(w, p) for w in (1, 2, 4, 8, 16) for p in (1, 2, 4, 8, 16)])
    best = max(seen.points, key=lambda each: each.samples_per_second)
    slower = [
        each._replace(
            samples_per_second=0.7 * each.samples_per_second,
            previous_speed=each.samples_per_second,
            first_measured=NIGHT,
            last_measured=NIGHT,
        )
        if each is best
        else each
        for each in seen.points
    ]
    grid = fitted(mended(MeasuredSpeeds(seen.kind, tuple(slower)))).predict_speeds(a_request("m"))
    assert grid[best.allocation.ps, best.allocation.workers] == pytest.approx(grid.max(), rel=0.05)
    believed = fitted([MeasuredSpeeds(seen.kind, tuple(slower))]).predict_speeds(a_request("m"))
    assert believed[best.allocation.ps, best.allocation.workers] < 0.85 * believed.max()
    assert mended(told("m", dict.fromkeys(SPREAD, 1.0)))[0].points[0].measurements == 1


def factor(
    seen: dict[tuple[int, int], float], known: Collection[tuple[int, int]] = (), expected: float = 10.0
) -> float:
    """Where all sizes up to 3 x 3 are expected to have one speed, and some are among those that are known."""
    points = as_points(measured(seen).points)
    return calibration(points, np.full(len(points), expected), as_points(measured(dict.fromkeys(known, 1.0)).points))


def test_a_kind_is_calibrated_where_nearly_all_sizes_are_faster_or_slower_alike() -> None:
    all_faster = dict.fromkeys([(1, 1), (2, 2), (3, 1)], 20.0)
    assert factor(all_faster) == pytest.approx(2.0, rel=0.02)
    assert factor(dict.fromkeys(all_faster, 5.0)) == pytest.approx(0.5, rel=0.02)
    assert factor(dict.fromkeys([(1, 1), (2, 2)], 20.0)) == 1.0, "too few"
    assert factor({(1, 1): 20.0, (2, 2): 20.0, (3, 1): 10.0, (1, 3): 10.0}) == 1.0
    assert factor(dict.fromkeys(all_faster, 12.0)) == 1.0, "not by much"
    assert factor(all_faster, expected=0.0) == 1.0
    sizes = {(1, 1): 5.0, (2, 2): 5.0, (3, 1): 5.0, (1, 3): 20.0, (2, 1): 20.0, (3, 3): 20.0}
    assert factor(sizes) == 1.0
    both = {size for size, speed in sizes.items() if speed > 10.0}
    assert factor(sizes, both) == pytest.approx(2.0, rel=0.02), "those that are known tell"


def test_points_near_what_is_expected_add_no_information() -> None:
    points = as_points(measured({(1, 1): 10.4, (2, 1): 10.6, (3, 1): 9.6, (4, 1): 0.0, (5, 1): 10.0}).points)
    expected = np.array([10.0, 10.0, 10.0, 10.0, 0.0])
    assert informative(points, expected)["workers"].tolist() == [2, 4, 5]


def together(known: Collection[MeasuredSpeeds], news: Collection[MeasuredSpeeds]) -> tuple[MeasuredSpeeds, ...]:
    return as_measured(merged_kinds(by_kind(known), by_kind(news)))


def test_what_is_measured_again_much_the_same_changes_nothing() -> None:
    known = (measured(SPEEDS),)
    again = (measured({size: speed * 1.01 for size, speed in SPEEDS.items()}),)
    assert together(known, again) == together(known, ()) == known
    other = together(known, (measured({(1, 1): 5.0}),))[0].points[0]
    assert other.samples_per_second == pytest.approx(5.0, rel=0.01)
    assert other.measurements == 64


def test_what_was_measured_counts_where_both_know_a_size_and_all_stay_in_order() -> None:
    rng = np.random.default_rng(6)
    for _ in range(200):
        known, news = (
            measured({tuple(rng.integers(1, 6, 2).tolist()): float(rng.choice([1.0, 1.01, 3.0])) for _ in range(count)})
            for count in rng.integers(0, 15, 2)
        )
        own = {point.allocation: point for point in known.points}
        for point in news.points:
            before = own.get(point.allocation)
            if before is None or abs(np.log(before.samples_per_second / point.samples_per_second)) >= 0.02:
                own[point.allocation] = as_measured({KIND: merged(as_points(()), as_points((point,)))})[0].points[0]
        assert together((known,), (news,)) == (MeasuredSpeeds(KIND, tuple(sorted(own.values()))),)
