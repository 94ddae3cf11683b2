"""Jumps: which job is next given which larger size. What the learned policy chooses by, and what its trainer trains.

In each slot all sizes are chosen anew. Every job starts from nothing, or from its floor. Then, again and again, one job
jumps to a size at which it is faster; a small function of dimensionless features, the same for all jobs, says which
jump comes next. It ends when no jump has room in what the whole cluster has left. One set of weights fits any number of
jobs, any types and any cluster.

Everything here works on N clusters at once, each with weights of its own: the policy has one, the trainer hundreds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dl2d.policies.dl2.pareto_frontier import Surfaces

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
    search = _Search(surfaces, crowd, states.copy(), free.copy(), weights, growing=growing)
    (stopped,) = np.nonzero(search.present)
    while len(stopped):
        search.plan(stopped)
        stopped = search.make()
    made: Ints = np.concatenate(search.made) if search.made else np.zeros((0, 3), dtype=np.int64)
    return Chosen(search.states, search.scores, made)


class _Steps(NamedTuple):
    """Steps of jobs, those of each job in the order in which they are made; all shape (steps,)."""

    #: Place of the job among those that are present, and its sizes before and after.
    job: Ints
    before: Ints
    after: Ints
    #: Score of the step, and the least score of those of this job up to it.
    score: Floats
    least: Floats

    def some(self, which: Ints | Bools) -> _Steps:
        """Those at some places."""
        return _Steps._make(values[which] for values in self)


class _Search:
    """Sizes while they are chosen.

    While nothing lacks room jobs do not compete: each makes its own best steps one after the other, and in the order of
    scores a step comes right after an earlier one of the same job with a lower score. So steps of all jobs are planned
    ahead, and made in the order of ``least`` up to the first that has no room; then all jobs whose next step has none
    plan anew, with the room that is left.
    """

    def __init__(
        self, surfaces: Surfaces, crowd: Crowd, states: Ints, free: Ints, weights: Floats, *, growing: bool
    ) -> None:
        self.states, self.free = states, free
        self.scores = np.full(states.shape, np.nan)
        self.made: list[Ints] = []
        self._surfaces, self._crowd, self._weights, self._growing = surfaces, crowd, weights, growing
        self._rows, self._jobs = np.nonzero(crowd.present)
        self.present = np.ones(len(self._rows), dtype=np.bool_)
        self._which = crowd.surface[self._rows, self._jobs]
        nothing, none = np.zeros(0, dtype=np.int64), np.zeros(0)
        self._planned = _Steps(nothing, nothing, nothing, none, none)

    def plan(self, jobs: Ints) -> None:
        """Plan the steps of some jobs as if each found as much room all the way as there is now."""
        now, least, found = self.states[self._rows[jobs], self._jobs[jobs]], np.full(len(jobs), np.inf), [self._planned]
        while len(jobs):
            score, to = self._best(jobs, now)
            (going,) = np.nonzero(score > -np.inf)
            jobs, before, now, score = jobs[going], now[going], to[going], score[going]
            least = np.minimum(least[going], score)
            found.append(_Steps(jobs, before, now, score, least))
        together = _Steps._make(np.concatenate(values) for values in zip(*found, strict=True))
        self._planned = together.some(np.argsort(together.job, kind="stable"))

    def make(self) -> Ints:
        """Make planned steps up to the first, in each cluster, without room; returns jobs that have to plan anew."""
        # Of equals, in the order of jobs and of each job's steps, in which they are.
        steps = self._planned.some(np.lexsort((-self._planned.least, self._rows[self._planned.job])))
        rows, which = self._rows[steps.job], self._which[steps.job]
        need = self._surfaces.need[which, steps.after] - self._surfaces.need[which, steps.before]
        first = np.searchsorted(rows, rows)  # where the steps of each one's cluster begin
        taken = _sums(need, first)
        lacking: Bools = np.asarray((taken > self.free[rows]).any(axis=1))
        makes = _sums(lacking, first) == 0
        made = steps.some(makes)
        rows, jobs = self._rows[made.job], self._jobs[made.job]
        # Of several steps of one job, and of one cluster, the last one stands.
        self.free[rows] = self.free[rows] - taken[makes]
        self.states[rows, jobs] = made.after
        self.scores[rows, jobs] = made.score
        self.made.append(np.stack([rows, jobs, made.after], axis=1))
        left = steps.some(~makes)
        lacking = np.asarray((need[~makes] > self.free[self._rows[left.job]]).any(axis=1))
        _, nexts = np.unique(left.job, return_index=True)
        stopped: Ints = left.job[nexts[lacking[nexts]]]
        left = left.some(~np.isin(left.job, stopped))
        self._planned = left.some(np.argsort(left.job, kind="stable"))
        return stopped

    def _best(self, jobs: Ints, now: Ints) -> tuple[Floats, Ints]:
        """Score and size of the best step with room of each of K jobs, shape (K,); -inf where there is none."""
        surfaces, rows, which = self._surfaces, self._rows[jobs], self._which[jobs]
        weights = self._weights if len(self._weights) == 1 else self._weights[rows]
        scores = score(weights, look(surfaces, self._crowd, rows, self._jobs[jobs], now))
        possible = surfaces.there[which, now]
        left = self.free[rows] + surfaces.need[which, now]
        for resource in range(left.shape[1]):
            possible &= surfaces.need[which, :, resource] <= left[:, resource, None]
        if self._growing:
            possible &= (surfaces.sizes[which] >= surfaces.sizes[which, now][:, None]).all(axis=2)
        scores = np.where(possible, scores, -np.inf)
        to: Ints = scores.argmax(axis=1)
        return scores[np.arange(len(to)), to], to


def _sums(values: Ints | Bools, first: Ints) -> Ints:
    """Running sums along the first axis that start anew where ``first``, the start of each one's part, says."""
    sums: Ints = values.cumsum(axis=0, dtype=np.int64)
    before: Ints = np.concatenate([np.zeros_like(sums[:1]), sums])[first]
    return sums - before
