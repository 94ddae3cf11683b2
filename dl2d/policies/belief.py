"""What a scheduler believes of speeds that it never measured: one Gaussian process over all kinds of jobs.

Logarithms of samples/s are the sum of what all kinds share, of what is a kind's own, of its level, and of what is each
size's alone. So what one kind showed (that servers help, that many workers do not) is expected of the next one, until
it shows otherwise; and next to a good size there may be a better one.

Sources: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, sections 2.2 and 4.2 (Matern-3/2);
upper confidence bounds: Srinivas et al., "Gaussian process optimization in the bandit setting", ICML 2010.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Architecture, Consistency, JobRequest
from dl2d.core.measured import MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.policies.recent import Recent
from dl2d.policies.speed_fit import usable

_Floats = NDArray[np.float64]

#: Scale, in doublings, and variance of what kinds share, and of what is a kind's own.
_SHARED: Final = (2.0, 0.5)
_OWN: Final = (1.5, 0.12)
#: What each doubling of workers and of PSs (for all-reduce of workers, twice) is expected to add before anything is
#: measured: a job of 16 times the size is four times as fast.
_TREND: Final = 0.25 * float(np.log(2.0))
#: Variance of a kind's level: nothing is known of it before it is measured.
_LEVEL: Final = 9.0
#: Deviation of each size from its neighbours that nothing but measuring it will tell.
_ROUGH: Final = 0.1
#: Deviation that is left however often a size is measured.
_FLOOR: Final = 0.01
#: Added to what is to be positive definite.
_JITTER: Final = 1e-9
#: Deviations from what other sizes lead to expect, of so many at least, beyond which the word of few jobs is doubted.
_UNEXPECTED: Final = 4.0
_LEAST_JUDGES: Final = 4
#: Jobs whose word is not doubted: two that are not what their users say may well be alike.
_TRUSTED: Final = 3
#: Deviations that are best hoped for while speeds are being learned.
OPTIMISM: Final = 0.5
#: Most sizes of one kind that count for others, and most sizes at which the shared part is worked out; where there are
#: more, some are chosen, and neighbours are taken together.
_MOST_SIZES: Final = 40
_MOST_SHARED: Final = 96
#: Sizes of a kind that are remembered, for each one that it has now; and all sizes up to some counts of both roles are
#: remembered together where there are no more than these.
_MOST_EVER: Final = 2
_MOST_TOGETHER: Final = 256
#: Counts of one role that are all looked at, and how many there are at most; those between are interpolated.
_ALL_COUNTS: Final = 24
_MOST_COUNTS: Final = 40
#: Numbers that are kept of the grids of a belief, of what all its kinds share, and of each kind.
_MOST_OF_GRIDS: Final = 1 << 23
_MOST_OF_GROUP: Final = 1 << 21
_MOST_OF_KIND: Final = 1 << 16


class _Group(NamedTuple):
    """Kinds that have a part in common."""

    architecture: Architecture
    consistency: Consistency


class _Bounds(NamedTuple):
    """Largest counts of a job."""

    workers: int
    ps: int


class _Sizes:
    """Some sizes, and how what is a kind's own goes together at them and at others.

    Which sizes of a kind count changes more often than which there are. So some may be a part of all that there were
    lately: then what is known of those is not worked out again.
    """

    def __init__(
        self, group: _Group, counts: NDArray[np.int64], of: tuple[_Sizes, NDArray[np.int64]] | None = None
    ) -> None:
        self.group = group
        #: Workers and PSs, shape (sizes, 2), and log2 of them.
        self.counts = counts
        self.at: _Floats = np.log2(np.maximum(counts, 1)) if of is None else of[0].at[of[1]]
        #: All, and the places of these among them; None where these are all.
        self._of = of
        self._grids: Recent[_Bounds, tuple[_Floats]] = Recent(_MOST_OF_KIND)
        #: The last of each, for noises seldom change.
        self._last: _Own | None = None
        self._judge: tuple[_Floats, _Floats] | None = None

    @property
    def among(self) -> tuple[_Sizes, NDArray[np.int64]]:
        """All that there were lately, and the places of these among them."""
        return (self, np.arange(len(self.counts))) if self._of is None else self._of

    def some(self, places: NDArray[np.int64]) -> _Sizes:
        """Those at some places."""
        every, within = self.among
        return _Sizes(self.group, self.counts[places], (every, within[places]))

    def others(self, counts: NDArray[np.int64]) -> _Sizes:
        """Other sizes of the same kind, in the order of workers, then PSs."""
        if np.array_equal(self.counts, counts):
            return self
        every = self if self._of is None else self._of[0]
        if not len(every.counts):
            return _Sizes(self.group, counts)
        wanted, there = _codes(counts), _codes(every.counts)
        places = np.searchsorted(there, wanted)
        if not np.array_equal(there.take(places, mode="clip"), wanted):
            there, first = np.unique(np.concatenate([there, wanted]), return_index=True)
            if len(there) > _MOST_EVER * len(counts):
                return _Sizes(self.group, counts)
            every, places = (
                _Sizes(self.group, np.concatenate([every.counts, counts])[first]),
                np.searchsorted(there, wanted),
            )
        return every.some(places)

    @cached_property
    def apart(self) -> _Floats:
        """Distances; shape (sizes, sizes)."""
        if self._of is not None:
            return _square(self._of[0].apart, self._of[1])
        return _distances(self.at, self.at, self.group)

    @cached_property
    def own(self) -> _Floats:
        """Covariances of what is a kind's own; shape (sizes, sizes)."""
        if self._of is not None:
            return _square(self._of[0].own, self._of[1])
        return _LEVEL + _matern(self.apart, *_OWN)

    @cached_property
    def whole(self) -> _Floats:
        """Covariances with what is shared."""
        return _matern(self.apart, *_SHARED) + self.own

    def of(self, noise: _Floats) -> _Own:
        """With variances of noise."""
        if self._last is None or not np.array_equal(self._last.noise, noise):
            self._last = _Own(self, noise)
        return self._last

    def judge(self, noise: _Floats) -> _Floats:
        """Inverse of the covariances of what is measured."""
        if self._judge is None or not np.array_equal(self._judge[0], noise):
            self._judge = noise, _inverse(self.whole + np.diag(noise + _ROUGH**2))
        return self._judge[1]

    def grid(self, bounds: _Bounds | None, at: _Floats) -> _Floats:
        """Covariances of what is a kind's own with it at other sizes, kept by their bounds; shape (others, sizes)."""
        if bounds is None:
            return _own(at, self.at, self.group)
        if self._of is not None and len(at) * len(self._of[0].at) <= _MOST_OF_KIND:
            return self._of[0].grid(bounds, at).take(self._of[1], axis=1)
        return self._grids.get(bounds, lambda: (_own(at, self.at, self.group),))[0]


def _codes(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for each size, in the order of sizes."""
    codes: NDArray[np.int64] = (counts[:, 0] << 32) + counts[:, 1]
    return codes


def _square(matrix: _Floats, places: NDArray[np.int64]) -> _Floats:
    """Rows and columns at some places."""
    return matrix.take(places, axis=0).take(places, axis=1)


class _Own:
    """A kind's own part where it was measured with some noise."""

    def __init__(self, sizes: _Sizes, noise: _Floats) -> None:
        self.sizes, self.noise = sizes, noise
        #: ``root.T @ root`` is the inverse of the covariance of the own part and the noise.
        self.root = _root(sizes.own + np.diag(noise + _ROUGH**2))
        self._gains: Recent[_Bounds, tuple[_Floats, _Floats]] = Recent(_MOST_OF_KIND)

    @cached_property
    def certain(self) -> _Floats:
        """``root.T @ root``."""
        return self.root.T @ self.root

    def gain(self, bounds: _Bounds | None, at: _Floats) -> tuple[_Floats, _Floats]:
        """What each measurement says of other sizes, kept by their bounds, shape (others, sizes); variance left."""
        return self._gain(None, at) if bounds is None else self._gains.get(bounds, lambda: self._gain(bounds, at))

    def _gain(self, bounds: _Bounds | None, at: _Floats) -> tuple[_Floats, _Floats]:
        half = self.sizes.grid(bounds, at) @ self.root.T
        variance: _Floats = np.maximum(_LEVEL + _OWN[1] - (half**2).sum(axis=1), 0.0)
        return half @ self.root, variance


@dataclass(frozen=True, slots=True)
class _Measured:
    """What was measured of a kind: logarithms of samples/s less the trend, variances of noise."""

    sizes: _Sizes
    logs: _Floats
    noise: _Floats
    #: Whether so few jobs showed it that it may be doubted.
    single: NDArray[np.bool_]

    def __getitem__(self, places: NDArray[np.int64]) -> _Measured:
        return _Measured(self.sizes.some(places), self.logs[places], self.noise[places], self.single[places])

    @property
    def at(self) -> _Floats:
        """log2 of workers and PSs."""
        return self.sizes.at


@dataclass(frozen=True, slots=True)
class _Kind:
    """All that was measured of a kind."""

    points: tuple[SpeedPoint, ...]
    failed: tuple[_Bounds, ...]
    told: _Measured
    #: Sizes that count for others, and those that count for themselves alone.
    kept: _Measured
    alone: _Measured | None
    #: Mean of the logarithms that count for others.
    level: float

    @classmethod
    def of(cls, kind: TrainingKind, points: tuple[SpeedPoint, ...], noise: float, before: _Kind | None) -> _Kind:
        """From points; what is the same ``before`` is taken over."""
        if before is not None and before.points == points:
            return before
        told = _measured(kind, usable(kind, points), noise, None if before is None else before.told.sizes)
        if len(told.logs) <= _MOST_SIZES:
            kept, alone = told, None
        else:
            chosen = _chosen(kind, told)
            others = np.ones(len(told.logs), dtype=np.bool_)
            others[chosen] = False
            kept, alone = told[chosen], told[np.flatnonzero(others)]
            if before is not None and np.array_equal(before.kept.sizes.counts, kept.sizes.counts):
                kept = replace(kept, sizes=before.kept.sizes)
        kept = _doubted(kept)
        return cls(points, _failed(points), told, kept, alone, float(kept.logs.mean()) if len(kept.logs) else 0.0)


@dataclass(frozen=True, slots=True)
class _Points:
    """What a kind's own part and the shared one are told of it."""

    own: _Own
    #: Less the centre.
    logs: _Floats
    #: Place of each size among those of the shared part.
    shared: NDArray[np.int64]


class _Told(NamedTuple):
    """All that is known of a kind, or of one job."""

    points: _Points
    #: Workers and PSs, shape (sizes, 2).
    sizes: NDArray[np.int64]
    kept: _Measured
    alone: _Measured | None


class _Lattice:
    """U sizes at which a group of kinds has a part in common, before anything is measured."""

    def __init__(self, group: _Group, at: _Floats) -> None:
        self.group, self.at = group, at
        #: Lower Cholesky factor of the covariance, (U, U), and its inverse.
        self.factor = _factor(_matern(_distances(at, at, group), *_SHARED) + _JITTER * np.eye(len(at)))
        self._inverse = _inverse(self.factor)
        self._weights: Recent[_Bounds, tuple[_Floats, _Floats]] = Recent(_MOST_OF_GROUP)
        #: The last ones that were asked about, and the nearest of these to each.
        self._nearest: tuple[_Sizes, NDArray[np.int64]] | None = None

    def nearest(self, sizes: _Sizes) -> NDArray[np.int64]:
        """Which of its sizes is nearest to each of others."""
        every, within = sizes.among
        if self._nearest is None or self._nearest[0] is not every:
            self._nearest = every, _distances(every.at, self.at, self.group).argmin(axis=1)
        return self._nearest[1][within]

    def weights(self, bounds: _Bounds | None, at: _Floats) -> tuple[_Floats, _Floats]:
        """Of ``g``, at other sizes, kept by their bounds: shape (others, U); and what variance is left there."""
        return self._weigh(at) if bounds is None else self._weights.get(bounds, lambda: self._weigh(at))

    def _weigh(self, at: _Floats) -> tuple[_Floats, _Floats]:
        weights = _matern(_distances(at, self.at, self.group), *_SHARED) @ self._inverse.T
        return weights, np.maximum(_SHARED[1] - (weights**2).sum(axis=1), 0.0)


@dataclass(frozen=True, slots=True)
class _Shared:
    """What a group of kinds has in common: ``factor @ g`` with g of mean ``mean``, covariance ``root.T @ root``."""

    #: Sizes of all kinds, one after the other, and which of the lattice's stands for each.
    every: _Floats
    places: NDArray[np.int64]
    lattice: _Lattice
    #: The factor times ``mean``, (U,), and times ``root.T``, (U, U).
    believed: _Floats
    spread: _Floats
    root: _Floats
    mean: _Floats


class Belief:
    """Means and deviations of the logarithms of speeds, given what was measured.

    Inputs are log2 w, log2 p and log2 w/p, for all-reduce log2 w alone; Matern-3/2 in both parts. Kinds of one
    architecture and consistency share a part. A kind that was never measured has the shared shape, and as its level the
    mean of the logarithms that were measured of the others, with a deviation of 3 (1 sample/s where there is nothing).

    A run that failed (speed 0) says nothing about its neighbours: in the DL2 authors' measurements those are as fast as
    others. Its size alone is a hole: speed 0.

    Exact with up to 40 sizes a kind and 96 in all. Of more sizes of a kind, 40 count for others: the fastest ones, and
    such as are far from each other; each of the rest counts for itself alone. Of more sizes in all, neighbours are
    taken together in what kinds share. Cost: for K kinds with n sizes each and U distinct sizes, K (n^3 + U^2) + U^3 to
    begin with, n (n + U) for each size that is asked about. Memory: U^2, and n^2 for each kind.

    Parameters
    ----------
    measured
        Of all kinds; one that is left out is one that was never measured.
    noise
        Deviation of the logarithm of one measurement. That of a mean of m is noise / sqrt(m), but at least 0.01.
    before
        A belief from much the same measurements, of which is taken over what is the same. For speed alone.
    """

    def __init__(
        self, measured: Sequence[MeasuredSpeeds], *, noise: float = 0.05, before: Belief | None = None
    ) -> None:
        if not noise > 0:
            msg = f"noise: must be more than 0, not {noise!r}"
            raise ValueError(msg)
        self._noise = noise
        known: dict[TrainingKind, _Kind] = {}
        if before is not None and before._noise == noise:  # noqa: SLF001 - its own
            known = before._measured  # noqa: SLF001 - its own
        self._measured: dict[TrainingKind, _Kind] = {
            speeds.kind: _Kind.of(speeds.kind, speeds.points, noise, known.get(speeds.kind)) for speeds in measured
        }
        found = {kind: told for kind, told in self._measured.items() if len(told.told.logs)}
        self._centre = float(np.mean([told.level for told in found.values()])) if found else 0.0
        self._groups: dict[_Group, _Shared] = {}
        self._told: dict[TrainingKind, _Told] = {}
        for group in dict.fromkeys(map(_group, sorted(found))):
            shared = None if before is None else before._groups.get(group)  # noqa: SLF001 - its own
            self._join(group, {kind: told for kind, told in found.items() if _group(kind) == group}, shared)
        self._crossed: Recent[tuple[_Group, _Bounds], tuple[_Floats, _Floats, _Floats]] = Recent(_MOST_OF_GROUP)
        self._known: Recent[tuple[TrainingKind, _Bounds, tuple[SpeedPoint, ...]], tuple[_Floats, _Floats]]
        self._known = Recent(_MOST_OF_GRIDS)
        self._grids: Recent[tuple[TrainingKind, _Bounds, tuple[SpeedPoint, ...], float], tuple[_Floats]]
        self._grids = Recent(_MOST_OF_GRIDS)

    @property
    def kinds(self) -> tuple[TrainingKind, ...]:
        """Kinds that were measured."""
        return tuple(self._told)

    def grid(self, request: JobRequest, optimism: float = 0.0, own: tuple[SpeedPoint, ...] = ()) -> _Floats:
        """Samples per second that are believed, or hoped for, as ``KnownSpeeds.grid`` has them.

        ``exp(mean + optimism x deviation)``, where of the variances the least of the grid is taken off: what is not
        known of all sizes alike is no reason to prefer one.

        ``own`` is what a job showed itself, if it is of a kind of its own (see ``mean_sd``).

        Returns
        -------
        Shape (max_ps + 1, max_workers + 1), zeros where a needed count is 0 or a run failed. Jobs that are alike are
        given one and the same array; it is not to be written to.
        """
        asked = (TrainingKind.of(request), _Bounds(request.max_workers, request.max_ps), own, optimism)
        return self._grids.get(asked, lambda: (self._hope(request, optimism, own),))[0]

    def look_ahead(self, asked: Iterable[tuple[JobRequest, tuple[SpeedPoint, ...]]]) -> None:
        """Work out together what ``grid`` will say of jobs of kinds of their own: far faster than one by one."""
        together: dict[tuple[_Group, _Bounds], dict[tuple[TrainingKind, tuple[SpeedPoint, ...]], _Rows]] = {}
        for request, own in asked:
            kind, bounds = TrainingKind.of(request), _Bounds(request.max_workers, request.max_ps)
            rows = _rows(usable(kind, own))
            at_once = kind.architecture is Architecture.PS and 1 <= min(bounds) <= max(bounds) <= _MOST_COUNTS
            if rows and at_once and _group(kind) in self._groups and (kind, bounds, own, 0.0) not in self._grids:
                together.setdefault((_group(kind), bounds), {})[kind, own] = rows
        for (group, bounds), jobs in together.items():
            means = self._means(group, bounds, list(jobs.values()))
            if means is not None:
                for (kind, own), mean in zip(jobs, means, strict=True):
                    # of a hole both are written: deviations of these are not asked for
                    self._pierced(kind, own, (mean, np.zeros_like(mean)))
                for (kind, own), grid in zip(jobs, _exp(means), strict=True):
                    self._grids.get((kind, bounds, own, 0.0), partial(tuple, [grid]))

    def _means(self, group: _Group, bounds: _Bounds, jobs: Sequence[_Rows]) -> _Floats | None:
        """``_look`` at J jobs of kinds of their own with servers, number for number; shape (J, PSs + 1, workers + 1).

        None where there is no table of all sizes up to theirs.
        """
        shared, (_, _, at) = self._groups[group], _looked_at(bounds, has_ps=True)
        table = _table(list(chain.from_iterable(jobs)))
        counts = table[:, :2].astype(np.int64)
        every, crossed = _table_of(group, counts), self._cross(group, bounds, at)
        if every is None or crossed is None:
            return None
        places = (counts - 1) @ (every.counts[-1, 1], 1)
        trend = _trend(group, every.at[places])
        logs, noise = np.log(table[:, 2]) - trend, _noise(self._noise, table[:, 3])
        beyond = logs - self._centre - shared.believed[shared.lattice.nearest(every)[places]]
        found = np.empty((len(jobs), len(at)))
        many = np.array([len(rows) for rows in jobs])
        first = many.cumsum() - many
        # Jobs with as many sizes go together.
        for size in set(many.tolist()):
            (of,) = np.nonzero(many == size)
            those = first[of][:, None] + np.arange(size)
            where = places[those]
            covariances = every.own[where[:, :, None], where[:, None]]
            covariances[:, np.arange(size), np.arange(size)] += noise[those] + _ROUGH**2
            root = _root(covariances)
            half = every.grid(bounds, at).T[where].transpose(0, 2, 1).copy() @ root.transpose(0, 2, 1)
            found[of] = ((half @ root) @ beyond[those][:, :, None])[:, :, 0]
        found = self._centre + _trend(group, at) + (crossed[0] + found)
        means = np.full((len(jobs), bounds.ps + 1, bounds.workers + 1), -np.inf)
        means[:, 1:, 1:] = found.reshape(len(jobs), bounds.ps, bounds.workers)
        within = (counts <= bounds).all(axis=1)
        there = np.repeat(np.arange(len(jobs)), many)[within], counts[within, 1], counts[within, 0]
        means[there] += (_ROUGH**2 / (_ROUGH**2 + noise))[within] * ((logs + trend)[within] - means[there])
        return means

    def mean_sd(self, request: JobRequest, own: tuple[SpeedPoint, ...] = ()) -> tuple[_Floats, _Floats]:
        """Mean and standard deviation of the logarithm of samples/s; not to be written to.

        With speeds in ``own`` the job is taken as the only one of its kind: they and what kinds share are all that is
        known of it. Sizes with speed 0 in ``own`` are holes in any case.

        Returns
        -------
        Two of shape (max_ps + 1, max_workers + 1); -inf and 0 where nothing is trained (see ``grid``).
        """
        return self._mean_sd(TrainingKind.of(request), _Bounds(request.max_workers, request.max_ps), own)

    def of_each(self, kinds: Sequence[TrainingKind], request: JobRequest) -> tuple[_Floats, _Floats]:
        """``mean_sd`` of a job were it of each of some kinds; two of shape (kinds, max_ps + 1, max_workers + 1)."""
        bounds = _Bounds(request.max_workers, request.max_ps)
        means, deviations = zip(*(self._mean_sd(kind, bounds, ()) for kind in kinds), strict=True)
        return np.stack(means), np.stack(deviations)

    def _mean_sd(self, kind: TrainingKind, bounds: _Bounds, own: tuple[SpeedPoint, ...]) -> tuple[_Floats, _Floats]:
        return self._known.get((kind, bounds, own), lambda: self._find(kind, bounds, own))

    def _find(
        self, kind: TrainingKind, bounds: _Bounds, own: tuple[SpeedPoint, ...], *, spread: bool = True
    ) -> tuple[_Floats, _Floats]:
        found = self._look(kind, bounds, self._told_of(kind, own), spread=spread)
        self._pierced(kind, own, found)
        for array in found:
            array.flags.writeable = False
        return found

    def _pierced(self, kind: TrainingKind, own: tuple[SpeedPoint, ...], found: tuple[_Floats, _Floats]) -> None:
        """Make holes of sizes that failed, in means and deviations."""
        known = self._measured.get(kind)
        for size in {*(() if known is None else known.failed), *_failed(own)}:
            _pierce(found, size, has_ps=kind.architecture is Architecture.PS)

    def _told_of(self, kind: TrainingKind, own: tuple[SpeedPoint, ...]) -> _Told | None:
        """What is known of a kind, or of a job of a kind of its own."""
        shared, points = self._groups.get(_group(kind)), usable(kind, own)
        if not points or shared is None:
            return self._told.get(kind)
        told = _measured(kind, points, self._noise, None)
        return _Told(_points(told, self._centre, shared.lattice.nearest(told.sizes)), told.sizes.counts, told, None)

    def _hope(self, request: JobRequest, optimism: float, own: tuple[SpeedPoint, ...]) -> _Floats:
        if not optimism:
            return _exp(self._mean(request, own))
        mean, deviation = self.mean_sd(request, own)
        variance, trains = deviation**2, np.isfinite(mean)
        least = variance.min(where=trains, initial=np.inf)
        beyond = np.maximum(variance - least, 0.0, where=trains, out=np.zeros_like(variance))
        return _exp(mean + optimism * np.sqrt(beyond))

    def _mean(self, request: JobRequest, own: tuple[SpeedPoint, ...]) -> _Floats:
        """The mean alone: of a job of a kind of its own nobody asks for more."""
        if not own:
            return self.mean_sd(request)[0]
        bounds = _Bounds(request.max_workers, request.max_ps)
        return self._find(TrainingKind.of(request), bounds, own, spread=False)[0]

    def _join(self, group: _Group, found: dict[TrainingKind, _Kind], before: _Shared | None) -> None:
        """Work out what the kinds of a group share."""
        every = np.concatenate([told.kept.at for told in found.values()])
        if before is not None and np.array_equal(before.every, every):
            lattice, places = before.lattice, before.places
        else:
            at, places = _together(every, _MOST_SHARED)
            same = before is not None and np.array_equal(before.lattice.at, at)
            lattice = before.lattice if before is not None and same else _Lattice(group, at)
        size, first = len(lattice.at), 0
        where, certain, weighed = [], [], []
        for kind, told in found.items():
            last = first + len(told.kept.logs)
            points = _points(told.kept, self._centre, places[first:last])
            first, self._told[kind] = last, _Told(points, told.told.sizes.counts, told.kept, told.alone)
            where.append((points.shared[:, None] * size + points.shared).reshape(-1))
            certain.append(points.own.certain.reshape(-1))
            weighed.append(points.own.certain @ points.logs)
        # One after the other, as bincount has it: sums are the same however much was taken over.
        certainty = np.bincount(np.concatenate(where), np.concatenate(certain), size * size).reshape(size, size)
        factor = lattice.factor
        root = _root(np.eye(size) + factor.T @ certainty @ factor)
        mean = root.T @ (root @ (factor.T @ np.bincount(places, np.concatenate(weighed), size)))
        self._groups[group] = _Shared(every, places, lattice, factor @ mean, factor @ root.T, root, mean)

    def _look(
        self, kind: TrainingKind, bounds: _Bounds, told: _Told | None, *, spread: bool
    ) -> tuple[_Floats, _Floats]:
        """Means and, unless without ``spread`` they need not be right, deviations."""
        shape = (bounds.ps + 1, bounds.workers + 1)
        mean, deviation = np.full(shape, -np.inf), np.zeros(shape)
        has_ps = kind.architecture is Architecture.PS
        if bounds.workers < 1 or (has_ps and bounds.ps < 1):
            return mean, deviation
        workers, ps, at = _looked_at(bounds, has_ps=has_ps)
        between = len(workers) < bounds.workers or (has_ps and len(ps) < bounds.ps)
        group = _group(kind)
        own = None if told is None else told.points
        # What counts for a size alone is weighed by deviations.
        spread |= told is not None and told.alone is not None
        both = self._at(kind, own, bounds, at, self._cross(group, bounds, at), spread=spread)
        found, apart = (values.reshape(len(ps), len(workers)) for values in both)
        if between:
            found, apart = (_interpolated(values, workers, ps, bounds, has_ps=has_ps) for values in (found, apart))
            sizes = np.zeros((0, 2), dtype=np.int64) if told is None else told.sizes
            sizes = sizes[(sizes <= ((bounds.workers, bounds.ps) if has_ps else (bounds.workers, np.inf))).all(axis=1)]
            if len(sizes):
                where = (sizes[:, 1] - 1 if has_ps else 0, sizes[:, 0] - 1)
                at = np.log2(np.maximum(sizes, 1))
                found[where], apart[where] = self._at(kind, own, None, at, self._cross(group, None, at), spread=spread)
        variance = apart**2 + _ROUGH**2
        if told is not None:
            _tell_kept(kind, told.kept, bounds, found, variance)
            if told.alone is not None:
                _tell_alone(kind, told.alone, bounds, found, variance)
        mean[1 if has_ps else 0 :, 1:] = found
        deviation[1 if has_ps else 0 :, 1:] = np.sqrt(variance)
        return mean, deviation

    def _at(
        self,
        kind: TrainingKind,
        own: _Points | None,
        bounds: _Bounds | None,
        at: _Floats,
        crossed: tuple[_Floats, _Floats, _Floats] | None,
        *,
        spread: bool,
    ) -> tuple[_Floats, _Floats]:
        """Mean and deviation (0 without ``spread``) at sizes, which may be those of some bounds; shape (sizes,)."""
        shared = self._groups.get(_group(kind))
        variance = np.full(len(at), _LEVEL + _OWN[1])
        if shared is None or crossed is None:
            return self._centre + _trend(kind, at), np.sqrt(variance + _SHARED[1])
        mean, wide, left = crossed
        if own is not None:
            gain, variance = own.own.gain(bounds, at)
            mean = mean + gain @ (own.logs - shared.believed[own.shared])
        mean = self._centre + _trend(kind, at) + mean
        if not spread:
            return mean, np.zeros_like(mean)
        if own is not None:
            wide = wide - gain @ shared.spread[own.shared]
        return mean, np.sqrt(variance + left + (wide**2).sum(axis=1))

    def _cross(self, group: _Group, bounds: _Bounds | None, at: _Floats) -> tuple[_Floats, _Floats, _Floats] | None:
        """Of the shared part alone: means, roots of covariances and what variance is left at sizes; kept by bounds."""
        shared = self._groups.get(group)
        if shared is None:
            return None
        return (
            _crossed(shared, None, at)
            if bounds is None
            else self._crossed.get((group, bounds), lambda: _crossed(shared, bounds, at))
        )


def _exp(logs: _Floats) -> _Floats:
    """Not to be written to."""
    grid: _Floats = np.exp(logs)
    grid.flags.writeable = False
    return grid


def _crossed(shared: _Shared, bounds: _Bounds | None, at: _Floats) -> tuple[_Floats, _Floats, _Floats]:
    weights, left = shared.lattice.weights(bounds, at)
    return weights @ shared.mean, weights @ shared.root.T, left


def _group(kind: TrainingKind) -> _Group:
    return _Group(kind.architecture, kind.consistency)


def _points(told: _Measured, centre: float, shared: NDArray[np.int64]) -> _Points:
    return _Points(told.sizes.of(told.noise), told.logs - centre, shared)


def _tell_kept(kind: TrainingKind, told: _Measured, bounds: _Bounds, mean: _Floats, variance: _Floats) -> None:
    """Have sizes that count for others have their roughness too; arrays begin with 1 worker and 1 PS."""
    told, where = _within(kind, told, bounds)
    gain = _ROUGH**2 / (_ROUGH**2 + told.noise)
    mean[where] += gain * (told.logs + _trend(kind, told.at) - mean[where])
    variance[where] = (1.0 - gain) ** 2 * (variance[where] - _ROUGH**2) + gain * told.noise


def _tell_alone(kind: TrainingKind, told: _Measured, bounds: _Bounds, mean: _Floats, variance: _Floats) -> None:
    """Have what was measured at other sizes count there."""
    told, where = _within(kind, told, bounds)
    before, off = variance[where], told.logs + _trend(kind, told.at) - mean[where]
    noise = told.noise + np.where(told.single & (off**2 > _UNEXPECTED**2 * (before + told.noise)), off**2, 0.0)
    gain = before / (before + noise)
    mean[where] += gain * off
    variance[where] = before * (1.0 - gain)


def _within(kind: TrainingKind, told: _Measured, bounds: _Bounds) -> tuple[_Measured, tuple[Any, Any]]:
    """What was measured within bounds, and where that is in an array that begins with 1 worker and 1 PS."""
    has_ps, counts = kind.architecture is Architecture.PS, told.sizes.counts
    within = counts[:, 0] <= bounds.workers
    if has_ps:
        within &= counts[:, 1] <= bounds.ps
    if not within.all():
        told = told[np.flatnonzero(within)]
        counts = told.sizes.counts
    return told, (counts[:, 1] - 1 if has_ps else np.zeros_like(counts[:, 0]), counts[:, 0] - 1)


def _pierce(found: tuple[_Floats, _Floats], size: _Bounds, *, has_ps: bool) -> None:
    """Make a size a hole: nothing is trained there."""
    mean, deviation = found
    if size.ps < mean.shape[0] and size.workers < mean.shape[1]:
        where = (size.ps if has_ps else slice(None), size.workers)
        mean[where], deviation[where] = -np.inf, 0.0


def _failed(points: Sequence[SpeedPoint]) -> tuple[_Bounds, ...]:
    return tuple(_Bounds(*point.allocation) for point in points if point.samples_per_second == 0.0)


def _distances(one: _Floats, other: _Floats, group: _Group) -> _Floats:
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


def _matern(distances: _Floats, length: float, variance: float) -> _Floats:
    scaled = distances * (np.sqrt(3.0) / length)
    covariances: _Floats = np.negative(scaled)
    np.exp(covariances, out=covariances)
    scaled += 1.0
    scaled *= variance
    covariances *= scaled
    return covariances


def _own(one: _Floats, other: _Floats, group: _Group) -> _Floats:
    """Covariance of what is a kind's own, its level included."""
    return _LEVEL + _matern(_distances(one, other, group), *_OWN)


def _root(matrix: _Floats) -> _Floats:
    """Lower triangular R with ``R.T @ R`` the inverse of a positive definite matrix."""
    return _inverse(_factor(matrix))


def _factor(matrix: _Floats) -> _Floats:
    return np.asarray(np.linalg.cholesky(matrix), dtype=np.float64)


def _inverse(matrix: _Floats) -> _Floats:
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)


def _trend(kind: TrainingKind | _Group, at: _Floats) -> _Floats:
    """What is expected at sizes before anything is measured, but for the level."""
    return _TREND * (at.sum(axis=1) if kind.architecture is Architecture.PS else 2.0 * at[:, 0])


def _measured(kind: TrainingKind, points: Sequence[SpeedPoint], noise: float, before: _Sizes | None) -> _Measured:
    """Points as arrays, less the trend, in the order of sizes, which may be the same as before."""
    table = _table(_rows(points))
    counts = table[:, :2].astype(np.int64)
    sizes = _sizes(_group(kind), counts) if before is None else before.others(counts)
    logs, shown = np.log(table[:, 2]), table[:, 4]
    single = (shown > 0) & (shown < _TRUSTED)
    return _Measured(sizes, logs - _trend(kind, sizes.at), _noise(noise, table[:, 3]), single)


#: Points in the order of sizes: workers, PSs, samples/s, measurements, jobs.
_Rows = list[tuple[int, int, float, int, int]]


def _rows(points: Sequence[SpeedPoint]) -> _Rows:
    return sorted([(size[0], size[1], speed, many, jobs) for size, speed, many, jobs, _, _, _ in points])


def _table(rows: _Rows) -> _Floats:
    return np.fromiter(chain.from_iterable(rows), np.float64, 5 * len(rows)).reshape(-1, 5)


def _noise(noise: float, times: _Floats) -> _Floats:
    """Variances of means of so many measurements."""
    variances: _Floats = np.maximum(noise**2 / np.maximum(times, 1.0), _FLOOR**2)
    return variances


def _sizes(group: _Group, counts: NDArray[np.int64]) -> _Sizes:
    """Sizes in order, if they can be as some of all that there are up to the next powers of two."""
    every = _table_of(group, counts)
    return _Sizes(group, counts) if every is None else every.others(counts)


def _table_of(group: _Group, counts: NDArray[np.int64]) -> _Sizes | None:
    """All sizes up to the powers of two that hold some, with servers, unless there are too many."""
    workers, ps = (1 << int(most - 1).bit_length() for most in counts.max(axis=0, initial=1))
    too_many = group.architecture is Architecture.ALLREDUCE or workers * ps > _MOST_TOGETHER
    return None if too_many else _all(group, workers, ps)


@lru_cache(maxsize=32)
def _all(group: _Group, workers: int, ps: int) -> _Sizes:
    """All sizes up to some counts."""
    return _Sizes(group, np.indices((workers, ps)).reshape(2, -1).T + 1)


def _doubted(told: _Measured) -> _Measured:
    """What one job or two showed, and nobody would expect by all other sizes, says as little as it is off.

    The job may not be what its user says. Residuals are those of each size by all others of the kind (Rasmussen and
    Williams, equations 5.10 to 5.12).
    """
    if len(told.logs) < _LEAST_JUDGES or not told.single.any():
        return told
    certain = told.sizes.judge(told.noise)
    weighed, precision = certain @ (told.logs - told.logs.mean()), np.diagonal(certain)
    doubted = told.single & (np.abs(weighed) > _UNEXPECTED * np.sqrt(precision))
    return replace(told, noise=np.where(doubted, told.noise + (weighed / precision) ** 2, told.noise))


def _chosen(kind: TrainingKind, told: _Measured) -> NDArray[np.int64]:
    """Places of the sizes that count for others: the fastest half of the most, and such as are far apart."""
    every, within = told.sizes.among
    fastest = np.argsort(-(told.logs + _trend(kind, told.at)), kind="stable")[: _MOST_SIZES // 2]
    chosen, far = within[fastest].tolist(), every.apart
    # Whatever is none of these is nearer than any.
    nearest = np.full(len(far), -1.0)
    nearest[within] = far[chosen].min(axis=0)[within]
    while len(chosen) < _MOST_SIZES:
        chosen.append(int(nearest.argmax()))
        np.minimum(nearest, far[chosen[-1]], out=nearest)
    return np.searchsorted(within, np.sort(np.array(chosen, dtype=np.int64)))


def _together(at: _Floats, most: int) -> tuple[_Floats, NDArray[np.int64]]:
    """At most so many distinct sizes, and which of them stands for each of those given.

    Where there are more, those in one cell of a lattice, as fine as can be, are one: the middle of the cell.
    """
    cells, distinct, places = 16.0, *_distinct(at)
    while len(distinct) > most:
        distinct, places = _distinct(np.round(at * cells) / cells)
        cells /= 2.0
    return distinct, places


def _distinct(at: _Floats) -> tuple[_Floats, NDArray[np.int64]]:
    """Rows without those that are there already, in order, and which of them each one is; faster than numpy's."""
    order = np.lexsort((at[:, 1], at[:, 0]))
    inside = at[order]
    new = np.ones(len(at), dtype=np.bool_)
    new[1:] = (inside[1:] != inside[:-1]).any(axis=1)
    places = np.empty(len(at), dtype=np.int64)
    places[order] = new.cumsum() - 1
    return inside[new], places


@lru_cache(maxsize=256)
def _looked_at(bounds: _Bounds, *, has_ps: bool) -> tuple[_Floats, _Floats, _Floats]:
    """Counts of workers and of PSs that are looked at, and log2 of all sizes of them; not to be written to."""
    workers, ps = _counts(bounds.workers), _counts(bounds.ps) if has_ps else np.ones(1)
    return workers, ps, np.log2(np.stack(np.meshgrid(workers, ps), axis=-1).reshape(-1, 2))


def _counts(most: int) -> _Floats:
    """Counts of one role that are looked at: all, or where there are many, more and more apart."""
    if most <= _MOST_COUNTS:
        return np.arange(1.0, most + 1.0)
    apart = np.round(np.geomspace(_ALL_COUNTS, most, _MOST_COUNTS - _ALL_COUNTS + 1))
    return np.array([*range(1, _ALL_COUNTS), *dict.fromkeys(apart.tolist())], dtype=np.float64)


def _interpolated(values: _Floats, workers: _Floats, ps: _Floats, bounds: _Bounds, *, has_ps: bool) -> _Floats:
    """Values at all counts, linear in the logarithms of counts; shape (PSs, workers)."""
    wanted = np.log2(np.arange(1.0, bounds.workers + 1.0))
    rows = np.stack([np.interp(wanted, np.log2(workers), row) for row in values])
    if not has_ps:
        return rows
    wanted = np.log2(np.arange(1.0, bounds.ps + 1.0))
    return np.stack([np.interp(wanted, np.log2(ps), column) for column in rows.T], axis=1)
