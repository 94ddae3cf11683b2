"""Optimus' curve of training loss, fitted to the losses of jobs so far: predicts when a loss will have settled.

    loss = 1 / (slope * epoch + offset) + floor        with slope, offset, floor >= 0

Losses are fractions of the job's largest one. Source: Peng et al., "Optimus", EuroSys 2018, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dl2d.core.measured_speeds import LossPoint

_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]
#: Least number of points, since the curve has three coefficients.
_MIN_POINTS = 3
#: Number of points on either side that a loss is compared with.
_NEIGHBOURS = 2
#: Number of floors of the grid on which the floor of the curve is searched for.
_FLOORS = 17
#: Number of grids, each spanning 2/16 of the one before: in the end 1e-8 of the first is left, below which sums of
#: squares are equal.
_GRIDS = 9
#: Least distance between the floor and the least loss, as a fraction of the latter.
_MIN_DISTANCE = 1e-9
#: Number of jobs whose curves are fitted at once: enough to save time, few enough for the processor's cache.
_BATCH = 32


@dataclass(frozen=True, slots=True)
class LossFit:
    """A fitted curve; see the module."""

    slope: float
    offset: float
    floor: float

    def settling_epoch(self, threshold: float) -> int:
        """First whole epoch from which on each further epoch lowers the loss by less than ``threshold``.

        ``threshold`` is a fraction of the largest loss. The decrease per epoch falls all the way, so there is exactly
        one such epoch: 1/x - 1/(x + slope) < threshold with x = slope * epoch + offset.
        """
        slope = self.slope
        least_x = (math.sqrt(slope * slope + 4 * slope / threshold) - slope) / 2
        epoch = max(math.ceil((least_x - self.offset) / slope), 0)
        x = slope * epoch + self.offset
        return epoch + 1 if slope / (x * (x + slope)) >= threshold else epoch


def fit_losses(curves: Sequence[Sequence[LossPoint]]) -> list[LossFit | None]:
    """Fit the curve to the losses of each job, oldest first.

    For a given floor, 1 / (loss - floor) is linear in the epoch, and slope and offset are found by non-negative least
    squares, each residual weighted by the square of (loss - floor) so that it counts as a difference of losses. The
    floor is the one for which the curve is nearest to the losses. Before the fit, each loss that lies outside the range
    of its neighbours, two on either side, is replaced by their mean. Many jobs are fitted at once: about 0.1 ms each.

    Returns
    -------
    For each job its curve; None where there are fewer than three points, or losses that are not positive numbers or do
    not fall.
    """
    fits: list[LossFit | None] = [None] * len(curves)
    usable = [index for index, points in enumerate(curves) if _is_usable(points)]
    for start in range(0, len(usable), _BATCH):
        batch = usable[start : start + _BATCH]
        for index, fit in zip(batch, _fit_batch([curves[index] for index in batch]), strict=True):
            fits[index] = fit
    return fits


def _is_usable(points: Sequence[LossPoint]) -> bool:
    return len(points) >= _MIN_POINTS and all(math.isfinite(point.loss) and point.loss > 0 for point in points)


def _fit_batch(curves: Sequence[Sequence[LossPoint]]) -> list[LossFit | None]:
    longest = max(map(len, curves))
    epochs, losses = np.zeros((2, len(curves), longest))
    valid = np.zeros(losses.shape, dtype=bool)
    for row, points in enumerate(curves):
        epochs[row, : len(points)], losses[row, : len(points)] = np.array(points).T
        epochs[row, len(points) :] = points[-1].epoch
        valid[row, : len(points)] = True
    losses = _without_outliers(losses, valid)
    losses /= losses.max(axis=1, keepdims=True)
    # 1 / (loss - floor) has no value where the floor is the least loss itself.
    max_floor = np.where(valid, losses, np.inf).min(axis=1) * (1 - _MIN_DISTANCE)
    low, high = np.zeros_like(max_floor), max_floor
    rows = np.arange(len(curves))
    for _ in range(_GRIDS):
        floors = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, _FLOORS)
        slopes, offsets, errors = _fit_lines(epochs, losses, valid, floors)
        least = errors.argmin(axis=1)
        best = np.stack([slopes[rows, least], offsets[rows, least], floors[rows, least], errors[rows, least]], axis=1)
        step = (high - low) / (_FLOORS - 1)
        low, high = np.maximum(best[:, 2] - step, 0.0), np.minimum(best[:, 2] + step, max_floor)
    return [
        LossFit(slope, offset, floor) if slope > 0 and math.isfinite(error) else None
        for slope, offset, floor, error in best.tolist()
    ]


def _without_outliers(losses: _Floats, valid: _Bools) -> _Floats:
    """Losses with each one that lies outside the range of its neighbours replaced by their mean.

    The first and the last loss stay as they are, because a falling curve ends outside the range of the others. Both
    arguments and the result have shape (jobs, points); the valid points of a job come first.
    """
    padding = ((0, 0), (_NEIGHBOURS, _NEIGHBOURS))
    padded_losses, padded_valid = np.pad(losses, padding), np.pad(valid, padding)
    shifts = [shift for shift in range(2 * _NEIGHBOURS + 1) if shift != _NEIGHBOURS]
    neighbours = np.stack([padded_losses[:, shift : shift + losses.shape[1]] for shift in shifts])
    exists = np.stack([padded_valid[:, shift : shift + losses.shape[1]] for shift in shifts])
    least = np.where(exists, neighbours, np.inf).min(axis=0)
    largest = np.where(exists, neighbours, -np.inf).max(axis=0)
    mean = np.where(exists, neighbours, 0.0).sum(axis=0) / np.maximum(exists.sum(axis=0), 1)
    inner = exists[_NEIGHBOURS - 1] & exists[_NEIGHBOURS] & valid
    return np.where(inner & ((losses < least) | (losses > largest)), mean, losses)


def _fit_lines(epochs: _Floats, losses: _Floats, valid: _Bools, floors: _Floats) -> tuple[_Floats, _Floats, _Floats]:
    """Fit slope and offset for each floor.

    Parameters
    ----------
    epochs, losses, valid
        Shape (jobs, points).
    floors
        Shape (jobs, floors).

    Returns
    -------
    Slope, offset and sum of squared differences of losses, each of shape (jobs, floors); the last is infinite where
    there is no finite fit.
    """
    counts = valid[:, None, :].astype(np.float64)
    # Degenerate cases end with an infinite error, which is never the least.
    with np.errstate(all="ignore"):
        above = (losses[:, None, :] - floors[:, :, None]) * counts
        square = above * above
        weight, weighted = square * square, square * above  # the latter is weight x 1 / above
        # Normal equations of the weighted line through (epoch, 1 / above). Epochs count from that of the largest loss,
        # which may outweigh all others: otherwise the contribution of those to the slope would be lost in rounding.
        pivot = epochs[np.arange(len(epochs)), losses.argmax(axis=1)][:, None]
        shifted = epochs - pivot
        total, mean = weight.sum(axis=2), weighted.sum(axis=2)
        first, second = _sums(weight, shifted), _sums(weight, shifted * shifted)
        product = _sums(weighted, shifted)
        determinant = total * second - first * first
        slope = (total * product - first * mean) / determinant
        offset = (second * mean - first * product) / determinant - slope * pivot
        # With two coefficients, the constrained minimum lies on an edge wherever the free one is outside.
        squares = _sums(weight, epochs * epochs)
        through_origin = np.where(squares > 0, _sums(weighted, epochs) / squares, 0.0)
        slope = np.where(offset < 0, through_origin, slope)
        offset = np.maximum(offset, 0.0)
        flat = ~(slope > 0)
        slope, offset = np.where(flat, 0.0, slope), np.where(flat, mean / total, offset)
        difference = 1 / (slope[:, :, None] * epochs[:, None, :] + offset[:, :, None]) - above
        errors = _sums(difference * difference, counts[:, 0])
        # With an infinite slope the errors may be finite.
        finite = np.isfinite(errors) & np.isfinite(slope) & np.isfinite(offset)
    return slope, offset, np.where(finite, errors, np.inf)


def _sums(values: _Floats, factors: _Floats) -> _Floats:
    """Sums of products over the points; shapes (jobs, floors, points), (jobs, points) -> (jobs, floors)."""
    sums: _Floats = (values @ factors[:, :, None])[:, :, 0]
    return sums
