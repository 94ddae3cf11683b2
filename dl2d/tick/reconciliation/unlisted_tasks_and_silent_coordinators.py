"""Tasks and anchors that the resource manager does not list, and coordinators that do not report: since when.

These times are in memory only: after a restart of the daemon they begin again. A coordinator that has not reported for
a while is silent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dl2d.core.jobs import Job, JobKey
from dl2d.core.resource_manager import RmListing
from dl2d.tick.tick_context import LastHeartbeat

#: A recorded time that is more than this in the future was written before the clock was set back, seconds.
MAX_FUTURE_SECONDS = 60.0
#: A coordinator is silent if it has not called for so many heartbeat intervals.
SILENT_HEARTBEATS = 3


class KeptSize(NamedTuple):
    """Why the size of a job is not changed now: its coordinator is silent or admits no tasks, or it is starting."""

    cause: str
    #: Whether its anchor holds resources but does not execute. This is a reason also where the policy would not change
    #: the job's size.
    not_executing: bool = False


class Absence(NamedTuple):
    """Absence of one task or anchor."""

    #: Number of consecutive complete listings that lack it.
    listings: int
    #: When the first of them came, seconds on a monotonic clock.
    since: float


@dataclass(frozen=True, slots=True)
class Unlisted:
    """Absences by tag."""

    absences: Mapping[str, Absence] = field(default_factory=dict)
    #: ``RmListing.at`` of the last listing that was counted.
    listed_at: float | None = None
    #: When that listing came, seconds on the monotonic clock.
    counted_at: float = 0.0

    def after(self, unlisted: Collection[str], listing: RmListing, now: float) -> Unlisted:
        """The absences after one more listing, which lacks these tags; ``now`` is in seconds on the monotonic clock.

        An incomplete listing, or one that the manager returns a second time, is not counted. But a tag that it contains
        is present, and the tag's count starts again.
        """
        counts = not listing.incomplete and listing.at != self.listed_at
        absences = {}
        for tag in unlisted:
            before = self.absences.get(tag)
            if counts:
                absences[tag] = Absence(1, now) if before is None else Absence(before.listings + 1, before.since)
            elif before is not None:
                absences[tag] = before
        return Unlisted(absences, listing.at if counts else self.listed_at, now if counts else self.counted_at)

    def seconds(self, tag: str) -> float:
        """How long a tag has been absent."""
        return self.counted_at - self.absences[tag].since

    def gone(self, listings: int, seconds: float) -> frozenset[str]:
        """Tags that at least so many listings in a row lack, over at least so many seconds."""
        return frozenset(
            tag
            for tag, absence in self.absences.items()
            if absence.listings >= listings and self.counted_at - absence.since >= seconds
        )


def has_called(job: Job, at: float, seconds: float) -> bool:
    """Whether the coordinator of a job has called less than ``seconds`` before ``at``, the time of the listing.

    A call after ``at`` counts too, since reading a listing takes time, but not one that was recorded before the clock
    was set back.
    """
    return bool(job.address) and -MAX_FUTURE_SECONDS <= at - job.progress.at <= seconds


def update_calling_since(
    before: Mapping[JobKey, float],
    jobs: Iterable[Job],
    at: float,
    now: float,
    silent_seconds: float,
    last_heartbeat: Callable[[JobKey], LastHeartbeat] = lambda job: LastHeartbeat(),  # noqa: ARG005
) -> dict[JobKey, float]:
    """Since when each job's coordinator has called without a gap of ``silent_seconds``; silent ones are left out.

    ``at`` and ``now`` are one moment, by the wall clock and by the monotonic clock of the result. ``before`` is the
    result of the last tick.
    It is empty after a restart of the daemon, so that all coordinators begin anew: which tasks they were told to drain
    before is not known. ``last_heartbeat`` is that of ``Context``: between two ticks, of which some may have failed,
    there may have been a gap.
    """
    calling = [job.key for job in jobs if has_called(job, at, silent_seconds)]
    known = {key: since for key in calling if (since := last_heartbeat(key).since) is not None}
    return {key: max(before.get(key, now), known.get(key, -math.inf)) for key in calling}
