"""Arrays that were worked out last, kept for as long as they may be wanted again, but only so many."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

_Key = TypeVar("_Key", bound=Hashable)
_Arrays = TypeVar("_Arrays", bound=tuple[NDArray[Any], ...])


class Recent(Generic[_Key, _Arrays]):
    """Arrays by key; where they have more numbers than may be kept, the oldest go, but never the last one.

    Parameters
    ----------
    most
        Numbers in all arrays together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[_Key, _Arrays] = {}
        self._numbers = 0

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def get(self, key: _Key, make: Callable[[], _Arrays]) -> _Arrays:
        """What is kept, or else is made now."""
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = make()
            self._numbers += _numbers(kept)
            while self._numbers > self._most and len(self._kept) > 1:
                self._numbers -= _numbers(self._kept.pop(next(iter(self._kept))))
        return kept


def _numbers(arrays: tuple[NDArray[Any], ...]) -> int:
    return sum(array.size for array in arrays)
