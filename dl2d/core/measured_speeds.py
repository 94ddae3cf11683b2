"""Measurements of running jobs: training speed by kind of job and size, and how jobs' losses fall."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Allocation, Architecture, Consistency, Job, JobKey, JobRequest

#: Measurements over which the mean at a size is taken, exponentially: old speeds say little about today's.
MAX_MEASUREMENTS = 16
#: Two speeds whose ratio has a larger logarithm are not measurements of the same speed.
FAR = 0.25
#: With a larger one, it is not one speed that changed, either: the job is not of the kind that its user says.
WRONG = math.log(2.0)
#: Maximum number of points of one job's loss that a snapshot holds.
MAX_LOSSES = 32


class TrainingKind(NamedTuple):
    """Kind of job: jobs of one kind share their measured speeds."""

    model: str
    architecture: Architecture
    consistency: Consistency

    @classmethod
    def of(cls, request: JobRequest) -> TrainingKind:
        """Kind of a job."""
        return cls(request.model, request.architecture, request.consistency)


class SpeedPoint(NamedTuple):
    """Speed at one size: mean of the measurements in samples per second, exponential from ``MAX_MEASUREMENTS`` on."""

    allocation: Allocation
    samples_per_second: float
    measurements: int
    #: Number of jobs that were measured at it, one after the other; 0 where they were not counted.
    jobs: int = 0
    #: When it was measured last, and when this speed was measured first; seconds since 1970, 0 where not known.
    at: float = 0.0
    since: float = 0.0
    #: The speed before it changed; 0 where it has not.
    previous_speed: float = 0.0

    def counted(self, samples_per_second: float, *, at: float = 0.0, another_job: bool = False) -> SpeedPoint:
        """With one measurement more."""
        count = min(self.measurements + 1, MAX_MEASUREMENTS)
        return self._replace(
            samples_per_second=self.samples_per_second + (samples_per_second - self.samples_per_second) / count,
            measurements=count,
            jobs=min(self.jobs + another_job, MAX_MEASUREMENTS),
            at=at,
        )


class Tally(NamedTuple):
    """Speed at one size, and the last measurements that contradict it.

    A measurement that is far from the mean is kept apart: its job may be of another kind than its user says. It
    replaces the mean when a second job confirms it, the job behind the mean itself repeats it, or it was measured more
    often than the mean: then the speed has changed, or the mean was wrong.
    """

    point: SpeedPoint
    #: The job that was measured at ``point`` last.
    job: str
    #: The contradicting speed; None where the last measurement was near the mean.
    other: SpeedPoint | None = None
    #: The job that was measured at that last.
    other_job: str = ""

    @classmethod
    def first(cls, size: Allocation, samples_per_second: float, *, job: str, at: float) -> Tally:
        """Of one measurement."""
        return cls(SpeedPoint(size, samples_per_second, 1, 1, at, at), job)

    def counted(self, samples_per_second: float, *, job: str, at: float) -> Tally:
        """With one measurement more; speeds are more than 0."""
        point, other = self.point, self.other
        if point.measurements == 1 and job == self.job and not _near(samples_per_second, point.samples_per_second):
            # The first measurement after a resize may still have been at the size before.
            return Tally.first(point.allocation, samples_per_second, job=job, at=at)
        if _near(samples_per_second, point.samples_per_second):
            return Tally(point.counted(samples_per_second, at=at, another_job=job != self.job), job)
        if other is not None and _near(samples_per_second, other.samples_per_second):
            other = other.counted(samples_per_second, at=at, another_job=job != self.other_job)
        else:
            other = SpeedPoint(point.allocation, samples_per_second, 1, 1, at, at)
        changed = other.jobs > 1 or other.measurements > (1 if job == self.job else point.measurements)
        if changed:
            return Tally(other._replace(previous_speed=point.samples_per_second), job)
        return Tally(point, self.job, other, job)

    def without(self, job: str) -> Tally | None:
        """The tally without a job that is not believed: unchanged where another job confirmed the speed.

        Otherwise the contradicting speed of another job replaces it, if there is one.
        """
        if self.point.jobs != 1 or self.job != job:
            return self
        return None if self.other is None or self.other_job == job else Tally(self.other, self.other_job)


class Count(NamedTuple):
    """Result of counting a measurement."""

    #: Of the size; None where it had none and the measurement does not count.
    tally: Tally | None
    #: Size at which a measurement of the job was set aside, while the job is quarantined.
    quarantined: Allocation | None
    #: A job found to be of another kind than its user says: speeds that it alone showed are removed.
    wrong: str | None = None


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

    A job whose measurement at some size was set aside is quarantined: it counts at no other size until it agrees there
    again, since it may be of another kind than its user says and no other job may have been measured where it goes
    next. A job that contradicts only itself is not quarantined.

    A job that contradicts at least two others, or that was first at a size and is outvoted there, by more than a speed
    changes, is wrong everywhere: speeds that it alone showed are removed. Otherwise a good size that it made look slow
    would never be tried again.
    """
    if quarantined is not None and quarantined != size:
        return Count(tally, quarantined)
    if tally is None:
        return Count(Tally.first(size, samples_per_second, job=job, at=at), None)
    made = tally.counted(samples_per_second, job=job, at=at)
    others = tally.point.jobs > 1 or tally.job != job
    if made.other is None or not others:
        outvoted = (
            tally.point.jobs == 1 and tally.job != job and made.point.previous_speed == tally.point.samples_per_second
        )
        deposed = outvoted and abs(math.log(made.point.samples_per_second / made.point.previous_speed)) >= WRONG
        return Count(made, None, tally.job if deposed else None)
    wrong = abs(math.log(samples_per_second / tally.point.samples_per_second)) >= WRONG
    return Count(made, size, job if wrong and quarantined is None and tally.point.jobs > 1 else None)


def _near(one: float, other: float) -> bool:
    return abs(math.log(one / other)) < FAR


@dataclass(frozen=True, slots=True)
class MeasuredSpeeds:
    """All sizes at which jobs of a kind were measured, in the order of workers, then PSs."""

    kind: TrainingKind
    points: tuple[SpeedPoint, ...]


@dataclass(frozen=True, slots=True)
class JobSpeeds:
    """Mean of one job's own last measurements at each size, in the order of workers, then PSs.

    Speed 0: it made no progress at that size.
    """

    job: JobKey
    points: tuple[SpeedPoint, ...]


def mean_of(size: Allocation, said: Collection[tuple[float, float]]) -> SpeedPoint:
    """The point of one job's (time, speed) measurements at a size."""
    times, speeds = zip(*said, strict=True)
    return SpeedPoint(size, math.fsum(speeds) / len(speeds), len(speeds), 1, max(times), min(times))


class LossPoint(NamedTuple):
    """Training loss after so many epochs."""

    epoch: float
    loss: float


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """How a job's loss fell: at most ``MAX_LOSSES`` points spread evenly over its reports, oldest first."""

    job: JobKey
    points: tuple[LossPoint, ...]


def thinned(points: Sequence[LossPoint]) -> tuple[LossPoint, ...]:
    """At most ``MAX_LOSSES`` of the points, evenly spread, the last among them."""
    apart = -(-len(points) // MAX_LOSSES) or 1
    return tuple(reversed(points[::-1][::apart]))


class KnownSpeeds(Protocol):
    """Speeds that a policy is given instead of measuring them: in a simulation, the true ones."""

    def grid(self, job: Job) -> NDArray[np.float64]:
        """Samples per second at every size within the job's bounds, zeros where a needed count is 0.

        float64, shape (max_ps + 1, max_workers + 1): ``grid[ps, workers]``; for all-reduce jobs shape
        (1, max_workers + 1). Jobs that are alike may be given one and the same array; it is not to be written to.
        """
        ...
