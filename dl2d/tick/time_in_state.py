"""Elapsed times: for how long tasks are in their states and coordinators call, on a monotonic clock. Pure.

They are in memory only: after a restart of the daemon they are counted from the beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from dl2d.core.cluster import Task, TaskState
from dl2d.core.jobs import Job, JobKey

#: A recorded time that is more than this in the future was written before the clock was set back, seconds.
MAX_FUTURE_SECONDS: Final = 60.0


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


def update_state_since(
    before: Mapping[str, tuple[TaskState, float]], tasks: Iterable[Task], now: float
) -> dict[str, tuple[TaskState, float]]:
    """The state of each task, and since when ticks have found it in that state, by tag; as ``update_calling_since``.

    Time limits of tasks are counted from then on, so that setting the wall clock neither ends nor extends them.
    """
    found = {}
    for task in tasks:
        tag = task.tag
        last = before.get(tag)
        found[tag] = last if last is not None and last[0] is task.state else (task.state, now)
    return found


class Elapsed(NamedTuple):
    """For how long a task has been in its state, seconds."""

    #: Since a tick first found it there.
    in_state: float
    #: Since its coordinator can first have been told of the state: since a tick first found it there, and the
    #: coordinator has called without a gap. None if the coordinator does not call.
    since_told: float | None


def elapsed_times(
    tasks: Iterable[Task],
    state_since: Mapping[str, tuple[TaskState, float]],
    calling_since: Mapping[JobKey, float],
    now: float,
) -> dict[str, Elapsed]:
    """For how long each task has been in its state, by tag."""
    found = {}
    for task in tasks:
        _, since = state_since[task.tag]
        calling = calling_since.get(task.job)
        found[task.tag] = Elapsed(now - since, None if calling is None else now - max(since, calling))
    return found
