from __future__ import annotations

import numpy as np
import pytest
import torch
from learning.dl2_paper.made_samples import made_samples

from dl2d.core.errors import Diverged, TooFewSamples
from dl2d.learning.dl2_paper.actor_critic import ActorCritic, credited
from dl2d.learning.dl2_paper.networks import DenseNetwork, begin, weights_of
from dl2d.learning.dl2_paper.settings import Credit, Settings, Surrogate

NUMBERS = torch.tensor([2, 2, 2, 1])
ERRORS = torch.tensor([[1.0, -3.0], [1.0, -3.0], [1.0, -3.0], [5.0, 0.0]])
#: PS for the first job, both for the second, void, void with one job.
ACTIONS = torch.tensor([1, 5, 6, 6])


@pytest.mark.parametrize(("credit", "want"), [(Credit.OWN, [1, -3, -1, 5]), (Credit.SLOT, [1, 1, 1, 5])])
def test_whose_reward_an_action_is_credited_with(credit: Credit, want: list[float]) -> None:
    errors = ERRORS[:, :1] if credit is Credit.SLOT else ERRORS
    assert credited(errors, NUMBERS, ACTIONS, credit).tolist() == want


def a_learner(settings: Settings, seed: int = 0, *, values: int = 2) -> ActorCritic:
    policy, value = DenseNetwork(4, 8, 7), DenseNetwork(4, 8, values)
    for network in (policy, value):
        begin(network, torch.Generator().manual_seed(seed))
    return ActorCritic(policy, value, settings)


def chances(learner: ActorCritic) -> np.ndarray:
    state = torch.zeros(1, 4)
    state[0, 0] = 1.0
    with torch.no_grad():
        return torch.softmax(learner.policy(state), dim=1)[0].numpy()


@pytest.mark.parametrize("surrogate", list(Surrogate))
@pytest.mark.parametrize("critic", [True, False])
def test_what_paid_off_becomes_likelier(surrogate: Surrogate, critic: bool) -> None:
    settings = Settings(surrogate=surrogate, critic=critic)
    learner = a_learner(settings)
    # A worker for job 0 brings it 1; a PS for job 1 costs it 1; void makes no difference.
    samples = made_samples([0, 4, 6] * 40, [[1.0, 0.0], [0.0, -1.0], [0.0, 0.0]] * 40)
    before = chances(learner)
    for _ in range(15):
        learner.apply([learner.gradients(samples, entropy=0.0)], rate=3e-3)
    after = chances(learner)
    assert after[0] > before[0] + 0.02
    assert after[4] < before[4] - 0.02


def test_the_critic_learns_what_jobs_bring() -> None:
    learner = a_learner(Settings())
    samples = made_samples([0, 1] * 50, [[2.0, -1.0]] * 100)
    before = weights_of(learner.policy, "p")
    for _ in range(400):
        learner.apply([learner.gradients(samples, entropy=0.0, policy=False)], rate=1e-2)
    with torch.no_grad():
        said = learner.value(torch.from_numpy(samples.observations[:1])).tolist()[0]
    assert said == pytest.approx([2.0, -1.0], abs=0.05)
    after = weights_of(learner.policy, "p")
    assert all((before[name] == after[name]).all() for name in before)


def test_jobs_that_are_not_there_teach_nothing() -> None:
    learner = a_learner(Settings())
    valid = np.array([[True, False]] * 8)
    small = made_samples([0] * 8, [[1.0, 0.0]] * 8, valid=valid)
    large = made_samples([0] * 8, [[1.0, 99.0]] * 8, valid=valid)
    for first, second in zip(learner.gradients(small, entropy=0.1), learner.gradients(large, entropy=0.1), strict=True):
        assert torch.equal(first, second)


def test_entropy_is_of_each_state_and_spreads_what_is_allowed() -> None:
    """Nothing to gain: the distribution evens out over allowed actions alone."""
    learner = a_learner(Settings(normalise=False, surrogate=Surrogate.PLAIN, critic=False))
    with torch.no_grad():
        learner.policy.named()["2"].bias.copy_(torch.tensor([2.0, 0, 0, 0, 0, 0, 0]))
    masks = np.ones((16, 7), dtype=np.bool_)
    masks[:, 3:] = False
    samples = made_samples([0] * 16, [[0.0, 0.0]] * 16, masks=masks)
    for _ in range(300):
        learner.apply([learner.gradients(samples, entropy=1.0)], rate=1e-2)
    allowed = chances(learner)[:3]
    assert allowed / allowed.sum() == pytest.approx([1 / 3] * 3, abs=0.02)


def test_a_clipped_update_stops_where_the_plain_one_goes_on() -> None:
    """The action has become twice as likely as when it was taken already, and paid off."""
    samples = made_samples([0, 0], [[1.0, 0.0]] * 2, log_chances=np.log(np.full(2, 1 / 14, dtype=np.float32)))
    found = {}
    for surrogate in Surrogate:
        learner = a_learner(Settings(surrogate=surrogate, normalise=False))
        gradients = learner.gradients(samples, entropy=0.0)
        found[surrogate] = max(float(gradient.abs().max()) for gradient in gradients[:6])
    assert found[Surrogate.CLIPPED] == 0.0
    assert found[Surrogate.PLAIN] > 0.0


def test_learners_whose_clusters_are_the_same_are_as_one() -> None:
    rng = np.random.default_rng(0)
    samples = made_samples(rng.integers(0, 7, 64).tolist(), rng.normal(size=(64, 2)).tolist())
    alone, together = a_learner(Settings()), a_learner(Settings())
    for _ in range(5):
        alone.apply([alone.gradients(samples, entropy=0.01)], rate=1e-3)
        together.apply([together.gradients(samples, entropy=0.01) for _ in range(4)], rate=1e-3)
    one, four = weights_of(alone.policy, "p"), weights_of(together.policy, "p")
    assert all((one[name] == four[name]).all() for name in one)


def test_learners_whose_clusters_differ_are_averaged() -> None:
    learner = a_learner(Settings(normalise=False))
    first, second = made_samples([0] * 4, [[1.0, 0.0]] * 4), made_samples([4] * 4, [[0.0, 3.0]] * 4)
    both = made_samples([0] * 4 + [4] * 4, [[1.0, 0.0]] * 4 + [[0.0, 3.0]] * 4)
    parts = [learner.gradients(samples, entropy=0.1) for samples in (first, second)]
    for one, two, want in zip(*parts, learner.gradients(both, entropy=0.1), strict=True):
        assert torch.allclose((one + two) / 2, want, atol=1e-6)


@pytest.mark.parametrize(
    ("targets", "message"), [(float("nan"), "values of the rewards"), (float("inf"), "values of the rewards")]
)
def test_rewards_that_are_no_numbers_stop_training(targets: float, message: str) -> None:
    with pytest.raises(Diverged, match=message):
        a_learner(Settings()).gradients(made_samples([0, 1], [[targets, 0.0]] * 2), entropy=0.0)


def test_weights_that_are_no_numbers_stop_training() -> None:
    learner = a_learner(Settings())
    samples = made_samples([0, 1], [[1.0, 0.0]] * 2)
    gradients = learner.gradients(samples, entropy=0.0)
    gradients[0] = torch.full_like(gradients[0], float("nan"))
    with pytest.raises(Diverged, match="values of the gradients are not finite"):
        learner.apply([gradients], rate=1e-3)
    with torch.no_grad():
        learner.policy.named()["0"].weight.fill_(float("nan"))
    with pytest.raises(Diverged, match="the policy loss"):
        learner.gradients(samples, entropy=0.0)


def test_a_single_sample_is_too_few() -> None:
    with pytest.raises(TooFewSamples, match="update: 2 samples are needed, there are 1"):
        a_learner(Settings()).gradients(made_samples([0], [[1.0, 0.0]]), entropy=0.0)
