from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dl2d.core.array_types import Floats, Ints
from dl2d.policies.dl2.pareto_frontier import FrontierArrays, ParetoFrontier, SizeGrid, pareto_frontiers
from dl2d.policies.dl2.scoring import ClusterJobs, describe_steps, score, weight_count
from dl2d.policies.dl2.size_search import choose_sizes


def a_frontier(rng: np.random.Generator, capacity: list[int]) -> ParetoFrontier | None:
    shape = int(rng.integers(2, 12)), int(rng.integers(2, 12))
    ps, workers = np.indices(shape)
    rates = np.round(workers**0.7 * ps**0.3 * np.exp(rng.normal(0, 0.3, shape)), 1)
    worker, server = (rng.integers(0, 4, (2, len(capacity))) * 1000).tolist()
    (made,) = pareto_frontiers([SizeGrid(rates, worker=worker, ps=server, capacity=capacity, allowed=workers > 0)])
    return made


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), hidden=st.integers(0, 2), only_larger=st.booleans())
def test_sizes_are_faster_and_have_room(seed: int, hidden: int, only_larger: bool) -> None:
    """Only jobs that take part get others than they had, and these have room; only_larger ends where no step has."""
    rng = np.random.default_rng(seed)
    capacity = (rng.integers(5, 60, 2) * 1000).tolist()
    made = [found for _ in range(3) if (found := a_frontier(rng, capacity)) is not None]
    if not made:
        return
    together, clusters, count = FrontierArrays(made), 2, 6
    of = rng.integers(0, len(made), (clusters, count))
    present, samples = rng.random((clusters, count)) < 0.8, np.exp(rng.normal(5, 2, (clusters, count)))
    crowd = ClusterJobs.of(together, of, present, samples, np.array([100.0, 900.0]))
    weights = rng.normal(0, 1, (clusters, weight_count(hidden)))
    free, start = np.array([capacity] * clusters), np.zeros((clusters, count), dtype=np.int64)
    states = choose_sizes(together, crowd, start, free, weights, only_larger=only_larger)
    assert not states[~present].any()
    assert (together.log_speed[of, states] >= together.log_speed[of, 0] + np.log(1.01) * (states > 0)).all()
    free = free - together.need[of, states].sum(axis=1)
    assert (free >= 0).all()
    # A step that gives something back may make room for one that was looked at before.
    for row, job in np.argwhere(present & only_larger).tolist():
        which, now = of[row, job], states[row, job]
        fits = (together.need[which] - together.need[which, now] <= free[row]).all(axis=1)
        fits &= (together.sizes[which] >= together.sizes[which, now]).all(axis=1)
        assert not (together.is_step[which, now] & fits).any()


def plainly(together: FrontierArrays, crowd: ClusterJobs, states: Ints, free: Ints, weights: Floats) -> list[int]:
    """Positions in one cluster after steps one by one, each the best that has room by then, the first of equals."""
    states, left = states[0].copy(), free[0].copy()
    (present,) = np.nonzero(crowd.takes_part[0])
    while True:
        best, step = -np.inf, None
        for job in present.tolist():
            which, now = crowd.frontier[0, job], states[job]
            found = score(weights, describe_steps(together, crowd, *(np.array([place]) for place in (0, job, now))))[0]
            fits = (together.need[which] - together.need[which, now] <= left).all(axis=1)
            found = np.where(together.is_step[which, now] & fits, found, -np.inf)
            if found.max() > best:
                best, step = found.max(), (job, int(found.argmax()))
        if step is None:
            return states.tolist()
        job, to = step
        left -= together.need[crowd.frontier[0, job], to] - together.need[crowd.frontier[0, job], states[job]]
        states[job] = to


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), hidden=st.integers(0, 2), count=st.integers(1, 12), room=st.integers(5, 400))
def test_each_step_is_the_best_that_has_room(seed: int, hidden: int, count: int, room: int) -> None:
    """Of one resource, so that no step gives anything back; by one cluster alone, and by the same among others."""
    rng = np.random.default_rng(seed)
    made = [found for _ in range(3) if (found := a_frontier(rng, [room * 1000])) is not None]
    if not made:
        return
    together, others = FrontierArrays(made), 3
    of, samples = rng.integers(0, len(made), (others, count)), np.exp(rng.normal(5, 2, (others, count)))
    present, slots = rng.random((others, count)) < 0.8, np.full(others, 300.0)
    weights = rng.normal(0, 1, (others, weight_count(hidden)))
    free = np.full((others, 1), room * 1000) - rng.integers(0, 3000, (others, 1))
    start = np.array([[rng.integers(len(made[which].sizes)) for which in row] for row in of])
    start[rng.random(start.shape) < 0.7] = 0
    all_made = choose_sizes(together, ClusterJobs.of(together, of, present, samples, slots), start, free, weights)
    for row in range(others):
        one = slice(row, row + 1)
        crowd = ClusterJobs.of(together, of[one], present[one], samples[one], slots[one])
        alone = choose_sizes(together, crowd, start[one], free[one], weights[one])
        assert alone[0].tolist() == plainly(together, crowd, start[one], free[one], weights[one])
        np.testing.assert_array_equal(alone[0], all_made[row])
