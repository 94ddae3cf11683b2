"""Pareto frontiers: the sizes of a job for which no other size takes no more of anything and is at least as fast.

A size step leads from one size on a job's frontier to another. A frontier is thinned out to ``_MAX_SIZES`` sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Architecture, JobRequest
from dl2d.core.measured_speeds import TrainingKind
from dl2d.core.resources import Resources

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: Least speed-up of a step.
_MIN_SPEED_UP: Final = 1.01
#: Speed of a job without tasks, as a part of its best one, so that the gain of a start is finite.
_SPEED_OF_WAITING: Final = 1e-3
#: Most counts of a role that are considered, and most sizes of a job that are kept.
_MAX_COUNTS: Final = 24
_MAX_SIZES: Final = 48
#: Most grids that are worked on at once, which limits the size of arrays.
_MAX_GRIDS: Final = 64
#: Numbers below it fit in 16 bits.
_INT16_END: Final = 1 << 15


@dataclass(frozen=True, slots=True, eq=False)
class SizeGrid:
    """Speed of a job at all sizes, the resources of its tasks, and which sizes it may have."""

    #: Samples per second, ``rates[ps, workers]``.
    rates: Floats
    #: Amounts of R resources that one worker and one PS take, and that the whole cluster has.
    worker: Sequence[int]
    ps: Sequence[int]
    capacity: Sequence[int]
    #: Sizes that the job may have; shape of ``rates``.
    may: Bools
    #: Workers and PSs that the job starts with and keeps.
    start: tuple[int, int] = (0, 0)
    #: Workers and PSs that it has now: a size that is on the frontier in any case.
    keep: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ParetoFrontier:
    """C sizes of a job, from the one that it starts with on; the others are the fastest first."""

    #: Workers and PSs, shape (C, 2).
    sizes: Ints
    #: Log of samples per second, shape (C,).
    log_rate: Floats
    #: Amounts of resources beyond the start's, shape (C, R), and those of the whole cluster, (R,).
    need: Ints
    capacity: Ints
    #: Dominant share of the fastest size, and whether the job starts with nothing.
    best_share: float
    from_nothing: bool


def pareto_frontiers(grids: Sequence[SizeGrid]) -> list[ParetoFrontier | None]:
    """Pareto frontier of each grid; None where the cluster could hold no size that the job may have."""
    made: list[ParetoFrontier | None] = [None] * len(grids)
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, grid in enumerate(grids):
        alike.setdefault((grid.rates.shape, len(grid.capacity)), []).append(place)
    for places in alike.values():
        for begin in range(0, len(places), _MAX_GRIDS):
            some = places[begin : begin + _MAX_GRIDS]
            for place, one in zip(some, _of_stack([grids[place] for place in some]), strict=True):
                made[place] = one
    return made


def _of_stack(grids: Sequence[SizeGrid]) -> list[ParetoFrontier | None]:
    """Frontiers of G grids of one shape and number of resources; the sizes of all stand one after the other."""
    rates = np.array([grid.rates for grid in grids])
    # Amounts have shape (R, ...): a short last axis is slow to go along.
    worker, server, whole = (
        np.array(amounts, dtype=np.int64).T.copy()
        for amounts in zip(*((grid.worker, grid.ps, grid.capacity) for grid in grids), strict=True)
    )
    of, ps, workers = np.nonzero(_candidates(grids, rates, _instead(worker, server)))
    taken = workers * worker.take(of, axis=1) + ps * server.take(of, axis=1)
    within = taken <= whole.take(of, axis=1)
    if not within.all():
        fits = within.all(axis=0)
        of, ps, workers, taken = of[fits], ps[fits], workers[fits], taken.compress(fits, axis=1)
    rate = rates[of, ps, workers]
    # Each can then be dominated only by those before it.
    order = _fastest_first(of, rate, taken)
    ps, workers, rate, taken = ps[order], workers[order], rate[order], taken.take(order, axis=1)
    unit = np.maximum(np.gcd(worker, server), 1)
    units = _small(workers * (worker // unit).take(of, axis=1) + ps * (server // unit).take(of, axis=1))
    dominated = np.zeros(len(of), dtype=np.bool_)
    for part in _parts(of, len(grids)):
        if part.start < part.stop:
            dominated[part] = _dominated(units[:, part])
    for number, grid in enumerate(grids):
        if grid.keep is not None:
            dominated &= (of != number) | (workers != grid.keep[0]) | (ps != grid.keep[1])
    kept = _some(np.flatnonzero(~dominated), of, len(grids))
    return _made(grids, of[kept], np.stack([workers[kept], ps[kept]], axis=1), rate[kept], taken.take(kept, axis=1).T)


def _made(grids: Sequence[SizeGrid], of: Ints, sizes: Ints, rate: Floats, taken: Ints) -> list[ParetoFrontier | None]:
    """Frontiers of the sizes that are kept of each grid, fastest first; what they take has shape (sizes, R)."""
    parts, count, resources = _parts(of, len(grids)), len(grids) + len(of), taken.shape[1]
    first = np.array([grid.start for grid in grids], dtype=np.int64)
    demand = np.array([(grid.worker, grid.ps) for grid in grids], dtype=np.int64)
    whole = np.array([grid.capacity for grid in grids], dtype=np.int64)
    # The start of each stands before its sizes, and takes nothing beyond itself.
    start = np.array([part.start for part in parts]) + np.arange(len(grids))
    rest = np.arange(len(of)) + of + 1
    every, need, log_rate = np.empty((count, 2), np.int64), np.zeros((count, resources), np.int64), np.zeros(count)
    every[start], every[rest] = first, sizes
    need[rest] = taken - (first[:, :, None] * demand).sum(axis=1)[of]
    log_rate[rest] = np.log(rate)
    made: list[ParetoFrontier | None] = []
    for number, (grid, part) in enumerate(zip(grids, parts, strict=True)):
        if part.start == part.stop:
            made.append(None)
            continue
        own = slice(part.start + number, part.stop + number + 1)
        # As if it had at least some little of its best speed where it starts.
        log_rate[own.start] = math.log(max(_held(grid), _SPEED_OF_WAITING * float(rate[part.start])))
        best_share = _dominant(taken[part.start].tolist(), grid.capacity)
        made.append(
            ParetoFrontier(every[own], log_rate[own], need[own], whole[number], best_share, not any(grid.start))
        )
    return made


def _fastest_first(of: Ints, rate: Floats, taken: Ints) -> Ints:
    """Order of sizes in which those of each grid stay together: the fastest first, then the one that takes least.

    Of such as are equal in that the one with fewest PSs and workers: in that order they come.
    """
    order = np.argsort(-rate)
    order = order[np.argsort(of[order].astype(np.int16), kind="stable")]
    # Hardly ever are two as fast, and sorting by all keys takes three times as long.
    if (np.diff(rate[order]) == 0).any():
        order = np.lexsort((taken.sum(axis=0), -rate, of))
    return order


def _instead(worker: Ints, ps: Ints) -> Ints:
    """Number of PSs that take no more than one worker; amounts have shape (R, G)."""
    instead: Ints = np.where(ps > 0, worker // np.maximum(ps, 1), np.iinfo(np.int64).max).min(axis=0)
    return instead


def _candidates(grids: Sequence[SizeGrid], rates: Floats, instead: Ints) -> Bools:
    """Sizes that may be on the frontier, shape (G, P, W) as ``rates``; see ``_undominated``."""
    counted = np.array([grid.may for grid in grids])
    counted &= rates > 0
    counted &= np.isfinite(rates)
    if any(any(grid.start) for grid in grids):
        workers, ps = np.array([grid.start for grid in grids]).T[:, :, None, None]
        counted &= np.arange(rates.shape[1])[:, None] >= ps
        counted &= np.arange(rates.shape[2]) >= workers
    for role, axis in ((1, 1), (0, 2)):
        if rates.shape[axis] > _MAX_COUNTS + 1:
            looked = np.array([_considered(rates.shape[axis], grid.keep and grid.keep[role]) for grid in grids])
            counted &= np.expand_dims(looked, 3 - axis)
    worth = counted & _undominated(np.where(counted, rates, -np.inf), instead)
    for number, grid in enumerate(grids):
        if grid.keep is not None:
            workers, ps = grid.keep
            worth[number, ps, workers] |= counted[number, ps, workers]
    return worth


def _parts(of: Ints, grids: int) -> list[slice]:
    """Places of the sizes of each grid; the sizes of all grids stand one after the other."""
    ends = np.searchsorted(of, np.arange(grids), side="right").tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _some(kept: Ints, of: Ints, grids: int) -> Ints:
    """Of the sizes that are kept of each grid, at most ``_MAX_SIZES``."""
    return np.concatenate([kept[part][_spread(part.stop - part.start)] for part in _parts(of[kept], grids)])


@lru_cache(maxsize=256)
def _spread(count: int) -> Ints:
    """At most ``_MAX_SIZES`` of so many places, spread evenly, the first and the last among them."""
    if count <= _MAX_SIZES:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, _MAX_SIZES).round().astype(np.int64))


def _undominated(rates: Floats, instead: Ints) -> Bools:
    """Sizes faster than all with no more workers and no more PSs, ``rates[grid, ps, workers]``.

    They must also be no slower than those with one worker fewer and ``instead`` more PSs, shape (G,), which take no
    more than that worker. It is a cheap necessary condition: fewer sizes are left to be compared pair by pair.
    """
    best = np.maximum.accumulate(np.maximum.accumulate(rates, axis=1), axis=2)
    faster = np.ones(rates.shape, dtype=np.bool_)
    faster[:, 1:] = rates[:, 1:] > best[:, :-1]
    faster[:, :, 1:] &= rates[:, :, 1:] > best[:, :, :-1]
    most = rates.shape[1] - 1
    more = np.minimum(np.arange(most + 1) + np.minimum(instead, most)[:, None], most)
    faster[:, :, 1:] &= rates[:, :, 1:] >= best[np.arange(len(rates))[:, None], more, :-1]
    return faster


def _small(units: Ints) -> NDArray[np.integer[Any]]:
    """Numbers in 16 bits where they fit, which are compared faster."""
    return units.astype(np.int16) if units.max(initial=0) < _INT16_END else units


def _dominated(units: NDArray[np.integer[Any]]) -> Bools:
    """Sizes that take no less of anything than one before them; shape (R, sizes) -> (sizes,)."""
    no_less = np.greater_equal.outer(units[0], units[0])
    for taken in units[1:]:
        no_less &= np.greater_equal.outer(taken, taken)
    # The first than which a size takes no less is itself, or dominates it.
    dominated: Bools = no_less.argmax(axis=1) < np.arange(len(no_less))
    return dominated


def _held(grid: SizeGrid) -> float:
    """Speed of a job at its start, 0 where that is not in the grid."""
    workers, ps = grid.start
    inside = ps < grid.rates.shape[0] and workers < grid.rates.shape[1]
    return float(grid.rates[ps, workers]) if inside and any(grid.start) else 0.0


def _considered(length: int, keep: int | None) -> Bools:
    """Counts that are considered where there are many: in geometric progression."""
    counts = np.unique(np.geomspace(1, length - 1, _MAX_COUNTS).round().astype(np.int64))
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


def allowed_sizes(request: JobRequest) -> Bools:
    """Sizes that a job may train at, ``sizes[ps, workers]``; shape (max_ps + 1, max_workers + 1).

    Not to be written to.
    """
    return _sizes(
        request.architecture, request.min_workers, request.max_workers, request.allowed_workers,
        request.min_ps, request.max_ps,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _sizes(
    architecture: Architecture, min_workers: int, max_workers: int, allowed: tuple[int, ...], min_ps: int, max_ps: int
) -> Bools:
    has_ps = architecture is Architecture.PS
    ps = np.arange(max_ps + 1) >= max(min_ps, 1 if has_ps else 0)
    if not has_ps:
        ps &= np.arange(max_ps + 1) == min_ps  # more of them would only cost
    workers = np.arange(max_workers + 1) >= max(min_workers, 1)
    if allowed:
        workers &= np.isin(np.arange(max_workers + 1), allowed)
    both: Bools = ps[:, None] & workers[None]
    both.flags.writeable = False
    return both


def frontier_key(request: JobRequest) -> tuple[object, ...]:
    """What determines the frontier of a job, beside its speeds, its start and the cluster."""
    return (
        TrainingKind.of(request), request.min_workers, request.max_workers, request.min_ps, request.max_ps,
        request.allowed_workers, request.worker, request.ps,
    )  # fmt: skip


def amounts_of(resources: Resources, names: Sequence[str]) -> list[int]:
    """Thousandths in the order of names."""
    given = dict(resources.thousandths)
    return [given.get(name, 0) for name in names]


def task_weight(demand: Ints, capacity: Ints) -> Floats:
    """Sum over resources of a task's shares of the capacity; (..., R), (..., R) -> (...)."""
    shares = demand / np.where(capacity > 0, capacity, 1)
    total: Floats = shares[..., 0].copy()
    for number in range(1, shares.shape[-1]):
        total += shares[..., number]
    return total


class ParetoFrontiers:
    """Several frontiers as arrays, padded to C sizes, and the steps between sizes of each."""

    def __init__(self, frontiers: Sequence[ParetoFrontier]) -> None:
        counts = np.array([len(one.sizes) for one in frontiers])
        count, most, resources = len(frontiers), int(counts.max()), frontiers[0].need.shape[1]
        within = np.arange(most) < counts[:, None]
        places = np.flatnonzero(within)
        self.sizes: Ints = np.zeros((count, most, 2), dtype=np.int64)
        self.log_rate: Floats = np.zeros((count, most))
        self.need: Ints = np.zeros((count, most, resources), dtype=np.int64)
        self.sizes.reshape(-1, 2)[places] = np.concatenate([one.sizes for one in frontiers])
        self.log_rate.reshape(-1)[places] = np.concatenate([one.log_rate for one in frontiers])
        self.need.reshape(-1, resources)[places] = np.concatenate([one.need for one in frontiers])
        shares = _shares(self.need, np.array([one.capacity for one in frontiers]))
        gains = self.log_rate[:, None] - self.log_rate[:, :, None]
        #: Whether a step leads from one size (row) to another (column); shape (frontiers, C, C).
        self.exists: Bools = gains > np.log(_MIN_SPEED_UP)
        self.exists &= shares > 0
        self.exists &= within[:, None] & within[:, :, None]
        self.exists[:, :, 0] = False
        #: Log of the dominant share that a step takes, and log of the log of its speed-up; 0 where there is no step.
        self.cost, self.gain = shares, gains
        absent = np.logical_not(self.exists)
        for numbers in (self.cost, self.gain):
            np.copyto(numbers, 1.0, where=absent)
            np.log(numbers, out=numbers)
        #: Log of the speed of the fastest size, which stands right after the start.
        self.log_best: Floats = self.log_rate[:, 1]
        self.best_share: Floats = np.array([one.best_share for one in frontiers])
        self.from_nothing: Floats = np.array([float(one.from_nothing) for one in frontiers])
