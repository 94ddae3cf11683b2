"""Training data of the throughput model: measured speeds as arrays, corrected for drift and joined with known ones.

Four steps lead from what a snapshot has to what the model is conditioned on, each a function of one kind's points:

1. ``without_drift``: speeds that were measured before their kind became faster or slower are brought up to date.
2. ``calibration``: by which factor a kind is faster here than where the known speeds were measured.
3. ``informative``: points within 5 % of what the model predicts from the known speeds alone are left out.
4. ``merged``: the known speeds, calibrated, and the informative points, which count where both have a size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Allocation
from dl2d.core.measured_speeds import FAR, WRONG, MeasuredSpeeds, SpeedPoint, TrainingKind

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
#: Structured array with a ``SpeedPoint`` in each element, in the order of workers, then PSs.
Points = NDArray[np.void]

POINT: Final = np.dtype(
    [
        ("workers", np.int64), ("ps", np.int64), ("speed", np.float64), ("measurements", np.float64),
        ("jobs", np.float64), ("at", np.float64), ("since", np.float64), ("before", np.float64),
    ]
)  # fmt: skip

#: Points that a calibration needs at least, and the share of them that may disagree with it.
_MIN_POINTS: Final = 3
_DISAGREEING: Final = 0.25
#: Calibrations are rounded to this, as natural logarithm.
_CALIBRATION_STEP: Final = 0.02
#: A speed within this part of the prediction adds no information.
_PREDICTED: Final = 0.05
#: A speed within this part of the known one is the same; measured ones are rounded to it.
_SAME: Final = 0.02
#: Jobs beyond which it does not matter how many showed a speed.
_MAX_JOBS: Final = 3.0


def as_points(points: Iterable[SpeedPoint]) -> Points:
    """Points as an array."""
    return np.array([(*size, *rest) for size, *rest in sorted(points)], dtype=POINT)


def by_kind(measured: Iterable[MeasuredSpeeds]) -> dict[TrainingKind, Points]:
    """Measured speeds as arrays."""
    return {speeds.kind: as_points(speeds.points) for speeds in measured}


def as_measured(observations: Mapping[TrainingKind, Points]) -> tuple[MeasuredSpeeds, ...]:
    """Inverse of ``by_kind``."""
    return tuple(
        MeasuredSpeeds(
            kind,
            tuple(
                SpeedPoint(Allocation(workers, ps), speed, int(measurements), int(jobs), *times)
                for workers, ps, speed, measurements, jobs, *times in points.tolist()
            ),
        )
        for kind, points in observations.items()
    )


def sizes_of(points: Points) -> Ints:
    """Workers and PSs, shape (n, 2)."""
    return np.stack([points["workers"], points["ps"]], axis=1)


def speeds_at(grid: Floats, points: Points) -> Floats:
    """What a grid, as ``KnownSpeeds.grid`` has it, says of each point, shape (n,); 0 beyond its bounds."""
    # All-reduce jobs have one row, whatever PSs they are said to have.
    workers, ps = points["workers"], points["ps"] if len(grid) > 1 else np.zeros(len(points), dtype=np.int64)
    inside = (ps < grid.shape[0]) & (workers < grid.shape[1])
    found = np.zeros(len(points))
    found[inside] = grid[ps[inside], workers[inside]]
    return found


def without_drift(points: Points) -> Points:
    """Speeds as they are now, without their times.

    When a cluster or a model's code changes, the sizes that jobs run at show it at once; those that were measured
    before would look faster, or slower, than they are. A speed that was measured last before others of its kind changed
    (``SpeedPoint.before``, ``since``) is multiplied by the median of their factors, and counts as measured once.
    """
    now = points.copy()
    changed = points[(points["before"] > 0) & (points["speed"] > 0)]
    changes = np.log(changed["speed"] / changed["before"])
    right = np.abs(changes) < WRONG
    later = points["at"][:, None] < changed["since"][right]
    outdated = later.any(axis=1)
    if outdated.any():
        now["speed"][outdated] *= np.exp(np.nanmedian(np.where(later[outdated], changes[right], np.nan), axis=1))
        now["measurements"][outdated] = 1.0
    for time in ("at", "since", "before"):
        now[time] = 0.0
    return now


def calibration(points: Points, expected: Floats, known: Points) -> float:
    """Factor between measured and expected speeds of a kind: 1 unless they differ by more than 28 % nearly everywhere.

    The median factor of the sizes that are among the known ones (of all sizes where those are fewer than three), if
    three quarters of them agree that it is beyond 28 %. Other hardware, or another unit, makes all sizes of a kind
    faster or slower alike; without this, sizes that were measured here would look better, or worse, than all others.

    Parameters
    ----------
    expected
        Samples/s predicted for each point, shape (n,); 0 where nothing is.
    """
    comparable = (points["speed"] > 0) & (expected > 0)
    both = comparable & np.isin(_codes(points), _codes(known))
    if both.sum() >= _MIN_POINTS:
        comparable = both
    if comparable.sum() < _MIN_POINTS:
        return 1.0
    factors = np.log(points["speed"][comparable] / expected[comparable])
    median = float(np.median(factors))
    if abs(median) <= FAR or np.quantile(np.sign(median) * factors, _DISAGREEING) <= FAR:
        return 1.0
    return float(np.exp(round(median / _CALIBRATION_STEP) * _CALIBRATION_STEP))


def scaled(points: Points, factor: float) -> Points:
    """Points with all speeds multiplied."""
    faster = points.copy()
    faster["speed"] *= factor
    return faster


def informative(points: Points, expected: Floats) -> Points:
    """Points more than 5 % off what is expected; samples/s of each, shape (n,), 0 where nothing is expected."""
    return points[~_near(points["speed"], expected, _PREDICTED)]


def merged(known: Points, measured: Points) -> Points:
    """Known and measured points; of a size that both have, the measured one unless they are within 2 %.

    Measured speeds are rounded to 2 % and counts of measurements to powers of two, so that noise in them does not
    change decisions.
    """
    if not len(measured):
        return known
    _, of_known, of_measured = np.intersect1d(_codes(known), _codes(measured), assume_unique=True, return_indices=True)
    one, other = known["speed"][of_known], measured["speed"][of_measured]
    same = (one == other) | _near(one, other, _SAME)
    together = np.concatenate([np.delete(known, of_known[~same]), _rounded(np.delete(measured, of_measured[same]))])
    return together[np.argsort(_codes(together), kind="stable")]


def merged_kinds(
    known: Mapping[TrainingKind, Points], measured: Mapping[TrainingKind, Points]
) -> dict[TrainingKind, Points]:
    """``merged`` of each kind."""
    nothing = np.empty(0, dtype=POINT)
    kinds = sorted({*known, *measured})
    return {kind: merged(known.get(kind, nothing), measured.get(kind, nothing)) for kind in kinds}


def _codes(points: Points) -> Ints:
    """One number for each size, in the order of sizes."""
    codes: Ints = (points["workers"] << 32) + points["ps"]
    return codes


def _near(one: Floats, other: Floats, limit: float) -> Bools:
    """Whether speeds, none of them 0, differ by less than ``limit``, as natural logarithm."""
    moves = (one > 0) & (other > 0)
    near: Bools = moves & (np.abs(np.log(np.divide(one, other, where=moves, out=np.ones_like(one)))) < limit)
    return near


def _rounded(points: Points) -> Points:
    rounded = points.copy()
    moves = rounded["speed"] > 0
    rounded["speed"][moves] = np.exp(np.round(np.log(rounded["speed"][moves]) / _SAME) * _SAME)
    counted = rounded["measurements"] > 0
    rounded["measurements"][counted] = np.exp2(np.floor(np.log2(rounded["measurements"][counted])))
    np.minimum(rounded["jobs"], _MAX_JOBS, out=rounded["jobs"])
    return rounded
