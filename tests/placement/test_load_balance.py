from __future__ import annotations

import numpy as np

from dl2d.placement.load_balance import LoadBalance


def test_load_balance_takes_the_least_used_node_and_the_first_of_equals() -> None:
    capacity = np.array([[8000, 2000], [8000, 2000], [16000, 2000]])
    used = np.array([[4000, 0], [2000, 0], [4000, 0]])
    assert LoadBalance().scores(used, capacity, np.array([1000, 0])).argmin() == 1
    assert LoadBalance().scores(np.zeros((3, 2), dtype=np.int64), capacity, np.array([1, 0])).argmin() == 0


def test_amounts_count_as_fractions_of_the_node() -> None:
    """In a plain sum of MiB and cores, memory alone would decide."""
    capacity = np.array([[8000, 64_000_000], [8000, 64_000_000]])
    used = np.array([[8000, 1_000_000], [0, 2_000_000]])
    assert LoadBalance().scores(used, capacity, np.array([1000, 0])).argmin() == 1
