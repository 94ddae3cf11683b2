from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from dl2d.core.jobs import Architecture, Consistency
from dl2d.throughput.sizes import Atlas, Bounds, Group, Sizes

GROUPS = [Group(architecture, Consistency.SYNC) for architecture in Architecture]


def drawn(rng: np.random.Generator, group: Group, count: int, most: int) -> NDArray[np.int64]:
    """Distinct sizes in order."""
    sizes = {(int(w), int(p)) for w, p in rng.integers(1, most + 1, (count, 2))}
    return np.array(sorted({(w, p if group.architecture is Architecture.PS else 0) for w, p in sizes}))


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_known_of_all_sizes_is_what_some_of_them_would_find_alone(group: Group) -> None:
    rng, atlas = np.random.default_rng(1), Atlas(group)
    for turn in range(60):
        counts = drawn(rng, group, int(rng.integers(1, 50)), int(rng.choice([4, 16, 64])))
        found, alone = atlas.sizes(counts), Sizes(group, counts)
        if turn % 2:
            places = np.flatnonzero(rng.random(len(counts)) < 0.5)
            found, alone = found.some(places), Sizes(group, counts[places])
        bounds = Bounds(int(rng.integers(1, 20)), int(rng.integers(1, 20)))
        at = np.log2(rng.integers(1, 20, (30, 2)))
        for name in ("at", "trend", "apart", "own", "whole"):
            np.testing.assert_array_equal(getattr(found, name), getattr(alone, name))
        np.testing.assert_array_equal(found.across(bounds, at), alone.across(bounds, at))
        for one, other in zip(found.inside(bounds), alone.inside(bounds), strict=True):
            np.testing.assert_array_equal(one, other)


def test_too_many_sizes_are_not_remembered_and_those_that_were_stay_right() -> None:
    group, rng = GROUPS[0], np.random.default_rng(2)
    atlas = Atlas(group)
    first = atlas.sizes(drawn(rng, group, 300, 100))
    second = atlas.sizes(drawn(rng, group, 400, 100))
    assert first.among[0] is not second.among[0]
    assert len(second.among[0].counts) <= 512
    many = atlas.sizes(drawn(rng, group, 900, 100))
    assert many.among[0] is many
    assert atlas.among(many.counts) is None
    for sizes in (first, second, many):
        np.testing.assert_array_equal(sizes.own, Sizes(group, sizes.counts).own)


def test_places_within_bounds_are_those_of_an_array_of_workers_for_each_number_of_servers() -> None:
    counts = np.array([[1, 1], [2, 3], [5, 1], [2, 9]])
    within, where = Sizes(GROUPS[0], counts).inside(Bounds(3, 4))
    array = np.arange(12).reshape(4, 3)
    assert within.tolist() == [0, 1]
    assert where.tolist() == [array[0, 0], array[2, 1]]
