"""Samples, and a ring of them: experience replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dl2d.learning.dl2_paper.errors import TooFewSamples
from dl2d.simulation.vectorized.library import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """M single decisions and what came of them. K is J where each job has a reward of its own, else 1."""

    #: Shape (M, width), (M, 3J + 1), (M,).
    observations: NDArray[np.float32]
    masks: NDArray[np.bool_]
    actions: Ints
    #: Logarithm of the probability with which the action was taken, shape (M,).
    log_chances: NDArray[np.float32]
    #: What the critic should have said, shape (M, K), and where there is such a thing.
    targets: NDArray[np.float32]
    valid: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.actions)

    def take(self, which: Ints) -> Self:
        """Some of them, in this order."""
        return type(self)(**{entry.name: getattr(self, entry.name)[which] for entry in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All of several; one at least."""
        return cls(
            **{entry.name: np.concatenate([getattr(part, entry.name) for part in parts]) for entry in fields(cls)}
        )


class ReplayBuffer:
    """The last ``size`` samples."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._parts: list[Samples] = []

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def add(self, samples: Samples) -> None:
        """Put in new ones and forget the oldest."""
        self._parts.append(samples)
        surplus = len(self) - self._size
        while surplus > 0:
            oldest = self._parts.pop(0)
            if len(oldest) > surplus:
                self._parts.insert(0, oldest.take(np.arange(surplus, len(oldest))))
            surplus -= len(oldest)

    def draw(self, count: int, rng: np.random.Generator) -> Samples:
        """Distinct ones, all equally likely.

        Raises
        ------
        TooFewSamples
            There are fewer.
        """
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

    def restore(self, arrays: Mapping[str, NDArray[Any]], name: str) -> None:
        """The inverse of ``state``."""
        if f"{name}.actions" in arrays:
            self._parts = [Samples(**{entry.name: arrays[f"{name}.{entry.name}"] for entry in fields(Samples)})]
