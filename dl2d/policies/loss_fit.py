"""When a job's loss will have settled: Optimus' curve, fitted to the losses so far.

Source: Peng et al., "Optimus", EuroSys 2018, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dl2d.core.measured import LossPoint

_Floats = NDArray[np.float64]
#: Fewest points that say anything of three coefficients.
_FEWEST = 3
#: How many points on either side a loss is compared with.
_NEIGHBOURS = 2
# The floor of the curve is searched for on a grid that is refined; each time leaves 2/16 of it: 1e-11 in the end.
_STEPS = 17
_REFINED = 12
#: Least distance between the floor and the least loss, as a part of it.
_CLOSEST = 1e-9


@dataclass(frozen=True, slots=True)
class LossFit:
    """``loss = 1 / (slope * epoch + offset) + floor``, as a part of the largest loss; nothing is negative."""

    slope: float
    offset: float
    floor: float

    def at(self, epoch: float) -> float:
        """Loss after so many epochs, as a part of the largest."""
        return 1 / (self.slope * epoch + self.offset) + self.floor

    def settles(self, threshold: float) -> int:
        """First whole epoch from which on each further epoch lowers the loss by less than ``threshold``.

        ``threshold`` is a part of the largest loss. The curve flattens all the way, so there is one such epoch:
        1/x - 1/(x + slope) < threshold with x = slope * epoch + offset.
        """
        slope = self.slope
        least = (math.sqrt(slope * slope + 4 * slope / threshold) - slope) / 2
        epoch = max(math.ceil((least - self.offset) / slope), 0)
        x = slope * epoch + self.offset
        return epoch + 1 if slope / (x * (x + slope)) >= threshold else epoch


def without_outliers(losses: Sequence[float]) -> list[float]:
    """Losses with each one that lies outside the range of its neighbours replaced by their mean.

    Neighbours are two on either side. The first and the last loss stay: a falling curve ends outside any range.
    """
    cleaned = list(losses)
    for place in range(1, len(losses) - 1):
        around = [
            *losses[max(place - _NEIGHBOURS, 0) : place],
            *losses[place + 1 : place + 1 + _NEIGHBOURS],
        ]
        if not min(around) <= losses[place] <= max(around):
            cleaned[place] = sum(around) / len(around)
    return cleaned


def fit_loss(points: Sequence[LossPoint]) -> LossFit | None:
    """Fit the curve to a job's losses.

    For a given floor, 1 / (loss - floor) is linear in the epoch, and the two coefficients are found by non-negative
    least squares, each residual weighted by the square of (loss - floor) so that it counts as a difference of losses.
    The floor is the one for which the curve is nearest to the losses. About 1 ms.

    None where nothing can be said: fewer than three points, losses that are not positive numbers, or none that falls.
    """
    if len(points) < _FEWEST or not all(math.isfinite(point.loss) and point.loss > 0 for point in points):
        return None
    epochs = np.array([point.epoch for point in points])
    losses = np.array(without_outliers([point.loss for point in points]))
    losses /= losses.max()
    # 1 / (loss - floor) has no value where the floor is the least loss itself.
    top = float(losses.min()) * (1 - _CLOSEST)
    low, high = 0.0, top
    best: tuple[float, float, float] | None = None
    for _ in range(_REFINED):
        floors = np.linspace(low, high, _STEPS)
        slopes, offsets, errors = _lines(epochs, losses, floors)
        place = int(errors.argmin())
        if not math.isfinite(errors[place]):
            break
        best = (float(slopes[place]), float(offsets[place]), float(floors[place]))
        step = float(floors[1] - floors[0])
        low, high = max(best[2] - step, 0.0), min(best[2] + step, top)
    if best is None or best[0] <= 0:
        return None
    return LossFit(*best)


def _lines(epochs: _Floats, losses: _Floats, floors: _Floats) -> tuple[_Floats, _Floats, _Floats]:
    """Slope, offset and sum of squared differences of losses for each floor; shapes (floors,)."""
    above = losses - floors[:, None]
    target, weight = 1 / above, above**4
    # Normal equations of the weighted line through (epoch, target).
    total, first, second = weight.sum(axis=1), weight @ epochs, weight @ epochs**2
    mean, product = (weight * target).sum(axis=1), (weight * target) @ epochs
    determinant = total * second - first * first
    # Whatever is degenerate ends as an infinite error, which is never the least.
    with np.errstate(all="ignore"):
        slope = (total * product - first * mean) / determinant
        offset = (second * mean - first * product) / determinant
        # With two coefficients the constrained least lies on an edge wherever the free one is outside.
        through_origin = np.where(second > 0, product / second, 0.0)
        slope = np.where(offset < 0, through_origin, slope)
        offset = np.maximum(offset, 0.0)
        flat = ~(slope > 0)
        slope, offset = np.where(flat, 0.0, slope), np.where(flat, mean / total, offset)
        errors = ((1 / (slope[:, None] * epochs + offset[:, None]) - above) ** 2).sum(axis=1)
    return slope, offset, np.where(np.isfinite(errors), errors, np.inf)
