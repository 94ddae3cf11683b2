from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulation.drawn import drawn
from simulation.two_jobs import two_jobs

from dl2d.core.errors import TooFewSamples
from dl2d.learning.dl2_paper.rollout import SampleCollector, rewards_of
from dl2d.learning.dl2_paper.settings import Credit, Reward, Settings
from dl2d.policies.dl2_paper.exploration import correcting_actions, explored
from dl2d.simulation.vectorized.clusters import Clusters, SlotReport
from dl2d.simulation.vectorized.workload_arrays import Library

#: Bundles of (4, 4) on two nodes of (8, 8). One epoch of 4 a slot with one worker, 2 with two, whatever the PSs.
WINDOW = 2
PLAIN = Settings(
    window=WINDOW, clusters=3, samples=2, minibatch=2, kept=1.0, epsilon=0.0, reward=Reward.PROGRESS, first_bundles=True
)


class Fixed:
    """Answers the same whatever it is shown."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = np.array(numbers, dtype=np.float32)

    def __call__(self, observations: Any) -> Any:
        return np.tile(self._numbers, (len(observations), 1))


#: A worker for the first job for certain while it may have one, then void.
ONE_MORE = Fixed(90, 0, 0, 0, 0, 0, 45)
NOBODY = Fixed(0, 0)


def collected(settings: Settings, value: Fixed = NOBODY, *, count: int = 60) -> Any:
    return SampleCollector(Library.of([two_jobs()]), settings, [7]).collect(ONE_MORE, value, count)


def test_an_action_is_rewarded_with_what_each_job_did_in_its_slot() -> None:
    samples = collected(PLAIN)
    assert set(samples.actions.tolist()) == {0, 6}
    # The first job does 2 of 4 epochs a slot and ends after two; the second 1 of 4, and goes on alone.
    both = samples.valid.all(axis=1)
    assert both.any()
    assert samples.targets[both].tolist() == [[0.5, 0.25]] * int(both.sum())
    assert samples.log_chances == pytest.approx(0.0, abs=1e-5)


def test_the_slots_reward_is_the_sum_over_jobs() -> None:
    samples = collected(replace(PLAIN, credit=Credit.SLOT), Fixed(0))
    assert set(samples.targets[:, 0].round(6).tolist()) <= {0.75, 0.5, 0.25}
    assert samples.targets.shape[1] == 1


def test_a_discount_looks_at_what_the_next_slot_is_worth_and_at_nothing_after_the_end() -> None:
    samples = collected(replace(PLAIN, gamma=0.5), Fixed(3, 5))
    # In the first of two slots both go on, at 3 and 5 in their columns; in the second the first job ends.
    both = {tuple(row) for row in samples.targets[samples.valid.all(axis=1)].round(6).tolist()}
    # When it is alone, the second job is in the first column: worth 3.
    assert both == {(0.5 + 0.5 * 3, 0.25 + 0.5 * 5), (0.5, 0.25 + 0.5 * 3)}
    slots = collected(replace(PLAIN, gamma=0.5, credit=Credit.SLOT), Fixed(3))
    # Alone, the second job has two workers: it does half of its epochs, and ends.
    assert {round(float(row), 6) for row in slots.targets[:, 0]} == {0.75 + 1.5, 0.5}


def test_it_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    library = Library.of([drawn(seed) for seed in range(3)])
    settings = replace(PLAIN, window=5, clusters=8, epsilon=0.3, kept=0.5)
    even = Fixed(*[0.0] * 16)
    first, again, other = (
        SampleCollector(library, settings, [seed]).collect(even, Fixed(*[0.0] * 5), 300) for seed in (1, 1, 2)
    )
    assert (first.observations == again.observations).all()
    assert (first.actions == again.actions).all()
    assert len(first) != len(other) or (first.actions != other.actions).any()


def test_an_all_reduce_job_is_never_given_a_ps() -> None:
    workload = drawn(0)
    ring = [job for job in workload.jobs if job.model == "ring"]
    assert ring, "the workload has all-reduce jobs"
    only = replace(workload, jobs=tuple(ring))
    settings = replace(PLAIN, window=3, clusters=4, epsilon=0.5)
    samples = SampleCollector(Library.of([only]), settings, [0]).collect(Fixed(*[0.0] * 10), Fixed(0, 0, 0), 100)
    assert not samples.masks[:, [1, 2, 4, 5, 7, 8]].any()
    assert set(samples.actions.tolist()) <= {0, 3, 6, 9}


def test_clusters_without_decisions_are_told_of() -> None:
    full = two_jobs(max_workers=1, max_ps=1)
    with pytest.raises(TooFewSamples, match="decisions gave only 0 of the 2 samples to learn from"):
        SampleCollector(Library.of([full]), PLAIN, [0]).collect(ONE_MORE, NOBODY, 2)


def a_report(*rates: float) -> SlotReport:
    clusters = Clusters(Library.of([two_jobs()]), 1)
    clusters.reset(np.array([0]), np.array([0]), [np.random.default_rng(0)])
    clusters.fill(np.array([[[2, 1], [1, 1]]]), np.zeros(1, dtype=np.int64))
    report = clusters.end_slot(np.array([0]))
    shares = np.array([rates])
    return replace(report, epochs=shares * 4, rate=shares, progress=shares / 2)


@pytest.mark.parametrize(
    ("reward", "want"),
    [
        (Reward.PROGRESS, [0.25, 0.0]),
        (Reward.LOG_RATE, [np.log(0.501), np.log(0.001)]),
        # Of four epochs.
        (Reward.LOG_EPOCHS, [np.log(2.001), np.log(0.001)]),
    ],
)
def test_rewards_by_hand(reward: Reward, want: list[float]) -> None:
    report = a_report(0.5, 0.0)
    assert rewards_of(report, Settings(reward=reward))[0] == pytest.approx(want)


def correction(*jobs: tuple[int, int], forbidden: tuple[int, ...] = ()) -> int:
    mask = np.ones((1, 3 * len(jobs) + 1), dtype=np.int8)
    mask[0, list(forbidden)] = 0
    return int(correcting_actions(np.array([jobs]), mask)[0])


@pytest.mark.parametrize(
    ("jobs", "action"),
    [
        pytest.param([(0, 0), (1, 1), (10, 1)], -1, id="nothing is poor: ten times as many is not more than ten times"),
        pytest.param([(1, 0), (0, 1)], -1, id="one task alone is not several"),
        pytest.param([(1, 1), (2, 0)], 4, id="workers and no PS"),
        pytest.param([(0, 2), (2, 0)], 0, id="PSs and no worker; the first job counts"),
        pytest.param([(1, 11)], 0, id="eleven times as many PSs"),
        pytest.param([(0, 0), (11, 1)], 4, id="eleven times as many workers"),
    ],
)
def test_poor_states_of_the_paper(jobs: list[tuple[int, int]], action: int) -> None:
    assert correction(*jobs) == action


def test_a_poor_state_without_an_allowed_action_is_passed_over() -> None:
    """So an all-reduce job, which can have no PS, is never poor."""
    assert correction((5, 0), (0, 3), forbidden=(1, 2)) == 3
    assert correction((5, 0), forbidden=(1, 2)) == -1


def test_actions_are_drawn_from_the_mixture_that_is_told() -> None:
    count = 20_000
    rng = np.random.default_rng(0)
    chances = np.tile([0.1, 0.3, 0.0, 0.6], (count, 1))
    actions = rng.choice(4, count, p=chances[0])
    poor = np.ones(count, dtype=np.int64)
    taken, probability = explored(actions, chances, poor, 0.25, rng.random(count))
    assert np.bincount(taken, minlength=4) / count == pytest.approx([0.075, 0.475, 0.0, 0.45], abs=0.015)
    assert sorted(set(probability.round(9))) == [0.075, 0.45, 0.475]
    fine = np.full(count, -1)
    taken, probability = explored(actions, chances, fine, 0.25, rng.random(count))
    assert (taken == actions).all()
    assert probability == pytest.approx(chances[0][actions])
