"""Supervised learning: the policy network learns to decide as a scheduler that is there already (section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dl2d.learning.dl2_paper.errors import TooFewSamples
from dl2d.learning.dl2_paper.networks import Net, see_that_finite
from dl2d.learning.dl2_paper.settings import SupervisedLoss
from dl2d.simulation.vectorized.library import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """States, what could be done in them, what was done, and what would have been right, too; M of each.

    Void is among the answers. ``rights`` has shape (M, 3J + 1), with ``actions`` among them.
    """

    observations: NDArray[np.float32]
    masks: NDArray[np.bool_]
    actions: Ints
    rights: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.actions)

    def take(self, which: Ints) -> Self:
        """Some of them, in this order."""
        return type(self)(
            observations=self.observations[which],
            masks=self.masks[which],
            actions=self.actions[which],
            rights=self.rights[which],
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All of several; one at least."""
        return cls(
            **{entry.name: np.concatenate([getattr(part, entry.name) for part in parts]) for entry in fields(cls)}
        )


def distance(logits: Tensor, masks: Tensor, rights: Tensor, kind: SupervisedLoss) -> Tensor:
    """How far distributions are from what is right: mean over states of one of the paper's three losses.

    Where several actions are right they are to be equally likely: so each is learned for itself, and is still there
    when the others are done.
    """
    masked = torch.where(masks, logits, -torch.inf)
    logs = torch.log_softmax(masked, dim=1)
    wanted = rights / rights.sum(dim=1, keepdim=True)
    if kind is SupervisedLoss.CROSS_ENTROPY:
        return -(wanted * torch.where(rights, logs, 0.0)).sum(dim=1).mean()
    errors = logs.exp() - wanted
    per_action = errors.square() if kind is SupervisedLoss.SQUARE else errors.abs()
    return per_action.sum(dim=1).mean()


def imitate(
    network: Net,
    lessons: Lessons,
    *,
    loss: SupervisedLoss,
    updates: int,
    minibatch: int,
    rate: float,
    rng: np.random.Generator,
    told: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Learn from lessons; returns the loss at each update, and tells it as it goes.

    Raises
    ------
    TooFewSamples
        A minibatch is more than there is.
    Diverged
        The loss is not a number.
    """
    if len(lessons) < minibatch:
        raise TooFewSamples(f"imitation: a minibatch is {minibatch} decisions of the teacher, there are {len(lessons)}")
    optimiser = torch.optim.Adam(network.parameters(), lr=rate)
    losses = []
    for number in range(updates):
        for group in optimiser.param_groups:
            group["lr"] = rate * (1.0 - 0.9 * number / updates)
        which = rng.choice(len(lessons), minibatch, replace=False)
        logits = network(torch.from_numpy(lessons.observations[which]))
        masks, rights = torch.from_numpy(lessons.masks[which]), torch.from_numpy(lessons.rights[which])
        value = distance(logits, masks, rights, loss)
        see_that_finite("the supervised loss", value)
        optimiser.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(float(value.detach()))
        if told is not None:
            told(number + 1, losses[-1])
    see_that_finite("the weights", *network.parameters())
    return losses
