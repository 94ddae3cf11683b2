"""Coordinators that report to the daemon, and since when; one that has not done so for a while is silent. Pure.

These times are in memory only: after a restart of the daemon they begin again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from dl2d.core.jobs import Job, JobKey

#: A recorded time that is more than this in the future was written before the clock was set back, seconds.
MAX_FUTURE_SECONDS: Final = 60.0
#: A coordinator is silent if it has not called for so many heartbeat intervals.
SILENT_HEARTBEATS: Final = 3


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
    answered_since: Callable[[JobKey], float | None] = lambda job: None,  # noqa: ARG005
) -> dict[JobKey, float]:
    """Since when each job's coordinator has called without a gap of ``silent_seconds``; silent ones are left out.

    ``at`` and ``now`` are one moment, by the wall clock and by the monotonic clock of the result. ``before`` is the
    result of the last tick.
    It is empty after a restart of the daemon, so that all coordinators begin anew: which tasks they were told to drain
    before is not known. ``answered_since`` is ``Context.answered_since``: between two ticks, of which some may have
    failed, there may have been a gap.
    """
    calling = [job.key for job in jobs if has_called(job, at, silent_seconds)]
    known = {key: since for key in calling if (since := answered_since(key)) is not None}
    return {key: max(before.get(key, now), known.get(key, -math.inf)) for key in calling}
