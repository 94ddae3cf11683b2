"""Samples from slots that a version of the policy decided: its actions, how likely they were, and what jobs did."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from policies.dl2_paper.test_policy import MODELS, RESOURCES, a_checkpoint
from policies.snapshots import a_job, a_snapshot, ask, cluster

from dl2d.core.jobs import Job, Progress
from dl2d.learning.dl2_paper.samples_from_recorded_slots import LiveSlot, live_samples
from dl2d.learning.site_records.recorded_decisions import Recording
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.dl2_paper.exploration import drawn_size
from dl2d.policies.dl2_paper.observation import ObservationEncoding
from dl2d.policies.dl2_paper.policy import Dl2PaperPolicy

SLOT = 1200.0
SIGHT = ObservationEncoding(window=4, models=MODELS, resources=RESOURCES, first_bundles=True, slot_seconds=SLOT)


def version(**more: Any) -> Dl2PaperPolicy:
    return Dl2PaperPolicy(a_checkpoint(network="shared"), sampled=True, **more)


def job(number: int, epoch: float) -> Job:
    made = a_job(number, model="m0", epochs=8.0, max_workers=3, max_ps=2)
    return replace(made, progress=Progress(at=1.0, epoch=epoch))


def slot(policy: Dl2PaperPolicy, at: float, **epochs: float) -> LiveSlot:
    """A slot with jobs that have done so many epochs, as the policy decided it."""
    jobs = [job(int(name[1:]), epoch) for name, epoch in epochs.items()]
    snapshot = structs.replace(a_snapshot(jobs, cluster(3, cpu=16, gpu=8, memory=64)), at=at, slot=int(at))
    return LiveSlot(Recording(snapshot, ask(policy, snapshot), LoadBalance()), policy)


def test_rewards_are_the_rates_that_jobs_reported_and_those_that_left_have_none() -> None:
    policy = version()
    slots = [slot(policy, 0.0, j1=1.0, j2=0.0), slot(policy, SLOT / 2, j1=2.0), slot(policy, SLOT, j1=2.0)]
    samples = live_samples(slots, SIGHT, np.random.default_rng(0))
    assert samples is not None
    # One epoch in half a slot, nothing in the next half.
    fast, still = math.log(2.0 + 0.001), math.log(0.001)
    assert {round(float(value), 5) for value in samples.targets[samples.valid]} == {round(fast, 5), round(still, 5)}
    assert not samples.valid[:, 1].any()
    # Job 2 is gone in the second slot: an action that gave it a task cannot be judged.
    assert not np.isin(samples.actions, [3, 4, 5]).any()
    assert samples.masks[np.arange(len(samples)), samples.actions].all()


def test_probabilities_are_those_of_the_version_that_decided() -> None:
    """Of two jobs each could be given a task: the first step's probability, by the network's own softmax."""
    policy = version()
    first = slot(policy, 0.0, j1=0.0, j2=0.0)
    samples = live_samples([first, slot(policy, SLOT, j1=1.0, j2=1.0)], SIGHT, np.random.default_rng(0))
    assert samples is not None
    logits = policy.network(samples.observations[:1])[0].astype(float)
    chances = np.exp(np.where(samples.masks[0], logits, -np.inf))
    assert samples.log_chances[0] == pytest.approx(math.log(chances[samples.actions[0]] / chances.sum()), abs=1e-5)
    given = first.recording.decision.actions
    added = sum(sum(step) for _, step in given)
    assert added > len(first.recording.snapshot.jobs)


def test_exploration_is_part_of_the_probability_and_of_the_version() -> None:
    plain, exploring = version(), version(exploration=0.25)
    assert plain.version != exploring.version
    assert (plain.exploration, exploring.exploration) == (0.0, 0.25)


def test_sizes_that_were_drawn_are_no_samples() -> None:
    """The drawn size of job 1 in the first of these slots is all that it may have, so only job 2's actions count."""
    policy = version(exploration=0.5)
    drawn = {number: [drawn_size(job(number, 0.0), int(at * SLOT), 0.5) for at in range(40)] for number in (1, 2)}
    at = next(at for at, sizes in enumerate(zip(drawn[1], drawn[2], strict=True)) if sizes[0] and not sizes[1])
    slots = [slot(policy, (at + more) * SLOT, j1=1.0 + more, j2=1.0 + more) for more in (0, 1)]
    assert slots[0].recording.decision.jobs[0].allocation == drawn[1][at]
    samples = live_samples(slots, SIGHT, np.random.default_rng(0))
    assert samples is not None
    assert set((samples.actions // 3).tolist()) <= {1, SIGHT.window}
    assert not samples.masks[:, :3].any()


@pytest.mark.parametrize(
    "changed", [{"first_bundles": False}, {"window": 5}], ids=["another first step", "other batches"]
)
def test_slots_that_the_version_saw_otherwise_are_left_out(changed: dict[str, Any]) -> None:
    policy = version()
    slots = [slot(policy, 0.0, j1=0.0), slot(policy, SLOT, j1=1.0)]
    assert live_samples(slots, replace(SIGHT, **changed), np.random.default_rng(0)) is None


@pytest.mark.parametrize("seconds", [SLOT / 10, 86_400.0], ids=["too close", "a day was left out"])
def test_slots_that_do_not_follow_each_other_show_no_rate(seconds: float) -> None:
    policy = version()
    slots = [slot(policy, 0.0, j1=0.0), slot(policy, seconds, j1=1.0)]
    assert live_samples(slots, SIGHT, np.random.default_rng(0)) is None


@pytest.mark.parametrize("epoch", [math.nan, -1.0], ids=["no number", "a job that went back"])
def test_progress_that_makes_no_rate_gives_no_reward(epoch: float) -> None:
    policy = version()
    slots = [slot(policy, 0.0, j1=0.0), slot(policy, SLOT, j1=epoch)]
    assert live_samples(slots, SIGHT, np.random.default_rng(0)) is None
