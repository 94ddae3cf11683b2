from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learning.dl2_paper.made_samples import made_samples

from dl2d.core.errors import TooFewSamples
from dl2d.learning.dl2_paper.samples import ReplayBuffer


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), most=st.integers(1, 20))
def test_it_holds_the_last_ones(sizes: list[int], most: int) -> None:
    buffer, number = ReplayBuffer(most), 0
    for size in sizes:
        buffer.add(made_samples([0] * size, [[float(number + place)] for place in range(size)]))
        number += size
    held = min(number, most)
    assert len(buffer) == held
    drawn = buffer.draw(held, np.random.default_rng(0))
    assert sorted(drawn.targets[:, 0].tolist()) == list(range(number - held, number))


def test_more_than_there_is_is_not_drawn() -> None:
    buffer = ReplayBuffer(5)
    buffer.add(made_samples([0], [[1.0]]))
    with pytest.raises(TooFewSamples, match="replay buffer: 2 samples are needed, there are 1"):
        buffer.draw(2, np.random.default_rng(0))
