"""Pareto frontiers: the sizes of a job that are not dominated.

A size is dominated if another one takes at most as much of each resource and is at least as fast.

The base of a job is the size with which its sizing begins in each slot, and below which it is not sized: its floor, or
nothing. A size step leads from one size on a job's frontier to another. A size is addressed by its position: 0 is the
base, 1 the fastest size, and speeds fall from there on. At most ``_MAX_FRONTIER_SIZES`` sizes are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dl2d.core.array_types import Bools, Floats, Ints
from dl2d.core.jobs import Architecture, JobRequest
from dl2d.core.measured_speeds_and_losses import TrainingKind

#: Least speed-up of a step.
MIN_SPEED_UP = 1.01
#: Speed of a job without tasks, as a fraction of its best one, so that the gain of its first step is finite.
_SPEED_OF_WAITING = 1e-3
#: Maximum number of counts of a role that are considered.
_MAX_COUNTS = 24
#: Maximum number of sizes of a job that are kept.
_MAX_FRONTIER_SIZES = 48


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
    held: tuple[int, int] | None = None


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
    return [_pareto_frontier(grid) for grid in grids]


def _pareto_frontier(grid: SizeGrid) -> ParetoFrontier | None:
    base, capacity = np.array(grid.base), np.array(grid.capacity, dtype=np.int64)
    demand = np.array([grid.worker, grid.ps], dtype=np.int64)
    ps, workers = np.nonzero(_candidates(grid, demand, capacity))
    if not len(ps):
        return None
    sizes, speed = np.stack([workers, ps], axis=1), grid.speeds[ps, workers]
    taken = sizes @ demand
    # In this order, a size can be dominated only by those before it.
    order = np.lexsort((taken.sum(axis=1), -speed))
    sizes, speed, taken = sizes[order], speed[order], taken[order]
    is_held = (sizes == grid.held).all(axis=1) if grid.held else np.zeros(len(sizes), dtype=np.bool_)
    kept = _thinned(np.flatnonzero(~_dominated(taken) | is_held), is_held)
    sizes, speed, taken = sizes[kept], speed[kept], taken[kept]
    speed_at_base = max(_speed_at_base(grid), _SPEED_OF_WAITING * speed[0])
    return ParetoFrontier(
        np.concatenate([base[None], sizes]),
        np.log(np.concatenate([[speed_at_base], speed])),
        np.concatenate([np.zeros_like(taken[:1]), taken - base @ demand]),
        capacity,
        best_share=float(_shares(taken[0], capacity).max()),
        from_nothing=not any(grid.base),
    )


def _candidates(grid: SizeGrid, demand: Ints, capacity: Ints) -> Bools:
    """Sizes that may be on the frontier, shape (P, W) as ``grid.speeds``; of many counts of a role, some.

    They are allowed, no smaller than the base, and fit in the cluster. Those that are no faster than a size with no
    more workers and no more PSs are left out, except the held one, so that few are left to be compared by pairs.

    Parameters
    ----------
    demand
        Amounts of R resources that a worker and a PS take, shape (2, R).
    """
    possible: Bools = grid.allowed & (grid.speeds > 0) & np.isfinite(grid.speeds)
    possible[: grid.base[1]] = possible[:, : grid.base[0]] = False
    ps_counts, worker_counts = possible.shape
    ps, workers = np.arange(ps_counts)[:, None], np.arange(worker_counts)
    for of_worker, of_ps, whole in zip(*demand, capacity, strict=True):
        possible &= workers * of_worker + ps * of_ps <= whole
    held_workers, held_ps = grid.held if grid.held is not None else (None, None)
    possible &= _considered(np.any(possible, axis=1), held_ps)[:, None]
    possible &= _considered(np.any(possible, axis=0), held_workers)
    speeds, candidates = np.where(possible, grid.speeds, -np.inf), possible.copy()
    best = np.maximum.accumulate(np.maximum.accumulate(speeds, axis=0), axis=1)
    candidates[1:] &= speeds[1:] > best[:-1]
    candidates[:, 1:] &= speeds[:, 1:] > best[:, :-1]
    if grid.held is not None:
        candidates[held_ps, held_workers] = possible[held_ps, held_workers]
    return candidates


def _considered(possible: Bools, held: int | None) -> Bools:
    """Counts of a role that are considered: of many possible ones the least, the held one, and a geometric progression.

    Parameters
    ----------
    possible
        Whether any size with each count is possible, shape (counts,); as is the result.
    held
        The count that the job has now.
    """
    counts = np.flatnonzero(possible)
    if len(counts) <= _MAX_COUNTS:
        return possible
    progression = np.geomspace(max(counts[0], 1), counts[-1], _MAX_COUNTS).round()
    considered = np.zeros_like(possible)
    considered[counts[np.searchsorted(counts, progression)]] = considered[counts[0]] = True
    if held is not None:
        considered[held] = True
    return considered


def _dominated(taken: Ints) -> Bools:
    """Whether an earlier (faster) size takes at most as much of every resource; shape (sizes, R) -> (sizes,)."""
    no_less = np.ones((len(taken), len(taken)), dtype=np.bool_)
    for amounts in taken.T:
        no_less &= amounts[:, None] >= amounts
    # The first size in a row is the size itself, unless an earlier one dominates it.
    dominated: Bools = no_less.argmax(axis=1) < np.arange(len(taken))
    return dominated


def _thinned(kept: Ints, is_held: Bools) -> Ints:
    """At most ``_MAX_FRONTIER_SIZES`` of the indices of kept sizes, evenly spread; the held size is kept."""
    if len(kept) <= _MAX_FRONTIER_SIZES:
        return kept
    places = np.linspace(0, len(kept) - 1, _MAX_FRONTIER_SIZES).round().astype(np.int64)
    held = is_held[kept].argmax()  # 0, which is among the places, if there is none
    if held not in places:
        places[1 + np.abs(places[1:-1] - held).argmin()] = held
    return kept[places]


def _speed_at_base(grid: SizeGrid) -> float:
    """Speed of a job at its base; 0 where that is nothing or not in the grid."""
    workers, ps = grid.base
    inside = ps < grid.speeds.shape[0] and workers < grid.speeds.shape[1]
    return float(grid.speeds[ps, workers]) if inside and any(grid.base) else 0.0


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


def summed_shares(demand: Ints, capacity: Ints) -> Floats:
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
