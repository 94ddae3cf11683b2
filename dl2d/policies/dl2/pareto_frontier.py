"""Pareto frontiers: the sizes of a job that are not dominated.

A size is dominated if another one takes at most as much of each resource and is at least as fast.

The base of a job is the size with which its sizing begins in each slot, and below which it is not sized: its floor, or
nothing. A size step leads from one size on a job's frontier to another. A size is addressed by its position: 0 is the
base, 1 the fastest size, and speeds fall from there on. Of large frontiers, ``_MAX_SIZES`` sizes are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dl2d.core.array_types import Bools, Floats, Ints
from dl2d.core.jobs import Architecture, JobRequest
from dl2d.core.measured_speeds import TrainingKind

#: Least speed-up of a step.
MIN_SPEED_UP: Final = 1.01
#: Speed of a job without tasks, as a fraction of its best one, so that the gain of its first step is finite.
_SPEED_OF_WAITING: Final = 1e-3
#: Maximum number of counts of a role that are considered.
_MAX_COUNTS: Final = 24
#: Maximum number of sizes of a job that are kept.
_MAX_SIZES: Final = 48
#: Maximum number of grids that are processed at once, which limits the size of arrays.
_MAX_GRIDS: Final = 64
#: Numbers below it fit in 16 bits.
_INT16_END: Final = 1 << 15


@dataclass(frozen=True, slots=True, eq=False)
class SizeGrid:
    """Speed of a job at all sizes, the resources of its tasks, and the sizes that it may have."""

    #: Samples per second, ``speeds[ps, workers]``.
    speeds: Floats
    #: Amounts of R resources that one worker takes.
    worker: Sequence[int]
    #: Amounts of R resources that one PS takes.
    ps: Sequence[int]
    #: Amounts of R resources that the whole cluster has.
    capacity: Sequence[int]
    #: Whether the job may have each size; shape of ``speeds``.
    allowed: Bools
    #: Workers and PSs of the base; no smaller size is on the frontier.
    base: tuple[int, int] = (0, 0)
    #: Workers and PSs that the job has now: a size that is on the frontier in any case; None where it has none.
    current: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ParetoFrontier:
    """C sizes of a job by position: the base, then the others, the fastest first."""

    #: Workers and PSs, shape (C, 2).
    sizes: Ints
    #: Logarithm of samples per second, shape (C,).
    log_speed: Floats
    #: Amounts of resources beyond those of the base, shape (C, R).
    need: Ints
    #: Amounts of resources of the whole cluster, shape (R,).
    capacity: Ints
    #: Dominant share of the fastest size.
    best_share: float
    #: Whether the base is no tasks.
    from_nothing: bool


def pareto_frontiers(grids: Sequence[SizeGrid]) -> list[ParetoFrontier | None]:
    """Compute the Pareto frontier of each grid; None where no allowed size with a speed fits in the cluster."""
    frontiers: list[ParetoFrontier | None] = [None] * len(grids)
    by_shape: dict[tuple[object, ...], list[int]] = {}
    for index, grid in enumerate(grids):
        by_shape.setdefault((grid.speeds.shape, len(grid.capacity)), []).append(index)
    for indices in by_shape.values():
        for begin in range(0, len(indices), _MAX_GRIDS):
            batch = indices[begin : begin + _MAX_GRIDS]
            for index, frontier in zip(batch, _frontiers_of_batch([grids[index] for index in batch]), strict=True):
                frontiers[index] = frontier
    return frontiers


def _frontiers_of_batch(grids: Sequence[SizeGrid]) -> list[ParetoFrontier | None]:
    """Compute the frontiers of G grids of one shape and number of resources.

    Sizes of all grids are in one array, those of one grid after those of the other; ``grid_of`` is the index of the
    grid of each.
    """
    speeds = np.array([grid.speeds for grid in grids])
    # Amounts have shape (R, ...), because loops over a short last axis are slow.
    worker, server, capacity = (
        np.array(amounts, dtype=np.int64).T.copy()
        for amounts in zip(*((grid.worker, grid.ps, grid.capacity) for grid in grids), strict=True)
    )
    grid_of, ps, workers = np.nonzero(_candidates(grids, speeds, worker, server, capacity))
    taken = workers * worker.take(grid_of, axis=1) + ps * server.take(grid_of, axis=1)
    within_capacity = taken <= capacity.take(grid_of, axis=1)
    if not within_capacity.all():
        fits = within_capacity.all(axis=0)
        grid_of, ps, workers, taken = grid_of[fits], ps[fits], workers[fits], taken.compress(fits, axis=1)
    speed = speeds[grid_of, ps, workers]
    # After sorting, a size can be dominated only by those before it.
    order = _fastest_first(grid_of, speed, taken)
    ps, workers, speed, taken = ps[order], workers[order], speed[order], taken.take(order, axis=1)
    # Amounts are only compared with each other, so they are divided by their greatest common divisor to fit in 16 bits.
    divisor = np.maximum(np.gcd(worker, server), 1)
    divided = workers * (worker // divisor).take(grid_of, axis=1) + ps * (server // divisor).take(grid_of, axis=1)
    divided = _compact(divided)
    dominated = np.zeros(len(grid_of), dtype=np.bool_)
    for sizes in _slices(grid_of, len(grids)):
        if sizes.start < sizes.stop:
            dominated[sizes] = _dominated(divided[:, sizes])
    is_current = np.zeros(len(grid_of), dtype=np.bool_)
    for index, grid in enumerate(grids):
        if grid.current is not None:
            is_current |= (grid_of == index) & (workers == grid.current[0]) & (ps == grid.current[1])
    kept = _thinned(np.flatnonzero(~dominated | is_current), grid_of, is_current, len(grids))
    kept_sizes = np.stack([workers[kept], ps[kept]], axis=1)
    return _with_bases(grids, grid_of[kept], kept_sizes, speed[kept], taken.take(kept, axis=1).T)


def _with_bases(
    grids: Sequence[SizeGrid], grid_of: Ints, sizes: Ints, speed: Floats, taken: Ints
) -> list[ParetoFrontier | None]:
    """Make frontiers of the kept sizes of each grid, with the base before them.

    Parameters
    ----------
    grid_of, sizes, speed, taken
        Grid, counts, samples per second and resources of each kept size, those of each grid fastest first; shapes (n,),
        (n, 2), (n,) and (n, R).
    """
    slices, count, resources = _slices(grid_of, len(grids)), len(grids) + len(grid_of), taken.shape[1]
    bases = np.array([grid.base for grid in grids], dtype=np.int64)
    demand = np.array([(grid.worker, grid.ps) for grid in grids], dtype=np.int64)
    capacity = np.array([grid.capacity for grid in grids], dtype=np.int64)
    # Rows of the bases and of the kept sizes among both: those of each grid together, its base first.
    base_rows = np.array([kept.start for kept in slices]) + np.arange(len(grids))
    kept_rows = np.arange(len(grid_of)) + grid_of + 1
    all_sizes, need = np.empty((count, 2), np.int64), np.zeros((count, resources), np.int64)
    log_speed = np.zeros(count)
    all_sizes[base_rows], all_sizes[kept_rows] = bases, sizes
    need[kept_rows] = taken - (bases[:, :, None] * demand).sum(axis=1)[grid_of]
    log_speed[kept_rows] = np.log(speed)
    frontiers: list[ParetoFrontier | None] = []
    for index, (grid, kept) in enumerate(zip(grids, slices, strict=True)):
        if kept.start == kept.stop:
            frontiers.append(None)
            continue
        rows = slice(kept.start + index, kept.stop + index + 1)
        least_speed = _SPEED_OF_WAITING * float(speed[kept.start])
        log_speed[rows.start] = math.log(max(_speed_at_base(grid), least_speed))
        frontiers.append(
            ParetoFrontier(
                all_sizes[rows],
                log_speed[rows],
                need[rows],
                capacity[index],
                best_share=float(_shares(taken[kept.start], capacity[index]).max()),
                from_nothing=not any(grid.base),
            )
        )
    return frontiers


def _fastest_first(grid_of: Ints, speed: Floats, taken: Ints) -> Ints:
    """Order of sizes in which those of each grid stay together: the fastest first, then the one that takes least.

    Sizes that are equal in both stay in their order, which is by PSs, then workers.
    """
    order = np.argsort(-speed)
    order = order[np.argsort(grid_of[order].astype(np.int16), kind="stable")]
    # Two sizes hardly ever have the same speed, and sorting by all keys takes three times as long.
    if (np.diff(speed[order]) == 0).any():
        order = np.lexsort((taken.sum(axis=0), -speed, grid_of))
    return order


def _ps_for_worker(worker: Ints, ps: Ints) -> Ints:
    """Number of PSs that together need no more of any resource than one worker; shapes (R, G), (R, G) -> (G,)."""
    number: Ints = np.where(ps > 0, worker // np.maximum(ps, 1), np.iinfo(np.int64).max).min(axis=0)
    return number


def _candidates(grids: Sequence[SizeGrid], speeds: Floats, worker: Ints, ps: Ints, capacity: Ints) -> Bools:
    """Sizes that may be on the frontier, shape (G, P, W) as ``speeds``; see ``_maybe_undominated``.

    Where there are many counts, only sizes that fit in the cluster are among them.

    Parameters
    ----------
    worker, ps, capacity
        Amounts of R resources that a worker and a PS of each grid take, and that its cluster has, shape (R, G).
    """
    possible = np.array([grid.allowed for grid in grids])
    possible &= speeds > 0
    possible &= np.isfinite(speeds)
    ps_counts, worker_counts = speeds.shape[1:]
    if any(any(grid.base) for grid in grids):
        base_workers, base_ps = np.array([grid.base for grid in grids]).T[:, :, None, None]
        possible &= np.arange(ps_counts)[:, None] >= base_ps
        possible &= np.arange(worker_counts) >= base_workers
    if max(ps_counts, worker_counts) > _MAX_COUNTS + 1:
        # So that the largest count that is considered is the largest that fits.
        for of_worker, of_ps, whole in zip(
            *(amounts[..., None, None] for amounts in (worker, ps, capacity)), strict=True
        ):
            possible &= np.arange(worker_counts) * of_worker + np.arange(ps_counts)[:, None] * of_ps <= whole
    if ps_counts > _MAX_COUNTS + 1:
        possible &= _considered(possible, 2, [grid.current and grid.current[1] for grid in grids])[:, :, None]
    if worker_counts > _MAX_COUNTS + 1:
        possible &= _considered(possible, 1, [grid.current and grid.current[0] for grid in grids])[:, None, :]
    candidates = possible & _maybe_undominated(np.where(possible, speeds, -np.inf), _ps_for_worker(worker, ps))
    for index, grid in enumerate(grids):
        if grid.current is not None:
            has_workers, has_ps = grid.current
            candidates[index, has_ps, has_workers] |= possible[index, has_ps, has_workers]
    return candidates


def _slices(grid_of: Ints, grids: int) -> list[slice]:
    """Slice of the sizes of each grid, where ``grid_of`` is ascending."""
    ends = np.searchsorted(grid_of, np.arange(grids), side="right").tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _thinned(kept: Ints, grid_of: Ints, is_current: Bools, grids: int) -> Ints:
    """Of the indices of kept sizes, at most ``_MAX_SIZES`` for each grid, among them that of the current size."""
    thinned = []
    for sizes in _slices(grid_of[kept], grids):
        of_grid = kept[sizes]
        current = np.flatnonzero(is_current[of_grid]) if len(of_grid) > _MAX_SIZES else ()
        thinned.append(of_grid[_spread(len(of_grid), *current)])
    return np.concatenate(thinned)


@lru_cache(maxsize=256)
def _spread(count: int, included: int = 0) -> Ints:
    """At most ``_MAX_SIZES`` of the numbers below ``count``, spread evenly: the first, the last, and ``included``."""
    if count <= _MAX_SIZES:
        return np.arange(count)
    numbers = np.linspace(0, count - 1, _MAX_SIZES).round().astype(np.int64)
    if included not in numbers:
        numbers[1 + np.abs(numbers[1:-1] - included).argmin()] = included
    return numbers


def _maybe_undominated(speeds: Floats, ps_for_worker: Ints) -> Bools:
    """Sizes that a cheap check does not find dominated, so that fewer are left to be compared pair by pair.

    They are faster than all sizes with no more workers and no more PSs, and no slower than those with one worker fewer
    and ``ps_for_worker`` more PSs, which take no more than that worker.

    Parameters
    ----------
    speeds
        ``speeds[grid, ps, workers]``, as is the result.
    ps_for_worker
        Shape (G,).
    """
    best = np.maximum.accumulate(np.maximum.accumulate(speeds, axis=1), axis=2)
    undominated = np.ones(speeds.shape, dtype=np.bool_)
    undominated[:, 1:] = speeds[:, 1:] > best[:, :-1]
    undominated[:, :, 1:] &= speeds[:, :, 1:] > best[:, :, :-1]
    max_ps = speeds.shape[1] - 1
    more_ps = np.minimum(np.arange(max_ps + 1) + np.minimum(ps_for_worker, max_ps)[:, None], max_ps)
    undominated[:, :, 1:] &= speeds[:, :, 1:] >= best[np.arange(len(speeds))[:, None], more_ps, :-1]
    return undominated


def _compact(amounts: Ints) -> NDArray[np.integer[Any]]:
    """Convert numbers to 16 bits where they fit, which are compared faster."""
    return amounts.astype(np.int16) if amounts.max(initial=0) < _INT16_END else amounts


def _dominated(amounts: NDArray[np.integer[Any]]) -> Bools:
    """Whether an earlier (faster) size takes at most as much of every resource; shape (R, sizes) -> (sizes,)."""
    no_less = np.greater_equal.outer(amounts[0], amounts[0])
    for taken in amounts[1:]:
        no_less &= np.greater_equal.outer(taken, taken)
    # The first size in a row is the size itself, unless an earlier one dominates it.
    dominated: Bools = no_less.argmax(axis=1) < np.arange(len(no_less))
    return dominated


def _speed_at_base(grid: SizeGrid) -> float:
    """Speed of a job at its base; 0 where that is nothing or not in the grid."""
    workers, ps = grid.base
    inside = ps < grid.speeds.shape[0] and workers < grid.speeds.shape[1]
    return float(grid.speeds[ps, workers]) if inside and any(grid.base) else 0.0


def _considered(possible: Bools, other: int, current: Sequence[int | None]) -> Bools:
    """Counts of a role that are considered: of many possible ones the least, the current, and a geometric progression.

    Parameters
    ----------
    possible
        Whether each size is possible, shape (G, P, W).
    other
        Axis of the counts of the other role.
    current
        The count that each job has now.

    Returns
    -------
    Shape (G, counts).
    """
    considered: Bools = np.any(possible, axis=other)
    for index, kept in enumerate(current):
        counts = np.flatnonzero(considered[index])
        if len(counts) > _MAX_COUNTS:
            progression = np.geomspace(max(counts[0], 1), counts[-1], _MAX_COUNTS).round()
            considered[index] = False
            considered[index, counts[np.searchsorted(counts, progression)]] = True
            considered[index, counts[0]] = True
            if kept is not None:
                considered[index, kept] = True
    return considered


def _shares(amounts: Ints, capacity: Ints) -> Floats:
    """Fractions of the capacity; those of a resource that the cluster lacks are 0, as are the amounts in any size."""
    return amounts / np.maximum(capacity, 1)


def _shares_of_steps(need: Ints, capacity: Ints) -> Floats:
    """Dominant share that each step takes, from a size (row) to another (column); (F, C, R), (F, R) -> (F, C, C)."""
    by_resource = np.ascontiguousarray(np.moveaxis(_shares(need, capacity[:, None]), 2, 0))
    shares: Floats = by_resource[0][:, None] - by_resource[0][:, :, None]
    for share in by_resource[1:]:
        np.maximum(shares, share[:, None] - share[:, :, None], out=shares)
    return shares


def allowed_sizes(request: JobRequest) -> Bools:
    """Whether a job may train at each size, ``sizes[ps, workers]``; read-only, shape (max_ps + 1, max_workers + 1)."""
    return _allowed_sizes(*request.bounds)


@lru_cache(maxsize=256)
def _allowed_sizes(
    architecture: Architecture,
    min_workers: int,
    max_workers: int,
    allowed_workers: tuple[int, ...],
    min_ps: int,
    max_ps: int,
) -> Bools:
    has_ps = architecture is Architecture.PS
    ps = np.arange(max_ps + 1) >= max(min_ps, 1 if has_ps else 0)
    if not has_ps:
        ps &= np.arange(max_ps + 1) == min_ps  # further PSs would take resources and not make the job faster
    workers = np.arange(max_workers + 1) >= max(min_workers, 1)
    if allowed_workers:
        workers &= np.isin(np.arange(max_workers + 1), allowed_workers)
    sizes: Bools = ps[:, None] & workers[None]
    sizes.flags.writeable = False
    return sizes


def frontier_key(request: JobRequest) -> tuple[object, ...]:
    """Everything that determines the frontier of a job, except its speeds, its base and the cluster."""
    return TrainingKind.of(request), request.bounds, request.worker, request.ps


def task_weight(demand: Ints, capacity: Ints) -> Floats:
    """Sum over resources of the fractions of the capacity that a task takes; (..., R), (..., R) -> (...)."""
    shares = _shares(demand, capacity)
    total: Floats = shares[..., 0].copy()
    for resource in range(1, shares.shape[-1]):
        total += shares[..., resource]
    return total


class FrontierArrays:
    """F frontiers as arrays, padded to C sizes, and the steps between sizes of each."""

    def __init__(self, frontiers: Sequence[ParetoFrontier]) -> None:
        counts = np.array([len(frontier.sizes) for frontier in frontiers])
        count, max_sizes, resources = len(frontiers), int(counts.max()), frontiers[0].need.shape[1]
        is_size = np.arange(max_sizes) < counts[:, None]  # otherwise padding
        flat = np.flatnonzero(is_size)
        #: Workers and PSs, shape (F, C, 2).
        self.sizes: Ints = np.zeros((count, max_sizes, 2), dtype=np.int64)
        #: Logarithm of samples per second, shape (F, C).
        self.log_speed: Floats = np.zeros((count, max_sizes))
        #: Amounts of resources beyond those of the base, shape (F, C, R).
        self.need: Ints = np.zeros((count, max_sizes, resources), dtype=np.int64)
        self.sizes.reshape(-1, 2)[flat] = np.concatenate([frontier.sizes for frontier in frontiers])
        self.log_speed.reshape(-1)[flat] = np.concatenate([frontier.log_speed for frontier in frontiers])
        self.need.reshape(-1, resources)[flat] = np.concatenate([frontier.need for frontier in frontiers])
        shares = _shares_of_steps(self.need, np.array([frontier.capacity for frontier in frontiers]))
        gains = self.log_speed[:, None] - self.log_speed[:, :, None]
        #: Whether a step leads from one size (row) to another (column); shape (F, C, C).
        self.is_step: Bools = gains > np.log(MIN_SPEED_UP)
        self.is_step &= shares > 0
        self.is_step &= is_size[:, None] & is_size[:, :, None]
        self.is_step[:, :, 0] = False
        no_step = np.logical_not(self.is_step)
        # In place, since these arrays are the largest.
        for values in (shares, gains):
            np.copyto(values, 1.0, where=no_step)
            np.log(values, out=values)
        #: Logarithm of the dominant share that each step takes, 0 where there is no step; shape (F, C, C).
        self.cost: Floats = shares
        #: Logarithm of ln(new speed / old speed) of each step, 0 where there is no step; shape (F, C, C).
        self.gain: Floats = gains
        #: Logarithm of the speed of the fastest size, shape (F,).
        self.log_best_speed: Floats = self.log_speed[:, 1]
        #: Dominant share of the fastest size, shape (F,).
        self.best_share: Floats = np.array([frontier.best_share for frontier in frontiers])
        #: 1 where the base is no tasks, otherwise 0; shape (F,).
        self.from_nothing: Floats = np.array([float(frontier.from_nothing) for frontier in frontiers])
