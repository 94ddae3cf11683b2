from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl2d.policies.dl2.pareto_frontier import FrontierArrays, SizeGrid, pareto_frontiers


def a_grid(rng: np.random.Generator) -> SizeGrid:
    shape, resources, unit = tuple(rng.integers(2, 25, 2).tolist()), 2, int(rng.choice([1, 1000, 10**9]))
    ps, workers = np.indices(shape)
    rates = np.round(workers**0.7 * (ps + 1) ** 0.3 * np.exp(rng.normal(0, rng.choice([0, 0.1, 0.5]), shape)), 1)
    rates[rng.random(shape) < 0.05] = rng.choice([0.0, np.nan, np.inf])
    worker, server = (rng.integers(0, 5, (2, resources)) * unit).tolist()
    return SizeGrid(
        rates,
        worker=worker,
        ps=server,
        capacity=(rng.integers(1, 120, resources) * unit).tolist(),
        allowed=(workers > 0) & (rng.random(shape) < rng.choice([0.5, 1.0])),
        base=(0, 0) if rng.random() < 0.5 else tuple(rng.integers(0, 4, 2).tolist()),
        held=None if rng.random() < 0.5 else (int(rng.integers(shape[1])), int(rng.integers(shape[0]))),
    )


def by_hand(grid: SizeGrid) -> list[tuple[int, int]]:
    """Sizes that a grid of moderate size keeps, fastest first."""
    ps, workers = np.nonzero(grid.allowed & (grid.speeds > 0) & np.isfinite(grid.speeds))

    def taken(size: tuple[int, int]) -> list[int]:
        return [size[0] * one + size[1] * other for one, other in zip(grid.worker, grid.ps, strict=True)]

    sizes = [
        (w, p)
        for w, p in zip(workers.tolist(), ps.tolist(), strict=True)
        if w >= grid.base[0] and p >= grid.base[1]
        if all(amount <= whole for amount, whole in zip(taken((w, p)), grid.capacity, strict=True))
    ]
    sizes.sort(key=lambda size: (-grid.speeds[size[1], size[0]], sum(taken(size)), size[1], size[0]))

    def beaten(place: int) -> bool:
        own = taken(sizes[place])
        return any(all(a <= b for a, b in zip(taken(size), own, strict=True)) for size in sizes[:place])

    kept = [size for place, size in enumerate(sizes) if size == grid.held or not beaten(place)]
    if len(kept) > 48:
        places = np.linspace(0, len(kept) - 1, 48).round().astype(int).tolist()
        if grid.held in kept and kept.index(grid.held) not in places:
            own = kept.index(grid.held)
            places[min(range(1, 47), key=lambda place: abs(places[place] - own))] = own
        kept = [kept[place] for place in places]
    return kept


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_a_frontier_has_the_sizes_that_are_kept_by_hand_and_its_start(seed: int) -> None:
    grid = a_grid(np.random.default_rng(seed))
    (made,) = pareto_frontiers([grid])
    kept = by_hand(grid)
    assert (made is None) == (not kept)
    if made is not None:
        assert [tuple(size) for size in made.sizes.tolist()] == [grid.base, *kept]
        demand = np.array([grid.worker, grid.ps])
        np.testing.assert_array_equal(made.need, (made.sizes - grid.base) @ demand)
        rates = [grid.speeds[ps, workers] for workers, ps in kept]
        np.testing.assert_array_equal(made.log_speed[1:], np.log(rates))
        shares = np.array(kept[0]) @ demand / grid.capacity
        assert made.best_share == pytest.approx(shares.max())
        assert made.from_nothing == (grid.base == (0, 0))
        if made.from_nothing:
            assert made.log_speed[0] == pytest.approx(np.log(1e-3 * rates[0]))


@pytest.mark.parametrize("length", [26, 60])
def test_of_many_counts_some_are_looked_at_and_the_one_to_keep(length: int) -> None:
    ps, workers = np.indices((3, length))
    rates = np.where(workers * ps > 0, workers**0.9 * ps**0.1, 0.0)
    grid = SizeGrid(rates, worker=[1000], ps=[500], capacity=[10**6], allowed=workers > 0, held=(length - 2, 2))
    (made,) = pareto_frontiers([grid])
    assert made is not None
    counts = set(made.sizes[1:, 0].tolist())
    assert {length - 2, length - 1} <= counts
    assert len(counts) <= 25


@pytest.mark.parametrize("allowed", [(1, 2, 4, 8, 16, 32, 64), (30, 60), tuple(range(40, 60))])
def test_of_few_allowed_counts_all_are_looked_at_however_large_they_are(allowed: tuple[int, ...]) -> None:
    workers = np.arange(65)[None]
    grid = SizeGrid(workers**0.9, worker=[1], ps=[1], capacity=[64], allowed=np.isin(workers, allowed))
    (made,) = pareto_frontiers([grid])
    assert made is not None
    assert made.sizes[:0:-1, 0].tolist() == list(allowed)


def test_of_many_allowed_counts_some_in_geometric_progression_are_looked_at() -> None:
    workers = np.arange(401)[None]
    allowed = (workers > 0) & (workers % 8 == 0)
    (made,) = pareto_frontiers([SizeGrid(workers**0.9, worker=[1], ps=[1], capacity=[400], allowed=allowed)])
    assert made is not None
    counts = made.sizes[:0:-1, 0].tolist()
    assert counts[0] == 8
    assert counts[-1] == 400
    assert 16 < len(counts) <= 24
    assert max(np.diff(counts) / counts[:-1]) <= 1.0


@pytest.mark.parametrize("max_workers", [64, 1000])
def test_the_largest_count_that_fits_is_looked_at(max_workers: int) -> None:
    workers = np.arange(max_workers + 1)[None]
    (made,) = pareto_frontiers([SizeGrid(workers**0.9, worker=[1], ps=[1], capacity=[48], allowed=workers > 0)])
    assert made is not None
    assert made.sizes[1].tolist() == [48, 0]


def test_of_many_sizes_on_a_frontier_48_are_kept_and_the_one_that_the_job_has_is_among_them() -> None:
    ps, workers = np.indices((21, 21))
    grid = SizeGrid(np.log1p(workers) * np.log1p(ps), worker=[1, 2], ps=[0, 2], capacity=[20, 80], allowed=workers > 0)
    (made,) = pareto_frontiers([grid])
    assert made is not None
    assert len(made.sizes) == 49
    for size in ((w, p) for w in range(1, 21) for p in range(1, 21)):
        (kept,) = pareto_frontiers([replace(grid, held=size)])
        assert kept is not None
        assert len(kept.sizes) == 49
        assert size in map(tuple, kept.sizes.tolist())
        assert (np.diff(kept.log_speed[1:]) <= 0).all()
        np.testing.assert_array_equal(kept.sizes[1], made.sizes[1])
        np.testing.assert_array_equal(kept.sizes[-1], made.sizes[-1])


@given(seed=st.integers(0, 10**6))
def test_there_is_a_step_wherever_a_size_is_faster_and_takes_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = [one for one in pareto_frontiers([a_grid(rng) for _ in range(3)]) if one is not None]
    made = [one for one in made if np.isfinite(one.log_speed[0])]
    if not made:
        return
    together = FrontierArrays(made)
    for number, one in enumerate(made):
        count = len(one.sizes)
        gain = one.log_speed[None] - one.log_speed[:, None]
        more = (one.need[None] - one.need[:, None]) / np.maximum(one.capacity, 1e-9)
        there = (gain > np.log(1.01)) & (more.max(axis=2) > 0) & (np.arange(count) > 0)
        np.testing.assert_array_equal(together.is_step[number, :count, :count], there)
        assert together.is_step[number].sum() == there.sum()
        np.testing.assert_allclose(together.cost[number, :count, :count][there], np.log(more.max(axis=2)[there]))
        np.testing.assert_allclose(together.gain[number, :count, :count][there], np.log(gain[there]))
    assert not together.cost[~together.is_step].any()
    assert not together.gain[~together.is_step].any()
