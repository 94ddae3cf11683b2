"""Samples for actor-critic learning from slots in which a version of the policy decided on a real cluster.

The actions are those that the version took, recorded with its decision. The reward of a job is that of simulated
clusters (``dl2d.learning.dl2_paper.rollout.rewards_of``) with ``Reward.LOG_EPOCHS``, computed from the epochs that the
job reported at the beginning of a slot and of the next one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dl2d.core.array_types import Bools
from dl2d.core.jobs import JobKey
from dl2d.learning.dl2_paper.demonstrations import steps_of
from dl2d.learning.dl2_paper.rollout import log_reward
from dl2d.learning.dl2_paper.samples import Samples
from dl2d.learning.dl2_paper.settings import Labels
from dl2d.learning.site_records.recorded_days import DAY_SECONDS
from dl2d.learning.site_records.recorded_decisions import Recording
from dl2d.policies.dl2_paper.exploration import correcting_actions, explored
from dl2d.policies.dl2_paper.observation import ObservationEncoding, Observations
from dl2d.policies.dl2_paper.policy import Dl2PaperPolicy

#: Two decisions that are closer than this fraction of a slot show too little progress to tell a rate.
_MIN_SLOT_FRACTION = 0.25
#: Below this an update could not tell more rewarding actions from others.
_MIN_SAMPLES = 2


@dataclass(frozen=True, slots=True)
class LiveSlot:
    """A slot that a version of the policy decided, as it was carried out, and the version."""

    recording: Recording
    version: Dl2PaperPolicy


def live_samples(slots: Sequence[LiveSlot], encoding: ObservationEncoding, rng: np.random.Generator) -> Samples | None:
    """Samples of the slots, oldest first; None where there are fewer than two.

    A slot counts if the next one begins at least a quarter of a slot and less than a day later, and a job's reward if
    the job is in both.
    Slots of versions that were shown a snapshot in other batches than ``encoding``, or took other steps, are left out.

    Parameters
    ----------
    slots
        In the order of their times. Slots that the fallback decided, or whose decision the guard changed, do not belong
        among them: their sizes are not what the version's actions led to.
    encoding
        How the network that learns sees a snapshot.
    """
    found: list[Samples] = []
    for slot, after in itertools.pairwise(slots):
        snapshot = slot.recording.snapshot
        seconds = after.recording.snapshot.at - snapshot.at
        own = slot.version.encoding
        alike = (own.window, own.first_bundles, own.fixed_sizes) == (
            encoding.window, encoding.first_bundles, encoding.fixed_sizes
        )  # fmt: skip
        # Where a day lies between, it was left out: what jobs did on it is not to be learned.
        if not alike or not _MIN_SLOT_FRACTION * encoding.slot_seconds <= seconds < DAY_SECONDS:
            continue
        later = {job.key: job.progress.epoch for job in after.recording.snapshot.jobs}
        rewards: dict[JobKey, float] = {}
        for job in snapshot.jobs:
            epochs = (later.get(job.key, math.nan) - job.progress.epoch) * encoding.slot_seconds / seconds
            if math.isfinite(epochs) and epochs >= 0.0:
                rewards[job.key] = float(log_reward(np.array(epochs)))
        found += _slot_samples(slot, encoding, rewards, rng)
    return Samples.joined(found) if len(found) >= _MIN_SAMPLES else None


def _slot_samples(
    slot: LiveSlot, encoding: ObservationEncoding, rewards: dict[JobKey, float], rng: np.random.Generator
) -> list[Samples]:
    """Samples of one slot, one for each action where there was a choice."""
    jobs, window = slot.recording.snapshot.jobs, encoding.window
    seeds = rng.integers(2**32, size=1).tolist()
    # The same walk through the slot, once as the learning network sees it and once as the version saw it.
    walks = [
        steps_of(
            slot.recording, seen, Labels.STEPS, 1.0, np.random.default_rng(seeds), exploration=slot.version.exploration
        )
        for seen in (encoding, slot.version.encoding)
    ]
    samples = []
    for step, own in zip(*walks, strict=True):
        batch = jobs[step.batch * window : (step.batch + 1) * window]
        made = Samples.zeros(1, len(step.observation), window * 3 + 1, window)
        made.observations[0], made.masks[0], made.actions[0] = step.observation, step.mask, step.action
        made.log_chances[0] = math.log(_probability(slot.version, own.observation, own.mask, own.action))
        for place, job in enumerate(batch):
            if job.key in rewards:
                made.targets[0, place], made.valid[0, place] = rewards[job.key], True
        # An action is credited with the reward of its job; void with the mean over the batch.
        chosen_place = step.action // 3
        if made.valid[0, chosen_place] if step.action != encoding.void else made.valid.any():
            samples.append(made)
    return samples


def _probability(version: Dl2PaperPolicy, observation: Observations, mask: Bools, action: int) -> float:
    """Probability with which the version takes an action: that of its network's distribution, with its exploration."""
    logits = np.where(mask, version.network(observation[None])[0].astype(float), -np.inf)
    chances = np.exp(logits - logits.max())
    chances /= chances.sum()
    corrections = correcting_actions(version.encoding.layout.sizes_in(observation[None]), mask[None])
    epsilon = version.exploration
    _, probability = explored(np.array([action]), chances[None], corrections, epsilon, np.ones(1))
    return max(float(probability[0]), 1e-6)
