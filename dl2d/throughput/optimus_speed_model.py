"""Optimus' functions of training speed, fitted to measured sizes to predict speeds at others.

    seconds per sample = theta . terms(workers, PSs)        with theta >= 0

Source: Peng et al., "Optimus", EuroSys 2018, section 3.2. The paper's functions are of steps per second; these are of
samples, so that the batch size, which is a factor of the coefficients, may be unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dl2d.core.array_types import Bools, Floats
from dl2d.core.jobs import Allocation, Architecture, Consistency
from dl2d.core.measured_speeds_and_losses import SpeedPoint, TrainingKind

#: Fraction of the largest singular value, or of a vector's length, below which a number counts as 0.
_TOLERANCE = 1e-6
#: Seconds per sample at or below which a speed counts as unknown.
_MIN_SECONDS = 1e-30


def terms(kind: TrainingKind, workers: Floats, ps: Floats) -> Floats:
    """Terms of the seconds per sample at n sizes, each of which has a fitted coefficient.

    With w workers and p parameter servers:

    - ``ps``, ``sync``: 1/w (computing), 1 (fixed), w/p (links of the servers), w and p (connections); the reciprocal of
      the paper's ``steps/s = 1 / (a*B/w + b + c*w/p + d*w + e*p)``, divided by the batch size B.
    - ``ps``, ``async``: 1/w, 1/p, 1, p/w; the reciprocal of the paper's ``steps/s = w / (a + b*w/p + c*w + d*p)``.
    - ``allreduce``: 1/w (computing), (w-1)/w (the ring), w-1 (overhead of each further worker). A constant is the sum
      of the first two, so it needs no term of its own.

    Parameters
    ----------
    workers, ps
        Counts of at least 1 (``ps`` is ignored for ``allreduce``), shape (n,).

    Returns
    -------
    Shape (n, terms), with as many terms as the list above has: 5, 4 or 3.
    """
    ones = np.ones_like(workers)
    if kind.architecture is Architecture.ALLREDUCE:
        return np.stack([ones / workers, (workers - 1) / workers, workers - 1], axis=-1)
    if kind.consistency is Consistency.ASYNC:
        return np.stack([ones / workers, ones / ps, ones, ps / workers], axis=-1)
    return np.stack([ones / workers, ones, workers / ps, workers, ps], axis=-1)


def number_of_terms(kind: TrainingKind) -> int:
    """Number of terms of a kind, which is the least number of measured sizes for a fit."""
    return int(terms_at(kind, [Allocation(1, 1)]).shape[1])


def terms_at(kind: TrainingKind, sizes: Sequence[Allocation]) -> Floats:
    """``terms`` of a sequence of sizes; shape (sizes, terms)."""
    counts = np.array(sizes, dtype=np.float64).reshape(-1, 2)
    return terms(kind, counts[:, 0], counts[:, 1])


def usable(kind: TrainingKind, points: Iterable[SpeedPoint]) -> tuple[SpeedPoint, ...]:
    """Points that can be fitted: those of runs that did not fail (speed 0) and had the tasks that they need."""
    has_ps = kind.architecture is Architecture.PS
    return tuple(
        point
        for point in points
        if 0.0 < point.samples_per_second < math.inf
        and point.allocation.workers > 0
        and (point.allocation.ps > 0 or not has_ps)
    )


@dataclass(frozen=True, slots=True)
class SpeedFit:
    """A fitted function."""

    kind: TrainingKind
    #: Coefficient of each term.
    theta: tuple[float, ...]

    def grid(self, max_workers: int, max_ps: int) -> Floats:
        """Samples per second at all sizes, as of ``KnownSpeeds.grid``: ``grid[ps, workers]``.

        Shape (max_ps + 1, max_workers + 1), with equal rows for all-reduce jobs; 0 where a count that the job needs is
        0, and where all terms with a coefficient vanish.
        """
        has_ps = self.kind.architecture is Architecture.PS
        speeds = np.zeros((max_ps + 1, max_workers + 1))
        first_row = 1 if has_ps else 0
        ps, workers = np.meshgrid(np.arange(first_row, max_ps + 1.0), np.arange(1, max_workers + 1.0), indexing="ij")
        seconds = terms(self.kind, workers.ravel(), ps.ravel()) @ np.array(self.theta)
        seconds = seconds.reshape(workers.shape)
        np.divide(1.0, seconds, out=speeds[first_row:, 1:], where=seconds > _MIN_SECONDS)
        return speeds


def fit_speed(kind: TrainingKind, points: Iterable[SpeedPoint]) -> SpeedFit | None:
    """Fit a kind's function to measured points by non-negative least squares.

    It minimises the sum of squares of *relative* errors of the seconds per sample, so that each size counts alike,
    however fast it is. None where there are fewer points than terms, or the solver does not converge.
    """
    from scipy.optimize import nnls  # noqa: PLC0415 - takes 0.25 s, only where something is fitted

    points = usable(kind, points)
    if len(points) < number_of_terms(kind):
        return None
    speeds = np.array([point.samples_per_second for point in points])
    rows = terms_at(kind, [point.allocation for point in points]) * speeds[:, None]
    # Terms differ by orders of magnitude. Columns are scaled to one length, since the solver has one tolerance for all.
    lengths = np.linalg.norm(rows, axis=0)
    lengths[lengths == 0] = 1.0
    try:
        scaled, _ = nnls(rows / lengths, np.ones(len(points)))
    except RuntimeError:  # it did not converge
        return None
    return SpeedFit(kind, tuple((scaled / lengths).tolist()))


def adds_information(kind: TrainingKind, sizes: Sequence[Allocation], candidates: Sequence[Allocation]) -> Bools:
    """Whether terms at each candidate are linearly independent of those at ``sizes``; shape (candidates,).

    Measuring such a candidate adds information to a fit that ``sizes`` cannot give, however often they are measured. As
    an example, where all sizes have as many workers as PSs, w/p is always 1 and cannot be told from the fixed term.
    """
    if not sizes:
        return np.ones(len(candidates), dtype=bool)
    rows = terms_at(kind, candidates)
    scale = np.abs(rows).max(axis=0, initial=0.0)
    scale[scale == 0] = 1.0
    rows = rows / scale
    # The first `rank` directions span the terms at `sizes`. A candidate is independent of these if its terms have a
    # component along one of the others.
    _, singular_values, directions = np.linalg.svd(terms_at(kind, sizes) / scale)
    rank = int((singular_values > _TOLERANCE * singular_values[0]).sum())
    outside = np.linalg.norm(rows @ directions[rank:].T, axis=1)
    independent: Bools = outside > _TOLERANCE * np.linalg.norm(rows, axis=1)
    return independent
