"""What running jobs showed: how fast models train at which size, and how jobs' losses fall."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Allocation, Architecture, Consistency, Job, JobKey, JobRequest

#: How many of the last measurements at a size count, about: what a model's speed was long ago says little of today's.
MOST_MEASUREMENTS = 16
#: Logarithm of the ratio of two speeds from which on they are not the same speed measured twice.
FAR = 0.25
#: And from which on it is no change of one speed, either, but that of something else.
WRONG = math.log(2.0)
#: Most points of one job's loss that a snapshot holds.
MOST_LOSSES = 32


class TrainingKind(NamedTuple):
    """What must be alike for speeds to be comparable: jobs of one kind share what was measured."""

    model: str
    architecture: Architecture
    consistency: Consistency

    @classmethod
    def of(cls, request: JobRequest) -> TrainingKind:
        """Kind of a job."""
        return cls(request.model, request.architecture, request.consistency)


class SpeedPoint(NamedTuple):
    """Speed at one size: the mean of so many measurements, samples per second.

    From ``MOST_MEASUREMENTS`` on the mean is exponential: the last so many measurements count, about.
    """

    allocation: Allocation
    samples_per_second: float
    measurements: int
    #: How many jobs showed it, one after the other; 0 where nobody counted them.
    jobs: int = 0
    #: When it was measured last, and when this speed was measured first; seconds since 1970, 0 where nobody noted it.
    at: float = 0.0
    since: float = 0.0
    #: The speed that it had before it changed; 0 where it has not.
    before: float = 0.0

    def counted(self, samples_per_second: float, *, at: float = 0.0, another_job: bool = False) -> SpeedPoint:
        """With one measurement more."""
        count = min(self.measurements + 1, MOST_MEASUREMENTS)
        return self._replace(
            samples_per_second=self.samples_per_second + (samples_per_second - self.samples_per_second) / count,
            measurements=count,
            jobs=min(self.jobs + another_job, MOST_MEASUREMENTS),
            at=at,
        )


class Tally(NamedTuple):
    """What a store keeps of the speed at one size: what it is believed to be, and what else was said last.

    A measurement that is far from the mean is kept apart: it may be of a job that is not what its user says. It stands
    in for the mean, which begins anew, when it was said by a second job, by the very job that said otherwise before
    (twice), or more often than the mean: then speeds have changed, or the mean was wrong.
    """

    point: SpeedPoint
    #: Who showed ``point`` last.
    job: str
    #: What is far from it; None where the last measurement was near.
    other: SpeedPoint | None = None
    #: Who showed that last.
    other_job: str = ""

    @classmethod
    def first(cls, size: Allocation, samples_per_second: float, *, job: str, at: float) -> Tally:
        """Of one measurement."""
        return cls(SpeedPoint(size, samples_per_second, 1, 1, at, at), job)

    def counted(self, samples_per_second: float, *, job: str, at: float) -> Tally:
        """With one measurement more; speeds are more than 0."""
        point, other = self.point, self.other
        if point.measurements == 1 and job == self.job and not _near(samples_per_second, point.samples_per_second):
            # The first word at a size may still have been of the size before.
            return Tally.first(point.allocation, samples_per_second, job=job, at=at)
        if _near(samples_per_second, point.samples_per_second):
            return Tally(point.counted(samples_per_second, at=at, another_job=job != self.job), job)
        if other is not None and _near(samples_per_second, other.samples_per_second):
            other = other.counted(samples_per_second, at=at, another_job=job != self.other_job)
        else:
            other = SpeedPoint(point.allocation, samples_per_second, 1, 1, at, at)
        changed = other.jobs > 1 or other.measurements > (1 if job == self.job else point.measurements)
        if changed:
            return Tally(other._replace(before=point.samples_per_second), job)
        return Tally(point, self.job, other, job)

    def without(self, job: str) -> Tally | None:
        """What is left when a job is not believed: all of it, unless nobody else showed the speed.

        Then what another job said otherwise stands in for it, if one did.
        """
        if self.point.jobs != 1 or self.job != job:
            return self
        return None if self.other is None or self.other_job == job else Tally(self.other, self.other_job)


class Count(NamedTuple):
    """What counting a measurement comes to."""

    #: Of the size; None where nothing is known of it and the measurement does not count.
    tally: Tally | None
    #: Size at which the job was last set aside, if it still is.
    strayed: Allocation | None
    #: The job of which it shows that it is not what its user says; what it showed alone is to go (``Tally.without``).
    wrong: str | None = None


def count(
    tally: Tally | None,
    size: Allocation,
    samples_per_second: float,
    *,
    job: str,
    at: float,
    strayed: Allocation | None,
) -> Count:
    """Count what a job showed at a size for its kind.

    A job that strayed, for what it showed at some size was set aside, counts at no other: it may not be what its user
    says, and where it goes next others of its kind may never have been. It counts again once it was right after all.
    Who is at odds with nobody but itself has not strayed: a slow moment is no reason not to listen any more.

    Who is at odds with two others at least, or outvoted where it was the first, and by more than speeds change, was not
    what its user says elsewhere, either: what nobody else showed is to go. For where a good size is said to be slow
    nobody goes to find out.
    """
    if strayed is not None and strayed != size:
        return Count(tally, strayed)
    if tally is None:
        return Count(Tally.first(size, samples_per_second, job=job, at=at), None)
    made = tally.counted(samples_per_second, job=job, at=at)
    others = tally.point.jobs > 1 or tally.job != job
    if made.other is None or not others:
        outvoted = tally.point.jobs == 1 and tally.job != job and made.point.before == tally.point.samples_per_second
        deposed = outvoted and abs(math.log(made.point.samples_per_second / made.point.before)) >= WRONG
        return Count(made, None, tally.job if deposed else None)
    wrong = abs(math.log(samples_per_second / tally.point.samples_per_second)) >= WRONG
    return Count(made, size, job if wrong and strayed is None and tally.point.jobs > 1 else None)


def _near(one: float, other: float) -> bool:
    return abs(math.log(one / other)) < FAR


@dataclass(frozen=True, slots=True)
class MeasuredSpeeds:
    """All sizes at which jobs of a kind were measured, in the order of workers, then PSs."""

    kind: TrainingKind
    points: tuple[SpeedPoint, ...]


@dataclass(frozen=True, slots=True)
class JobSpeeds:
    """What one job showed itself, in the order of workers, then PSs: means of its last measurements at each size.

    Speed 0: it stood still at that size, as far as was told.
    """

    job: JobKey
    points: tuple[SpeedPoint, ...]


def mean_of(size: Allocation, said: Collection[tuple[float, float]]) -> SpeedPoint:
    """One job's times and speeds at a size as a point."""
    times, speeds = zip(*said, strict=True)
    return SpeedPoint(size, math.fsum(speeds) / len(speeds), len(speeds), 1, max(times), min(times))


class LossPoint(NamedTuple):
    """Training loss after so many epochs."""

    epoch: float
    loss: float


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """How a job's loss fell: at most ``MOST_LOSSES`` points spread evenly over its reports, oldest first."""

    job: JobKey
    points: tuple[LossPoint, ...]


def thinned(points: Sequence[LossPoint]) -> tuple[LossPoint, ...]:
    """At most ``MOST_LOSSES`` of the points, evenly spread, the last among them."""
    apart = -(-len(points) // MOST_LOSSES) or 1
    return tuple(reversed(points[::-1][::apart]))


class KnownSpeeds(Protocol):
    """Speeds that a policy is told instead of having to measure them: the truth, in a simulation."""

    def grid(self, job: Job) -> NDArray[np.float64]:
        """Samples per second at every size within the job's bounds, zeros where a needed count is 0.

        float64, shape (max_ps + 1, max_workers + 1): ``grid[ps, workers]``; for all-reduce jobs shape
        (1, max_workers + 1). Jobs that are alike may be given one and the same array; it is not to be written to.
        """
        ...
