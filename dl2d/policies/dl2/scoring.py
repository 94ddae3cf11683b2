"""Scores of size steps: dimensionless features of a step, and a linear function or small network over them.

A step enlarges one job from a size on its Pareto frontier to another. Its score is the same function of its features
for all jobs, so that one set of weights fits any jobs and any cluster. Everything here works on the jobs of N clusters
at once, each cluster with weights of its own: the policy has one, its trainer hundreds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dl2d.policies.dl2.pareto_frontier import ParetoFrontiers

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: Features of a step, each a product of two factors: one of the size that the step leads to (or 1), and one of the job
#: and its cluster (or 1). Times are in slots, amounts are shares of the whole cluster, logarithms are natural.
#:
#: - cost: log of the dominant share that the step takes; gain: log of the log of the speed-up
#: - left: log of the slots left at the new size; left_beyond_slot: its part above 0
#: - speed: log of the new speed over the best one
#: - start: 1 where the job has nothing; relative: log of the slots left at the best size, less the mean over all jobs
#: - load: log of the dominant share that all jobs would take at their best sizes
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
#: Least part of its declared work that a job counts as having left, since it may have declared too little.
MIN_WORK_LEFT: Final = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class ClusterJobs:
    """Jobs of N clusters, at most J in each; those that are not ``present`` are left out."""

    #: Frontier of each job, as its place in ``ParetoFrontiers``, and which jobs count; shape (N, J).
    frontier: Ints
    present: Bools
    #: Log of samples that are left, over the seconds of a slot, shape (N, J).
    log_left: Floats
    #: Log of the dominant share that all jobs would take at their fastest sizes, shape (N,).
    load: Floats
    #: Log of a job's remaining slots at its fastest size, less the mean of all jobs, shape (N, J).
    relative: Floats

    @classmethod
    def of(
        cls, frontiers: ParetoFrontiers, frontier: Ints, present: Bools, samples: Floats, slot_seconds: Floats
    ) -> ClusterJobs:
        """From the samples that are left, shape (N, J), and the length of each cluster's slots, shape (N,)."""
        with np.errstate(divide="ignore"):
            log_left = np.log(np.where(present, samples, 1.0) / slot_seconds[:, None])
        share = np.where(present, frontiers.best_share[frontier], 0.0)
        load = np.log(share.sum(axis=1) + 1e-3)
        length = np.where(present, np.logaddexp(log_left - frontiers.log_best[frontier], np.log(1e-3)), 0.0)
        mean = length.sum(axis=1) / np.maximum(present.sum(axis=1), 1)
        return cls(frontier, present, log_left, load, length - mean[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class StepFactors:
    """Factors of the features of all steps of K jobs from their present sizes, by name."""

    #: Of the size that a step leads to, shape (K, C).
    of_size: dict[str, Floats]
    #: Of the job and its cluster, shape (K, 1).
    of_job: dict[str, Floats]

    def features(self) -> dict[str, Floats]:
        """All features by name; shape (K, C), or (K, 1) of those that are equal for all sizes."""
        return {
            name: self.of_job[job] * (self.of_size[size] if size != "1" else 1.0)
            for name, (size, job) in _PRODUCTS.items()
        }


def describe_steps(frontiers: ParetoFrontiers, crowd: ClusterJobs, rows: Ints, jobs: Ints, states: Ints) -> StepFactors:
    """Factors of all steps of K jobs (``rows``, ``jobs``) from their sizes ``states``, each of shape (K,)."""
    which = crowd.frontier[rows, jobs]
    of_size = {"cost": frontiers.cost[which, states], "gain": frontiers.gain[which, states]}
    start = frontiers.from_nothing[which] * (states == 0)
    return StepFactors(of_size | _of_new_size(frontiers, crowd, rows, jobs), _of_job(crowd, rows, jobs, start))


def _of_new_size(frontiers: ParetoFrontiers, crowd: ClusterJobs, rows: Ints, jobs: Ints) -> dict[str, Floats]:
    """Factors of the new size that do not depend on the present one; each of shape (K, C)."""
    which = crowd.frontier[rows, jobs]
    log_rate = frontiers.log_rate[which]
    log_slots = crowd.log_left[rows, jobs][:, None] - log_rate
    return {
        "left": np.maximum(log_slots, -7.0),
        "left_beyond_slot": np.maximum(log_slots, 0.0),
        "speed": log_rate - frontiers.log_best[which][:, None],
    }


def _of_job(crowd: ClusterJobs, rows: Ints, jobs: Ints, start: Floats) -> dict[str, Floats]:
    """Factors of the job, where ``start`` is 1 if it has nothing, and of its cluster; each of shape (K, 1)."""
    load, relative, start = crowd.load[rows][:, None], crowd.relative[rows, jobs][:, None], start[:, None]
    return {
        "1": np.ones_like(load), "start": start, "load": load, "relative": relative,
        "start_load": start * load, "start_relative": start * relative, "relative_load": relative * load,
    }  # fmt: skip


def weight_count(hidden: int) -> int:
    """Number of weights: those of the linear part, and for each hidden unit its inputs, a constant and its output."""
    return _COUNT + hidden * (_COUNT + 2)


def initial_weights(hidden: int, rng: np.random.Generator) -> Floats:
    """Weights to begin a search with, shape (weights,): most time saved for the resources, starts first.

    Hidden units have random inputs and no output yet.
    """
    weights = np.zeros(weight_count(hidden))
    weights[[FEATURES.index(name) for name in ("cost", "gain", "left", "start")]] = -1.0, 1.0, 1.0, 4.0
    units = weights[_COUNT:].reshape(hidden, _COUNT + 2)
    units[:, :-1] = rng.normal(0.0, 0.3, (hidden, _COUNT + 1))
    return weights


def score(weights: Floats, steps: StepFactors) -> Floats:
    """Scores of steps: a linear function of the features, plus hidden units (tanh) if there are weights for them.

    Parameters
    ----------
    weights
        Shape (K, weights) or (1, weights).

    Returns
    -------
    Shape (K, C).
    """
    total = _linear(weights, steps, 0)
    for at in range(_COUNT, weights.shape[1], _COUNT + 2):
        inside = _linear(weights, steps, at) + weights[:, at + _COUNT, None]
        total += weights[:, at + _COUNT + 1, None] * np.tanh(inside)
    return total


def _linear(weights: Floats, steps: StepFactors, at: int) -> Floats:
    """A linear function of the features, with the weights from ``at`` on; shape (K, C).

    Terms are added one after the other, so that results do not depend on how many jobs are scored at once. Weights are
    multiplied with factors of the job first, which are fewer.
    """
    sums = _summed(weights, steps.of_job, at)
    constant = sums.pop("1")
    (first, weight), *others = sums.items()
    total = weight * steps.of_size[first]
    for size, weight in others:
        total += weight * steps.of_size[size]
    total += constant
    return total


def _summed(weights: Floats, of_job: dict[str, Floats], at: int) -> dict[str, Floats]:
    """Coefficients of the factors of the new size, and the constant, for each job; each of shape (K, 1)."""
    sums: dict[str, Floats] = {}
    for number, (size, job) in enumerate(_PRODUCTS.values(), start=at):
        term = weights[:, number, None] * of_job[job]
        sums[size] = sums[size] + term if size in sums else term
    return sums
