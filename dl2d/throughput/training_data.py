"""Training data of the throughput model: measured speeds as arrays, corrected for drift and joined with reference ones.

A point is the speed of a kind at one size, the mean of all its measurements. Site points were measured on this cluster.
Reference points were measured earlier, perhaps on another cluster: those of a policy's checkpoint. Each function of a
step below takes the points of one kind:

1. ``without_drift``: site speeds that were measured before their kind became faster or slower are brought up to date.
2. ``calibration``: the factor by which a kind is faster here than where the reference points were measured.
3. ``informative``: site points near what the model predicts from the reference points alone are left out.
4. ``merged``: the reference points, calibrated, are joined with the informative site points, which replace them.

``dl2d.policies.dl2.speed_predictions.merged_measurements`` takes all four steps. ``PredictedSpeeds`` of
``dl2d.policies.common`` has no reference points and takes the first step alone.

Outliers are measured speeds of few jobs far from the leave-one-out prediction of their kind's other sizes. They may
be of jobs that are not of the kind which their users declare, so they are given more noise. Source: Rasmussen and
Williams, "Gaussian Processes for Machine Learning", 2006, section 5.4.2 (leave-one-out residuals).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from dl2d.core.array_types import Bools, Floats, Ints
from dl2d.core.jobs import Allocation
from dl2d.core.measured_speeds_and_losses import (
    OTHER_KIND_LOG_RATIO,
    SAME_SPEED_LOG_RATIO,
    MeasuredSpeeds,
    SpeedPoint,
    TrainingKind,
)
from dl2d.throughput.gaussian_process_prior import kind_covariance, precision, shared_covariance

#: Structured array of ``POINT`` with a ``SpeedPoint`` in each element, in the order of workers, then PSs.
Points = NDArray[np.void]

#: Fields of a ``SpeedPoint``, with the size as two counts and the speed in samples per second.
POINT = np.dtype(
    [
        ("workers", np.int64), ("ps", np.int64), ("speed", np.float64), ("measurements", np.float64),
        ("jobs", np.float64), ("last_measured", np.float64),
        ("first_measured", np.float64), ("previous_speed", np.float64),
    ]
)  # fmt: skip

# Heuristic thresholds; those of logarithms are at most the noise of one measured speed, 0.05
# (``dl2d.throughput.gaussian_process``).
#: Least number of points from which a calibration is computed.
_MIN_POINTS = 3
#: Fraction of the points that may disagree with a calibration.
_DISAGREEING = 0.25
#: Step to which the logarithm of a calibration is rounded.
_CALIBRATION_STEP = 0.02
#: Difference in logarithms to the prediction below which a site point adds no information.
_UNINFORMATIVE = 0.05
#: Difference in logarithms below which a site point counts as equal to the reference point.
_SAME_AS_REFERENCE = 0.02
#: Step to which the logarithm of a speed at the site is rounded.
_SPEED_STEP = 0.02
#: From this number of jobs on, the speed at a size is trusted, and it makes no difference how many there are.
_TRUSTED_JOBS = 3
#: Standard deviations between a point and its prediction from other sizes beyond which it is an outlier.
_OUTLIER = 4.0
#: Least number of measured sizes of a kind for such a comparison.
_MIN_COMPARED_SIZES = 4


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
    # The only row of a grid of all-reduce jobs holds for all numbers of PSs.
    workers, ps = points["workers"], points["ps"] if len(grid) > 1 else np.zeros(len(points), dtype=np.int64)
    inside = (ps < grid.shape[0]) & (workers < grid.shape[1])
    speeds = np.zeros(len(points))
    speeds[inside] = grid[ps[inside], workers[inside]]
    return speeds


def without_drift(points: Points) -> Points:
    """Estimate the present speeds of a kind from points of different ages; the result has no times.

    When a cluster or a model's code changes, only the sizes at which jobs run are measured again; those that were
    measured before would look faster, or slower, than they are. So a speed that was measured last before speeds of the
    same kind changed (``SpeedPoint.first_measured``, ``previous_speed``) is multiplied by the median factor of these
    changes, and counts as measured once.
    """
    current = points.copy()
    changed = points[(points["previous_speed"] > 0) & (points["speed"] > 0)]
    changes = np.log(changed["speed"] / changed["previous_speed"])
    # Where the speed changed by more than that, the previous one was of a job of another kind.
    of_kind = np.abs(changes) < OTHER_KIND_LOG_RATIO
    changed_later = points["last_measured"][:, None] < changed["first_measured"][of_kind]
    outdated = changed_later.any(axis=1)
    if outdated.any():
        later_changes = np.where(changed_later[outdated], changes[of_kind], np.nan)
        current["speed"][outdated] *= np.exp(np.nanmedian(later_changes, axis=1))
        current["measurements"][outdated] = 1.0
    for field in ("last_measured", "first_measured", "previous_speed"):
        current[field] = 0.0
    return current


def calibration(site: Points, predicted: Floats, reference: Points) -> float:
    """Factor between measured and predicted speeds of a kind; 1 unless it is beyond 1.28 at nearly all sizes.

    Beyond 1.28 (``SAME_SPEED_LOG_RATIO``) is above it, or below its reciprocal. The factor is the median over the sizes
    that have a reference point too (over all sizes where those are fewer than three, ``_MIN_POINTS``), if three
    quarters of the sizes (all but ``_DISAGREEING``) agree that it is beyond 1.28, on the same side. Other hardware, or
    another unit of samples, makes all sizes of a kind faster or slower alike; without the factor, sizes that were
    measured here would look better, or worse, than all others.

    Parameters
    ----------
    site
        Shape (n,).
    predicted
        Samples/s that the reference points predict for each site point, shape (n,); 0 where there is no prediction.
    reference
        Shape (m,).
    """
    comparable = (site["speed"] > 0) & (predicted > 0)
    in_both = comparable & np.isin(_size_codes(site), _size_codes(reference))
    if in_both.sum() >= _MIN_POINTS:
        comparable = in_both
    if comparable.sum() < _MIN_POINTS:
        return 1.0
    factors = np.log(site["speed"][comparable] / predicted[comparable])
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


def informative(site: Points, predicted: Floats) -> Points:
    """Points that differ by more than 5 % (``_UNINFORMATIVE``) from the prediction, or have none.

    Parameters
    ----------
    predicted
        Samples/s of each point, shape (n,); 0 where there is no prediction.
    """
    return site[~_are_within(site["speed"], predicted, _UNINFORMATIVE)]


def merged(reference: Points, site: Points) -> Points:
    """Join reference and site points, in the order of sizes.

    Of a size that both have, the result has the site point, unless their speeds are within 2 %
    (``_SAME_AS_REFERENCE``): then the reference point. Site speeds are rounded to 2 % (``_SPEED_STEP``) and their
    counts of measurements to powers of two, so that noise in them does not change decisions.
    """
    if not len(site):
        return reference
    _, in_reference, in_site = np.intersect1d(
        _size_codes(reference), _size_codes(site), assume_unique=True, return_indices=True
    )
    reference_speeds, site_speeds = reference["speed"][in_reference], site["speed"][in_site]
    same = (reference_speeds == site_speeds) | _are_within(reference_speeds, site_speeds, _SAME_AS_REFERENCE)
    joined = np.concatenate([np.delete(reference, in_reference[~same]), _rounded(np.delete(site, in_site[same]))])
    return joined[np.argsort(_size_codes(joined), kind="stable")]


def merged_kinds(
    reference: Mapping[TrainingKind, Points], site: Mapping[TrainingKind, Points]
) -> dict[TrainingKind, Points]:
    """Apply ``merged`` to each kind that has reference or site points."""
    no_points = np.empty(0, dtype=POINT)
    kinds = sorted({*reference, *site})
    return {kind: merged(reference.get(kind, no_points), site.get(kind, no_points)) for kind in kinds}


def _size_codes(points: Points) -> Ints:
    """One number for each size, in the order of sizes."""
    codes: Ints = (points["workers"] << 32) + points["ps"]
    return codes


def _are_within(speeds_a: Floats, speeds_b: Floats, limit: float) -> Bools:
    """Whether logarithms of speeds differ by less than a limit; False where a speed is 0."""
    positive = (speeds_a > 0) & (speeds_b > 0)
    ratio = np.divide(speeds_a, speeds_b, where=positive, out=np.ones_like(speeds_a))
    return positive & (np.abs(np.log(ratio)) < limit)


def _rounded(points: Points) -> Points:
    """Round speeds to ``_SPEED_STEP`` and counts of measurements down to powers of two; limit the number of jobs."""
    rounded = points.copy()
    positive = rounded["speed"] > 0
    rounded["speed"][positive] = np.exp(np.round(np.log(rounded["speed"][positive]) / _SPEED_STEP) * _SPEED_STEP)
    counted = rounded["measurements"] > 0
    rounded["measurements"][counted] = np.exp2(np.floor(np.log2(rounded["measurements"][counted])))
    np.minimum(rounded["jobs"], _TRUSTED_JOBS, out=rounded["jobs"])
    return rounded


def are_few(jobs: Floats) -> Bools:
    """Whether only one or two jobs were measured, which may be mislabelled, by numbers of jobs."""
    return np.asarray((jobs > 0) & (jobs < _TRUSTED_JOBS))


def with_noise_of_outliers(noise_variance: Floats, inputs: Floats, detrended: Floats, few_jobs: Bools) -> Floats:
    """Noise variances of the measurements of a kind, higher where one of few jobs is an outlier.

    Residuals are leave-one-out (equation 5.12).

    Parameters
    ----------
    noise_variance
        Without regard to outliers, shape (n,).
    inputs
        Inputs of the kernels, shape (n, 3) or (n, 1).
    detrended
        Logarithm of samples/s less the trend, shape (n,).
    few_jobs
        As ``are_few`` says, shape (n,).
    """
    if len(detrended) < _MIN_COMPARED_SIZES or not few_jobs.any():
        return noise_variance
    inverse = precision(shared_covariance(inputs, inputs) + kind_covariance(inputs, inputs), noise_variance)
    weighted = inverse @ (detrended - detrended.mean())
    diagonal = np.diagonal(inverse)
    return noise_variance + noise_of_outliers(weighted / diagonal, 1.0 / diagonal, few_jobs)


def noise_of_outliers(residuals: Floats, variances: Floats, few_jobs: Bools) -> Floats:
    """Variance that is added to the noise of each measurement: for an outlier the square of its residual, else 0.

    Residuals are from predictions that do not know the measurement; ``variances`` are those expected of the residuals.
    """
    squares = residuals**2
    return np.where(few_jobs & (squares > _OUTLIER**2 * variances), squares, 0.0)
