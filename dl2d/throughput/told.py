"""What was measured of kinds of jobs, as a belief takes it: which sizes count for others, and how far to trust them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from dl2d.core.jobs import Architecture
from dl2d.throughput.observations import JOBS, PS, SPEED, TIMES, WORKERS, Bools, Floats, Ints, Table
from dl2d.throughput.sizes import Atlas, Bounds, Sizes, judges

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
class Measured:
    """What was measured of a kind: logarithms of samples/s less the trend, variances of noise."""

    sizes: Sizes
    logs: Floats
    noise: Floats
    #: Whether so few jobs showed it that it may be doubted.
    single: Bools

    def some(self, places: Ints, sizes: Sizes) -> Measured:
        """At some places, which have those sizes."""
        return Measured(sizes, self.logs[places], self.noise[places], self.single[places])


class _Choice(NamedTuple):
    """Which sizes of a kind count for others, where there are too many: places among all, in order."""

    #: The fastest: what is chosen follows from these and from which sizes there are.
    fastest: Ints
    kept: Ints
    alone: Ints


@dataclass(frozen=True, slots=True)
class Kind:
    """All that was measured of a kind."""

    sizes: Sizes
    #: Those that count for others, and those that count for themselves alone.
    choice: _Choice | None
    kept: Measured
    alone: Measured | None
    #: Mean of the logarithms that count for others.
    level: float


def kinds_of(table: Table, noise: float, atlas: Atlas, before: Sequence[Kind | None]) -> list[Kind]:
    """From points that say something, of kinds of one group; what of each is the same ``before`` is taken over."""
    atlas.include(table.counts)
    sizes = [
        atlas.sizes(table.counts[part], None if was is None else was.sizes)
        for part, was in zip(table.parts, before, strict=True)
    ]
    logs, noises, single = measured_of(table.rows, np.concatenate([some.trend for some in sizes]), noise)
    # Copies, so that a kind that is kept keeps no others.
    every = [
        Measured(some, logs[part].copy(), noises[part].copy(), single[part].copy())
        for some, part in zip(sizes, table.parts, strict=True)
    ]
    choices = _chosen(every, before)
    kept, alone = [], []
    for told, choice, was in zip(every, choices, before, strict=True):
        some, rest = (told, None) if choice is None else _parts(told, choice, was)
        kept.append(some)
        alone.append(rest)
    return [
        Kind(told.sizes, choice, some, rest, float(some.logs.mean()) if len(some.logs) else 0.0)
        for told, choice, some, rest in zip(every, choices, _doubted(kept), alone, strict=True)
    ]


def measured_of(rows: Floats, trend: Floats, noise: float) -> tuple[Floats, Floats, Bools]:
    """Logarithms less the trend, variances of noise and what may be doubted, of points with that trend."""
    shown = rows[:, JOBS]
    return np.log(rows[:, SPEED]) - trend, noise_of(noise, rows[:, TIMES]), (shown > 0) & (shown < _TRUSTED)


def usable_in(table: Table) -> Bools:
    """Points that say something, as ``usable`` has them, shape (n,)."""
    has_ps = np.array([kind.architecture is Architecture.PS for kind in table.kinds], dtype=np.bool_)[table.kind_of]
    speeds = table.rows[:, SPEED]
    counted: Bools = (table.rows[:, WORKERS] > 0) & ((table.rows[:, PS] > 0) | ~has_ps)
    return counted & (speeds > 0) & (speeds < np.inf)


def failed_in(rows: Floats) -> tuple[Bounds, ...]:
    """Sizes at which runs failed."""
    if rows[:, SPEED].all():
        return ()
    return tuple([Bounds(workers, ps) for workers, ps in counts_of(rows[rows[:, SPEED] == 0.0]).tolist()])


def counts_of(rows: Floats) -> Ints:
    """Workers and PSs, shape (sizes, 2)."""
    counts: Ints = rows[:, : PS + 1].astype(np.int64)
    return counts


def noise_of(noise: float, times: Floats) -> Floats:
    """Variances of means of so many measurements."""
    variances: Floats = np.maximum(noise**2 / np.maximum(times, 1.0), _FLOOR**2)
    return variances


def _doubted(every: Sequence[Measured]) -> list[Measured]:
    """What one job or two showed, and nobody would expect by all other sizes, says as little as it is off.

    The job may not be what its user says. Residuals are those of each size by all others of the kind (Rasmussen and
    Williams, equations 5.10 to 5.12).
    """
    found = list(every)
    judged = [place for place, told in enumerate(every) if len(told.logs) >= _LEAST_JUDGES and told.single.any()]
    certainties = judges([(every[place].sizes, every[place].noise) for place in judged])
    for place, certain in zip(judged, certainties, strict=True):
        told = every[place]
        weighed, precision = certain @ (told.logs - told.logs.mean()), np.diagonal(certain)
        doubted = told.single & (np.abs(weighed) > UNEXPECTED * np.sqrt(precision))
        if doubted.any():
            noise = np.where(doubted, told.noise + (weighed / precision) ** 2, told.noise)
            found[place] = replace(told, noise=noise)
    return found


def _chosen(every: Sequence[Measured], before: Sequence[Kind | None]) -> list[_Choice | None]:
    """Of the sizes that count for others, where they are too many: the fastest half, and such as are far apart."""
    choices: list[_Choice | None] = [None] * len(every)
    #: By all sizes that there are, which are the same ones for all kinds but for very many sizes.
    asked: dict[int, list[tuple[int, Ints]]] = defaultdict(list)
    for place, (told, was) in enumerate(zip(every, before, strict=True)):
        if len(told.logs) > _MOST_SIZES:
            fastest = np.argsort(-(told.logs + told.sizes.trend), kind="stable")[: _MOST_SIZES // 2]
            fastest.sort()
            last = None if was is None or was.sizes is not told.sizes else was.choice
            if last is not None and np.array_equal(last.fastest, fastest):
                choices[place] = last
            else:
                asked[id(told.sizes.among[0])].append((place, fastest))
    for some in asked.values():
        atlas = every[some[0][0]].sizes.among[0]
        within = [every[place].sizes.among[1] for place, _ in some]
        first = np.array([inside[fastest] for inside, (_, fastest) in zip(within, some, strict=True)])
        chosen = _far_apart(atlas.apart, within, first)
        for (place, fastest), inside, those in zip(some, within, chosen, strict=True):
            kept = np.searchsorted(inside, those)
            others = np.ones(len(inside), dtype=np.bool_)
            others[kept] = False
            choices[place] = _Choice(fastest, kept, np.flatnonzero(others))
    return choices


def _far_apart(apart: Floats, within: Sequence[Ints], first: Ints) -> Ints:
    """Sizes of K kinds that count for others: those that come first, then again and again the farthest from all these.

    Parameters
    ----------
    apart
        Distances of all sizes, shape (A, A).
    within
        Which of them each kind has, in order.
    first
        Shape (K, some).

    Returns
    -------
    Shape (K, most), in order.
    """
    # Whatever is none of a kind's sizes is nearer than any.
    nearest = np.full((len(first), len(apart)), -1.0)
    for row, have, chosen in zip(nearest, within, first, strict=True):
        row[have] = apart[chosen].min(axis=0)[have]
    found = [*first.T]
    while len(found) < _MOST_SIZES:
        found.append(nearest.argmax(axis=1))
        np.minimum(nearest, apart[found[-1]], out=nearest)
    return np.sort(np.array(found).T, axis=1)


def _parts(told: Measured, choice: _Choice, before: Kind | None) -> tuple[Measured, Measured]:
    """What counts for others, and the rest; of sizes that are as ``before`` is known what was."""
    if before is not None and before.alone is not None and before.choice is choice:
        kept, alone = before.kept.sizes, before.alone.sizes
    else:
        kept, alone = told.sizes.some(choice.kept), told.sizes.some(choice.alone)
        if before is not None and np.array_equal(before.kept.sizes.counts, kept.counts):
            kept = before.kept.sizes
    return told.some(choice.kept, kept), told.some(choice.alone, alone)
