"""Sizes at which jobs of an unknown kind run for a while, so that a speed function can be fitted to them.

Source: Peng et al., "Optimus", EuroSys 2018, section 3.2: new jobs are run with a few sizes for some minutes. Here they
go on training meanwhile. The sizes are spread over workers and PSs; the authors' code draws as many of each, from which
what w/p costs cannot be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Allocation, Architecture, JobRequest
from dl2d.core.measured_speeds import TrainingKind
from dl2d.throughput.optimus_model import adds_information, number_of_terms, terms_at

#: Most counts of one role that are considered for samples.
_MOST_COUNTS = 32


class Sampling:
    """The sizes of one kind: those that were measured, and those that are being sampled.

    There is enough for a fit when at least ``least`` distinct sizes are measured and they tell all terms of the kind's
    function from each other.
    """

    def __init__(self, kind: TrainingKind, measured: Iterable[Allocation], least: int) -> None:
        self._kind = kind
        self._least = least
        self._sizes = list(dict.fromkeys(measured))
        self._enough, self._enough_at = False, -1

    @property
    def sizes(self) -> int:
        """How many sizes there are."""
        return len(self._sizes)

    def enough(self) -> bool:
        """Whether a fit can be had from these sizes."""
        if self._enough_at != len(self._sizes):
            self._enough_at, self._enough = len(self._sizes), self._tell_terms()
        return self._enough

    def telling(self, candidates: Sequence[Allocation]) -> list[Allocation]:
        """Candidates that would bring a fit nearer: new ones, and with enough sizes those that tell a term more."""
        known = set(self._sizes)
        new = [size for size in candidates if size not in known]
        if len(self._sizes) < self._least or not new:
            return new
        told = adds_information(self._kind, self._sizes, new)
        return [size for size, tells in zip(new, told.tolist(), strict=True) if tells]

    def farthest(self, candidates: Sequence[Allocation]) -> Allocation:
        """Candidate with the largest distance from all sizes; of equals the one with the fewest tasks, then workers.

        Distances are Euclidean between (log2 workers, log2 PSs). The first sample of all is the smallest size.
        """
        order = sorted(candidates, key=lambda size: (size.workers + size.ps, size.workers))
        if not self._sizes:
            return order[0]
        apart = _logarithms(order)[:, None, :] - _logarithms(self._sizes)[None, :, :]
        distances = (apart**2).sum(axis=2).min(axis=1)
        return order[int(np.round(distances, 9).argmax())]

    def take(self, size: Allocation) -> None:
        """Count a size as being sampled."""
        self._sizes.append(size)

    def _tell_terms(self) -> bool:
        terms = number_of_terms(self._kind)
        if len(self._sizes) < max(self._least, terms):
            return False
        rows = terms_at(self._kind, self._sizes)
        largest = np.abs(rows).max(axis=0)
        # Each term in units of its own, for counts differ by orders of magnitude.
        return bool(largest.all()) and int(np.linalg.matrix_rank(rows / largest, tol=1e-6)) == terms


def candidates(request: JobRequest) -> list[Allocation]:
    """Sizes at which a job may be sampled; where there are very many counts, some that are spread evenly by ratio."""
    workers = [count for count in range(request.min_workers, request.max_workers + 1) if request.allows(count)]
    if request.architecture is Architecture.ALLREDUCE:
        return [Allocation(count, request.min_ps) for count in _thinned(workers)]
    counts = _thinned(list(range(max(request.min_ps, 1), request.max_ps + 1)))
    return [Allocation(count, ps) for count in _thinned(workers) for ps in counts]


def _thinned(counts: list[int]) -> list[int]:
    if len(counts) <= _MOST_COUNTS:
        return counts
    wanted = np.geomspace(counts[0], counts[-1], _MOST_COUNTS)
    places = np.searchsorted(counts, wanted - 1e-9).clip(max=len(counts) - 1)
    return [counts[place] for place in dict.fromkeys(places.tolist())]


def _logarithms(sizes: Sequence[Allocation]) -> NDArray[np.float64]:
    logarithms: NDArray[np.float64] = np.log2(np.maximum(np.array(sizes, dtype=np.float64), 1.0))
    return logarithms
