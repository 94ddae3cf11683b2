"""Progress of what takes long: the contract of the function that is told how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

#: Is told how many of how many are done.
Count = Callable[[int, int], None]


class Tell(Protocol):
    """Is told what is being done, how far it is, how far it goes, and a word on how it stands."""

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        """Tell."""
        ...


def uncounted(done: int, total: int) -> None:
    """Show nothing. Implements ``Count``."""


def silent(what: str, done: int, total: int, note: str = "") -> None:
    """Show nothing. Implements ``Tell``."""
