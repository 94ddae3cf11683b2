"""Order in which the tasks of a job leave when it shrinks, and the worker that stays longest."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dl2d.core.cluster import Snapshot, Task, TaskState
from dl2d.core.decision import FOR_WANT_OF_ROOM, Decision

#: Sort key for the tasks of a group, by which those that leave first come first.
LeavingOrder = Callable[[Task], tuple[bool, bool, int]]


def leaving_order(task: Task) -> tuple[bool, int]:
    """Sort key for the order in which tasks of a group leave: those that have not joined, then the newest."""
    joined = task.state.rank >= TaskState.JOINED.rank
    return joined, -task.number


def leaving_order_by_reason(snapshot: Snapshot, decision: Decision) -> LeavingOrder:
    """Sort key like ``leaving_order``, but tasks on nodes that take no new tasks leave first.

    Of a job that shrinks for want of room they leave last, since nobody gets their room.
    """
    up = {node.name for node in snapshot.nodes if node.is_open}
    for_room = {
        entry.job
        for entry in decision.jobs
        if any(reason.constraint in FOR_WANT_OF_ROOM for reason in (entry.reason, *entry.guarded))
    }
    return lambda task: ((task.node in up) is not (task.job in for_room), *leaving_order(task))


def rank_0_worker(tasks: Iterable[Task]) -> Task | None:
    """The worker of rank 0: the confirmed task with the earliest ``since``, of several the one of the lowest number.

    A training script that writes files does so in this worker.
    """
    members = (task for task in tasks if task.state is TaskState.CONFIRMED)
    return min(members, key=lambda task: (task.since, task.number), default=None)
