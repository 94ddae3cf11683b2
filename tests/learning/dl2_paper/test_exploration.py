from __future__ import annotations

import numpy as np
import pytest

from dl2d.learning.dl2_paper.exploration import explored, mending


def mends(*jobs: tuple[int, int], forbidden: tuple[int, ...] = ()) -> int:
    mask = np.ones((1, 3 * len(jobs) + 1), dtype=np.int8)
    mask[0, list(forbidden)] = 0
    workers, ps = np.array([[size[0] for size in jobs]]), np.array([[size[1] for size in jobs]])
    return int(mending(workers, ps, mask, 10.0)[0])


@pytest.mark.parametrize(
    ("jobs", "action"),
    [
        pytest.param([(0, 0), (1, 1), (10, 1)], -1, id="nothing is poor: ten times as many is not more than ten times"),
        pytest.param([(1, 0), (0, 1)], -1, id="one task alone is not several"),
        pytest.param([(1, 1), (2, 0)], 4, id="workers and no PS"),
        pytest.param([(0, 2), (2, 0)], 0, id="PSs and no worker; the first job counts"),
        pytest.param([(1, 11)], 0, id="eleven times as many PSs"),
        pytest.param([(0, 0), (11, 1)], 4, id="eleven times as many workers"),
    ],
)
def test_poor_states_of_the_paper(jobs: list[tuple[int, int]], action: int) -> None:
    assert mends(*jobs) == action


def test_what_cannot_be_mended_is_passed_over() -> None:
    """So an all-reduce job, which can have no PS, is never poor."""
    assert mends((5, 0), (0, 3), forbidden=(1, 2)) == 3
    assert mends((5, 0), forbidden=(1, 2)) == -1


def test_actions_are_drawn_from_the_mixture_that_is_told() -> None:
    count = 20_000
    rng = np.random.default_rng(0)
    chances = np.tile([0.1, 0.3, 0.0, 0.6], (count, 1))
    actions = rng.choice(4, count, p=chances[0])
    poor = np.ones(count, dtype=np.int64)
    taken, probability = explored(actions, chances, poor, 0.25, rng.random(count))
    assert np.bincount(taken, minlength=4) / count == pytest.approx([0.075, 0.475, 0.0, 0.45], abs=0.015)
    assert sorted(set(probability.round(9))) == [0.075, 0.45, 0.475]
    fine = np.full(count, -1)
    taken, probability = explored(actions, chances, fine, 0.25, rng.random(count))
    assert (taken == actions).all()
    assert probability == pytest.approx(chances[0][actions])
