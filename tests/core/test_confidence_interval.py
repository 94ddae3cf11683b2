from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl2d.core.confidence_interval import estimate, paired_change, paired_difference

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20)


def test_mean_deviation_and_interval_by_hand() -> None:
    # 1..5: mean 3, sum of squares 10, s = sqrt(10 / 4); t(4 degrees, 97.5 %) = 2.776445 by the printed table.
    made = estimate([1, 2, 3, 4, 5])
    assert made.count == 5
    assert made.mean == 3
    assert made.deviation == pytest.approx(math.sqrt(2.5))
    assert made.half_width == pytest.approx(2.776445 * math.sqrt(2.5) / math.sqrt(5), rel=1e-6)
    assert made.interval == pytest.approx((3 - 1.963243, 3 + 1.963243), rel=1e-6)


@pytest.mark.parametrize(
    ("count", "t"), [(2, 12.7062), (3, 4.30265), (6, 2.57058), (11, 2.22814), (31, 2.04227), (121, 1.97993)]
)
def test_quantiles_are_those_of_printed_tables(count: int, t: float) -> None:
    values = [0.0, 1.0] + [0.5] * (count - 2)
    made = estimate(values)
    assert made.half_width == pytest.approx(t * made.deviation / math.sqrt(count), rel=1e-5)


def test_one_value_has_no_interval_and_none_is_an_error() -> None:
    made = estimate([7.0])
    assert (made.count, made.mean, made.deviation, made.half_width, made.interval) == (1, 7.0, None, None, None)
    with pytest.raises(ValueError, match="no values"):
        estimate([])


@given(VALUES, st.floats(-1e3, 1e3), st.floats(0.01, 100))
def test_intervals_move_and_stretch_with_the_values(values: list[float], shift: float, factor: float) -> None:
    made = estimate(values)
    moved = estimate([value * factor + shift for value in values])
    assert made.interval[0] <= made.mean <= made.interval[1]
    assert moved.mean == pytest.approx(made.mean * factor + shift, abs=1e-3)
    assert moved.half_width == pytest.approx(made.half_width * factor, rel=1e-3, abs=1e-3)


def test_equal_values_leave_no_doubt() -> None:
    assert estimate([2.5] * 4).interval == (2.5, 2.5)


def test_differences_are_taken_seed_by_seed() -> None:
    # Seeds differ a hundredfold, the policies by 1 and 3: differences 1, 3 have mean 2, s = sqrt(2), t(1) = 12.7062.
    baseline = {0: 1.0, 1: 100.0}
    made = paired_difference({0: 2.0, 1: 103.0}, baseline)
    assert made.mean == 2
    assert made.half_width == pytest.approx(12.7062 * math.sqrt(2) / math.sqrt(2), rel=1e-5)
    change = paired_change({0: 2.0, 1: 103.0}, baseline)
    assert change.mean == pytest.approx((1.0 + 0.03) / 2)


def test_only_seeds_that_both_have_are_compared() -> None:
    made = paired_difference({0: 5.0, 1: 7.0, 2: 100.0}, {1: 4.0, 0: 4.0, 3: 1.0})
    assert (made.count, made.mean) == (2, 2.0)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    assert paired_change({0: 1.0}, {}) is None
    assert paired_change({0: 1.0, 1: 3.0}, {0: 0.0, 1: 2.0}).mean == 0.5
