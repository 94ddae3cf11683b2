"""How fast jobs of a kind train at sizes that were never measured: Optimus' functions, fitted to those that were.

Source: Peng et al., "Optimus", EuroSys 2018, section 3.2. Everything is in samples per second, so that the batch size
may be unknown: it is part of the coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Allocation, Architecture, Consistency
from dl2d.core.measured_speeds import SpeedPoint, TrainingKind

_Floats = NDArray[np.float64]
#: Two sizes count as telling the same where they differ by less than this part of what they tell.
_TOLERANCE = 1e-6
#: Seconds per sample below which there is no such speed.
_SHORTEST = 1e-30


def terms(kind: TrainingKind, workers: _Floats, ps: _Floats) -> _Floats:
    """What the seconds per sample are made of; each term's coefficient is fitted and never negative.

    With w workers and p parameter servers:

    - ``ps``, ``sync``: 1/w (computing), 1 (fixed), w/p (links of the servers), w and p (connections). The paper's
      ``steps/s = 1 / (a*B/w + b + c*w/p + d*w + e*p)``, turned over and divided by B.
    - ``ps``, ``async``: 1/w, 1/p, 1, p/w. The paper's ``steps/s = w / (a + b*w/p + c*w + d*p)``, turned over.
    - ``allreduce``: 1/w, (w-1)/w, w-1: computing, the ring, and what each worker more adds. A fixed part is the sum of
      the first two, so it needs no term of its own.

    Parameters
    ----------
    workers, ps
        Counts of at least 1 (``ps`` is not looked at for ``allreduce``), shape (n,).

    Returns
    -------
    Shape (n, 5), (n, 4) or (n, 3).
    """
    one = np.ones_like(workers)
    if kind.architecture is Architecture.ALLREDUCE:
        return np.stack([one / workers, (workers - 1) / workers, workers - 1], axis=-1)
    if kind.consistency is Consistency.ASYNC:
        return np.stack([one / workers, one / ps, one, ps / workers], axis=-1)
    return np.stack([one / workers, one, workers / ps, workers, ps], axis=-1)


def number_of_terms(kind: TrainingKind) -> int:
    """How many sizes have to be measured, at least, before there is a fit."""
    if kind.architecture is Architecture.ALLREDUCE:
        return 3
    return 4 if kind.consistency is Consistency.ASYNC else 5


def terms_at(kind: TrainingKind, sizes: Sequence[Allocation]) -> _Floats:
    """``terms`` of some sizes; shape (sizes, terms)."""
    counts = np.array(sizes, dtype=np.float64).reshape(-1, 2)
    return terms(kind, counts[:, 0], counts[:, 1])


def usable(kind: TrainingKind, points: Iterable[SpeedPoint]) -> tuple[SpeedPoint, ...]:
    """Points that say something: a speed of 0 is a run that failed, and a job without workers or PSs does not train."""
    has_ps = kind.architecture is Architecture.PS
    return tuple(
        [point for point in points if 0.0 < point[1] < math.inf and point[0][0] > 0 and (point[0][1] > 0 or not has_ps)]
    )


@dataclass(frozen=True, slots=True)
class SpeedFit:
    """A fitted function: seconds per sample = ``theta`` . ``terms``."""

    kind: TrainingKind
    theta: tuple[float, ...]

    def grid(self, max_workers: int, max_ps: int) -> _Floats:
        """Samples per second, as ``dl2d.core.measured_speeds.KnownSpeeds.grid`` has them: ``grid[ps, workers]``.

        Where all terms with a coefficient vanish the function says nothing: 0, as where nothing is trained.
        """
        has_ps = self.kind.architecture is Architecture.PS
        speeds = np.zeros((max_ps + 1, max_workers + 1))
        first = 1 if has_ps else 0
        ps, workers = np.meshgrid(np.arange(first, max_ps + 1.0), np.arange(1, max_workers + 1.0), indexing="ij")
        seconds = terms(self.kind, workers.ravel(), ps.ravel()) @ np.array(self.theta)
        seconds = seconds.reshape(workers.shape)
        np.divide(1.0, seconds, out=speeds[first:, 1:], where=seconds > _SHORTEST)
        return speeds


def fit_speed(kind: TrainingKind, points: Iterable[SpeedPoint]) -> SpeedFit | None:
    """Fit a kind's function to measured points by non-negative least squares.

    What is least is the sum of squares of *relative* errors of the seconds per sample: each size counts alike, however
    fast it is. None where there are fewer points than terms.
    """
    from scipy.optimize import nnls  # noqa: PLC0415 - a quarter of a second that commands which fit nothing need not wait

    points = usable(kind, points)
    if len(points) < number_of_terms(kind):
        return None
    speeds = np.array([point.samples_per_second for point in points])
    rows = terms_at(kind, [point.allocation for point in points]) * speeds[:, None]
    # Terms differ by orders of magnitude; with columns of one length the solver's tolerance means the same for each.
    lengths = np.linalg.norm(rows, axis=0)
    lengths[lengths == 0] = 1.0
    try:
        scaled, _ = nnls(rows / lengths, np.ones(len(points)))
    except RuntimeError:  # it did not converge
        return None
    return SpeedFit(kind, tuple((scaled / lengths).tolist()))


def unseen(kind: TrainingKind, sizes: Sequence[Allocation], candidates: Sequence[Allocation]) -> NDArray[np.bool_]:
    """Which candidates would tell the fit something that ``sizes`` cannot, however often they are measured.

    As an example, where all sizes have as many workers as PSs, w/p is always 1 and cannot be told from what is fixed.

    Returns
    -------
    Shape (candidates,).
    """
    rows = terms_at(kind, candidates)
    scale = np.abs(rows).max(axis=0, initial=0.0)
    scale[scale == 0] = 1.0
    rows = rows / scale
    if not sizes:
        return np.ones(len(candidates), dtype=bool)
    _, strengths, directions = np.linalg.svd(terms_at(kind, sizes) / scale)
    rank = int((strengths > _TOLERANCE * strengths[0]).sum())
    beyond = np.linalg.norm(rows @ directions[rank:].T, axis=1)
    told: NDArray[np.bool_] = beyond > _TOLERANCE * np.linalg.norm(rows, axis=1)
    return told
