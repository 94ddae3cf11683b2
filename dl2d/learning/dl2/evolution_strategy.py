"""Policy search: an evolution strategy with antithetic pairs, ranks in place of results, and Adam.

Sources: Salimans et al., "Evolution strategies as a scalable alternative to reinforcement learning", 2017 (pairs,
ranks, Adam); Wierstra et al., "Natural evolution strategies", JMLR 2014.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from dl2d.core.array_types import Floats
from dl2d.core.input_validation import Number, Record, Whole

_MEAN, _SQUARE, _TINY = 0.9, 0.99, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Record):
    """Settings of one iteration."""

    #: Pairs of members, and the standard deviation of the noise that is added to, and subtracted from, the weights.
    pairs: Annotated[int, Whole(1, 100_000)] = 16
    spread: Annotated[float, Number(1e6, above=0.0)] = 0.1
    #: Step size in the first iteration, the factor from one to the next, and its minimum.
    rate: Annotated[float, Number(1e6, above=0.0)] = 0.05
    decay: Annotated[float, Number(1.0)] = 0.9965
    least_rate: Annotated[float, Number(1e6)] = 0.01


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
