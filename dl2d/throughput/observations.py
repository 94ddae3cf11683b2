"""Training data of the throughput model: measured speeds as arrays, corrected for drift and joined with known ones.

Four steps lead from the measurements of a snapshot to those that the model is conditioned on, each a function of the
points of one kind:

1. ``without_drift``: speeds that were measured before their kind became faster or slower are brought up to date.
2. ``calibration``: the factor by which a kind is faster here than where the known speeds were measured.
3. ``informative``: points within 5 % of what the model predicts from the known speeds alone are left out.
4. ``merged``: the known speeds, calibrated, are joined with the informative points, which replace known ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Allocation
from dl2d.core.measured_speeds import (
    OTHER_KIND_LOG_RATIO,
    SAME_SPEED_LOG_RATIO,
    MeasuredSpeeds,
    SpeedPoint,
    TrainingKind,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
#: Structured array of ``POINT`` with a ``SpeedPoint`` in each element, in the order of workers, then PSs.
Points = NDArray[np.void]

#: Fields of a ``SpeedPoint``, with the size as two counts and the speed in samples per second.
POINT: Final = np.dtype(
    [
        ("workers", np.int64), ("ps", np.int64), ("speed", np.float64), ("measurements", np.float64),
        ("jobs", np.float64), ("at", np.float64), ("since", np.float64), ("previous_speed", np.float64),
    ]
)  # fmt: skip

#: Least number of points from which a calibration is computed.
_MIN_POINTS: Final = 3
#: Fraction of the points that may disagree with a calibration.
_DISAGREEING: Final = 0.25
#: Step to which the logarithm of a calibration is rounded.
_CALIBRATION_STEP: Final = 0.02
#: Difference in logarithms to the prediction below which a measured speed adds no information.
_PREDICTED: Final = 0.05
#: Difference in logarithms below which a measured speed equals the known one; logarithms are rounded to this step.
_SAME: Final = 0.02
#: Number of jobs beyond which it makes no difference how many were measured.
_MAX_JOBS: Final = 3.0


def as_points(points: Iterable[SpeedPoint]) -> Points:
    """Convert points to an array; shape (n,)."""
    return np.array([(*size, *fields) for size, *fields in sorted(points)], dtype=POINT)


def by_kind(measured: Iterable[MeasuredSpeeds]) -> dict[TrainingKind, Points]:
    """Convert measured speeds to arrays, one for each kind."""
    return {speeds.kind: as_points(speeds.points) for speeds in measured}


def as_measured(observations: Mapping[TrainingKind, Points]) -> tuple[MeasuredSpeeds, ...]:
    """Convert arrays back to measured speeds: the inverse of ``by_kind``."""
    return tuple(
        MeasuredSpeeds(
            kind,
            tuple(
                SpeedPoint(Allocation(workers, ps), speed, int(measurements), int(jobs), *fields)
                for workers, ps, speed, measurements, jobs, *fields in points.tolist()
            ),
        )
        for kind, points in observations.items()
    )


def sizes_of(points: Points) -> Ints:
    """Workers and PSs of each point, shape (n, 2)."""
    return np.stack([points["workers"], points["ps"]], axis=1)


def speeds_at(grid: Floats, points: Points) -> Floats:
    """Look up the size of each point in a grid as of ``KnownSpeeds.grid``; shape (n,), 0 beyond the grid's bounds."""
    # All-reduce jobs have one row, even if their points have PSs.
    workers, ps = points["workers"], points["ps"] if len(grid) > 1 else np.zeros(len(points), dtype=np.int64)
    inside = (ps < grid.shape[0]) & (workers < grid.shape[1])
    speeds = np.zeros(len(points))
    speeds[inside] = grid[ps[inside], workers[inside]]
    return speeds


def without_drift(points: Points) -> Points:
    """Estimate the present speeds of a kind from points of different ages; the result has no times.

    When a cluster or a model's code changes, only the sizes at which jobs run are measured again; those that were
    measured before would look faster, or slower, than they are. So a speed that was measured last before speeds of the
    same kind changed (``SpeedPoint.since``, ``previous_speed``) is multiplied by the median factor of these changes,
    and counts as measured once.
    """
    current = points.copy()
    changed = points[(points["previous_speed"] > 0) & (points["speed"] > 0)]
    changes = np.log(changed["speed"] / changed["previous_speed"])
    # Where the speed changed by more than that, the previous one was of a job of another kind.
    of_kind = np.abs(changes) < OTHER_KIND_LOG_RATIO
    changed_later = points["at"][:, None] < changed["since"][of_kind]
    outdated = changed_later.any(axis=1)
    if outdated.any():
        later_changes = np.where(changed_later[outdated], changes[of_kind], np.nan)
        current["speed"][outdated] *= np.exp(np.nanmedian(later_changes, axis=1))
        current["measurements"][outdated] = 1.0
    for field in ("at", "since", "previous_speed"):
        current[field] = 0.0
    return current


def calibration(points: Points, predicted: Floats, known: Points) -> float:
    """Factor between measured and predicted speeds of a kind: 1 unless they differ by more than 28 % nearly everywhere.

    It is the median factor over the sizes that are among the known ones (over all sizes where those are fewer than
    three), if three quarters of them agree that it is beyond 28 %. Other hardware, or another unit of samples, makes
    all sizes of a kind faster or slower alike; without the factor, sizes that were measured here would look better, or
    worse, than all others.

    Parameters
    ----------
    points
        Measurements on this cluster, shape (n,).
    predicted
        Samples/s predicted for each point, shape (n,); 0 where there is no prediction.
    known
        Points that the predictions come from.
    """
    comparable = (points["speed"] > 0) & (predicted > 0)
    in_both = comparable & np.isin(_size_codes(points), _size_codes(known))
    if in_both.sum() >= _MIN_POINTS:
        comparable = in_both
    if comparable.sum() < _MIN_POINTS:
        return 1.0
    factors = np.log(points["speed"][comparable] / predicted[comparable])
    median = float(np.median(factors))
    agreed = np.quantile(np.sign(median) * factors, _DISAGREEING)
    if abs(median) <= SAME_SPEED_LOG_RATIO or agreed <= SAME_SPEED_LOG_RATIO:
        return 1.0
    return float(np.exp(round(median / _CALIBRATION_STEP) * _CALIBRATION_STEP))


def scaled(points: Points, factor: float) -> Points:
    """Points with all speeds multiplied by a factor."""
    multiplied = points.copy()
    multiplied["speed"] *= factor
    return multiplied


def informative(points: Points, predicted: Floats) -> Points:
    """Points that differ by more than 5 % from the prediction, or have none.

    Parameters
    ----------
    predicted
        Samples/s of each point, shape (n,); 0 where there is no prediction.
    """
    return points[~_differ_less(points["speed"], predicted, _PREDICTED)]


def merged(known: Points, measured: Points) -> Points:
    """Join known and measured points; of a size that both have, the measured one, unless they are within 2 %.

    Measured speeds are rounded to 2 % and counts of measurements to powers of two, so that noise in them does not
    change decisions.
    """
    if not len(measured):
        return known
    _, in_known, in_measured = np.intersect1d(
        _size_codes(known), _size_codes(measured), assume_unique=True, return_indices=True
    )
    known_speeds, measured_speeds = known["speed"][in_known], measured["speed"][in_measured]
    same = (known_speeds == measured_speeds) | _differ_less(known_speeds, measured_speeds, _SAME)
    joined = np.concatenate([np.delete(known, in_known[~same]), _rounded(np.delete(measured, in_measured[same]))])
    return joined[np.argsort(_size_codes(joined), kind="stable")]


def merged_kinds(
    known: Mapping[TrainingKind, Points], measured: Mapping[TrainingKind, Points]
) -> dict[TrainingKind, Points]:
    """Apply ``merged`` to each kind."""
    no_points = np.empty(0, dtype=POINT)
    kinds = sorted({*known, *measured})
    return {kind: merged(known.get(kind, no_points), measured.get(kind, no_points)) for kind in kinds}


def _size_codes(points: Points) -> Ints:
    """One number for each size, in the order of sizes."""
    codes: Ints = (points["workers"] << 32) + points["ps"]
    return codes


def _differ_less(speeds_a: Floats, speeds_b: Floats, limit: float) -> Bools:
    """Whether logarithms of speeds differ by less than a limit; False where a speed is 0."""
    positive = (speeds_a > 0) & (speeds_b > 0)
    ratio = np.divide(speeds_a, speeds_b, where=positive, out=np.ones_like(speeds_a))
    less: Bools = positive & (np.abs(np.log(ratio)) < limit)
    return less


def _rounded(points: Points) -> Points:
    """Round speeds to 2 % and counts of measurements down to powers of two, and limit the number of jobs."""
    rounded = points.copy()
    positive = rounded["speed"] > 0
    rounded["speed"][positive] = np.exp(np.round(np.log(rounded["speed"][positive]) / _SAME) * _SAME)
    counted = rounded["measurements"] > 0
    rounded["measurements"][counted] = np.exp2(np.floor(np.log2(rounded["measurements"][counted])))
    np.minimum(rounded["jobs"], _MAX_JOBS, out=rounded["jobs"])
    return rounded
