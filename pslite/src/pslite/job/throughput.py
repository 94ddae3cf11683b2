"""How fast a member works: seconds that it was busy, and how much it did in them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Work done: by a worker, logical shards computed; by a server, bytes of weights updated."""

    seconds: float
    amount: int


class PaceMeter:
    """Adds up work until somebody asks, perhaps another thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since = 0.0
        self._seconds = 0.0
        self._amount = 0

    def begin(self) -> None:
        """Be busy from now on."""
        self._since = self._clock()

    def end(self) -> None:
        """Be busy no longer."""
        if self._since:
            with self._lock:
                self._seconds += self._clock() - self._since
            self._since = 0.0

    def add(self, amount: int) -> None:
        """So much has been done."""
        with self._lock:
            self._amount += amount

    def take(self) -> Pace | None:
        """Return the work since the last time; None if nothing was done."""
        with self._lock:
            if not self._amount:
                return None  # time spent on it is told with it
            pace = Pace(seconds=self._seconds, amount=self._amount)
            self._seconds, self._amount = 0.0, 0
        return pace
