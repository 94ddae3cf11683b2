"""Resizes, each of one task, and the states that they went through: tables ``resizes`` and ``resize_events``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    Connection,
    ForeignKeyConstraint,
    Index,
    Row,
    Update,
    and_,
    bindparam,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.orm import Mapped

from dl2d.core.cluster import Task, TaskState
from dl2d.core.jobs import JobKey, Role
from dl2d.core.store import Resize, ResizeEvent, TaskChange
from dl2d.store.connections_and_transactions import StoreTables
from dl2d.store.tables.jobs import JobRow
from dl2d.store.tables.row_mapping import Base, Choice, Moment, UserText, Values, column, table_of

GROW = "grow"
SHRINK = "shrink"


class ResizeRow(Base):
    """A resize of one task."""

    __tablename__ = "resizes"
    __table_args__ = (
        ForeignKeyConstraint(["job_number", "task"], ["tasks.job_number", "tasks.id"]),
        Index(None, "began_at"),
        Index(None, "job_number", "began_at"),
    )

    job_number: Mapped[int] = column("jobs.number", primary_key=True, autoincrement=False)
    task: Mapped[str] = column("tasks.id", primary_key=True)
    direction: Mapped[str] = column("grow or shrink", primary_key=True)
    role: Mapped[Role] = column("worker or ps", Choice(Role))
    node: Mapped[str] = column("node of the task")
    began_at: Mapped[Moment]
    granted_at: Mapped[float | None] = column(
        "when the resource manager ran the task, seconds since 1970; NULL if it has not"
    )
    ended_at: Mapped[float | None] = column(
        "when the task took part, was released or had failed, seconds since 1970; NULL while in progress"
    )


class ResizeEventRow(Base):
    """A state that a resize entered. A task enters a state once at most."""

    __tablename__ = "resize_events"
    __table_args__ = (
        ForeignKeyConstraint(
            ["job_number", "task", "direction"], ["resizes.job_number", "resizes.task", "resizes.direction"]
        ),
    )

    job_number: Mapped[int] = column("jobs.number", primary_key=True, autoincrement=False)
    task: Mapped[str] = column("tasks.id", primary_key=True)
    direction: Mapped[str] = column("grow or shrink", primary_key=True)
    state: Mapped[TaskState] = column("state of the task that it entered", Choice(TaskState), primary_key=True)
    step: Mapped[int] = column("number of the state in its machine, to sort by")
    at: Mapped[Moment]
    note: Mapped[UserText] = column("reason, if there is one")


def runs(task: Task) -> bool:
    """Whether the resource manager is known to run the task."""
    return TaskState.GRANTED.rank <= task.state.rank <= TaskState.CONFIRMED.rank


@dataclass(frozen=True, slots=True)
class Step:
    """A state that a task entered. ``new`` where the resize begins with it."""

    task: Task
    job_number: int
    direction: str
    event: ResizeEvent
    new: bool


def step_of(left: TaskState, task: Task, change: TaskChange, job_number: int) -> Step:
    """The step of a task that left a state for its present one.

    A task that fails on its way in ends its growing; one that fails as a member begins and ends its shrinking.
    """
    coming = task.state.wanted or (task.state is TaskState.FAILED and left.wanted and left is not TaskState.CONFIRMED)
    event = ResizeEvent(task.state, task.since, change.note or "")
    return Step(task, job_number, GROW if coming else SHRINK, event, new=left.wanted and not coming)


def keep_steps(connection: Connection, steps: Sequence[Step]) -> None:
    """Add steps to the history, in at most two statements."""
    keys = [{"job_number": step.job_number, "task": step.task.id, "direction": step.direction} for step in steps]
    begun = [
        {**key, "role": step.task.role, "node": step.task.node, "began_at": step.event.at}
        for key, step in zip(keys, steps, strict=True)
        if step.new
    ]
    if begun:
        connection.execute(insert(table_of(ResizeRow)), begun)
    reached: dict[str, list[Values]] = {"granted_at": [], "ended_at": []}
    for key, step in zip(keys, steps, strict=True):
        for time in _reached(step):
            named = {f"of_{name}": value for name, value in key.items()}
            reached[time].append({**named, "reached_at": step.event.at, "on_node": step.task.node})
    for time, values in reached.items():
        if values:
            connection.execute(_update_resize(time), values)
    if steps:
        events = [
            {**key, "state": event.state, "step": event.state.rank, "at": event.at, "note": event.note}
            for key, event in zip(keys, (step.event for step in steps), strict=True)
        ]
        connection.execute(insert(table_of(ResizeEventRow)), events)


def _reached(step: Step) -> Iterable[str]:
    """Columns of ``resizes`` that have the time of this step."""
    if runs(step.task):
        yield "granted_at"
    if step.task.state is TaskState.CONFIRMED or step.task.state.ended:
        yield "ended_at"


class SqlResizes(StoreTables):
    """The history of resizes."""

    def resizes(self, job: JobKey | None = None, *, limit: int = 1000) -> tuple[Resize, ...]:
        """Resizes of elastic jobs with their events, newest first.

        Tasks of static jobs come and go with their job, which is no resize.
        """
        newest = select(ResizeRow, JobRow.cluster, JobRow.id.label("job_id"), JobRow.submitted).join(
            JobRow, and_(JobRow.number == ResizeRow.job_number, JobRow.static.is_(False))
        )
        if job is not None:
            newest = newest.where(JobRow.slug == job.slug)
        key = ("job_number", "task", "direction")
        order = ("began_at", *key)
        chosen = newest.order_by(*(table_of(ResizeRow).c[name].desc() for name in order)).limit(limit).subquery()
        events = table_of(ResizeEventRow).c
        query = (
            select(chosen, events.state, events.at, events.note)
            .join(ResizeEventRow, and_(*(events[name] == chosen.c[name] for name in key)))
            .order_by(*(chosen.c[name].desc() for name in order), events.step)
        )
        found: dict[tuple[int, str, str], tuple[Row[Any], list[ResizeEvent]]] = {}
        for row in self._rows("listing resizes", query):
            _, passed = found.setdefault((row.job_number, row.task, row.direction), (row, []))
            passed.append(ResizeEvent(row.state, row.at, row.note))
        return tuple(
            Resize(
                JobKey(row.cluster, row.job_id, row.submitted), row.task, row.role, row.node, row.direction,
                tuple(passed),
            )
            for row, passed in found.values()
        )  # fmt: skip


@functools.cache
def _update_resize(time: str) -> Update:
    table = table_of(ResizeRow)
    named = (table.c[name] == bindparam(f"of_{name}") for name in ("job_number", "task", "direction"))
    first = func.coalesce(table.c[time], bindparam("reached_at"))
    # the resource manager may run the task on another node than it was asked for
    return update(table).where(*named).values({time: first, "node": bindparam("on_node")})
