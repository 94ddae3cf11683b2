"""What was measured of kinds of jobs, as a belief takes it: which sizes count for others, and how far to trust them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, count
from operator import ne
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dl2d.core.measured import SpeedPoint, TrainingKind
from dl2d.policies.sizes import Atlas, Bounds, Sizes
from dl2d.policies.speed_fit import usable

_Floats = NDArray[np.float64]

#: Deviation that is left however often a size is measured.
_FLOOR: Final = 0.01
#: Deviations from what other sizes lead to expect, of so many at least, beyond which the word of few jobs is doubted.
UNEXPECTED: Final = 4.0
_LEAST_JUDGES: Final = 4
#: Jobs whose word is not doubted: two that are not what their users say may well be alike.
_TRUSTED: Final = 3
#: Most sizes of one kind that count for others; where there are more, some are chosen.
_MOST_SIZES: Final = 40


@dataclass(frozen=True, slots=True)
class Table:
    """Points of a kind, and those that say something as numbers."""

    points: tuple[SpeedPoint, ...]
    #: In the order of sizes: workers, PSs, samples/s, measurements, jobs; shape (sizes, 5).
    rows: _Floats
    #: Whether these are all points, and in their order.
    in_order: bool

    @classmethod
    def of(cls, kind: TrainingKind, points: tuple[SpeedPoint, ...], before: Table | None) -> Table:
        """What points have in common with those ``before`` is taken over: news are of few, most often of one."""
        first, last = (0, 0) if before is None or not before.in_order else _alike(before.points, points)
        news = points[first : len(points) - last]
        said = rows_of(usable(kind, news))
        rows = as_table(said)
        if before is not None and first + last:
            rows = np.concatenate([before.rows[:first], rows, before.rows[len(before.rows) - last :]])
        workers, ps = rows[:, 0], rows[:, 1]
        in_order = bool(((workers[1:] > workers[:-1]) | ((workers[1:] == workers[:-1]) & (ps[1:] > ps[:-1]))).all())
        if first + last and not in_order:
            return cls.of(kind, points, None)
        return cls(points, rows, in_order and [row[:2] for row in said] == [point.allocation for point in news])

    @property
    def counts(self) -> NDArray[np.int64]:
        """Workers and PSs, shape (sizes, 2)."""
        return counts_of(self.rows)


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a kind: logarithms of samples/s less the trend, variances of noise."""

    sizes: Sizes
    logs: _Floats
    noise: _Floats
    #: Whether so few jobs showed it that it may be doubted.
    single: NDArray[np.bool_]

    @classmethod
    def of(cls, table: _Floats, sizes: Sizes, noise: float) -> Measured:
        """From a table of points, of those sizes."""
        logs, shown = np.log(table[:, 2]), table[:, 4]
        return cls(sizes, logs - sizes.trend, noise_of(noise, table[:, 3]), (shown > 0) & (shown < _TRUSTED))

    def some(self, places: NDArray[np.int64], sizes: Sizes) -> Measured:
        """At some places, which have those sizes."""
        return Measured(sizes, self.logs[places], self.noise[places], self.single[places])


class _Choice(NamedTuple):
    """Which sizes of a kind count for others, where there are too many: places among all, in order."""

    #: The fastest: what is chosen follows from these and from which sizes there are.
    fastest: NDArray[np.int64]
    kept: NDArray[np.int64]
    alone: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Kind:
    """All that was measured of a kind."""

    table: Table
    failed: tuple[Bounds, ...]
    told: Measured
    #: Sizes that count for others, and those that count for themselves alone.
    choice: _Choice | None
    kept: Measured
    alone: Measured | None
    #: Mean of the logarithms that count for others.
    level: float

    @classmethod
    def of(cls, table: Table, noise: float, atlas: Atlas, before: Kind | None) -> Kind:
        """From what was measured; what is the same ``before`` is taken over."""
        sizes = atlas.sizes(table.counts, None if before is None else before.told.sizes)
        told = Measured.of(table.rows, sizes, noise)
        choice, kept, alone = None, told, None
        if len(sizes.counts) > _MOST_SIZES:
            choice = _chosen(told, before)
            kept, alone = _parts(told, choice, before)
        kept = _doubted(kept)
        level = float(kept.logs.mean()) if len(kept.logs) else 0.0
        failed = () if table.in_order else failed_in(table.points)
        return cls(table, failed, told, choice, kept, alone, level)


def _alike(one: Sequence[object], other: Sequence[object]) -> tuple[int, int]:
    """How many are the same from the beginning on, and how many of the others up to the end."""
    most = min(len(one), len(other))
    first = next(compress(count(), map(ne, one, other)), most)
    return first, min(next(compress(count(), map(ne, reversed(one), reversed(other))), most), most - first)


#: Points in the order of sizes: workers, PSs, samples/s, measurements, jobs.
Rows = list[tuple[int, int, float, int, int]]


def rows_of(points: Sequence[SpeedPoint]) -> Rows:
    return sorted([(size[0], size[1], speed, many, jobs) for size, speed, many, jobs, _, _, _ in points])


def counts_of(rows: _Floats) -> NDArray[np.int64]:
    """Workers and PSs, shape (sizes, 2)."""
    counts: NDArray[np.int64] = rows[:, :2].astype(np.int64)
    return counts


def as_table(rows: Rows) -> _Floats:
    return np.fromiter(chain.from_iterable(rows), np.float64, 5 * len(rows)).reshape(-1, 5)


def noise_of(noise: float, times: _Floats) -> _Floats:
    """Variances of means of so many measurements."""
    variances: _Floats = np.maximum(noise**2 / np.maximum(times, 1.0), _FLOOR**2)
    return variances


def failed_in(points: Sequence[SpeedPoint]) -> tuple[Bounds, ...]:
    return tuple(Bounds(*point.allocation) for point in points if point.samples_per_second == 0.0)


def _doubted(told: Measured) -> Measured:
    """What one job or two showed, and nobody would expect by all other sizes, says as little as it is off.

    The job may not be what its user says. Residuals are those of each size by all others of the kind (Rasmussen and
    Williams, equations 5.10 to 5.12).
    """
    if len(told.logs) < _LEAST_JUDGES or not told.single.any():
        return told
    certain = told.sizes.judge(told.noise)
    weighed, precision = certain @ (told.logs - told.logs.mean()), np.diagonal(certain)
    doubted = told.single & (np.abs(weighed) > UNEXPECTED * np.sqrt(precision))
    return replace(told, noise=np.where(doubted, told.noise + (weighed / precision) ** 2, told.noise))


def _chosen(told: Measured, before: Kind | None) -> _Choice:
    """Of the sizes that count for others: the fastest half of the most, and such as are far apart."""
    fastest = np.argsort(-(told.logs + told.sizes.trend), kind="stable")[: _MOST_SIZES // 2]
    fastest.sort()
    last = None if before is None or before.told.sizes is not told.sizes else before.choice
    if last is not None and np.array_equal(last.fastest, fastest):
        return last
    every, within = told.sizes.among
    chosen, far = within[fastest].tolist(), every.apart
    # Whatever is none of these is nearer than any.
    nearest = np.full(len(far), -1.0)
    nearest[within] = far[chosen].min(axis=0)[within]
    while len(chosen) < _MOST_SIZES:
        chosen.append(int(nearest.argmax()))
        np.minimum(nearest, far[chosen[-1]], out=nearest)
    kept = np.searchsorted(within, np.sort(np.array(chosen, dtype=np.int64)))
    others = np.ones(len(within), dtype=np.bool_)
    others[kept] = False
    return _Choice(fastest, kept, np.flatnonzero(others))


def _parts(told: Measured, choice: _Choice, before: Kind | None) -> tuple[Measured, Measured]:
    """What counts for others, and the rest; of sizes that are as ``before`` is known what was."""
    if before is not None and before.alone is not None and before.choice is choice:
        kept, alone = before.kept.sizes, before.alone.sizes
    else:
        kept, alone = told.sizes.some(choice.kept), told.sizes.some(choice.alone)
        if before is not None and np.array_equal(before.kept.sizes.counts, kept.counts):
            kept = before.kept.sizes
    return told.some(choice.kept, kept), told.some(choice.alone, alone)
