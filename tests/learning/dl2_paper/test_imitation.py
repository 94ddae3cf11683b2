from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from simulation.drawn import drawn

from dl2d.learning.baselines import baselines
from dl2d.learning.dl2_paper.demonstrations import taught
from dl2d.learning.dl2_paper.errors import TooFewSamples
from dl2d.learning.dl2_paper.imitation import Lessons, distance, imitate
from dl2d.learning.dl2_paper.networks import begin, described, policy_network, weights_of
from dl2d.learning.dl2_paper.settings import NetworkKind, Settings, SupervisedLoss
from dl2d.learning.dl2_paper.validation import score
from dl2d.policies.dl2_paper.observation import Sight
from dl2d.policies.dl2_paper.policy import network_of
from dl2d.simulation.vectorized.library import Library


def a_sight(library: Library, window: int) -> Sight:
    return Sight(
        window=window, models=library.models, resources=library.resources, first_bundles=True, slot_seconds=1200.0,
        extras=True,
    )  # fmt: skip


#: A policy of two actions that are as likely as one another, and of which a third is forbidden.
LOGITS, MASKS = torch.tensor([[1.0, 1.0, 9.0]]), torch.tensor([[True, True, False]])


@pytest.mark.parametrize(
    ("kind", "want"),
    [(SupervisedLoss.CROSS_ENTROPY, math.log(2)), (SupervisedLoss.SQUARE, 0.5), (SupervisedLoss.ABSOLUTE, 1.0)],
)
def test_the_three_losses_by_hand(kind: SupervisedLoss, want: float) -> None:
    assert float(distance(LOGITS, MASKS, torch.tensor([[False, True, False]]), kind)) == pytest.approx(want)


@pytest.mark.parametrize(
    ("kind", "want"),
    [(SupervisedLoss.CROSS_ENTROPY, math.log(2)), (SupervisedLoss.SQUARE, 0.0), (SupervisedLoss.ABSOLUTE, 0.0)],
)
def test_several_right_actions_are_to_be_equally_likely(kind: SupervisedLoss, want: float) -> None:
    assert float(distance(LOGITS, MASKS, torch.tensor([[True, True, False]]), kind)) == pytest.approx(want)
    uneven = torch.tensor([[3.0, 1.0, 9.0]])
    assert float(distance(uneven, MASKS, torch.tensor([[True, True, False]]), kind)) > want + 0.1


@pytest.mark.parametrize("kind", list(SupervisedLoss))
def test_each_loss_leads_to_the_teachers_action(kind: SupervisedLoss) -> None:
    network = policy_network(NetworkKind.DENSE, jobs=1, width=3, free=1, hidden=8)
    begin(network, torch.Generator().manual_seed(0))
    rng = np.random.default_rng(0)
    observations = rng.random((64, 4)).astype(np.float32)
    actions = (observations[:, 0] > 0.5).astype(np.int64) * 3
    lessons = Lessons(
        observations=observations,
        masks=np.ones((64, 4), dtype=np.bool_),
        actions=actions,
        rights=np.eye(4)[actions] > 0,
    )
    losses = imitate(network, lessons, loss=kind, updates=200, minibatch=64, rate=1e-2, rng=rng)
    assert losses[-1] < 0.5 * losses[0]
    best = network(torch.from_numpy(observations)).argmax(dim=1).numpy()
    assert (best == actions).mean() > 0.9


def test_lessons_are_what_the_teacher_does_and_void_is_one_of_them() -> None:
    workloads = [drawn(seed, jobs=6) for seed in range(2)]
    library = Library.of(workloads)
    lessons = taught("drf", workloads, a_sight(library, 4), rng=np.random.default_rng(0))
    assert lessons.masks[np.arange(len(lessons)), lessons.actions].all()
    assert lessons.masks[:, :-1].any(axis=1).all()
    assert (lessons.actions == 12).any()
    assert (lessons.actions < 12).any()


def test_it_gets_as_good_as_its_teacher() -> None:
    workloads = [drawn(seed, jobs=8, nodes=4, plain=True, most_least=1) for seed in range(24)]
    library = Library.of(workloads[:8])
    everything = Library.of(workloads)
    settings = Settings(window=8, hidden=64, extras=True)
    rng = np.random.default_rng(0)
    sight = a_sight(everything, 8)
    lessons = taught("drf", workloads, sight, rng=rng)
    network = policy_network(NetworkKind.SHARED, jobs=8, width=sight.width, free=len(sight.resources), hidden=64)
    begin(network, torch.Generator().manual_seed(0))
    imitate(network, lessons, loss=SupervisedLoss.CROSS_ENTROPY, updates=100, minibatch=512, rate=3e-3, rng=rng)
    acting = network_of(weights_of(network, "policy"), described(sight, NetworkKind.SHARED, sampled=False))
    (teachers,) = baselines([workloads[:8]])["drf"]
    assert score(library, settings, acting, seed=0).greedy == pytest.approx(teachers, rel=0.05)


def test_too_few_lessons_are_told() -> None:
    network = policy_network(NetworkKind.DENSE, jobs=1, width=3, free=1, hidden=8)
    lessons = Lessons(
        observations=np.zeros((3, 4), dtype=np.float32), masks=np.ones((3, 4), dtype=np.bool_),
        actions=np.zeros(3, int), rights=np.eye(4)[[0, 0, 0]] > 0,
    )  # fmt: skip
    with pytest.raises(TooFewSamples, match="a minibatch is 8 decisions of the teacher, there are 3"):
        imitate(
            network, lessons, loss=SupervisedLoss.SQUARE, updates=1, minibatch=8, rate=0.1, rng=np.random.default_rng(0)
        )
