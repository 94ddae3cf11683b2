"""Order in which the tasks of a job leave when it shrinks, and the worker that stays longest. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dl2d.core.cluster import Task, TaskState


def leaving_order(task: Task) -> tuple[bool, int]:
    """Sort key for the order in which tasks of a group leave: those that have not joined, then the newest."""
    joined = task.state.rank >= TaskState.JOINED.rank
    return joined, -task.number


def rank_0_worker(tasks: Iterable[Task]) -> Task | None:
    """The worker of rank 0: the confirmed task with the earliest ``since``, of several the one of the lowest number.

    A training script that writes files does so in this worker.
    """
    members = (task for task in tasks if task.state is TaskState.CONFIRMED)
    return min(members, key=lambda task: (task.since, task.number), default=None)
