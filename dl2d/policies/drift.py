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
        (since, math.log(speed / before)) for _, speed, _, _, _, since, before in points if before > 0 and speed > 0
    ]
    changes = [(since, change) for since, change in changes if abs(change) < WRONG]
    if not changes:
        return tuple([SpeedPoint(size, speed, times, jobs) for size, speed, times, jobs, _, _, _ in points])
    made = []
    for point in points:
        later = [change for since, change in changes if since > point.at]
        speed, times = point.samples_per_second, point.measurements
        if later:
            speed, times = speed * math.exp(statistics.median(later)), 1
        made.append(SpeedPoint(point.allocation, speed, times, point.jobs))
    return tuple(made)
