"""Withdrawn tasks: those that wait where the resource manager will not start them, or for too long. Pure.

Why they were refused is remembered in ``avoided_nodes`` (a node) and ``learned_growth_limits`` (a limit).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from dl2d.core.cluster import Task, TaskState
from dl2d.core.jobs import Job
from dl2d.core.resource_manager import RmJob, RmJobState
from dl2d.core.store import TaskChange

#: How long a task that the resource manager refuses to start may wait; shorter than for one that waits for room, and
#: long enough for tasks that leave to make room in a limit.
MAX_REFUSED_SECONDS: Final = 30.0


def why_refused(listed: RmJob) -> str:
    """Why a task that waits will not be started where it waits; empty if it only waits for room."""
    if listed.state is not RmJobState.PENDING:
        return ""
    if listed.limit is not None:
        return listed.limit.reason
    return listed.reason or "the node is refused" if listed.node_refused else ""


def withdrawn_tasks(
    jobs: Iterable[Job], tasks: Iterable[Task], changes: Iterable[TaskChange], listed: Mapping[str, RmJob]
) -> dict[str, RmJob]:
    """The resource manager's job of each task that a tick withdraws since it was not started in time, by tag.

    ``changes`` are those that the tick makes to ``tasks``, and ``jobs`` the live ones after it. ``listed`` has the
    resource manager's job of each task, by tag.
    """
    live = {job.key for job in jobs}
    leaving = {
        (change.job, change.task) for change in changes if change.state is TaskState.DRAINING and change.job in live
    }
    asked = [task.tag for task in tasks if task.state is TaskState.ASKED and (task.job, task.id) in leaving]
    return {tag: listed[tag] for tag in asked if tag in listed and listed[tag].state is RmJobState.PENDING}
