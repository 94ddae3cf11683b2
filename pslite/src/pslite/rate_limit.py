"""Rate limit: a number of events within a time span that is too many; older events do not count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class RateLimit:
    """So many events (`count`) within so many seconds (`seconds`) are too many."""

    count: int
    seconds: float

    def recent(self, times: Iterable[float], now: float) -> list[float]:
        """Return the times that count: those of the last `seconds`."""
        return [at for at in times if now - at < self.seconds]

    def reached(self, times: Iterable[float], now: float) -> bool:
        """Whether so many events have happened within the last `seconds`."""
        return len(self.recent(times, now)) >= self.count
