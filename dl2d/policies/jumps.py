"""Jumps: which job is next given which larger size. What the learned policy chooses by, and what its trainer trains.

In each slot all sizes are chosen anew. Every job starts from nothing, or from its floor. Then, again and again, one job
jumps to a size at which it is faster; a small function of dimensionless features, the same for all jobs, says which
jump comes next. It ends when no jump has room in what the whole cluster has left. One set of weights fits any number of
jobs, any types and any cluster.

Everything here works on N clusters at once, each with weights of its own: the policy has one, the trainer hundreds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dl2d.policies.surfaces import Surfaces

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
#: Of its declared work a job counts as having this part left, at least: it may have declared too little.
LEAST_LEFT: Final = 0.01
#: Jumps are made together as long as there are more than so many a cluster, and one for so many jobs.
_FEW: Final = 8
#: From so many sizes, of all jobs together, is looked at once where jobs are few: short arrays are slow.
_ROWS: Final = 512


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


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The linear part of a score, or a hidden unit, of K jobs."""

    #: Weights of cost and of gain, (K, 1, 1).
    cost: Floats
    gain: Floats
    #: What lasts, weighed, in the order in which it is added, each (K, 1, C).
    lasting: list[Floats]
    #: The constant, of jobs that do not start and of such as do, (2, K).
    constants: Floats

    # The same numbers in the same order as ``score`` adds them.

    def begun(self, some: Ints | slice, cost: Floats, gain: Floats) -> Floats:
        """What cost and gain of some jobs' jumps come to; all shape (k, S, sizes)."""
        total = self.cost[some] * cost
        total += self.gain[some] * gain
        return total

    def end(self, total: Floats, some: Ints | slice, starts: Ints, of: Ints) -> None:
        """Add the rest; which of the jumps are starts, shape (k, S), and of which jobs they are, (k,)."""
        for weighed in self.lasting:
            total += weighed[some, :, : total.shape[2]]
        total += self.constants[starts, of[:, None]][:, :, None]


class _Scores:
    """``score`` of the jobs of a crowd, again and again, number for number: what stays is worked out once."""

    def __init__(self, surfaces: Surfaces, crowd: Crowd, rows: Ints, jobs: Ints, weights: Floats) -> None:
        self._surfaces = surfaces
        self._which = crowd.surface[rows, jobs]
        self._from_nothing = surfaces.from_nothing[self._which] > 0
        own, lasting = weights[rows], _lasting(surfaces, crowd, rows, jobs)
        self._parts = []
        for at in (0, *range(_COUNT, weights.shape[1], _COUNT + 2)):
            goes, starts = (
                _summed(own, _of_job(crowd, rows, jobs, np.full(len(rows), start)), at) for start in (0.0, 1.0)
            )
            weighed = [(goes[name] * lasting[name])[:, None] for name in lasting]
            constants = np.stack([goes["1"][:, 0], starts["1"][:, 0]])
            self._parts.append(_Part(goes["cost"][:, None], goes["gain"][:, None], weighed, constants))
        self._hidden = [(own[:, at - 2, None, None], own[:, at - 1, None, None])
                        for at in range(2 * _COUNT + 2, weights.shape[1] + 1, _COUNT + 2)]  # fmt: skip
        #: What each part makes of cost and gain, shape (surfaces, C, C): in one cluster it is the same for all jobs.
        self._moves: list[Floats] = []
        if len(weights) == 1 and len(rows):
            self._moves = [part.begun(slice(1), surfaces.cost, surfaces.gain) for part in self._parts]
            self._moves[0] = np.where(surfaces.there, self._moves[0], -np.inf)

    def there(self, of: Ints, states: Ints, most: int) -> Bools | None:
        """Which jumps there are, shape (k, S, most); None where scores themselves are -inf where there is none."""
        return None if self._moves else self._surfaces.there[self._which[of][:, None], states, :most]

    def __call__(self, of: Ints, states: Ints, most: int) -> Floats:
        """Of jumps of k jobs, by their place, from S sizes each, (k, S), to the first ``most``; (k, S, most)."""
        which, some = self._which[of][:, None], _picked(of, len(self._which))
        if self._moves:
            totals = [moves[which, states, :most] for moves in self._moves]
        else:
            cost, gain = self._surfaces.cost[which, states, :most], self._surfaces.gain[which, states, :most]
            totals = [part.begun(some, cost, gain) for part in self._parts]
        starts = (self._from_nothing[of][:, None] & (states == 0)).astype(np.int64)
        for part, total in zip(self._parts, totals, strict=True):
            part.end(total, some, starts, of)
        total, *hidden = totals
        for inside, (bias, outer) in zip(hidden, self._hidden, strict=True):
            total += outer[some] * np.tanh(inside + bias[some])
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
        #: Of each resource, what each size takes, (jobs, C); and the most that any does, (jobs, R).
        self._need = [surfaces.need[self._which, :, number] for number in range(surfaces.need.shape[2])]
        self._largest = surfaces.need.max(axis=1)[self._which]

    def many(self) -> bool:
        """Make all jumps up to the first, in each cluster, that has no room; says whether they were worth the effort.

        As long as there is room, jobs do not stand in one another's way: each goes through its own jumps, and the
        jumps of all come in the order of the lowest score on the way to each. So they are made at once. What comes of
        it is what ``one_by_one`` would make of it.
        """
        rows, jobs = self._rows, self._jobs
        of, before, after, order, top = self._ways(self.states[rows, jobs])
        if not len(of):
            return False
        # Of equals, in the order of jobs and of each job's way, in which they are.
        sort = np.lexsort((-order, rows[of]))
        of, before, after, top = of[sort], before[sort], after[sort], top[sort]
        row, job = rows[of], jobs[of]
        which = self._which[of]
        need = self._surfaces.need[which, after] - self._surfaces.need[which, before]
        taken = need.cumsum(axis=0)
        first = np.searchsorted(row, np.arange(len(self.states)))[row]
        taken -= np.where(first[:, None] > 0, taken[first - 1], 0)
        stuck = (taken > self.free[row]).any(axis=1)
        # Whatever comes after a jump without room has to wait until it was looked at again.
        behind = stuck.cumsum()
        made = behind - np.where(first > 0, behind[first - 1], 0) == 0
        row, job, after, top = row[made], job[made], after[made], top[made]
        # Of several jumps of one job, and of one cluster, the last one stands.
        self.free[row] = self.free[row] - taken[made]
        self.states[row, job] = after
        self.scores[row, job] = top
        self.jumps.append(np.stack([row, job, after], axis=1))
        return bool(stuck.any()) and len(row) > _FEW * len(self.states) + len(rows) // _FEW

    def _ways(self, now: Ints) -> tuple[Ints, Ints, Ints, Floats, Floats]:
        """All jumps of each job from where it is, (jobs,), if it finds as much room all the way as there is now.

        Returns
        -------
        Of each jump: the job's place, the sizes before and after, the lowest score on the way to there, its own.
        """
        count, most = len(now), self._surfaces.sizes.shape[1]
        # By job and size, in one row: where the best jump leads and its score, and whether the job comes by.
        every = np.arange(count * most)
        onward, top, passed = every.copy(), np.full(count * most, -np.inf), np.zeros(count * most, dtype=np.bool_)
        alive, begin = np.arange(count), np.arange(0, count * most, most)
        while len(alive):
            # Jumps lead to sizes that stand before, but from the start: so each looks from where it is, and from some
            # that it may come to.
            back = np.where(now > 0, now, most)
            far = int(back.max())
            ahead = min(max(_ROWS // len(alive), 1), far)
            states = np.maximum(back[:, None] - np.arange(ahead), 1)
            states[:, 0] = now
            best, to = self._best(alive, states, far)
            here = begin[:, None] + states
            onward[here], top[here] = np.where(best > -np.inf, begin[:, None] + to, here), best
            at = begin + now
            for _ in range(ahead):
                passed[at] = True
                at = onward.take(at)
            # On go those that came to where they have not looked from.
            now = at - begin
            beyond = (now <= back - ahead) & (now > 0)
            alive, begin, now = alive[beyond], begin[beyond], now[beyond]
        passed &= onward != every
        way = -np.arange(most) % most
        left = passed.reshape(count, most)[:, way]
        lowest = np.minimum.accumulate(np.where(left, top.reshape(count, most)[:, way], np.inf), axis=1)
        of, step = np.nonzero(left)
        before = of * most + way[step]
        return of, way[step], onward[before] - of * most, lowest[of, step], top[before]

    def one_by_one(self) -> None:
        """Make jumps until none has room."""
        surfaces, states, free = self._surfaces, self.states, self.free
        count = len(states)
        best = np.full(states.shape, -np.inf)
        target = np.zeros(states.shape, dtype=np.int64)
        places = np.zeros(states.shape, dtype=np.int64)
        rows, jobs = self._rows, self._jobs
        places[rows, jobs] = np.arange(len(rows))
        (of,) = np.nonzero(~surfaces.ends[self._which, states[rows, jobs]])
        if not len(of):
            return
        rows, jobs = rows[of], jobs[of]
        best[rows, jobs], target[rows, jobs] = self._best_now(of, states[rows, jobs])
        rows = np.unique(rows)
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
            best[rows, jobs], target[rows, jobs] = self._best_now(of, states[rows, jobs])

    def _best_now(self, of: Ints, now: Ints) -> tuple[Floats, Ints]:
        """Score and size of the best jump with room of some jobs; -inf where there is none."""
        top, to = self._best(of, now[:, None], self._surfaces.sizes.shape[1])
        return top[:, 0], to[:, 0]

    def _best(self, of: Ints, states: Ints, most: int) -> tuple[Floats, Ints]:
        """Score and size, of the first ``most``, of the best jump with room of k jobs, from each of some (k, S) sizes.

        Returns
        -------
        Both shape (k, S); -inf where there is none.
        """
        surfaces, which, some = self._surfaces, self._which[of][:, None], _picked(of, len(self._which))
        free = self.free[self._rows[of]]
        limits = [there for there in (self._scores.there(of, states, most),) if there is not None]
        if (self._largest[of] > free).any():
            left = free[:, None] + surfaces.need[which, states]
            limits += [need[some, None, :most] <= left[:, :, number, None] for number, need in enumerate(self._need)]
        if self._growing:
            sizes = surfaces.sizes[which, :most]
            limits.append(np.asarray((sizes >= surfaces.sizes[which, states][:, :, None]).all(axis=3)))
        total = self._scores(of, states, most)
        if limits:
            for limit in limits[1:]:
                limits[0] &= limit
            total = np.where(limits[0], total, -np.inf)
        first: Ints = total.argmax(axis=2)
        return total.reshape(-1).take(np.arange(0, total.size, most).reshape(first.shape) + first), first
