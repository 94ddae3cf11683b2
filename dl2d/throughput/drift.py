"""Speeds as they are now: what was measured before the speeds of a kind changed is put right."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np

from dl2d.core.measured import WRONG
from dl2d.throughput.observations import AT, BEFORE, JOBS, SINCE, SPEED, TIMES, Table


def up_to_date(measured: Table) -> Table:
    """Measured speeds without their times, those from before a change multiplied by as much as others changed since.

    When a cluster or a model's code changes overnight, the sizes that jobs run at show it at once, and those that were
    measured long ago look better, or worse, than they are. A size at which the speed changed (``SpeedPoint.before``)
    tells of all that were measured last before that; several count with their median. What was put right counts
    as measured once.
    """
    rows = measured.rows
    now = rows[:, : JOBS + 1].copy()
    (changed,) = np.nonzero((rows[:, BEFORE] > 0) & (rows[:, SPEED] > 0))
    changes = np.log(rows[changed, SPEED] / rows[changed, BEFORE])
    right = np.abs(changes) < WRONG
    changed, changes = changed[right], changes[right]
    later = (measured.kind_of[:, None] == measured.kind_of[changed]) & (rows[:, AT, None] < rows[changed, SINCE])
    medians: dict[bytes, float] = {}
    for place in np.flatnonzero(later.any(axis=1)).tolist():
        which = later[place].tobytes()
        if which not in medians:
            medians[which] = math.exp(statistics.median(changes[later[place]].tolist()))
        now[place, SPEED] *= medians[which]
        now[place, TIMES] = 1.0
    return replace(measured, rows=now)
