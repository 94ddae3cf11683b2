"""Sizes of jobs, and how speeds at them go together: covariances of a Gaussian process before anything is measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Architecture, Consistency
from dl2d.core.measured import TrainingKind
from dl2d.throughput.recent import Recent

_Floats = NDArray[np.float64]

#: Scale, in doublings, and variance of what kinds share, and of what is a kind's own.
SHARED_PART: Final = (2.0, 0.5)
OWN_PART: Final = (1.5, 0.12)
#: What each doubling of workers and of PSs (for all-reduce of workers, twice) is expected to add before anything is
#: measured: a job of 16 times the size is four times as fast.
_TREND: Final = 0.25 * float(np.log(2.0))
#: Variance of a kind's level: nothing is known of it before it is measured.
LEVEL: Final = 9.0
#: Deviation of each size from its neighbours that nothing but measuring it will tell.
ROUGH: Final = 0.1
#: Most sizes of a group of kinds that are remembered together, and up to how many workers and PSs all are.
_MOST_TOGETHER: Final = 512
_ALL_UP_TO: Final = 16
#: Numbers that are kept of the grids of what all kinds share, and of each kind.
MOST_OF_GROUP: Final = 1 << 21
_MOST_OF_KIND: Final = 1 << 16
#: And of one grid, for it to be worked out of all sizes that are remembered.
_MOST_OF_ALL: Final = 1 << 17
#: A triangular matrix is inverted in blocks that are no smaller.
_LEAST_HALF: Final = 24


class Group(NamedTuple):
    """Kinds that have a part in common."""

    architecture: Architecture
    consistency: Consistency


class Bounds(NamedTuple):
    """Largest counts of a job."""

    workers: int
    ps: int


class Sizes:
    """Some sizes, and how what is a kind's own goes together at them and at others.

    Which sizes of a kind count changes more often than which there are. So some may be a part of all that there are:
    then what is known of those is not worked out again.
    """

    def __init__(
        self, group: Group, counts: NDArray[np.int64], of: tuple[Sizes, NDArray[np.int64]] | None = None
    ) -> None:
        self.group = group
        #: Workers and PSs, shape (sizes, 2).
        self.counts = counts
        #: All, and the places of these among them; None where these are all.
        self._of = of
        self._grids: Recent[Bounds, tuple[_Floats]] = Recent(_MOST_OF_KIND if of is not None else MOST_OF_GROUP)
        self._inside: Recent[Bounds, tuple[NDArray[np.int64], NDArray[np.int64]]] = Recent(_MOST_OF_KIND)
        #: The last of each by its noise, which seldom changes: ``owns`` and ``judges`` keep them here.
        self.last: Own | None = None
        self.judge: tuple[_Floats, _Floats] = np.zeros(0), np.zeros((0, 0))

    @property
    def among(self) -> tuple[Sizes, NDArray[np.int64]]:
        """All that there are, and the places of these among them."""
        return (self, np.arange(len(self.counts))) if self._of is None else self._of

    def some(self, places: NDArray[np.int64]) -> Sizes:
        """Those at some places."""
        every, within = self.among
        return Sizes(self.group, self.counts[places], (every, within[places]))

    @cached_property
    def at(self) -> _Floats:
        """log2 of workers and PSs, shape (sizes, 2)."""
        return np.log2(np.maximum(self.counts, 1)) if self._of is None else self._of[0].at[self._of[1]]

    @cached_property
    def trend(self) -> _Floats:
        """What is expected before anything is measured, but for the level."""
        if self._of is not None:
            return self._of[0].trend[self._of[1]]
        return trend_of(self.at, has_ps=self.group.architecture is Architecture.PS)

    @cached_property
    def apart(self) -> _Floats:
        """Distances; shape (sizes, sizes)."""
        if self._of is not None:
            return _square(self._of[0].apart, self._of[1])
        return distances(self.at, self.at, self.group)

    @cached_property
    def own(self) -> _Floats:
        """Covariances of what is a kind's own; shape (sizes, sizes)."""
        if self._of is not None:
            return _square(self._of[0].own, self._of[1])
        return LEVEL + matern(self.apart, *OWN_PART)

    @cached_property
    def whole(self) -> _Floats:
        """Covariances with what is shared."""
        if self._of is not None:
            return _square(self._of[0].whole, self._of[1])
        return matern(self.apart, *SHARED_PART) + self.own

    def across(self, bounds: Bounds | None, at: _Floats) -> _Floats:
        """Covariances of what is a kind's own with it at other sizes, kept by their bounds; shape (sizes, others)."""
        if bounds is None:
            return _own(self.at, at, self.group)
        if self._of is not None and len(at) * len(self._of[0].at) <= _MOST_OF_ALL:
            return self._of[0].across(bounds, at).take(self._of[1], axis=0)
        return self._grids.get(bounds, lambda: (_own(self.at, at, self.group),))[0]

    def inside(self, bounds: Bounds) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which are within bounds, and their places in an array of all from 1 worker and 1 PS on, kept by bounds."""
        return self._inside.get(bounds, lambda: self._within(bounds))

    def _within(self, bounds: Bounds) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if self._of is not None:
            # Where those of all are is kept: which of them these are changes more often.
            every, places = self._of
            there = np.full(len(every.counts), -1)
            within, where = every.inside(bounds)
            there[within] = where
            there = there[places]
            (within,) = np.nonzero(there >= 0)
            return within, there[within]
        workers, ps = self.counts[:, 0], self.counts[:, 1]
        if self.group.architecture is not Architecture.PS:
            (within,) = np.nonzero(workers <= bounds.workers)
            return within, workers[within] - 1
        (within,) = np.nonzero((workers <= bounds.workers) & (ps <= bounds.ps))
        return within, (ps[within] - 1) * bounds.workers + workers[within] - 1


class Own:
    """A kind's own part where it was measured with some noise."""

    def __init__(self, sizes: Sizes, noise: _Floats, certain: _Floats) -> None:
        self.sizes, self.noise = sizes, noise
        #: Inverse of the covariance of the own part and the noise.
        self.certain = certain
        self._gains: Recent[Bounds, tuple[_Floats, _Floats]] = Recent(_MOST_OF_KIND)

    def gain(self, bounds: Bounds | None, at: _Floats) -> tuple[_Floats, _Floats]:
        """What each measurement says of other sizes, kept by their bounds, shape (sizes, others); variance left."""
        return self._gain(None, at) if bounds is None else self._gains.get(bounds, lambda: self._gain(bounds, at))

    def _gain(self, bounds: Bounds | None, at: _Floats) -> tuple[_Floats, _Floats]:
        across = self.sizes.across(bounds, at)
        gain = self.certain @ across
        variance: _Floats = np.maximum(LEVEL + OWN_PART[1] - np.einsum("ij,ij->j", gain, across), 0.0)
        return gain, variance


def owns(asked: Sequence[tuple[Sizes, _Floats]]) -> list[Own]:
    """Own parts where kinds were measured with variances of noise; what is as it was last is taken over."""
    news = [each for each in asked if each[0].last is None or not np.array_equal(each[0].last.noise, each[1])]
    inverses = _inverses([sizes.own for sizes, _ in news], [noise for _, noise in news])
    for (sizes, noise), certain in zip(news, inverses, strict=True):
        sizes.last = Own(sizes, noise, certain)
    return [sizes.last for sizes, _ in asked if sizes.last is not None]


def judges(asked: Sequence[tuple[Sizes, _Floats]]) -> list[_Floats]:
    """Inverses of covariances of what is measured with variances of noise; as ``owns``."""
    news = [(sizes, noise) for sizes, noise in asked if not np.array_equal(sizes.judge[0], noise)]
    inverses = _inverses([sizes.whole for sizes, _ in news], [noise for _, noise in news])
    for (sizes, noise), inverse in zip(news, inverses, strict=True):
        sizes.judge = noise, inverse
    return [sizes.judge[1] for sizes, _ in asked]


def _inverses(covariances: Sequence[_Floats], noises: Sequence[_Floats]) -> list[_Floats]:
    """Of covariances to which variances of noise, and each size's roughness, are added; as many sizes together."""
    found: dict[int, _Floats] = {}
    alike: dict[int, list[int]] = defaultdict(list)
    for place, noise in enumerate(noises):
        alike[len(noise)].append(place)
    for count, places in alike.items():
        stack, every = np.array([covariances[place] for place in places]), np.arange(count)
        stack[:, every, every] += np.array([noises[place] for place in places]) + ROUGH**2
        # Copies, so that one that is kept keeps no others.
        found |= {place: inverse.copy() for place, inverse in zip(places, inverse_of(stack), strict=True)}
    return [found[place] for place in range(len(noises))]


class Atlas:
    """All sizes of a group of kinds, in the order of workers, then PSs: what is worked out of them is for all kinds.

    Where they are too many, it begins anew with those that are asked about.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._every = _begin(group)
        self._codes = codes_of(self._every.counts)

    def include(self, counts: NDArray[np.int64]) -> None:
        """Have sizes among all, if these are not too many."""
        if self._find(codes_of(counts)) is not None:
            return
        codes = np.unique(codes_of(counts))
        if len(codes) > _MOST_TOGETHER:
            return
        for known in (self._codes, codes_of(_begin(self._group).counts), codes):
            together = np.union1d(known, codes)
            if len(together) <= _MOST_TOGETHER:
                break
        self._codes = together
        self._every = Sizes(self._group, np.stack([together >> 32, together & 0xFFFFFFFF], axis=1))

    def sizes(self, counts: NDArray[np.int64], before: Sizes | None = None) -> Sizes:
        """Sizes, which may be the same as before; those of all if they can be."""
        if before is not None and np.array_equal(before.counts, counts):
            return before
        return Sizes(self._group, counts, self.among(counts))

    def among(self, counts: NDArray[np.int64]) -> tuple[Sizes, NDArray[np.int64]] | None:
        """All sizes and the places of some, in any order, among them; None where these are too many."""
        codes = codes_of(counts)
        places = self._find(codes)
        if places is None:
            self.include(counts)
            places = self._find(codes)
        return None if places is None else (self._every, places)

    def _find(self, codes: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Places of sizes, if all are there."""
        places = self._codes.searchsorted(codes)
        return places if np.array_equal(self._codes.take(places, mode="clip"), codes) else None


@lru_cache(maxsize=8)
def _begin(group: Group) -> Sizes:
    """What an atlas begins with: all sizes up to some counts."""
    has_ps = group.architecture is Architecture.PS
    counts = np.indices((_ALL_UP_TO, _ALL_UP_TO if has_ps else 1)).reshape(2, -1).T
    return Sizes(group, counts + np.array([1, int(has_ps)]))


def group_of(kind: TrainingKind) -> Group:
    return Group(kind.architecture, kind.consistency)


def codes_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for each size, in the order of sizes."""
    codes: NDArray[np.int64] = (counts[:, 0] << 32) + counts[:, 1]
    return codes


def _square(matrix: _Floats, places: NDArray[np.int64]) -> _Floats:
    """Rows and columns at some places."""
    return matrix.take(places, axis=0).take(places, axis=1)


def distances(one: _Floats, other: _Floats, group: Group) -> _Floats:
    """Distances in doublings of workers, of PSs and of their ratio; shape (one, other)."""
    workers: _Floats = one[:, None, 0] - other[None, :, 0]
    if group.architecture is Architecture.ALLREDUCE:
        return np.abs(workers, out=workers)
    ps = one[:, None, 1] - other[None, :, 1]
    # a^2 + b^2 + (a - b)^2, in place: arrays are large.
    both = workers * ps
    workers *= workers
    ps *= ps
    workers += ps
    workers -= both
    workers *= 2.0
    return np.sqrt(workers, out=workers)


def matern(distances: _Floats, length: float, variance: float) -> _Floats:
    scaled = distances * (np.sqrt(3.0) / length)
    covariances: _Floats = np.negative(scaled)
    np.exp(covariances, out=covariances)
    scaled += 1.0
    scaled *= variance
    covariances *= scaled
    return covariances


def _own(one: _Floats, other: _Floats, group: Group) -> _Floats:
    """Covariance of what is a kind's own, its level included."""
    return LEVEL + matern(distances(one, other, group), *OWN_PART)


def root_of(matrix: _Floats) -> _Floats:
    """Lower triangular R with ``R.T @ R`` the inverse of a positive definite matrix."""
    return inverse_of_lower(factor_of(matrix))


def factor_of(matrix: _Floats) -> _Floats:
    return np.asarray(np.linalg.cholesky(matrix), dtype=np.float64)


def inverse_of(matrix: _Floats) -> _Floats:
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)


def inverse_of_lower(matrix: _Floats) -> _Floats:
    """Of a lower triangular matrix: block by block, for numpy knows of no triangles."""
    half = len(matrix) // 2
    if half < _LEAST_HALF:
        return inverse_of(matrix)
    inverse = np.zeros_like(matrix)
    first = inverse[:half, :half] = inverse_of_lower(matrix[:half, :half])
    last = inverse[half:, half:] = inverse_of_lower(matrix[half:, half:])
    inverse[half:, :half] = last @ (matrix[half:, :half] @ -first)
    return inverse


def trend_of(at: _Floats, *, has_ps: bool) -> _Floats:
    """What is expected at sizes before anything is measured, but for the level."""
    return _TREND * (at.sum(axis=1) if has_ps else 2.0 * at[:, 0])
