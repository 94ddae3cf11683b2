"""Rate limit: so many events within so long a time; what lies further back does not count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class RateLimit:
    """A number of events within a time, which is one too many."""

    count: int
    seconds: float

    def recent(self, times: Iterable[float], now: float) -> list[float]:
        """Return the times that count: those of the last `seconds`."""
        return [at for at in times if now - at < self.seconds]

    def reached(self, times: Iterable[float], now: float) -> bool:
        """Whether so many events have happened within the last `seconds`."""
        return len(self.recent(times, now)) >= self.count
