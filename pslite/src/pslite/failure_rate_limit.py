"""Failure rate limit: a number of incidents within a time span that ends the job; older ones do not count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec


class Incident(msgspec.Struct, frozen=True):
    """Something that ends the job if it happens too often: a loss, a return to a checkpoint, a broken group."""

    #: monotonic, in seconds
    at: float
    #: version of the job; of a return, version of the checkpoint
    version: int = 0
    #: of a loss: host of the workers that died
    host: str = ""


@dataclass(frozen=True)
class RateLimit:
    """So many incidents (`count`) within so many seconds (`seconds`) are too many."""

    count: int
    seconds: float

    def recent(self, incidents: Iterable[Incident], now: float) -> list[Incident]:
        """Return the incidents that count: those of the last `seconds`."""
        return [each for each in incidents if now - each.at < self.seconds]

    def reached(self, recent: Iterable[Incident], version: int) -> bool:
        """Whether so many of these have happened at one version."""
        return sum(each.version == version for each in recent) >= self.count
