"""Sampling: sizes at which jobs of an unknown kind run for a while, so that a speed function can be fitted to them.

Source: Peng et al., "Optimus", EuroSys 2018, section 3.2: new jobs run at a few sizes for some minutes. Here they train
meanwhile. The sizes are spread over workers and PSs; the authors' code uses equal numbers of both, so that the
coefficient of w/p cannot be fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dl2d.core.array_types import Floats
from dl2d.core.jobs import Allocation, Architecture, JobRequest
from dl2d.core.measured_speeds_and_losses import TrainingKind
from dl2d.throughput.optimus_speed_model import adds_information, number_of_terms, terms_at

#: Maximum number of counts of one role that are considered for sampling.
_MAX_COUNTS = 32


class Sampling:
    """Sizes of one kind: those that were measured, and those that are being sampled.

    They are enough for a fit if at least ``min_sizes`` distinct sizes are among them, and the terms of the kind's
    function are linearly independent at them.
    """

    def __init__(self, kind: TrainingKind, measured: Iterable[Allocation], min_sizes: int) -> None:
        self._kind = kind
        self._min_sizes = min_sizes
        self._sizes = list(dict.fromkeys(measured))
        # Result of ``enough``, and the number of sizes that it is for.
        self._enough, self._enough_for = False, -1

    @property
    def sizes(self) -> int:
        """Number of sizes."""
        return len(self._sizes)

    def enough(self) -> bool:
        """Whether these sizes are enough for a fit."""
        if self._enough_for != len(self._sizes):
            self._enough_for, self._enough = len(self._sizes), self._determine_terms()
        return self._enough

    def informative(self, candidates: Sequence[Allocation]) -> list[Allocation]:
        """Candidates that a fit needs: new ones; once there are ``min_sizes``, those that determine another term."""
        known = set(self._sizes)
        new = [size for size in candidates if size not in known]
        if len(self._sizes) < self._min_sizes or not new:
            return new
        informative = adds_information(self._kind, self._sizes, new)
        return [size for size, adds in zip(new, informative.tolist(), strict=True) if adds]

    def farthest(self, candidates: Sequence[Allocation]) -> Allocation:
        """Candidate with the largest distance to the nearest size; of equals the one with fewest tasks, then workers.

        Distances are Euclidean, of (log2 workers, log2 PSs). If there is no size yet, it is the smallest candidate.
        """
        order = sorted(candidates, key=lambda size: (size.tasks, size.workers))
        if not self._sizes:
            return order[0]
        differences = _logarithms(order)[:, None, :] - _logarithms(self._sizes)[None, :, :]
        squared_distances = (differences**2).sum(axis=2).min(axis=1)
        return order[int(np.round(squared_distances, 9).argmax())]

    def take(self, size: Allocation) -> None:
        """Add a size that is being sampled."""
        self._sizes.append(size)

    def _determine_terms(self) -> bool:
        terms = number_of_terms(self._kind)
        if len(self._sizes) < max(self._min_sizes, terms):
            return False
        rows = terms_at(self._kind, self._sizes)
        largest = np.abs(rows).max(axis=0)
        # Terms are scaled to a maximum of 1, since they differ by orders of magnitude.
        return bool(largest.all()) and int(np.linalg.matrix_rank(rows / largest, tol=1e-6)) == terms


def candidates(request: JobRequest) -> list[Allocation]:
    """Sizes at which a job may be sampled; of many counts of a role, some that are in geometric progression."""
    workers = [count for count in range(request.min_workers, request.max_workers + 1) if request.allows(count)]
    if request.architecture is Architecture.ALLREDUCE:
        return [Allocation(count, request.min_ps) for count in _thinned(workers)]
    counts = _thinned(list(range(max(request.min_ps, 1), request.max_ps + 1)))
    return [Allocation(count, ps) for count in _thinned(workers) for ps in counts]


def _thinned(counts: list[int]) -> list[int]:
    if len(counts) <= _MAX_COUNTS:
        return counts
    spread = np.geomspace(counts[0], counts[-1], _MAX_COUNTS)
    indices = np.searchsorted(counts, spread - 1e-9).clip(max=len(counts) - 1)
    return [counts[index] for index in dict.fromkeys(indices.tolist())]


def _logarithms(sizes: Sequence[Allocation]) -> Floats:
    return np.log2(np.maximum(np.array(sizes, dtype=np.float64), 1.0))
