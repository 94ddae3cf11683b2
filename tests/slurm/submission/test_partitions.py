"""Time limits of tasks."""

from __future__ import annotations

import math

import pytest

from dl2d.tick.observation.observe import SAME_END_SECONDS
from dl2d_slurm.submission.partitions import Partition, task_time_limits

PARTITIONS = {"short": Partition("short", frozenset(), 3600.0), "long": Partition("long", frozenset())}
#: An anchor ends at 09:59:29 of the first day.
ENDS = 35_969.0


@pytest.mark.parametrize(
    ("left", "backfill_seconds", "minutes"),
    [
        (1200, 60, 18),
        (1200, 1, 19),
        (1200, 300, 14),
        (1200, 3600, 14),  # no more than 300 is taken into account
        (86_400, 300, 1434),
        (400, 300, 3),
        (150, 60, 1),
        (61, 60, 1),
        (0, 60, 1),
        (-100, 60, 1),
    ],
)
def test_a_task_that_is_backfilled_ends_before_what_slurm_plans_for_the_end_of_its_anchor(
    left: float, backfill_seconds: int, minutes: int
) -> None:
    now = ENDS - left
    longest, shortest = task_time_limits(ENDS, now, math.inf, ["long"], PARTITIONS, backfill_seconds)
    assert (longest, shortest or longest) == (str(max(1, math.floor(left / 60))), str(minutes))
    step = min(backfill_seconds, 300)
    if left >= 1200:
        assert now + 60 + 60 * minutes <= ENDS // step * step


def test_a_task_counts_as_ending_with_its_anchor() -> None:
    earlier = [
        ends - 60.0 * int(task_time_limits(ends, 0.0, math.inf, ["long"], PARTITIONS, backfill_seconds)[1])
        for ends in range(36_000, 36_600)
        for backfill_seconds in (1, 60, 300, 3600)
    ]
    assert max(earlier) <= SAME_END_SECONDS


@pytest.mark.parametrize(
    ("ends", "most", "names", "expected"),
    [
        (math.inf, math.inf, ["long"], "UNLIMITED"),
        (math.inf, math.inf, ["short"], "60"),
        (math.inf, 1799.0, ["short", "long"], "29"),
        (36_000.0, math.inf, ["short"], "60"),
        (36_000.0, 90.0, ["long"], "1"),
    ],
)
def test_a_task_has_no_more_than_its_partitions_and_the_settings_allow(
    ends: float, most: float, names: list[str], expected: str
) -> None:
    assert task_time_limits(ends, 0.0, most, names, PARTITIONS)[0] == expected
