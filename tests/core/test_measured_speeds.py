from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl2d.core.jobs import Allocation
from dl2d.core.measured_speeds_and_losses import MAX_MEASUREMENTS, Count, SpeedPoint, Tally, count, mean_point

SIZE = Allocation(2, 1)


def tally(*said: tuple[float, str]) -> Tally:
    """Of measurements and the jobs that showed them, a second apart."""
    (speed, job), *rest = said
    made = Tally.first(SIZE, speed, job=job, at=1.0)
    for at, (more, who) in enumerate(rest, start=2):
        made = made.counted(more, job=who, at=float(at))
    return made


def test_a_few_measurements_have_their_plain_mean() -> None:
    point = tally((10.0, "a"), (11.0, "a"), (12.0, "b")).point
    assert point == SpeedPoint(SIZE, pytest.approx(11.0), 3, jobs=2, last_measured=3.0, first_measured=1.0)


def test_from_sixteen_on_each_counts_for_a_sixteenth() -> None:
    made = tally(*[(50.0, "a")] * 100)
    assert made.point == SpeedPoint(
        SIZE, pytest.approx(50.0), MAX_MEASUREMENTS, jobs=1, last_measured=100.0, first_measured=1.0
    )
    assert made.counted(58.0, job="a", at=101.0).point.samples_per_second == pytest.approx(50.5)


def test_what_one_job_alone_says_does_not_count_against_others() -> None:
    many = [(50.0, "a"), (51.0, "b"), (49.0, "a")]
    assert tally(*many, (500.0, "x"), (500.0, "x"), (500.0, "x")).point.samples_per_second == pytest.approx(50.0)
    # In between another says what all say: it is forgotten.
    assert tally(*many, (500.0, "x"), (50.0, "a"), (500.0, "y")).point.samples_per_second == pytest.approx(50.0)
    # They do not say the same either.
    assert tally(*many, (500.0, "x"), (5.0, "y"), (1.0, "z")).point.samples_per_second == pytest.approx(50.0)


@pytest.mark.parametrize("after", [35.0, 66.0])
def test_speeds_that_changed_are_those_that_two_jobs_say_or_one_that_said_otherwise(after: float) -> None:
    many = [(50.0, "a")] * 20
    two = tally(*many, (after, "b"), (after, "c")).point
    assert two == SpeedPoint(SIZE, after, 2, jobs=2, last_measured=22.0, first_measured=21.0, previous_speed=50.0)
    assert tally(*many, (after, "a")).point.samples_per_second == 50.0
    assert tally(*many, (after, "a"), (after, "a")).point == two._replace(jobs=1)


def test_a_single_wrong_measurement_gives_way_to_more_right_ones() -> None:
    assert tally((500.0, "x"), (50.0, "a"), (50.0, "a")).point.samples_per_second == 50.0
    assert tally((500.0, "x"), (50.0, "a"), (50.0, "b")).point.samples_per_second == 50.0
    assert tally((500.0, "x"), (50.0, "a")).point.samples_per_second == 500.0


def test_a_jobs_second_word_at_a_size_takes_the_place_of_a_first_one_that_is_far_off() -> None:
    # The first may still have been of the size before.
    assert tally((500.0, "a"), (50.0, "a")).point == SpeedPoint(
        SIZE, 50.0, 1, jobs=1, last_measured=2.0, first_measured=2.0
    )
    assert tally((500.0, "a"), (50.0, "a"), (52.0, "a")).point.samples_per_second == pytest.approx(51.0)


OTHER = Allocation(4, 4)


def test_who_is_at_odds_with_others_counts_at_no_other_size_until_it_was_right() -> None:
    known = tally((50.0, "a"), (50.0, "b"))
    first = count(known, SIZE, 500.0, job="x", at=3.0, quarantined=None)
    assert (first.tally.point, first.quarantined) == (known.point, SIZE)
    assert count(None, OTHER, 9.0, job="x", at=4.0, quarantined=SIZE) == Count(None, SIZE)
    assert count(first.tally, SIZE, 50.0, job="x", at=5.0, quarantined=SIZE).quarantined is None


def test_who_is_at_odds_with_two_others_is_not_believed_at_sizes_where_nobody_else_was() -> None:
    two, one = tally((50.0, "a"), (50.0, "b")), tally((50.0, "a"))
    assert count(two, SIZE, 500.0, job="x", at=3.0, quarantined=None).mislabelled == "x"
    # Once, and not on the word of a single other, who may as well be the one that is wrong.
    assert count(two, SIZE, 500.0, job="x", at=3.0, quarantined=SIZE).mislabelled is None
    assert count(one, SIZE, 500.0, job="x", at=3.0, quarantined=None).mislabelled is None
    assert count(two, SIZE, 51.0, job="x", at=3.0, quarantined=None).mislabelled is None
    # Speeds may change by this much.
    assert count(two, SIZE, 30.0, job="x", at=3.0, quarantined=None).mislabelled is None


def test_who_was_first_at_a_size_and_is_outvoted_is_not_believed_elsewhere() -> None:
    told_otherwise = tally((500.0, "x"), (50.0, "a"))
    assert count(told_otherwise, SIZE, 51.0, job="b", at=3.0, quarantined=None).mislabelled == "x"
    assert count(told_otherwise, SIZE, 51.0, job="a", at=3.0, quarantined=SIZE).mislabelled == "x"
    changed = tally((70.0, "x"), (50.0, "a"))
    assert count(changed, SIZE, 50.0, job="b", at=3.0, quarantined=None).mislabelled is None
    known = tally((500.0, "x"), (500.0, "y"), (50.0, "a"))
    assert count(known, SIZE, 50.0, job="b", at=3.0, quarantined=None).mislabelled is None
    assert count(tally((500.0, "x")), SIZE, 50.0, job="x", at=3.0, quarantined=None).mislabelled is None


def test_without_a_job_there_is_left_what_others_showed() -> None:
    assert tally((9.0, "x")).without("x") is None
    assert tally((9.0, "x"), (9.0, "x")).without("x") is None
    assert tally((9.0, "x"), (50.0, "a")).without("x") == Tally(SpeedPoint(SIZE, 50.0, 1, 1, 2.0, 2.0), "a")
    for said in (tally((9.0, "x"), (9.0, "a")), tally((9.0, "a")), tally((50.0, "a"), (9.0, "x"))):
        assert said.without("x") == said


def test_who_is_at_odds_with_itself_alone_is_listened_to() -> None:
    known = tally((50.0, "a"), (50.0, "a"))
    made = count(known, SIZE, 20.0, job="a", at=3.0, quarantined=None)
    assert (made.tally.point, made.quarantined) == (known.point, None)


@given(st.lists(st.tuples(st.floats(1e-3, 1e6), st.sampled_from("abc")), min_size=1, max_size=60))
def test_the_mean_is_within_what_was_measured(said: list[tuple[float, str]]) -> None:
    point, speeds = tally(*said).point, [speed for speed, _ in said]
    assert min(speeds) * (1 - 1e-9) <= point.samples_per_second <= max(speeds) * (1 + 1e-9)
    assert 1 <= point.jobs <= point.measurements <= MAX_MEASUREMENTS
    assert 1 <= point.first_measured <= point.last_measured <= len(said)


def test_a_jobs_own_point_is_the_mean_point_what_it_said() -> None:
    assert mean_point(SIZE, [(10.0, 3.0), (20.0, 5.0)]) == SpeedPoint(
        SIZE, 4.0, 2, jobs=1, last_measured=20.0, first_measured=10.0
    )
