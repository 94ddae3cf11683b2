from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl2d.core.jobs import Allocation
from dl2d.core.measured import MOST_MEASUREMENTS, SpeedPoint

NONE = SpeedPoint(Allocation(2, 1), 0.0, 0)


def test_a_few_measurements_have_their_plain_mean() -> None:
    point = NONE
    for speed in (10.0, 20.0, 60.0):
        point = point.counted(speed)
    assert point == (Allocation(2, 1), pytest.approx(30.0), 3)


def test_from_sixteen_on_each_counts_for_a_sixteenth() -> None:
    point = NONE
    for _ in range(100):
        point = point.counted(50.0)
    assert point == (Allocation(2, 1), pytest.approx(50.0), MOST_MEASUREMENTS)
    assert point.counted(66.0).samples_per_second == pytest.approx(51.0)


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=60))
def test_the_mean_is_within_what_was_measured(speeds: list[float]) -> None:
    point = NONE
    for speed in speeds:
        point = point.counted(speed)
    assert min(speeds) * (1 - 1e-9) <= point.samples_per_second <= max(speeds) * (1 + 1e-9)
    assert point.measurements == min(len(speeds), MOST_MEASUREMENTS)
