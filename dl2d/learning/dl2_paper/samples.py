"""Training data as arrays: demonstrations for imitation, samples for actor-critic learning, and a replay buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dl2d.core.array_types import Arrays, Bools, Floats32, Ints
from dl2d.core.errors import TooFewSamples
from dl2d.policies.dl2_paper.observation import Observations


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """M decisions, each with what the network was shown, shape (M, inputs), and which actions were allowed."""

    observations: Observations
    #: Shape (M, 3J + 1).
    masks: Bools
    #: What was done, shape (M,).
    actions: Ints

    def __len__(self) -> int:
        return len(self.actions)

    def take(self, which: Ints) -> Self:
        """The rows at these places, in this order."""
        return type(self)(**{entry.name: getattr(self, entry.name)[which] for entry in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All rows of one or more parts."""
        return cls(
            **{entry.name: np.concatenate([getattr(part, entry.name) for part in parts]) for entry in fields(cls)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations(_Rows):
    """Decisions of a scheduler that is to be imitated; void is an action as any other."""

    #: All actions that would have been right, shape (M, 3J + 1); the one that was taken is among them.
    rights: Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples(_Rows):
    """Decisions of the policy with their outcome. K is J where each job has a reward of its own, else 1."""

    #: Logarithm of the probability with which the action was taken, shape (M,).
    log_chances: Floats32
    #: Returns that the critic should have predicted, shape (M, K), and where there is one.
    targets: Floats32
    valid: Bools

    @classmethod
    def zeros(cls, count: int, inputs: int, actions: int, values: int) -> Self:
        """Room for so many samples."""
        return cls(
            observations=np.zeros((count, inputs), dtype=np.float32),
            masks=np.zeros((count, actions), bool),
            actions=np.zeros(count, int),
            log_chances=np.zeros(count, dtype=np.float32),
            targets=np.zeros((count, values), dtype=np.float32),
            valid=np.zeros((count, values), bool),
        )


class ReplayBuffer:
    """The last ``size`` samples."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._parts: list[Samples] = []

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def add(self, samples: Samples) -> None:
        """Add samples; the oldest beyond the size are dropped."""
        self._parts.append(samples)
        surplus = len(self) - self._size
        while surplus > 0:
            oldest = self._parts.pop(0)
            if len(oldest) > surplus:
                self._parts.insert(0, oldest.take(np.arange(surplus, len(oldest))))
            surplus -= len(oldest)

    def draw(self, count: int, rng: np.random.Generator) -> Samples:
        """Draw without replacement, all samples equally likely. Raises ``TooFewSamples`` if there are fewer."""
        if len(self) < count:
            raise TooFewSamples(f"replay buffer: {count} samples are needed, there are {len(self)}")
        if len(self._parts) > 1:
            self._parts = [Samples.joined(self._parts)]
        return self._parts[0].take(rng.choice(len(self), count, replace=False))

    def state(self, name: str) -> dict[str, NDArray[Any]]:
        """All samples, as arrays whose names begin with this one; nothing where there are none."""
        if not self._parts:
            return {}
        self._parts = [Samples.joined(self._parts)]
        return {f"{name}.{entry.name}": getattr(self._parts[0], entry.name) for entry in fields(Samples)}

    def restore(self, arrays: Arrays, name: str) -> None:
        """The inverse of ``state``."""
        if f"{name}.actions" in arrays:
            self._parts = [Samples(**{entry.name: arrays[f"{name}.{entry.name}"] for entry in fields(Samples)})]
