from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl2d.policies.jumps import Crowd, Surface, Surfaces, choose, look, score, surface, weight_count


def a_surface(rng: np.random.Generator, capacity: list[int], unit: int = 1000) -> Surface | None:
    shape = int(rng.integers(2, 12)), int(rng.integers(2, 12))
    ps, workers = np.indices(shape)
    rates = np.round(workers**0.7 * ps**0.3 * np.exp(rng.normal(0, 0.3, shape)), 1)
    worker, server = (rng.integers(0, 4, (2, len(capacity))) * unit).tolist()
    return surface(rates, worker=worker, ps=server, capacity=capacity, may=workers > 0)


@pytest.mark.parametrize("unit", [1, 1000, 10**9])
@pytest.mark.parametrize("seed", range(10))
def test_of_sizes_those_remain_that_no_faster_one_undercuts(seed: int, unit: int) -> None:
    """By hand: a size is left out if one at least as fast takes no more of anything."""
    rng, capacity = np.random.default_rng(seed), [60 * unit, 30 * unit]
    ps, workers = np.indices((7, 7))
    rates = np.where(workers * ps > 0, np.round(workers**0.7 * np.exp(rng.normal(0, 0.3, ps.shape)), 1), 0.0)
    made = surface(rates, worker=[2 * unit, unit], ps=[unit, 0], capacity=capacity, may=workers > 0)
    assert made is not None
    kept = {(int(w), int(p)) for w, p in made.sizes[1:]}
    possible = [(w, p) for p in range(1, 7) for w in range(1, 7) if rates[p, w] > 0]
    for w, p in possible:
        under = [
            (w2, p2)
            for w2, p2 in possible
            if (w2, p2) != (w, p) and 2 * w2 + p2 <= 2 * w + p and w2 <= w and rates[p2, w2] >= rates[p, w]
        ]
        assert ((w, p) in kept) == (not under)
    assert made.log_rate[1:].tolist() == sorted(made.log_rate[1:], reverse=True)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), hidden=st.integers(0, 2), growing=st.booleans())
def test_jumps_are_chosen_by_the_scores_that_all_can_look_up(seed: int, hidden: int, growing: bool) -> None:
    """Each job has the score with which it got where it is; growing ends where no jump has room."""
    rng = np.random.default_rng(seed)
    capacity = (rng.integers(5, 60, 2) * 1000).tolist()
    made = [found for _ in range(3) if (found := a_surface(rng, capacity)) is not None]
    if not made:
        return
    surfaces, clusters, count = Surfaces(made), 2, 6
    of = rng.integers(0, len(made), (clusters, count))
    present, samples = rng.random((clusters, count)) < 0.8, np.exp(rng.normal(5, 2, (clusters, count)))
    crowd = Crowd.of(surfaces, of, present, samples, np.array([100.0, 900.0]))
    weights = rng.normal(0, 1, (clusters, weight_count(hidden)))
    free, start = np.array([capacity] * clusters), np.zeros((clusters, count), dtype=np.int64)
    chosen = choose(surfaces, crowd, start, free, weights, growing=growing)
    states, scores = start.copy(), np.full(start.shape, np.nan)
    for row, job, to in chosen.jumps.tolist():
        where, which = (np.array([row]), np.array([job])), np.array([states[row, job]])
        own = score(weights[[row]], look(surfaces, crowd, *where, which))[0]
        assert surfaces.there[of[row, job], states[row, job], to]
        scores[row, job] = own[to]
        free[row] -= surfaces.need[of[row, job], to] - surfaces.need[of[row, job], states[row, job]]
        states[row, job] = to
    assert (free >= 0).all()
    np.testing.assert_array_equal(states, chosen.states)
    np.testing.assert_array_equal(scores, chosen.scores)
    # A jump that gives something back may make room for one that was looked at before.
    for row, job in np.argwhere(present & growing).tolist():
        which, now = of[row, job], states[row, job]
        fits = (surfaces.need[which] - surfaces.need[which, now] <= free[row]).all(axis=1)
        fits &= (surfaces.sizes[which] >= surfaces.sizes[which, now]).all(axis=1)
        assert not (surfaces.there[which, now] & fits).any()
