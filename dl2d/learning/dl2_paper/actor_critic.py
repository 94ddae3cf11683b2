"""Policy gradients with a critic: one update from a minibatch, or from several that stand for several clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dl2d.core.array_types import Arrays
from dl2d.core.errors import TooFewSamples
from dl2d.learning.dl2_paper.networks import Net, check_finite
from dl2d.learning.dl2_paper.samples import Samples
from dl2d.learning.dl2_paper.settings import Credit, Settings, Surrogate

#: Largest norms of the gradients.
_POLICY_NORM = 0.5
_VALUE_NORM = 5.0
_FEWEST = 2


class ActorCritic:
    """Two networks and their optimisers.

    Parameters
    ----------
    policy, value
        Are changed in place.
    """

    def __init__(self, policy: Net, value: Net, settings: Settings) -> None:
        self.policy, self.value = policy, value
        self._settings = settings
        self._policy_weights = list(policy.parameters())
        self._value_weights = list(value.parameters())
        self._optimisers = [
            torch.optim.Adam(self._policy_weights, lr=settings.rate),
            torch.optim.Adam(self._value_weights, lr=settings.rate),
        ]

    def gradients(self, samples: Samples, *, entropy: float, policy: bool = True) -> list[Tensor]:
        """Of all weights, from one minibatch; without ``policy`` those of the policy are 0.

        Raises
        ------
        TooFewSamples
            There are fewer than two, which have no deviation.
        Diverged
            A loss is not a number.
        """
        if len(samples) < _FEWEST:
            raise TooFewSamples(f"update: {_FEWEST} samples are needed, there are {len(samples)}")
        settings = self._settings
        observations = torch.from_numpy(samples.observations)
        targets, valid = torch.from_numpy(samples.targets), torch.from_numpy(samples.valid)
        check_finite("the rewards", targets)
        numbers = valid.sum(dim=1).clamp(min=1)
        expected = self.value(observations) if settings.critic else _mean(targets, valid)
        errors = torch.where(valid, targets - expected, 0.0)
        value_loss = errors.square().sum() / valid.sum().clamp(min=1)
        check_finite("the value loss", value_loss)
        if settings.critic:
            value_gradients = list(torch.autograd.grad(value_loss, self._value_weights))
        else:
            value_gradients = [torch.zeros_like(weight) for weight in self._value_weights]
        if not policy:
            return [*(torch.zeros_like(weight) for weight in self._policy_weights), *value_gradients]
        actions = torch.from_numpy(samples.actions)
        advantages = credited(errors.detach(), numbers, actions, settings.credit)
        if settings.normalise:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        logits = self.policy(observations)
        masked = torch.where(torch.from_numpy(samples.masks), logits, -torch.inf)
        logs = torch.log_softmax(masked, dim=1)
        own = logs.gather(1, actions[:, None])[:, 0]
        if settings.surrogate is Surrogate.PLAIN:
            gains = advantages * own
        else:
            ratio = torch.exp(own - torch.from_numpy(samples.log_chances))
            clipped = ratio.clamp(1.0 - settings.clip, 1.0 + settings.clip)
            gains = torch.minimum(ratio * advantages, clipped * advantages)
        # Of each state; what is masked has no part in it.
        spread = -(logs.exp() * torch.where(torch.isfinite(logs), logs, 0.0)).sum(dim=1)
        policy_loss = -(gains + entropy * spread).mean()
        check_finite("the policy loss", policy_loss)
        return [*torch.autograd.grad(policy_loss, self._policy_weights), *value_gradients]

    def apply(self, gradients: Sequence[Sequence[Tensor]], *, rate: float) -> None:
        """One step of both optimisers along the mean of the learners' gradients.

        Raises
        ------
        Diverged
            A gradient, or a weight afterwards, is not a number; then the weights are as they were, or of no use.
        """
        weights = [*self._policy_weights, *self._value_weights]
        for place, weight in enumerate(weights):
            weight.grad = torch.stack([own[place] for own in gradients]).mean(dim=0)
            check_finite("the gradients", weight.grad)
        torch.nn.utils.clip_grad_norm_(self._policy_weights, _POLICY_NORM)
        torch.nn.utils.clip_grad_norm_(self._value_weights, _VALUE_NORM)
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
        check_finite("the weights", *weights)

    def state(self) -> dict[str, NDArray[Any]]:
        """What the optimisers remember: copies, by name."""
        found: dict[str, NDArray[Any]] = {}
        for number, optimiser in enumerate(self._optimisers):
            for place, kept in optimiser.state_dict()["state"].items():
                for key, value in kept.items():
                    found[f"adam.{number}.{place}.{key}"] = np.array(value.detach().numpy())
        return found

    def restore(self, state: Arrays) -> None:
        """The inverse of ``state``, for the same networks."""
        for number, optimiser in enumerate(self._optimisers):
            kept: dict[int, dict[str, Tensor]] = {}
            for name, value in state.items():
                _, which, place, key = name.split(".")
                if int(which) == number:
                    kept.setdefault(int(place), {})[key] = torch.from_numpy(np.array(value))
            optimiser.load_state_dict({**optimiser.state_dict(), "state": kept})


def credited(errors: Tensor, numbers: Tensor, actions: Tensor, credit: Credit) -> Tensor:
    """Advantage of each action, shape (M,).

    Parameters
    ----------
    errors
        What each job brought beyond what was expected, shape (M, K); 0 where there is no job.
    numbers
        Jobs in the window, at least 1; shape (M,).
    actions
        Shape (M,).
    credit
        Whose.
    """
    if credit is Credit.SLOT:
        return errors[:, 0]
    jobs = errors.shape[1]
    own = errors.gather(1, (actions // 3).clamp(max=jobs - 1)[:, None])[:, 0]
    return torch.where(actions == 3 * jobs, errors.sum(dim=1) / numbers, own)


def _mean(targets: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, targets, 0.0).sum() / valid.sum().clamp(min=1)
