"""Failure rate limits: how many incidents of each kind within a time span end the job; older ones do not count."""

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


#: losses of workers at one version: at so many the script is the likely cause, and the job fails
MAX_LOSSES = RateLimit(3, 3600.0)
#: a job that has gone back so often to one checkpoint fails
MAX_ROLLBACKS = RateLimit(5, 86400.0)
#: deadlines that passed: at so many the job fails; before that, members that hold it up are restarted
MAX_STALLS = RateLimit(2, 86400.0)
#: a group that breaks so often at one version, although no member is dead, fails the job
MAX_BREAKS = RateLimit(5, 3600.0)
#: a coordinator that has died so often is not started again, and the job fails
MAX_DEATHS = RateLimit(10, 3600.0)
