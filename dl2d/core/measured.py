"""What running jobs showed: how fast models train at which size, and how jobs' losses fall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Allocation, Architecture, Consistency, Job, JobKey, JobRequest

#: How many of the last measurements at a size count, about: what a model's speed was long ago says little of today's.
MOST_MEASUREMENTS = 16
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

    def counted(self, samples_per_second: float) -> SpeedPoint:
        """With one measurement more."""
        count = min(self.measurements + 1, MOST_MEASUREMENTS)
        mean = self.samples_per_second + (samples_per_second - self.samples_per_second) / count
        return SpeedPoint(self.allocation, mean, count)


@dataclass(frozen=True, slots=True)
class MeasuredSpeeds:
    """All sizes at which jobs of a kind were measured, in the order of workers, then PSs."""

    kind: TrainingKind
    points: tuple[SpeedPoint, ...]


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
