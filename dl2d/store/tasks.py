"""The steps of tasks: which changes move a task, and what they add to the history of resizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from sqlalchemy import Connection, bindparam, insert, update

from dl2d.core.cluster import Task, TaskState
from dl2d.core.store import ResizeEvent, TaskChange
from dl2d.store import rows
from dl2d.store.mapping import ResizeEventRow, ResizeRow, TaskRow, table_of

GROW = "grow"
SHRINK = "shrink"
_CHANGING = ("state", "handle", "since", "note")


@dataclass(frozen=True, slots=True)
class Step:
    """A state that a task entered. ``new`` where the resize begins with it."""

    task: Task
    job_number: int
    direction: str
    event: ResizeEvent
    new: bool


def advanced(task: Task, change: TaskChange, job_number: int, at: float) -> tuple[Task, Step | None]:
    """The task after a change, and the step if its state moved.

    A task that fails on its way in ends its growing; one that fails as a member begins and ends its shrinking.
    """
    note = task.note if change.note is None else change.note
    after = replace(task, handle=task.handle if change.handle is None else change.handle, note=note)
    if change.state.rank <= task.state.rank:
        return after, None
    after = replace(after, state=change.state, since=at)
    coming = change.state.wanted or (
        change.state is TaskState.FAILED and task.state.wanted and task.state is not TaskState.CONFIRMED
    )
    event = ResizeEvent(change.state, at, change.note or "")
    return after, Step(after, job_number, GROW if coming else SHRINK, event, new=task.state.wanted and not coming)


def keep_steps(connection: Connection, steps: Sequence[Step]) -> None:
    """Add steps to the history, in at most two statements."""
    begun = [
        {
            "job_number": step.job_number,
            "task": step.task.id,
            "direction": step.direction,
            "role": step.task.role.value,
            "node": step.task.node,
            "began_at": step.event.at,
        }
        for step in steps
        if step.new
    ]
    if begun:
        connection.execute(insert(table_of(ResizeRow)), begun)
    if steps:
        events = [rows.of_event(step.job_number, step.task.id, step.direction, step.event) for step in steps]
        connection.execute(insert(table_of(ResizeEventRow)), events)


def update_tasks(connection: Connection, tasks: Sequence[tuple[int, Task]]) -> None:
    """Write what can change of tasks, given with their jobs' numbers, in one statement for all."""
    if not tasks:
        return
    statement = (
        update(table_of(TaskRow))
        .where(TaskRow.job_number == bindparam("of_job"), TaskRow.id == bindparam("of_task"))
        .values({name: bindparam(name) for name in _CHANGING})
    )
    changed = [
        {
            "of_job": number,
            "of_task": task.id,
            "state": task.state.value,
            "handle": task.handle,
            "since": task.since,
            "note": task.note,
        }
        for number, task in tasks
    ]
    connection.execute(statement, changed)
