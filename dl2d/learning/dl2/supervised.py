"""Supervised learning of policy dl2: weights with which size steps towards the sizes of recorded slots score highest.

A recorded slot tells which size each job got, not by which steps. From the bases of all jobs on, the steps that lead a
job to its recorded size, or to a size with no more workers and no more PSs, are the right ones. The one of them that
scores highest is made, until there is none. The loss of a state is the negative logarithm of the softmax over all
possible steps of all jobs, summed over the right ones (the Plackett-Luce model of a ranking, with the order of the
right ones unknown). Which states are visited depends on the weights, so they are collected and fitted to several times
(Ross, Gordon, Bagnell, "A reduction of imitation learning and structured prediction to no-regret online learning",
2011).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from msgspec import structs
from scipy.optimize import minimize

from dl2d.core.array_types import Bools, Floats, Ints
from dl2d.core.errors import TooFewSamples
from dl2d.core.jobs import NOTHING
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds
from dl2d.core.progress_callback import Count, Tell, silent
from dl2d.learning.site_records.recorded_decisions import (
    MIN_JOBS,
    Recording,
    SizeComparison,
    Yardstick,
    compare_sizes,
    simple_yardstick,
    sizes_of,
    split_recordings,
)
from dl2d.policies.common.checkpoint import Checkpoint
from dl2d.policies.common.training_input_ranges import INPUT_RANGES, recorded_ranges
from dl2d.policies.dl2.checkpoint_contents import as_arrays, from_arrays
from dl2d.policies.dl2.policy import Dl2
from dl2d.policies.dl2.scoring import FEATURES, describe_steps, feature_values, score
from dl2d.throughput.training_data import as_measured, by_kind, merged_kinds

#: Maximum number of possible steps, over all states, that are learned from, and that decide when learning stops.
_MAX_STEPS, _MAX_STOPPING_STEPS = 1_000_000, 250_000
#: Iterations without a lower loss on held-out states after which learning stops.
_ITERATIONS_WITHOUT_GAIN = 10
_MAX_ITERATIONS = 200
#: Times that states are collected and fitted to.
_ROUNDS = 3
#: Maximum number of states of a slot that are kept.
_MAX_STATES_OF_SLOT = 8
#: Factors of the weights that learning begins with, of which the best is taken. The order of scores, and so all
#: decisions, are the same with each; the softmax is not.
_SCALES = tuple(2.0**power for power in range(-4, 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerImitation:
    """Result of the imitation of a recorded scheduler."""

    #: With the fitted weights, and with those that learning began with; both have the store's measured speeds.
    fitted: Checkpoint
    begun_with: Checkpoint
    #: Loss on the training states by iteration.
    losses: tuple[float, ...]
    #: States that were learned from, and the fraction of held-out states in which a right step has the highest score.
    #: No states: every job always had the only size that it could have, so the fitted weights are those begun with.
    states: int
    agreement: float
    comparison: SizeComparison
    comparison_begun_with: SizeComparison
    yardstick: Yardstick


def imitate_with_scorer(
    recordings: Sequence[Recording],
    start: Checkpoint,
    measured: Sequence[MeasuredSpeeds],
    *,
    slot_seconds: float,
    seed: int,
    min_jobs: int = MIN_JOBS,
    tell: Tell = silent,
) -> ScorerImitation:
    """Fit the scorer's weights to slots that a daemon recorded, oldest first.

    The weights are compared on held-out slots, and the loss on others decides when learning stops
    (``split_recordings``). Learning begins with the weights of ``start``; speeds in ``measured`` are added to its own.

    Raises
    ------
    TooFewSamples
        The slots have too few jobs, or no job was given anything in them.
    CheckpointError
        ``start`` is of another design.
    """
    split = split_recordings(recordings, min_jobs)
    arrays, kinds = as_arrays(
        as_measured(merged_kinds(by_kind(from_arrays(start.weights, start.settings["kinds"])), by_kind(measured)))
    )
    begun_with = replace(
        start,
        weights={"scorer": start.weights["scorer"], **arrays},
        settings={**start.settings, "kinds": kinds, "slot_seconds": slot_seconds},
    )
    policy = Dl2(begun_with)
    rng = np.random.default_rng([seed, 2])
    weights, losses, shown, stopping = np.asarray(start.weights["scorer"], float), [], _NONE, _NONE
    for number in range(_ROUNDS):
        note = f"round {number + 1} of {_ROUNDS}"
        gone_through = partial(tell, "recorded slots gone through", note=note)
        shown = shown.and_more(_states_of(policy, weights, split.training, rng, _MAX_STEPS // _ROUNDS, gone_through))
        held_out = (_states_of(policy, weights, unseen, rng, _MAX_STOPPING_STEPS // _ROUNDS, gone_through)
                    for unseen in (split.stopping, split.training))  # fmt: skip
        stopping = stopping.and_more(next((each for each in held_out if len(each)), _NONE))
        if not len(shown) or not len(stopping):
            if not any(size != NOTHING for each in recordings for size in each.decision.allocations().values()):
                raise TooFewSamples("imitation: no job was given anything in the recorded slots: nothing to learn from")
            shown = _NONE
            break
        weights, losses_of_round = _fit(weights, shown, stopping, partial(tell, "learning", note=note))
        losses += losses_of_round
    agreement = stopping.agreement(weights) if len(stopping) else 1.0
    record = {
        "slots": len(split.training), "jobs": split.jobs, "states": len(shown), "losses": losses,
        "policies": sorted({recording.decision.policy for recording in recordings}),
    }  # fmt: skip
    fitted = replace(begun_with, weights={**begun_with.weights, "scorer": weights})
    comparisons = [
        compare_sizes(
            sizes_of(Dl2(each), seed), split.compared,
            partial(tell, "held-out slots compared"),
        )
        for each in (fitted, begun_with)
    ]  # fmt: skip
    yardstick = simple_yardstick(split, seed)
    record |= {"held_out": asdict(comparisons[0]), "held_out_begun_with": asdict(comparisons[1]),
               "agreement": agreement, "yardstick": asdict(yardstick)}  # fmt: skip
    training = {"supervised": record, "seed": seed, "parent": start.digest}
    fitted_to = {INPUT_RANGES: recorded_ranges(each.snapshot for each in split.training)}
    kept = {INPUT_RANGES: start.training[INPUT_RANGES]} if INPUT_RANGES in start.training else {}
    return ScorerImitation(
        fitted=replace(fitted, training=training | fitted_to),
        begun_with=replace(begun_with, training=training | kept),
        losses=tuple(losses), states=len(shown), agreement=agreement, comparison=comparisons[0],
        comparison_begun_with=comparisons[1], yardstick=yardstick,
    )  # fmt: skip


class _States(NamedTuple):
    """Possible steps of M states, those of one state after those of the other."""

    #: Shape (steps, features).
    features: Floats
    #: Whether each step is a right one, shape (steps,).
    right: Bools
    #: Index of the first step of each state, shape (M,).
    begin: Ints

    def __len__(self) -> int:
        return len(self.begin)

    def and_more(self, states: _States) -> _States:
        """Both these states and others."""
        if not len(self):
            return states
        begin = np.concatenate([self.begin, states.begin + len(self.right)])
        features = np.concatenate([self.features, states.features])
        return _States(features, np.concatenate([self.right, states.right]), begin)

    def loss(self, weights: Floats) -> tuple[float, Floats]:
        """Mean loss of the states, and its gradient."""
        scores = self.features @ weights
        every, log_every = self._softmax(scores)
        right, log_right = self._softmax(np.where(self.right, scores, -np.inf))
        gradient: Floats = (every - right) @ self.features / len(self)
        return float((log_every - log_right).mean()), gradient

    def agreement(self, weights: Floats) -> float:
        """Fraction of the states in which a right step has the highest score."""
        scores = self.features @ weights
        highest = np.maximum.reduceat(scores, self.begin)
        right = np.maximum.reduceat(np.where(self.right, scores, -np.inf), self.begin)
        return float((right == highest).mean())

    def _softmax(self, scores: Floats) -> tuple[Floats, Floats]:
        """Softmax within each state, shape (steps,), and the logarithm of its denominator, shape (M,)."""
        counts = np.diff(self.begin, append=len(scores))
        highest = np.maximum.reduceat(scores, self.begin)
        powers = np.exp(scores - np.repeat(highest, counts))
        sums = np.add.reduceat(powers, self.begin)
        return powers / np.repeat(sums, counts), np.log(sums) + highest


_NONE = _States(np.zeros((0, len(FEATURES))), np.zeros(0, bool), np.zeros(0, int))


def _states_of(
    policy: Dl2, weights: Floats, recordings: Sequence[Recording], rng: np.random.Generator, max_steps: int,
    progress: Count,
) -> _States:  # fmt: skip
    """States of recorded slots, drawn at random until they have ``max_steps`` steps together.

    ``progress`` is told how many of how many slots were gone through; it may be told of fewer.
    """
    kept: list[tuple[Floats, Bools]] = []
    total = 0
    for done, index in enumerate(rng.permutation(len(recordings)).tolist()):
        progress(done, len(recordings))
        states = list(_states_in(policy, weights, recordings[index]))
        chosen = rng.permutation(len(states))[:_MAX_STATES_OF_SLOT].tolist()
        kept += [states[number] for number in chosen]
        total += sum(len(states[number][1]) for number in chosen)
        if total >= max_steps:
            break
    if not kept:
        return _NONE
    begin = np.cumsum([0, *(len(right) for _, right in kept[:-1])])
    return _States(
        np.concatenate([features for features, _ in kept]), np.concatenate([right for _, right in kept]), begin
    )


def _states_in(policy: Dl2, weights: Floats, recording: Recording) -> Iterator[tuple[Floats, Bools]]:
    """Features of the possible steps of each state on the way to the recorded sizes, and which steps are right.

    States in which all possible steps are right are left out.
    """
    snapshot = structs.replace(recording.snapshot, speeds=(), job_speeds=())  # the checkpoint has all of them
    options = policy.size_options(snapshot, recording.packing())
    if options is None:
        return
    jobs, frontiers, cluster_jobs, free = options
    frontier_of, everyone = cluster_jobs.frontier[0], np.arange(len(jobs))
    recorded = recording.decision.allocations()
    wanted = np.array([recorded.get(job.key, NOTHING) for job in jobs], int)
    sizes, is_size = frontiers.sizes[frontier_of], frontiers.is_step[frontier_of, 0]
    distances = np.abs(np.log1p(sizes) - np.log1p(wanted)[:, None]).sum(axis=2)
    targets = np.where(is_size, distances, np.inf).argmin(axis=1)
    towards = (sizes <= wanted[:, None]).all(axis=2)
    towards[everyone, targets] = True
    towards &= is_size & (wanted.sum(axis=1) > 0)[:, None]
    positions, left = np.zeros(len(jobs), int), free[0].copy()
    while True:
        need = frontiers.need[frontier_of] - frontiers.need[frontier_of, positions][:, None]
        possible = frontiers.is_step[frontier_of, positions] & (need <= left).all(axis=2)
        right = possible & towards & (positions != targets)[:, None]
        if not right.any():
            return
        steps = describe_steps(frontiers, cluster_jobs, np.zeros_like(everyone), everyone, positions)
        if not right[possible].all():
            yield feature_values(steps)[possible], right[possible]
        scores = np.where(right, score(weights[None], steps), -np.inf)
        job, position = np.unravel_index(int(scores.argmax()), scores.shape)
        left -= need[job, position]
        positions[job] = position


class _Stop(Exception):
    """Learning ends here."""


def _fit(start: Floats, shown: _States, stopping: _States, progress: Count) -> tuple[Floats, list[float]]:
    """Minimise the loss by L-BFGS; returns the weights with the lowest loss on held-out states, and the losses.

    ``progress`` is told how many of how many iterations are over.
    """
    scale = min(_SCALES, key=lambda factor: shown.loss(factor * start)[0])
    best, lowest, without_gain = scale * start, stopping.loss(scale * start)[0], 0
    losses = [shown.loss(best)[0]]

    def look(weights: Floats) -> None:
        nonlocal best, lowest, without_gain
        loss = stopping.loss(weights)[0]
        losses.append(shown.loss(weights)[0])
        progress(len(losses) - 1, _MAX_ITERATIONS)
        without_gain += 1
        if loss < lowest:
            best, lowest, without_gain = weights.copy(), loss, 0
        if without_gain >= _ITERATIONS_WITHOUT_GAIN:
            raise _Stop

    with contextlib.suppress(_Stop):
        minimize(shown.loss, best, jac=True, method="L-BFGS-B", callback=look, options={"maxiter": _MAX_ITERATIONS})
    return best, losses
