"""Measured training speeds of running jobs, by kind of job and size, and their training losses, in bounded space."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Allocation, Architecture, Consistency, Job, JobKey, JobRequest

#: Number of measurements over which the mean at a size is taken; beyond it the mean is exponential, since speeds change
#: with time.
MAX_MEASUREMENTS = 16
#: Absolute logarithm of the ratio of two speeds from which on they are not measurements of the same speed.
SAME_SPEED_LOG_RATIO = 0.25
#: Absolute logarithm of the ratio of two speeds from which on not a change of speed is the cause, but a job that is of
#: another kind than its user declares.
OTHER_KIND_LOG_RATIO = math.log(2.0)


class TrainingKind(NamedTuple):
    """Kind of job: jobs of one kind share their measured speeds."""

    model: str
    architecture: Architecture
    consistency: Consistency

    @classmethod
    def of(cls, request: JobRequest) -> TrainingKind:
        """Return the kind of a job."""
        return cls(request.model, request.architecture, request.consistency)


class SpeedPoint(NamedTuple):
    """Measured speed at one size."""

    allocation: Allocation
    #: Mean of the measurements, exponential from ``MAX_MEASUREMENTS`` on.
    samples_per_second: float
    #: Number of measurements.
    measurements: int
    #: Number of jobs that were measured at it, one after the other; 0 where they were not counted.
    jobs: int = 0
    #: When it was measured last; seconds since 1970, 0 where not known.
    last_measured: float = 0.0
    #: When this speed was measured first; seconds since 1970, 0 where not known.
    first_measured: float = 0.0
    #: The speed before it changed; 0 where it has not.
    previous_speed: float = 0.0

    def counted(self, samples_per_second: float, *, at: float = 0.0, another_job: bool = False) -> SpeedPoint:
        """Return the point with one more measurement."""
        count = min(self.measurements + 1, MAX_MEASUREMENTS)
        return self._replace(
            samples_per_second=self.samples_per_second + (samples_per_second - self.samples_per_second) / count,
            measurements=count,
            jobs=min(self.jobs + another_job, MAX_MEASUREMENTS),
            last_measured=at,
        )


class Tally(NamedTuple):
    """Speed at one size, and the last measurements that contradict it.

    A measurement that is far from the mean is kept apart, since its job may be of another kind than its user declares.
    It replaces the mean when a second job confirms it, when the job that was measured last at the mean repeats it, or
    when it was measured more often than the mean: then the speed has changed, or the mean was wrong.
    """

    point: SpeedPoint
    #: The job that was measured at ``point`` last.
    job: str
    #: The contradicting speed; None where the last measurement was near the mean.
    other: SpeedPoint | None = None
    #: The job that was measured at the contradicting speed last.
    other_job: str = ""

    @classmethod
    def first(cls, size: Allocation, samples_per_second: float, *, job: str, at: float) -> Tally:
        """Start a tally with its first measurement."""
        return cls(SpeedPoint(size, samples_per_second, 1, 1, at, at), job)

    def counted(self, samples_per_second: float, *, job: str, at: float) -> Tally:
        """Return the tally with one more measurement, whose speed must be more than 0."""
        point, other = self.point, self.other
        agrees = _is_same_speed(samples_per_second, point.samples_per_second)
        if point.measurements == 1 and job == self.job and not agrees:
            # The first measurement after a resize may have covered some time at the previous size.
            return Tally.first(point.allocation, samples_per_second, job=job, at=at)
        if agrees:
            return Tally(point.counted(samples_per_second, at=at, another_job=job != self.job), job)
        if other is not None and _is_same_speed(samples_per_second, other.samples_per_second):
            other = other.counted(samples_per_second, at=at, another_job=job != self.other_job)
        else:
            other = SpeedPoint(point.allocation, samples_per_second, 1, 1, at, at)
        changed = other.jobs > 1 or other.measurements > (1 if job == self.job else point.measurements)
        if changed:
            return Tally(other._replace(previous_speed=point.samples_per_second), job)
        return Tally(point, self.job, other, job)

    def without(self, job: str) -> Tally | None:
        """Return the tally without the measurements of a mislabelled job.

        It is unchanged where other jobs confirmed the speed. Where only this job was measured, the contradicting speed
        of another job replaces its own; None if there is none.
        """
        if self.point.jobs != 1 or self.job != job:
            return self
        return None if self.other is None or self.other_job == job else Tally(self.other, self.other_job)


class Count(NamedTuple):
    """Result of counting a measurement."""

    #: The tally of the size; None where it had none and the measurement does not count.
    tally: Tally | None
    #: Size at which a measurement of the job did not enter the mean, while the job is quarantined.
    quarantined: Allocation | None
    #: A job found to be of another kind than its user declares: speeds that were measured of it alone are removed.
    mislabelled: str | None = None


def count(
    tally: Tally | None,
    size: Allocation,
    samples_per_second: float,
    *,
    job: str,
    at: float,
    quarantined: Allocation | None,
) -> Count:
    """Count the measured speed of a job at a size for its kind.

    A job whose measurement at a size did not enter the mean is quarantined: it counts at no other size until it
    agrees there again, since it may be of another kind than its user declares, and at its next size no other job may
    have been measured that could contradict it. A job that contradicts only itself is not quarantined.

    A job is mislabelled if it contradicts at least two others, or was the first at a size and is outvoted there, by
    more than a speed changes. Speeds that were measured of it alone are removed; otherwise a good size that looks slow
    because of it would never be tried again.

    Parameters
    ----------
    tally
        The tally of this size; None where nothing was measured at it.
    quarantined
        Size at which the job is quarantined; None where it is not.
    """
    if quarantined is not None and quarantined != size:
        return Count(tally, quarantined)
    if tally is None:
        return Count(Tally.first(size, samples_per_second, job=job, at=at), None)
    new = tally.counted(samples_per_second, job=job, at=at)
    contradicts_others = new.other is not None and (tally.point.jobs > 1 or tally.job != job)
    if not contradicts_others:
        outvoted = (
            tally.point.jobs == 1 and tally.job != job and new.point.previous_speed == tally.point.samples_per_second
        )
        first_mislabelled = outvoted and _is_other_kind(new.point.samples_per_second, new.point.previous_speed)
        return Count(new, None, tally.job if first_mislabelled else None)
    mislabelled = (
        _is_other_kind(samples_per_second, tally.point.samples_per_second)
        and quarantined is None
        and tally.point.jobs > 1
    )
    return Count(new, size, job if mislabelled else None)


def _is_same_speed(speed_a: float, speed_b: float) -> bool:
    return abs(math.log(speed_a) - math.log(speed_b)) < SAME_SPEED_LOG_RATIO


def _is_other_kind(speed_a: float, speed_b: float) -> bool:
    return abs(math.log(speed_a) - math.log(speed_b)) >= OTHER_KIND_LOG_RATIO


@dataclass(frozen=True, slots=True)
class MeasuredSpeeds:
    """Measured speeds of a kind at all sizes, in the order of workers, then PSs."""

    kind: TrainingKind
    points: tuple[SpeedPoint, ...]


@dataclass(frozen=True, slots=True)
class JobSpeeds:
    """Measured speeds of one job: the mean of its last measurements at each size, in the order of workers, then PSs.

    A speed of 0 means that it made no progress at that size.
    """

    job: JobKey
    points: tuple[SpeedPoint, ...]


def mean_point(size: Allocation, measurements: Collection[tuple[float, float]]) -> SpeedPoint:
    """Return the point of one job at a size, from its measurements there: (seconds since 1970, samples/s)."""
    times, speeds = zip(*measurements, strict=True)
    return SpeedPoint(size, math.fsum(speeds) / len(speeds), len(speeds), 1, max(times), min(times))


class KnownSpeeds(Protocol):
    """Speeds that a policy is given instead of measuring them: in a simulation, the true ones."""

    def grid(self, job: Job) -> NDArray[np.float64]:
        """Samples per second at every size within the job's bounds, zeros where a count that the job needs is 0.

        float64, shape (max_ps + 1, max_workers + 1): ``grid[ps, workers]``. The rows of an all-reduce job are equal,
        and there may be the first one alone: shape (1, max_workers + 1). Equal jobs may share one array; callers must
        not write to it.
        """
        ...


#: Maximum number of points of one job's loss that a snapshot holds.
MAX_LOSSES = 32
#: Maximum number of points of one job's loss that a store keeps for it; twice ``MAX_LOSSES`` or more.
_MAX_KEPT_LOSSES = 4 * MAX_LOSSES


class LossPoint(NamedTuple):
    """Training loss after a number of epochs."""

    epoch: float
    loss: float


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """Training loss of a job: at most ``MAX_LOSSES`` points spread evenly over its reports, oldest first."""

    job: JobKey
    points: tuple[LossPoint, ...]


@dataclass(frozen=True, slots=True)
class LossCurve:
    """Training loss of a job in bounded space: of all reports, each ``stride``-th and the last.

    The stride doubles whenever there are more than ``_MAX_KEPT_LOSSES`` points, so that they stay evenly spread.
    """

    #: Reports 0, ``stride``, 2 * ``stride`` and so on.
    points: tuple[LossPoint, ...] = ()
    #: Number of reports from one point to the next, a power of two.
    stride: int = 1
    #: Number of all reports.
    total: int = 0
    #: The last report; None before the first.
    last: LossPoint | None = None

    def added(self, point: LossPoint) -> LossCurve:
        """Return the curve with one more report."""
        points, stride = self.points, self.stride
        if self.total % stride == 0:
            points = (*points, point)
            if len(points) > _MAX_KEPT_LOSSES:
                points, stride = points[::2], 2 * stride
        return LossCurve(points, stride, self.total + 1, point)

    def thinned(self) -> tuple[LossPoint, ...]:
        """Select at most ``MAX_LOSSES`` points, evenly spread and including the last, oldest first.

        Where reports are left out, each point is the one kept nearest to its place, at most a quarter of the distance
        between two points away.
        """
        if self.last is None:
            return ()
        distance = -(-self.total // MAX_LOSSES)
        places = range(self.total - 1 - distance, -1, -distance)
        nearest = (min(round(place / self.stride), len(self.points) - 1) for place in places)
        return (*(self.points[index] for index in reversed([*nearest])), self.last)
