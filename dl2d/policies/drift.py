"""Speeds as they are now: what was measured before the speeds of a kind changed is put right."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from dl2d.core.measured import WRONG, MeasuredSpeeds, SpeedPoint


def up_to_date(measured: Iterable[MeasuredSpeeds]) -> tuple[MeasuredSpeeds, ...]:
    """Measured speeds without their times, those from before a change multiplied by as much as others changed since.

    When a cluster or a model's code changes overnight, the sizes that jobs run at show it at once, and those that were
    measured long ago look better, or worse, than they are. A size at which the speed changed (``SpeedPoint.before``)
    tells of all that were measured last before that; several count with their median. What was put right counts
    as measured once.
    """
    return tuple(MeasuredSpeeds(speeds.kind, _as_now(speeds.points)) for speeds in measured)


def _as_now(points: tuple[SpeedPoint, ...]) -> tuple[SpeedPoint, ...]:
    changes = [
        (point.since, math.log(point.samples_per_second / point.before))
        for point in points
        if point.before > 0 and point.samples_per_second > 0
    ]
    changes = [(since, change) for since, change in changes if abs(change) < WRONG]
    made = []
    for point in points:
        later = [change for since, change in changes if since > point.at]
        speed, times = point.samples_per_second, point.measurements
        if later:
            speed, times = speed * math.exp(statistics.median(later)), 1
        made.append(SpeedPoint(point.allocation, speed, times, point.jobs))
    return tuple(made)
