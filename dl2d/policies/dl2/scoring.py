"""Scores of size steps: dimensionless features of a step, and a linear function or small network over them.

A step leads one job from a size on its Pareto frontier to a faster one. Its score is the same function of its features
for all jobs, so that one set of weights fits any jobs and any cluster. Everything here works on the jobs of N clusters
at once, each cluster with weights of its own: the policy has one, its trainer hundreds.

Arrays of steps have shape (K, C): from the current size of each of K jobs to all C positions on its frontier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dl2d.core.array_types import Bools, Floats, Ints
from dl2d.policies.dl2.pareto_frontier import FrontierArrays

#: The 15 features of a step. Each is the product of a factor of the size that the step leads to and a factor of the job
#: and its cluster, either of which may be 1.
#:
#: Factors of the size, with times in slots and natural logarithms:
#:
#: - cost: log of the dominant share that the step takes
#: - gain: logarithm of the logarithmic speed-up, ln(ln(new speed / old speed))
#: - left: log of the slots until the job ends at the new size
#: - left_beyond_slot: the same, at least 0
#: - speed: log of the new speed over the job's best speed
#:
#: Factors of the job and its cluster:
#:
#: - start: 1 where the job has no tasks, otherwise 0
#: - relative: log of the slots until the job ends at its best size, less the mean of this over all jobs
#: - load: log of the sum of the dominant shares of all jobs at their best sizes
#: - start_load, start_relative, relative_load: products of two of these
#:
#: Without hidden units, "load" alone adds the same to all steps in a cluster, so its weight changes no choice.
#: The order is part of the format of checkpoints: weights are stored in it.
_PRODUCTS = {
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
FEATURES = tuple(_PRODUCTS)
_COUNT = len(FEATURES)
#: Lower limit on the factor "left": jobs that end within about a thousandth of a slot count alike.
_MIN_LEFT = -7.0
#: Added to the sum of dominant shares before its logarithm is taken, so that "load" is finite in an empty cluster.
_LOAD_OFFSET = 1e-3
#: Added to the slots until a job ends at its best size before their logarithm is taken, so that a job that has almost
#: ended changes the mean of "relative" little.
_SLOTS_OFFSET = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class ClusterJobs:
    """Jobs of N clusters, at most J in each, with the features of each job."""

    #: Frontier of each job, as an index in ``FrontierArrays``, shape (N, J).
    frontier: Ints
    #: Whether each job takes part, shape (N, J); the others are padding, or keep what they have.
    takes_part: Bools
    #: log(samples left / seconds of a slot), shape (N, J).
    log_work: Floats
    #: Log of the sum of the dominant shares of all jobs at their fastest sizes, shape (N,).
    load: Floats
    #: Log of the slots until a job ends at its fastest size, less the mean over all jobs, shape (N, J).
    relative: Floats

    @classmethod
    def of(
        cls, frontiers: FrontierArrays, frontier: Ints, takes_part: Bools, samples: Floats, slot_seconds: Floats
    ) -> ClusterJobs:
        """Compute the features from the samples that are left, (N, J), and the length of each cluster's slots, (N,)."""
        with np.errstate(divide="ignore"):
            log_work = np.log(np.where(takes_part, samples, 1.0) / slot_seconds[:, None])
        share = np.where(takes_part, frontiers.best_share[frontier], 0.0)
        load = np.log(share.sum(axis=1) + _LOAD_OFFSET)
        log_slots = np.logaddexp(log_work - frontiers.log_best_speed[frontier], np.log(_SLOTS_OFFSET))
        log_slots = np.where(takes_part, log_slots, 0.0)
        mean = log_slots.sum(axis=1) / np.maximum(takes_part.sum(axis=1), 1)
        return cls(frontier, takes_part, log_work, load, log_slots - mean[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class StepFactors:
    """Factors of the features of all steps of K jobs from their current sizes, by name."""

    #: Factors of the size that a step leads to, shape (K, C).
    of_size: dict[str, Floats]
    #: Factors of the job and its cluster, shape (K, 1).
    of_job: dict[str, Floats]


def describe_steps(
    frontiers: FrontierArrays, cluster_jobs: ClusterJobs, clusters: Ints, jobs: Ints, positions: Ints
) -> StepFactors:
    """Compute the factors of all steps of K jobs.

    Parameters
    ----------
    clusters, jobs
        Indices of the jobs in ``cluster_jobs``, each of shape (K,).
    positions
        Current size of each job, as its position on the frontier, shape (K,).
    """
    frontier = cluster_jobs.frontier[clusters, jobs]
    log_speed = frontiers.log_speed[frontier]
    log_slots = cluster_jobs.log_work[clusters, jobs][:, None] - log_speed
    of_size = {
        "cost": frontiers.cost[frontier, positions],
        "gain": frontiers.gain[frontier, positions],
        "left": np.maximum(log_slots, _MIN_LEFT),
        "left_beyond_slot": np.maximum(log_slots, 0.0),
        "speed": log_speed - frontiers.log_best_speed[frontier][:, None],
    }
    start = (frontiers.from_nothing[frontier] * (positions == 0))[:, None]
    load, relative = cluster_jobs.load[clusters][:, None], cluster_jobs.relative[clusters, jobs][:, None]
    of_job = {
        "1": np.ones_like(load), "start": start, "load": load, "relative": relative,
        "start_load": start * load, "start_relative": start * relative, "relative_load": relative * load,
    }  # fmt: skip
    return StepFactors(of_size, of_job)


def feature_values(steps: StepFactors) -> Floats:
    """Values of the features of all steps, shape (K, C, features)."""
    size_factors = {**steps.of_size, "1": np.ones_like(steps.of_size["cost"])}
    return np.stack([size_factors[size] * steps.of_job[job] for size, job in _PRODUCTS.values()], axis=2)


def weight_count(hidden: int) -> int:
    """Number of weights: those of the linear function, and for each hidden unit its inputs, its bias and its output."""
    return _COUNT + hidden * (_COUNT + 2)


def initial_weights(hidden: int, rng: np.random.Generator) -> Floats:
    """Weights to begin a search with, shape (weights,): they prefer starts, and large time savings per resource.

    Hidden units have random inputs, and outputs of weight 0.
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
    for first in range(_COUNT, weights.shape[1], _COUNT + 2):
        activation = _linear(weights, steps, first) + weights[:, first + _COUNT, None]
        total += weights[:, first + _COUNT + 1, None] * np.tanh(activation)
    return total


def _linear(weights: Floats, steps: StepFactors, first: int) -> Floats:
    """Linear function of the features, whose weights begin at index ``first``; shape (K, C).

    Terms are added one after the other, so that results do not depend on how many jobs are scored at once. Weights are
    multiplied with factors of the job first, which are fewer.
    """
    coefficients = _coefficients(weights, steps.of_job, first)
    constant = coefficients.pop("1")
    (first_size, first_coefficient), *remaining = coefficients.items()
    total = first_coefficient * steps.of_size[first_size]
    for size, coefficient in remaining:
        total += coefficient * steps.of_size[size]
    total += constant
    return total


def _coefficients(weights: Floats, of_job: dict[str, Floats], first: int) -> dict[str, Floats]:
    """Coefficient of each factor of the new size, and the constant ("1"), for each job; each of shape (K, 1)."""
    sums: dict[str, Floats] = {}
    for index, (size, job) in enumerate(_PRODUCTS.values(), start=first):
        term = weights[:, index, None] * of_job[job]
        sums[size] = sums[size] + term if size in sums else term
    return sums
