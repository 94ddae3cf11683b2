"""Optimus' curve of training loss, fitted to the losses of jobs so far: predicts when a loss will have settled.

    loss = 1 / (slope * epoch + offset) + asymptote        with slope, offset, asymptote >= 0

Losses are fractions of the job's largest one. Source: Peng et al., "Optimus", EuroSys 2018, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dl2d.core.array_types import Bools, Floats
from dl2d.core.measured_speeds_and_losses import LossPoint

#: Least number of points, since the curve has three coefficients.
_MIN_POINTS = 3
#: Number of points on either side that a loss is compared with.
_NEIGHBOURS = 2
#: Number of asymptotes of the grid on which that of the curve is searched for.
_ASYMPTOTES = 17
#: Number of grids on which the asymptote is searched for. Each leaves 1/8 of its range for the next; after nine, 8^-9 =
#: 7e-9 of the first range is left, within which sums of squares are equal.
_GRIDS = 9
#: Least distance between the asymptote and the least loss, as a fraction of the latter.
_MIN_DISTANCE = 1e-9
#: Number of jobs whose curves are fitted at once: enough to save time, few enough for the processor's cache.
_BATCH = 32


@dataclass(frozen=True, slots=True)
class LossFit:
    """Coefficients of a fitted curve, as in the module's docstring; each is at least 0."""

    #: Per epoch.
    slope: float
    offset: float
    #: Fraction of the largest loss.
    asymptote: float

    def settling_epoch(self, threshold: float) -> int:
        """First whole epoch from which on each further epoch lowers the loss by less than ``threshold``.

        ``threshold`` is a fraction of the largest loss. Each epoch lowers the loss by less than the one before, so
        there is exactly one such epoch: 1/x - 1/(x + slope) < threshold with x = slope * epoch + offset.
        """
        slope = self.slope
        least_x = (math.sqrt(slope * slope + 4 * slope / threshold) - slope) / 2
        epoch = max(math.ceil((least_x - self.offset) / slope), 0)
        x = slope * epoch + self.offset
        return epoch + 1 if slope / (x * (x + slope)) >= threshold else epoch


def fit_losses(curves: Sequence[Sequence[LossPoint]]) -> list[LossFit | None]:
    """Fit the curve to the losses of each job, oldest first.

    For a given asymptote, 1 / (loss - asymptote) is linear in the epoch, and slope and offset are found by non-negative
    least squares, each residual weighted by the square of (loss - asymptote) so that it counts as a difference of
    losses. The asymptote is the one for which the curve is nearest to the losses. Before the fit, each loss that lies
    outside the range of its neighbours, two (``_NEIGHBOURS``) on either side, is replaced by their mean. Many jobs are
    fitted at once: about 0.1 ms each.

    Returns
    -------
    For each job its curve; None where there are fewer than three points (``_MIN_POINTS``), or losses that are not
    positive numbers or do not fall.
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
    # 1 / (loss - asymptote) has no value where the asymptote is the least loss itself.
    max_asymptote = np.where(valid, losses, np.inf).min(axis=1) * (1 - _MIN_DISTANCE)
    low, high = np.zeros_like(max_asymptote), max_asymptote
    rows = np.arange(len(curves))
    for _ in range(_GRIDS):
        asymptotes = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, _ASYMPTOTES)
        slopes, offsets, errors = _fit_lines(epochs, losses, valid, asymptotes)
        least = errors.argmin(axis=1)
        best = np.stack([values[rows, least] for values in (slopes, offsets, asymptotes, errors)], axis=1)
        step = (high - low) / (_ASYMPTOTES - 1)
        low, high = np.maximum(best[:, 2] - step, 0.0), np.minimum(best[:, 2] + step, max_asymptote)
    return [
        LossFit(slope, offset, asymptote) if slope > 0 and math.isfinite(error) else None
        for slope, offset, asymptote, error in best.tolist()
    ]


def _without_outliers(losses: Floats, valid: Bools) -> Floats:
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


def _fit_lines(epochs: Floats, losses: Floats, valid: Bools, asymptotes: Floats) -> tuple[Floats, Floats, Floats]:
    """Fit slope and offset for each asymptote.

    Parameters
    ----------
    epochs, losses, valid
        Shape (jobs, points).
    asymptotes
        Shape (jobs, asymptotes).

    Returns
    -------
    Slope, offset and sum of squared differences of losses, each of shape (jobs, asymptotes); the last is infinite where
    there is no finite fit.
    """
    mask = valid[:, None, :].astype(np.float64)
    # Degenerate cases end with an infinite error, which is never the least.
    with np.errstate(all="ignore"):
        above = (losses[:, None, :] - asymptotes[:, :, None]) * mask
        # The line through x = epoch and y = 1 / above, with weights w = above^4.
        square = above * above
        w, wy = square * square, square * above
        # Epochs count from that of the largest loss, which may outweigh all others: otherwise the contribution of those
        # to the slope would be lost in rounding.
        pivot = epochs[np.arange(len(epochs)), losses.argmax(axis=1)][:, None]
        x = epochs - pivot
        # Normal equations of the weighted line.
        sum_w, sum_wy = w.sum(axis=2), wy.sum(axis=2)
        sum_wx, sum_wxx, sum_wxy = _sums(w, x), _sums(w, x * x), _sums(wy, x)
        determinant = sum_w * sum_wxx - sum_wx * sum_wx
        slope = (sum_w * sum_wxy - sum_wx * sum_wy) / determinant
        offset = (sum_wxx * sum_wy - sum_wx * sum_wxy) / determinant - slope * pivot
        # If the unconstrained offset is negative, the constrained optimum has offset 0; its slope is that of the line
        # through the origin. Likewise, if the slope is not positive, the optimum has slope 0.
        squares = _sums(w, epochs * epochs)
        through_origin = np.where(squares > 0, _sums(wy, epochs) / squares, 0.0)
        slope = np.where(offset < 0, through_origin, slope)
        offset = np.maximum(offset, 0.0)
        flat = ~(slope > 0)
        slope, offset = np.where(flat, 0.0, slope), np.where(flat, sum_wy / sum_w, offset)
        difference = 1 / (slope[:, :, None] * epochs[:, None, :] + offset[:, :, None]) - above
        errors = _sums(difference * difference, mask[:, 0])
        # With an infinite slope the errors may be finite.
        finite = np.isfinite(errors) & np.isfinite(slope) & np.isfinite(offset)
    return slope, offset, np.where(finite, errors, np.inf)


def _sums(values: Floats, factors: Floats) -> Floats:
    """Sums of products over the points; shapes (jobs, asymptotes, points), (jobs, points) -> (jobs, asymptotes)."""
    return (values @ factors[:, :, None])[:, :, 0]
