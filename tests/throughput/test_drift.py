from __future__ import annotations

import pytest
from throughput.test_gaussian_process import SMOOTH, SPREAD, a_kind, a_request, of_model, told

from dl2d.core.jobs import Allocation
from dl2d.core.measured import MeasuredSpeeds, SpeedPoint
from dl2d.throughput.drift import up_to_date
from dl2d.throughput.gaussian_process import Belief
from dl2d.throughput.observations import Table

NIGHT = 1000.0


def point(workers: int, speed: float, *, at: float = 1.0, since: float = 1.0, before: float = 0.0) -> SpeedPoint:
    return SpeedPoint(Allocation(workers, 1), speed, 5, 2, at, since, before)


def now(*points: SpeedPoint) -> list[SpeedPoint]:
    [speeds] = mended(MeasuredSpeeds(a_kind("m"), points))
    return list(speeds.points)


def mended(*measured: MeasuredSpeeds) -> tuple[MeasuredSpeeds, ...]:
    return up_to_date(Table.of(measured)).measured()


def test_without_changes_all_is_as_measured_but_for_the_times() -> None:
    assert now(point(1, 10.0), point(2, 20.0, at=5.0)) == [
        SpeedPoint(Allocation(1, 1), 10.0, 5, 2),
        SpeedPoint(Allocation(2, 1), 20.0, 5, 2),
    ]


def test_what_was_measured_before_a_change_changes_as_much_and_counts_once() -> None:
    """Sizes 2 and 3 went to 0.7 and 0.8 of what they were; size 1 was not seen since; size 4 was measured after."""
    found = now(
        point(1, 10.0, at=900.0),
        point(2, 14.0, at=1200.0, since=NIGHT, before=20.0),
        point(3, 24.0, at=1100.0, since=NIGHT + 10, before=30.0),
        point(4, 40.0, at=1300.0, since=1300.0),
    )
    median = (0.7 * 0.8) ** 0.5
    assert found[0] == SpeedPoint(Allocation(1, 1), pytest.approx(10.0 * median), 1, 2)
    assert [each.samples_per_second for each in found[1:]] == [14.0, 24.0, 40.0]
    assert [each.measurements for each in found[1:]] == [5, 5, 5]


def test_a_speed_that_had_been_wrong_says_nothing_of_others() -> None:
    found = now(point(1, 10.0, at=900.0), point(2, 20.0, at=1200.0, since=NIGHT, before=200.0), point(3, 0.0))
    assert [each.samples_per_second for each in found] == [10.0, 20.0, 0.0]


def test_another_kind_does_not_change() -> None:
    changed = MeasuredSpeeds(a_kind("m"), (point(2, 14.0, at=1200.0, since=NIGHT, before=20.0),))
    still = MeasuredSpeeds(a_kind("n"), (point(2, 14.0),))
    assert mended(changed, still)[1].points == (SpeedPoint(Allocation(2, 1), 14.0, 5, 2),)


def test_after_a_night_one_size_tells_of_all_and_the_best_stays_the_best() -> None:
    model = SMOOTH["a"]
    seen = of_model("m", model, [(w, p) for w in (1, 2, 4, 8, 16) for p in (1, 2, 4, 8, 16)])
    best = max(seen.points, key=lambda each: each.samples_per_second)
    slower = [
        each._replace(
            samples_per_second=0.7 * each.samples_per_second, before=each.samples_per_second, since=NIGHT, at=NIGHT
        )
        if each is best
        else each
        for each in seen.points
    ]
    grid = Belief(mended(MeasuredSpeeds(seen.kind, tuple(slower)))).grid(a_request("m"))
    assert grid[best.allocation.ps, best.allocation.workers] == pytest.approx(grid.max(), rel=0.05)
    believed = Belief([MeasuredSpeeds(seen.kind, tuple(slower))]).grid(a_request("m"))
    assert believed[best.allocation.ps, best.allocation.workers] < 0.85 * believed.max()
    assert mended(told("m", dict.fromkeys(SPREAD, 1.0)))[0].points[0].measurements == 1
