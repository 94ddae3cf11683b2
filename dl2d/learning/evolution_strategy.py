"""Policy search: an evolution strategy with antithetic pairs, ranks in place of results, and Adam.

Sources: Salimans et al., "Evolution strategies as a scalable alternative to reinforcement learning", 2017 (pairs,
ranks, Adam); Wierstra et al., "Natural evolution strategies", JMLR 2014.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dl2d.policies.jumps import Floats

_MEAN, _SQUARE, _TINY = 0.9, 0.99, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How far to look and to go."""

    #: Pairs of members, and the deviation of the noise that is added to, and taken off, the weights.
    pairs: int = 16
    spread: float = 0.1
    #: Step size in the first iteration, what it falls by in each, and its least.
    rate: float = 0.05
    decay: float = 0.9965
    least_rate: float = 0.01

    def __post_init__(self) -> None:
        """Check."""
        if self.pairs < 1 or not self.spread > 0 or not self.rate > 0:
            raise ValueError("pairs must be 1 or more, spread and rate more than 0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Search:
    """Where the search is: weights and Adam's two means, shape (weights,), after so many iterations."""

    weights: Floats
    mean: Floats
    square: Floats
    iteration: int = 0

    @classmethod
    def at(cls, weights: Floats) -> Search:
        """Begin here."""
        return cls(weights=weights, mean=np.zeros_like(weights), square=np.zeros_like(weights))


def advance(
    search: Search, step: Step, rng: np.random.Generator, cost: Callable[[Floats], Floats]
) -> tuple[Search, Floats]:
    """One iteration.

    Parameters
    ----------
    cost
        Of members' weights, shape (2 x pairs, weights): what each costs, shape (2 x pairs,). All are compared under the
        same conditions.

    Returns
    -------
    The search after it, and the members' costs.
    """
    noise = rng.normal(size=(step.pairs, len(search.weights)))
    members = np.concatenate([search.weights + step.spread * noise, search.weights - step.spread * noise])
    costs = cost(members)
    # Of equal costs the ranks are equal, so that a member that changes nothing pulls nowhere.
    _, where, times = np.unique(costs, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(times) - (times + 1) / 2)[where.reshape(-1)] / max(len(costs) - 1, 1) - 0.5
    slope = ((ranks[: step.pairs] - ranks[step.pairs :])[:, None] * noise).mean(axis=0)
    number = search.iteration + 1
    mean = _MEAN * search.mean + (1 - _MEAN) * slope
    square = _SQUARE * search.square + (1 - _SQUARE) * slope**2
    size = np.sqrt(square / (1 - _SQUARE**number)) + _TINY
    rate = max(step.rate * step.decay**search.iteration, step.least_rate)
    weights = search.weights - rate * mean / (1 - _MEAN**number) / size
    return replace(search, weights=weights, mean=mean, square=square, iteration=number), costs
