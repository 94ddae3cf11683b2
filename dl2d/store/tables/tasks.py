"""Tasks, and the last reports of coordinators on them: tables ``tasks`` and ``task_reports``."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import (
    Connection,
    Index,
    Row,
    Select,
    Update,
    bindparam,
    func,
    insert,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.orm import Mapped

from dl2d.core.cluster import NOT_EXECUTING, Task, TaskState, submit_order
from dl2d.core.errors import StoreError
from dl2d.core.jobs import JobKey, Role
from dl2d.core.plan_of_starts_and_stops import Start
from dl2d.core.resources import Resources
from dl2d.core.store import ResizeEvent, TaskChange, TaskReport, TaskTime
from dl2d.store.connections_and_transactions import StoreTables
from dl2d.store.tables.jobs import JobRow, job_numbers
from dl2d.store.tables.resizes import GROW, Step, keep_steps, runs, step_of
from dl2d.store.tables.row_mapping import (
    EMPTY,
    MAX_VALUES,
    ZERO,
    Base,
    Choice,
    Demand,
    JobNumber,
    Mapping,
    UserText,
    Values,
    batches,
    column,
    table_of,
    upsert,
)

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

    job_number: Mapped[JobNumber]
    id: Mapped[str] = column("role-ordinal, unique in the job", primary_key=True)
    role: Mapped[Role] = column("worker or ps", Choice(Role))
    ordinal: Mapped[int] = column("number in its id")
    node: Mapped[str] = column("node on which it was started")
    demand: Mapped[Resources] = column("resources, JSON; memory in MiB", Demand())
    state: Mapped[TaskState] = column(
        "asked granted joined confirmed draining drained released failed", Choice(TaskState)
    )
    handle: Mapped[str] = column("id in the resource manager")
    submitted: Mapped[int] = column(
        "when the resource manager accepted it, whole seconds since 1970; 0: not known yet", server_default=ZERO
    )
    asked_at: Mapped[float] = column("when it was recorded, seconds since 1970")
    granted_at: Mapped[float | None] = column(
        "when the resource manager ran it first, seconds since 1970; NULL if it never did"
    )
    ended_at: Mapped[float | None] = column("when it was released or failed, seconds since 1970")
    since: Mapped[float] = column("when the present state began, seconds since 1970")
    cause: Mapped[str] = column("why it failed, one word; empty if it did not", server_default=EMPTY)
    note: Mapped[UserText] = column("why it failed, or what the resource manager waits for")


class TaskReportRow(Base):
    """Last report on a task, also of static jobs."""

    __tablename__ = "task_reports"

    job_number: Mapped[JobNumber]
    task: Mapped[str] = column("tasks.id", primary_key=True)
    at: Mapped[float] = column("when the report came, seconds since 1970")
    cpu_seconds: Mapped[float | None] = column("processor time since the task began, s")
    cpu_percent: Mapped[float | None] = column("load in the last interval, per cent of a core")
    memory: Mapped[float | None] = column("resident memory, MiB")
    memory_peak: Mapped[float | None] = column("highest resident memory seen, MiB")
    gpus: Mapped[int] = column("number of GPUs that it has, as far as is known")
    gpu_percent: Mapped[float | None] = column("load of its GPUs, mean, per cent")
    gpu_memory: Mapped[float | None] = column("memory in use on all its GPUs, MiB")
    step_ms: Mapped[float | None] = column("time of a step, mean over the last steps, ms")
    step_p95_ms: Mapped[float | None] = column("95th percentile over its last steps, ms")
    cause: Mapped[UserText] = column("why its process ended; empty while it runs")
    how: Mapped[UserText] = column("the same in words")
    slowdown: Mapped[float | None] = column("ratio of its time to that of others for the same work")
    slowdown_reason: Mapped[UserText] = column("why it is slow, in words")


_TASK = Mapping(Task, TaskRow)
_TASK_REPORT = Mapping(TaskReport, TaskReportRow)


def _task_of(row: Row[Any]) -> Task:
    """A task from a row of ``tasks`` joined with its job's key."""
    key = JobKey(row.job_cluster, row.job_id, row.job_submitted)
    return _TASK.record(row, f"task {row.id} of job {key.slug}", job=key)


class SqlTasks(StoreTables):
    """Tasks, and the last reports on them."""

    def ask_tasks(self, starts: Sequence[Start], at: float) -> tuple[Task, ...]:
        """See ``TickStore.ask_tasks``. Raises ``StoreError`` if a job is not known."""
        if not starts:
            return ()
        with self._database.writing(f"asking for {len(starts)} tasks") as connection:
            numbers = job_numbers(connection, {start.job for start in starts}, lock=True)
            last = _last_ordinals(connection, numbers.values())
            tasks: list[Task] = []
            for start in starts:
                counted = (numbers[start.job], start.role)
                last[counted] = ordinal = last.get(counted, -1) + 1
                tasks.append(start.task(ordinal, at))
            values = [_TASK.values(task, job_number=numbers[task.job], ordinal=task.number) for task in tasks]
            connection.execute(insert(table_of(TaskRow)), values)
            asked = ResizeEvent(TaskState.ASKED, at)
            keep_steps(connection, [Step(task, numbers[task.job], GROW, asked, new=True) for task in tasks])
        return tuple(tasks)

    def tasks(self, *, live: bool, job: JobKey | None = None) -> tuple[Task, ...]:
        """See ``TickStore.tasks``."""
        query = _tasks()
        if live:
            query = query.where(TaskRow.ended_at.is_(None))
        if job is not None:
            number = select(JobRow.number).where(JobRow.slug == job.slug)
            query = query.where(TaskRow.job_number == number.scalar_subquery())
        return tuple(sorted(map(_task_of, self._rows("listing tasks", query)), key=_order))

    def tasks_of_suspended(self) -> tuple[Task, ...]:
        """Live tasks of jobs of which a task holds its resources and does not execute."""
        live = TaskRow.ended_at.is_(None)
        suspended = select(TaskRow.job_number).where(live, TaskRow.note.startswith(NOT_EXECUTING, autoescape=True))
        query = _tasks().where(live, TaskRow.job_number.in_(suspended))
        return tuple(sorted(map(_task_of, self._rows("listing suspended tasks", query)), key=_order))

    def named_tasks(self, job: JobKey, names: Collection[str]) -> tuple[Task, ...]:
        """Those of the job's tasks, ended or not, whose ids are named."""
        if not names:
            return ()
        of_job = _tasks().where(JobRow.slug == job.slug)
        queries = (of_job.where(TaskRow.id.in_(batch)) for batch in batches(set(names), MAX_VALUES - 1))
        with self._database.reading(f"looking up tasks of job {job.slug}") as connection:
            found = (row for query in queries for row in connection.execute(query))
            return tuple(sorted(map(_task_of, found), key=_order))

    def task_times(self, job: JobKey) -> tuple[TaskTime, ...]:
        """Times of the job's tasks that the resource manager ran, ended or not, by role and number."""
        query = _tasks().where(JobRow.slug == job.slug, TaskRow.granted_at.is_not(None))
        rows = self._rows(f"reading tasks of job {job.slug}", query)
        found = (TaskTime(_task_of(row), row.granted_at, row.ended_at) for row in rows)
        return tuple(sorted(found, key=lambda time: _order(time.task)))

    def change_tasks(self, changes: Sequence[TaskChange], at: float) -> tuple[Task, ...]:
        """See ``TickStore.change_tasks``. Raises ``StoreError`` if a task is not known."""
        if not changes:
            return ()
        with self._database.writing(f"moving {len(changes)} tasks") as connection:
            return _change_tasks(connection, changes, at)

    def task_reports(self, key: JobKey) -> tuple[TaskReport, ...]:
        """The last report on each task, by role and number."""
        table = table_of(TaskReportRow)
        query = select(*table.c).join(JobRow, JobRow.number == table.c.job_number).where(JobRow.slug == key.slug)
        # worker-10 comes after worker-9
        query = query.order_by(func.length(table.c.task), table.c.task)
        rows = self._rows(f"reading tasks of job {key.slug}", query)
        found = [_TASK_REPORT.record(row, f"report of task {row.task} of job {key.slug}") for row in rows]
        return tuple(sorted(found, key=lambda report: not report.task.startswith("worker")))


def _last_ordinals(connection: Connection, jobs: Iterable[int]) -> dict[tuple[int, Role], int]:
    """Highest ordinal of each job and role; one search in an index each, however many tasks a job had."""
    last: dict[tuple[int, Role], int] = {}
    for batch in batches(jobs):
        for row in connection.execute(_highest_ordinals().where(JobRow.number.in_(batch))):
            last |= {(row.number, role): ordinal for role in Role if (ordinal := getattr(row, role)) is not None}
    return last


def _order(task: Task) -> tuple[Any, int, int]:
    return (submit_order(task.job), _ROLES.index(task.role), task.number)


def _change_tasks(connection: Connection, changes: Sequence[TaskChange], at: float) -> tuple[Task, ...]:
    numbers = job_numbers(connection, {change.job for change in changes})
    before = _locked_tasks(connection, {(numbers[change.job], change.task) for change in changes})
    after = dict(before)
    steps: list[Step] = []
    for change in changes:
        named = (numbers[change.job], change.task)
        if named not in after:
            raise StoreError(f"job {change.job.slug} has no task {change.task}")
        task = change.applied(after[named], at)
        if task.state is not after[named].state:
            steps.append(step_of(after[named].state, task, change, numbers[change.job]))
        after[named] = task
    causes = {(numbers[change.job], change.task): str(change.cause) for change in changes if change.cause}
    changed = [
        {
            "of_job": named[0],
            "of_task": task.id,
            **{name: getattr(task, name) for name in _CHANGING},
            "granted_at": task.since if runs(task) else None,
            "ended_at": task.since if task.state.ended else None,
            "cause": causes.get(named, "") if task.state is TaskState.FAILED else "",
        }
        for named, task in after.items()
        if task != before[named]
    ]
    if changed:
        connection.execute(_update_task(), changed)
    keep_steps(connection, steps)
    return tuple(task for named, task in after.items() if task.state is not before[named].state)


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


def keep_task_reports(connection: Connection, job_number: int, reports: Sequence[TaskReport]) -> None:
    """Replace the last reports of some tasks of a job."""
    if reports:
        values = [_TASK_REPORT.values(report, job_number=job_number) for report in reports]
        connection.execute(upsert(connection, TaskReportRow, replace=True), values)


# Statements are built once: that takes longer than SQLite takes to run them.

_CHANGING = ("state", "handle", "submitted", "node", "since", "note")


@functools.cache
def _tasks() -> Select[Any]:
    key = (JobRow.cluster.label("job_cluster"), JobRow.id.label("job_id"), JobRow.submitted.label("job_submitted"))
    return select(table_of(TaskRow), *key).join(JobRow, JobRow.number == TaskRow.job_number)


@functools.cache
def _highest_ordinals() -> Select[Any]:
    of_job = select(func.max(TaskRow.ordinal)).where(TaskRow.job_number == JobRow.number)
    return select(JobRow.number, *(of_job.where(TaskRow.role == role).scalar_subquery().label(role) for role in Role))


@functools.cache
def _update_task() -> Update:
    named = (TaskRow.job_number == bindparam("of_job"), TaskRow.id == bindparam("of_task"))
    values: Values = {name: bindparam(name) for name in (*_CHANGING, "ended_at", "cause")}
    values["granted_at"] = func.coalesce(TaskRow.granted_at, bindparam("granted_at"))
    return update(table_of(TaskRow)).where(*named).values(values)
