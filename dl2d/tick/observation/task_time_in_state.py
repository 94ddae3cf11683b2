"""Elapsed times: for how long tasks are in their states, on a monotonic clock.

They are in memory only: after a restart of the daemon they are counted from the beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from dl2d.core.cluster import Task, TaskState
from dl2d.core.jobs import TASK_ROLES, JobKey, JobState, Role
from dl2d.core.resource_manager import RmJob, RmJobState
from dl2d.tick.observation.observe import LiveJobs


class StateSince(NamedTuple):
    """The state of a task, and since when ticks have found it in that state."""

    state: TaskState
    since: float
    #: Since when they have found, besides, that it waits for no limit; None while it does.
    no_limit_since: float | None
    #: Since when they have found, besides, that the resource manager is ending it; None while it is not.
    stopping_since: float | None = None


def update_state_since(
    before: Mapping[str, StateSince],
    tasks: Iterable[Task],
    now: float,
    listed: Mapping[str, RmJob],
    restarts_clock: Callable[[Task], bool] = lambda task: False,  # noqa: ARG005
) -> dict[str, StateSince]:
    """Since when each task has been in its state, by tag; as ``update_calling_since``.

    Time limits of tasks are counted from then on, so that setting the wall clock neither ends nor extends them. The
    time of a granted task begins anew while ``restarts_clock`` says so: its dl2-run is connected, or its processes
    cannot run yet. ``listed`` has the resource manager's job of each task, by tag.
    """
    found = {}
    for task in tasks:
        tag = task.tag
        last, job = before.get(tag), listed.get(tag)
        if last is None or last.state is not task.state or (task.state is TaskState.GRANTED and restarts_clock(task)):
            last = StateSince(task.state, now, now)
        if job is not None and job.limit is not None:
            last = last._replace(no_limit_since=None)
        elif job is not None and last.no_limit_since is None:
            last = last._replace(no_limit_since=now)
        if job is not None and (job.state is RmJobState.ENDING) is not (last.stopping_since is not None):
            last = last._replace(stopping_since=now if job.state is RmJobState.ENDING else None)
        found[tag] = last
    return found


class Elapsed(NamedTuple):
    """For how long a task has been in its state, seconds."""

    #: Since a tick first found it there.
    in_state: float
    #: Seconds in which its coordinator can have been told of the state: since the latest of
    #:
    #: (a) a tick first found the task in the state;
    #: (b) its coordinator began to call without a gap;
    #: (c) for a task that leaves a running job, another task of its role joined: until then the job keeps its last
    #:     worker and its last server.
    #:
    #: None if (b) or (c) has not happened.
    since_told: float | None
    #: Of a granted task: seconds in which its coordinator can have heard of it and has not. None if it does not call,
    #: or does not say of which tasks it has heard.
    unconnected: float | None = None
    #: Of one that waits: seconds in which it has not waited for a limit; None while it does.
    without_limit: float | None = None
    #: Of one that the resource manager is ending: seconds in which it has been; None while it is not.
    stopping: float | None = None


def elapsed_times(
    live: LiveJobs,
    state_since: Mapping[str, StateSince],
    calling_since: Mapping[JobKey, float],
    now: float,
    saying: Collection[JobKey] = (),
) -> dict[str, Elapsed]:
    """For how long each task has been in its state, by tag.

    ``saying``: the jobs whose coordinators report which tasks have connected.
    """
    running = {job.key for job in live.jobs if job.state is JobState.RUNNING}
    joined_since: dict[tuple[JobKey, Role], float] = {
        (job.key, role): math.inf
        for job in live.jobs
        if job.key in running
        for role in TASK_ROLES
        if job.request.min_size.count(role)
    }
    for task in live.tasks:
        if task.state.wanted and task.job in running:
            since = state_since[task.tag].since if task.state.rank >= TaskState.JOINED.rank else math.inf
            joined_since[task.group] = min(since, joined_since.get(task.group, math.inf))
    found = {}
    for task in live.tasks:
        _, since, no_limit_since, stopping_since = state_since[task.tag]
        told = max(since, calling_since.get(task.job, math.inf))
        if not task.state.wanted:
            told = max(told, joined_since.get(task.group, told))
        since_told = None if told == math.inf else now - told
        unconnected = since_told if task.state is TaskState.GRANTED and task.job in saying else None
        without_limit = None if no_limit_since is None else now - no_limit_since
        stopping = None if stopping_since is None else now - stopping_since
        found[task.tag] = Elapsed(now - since, since_told, unconnected, without_limit, stopping)
    return found
