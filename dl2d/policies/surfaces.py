"""Surfaces: which sizes a job may jump between, how fast it is at each and what each takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Architecture, JobRequest
from dl2d.core.measured import TrainingKind
from dl2d.core.resources import Resources

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: A jump must make a job faster by this factor.
_FASTER: Final = 1.01
#: A job without tasks counts as if it had this part of its best speed.
_WAITING: Final = 1e-3
#: Counts of a role that are looked at, and sizes of a job that are kept, at most.
_MOST_COUNTS: Final = 24
_MOST_SIZES: Final = 32
#: Grids that are gone through at once, at most: their arrays shall not be too large.
_MOST_AT_ONCE: Final = 64
#: Numbers below it have room in 16 bits.
_SMALL: Final = 1 << 15


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """What a surface is made of: how fast a job would be at which size, and which sizes are to be had."""

    #: Samples per second, ``rates[ps, workers]``.
    rates: Floats
    #: What one worker and one PS take and what the whole cluster has; shape (R,).
    worker: Sequence[int]
    ps: Sequence[int]
    capacity: Sequence[int]
    #: Sizes that the job may have, shape as ``rates``.
    may: Bools
    #: Where it starts: workers, PSs. It keeps at least those.
    start: tuple[int, int] = (0, 0)
    #: A size that stays whatever it takes: the one it has now; workers, PSs.
    keep: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """Sizes that a job may jump between, C of them; the first is where it starts, and its amounts count as taken."""

    #: Workers and PSs, shape (C, 2).
    sizes: Ints
    #: Log of samples per second, shape (C,); of a start with nothing, some little. From the second on it gets less.
    log_rate: Floats
    #: Amounts of resources beyond the start's, shape (C, R), and what the whole cluster has, (R,).
    need: Ints
    capacity: Ints
    #: Dominant share of the fastest size, and whether the start is nothing.
    best_share: float
    from_nothing: bool


def surfaces(grids: Sequence[Grid]) -> list[Surface | None]:
    """Sizes worth looking at: none that takes no less of anything than another and is no faster.

    Returns
    -------
    One for each grid; None where there is no size that the cluster could hold.
    """
    made: list[Surface | None] = [None] * len(grids)
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, grid in enumerate(grids):
        alike.setdefault((grid.rates.shape, len(grid.capacity)), []).append(place)
    for places in alike.values():
        for begin in range(0, len(places), _MOST_AT_ONCE):
            some = places[begin : begin + _MOST_AT_ONCE]
            for place, one in zip(some, _of_stack([grids[place] for place in some]), strict=True):
                made[place] = one
    return made


def _of_stack(grids: Sequence[Grid]) -> list[Surface | None]:
    """Surfaces of G grids of one shape and with as many resources; the sizes of all stand one after the other."""
    rates = np.array([grid.rates for grid in grids])
    demand = np.array([(grid.worker, grid.ps) for grid in grids], dtype=np.int64)
    whole = np.array([grid.capacity for grid in grids], dtype=np.int64)
    first = np.array([grid.start for grid in grids], dtype=np.int64)
    of, ps, workers = np.nonzero(_worth(grids, rates))
    taken = _taken(workers, ps, demand[of])
    within = taken <= whole[of]
    if not within.all():
        fits = within.all(axis=1)
        of, ps, workers, taken = of[fits], ps[fits], workers[fits], taken[fits]
    rate = rates[of, ps, workers]
    # Fastest first, of equals the one that takes least, with fewest PSs and workers (in that order they come): each is
    # then beaten only by those before it.
    order = np.lexsort((taken.sum(axis=1), -rate, of))
    of, rate, taken = of[order], rate[order], taken[order]
    sizes = np.stack([workers[order], ps[order]], axis=1)
    units = _units(taken, np.gcd(demand[:, 0], demand[:, 1])[of])
    parts = _parts(of, len(grids))
    places = np.arange(max(part.stop - part.start for part in parts))
    before = np.less.outer(places, places)
    left_out = np.concatenate([_beaten(units[:, part], before) for part in parts])
    for number, grid in enumerate(grids):
        if grid.keep is not None:
            left_out &= (of != number) | (sizes != grid.keep).any(axis=1)
    kept = _some(np.flatnonzero(~left_out), of, len(grids))
    of, sizes, rate, taken = of[kept], sizes[kept], rate[kept], taken[kept]
    need = taken - _taken(first[:, 0], first[:, 1], demand)[of]
    log_rate = np.log(rate)
    made: list[Surface | None] = []
    for number, (grid, part) in enumerate(zip(grids, _parts(of, len(grids)), strict=True)):
        if part.start == part.stop:
            made.append(None)
            continue
        # As if it had at least some little of its best speed where it starts.
        held = math.log(max(_held(grid), _WAITING * float(rate[part.start])))
        made.append(
            Surface(
                np.concatenate([first[number, None], sizes[part]]),
                np.concatenate([[held], log_rate[part]]),
                np.concatenate([np.zeros_like(need[:1]), need[part]]),
                whole[number],
                _dominant(taken[part.start].tolist(), grid.capacity),
                not any(grid.start),
            )
        )
    return made


def _worth(grids: Sequence[Grid], rates: Floats) -> Bools:
    """Sizes that are faster than all with no more workers and no more PSs; ``rates`` of all grids, shape (G, P, W)."""
    counted = np.array([grid.may for grid in grids])
    counted &= rates > 0
    counted &= np.isfinite(rates)
    if any(any(grid.start) for grid in grids):
        workers, ps = np.array([grid.start for grid in grids]).T[:, :, None, None]
        counted &= np.arange(rates.shape[1])[:, None] >= ps
        counted &= np.arange(rates.shape[2]) >= workers
    for role, axis in ((1, 1), (0, 2)):
        if rates.shape[axis] > _MOST_COUNTS + 1:
            looked = np.array([_looked_at(rates.shape[axis], grid.keep and grid.keep[role]) for grid in grids])
            counted &= np.expand_dims(looked, 3 - axis)
    worth = counted & _undominated(np.where(counted, rates, -np.inf))
    for number, grid in enumerate(grids):
        if grid.keep is not None:
            workers, ps = grid.keep
            worth[number, ps, workers] |= counted[number, ps, workers]
    return worth


def _parts(of: Ints, grids: int) -> list[slice]:
    """Which are of each grid, where those of each stand one after the other."""
    ends = np.searchsorted(of, np.arange(grids), side="right").tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _some(kept: Ints, of: Ints, grids: int) -> Ints:
    """Of the sizes that are kept of each grid no more than there may be of one."""
    return np.concatenate([kept[part][_spread(part.stop - part.start)] for part in _parts(of[kept], grids)])


@lru_cache(maxsize=256)
def _spread(count: int) -> Ints:
    """Places of some of so many, as far from each other, the first and the last among them; all if they are few."""
    if count <= _MOST_SIZES:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, _MOST_SIZES).round().astype(np.int64))


def _undominated(rates: Floats) -> Bools:
    """Which sizes are faster than all that have no more workers and no more PSs; ``rates[..., ps, workers]``.

    Most others can be told by this at once, and fewer are left to be compared with each other.
    """
    best = np.maximum.accumulate(np.maximum.accumulate(rates, axis=-2), axis=-1)
    faster = np.ones(rates.shape, dtype=np.bool_)
    faster[..., 1:, :] = rates[..., 1:, :] > best[..., :-1, :]
    faster[..., 1:] &= rates[..., 1:] > best[..., :-1]
    return faster


def _taken(workers: Ints, ps: Ints, demand: Ints) -> Ints:
    """What sizes take, shape (sizes, R); ``demand`` of one worker and one PS of each, shape (sizes, 2, R)."""
    return workers[:, None] * demand[:, 0] + ps[:, None] * demand[:, 1]


def _units(taken: Ints, unit: Ints) -> NDArray[np.integer[Any]]:
    """What sizes take in units of their own; both shape (sizes, R) -> (R, sizes).

    Small numbers are compared fastest, and one resource after the other: a short last axis is slow to go along.
    """
    units = taken // np.maximum(unit, 1)
    return np.ascontiguousarray(units.T, dtype=np.int16 if units.max(initial=0) < _SMALL else np.int64)


def _beaten(units: NDArray[np.integer[Any]], before: Bools) -> Bools:
    """Which sizes take no less of anything than one before them; shape (R, sizes) -> (sizes,)."""
    count = units.shape[1]
    beats = before[:count, :count].copy()
    for taken in units:
        beats &= np.less_equal.outer(taken, taken)
    return np.asarray(beats.any(axis=0))


def _held(grid: Grid) -> float:
    """How fast a job is where it starts, as far as that is in the grid."""
    workers, ps = grid.start
    inside = ps < grid.rates.shape[0] and workers < grid.rates.shape[1]
    return float(grid.rates[ps, workers]) if inside and any(grid.start) else 0.0


def _looked_at(length: int, keep: int | None) -> Bools:
    """Counts that are looked at where there are many: some that grow by equal factors."""
    counts = np.unique(np.geomspace(1, length - 1, _MOST_COUNTS).round().astype(np.int64))
    looked = np.zeros(length, dtype=bool)
    looked[0] = looked[counts] = True
    if keep is not None and keep < length:
        looked[keep] = True
    return looked


def _dominant(amounts: Sequence[int], capacity: Sequence[int]) -> float:
    """Largest share of any resource; both shape (R,)."""
    return max(taken / (whole if whole > 0 else 1e-9) for taken, whole in zip(amounts, capacity, strict=True))


def _shares(need: Ints, capacity: Ints) -> Floats:
    """Largest share of any resource that each size takes more than each other; (G, C, R), (G, R) -> (G, C, C)."""
    whole = np.where(capacity > 0, capacity, 1e-9)
    parts = np.ascontiguousarray(np.moveaxis(need / whole[:, None], 2, 0))
    shares: Floats = parts[0][:, None] - parts[0][:, :, None]
    for part in parts[1:]:
        np.maximum(shares, part[:, None] - part[:, :, None], out=shares)
    return shares


def sizes_of(request: JobRequest) -> Bools:
    """Sizes that a job may train at, ``sizes[ps, workers]``; shape (max_ps + 1, max_workers + 1).

    Not to be written to.
    """
    workers = tuple(count > 0 and request.allows(count) for count in range(request.max_workers + 1))
    return _sizes(request.architecture, workers, request.min_ps, request.max_ps)


@lru_cache(maxsize=256)
def _sizes(architecture: Architecture, workers: tuple[bool, ...], min_ps: int, max_ps: int) -> Bools:
    """By which counts of workers are allowed."""
    has_ps = architecture is Architecture.PS
    ps = np.arange(max_ps + 1) >= max(min_ps, 1 if has_ps else 0)
    if not has_ps:
        ps &= np.arange(max_ps + 1) == min_ps  # more of them would only cost
    both: Bools = ps[:, None] & np.array(workers)[None]
    both.flags.writeable = False
    return both


def alike(request: JobRequest) -> tuple[object, ...]:
    """What jobs with one surface have in common, beside cluster and start."""
    return (
        TrainingKind.of(request), request.min_workers, request.max_workers, request.min_ps, request.max_ps,
        request.allowed_workers, request.worker, request.ps,
    )  # fmt: skip


def amounts_of(resources: Resources, names: Sequence[str]) -> list[int]:
    """Thousandths in the order of names."""
    given = dict(resources.thousandths)
    return [given.get(name, 0) for name in names]


def weight_of(demand: Ints, capacity: Ints) -> Floats:
    """Sum of shares, by which larger tasks go first; amounts (..., R), capacity (..., R) -> (...)."""
    shares = demand / np.where(capacity > 0, capacity, 1)
    total: Floats = shares[..., 0].copy()
    for number in range(1, shares.shape[-1]):
        total += shares[..., number]
    return total


class Surfaces:
    """Several surfaces side by side, padded to C sizes."""

    def __init__(self, surfaces: Sequence[Surface]) -> None:
        counts = np.array([len(one.sizes) for one in surfaces])
        count, most, resources = len(surfaces), int(counts.max()), surfaces[0].need.shape[1]
        within = np.arange(most) < counts[:, None]
        self.sizes: Ints = np.zeros((count, most, 2), dtype=np.int64)
        self.log_rate: Floats = np.zeros((count, most))
        self.need: Ints = np.zeros((count, most, resources), dtype=np.int64)
        self.sizes[within] = np.concatenate([one.sizes for one in surfaces])
        self.log_rate[within] = np.concatenate([one.log_rate for one in surfaces])
        self.need[within] = np.concatenate([one.need for one in surfaces])
        shares = _shares(self.need, np.array([one.capacity for one in surfaces]))
        gains = self.log_rate[:, None] - self.log_rate[:, :, None]
        #: Which jumps there are, from (row) to (column), shape (surfaces, C, C); and from which sizes there is none.
        self.there: Bools = gains > np.log(_FASTER)
        self.there &= shares > 0
        self.there &= within[:, None] & within[:, :, None]
        self.there[:, :, 0] = False
        self.ends: Bools = np.logical_not(self.there.any(axis=2))
        #: Log of the dominant share that a jump takes, and log of the log of its speed-up; 0 where there is none.
        self.cost: Floats = np.log(shares, out=np.zeros_like(shares), where=self.there)
        self.gain: Floats = np.log(gains, out=np.zeros_like(gains), where=self.there)
        #: Of the fastest size, which stands right after the start.
        self.log_best: Floats = self.log_rate[:, 1]
        self.best_share: Floats = np.array([one.best_share for one in surfaces])
        self.from_nothing: Floats = np.array([float(one.from_nothing) for one in surfaces])
