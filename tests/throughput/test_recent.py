from __future__ import annotations

import numpy as np

from dl2d.throughput.recent import Recent


def test_the_oldest_go_when_there_are_too_many_numbers() -> None:
    made: list[str] = []
    recent: Recent[str, tuple[np.ndarray, ...]] = Recent(10)

    def get(key: str, size: int) -> int:
        def make() -> tuple[np.ndarray, ...]:
            made.append(key)
            return np.zeros(size), np.zeros(1)

        return len(recent.get(key, make)[0])

    assert [get("a", 3), get("b", 3), get("a", 3)] == [3, 3, 3]
    assert made == ["a", "b"]
    get("c", 4)  # a goes
    get("b", 3)
    assert made == ["a", "b", "c"]
    get("a", 3)  # b goes
    get("c", 4)
    assert made == ["a", "b", "c", "a"]


def test_what_is_larger_than_all_that_may_be_kept_is_kept_until_the_next_comes() -> None:
    recent: Recent[int, tuple[np.ndarray]] = Recent(10)
    large = recent.get(1, lambda: (np.zeros(100),))
    assert recent.get(1, lambda: (np.zeros(1),)) is large
    small = recent.get(2, lambda: (np.zeros(1),))
    assert recent.get(2, lambda: (np.ones(1),)) is small
    assert recent.get(1, lambda: (np.ones(1),)) is not large
