"""Jumps: which job is next given which larger size. What the learned policy chooses by, and what its trainer trains.

In each slot all sizes are chosen anew. Every job starts from nothing, or from its floor. Then, again and again, one job
jumps to a size at which it is faster; a small function of dimensionless features, the same for all jobs, says which
jump comes next. It ends when no jump has room in what the whole cluster has left. One set of weights fits any number of
jobs, any types and any cluster.

Everything here works on N clusters at once, each with weights of its own: the policy has one, the trainer hundreds.
"""

from __future__ import annotations

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

#: What a jump is described by, each the product of two: what differs from size to size (or 1), and what is of the job
#: and its cluster. Times in slots, shares of the whole cluster, logarithms natural.
_PRODUCTS: Final = {
    "cost": ("cost", "1"),
    "gain": ("gain", "1"),
    "left": ("left", "1"),
    "left_beyond_slot": ("left_beyond_slot", "1"),
    "start": ("1", "start"),
    "start_load": ("1", "start_load"),
    "left_load": ("left", "load"),
    "relative": ("1", "relative"),
    "relative_load": ("1", "relative_load"),
    "cost_load": ("cost", "load"),
    "speed": ("speed", "1"),
    "start_relative": ("1", "start_relative"),
    "gain_load": ("gain", "load"),
    "speed_load": ("speed", "load"),
    "load": ("1", "load"),
}
FEATURES: Final = tuple(_PRODUCTS)
_COUNT: Final = len(FEATURES)
#: A jump must make a job faster by this factor.
_FASTER: Final = 1.01
#: A job without tasks counts as if it had this part of its best speed.
_WAITING: Final = 1e-3
#: Of its declared work a job counts as having this part left, at least: it may have declared too little.
LEAST_LEFT: Final = 0.01
#: Jumps are made together as long as there are more than so many a cluster, and one for so many jobs.
_FEW: Final = 8
#: Counts of a role that are looked at, and sizes of a job that are kept, at most.
_MOST_COUNTS: Final = 24
_MOST_SIZES: Final = 48
#: Numbers below it have room in 16 bits.
_SMALL: Final = 1 << 15


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """Sizes that a job may jump between, C of them; the first is where it starts, and its amounts count as taken."""

    #: Workers and PSs, shape (C, 2).
    sizes: Ints
    #: Log of samples per second, shape (C,); of a start with nothing, some little.
    log_rate: Floats
    #: Amounts of resources beyond the start's, shape (C, R), and what the whole cluster has, (R,).
    need: Ints
    capacity: Ints
    #: Dominant share of the fastest size, and whether the start is nothing.
    best_share: float
    from_nothing: bool


def surface(
    rates: Floats,
    *,
    worker: Sequence[int],
    ps: Sequence[int],
    capacity: Sequence[int],
    may: Bools,
    start: tuple[int, int] = (0, 0),
    keep: tuple[int, int] | None = None,
) -> Surface | None:
    """Sizes worth looking at: none that takes no less of anything than another and is no faster.

    Parameters
    ----------
    rates
        Samples per second, ``rates[ps, workers]``.
    worker, ps, capacity
        What one worker and one PS take and what the whole cluster has; shape (R,).
    may
        Sizes that the job may have, shape as ``rates``.
    start
        Where it starts: workers, PSs. It keeps at least those.
    keep
        A size that stays whatever it takes: the one it has now.

    Returns
    -------
    None where there is no size that the cluster could hold.
    """
    amounts = np.array([worker, ps], dtype=np.int64)
    whole = np.array(capacity, dtype=np.int64)
    first = np.array(start, dtype=np.int64)
    counted = may & (rates > 0) & np.isfinite(rates)
    counted[: start[1]] = False
    counted[:, : start[0]] = False
    for axis in (0, 1):
        if rates.shape[axis] > _MOST_COUNTS + 1:
            counted &= np.expand_dims(_looked_at(rates.shape[axis], keep and keep[1 - axis]), 1 - axis)
    worth = counted & _undominated(np.where(counted, rates, -np.inf))
    if keep is not None and counted[keep[1], keep[0]]:
        worth[keep[1], keep[0]] = True
    at_ps, at_workers = np.nonzero(worth)
    sizes = np.stack([at_workers, at_ps], axis=1)
    taken = sizes @ amounts
    within = taken <= whole
    if not within.all():
        sizes, taken = sizes[within.all(axis=1)], taken[within.all(axis=1)]
    if not len(sizes):
        return None
    rate = rates[sizes[:, 1], sizes[:, 0]]
    # Fastest first, of equals the one that takes least: each is then beaten only by those before it.
    order = np.lexsort((sizes[:, 0], sizes[:, 1], taken.sum(axis=1), -rate))
    sizes, taken, rate = sizes[order], taken[order], rate[order]
    need = taken - first @ amounts
    beaten = _beaten(need)
    if keep is not None:
        beaten &= (sizes != keep).any(axis=1)
    (kept,) = np.nonzero(~beaten)
    if len(kept) > _MOST_SIZES:
        kept = kept[_spread(len(kept))]
    nothing = not any(start)
    held = 0.0 if nothing or (first >= rates.shape[::-1]).any() else float(rates[first[1], first[0]])
    best_share = _dominant(taken[kept[0]].tolist(), capacity)
    sizes = np.concatenate([first[None], sizes[kept]])
    need = np.concatenate([np.zeros_like(need[:1]), need[kept]])
    log_rate = np.log(np.concatenate([[max(held, _WAITING * rate[0])], rate[kept]]))
    return Surface(sizes, log_rate, need, whole, best_share, nothing)


@lru_cache(maxsize=256)
def _spread(count: int) -> Ints:
    """Places of some of so many, as far from each other, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, _MOST_SIZES).round().astype(np.int64))


def _undominated(rates: Floats) -> Bools:
    """Which sizes are faster than all that have no more workers and no more PSs; ``rates[ps, workers]``.

    Most others can be told by this at once, and fewer are left to be compared with each other.
    """
    best = np.maximum.accumulate(np.maximum.accumulate(rates, axis=0), axis=1)
    faster = np.ones(rates.shape, dtype=np.bool_)
    faster[1:] = rates[1:] > best[:-1]
    faster[:, 1:] &= rates[:, 1:] > best[:, :-1]
    return faster


def _beaten(need: Ints) -> Bools:
    """Which rows take no less of anything than one before them; shape (sizes, R) -> (sizes,)."""
    # Small numbers are compared fastest, and one resource after the other: a short last axis is slow to go along.
    units: NDArray[np.integer[Any]] = need // np.maximum(np.gcd.reduce(need, axis=0), 1)
    places: NDArray[np.integer[Any]] = np.arange(len(need))
    if max(len(need), units.max(initial=0)) < _SMALL:
        units, places = units.astype(np.int16), places.astype(np.int16)
    less: Bools = np.less.outer(places, places)
    for taken in np.ascontiguousarray(units.T):
        less &= np.less_equal.outer(taken, taken)
    return np.asarray(less.any(axis=0))


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
    amounts, whole = need.astype(np.float64), np.where(capacity > 0, capacity, 1e-9)
    shares: Floats = np.full((*need.shape[:2], need.shape[1]), -np.inf)
    for number in range(need.shape[2]):
        taken = amounts[:, None, :, number] - amounts[:, :, None, number]
        taken /= whole[:, None, None, number]
        np.maximum(shares, taken, out=shares)
    return shares


def sizes_of(request: JobRequest) -> Bools:
    """Sizes that a job may train at, ``sizes[ps, workers]``; shape (max_ps + 1, max_workers + 1)."""
    has_ps = request.architecture is Architecture.PS
    workers = np.array([request.allows(count) and count > 0 for count in range(request.max_workers + 1)])
    ps = np.arange(request.max_ps + 1) >= max(request.min_ps, 1 if has_ps else 0)
    if not has_ps:
        ps &= np.arange(request.max_ps + 1) == request.min_ps  # more of them would only cost
    both: Bools = ps[:, None] & workers[None]
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
        #: Of jumps from (row) to (column): log of the dominant share taken, log of the log of the speed-up, and which
        #: there are; shape (surfaces, C, C). In place: arrays are large.
        self.cost: Floats = _shares(self.need, np.array([one.capacity for one in surfaces]))
        self.gain: Floats = self.log_rate[:, None] - self.log_rate[:, :, None]
        self.there: Bools = self.gain > np.log(_FASTER)
        self.there &= self.cost > 0
        self.there &= within[:, None] & within[:, :, None]
        self.there[:, :, 0] = False
        for each in (self.cost, self.gain):
            np.copyto(each, 1.0, where=~self.there)
            np.log(each, out=each)
        #: Of the fastest size, which stands right after the start.
        self.log_best: Floats = self.log_rate[:, 1]
        self.best_share: Floats = np.array([one.best_share for one in surfaces])
        self.from_nothing: Floats = np.array([float(one.from_nothing) for one in surfaces])


@dataclass(frozen=True, slots=True, eq=False)
class Crowd:
    """The jobs of N clusters, J each at most. What is not ``present`` is not looked at."""

    #: Which surface each job has, shape (N, J).
    surface: Ints
    present: Bools
    #: Log of samples that are left, over the seconds of a slot, shape (N, J).
    log_left: Floats
    #: Log of the dominant share that all jobs would take at their fastest sizes, shape (N,).
    load: Floats
    #: Log of a job's remaining slots at its fastest size, less the mean of all jobs, shape (N, J).
    relative: Floats

    @classmethod
    def of(cls, surfaces: Surfaces, surface: Ints, present: Bools, samples: Floats, slot_seconds: Floats) -> Crowd:
        """From the samples that are left, shape (N, J), and the length of each cluster's slots, shape (N,)."""
        with np.errstate(divide="ignore"):
            log_left = np.log(np.where(present, samples, 1.0) / slot_seconds[:, None])
        share = np.where(present, surfaces.best_share[surface], 0.0)
        load = np.log(share.sum(axis=1) + 1e-3)
        length = np.where(present, np.logaddexp(log_left - surfaces.log_best[surface], np.log(1e-3)), 0.0)
        mean = length.sum(axis=1) / np.maximum(present.sum(axis=1), 1)
        return cls(surface, present, log_left, load, length - mean[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class Jumps:
    """What is looked at of all jumps of K jobs, each from where it is; by name."""

    #: What differs from size to size, shape (K, C).
    of_size: dict[str, Floats]
    #: What is of the job and its cluster, shape (K, 1).
    of_job: dict[str, Floats]

    def features(self) -> dict[str, Floats]:
        """All features by name; shape (K, C), or (K, 1) of those that are the same for all sizes."""
        return {
            name: self.of_job[job] * (self.of_size[size] if size != "1" else 1.0)
            for name, (size, job) in _PRODUCTS.items()
        }


def look(surfaces: Surfaces, crowd: Crowd, rows: Ints, jobs: Ints, states: Ints) -> Jumps:
    """Look at all jumps of K jobs (``rows``, ``jobs``) from their ``states``, each shape (K,)."""
    which = crowd.surface[rows, jobs]
    of_size = {"cost": surfaces.cost[which, states], "gain": surfaces.gain[which, states]}
    start = surfaces.from_nothing[which] * (states == 0)
    return Jumps(of_size | _lasting(surfaces, crowd, rows, jobs), _of_job(crowd, rows, jobs, start))


def _lasting(surfaces: Surfaces, crowd: Crowd, rows: Ints, jobs: Ints) -> dict[str, Floats]:
    """What differs from size to size, whatever size a job has; each shape (K, C)."""
    which = crowd.surface[rows, jobs]
    log_rate = surfaces.log_rate[which]
    log_slots = crowd.log_left[rows, jobs][:, None] - log_rate
    return {
        "left": np.maximum(log_slots, -7.0),
        "left_beyond_slot": np.maximum(log_slots, 0.0),
        "speed": log_rate - surfaces.log_best[which][:, None],
    }


def _of_job(crowd: Crowd, rows: Ints, jobs: Ints, start: Floats) -> dict[str, Floats]:
    """What is of a job that starts or does not, and of its cluster; each shape (K, 1)."""
    load, relative, start = crowd.load[rows][:, None], crowd.relative[rows, jobs][:, None], start[:, None]
    return {
        "1": np.ones_like(load), "start": start, "load": load, "relative": relative,
        "start_load": start * load, "start_relative": start * relative, "relative_load": relative * load,
    }  # fmt: skip


def weight_count(hidden: int) -> int:
    """How many weights a scorer has: a linear part, and for each hidden unit its inputs, a constant and its output."""
    return _COUNT + hidden * (_COUNT + 2)


def initial_weights(hidden: int, rng: np.random.Generator) -> Floats:
    """Most time saved for what it takes, starts first; hidden units that say nothing yet. Shape (weights,)."""
    weights = np.zeros(weight_count(hidden))
    weights[[FEATURES.index(name) for name in ("cost", "gain", "left", "start")]] = -1.0, 1.0, 1.0, 4.0
    units = weights[_COUNT:].reshape(hidden, _COUNT + 2)
    units[:, :-1] = rng.normal(0.0, 0.3, (hidden, _COUNT + 1))
    return weights


def score(weights: Floats, jumps: Jumps) -> Floats:
    """Scores of jumps: a linear function of the features, and hidden units (tanh) on top where there are weights.

    Parameters
    ----------
    weights
        Shape (K, weights) or (1, weights).

    Returns
    -------
    Shape (K, C).
    """
    total = _linear(weights, jumps, 0)
    for at in range(_COUNT, weights.shape[1], _COUNT + 2):
        inside = _linear(weights, jumps, at) + weights[:, at + _COUNT, None]
        total += weights[:, at + _COUNT + 1, None] * np.tanh(inside)
    return total


def _linear(weights: Floats, jumps: Jumps, at: int) -> Floats:
    # One after the other, so that results do not depend on how many jobs are scored at once; what is the same for all
    # sizes of a job is summed first, for that is far less.
    sums = _summed(weights, jumps.of_job, at)
    constant = sums.pop("1")
    (first, weight), *others = sums.items()
    total = weight * jumps.of_size[first]
    for size, weight in others:
        total += weight * jumps.of_size[size]
    total += constant
    return total


def _summed(weights: Floats, of_job: dict[str, Floats], at: int) -> dict[str, Floats]:
    """What a job makes of the weights of what differs from size to size, and of the constant; each shape (K, 1)."""
    sums: dict[str, Floats] = {}
    for number, (size, job) in enumerate(_PRODUCTS.values(), start=at):
        term = weights[:, number, None] * of_job[job]
        sums[size] = sums[size] + term if size in sums else term
    return sums


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Sizes, and what could have come next."""

    #: Which size of its surface each job has, shape (N, J).
    states: Ints
    #: Score of the jump with which each job got there, shape (N, J); NaN where it did not move.
    scores: Floats
    #: Jumps in the order in which they were made: cluster, job, size; shape (jumps, 3).
    jumps: Ints


def choose(
    surfaces: Surfaces,
    crowd: Crowd,
    states: Ints,
    free: Ints,
    weights: Floats,
    *,
    growing: bool = False,
) -> Chosen:
    """Make jumps until none has room in the totals.

    Parameters
    ----------
    states
        Where each job is, shape (N, J).
    free
        What each cluster has left, shape (N, R).
    weights
        Shape (N, weights), or (1, weights) for all alike.
    growing
        Only to sizes that have no fewer workers and no fewer PSs.
    """
    looking = _Looking(surfaces, crowd, states.copy(), free.copy(), weights, growing=growing)
    while looking.many():
        pass
    looking.one_by_one()
    made: Ints = np.concatenate(looking.jumps) if looking.jumps else np.zeros((0, 3), dtype=np.int64)
    return Chosen(looking.states, looking.scores, made)


class _Scores:
    """``score`` of the jobs of a crowd, again and again, number for number: what stays is worked out once."""

    def __init__(self, surfaces: Surfaces, crowd: Crowd, rows: Ints, jobs: Ints, weights: Floats) -> None:
        self._surfaces = surfaces
        self._which = crowd.surface[rows, jobs]
        self._from_nothing = surfaces.from_nothing[self._which] > 0
        own, lasting = weights[rows], _lasting(surfaces, crowd, rows, jobs)
        #: Of the linear part and of each hidden unit: weights of cost and gain, (K, 1); what lasts, weighed, in the
        #: order in which it is added, (K, C); and the constant, of jobs that do not start and of such as do, (2, K).
        self._parts = []
        for at in (0, *range(_COUNT, weights.shape[1], _COUNT + 2)):
            goes, starts = (
                _summed(own, _of_job(crowd, rows, jobs, np.full(len(rows), start)), at) for start in (0.0, 1.0)
            )
            constants = np.stack([goes["1"][:, 0], starts["1"][:, 0]])
            self._parts.append(
                (goes["cost"], goes["gain"], [goes[name] * lasting[name] for name in lasting], constants)
            )
        self._hidden = [(own[:, at - 2, None], own[:, at - 1, None])
                        for at in range(2 * _COUNT + 2, weights.shape[1] + 1, _COUNT + 2)]  # fmt: skip

    def __call__(self, of: Ints, now: Ints) -> Floats:
        """Of all jumps of some of the jobs, by their place, from where they are now; shape (of, C)."""
        which = self._which[of]
        cost, gain = self._surfaces.cost[which, now], self._surfaces.gain[which, now]
        start = (self._from_nothing[of] & (now == 0)).astype(np.int64)
        total, *hidden = (self._linear(part, of, cost, gain, start) for part in self._parts)
        some = _picked(of, len(self._which))
        for inside, (bias, outer) in zip(hidden, self._hidden, strict=True):
            total += outer[some] * np.tanh(inside + bias[some])
        return total

    def _linear(
        self, part: tuple[Floats, Floats, list[Floats], Floats], of: Ints, cost: Floats, gain: Floats, start: Ints
    ) -> Floats:
        # The same numbers in the same order as ``score`` adds them.
        of_cost, of_gain, lasting, constants = part
        some = _picked(of, len(of_cost))
        total = of_cost[some] * cost
        total += of_gain[some] * gain
        for weighed in lasting:
            total += weighed[some]
        total += constants[start, of][:, None]
        return total


def _picked(of: Ints, count: int) -> Ints | slice:
    """Some of so many, in ascending order; all of them need not be picked one by one."""
    return of if len(of) < count else slice(None)


class _Looking:
    """Sizes while they are chosen. Jobs go by their place among those that are present."""

    def __init__(
        self, surfaces: Surfaces, crowd: Crowd, states: Ints, free: Ints, weights: Floats, *, growing: bool
    ) -> None:
        self.states, self.free = states, free
        self.scores = np.full(states.shape, np.nan)
        self.jumps: list[Ints] = []
        self._surfaces, self._growing = surfaces, growing
        self._rows, self._jobs = np.nonzero(crowd.present)
        self._which = crowd.surface[self._rows, self._jobs]
        own = np.broadcast_to(weights, (len(states), weights.shape[1]))
        self._scores = _Scores(surfaces, crowd, self._rows, self._jobs, own)
        #: Of each resource, what each size takes; (jobs, C).
        self._need = [surfaces.need[self._which, :, number] for number in range(surfaces.need.shape[2])]

    def many(self) -> bool:
        """Make all jumps up to the first, in each cluster, that has no room; says whether they were worth the effort.

        As long as there is room, jobs do not stand in one another's way: each goes through its own jumps, and the
        jumps of all come in the order of the lowest score on the way to each. So they are made at once. What comes of
        it is what ``one_by_one`` would make of it.
        """
        rows, jobs = self._rows, self._jobs
        now = self.states[rows, jobs].copy()
        lowest = np.full(len(rows), np.inf)
        steps = []
        alive = np.arange(len(rows))
        while len(alive):
            top, to = self._best(alive, now[alive])
            going = top > -np.inf
            alive, top, to = alive[going], top[going], to[going]
            lowest[alive] = np.minimum(lowest[alive], top)
            steps.append((alive, now[alive].copy(), to, lowest[alive].copy(), top))
            now[alive] = to
        if not steps:
            return False
        of, before, after, order, top = (np.concatenate(parts) for parts in zip(*steps, strict=True))
        depth = np.repeat(np.arange(len(steps)), [len(part[0]) for part in steps])
        sort = np.lexsort((depth, jobs[of], -order, rows[of]))
        of, before, after, top = of[sort], before[sort], after[sort], top[sort]
        row, job = rows[of], jobs[of]
        which = self._which[of]
        need = self._surfaces.need[which, after] - self._surfaces.need[which, before]
        taken = need.cumsum(axis=0)
        first = np.searchsorted(row, row)
        taken -= np.where(first[:, None] > 0, taken[first - 1], 0)
        stuck = (taken > self.free[row]).any(axis=1)
        # Whatever comes after a jump without room has to wait until it was looked at again.
        behind = stuck.cumsum()
        made = behind - np.where(first > 0, behind[first - 1], 0) == 0
        row, job, after, top = row[made], job[made], after[made], top[made]
        # Of several jumps of one job the last one stands.
        self.states[row, job] = after
        self.scores[row, job] = top
        np.subtract.at(self.free, row, need[made])
        self.jumps.append(np.stack([row, job, after], axis=1))
        return bool(stuck.any()) and len(row) > _FEW * len(self.states) + len(rows) // _FEW

    def one_by_one(self) -> None:
        """Make jumps until none has room."""
        surfaces, states, free = self._surfaces, self.states, self.free
        count = len(states)
        best = np.full(states.shape, -np.inf)
        target = np.zeros(states.shape, dtype=np.int64)
        places = np.zeros(states.shape, dtype=np.int64)
        rows, jobs, of = self._rows, self._jobs, np.arange(len(self._rows))
        places[rows, jobs] = of
        best[rows, jobs], target[rows, jobs] = self._best(of, states[rows, jobs])
        rows = np.arange(count)
        while len(rows):
            jobs = best[rows].argmax(axis=1) if len(rows) < count else best.argmax(axis=1)
            top = best[rows, jobs]
            going = top > -np.inf
            if not going.all():
                rows, jobs, top = rows[going], jobs[going], top[going]
                if not len(rows):
                    break
            of, now, to = places[rows, jobs], states[rows, jobs], target[rows, jobs]
            which = self._which[of]
            step = surfaces.need[which, to] - surfaces.need[which, now]
            fits = (step <= free[rows]).all(axis=1)
            moved, at = rows[fits], jobs[fits]
            states[moved, at] = to[fits]
            self.scores[moved, at] = top[fits]
            free[moved] -= step[fits]
            self.jumps.append(np.stack([moved, at, to[fits]], axis=1))
            # Where there was no room the best jump of those with room is looked for; room only gets less.
            best[rows, jobs], target[rows, jobs] = self._best(of, states[rows, jobs])

    def _best(self, of: Ints, now: Ints) -> tuple[Floats, Ints]:
        """Score and size of the best jump with room of some jobs; -inf where there is none."""
        surfaces, which = self._surfaces, self._which[of]
        room = self.free[self._rows[of]] + surfaces.need[which, now]
        open_ = surfaces.there[which, now]
        some = _picked(of, len(self._which))
        for number, need in enumerate(self._need):
            open_ &= need[some] <= room[:, number, None]
        if self._growing:
            sizes = surfaces.sizes[which]
            open_ &= (sizes >= sizes[np.arange(len(now)), now][:, None]).all(axis=2)
        total = np.where(open_, self._scores(of, now), -np.inf)
        first: Ints = total.argmax(axis=1)
        return total[np.arange(len(of)), first], first
