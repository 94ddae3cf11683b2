from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from learning.dl2_paper.made_workloads import SMALL, TRAINING, VALIDATION, a_workload

from dl2d.core.errors import WorkloadError
from dl2d.learning.dl2_paper.actor_critic import ActorCritic
from dl2d.learning.dl2_paper.networks import begin, policy_network, value_network, weights_of
from dl2d.learning.dl2_paper.rollout import SampleCollector
from dl2d.learning.dl2_paper.samples import ReplayBuffer
from dl2d.learning.dl2_paper.settings import PAPER, Credit, NetworkKind, Reward, Settings, Surrogate
from dl2d.learning.dl2_paper.training_loop import Report, improve, train
from dl2d.policies.common.training_input_ranges import INPUT_RANGES
from dl2d.policies.dl2_paper.observation import ObservationEncoding
from dl2d.policies.dl2_paper.policy import Dl2PaperPolicy
from dl2d.simulation.vectorized.workload_arrays import Library


@pytest.mark.slow
def test_it_learns_which_tasks_pay() -> None:
    reports: list[Report] = []
    settings = replace(SMALL, iterations=30, samples=512, rate=3e-3, last_rate=1e-3, validate_every=10)
    checkpoint = train(TRAINING, VALIDATION, settings, seed=0, on_validation=reports.append)
    assert [report.phase for report in reports] == ["imitation", *["learning"] * 3]
    teacher = reports[0].score.best
    # DRF gives as many of both, with which 60 epochs take six slots; with four of one and one of the other 1.5.
    assert teacher == pytest.approx(6.0, abs=1.0)
    assert reports[-1].best < 2.0
    assert min(report.score.best for report in reports) == reports[-1].best
    assert checkpoint.training["history"][0]["phase"] == "imitation"
    Dl2PaperPolicy(checkpoint)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(SMALL, id="as it is"),
        pytest.param(replace(SMALL, network=NetworkKind.DENSE, teacher=""), id="dense network, no teacher"),
        pytest.param(replace(SMALL, federation=2), id="federation"),
        pytest.param(
            replace(PAPER, window=6, hidden=32, clusters=16, supervised_updates=10, iterations=4, samples=256,
                    minibatch=64, replay=512), id="the paper's text"),
        pytest.param(
            replace(SMALL, credit=Credit.SLOT, gamma=0.5, reward=Reward.PROGRESS, critic=False, epsilon=0.0,
                    surrogate=Surrogate.PLAIN), id="all else"),
    ],
)  # fmt: skip
def test_the_same_seed_gives_the_same_weights(settings: Settings) -> None:
    first, again = (train(TRAINING, VALIDATION, settings, seed=3) for _ in range(2))
    assert first.digest == again.digest
    assert first.training[INPUT_RANGES]["jobs"] == [1, max(len(workload.jobs) for workload in TRAINING)]
    assert train(TRAINING, VALIDATION, replace(settings, iterations=1), seed=4).digest != first.digest


def test_threads_and_switches_of_torch_are_left_as_they_were() -> None:
    was = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    train(TRAINING, VALIDATION, replace(SMALL, iterations=0, supervised_updates=1), seed=0)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == was


def test_it_can_be_stopped_early() -> None:
    reports: list[Report] = []
    train(TRAINING, VALIDATION, SMALL, seed=0, on_validation=reports.append, should_stop=lambda: True)
    assert [(report.phase, report.done) for report in reports] == [("imitation", 20), ("learning", 1)]


def test_a_federation_of_clusters_that_are_the_same_learns_as_one() -> None:
    """Whole rounds: two learners with the same workloads and seeds give the weights of one, to the last bit."""
    library = Library.of(TRAINING)
    encoding = ObservationEncoding(
        window=6, models=library.models, resources=library.resources, first_bundles=True, slot_seconds=100.0,
    )  # fmt: skip
    found = []
    for count in (1, 2):
        generator = torch.Generator().manual_seed(0)
        policy = policy_network(NetworkKind.DENSE, encoding.layout, 32)
        value = value_network(NetworkKind.DENSE, encoding.layout, 32, by_job=True)
        begin(policy, generator)
        begin(value, generator)
        learner = ActorCritic(policy, value, SMALL)
        collectors = [SampleCollector(library, SMALL, [5]) for _ in range(count)]
        rngs = [np.random.default_rng(1) for _ in collectors]
        for _ in range(3):
            improve(learner, collectors, [ReplayBuffer(0) for _ in collectors], SMALL, rngs=rngs, at=0.0)
        found.append(weights_of(policy, "policy"))
    assert all((found[0][name] == found[1][name]).all() for name in found[0])


def test_workloads_that_cannot_be_trained_on_are_told() -> None:
    with pytest.raises(WorkloadError, match="training needs 1 or more workloads to learn from"):
        train([], VALIDATION, SMALL, seed=0)
    with pytest.raises(WorkloadError, match="training needs 3 or more"):
        train(TRAINING[:2], VALIDATION, replace(SMALL, federation=3), seed=0)


def test_workloads_may_have_resources_that_others_lack() -> None:
    """A month in which no job asked for memory, and one in which each did."""
    with_memory = [a_workload(seed, memory=1) for seed in range(4)]
    trained = train(with_memory, VALIDATION, replace(SMALL, iterations=1), seed=0)
    assert trained.settings["resources"] == ["cpu", "memory"]
