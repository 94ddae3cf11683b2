"""Progress of what takes long: the contract of the function that is told how far it is."""

from __future__ import annotations

from typing import Protocol


class Tell(Protocol):
    """Is told what is being done, how far it is, how far it goes, and a word on how it stands."""

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        """Tell."""
        ...


def silent(what: str, done: int, total: int, note: str = "") -> None:
    """Show nothing. Implements ``Tell``."""
