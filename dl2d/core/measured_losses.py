"""Training losses of running jobs as their coordinators report them, in bounded space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dl2d.core.jobs import JobKey

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
