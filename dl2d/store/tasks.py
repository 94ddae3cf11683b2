"""Tasks, their resizes, and the reports of coordinators on them.

Tables ``tasks``, ``resizes``, ``resize_events``, ``task_reports`` and ``runtime_plans``.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    Connection,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Row,
    Select,
    Update,
    and_,
    bindparam,
    func,
    insert,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.orm import Mapped, mapped_column

from dl2d.core.cluster import Task, TaskState, submit_order
from dl2d.core.errors import StoreError
from dl2d.core.jobs import JobKey, Role
from dl2d.core.resources import Resources
from dl2d.core.store import Resize, ResizeEvent, RuntimePlan, TaskChange, TaskReport, TaskTime
from dl2d.core.tick_plan import Start
from dl2d.store.jobs import JobRow, job_numbers
from dl2d.store.row_mapping import (
    EMPTY,
    MAX_VALUES,
    ZERO,
    Base,
    Choice,
    Demand,
    FreeText,
    Json,
    Mapping,
    Values,
    batches,
    columns,
    table_of,
    upsert,
)

GROW = "grow"
SHRINK = "shrink"
#: Condition of the partial index on tasks that have not ended; queries of live tasks use the same one.
_IS_LIVE = "ended_at IS NULL"
_ROLES = list(Role)


class TaskRow(Base):
    """One worker or parameter server of a job."""

    __tablename__ = "tasks"
    __table_args__ = (
        Index(None, "state"),
        Index(None, "job_number", "role", "ordinal", unique=True),
        Index("ix_tasks_live", "job_number", sqlite_where=text(_IS_LIVE), postgresql_where=text(_IS_LIVE)),
    )

    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"), primary_key=True, comment="jobs.number")
    id: Mapped[str] = mapped_column(primary_key=True, comment="role-ordinal, unique in the job")
    role: Mapped[Role] = mapped_column(Choice(Role), comment="worker or ps")
    ordinal: Mapped[int] = mapped_column(comment="number in its id")
    node: Mapped[str] = mapped_column(comment="node on which it was started")
    demand: Mapped[Resources] = mapped_column(Demand(), comment="resources, JSON; memory in MiB")
    state: Mapped[TaskState] = mapped_column(
        Choice(TaskState), comment="asked granted joined confirmed draining drained released failed"
    )
    handle: Mapped[str] = mapped_column(comment="id in the resource manager")
    submitted: Mapped[int] = mapped_column(
        server_default=ZERO, comment="when the resource manager accepted it, whole seconds since 1970; 0: not known yet"
    )
    asked_at: Mapped[float] = mapped_column(comment="when it was recorded, seconds since 1970")
    granted_at: Mapped[float | None] = mapped_column(
        comment="when the resource manager ran it first, seconds since 1970; NULL if it never did"
    )
    ended_at: Mapped[float | None] = mapped_column(comment="when it was released or failed, seconds since 1970")
    since: Mapped[float] = mapped_column(comment="when the present state began, seconds since 1970")
    cause: Mapped[str] = mapped_column(server_default=EMPTY, comment="why it failed, one word; empty if it did not")
    note: Mapped[str] = mapped_column(FreeText(), comment="why it failed, or what the resource manager waits for")


class ResizeRow(Base):
    """A resize of one task."""

    __tablename__ = "resizes"
    __table_args__ = (
        ForeignKeyConstraint(["job_number", "task"], ["tasks.job_number", "tasks.id"]),
        Index(None, "began_at"),
        Index(None, "job_number", "began_at"),
    )

    job_number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="jobs.number")
    task: Mapped[str] = mapped_column(primary_key=True, comment="tasks.id")
    direction: Mapped[str] = mapped_column(primary_key=True, comment="grow or shrink")
    role: Mapped[Role] = mapped_column(Choice(Role), comment="worker or ps")
    node: Mapped[str] = mapped_column(comment="node of the task")
    began_at: Mapped[float] = mapped_column(comment="seconds since 1970")
    granted_at: Mapped[float | None] = mapped_column(
        comment="when the resource manager ran the task, seconds since 1970; NULL if it has not"
    )
    ended_at: Mapped[float | None] = mapped_column(
        comment="when the task took part, was released or had failed, seconds since 1970; NULL while in progress"
    )


class ResizeEventRow(Base):
    """A state that a resize entered. A task enters a state once at most."""

    __tablename__ = "resize_events"
    __table_args__ = (
        ForeignKeyConstraint(
            ["job_number", "task", "direction"], ["resizes.job_number", "resizes.task", "resizes.direction"]
        ),
    )

    job_number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="jobs.number")
    task: Mapped[str] = mapped_column(primary_key=True, comment="tasks.id")
    direction: Mapped[str] = mapped_column(primary_key=True, comment="grow or shrink")
    state: Mapped[TaskState] = mapped_column(
        Choice(TaskState), primary_key=True, comment="state of the task that it entered"
    )
    step: Mapped[int] = mapped_column(comment="position of the state in its machine, to sort by")
    at: Mapped[float] = mapped_column(comment="seconds since 1970")
    note: Mapped[str] = mapped_column(FreeText(), comment="reason, if there is one")


class TaskReportRow(Base):
    """Last report on a task, also of static jobs."""

    __tablename__ = "task_reports"

    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"), primary_key=True, comment="jobs.number")
    task: Mapped[str] = mapped_column(primary_key=True, comment="tasks.id")
    at: Mapped[float] = mapped_column(comment="when the report came, seconds since 1970")
    cpu_seconds: Mapped[float | None] = mapped_column(comment="processor time since the task began, s")
    cpu_percent: Mapped[float | None] = mapped_column(comment="load in the last interval, per cent of a core")
    memory: Mapped[float | None] = mapped_column(comment="resident memory, MiB")
    memory_peak: Mapped[float | None] = mapped_column(comment="highest resident memory seen, MiB")
    gpus: Mapped[int] = mapped_column(comment="how many it has, as far as is known")
    gpu_percent: Mapped[float | None] = mapped_column(comment="load of its GPUs, mean, per cent")
    gpu_memory: Mapped[float | None] = mapped_column(comment="memory in use on all its GPUs, MiB")
    step_ms: Mapped[float | None] = mapped_column(comment="time of a step, mean over the last steps, ms")
    step_p95_ms: Mapped[float | None] = mapped_column(comment="95th percentile over its last steps, ms")
    cause: Mapped[str] = mapped_column(FreeText(), comment="why its process ended; empty while it runs")
    how: Mapped[str] = mapped_column(FreeText(), comment="the same in words")
    slowdown: Mapped[float | None] = mapped_column(comment="times as long as others for the same work")
    slowdown_reason: Mapped[str] = mapped_column(FreeText(), comment="why it is slow, in words")


class RuntimePlanRow(Base):
    """A membership change as the job's coordinator reported it."""

    __tablename__ = "runtime_plans"
    __table_args__ = (Index(None, "at"),)

    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"), primary_key=True, comment="jobs.number")
    number: Mapped[int] = mapped_column(
        primary_key=True, autoincrement=False, comment="the coordinator's number of the plan"
    )
    at: Mapped[float] = mapped_column(comment="when the report came, seconds since 1970")
    first_version: Mapped[int] = mapped_column(comment="first version trained under the plan")
    workers: Mapped[int] = mapped_column(comment="workers under the plan")
    servers: Mapped[int] = mapped_column(comment="parameter servers under the plan")
    added: Mapped[tuple[str, ...]] = mapped_column(Json(tuple[str, ...]), comment="task ids, JSON")
    removed: Mapped[tuple[str, ...]] = mapped_column(Json(tuple[str, ...]), comment="task ids, JSON")
    moved_bytes: Mapped[int] = mapped_column(comment="bytes of parameters that were moved")
    prepare_ms: Mapped[float] = mapped_column(comment="time to prepare it, ms")
    move_ms: Mapped[float] = mapped_column(comment="time to move parameters, ms")
    suspension_p50_ms: Mapped[float] = mapped_column(comment="time that workers were suspended, median, ms")
    suspension_max_ms: Mapped[float] = mapped_column(comment="longest time that a worker was suspended, ms")
    longest_step_ms: Mapped[float | None] = mapped_column(comment="longest step around the resize, ms")
    median_step_ms: Mapped[float | None] = mapped_column(comment="median step before the resize, ms")


_TASK = Mapping(Task, TaskRow)
_TASK_REPORT = Mapping(TaskReport, TaskReportRow)
_RUNTIME_PLAN = Mapping(RuntimePlan, RuntimePlanRow)


def _task_of(row: Row[Any]) -> Task:
    """A task from a row of ``tasks`` joined with its job's key."""
    key = JobKey(row.job_cluster, row.job_id, row.job_submitted)
    return _TASK.record(row, f"task {row.id} of job {key.slug}", job=key)


# Tasks


def ask_tasks(connection: Connection, starts: Sequence[Start], at: float) -> tuple[Task, ...]:
    """See ``Store.ask_tasks``. Raises ``StoreError`` if a job is not known."""
    numbers = job_numbers(connection, {start.job for start in starts}, lock=True)
    last = _last_ordinals(connection, numbers.values())
    tasks: list[Task] = []
    for start in starts:
        counted = (numbers[start.job], start.role)
        last[counted] = ordinal = last.get(counted, -1) + 1
        tasks.append(
            Task(
                job=start.job,
                id=f"{start.role.value}-{ordinal}",
                role=start.role,
                node=start.node,
                demand=start.demand,
                asked_at=at,
                since=at,
            )
        )
    values = [_TASK.values(task, job_number=numbers[task.job], ordinal=task.number) for task in tasks]
    connection.execute(insert(table_of(TaskRow)), values)
    asked = [_Step(task, numbers[task.job], GROW, ResizeEvent(TaskState.ASKED, at), new=True) for task in tasks]
    _keep_steps(connection, asked)
    return tuple(tasks)


def _last_ordinals(connection: Connection, jobs: Iterable[int]) -> dict[tuple[int, Role], int]:
    """Highest ordinal of each job and role; one search in an index each, however many tasks a job had."""
    last: dict[tuple[int, Role], int] = {}
    for batch in batches(jobs):
        for row in connection.execute(_highest_ordinals().where(JobRow.number.in_(batch))):
            last |= {(row.number, role): ordinal for role in Role if (ordinal := getattr(row, role)) is not None}
    return last


def tasks(connection: Connection, *, live: bool, job: JobKey | None) -> tuple[Task, ...]:
    """See ``Store.tasks``."""
    query = _tasks()
    if live:
        query = query.where(TaskRow.ended_at.is_(None))
    if job is not None:
        query = query.where(
            TaskRow.job_number == select(JobRow.number).where(JobRow.slug == job.slug).scalar_subquery()
        )
    return tuple(sorted(map(_task_of, connection.execute(query)), key=_order))


def task_times(connection: Connection, job: JobKey) -> tuple[TaskTime, ...]:
    """See ``Store.task_times``."""
    rows = connection.execute(_tasks().where(JobRow.slug == job.slug, TaskRow.granted_at.is_not(None)))
    found = (TaskTime(_task_of(row), row.granted_at, row.ended_at) for row in rows)
    return tuple(sorted(found, key=lambda time: _order(time.task)))


def named_tasks(connection: Connection, job: JobKey, names: Collection[str]) -> tuple[Task, ...]:
    """See ``Store.named_tasks``."""
    of_job = _tasks().where(JobRow.slug == job.slug)
    found = (connection.execute(of_job.where(TaskRow.id.in_(batch))) for batch in batches(set(names), MAX_VALUES - 1))
    return tuple(sorted((_task_of(row) for rows in found for row in rows), key=_order))


def _order(task: Task) -> tuple[Any, int, int]:
    return (submit_order(task.job), _ROLES.index(task.role), task.number)


def change_tasks(connection: Connection, changes: Sequence[TaskChange], at: float) -> tuple[Task, ...]:
    """See ``Store.change_tasks``. Raises ``StoreError`` if a task is not known."""
    numbers = job_numbers(connection, {change.job for change in changes})
    before = _locked_tasks(connection, {(numbers[change.job], change.task) for change in changes})
    after = dict(before)
    steps: list[_Step] = []
    for change in changes:
        named = (numbers[change.job], change.task)
        if named not in after:
            raise StoreError(f"job {change.job.slug} has no task {change.task}")
        task = change.applied(after[named], at)
        if task.state is not after[named].state:
            steps.append(_step(after[named].state, task, change, numbers[change.job]))
        after[named] = task
    causes = {(numbers[change.job], change.task): str(change.cause) for change in changes if change.cause}
    changed = [
        {
            "of_job": named[0],
            "of_task": task.id,
            **{name: getattr(task, name) for name in _CHANGING},
            "granted_at": task.since if _runs(task) else None,
            "ended_at": task.since if task.state.ended else None,
            "cause": causes.get(named, "") if task.state is TaskState.FAILED else "",
        }
        for named, task in after.items()
        if task != before[named]
    ]
    if changed:
        connection.execute(_update_task(), changed)
    _keep_steps(connection, steps)
    return tuple(task for named, task in after.items() if task.state is not before[named].state)


def _runs(task: Task) -> bool:
    """Whether the resource manager is known to run the task."""
    return TaskState.GRANTED.rank <= task.state.rank <= TaskState.CONFIRMED.rank


def _locked_tasks(connection: Connection, named: set[tuple[int, str]]) -> dict[tuple[int, str], Task]:
    found: dict[tuple[int, str], Task] = {}
    for batch in batches(named, MAX_VALUES // 2):
        query = (
            _tasks()
            .where(tuple_(TaskRow.job_number, TaskRow.id).in_(batch))
            .order_by(TaskRow.job_number, TaskRow.id)
            .with_for_update(of=TaskRow)
        )
        found |= {(row.job_number, row.id): _task_of(row) for row in connection.execute(query)}
    return found


# Resizes


@dataclass(frozen=True, slots=True)
class _Step:
    """A state that a task entered. ``new`` where the resize begins with it."""

    task: Task
    job_number: int
    direction: str
    event: ResizeEvent
    new: bool


def _step(left: TaskState, task: Task, change: TaskChange, job_number: int) -> _Step:
    """The step of a task that left a state for its present one.

    A task that fails on its way in ends its growing; one that fails as a member begins and ends its shrinking.
    """
    coming = task.state.wanted or (task.state is TaskState.FAILED and left.wanted and left is not TaskState.CONFIRMED)
    event = ResizeEvent(task.state, task.since, change.note or "")
    return _Step(task, job_number, GROW if coming else SHRINK, event, new=left.wanted and not coming)


def _keep_steps(connection: Connection, steps: Sequence[_Step]) -> None:
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
        for column in _reached(step):
            named = {f"of_{name}": value for name, value in key.items()}
            reached[column].append({**named, "reached_at": step.event.at, "on_node": step.task.node})
    for column, values in reached.items():
        if values:
            connection.execute(_update_resize(column), values)
    if steps:
        events = [
            {**key, "state": event.state, "step": event.state.rank, "at": event.at, "note": event.note}
            for key, event in zip(keys, (step.event for step in steps), strict=True)
        ]
        connection.execute(insert(table_of(ResizeEventRow)), events)


def _reached(step: _Step) -> Iterable[str]:
    """Columns of ``resizes`` that have the time of this step."""
    if _runs(step.task):
        yield "granted_at"
    if step.task.state is TaskState.CONFIRMED or step.task.state.ended:
        yield "ended_at"


def resizes(connection: Connection, job: JobKey | None, limit: int) -> tuple[Resize, ...]:
    """See ``Store.resizes``. Tasks of static jobs come and go with their job, which is no resize."""
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
    for row in connection.execute(query):
        _, passed = found.setdefault((row.job_number, row.task, row.direction), (row, []))
        passed.append(ResizeEvent(row.state, row.at, row.note))
    return tuple(
        Resize(
            JobKey(row.cluster, row.job_id, row.submitted), row.task, row.role, row.node, row.direction, tuple(passed)
        )
        for row, passed in found.values()
    )


# What coordinators reported


def keep_task_reports(connection: Connection, job_number: int, reports: Sequence[TaskReport]) -> None:
    """Replace the last reports of some tasks of a job."""
    if reports:
        values = [_TASK_REPORT.values(report, job_number=job_number) for report in reports]
        connection.execute(upsert(connection, TaskReportRow, replace=True), values)


def task_reports(connection: Connection, key: JobKey) -> tuple[TaskReport, ...]:
    """See ``Store.task_reports``."""
    table = table_of(TaskReportRow)
    query = select(*table.c).join(JobRow, JobRow.number == table.c.job_number).where(JobRow.slug == key.slug)
    # worker-10 comes after worker-9
    rows = connection.execute(query.order_by(func.length(table.c.task), table.c.task))
    found = [_TASK_REPORT.record(row, f"report of task {row.task} of job {key.slug}") for row in rows]
    return tuple(sorted(found, key=lambda report: not report.task.startswith("worker")))


def add_runtime_plans(connection: Connection, job: JobKey, plans: Sequence[RuntimePlan]) -> None:
    """See ``Store.add_runtime_plans``. Raises ``StoreError`` if the job is not known."""
    number = job_numbers(connection, {job})[job]
    values = [_RUNTIME_PLAN.values(plan, job_number=number) for plan in plans]
    connection.execute(upsert(connection, RuntimePlanRow, replace=False), values)


def runtime_plan_of(row: Row[Any]) -> RuntimePlan:
    """A membership change from a row of ``runtime_plans``."""
    return _RUNTIME_PLAN.record(row, f"runtime plan {row.number}")


def runtime_plans(connection: Connection, job: JobKey, limit: int | None) -> tuple[RuntimePlan, ...]:
    """See ``Store.runtime_plans``."""
    query = (
        select(*columns(RuntimePlanRow))
        .join(JobRow, JobRow.number == RuntimePlanRow.job_number)
        .where(JobRow.slug == job.slug)
        .order_by(RuntimePlanRow.number.desc())
        .limit(limit)
    )
    return tuple(map(runtime_plan_of, connection.execute(query)))[::-1]


# Statements are built once: that takes longer than SQLite takes to run them.

_CHANGING = ("state", "handle", "submitted", "node", "since", "note")


@functools.cache
def _tasks() -> Select[Any]:
    key = (JobRow.cluster.label("job_cluster"), JobRow.id.label("job_id"), JobRow.submitted.label("job_submitted"))
    return select(*columns(TaskRow), *key).join(JobRow, JobRow.number == TaskRow.job_number)


@functools.cache
def _highest_ordinals() -> Select[Any]:
    of_job = select(func.max(TaskRow.ordinal)).where(TaskRow.job_number == JobRow.number)
    return select(JobRow.number, *(of_job.where(TaskRow.role == role).scalar_subquery().label(role) for role in Role))


@functools.cache
def _update_resize(column: str) -> Update:
    table = table_of(ResizeRow)
    named = (table.c[name] == bindparam(f"of_{name}") for name in ("job_number", "task", "direction"))
    first = func.coalesce(table.c[column], bindparam("reached_at"))
    # the resource manager may run the task on another node than it was asked for
    return update(table).where(*named).values({column: first, "node": bindparam("on_node")})


@functools.cache
def _update_task() -> Update:
    named = (TaskRow.job_number == bindparam("of_job"), TaskRow.id == bindparam("of_task"))
    values: Values = {name: bindparam(name) for name in (*_CHANGING, "ended_at", "cause")}
    values["granted_at"] = func.coalesce(TaskRow.granted_at, bindparam("granted_at"))
    return update(table_of(TaskRow)).where(*named).values(values)
