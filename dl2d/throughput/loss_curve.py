"""When a job's loss will have settled: Optimus' curve, fitted to the losses so far.

Source: Peng et al., "Optimus", EuroSys 2018, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dl2d.core.measured_speeds import LossPoint

_Floats = NDArray[np.float64]
#: Fewest points that say anything of three coefficients.
_FEWEST = 3
#: How many points on either side a loss is compared with.
_NEIGHBOURS = 2
# The floor of the curve is searched for on a grid that is refined; each time leaves 2/16 of it: 1e-8 in the end, below
# which sums of squares cannot tell floors apart.
_STEPS = 17
_REFINED = 9
#: Least distance between the floor and the least loss, as a part of it.
_CLOSEST = 1e-9
#: Jobs whose curves are fitted at once: enough to save time, few enough for the cache.
_TOGETHER = 32


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


def fit_losses(curves: Sequence[Sequence[LossPoint]]) -> list[LossFit | None]:
    """Fit the curve to each job's losses, oldest first.

    For a given floor, 1 / (loss - floor) is linear in the epoch, and the two coefficients are found by non-negative
    least squares, each residual weighted by the square of (loss - floor) so that it counts as a difference of losses.
    The floor is the one for which the curve is nearest to the losses. Before, each loss that lies outside the range of
    its neighbours, two on either side, is replaced by their mean. All jobs at once: about 0.1 ms each.

    None where nothing can be said: fewer than three points, losses that are not positive numbers, or none that falls.
    """
    fits: list[LossFit | None] = [None] * len(curves)
    fit = [place for place, points in enumerate(curves) if _can_be_fitted(points)]
    for start in range(0, len(fit), _TOGETHER):
        chunk = fit[start : start + _TOGETHER]
        for place, found in zip(chunk, _fit_together([curves[place] for place in chunk]), strict=True):
            fits[place] = found
    return fits


def _can_be_fitted(points: Sequence[LossPoint]) -> bool:
    return len(points) >= _FEWEST and all(math.isfinite(point.loss) and point.loss > 0 for point in points)


def _fit_together(curves: Sequence[Sequence[LossPoint]]) -> list[LossFit | None]:
    longest = max(map(len, curves))
    epochs, losses = np.zeros((2, len(curves), longest))
    valid = np.zeros(losses.shape, dtype=bool)
    for row, points in enumerate(curves):
        epochs[row, : len(points)], losses[row, : len(points)] = np.array(points).T
        epochs[row, len(points) :] = points[-1].epoch
        valid[row, : len(points)] = True
    losses = _cleaned(losses, valid)
    losses /= losses.max(axis=1, keepdims=True)
    # 1 / (loss - floor) has no value where the floor is the least loss itself.
    top = np.where(valid, losses, np.inf).min(axis=1) * (1 - _CLOSEST)
    low, high = np.zeros_like(top), top
    rows = np.arange(len(curves))
    for _ in range(_REFINED):
        floors = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, _STEPS)
        slopes, offsets, errors = _lines(epochs, losses, valid, floors)
        place = errors.argmin(axis=1)
        best = np.stack([slopes[rows, place], offsets[rows, place], floors[rows, place], errors[rows, place]], axis=1)
        step = (high - low) / (_STEPS - 1)
        low, high = np.maximum(best[:, 2] - step, 0.0), np.minimum(best[:, 2] + step, top)
    return [
        LossFit(slope, offset, floor) if slope > 0 and math.isfinite(error) else None
        for slope, offset, floor, error in best.tolist()
    ]


def _cleaned(losses: _Floats, valid: NDArray[np.bool_]) -> _Floats:
    """Losses with each one that lies outside the range of its neighbours replaced by their mean.

    The first and the last loss stay: a falling curve ends outside any range. Shapes (jobs, points), points from the
    left.
    """
    wide = np.pad(losses, ((0, 0), (_NEIGHBOURS, _NEIGHBOURS)))
    there = np.pad(valid, ((0, 0), (_NEIGHBOURS, _NEIGHBOURS)))
    shifts = [shift for shift in range(2 * _NEIGHBOURS + 1) if shift != _NEIGHBOURS]
    around = np.stack([wide[:, shift : shift + losses.shape[1]] for shift in shifts])
    real = np.stack([there[:, shift : shift + losses.shape[1]] for shift in shifts])
    least, most = np.where(real, around, np.inf).min(axis=0), np.where(real, around, -np.inf).max(axis=0)
    mean = np.where(real, around, 0.0).sum(axis=0) / np.maximum(real.sum(axis=0), 1)
    inside = real[_NEIGHBOURS - 1] & real[_NEIGHBOURS] & valid
    return np.where(inside & ((losses < least) | (losses > most)), mean, losses)


def _lines(
    epochs: _Floats, losses: _Floats, valid: NDArray[np.bool_], floors: _Floats
) -> tuple[_Floats, _Floats, _Floats]:
    """Slope, offset and sum of squared differences of losses for each job and floor; shapes (jobs, floors)."""
    at, counts = epochs[:, None, :], valid[:, None, :].astype(np.float64)
    # Whatever is degenerate ends as an infinite error, which is never the least.
    with np.errstate(all="ignore"):
        above = (losses[:, None, :] - floors[:, :, None]) * counts
        square = above * above
        weight, weighted = square * square, square * above  # the latter is weight x 1 / above
        # Normal equations of the weighted line through (epoch, 1 / above). Epochs count from that of the largest loss,
        # which may outweigh all others: what the others say of the slope would be lost in its rounding.
        pivot = epochs[np.arange(len(epochs)), losses.argmax(axis=1)][:, None]
        apart = epochs - pivot
        total, mean = weight.sum(axis=2), weighted.sum(axis=2)
        first, second = _sums(weight, apart), _sums(weight, apart * apart)
        product = _sums(weighted, apart)
        determinant = total * second - first * first
        slope = (total * product - first * mean) / determinant
        offset = (second * mean - first * product) / determinant - slope * pivot
        # With two coefficients the constrained least lies on an edge wherever the free one is outside.
        squares = _sums(weight, epochs * epochs)
        through_origin = np.where(squares > 0, _sums(weighted, epochs) / squares, 0.0)
        slope = np.where(offset < 0, through_origin, slope)
        offset = np.maximum(offset, 0.0)
        flat = ~(slope > 0)
        slope, offset = np.where(flat, 0.0, slope), np.where(flat, mean / total, offset)
        missed = 1 / (slope[:, :, None] * at + offset[:, :, None]) - above
        errors = _sums(missed * missed, counts[:, 0])
        # An infinite slope misses by finite errors.
        sound = np.isfinite(errors) & np.isfinite(slope) & np.isfinite(offset)
    return slope, offset, np.where(sound, errors, np.inf)


def _sums(values: _Floats, by: _Floats) -> _Floats:
    """Sum of products over the points; shapes (jobs, floors, points) and (jobs, points)."""
    sums: _Floats = (values @ by[:, :, None])[:, :, 0]
    return sums
