"""The store in SQL: SQLite for one head node without more ado, PostgreSQL by URL."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    Connection,
    Executable,
    Row,
    Select,
    Update,
    bindparam,
    delete,
    event,
    func,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from dl2d.core.cluster import Task, TaskState
from dl2d.core.errors import AlreadyRunning, DuplicateJob, SchemaOutdated, StoreError
from dl2d.core.history import History
from dl2d.core.jobs import Allocation, Architecture, Consistency, Job, JobKey, JobState, Progress, Role
from dl2d.core.measured import (
    MOST_LOSSES,
    MOST_MEASUREMENTS,
    JobSpeeds,
    LossPoint,
    MeasuredLoss,
    MeasuredSpeeds,
    SpeedPoint,
    TrainingKind,
    count,
)
from dl2d.core.mode import Mode, ModeChange
from dl2d.core.plan import Start
from dl2d.core.store import (
    DecisionEntry,
    JobChange,
    Resize,
    ResizeEvent,
    RuntimePlan,
    Slot,
    SlotSummary,
    TaskChange,
    TaskReport,
)
from dl2d.store import rows, schema
from dl2d.store.database import Database, Place
from dl2d.store.history import read_history
from dl2d.store.lease import FileLease, Lease, NoLease, ServerLease
from dl2d.store.mapping import (
    Base,
    DecisionRow,
    JobIdRow,
    JobRow,
    LeaseRow,
    ModeChangeRow,
    ProgressRow,
    ResizeEventRow,
    ResizeRow,
    RuntimePlanRow,
    SlotRow,
    SpeedRow,
    TaskReportRow,
    TaskRow,
    table_of,
)
from dl2d.store.policy_versions import SqlRegistry
from dl2d.store.tasks import GROW, Step, advanced, keep_steps, update_tasks

_LIVE_JOBS = [state.value for state in JobState if not state.ended]
_LIVE_TASKS = [state.value for state in TaskState if not state.ended]
_LEASE = "daemon"
# Values in one statement; SQLite's default limit is 32,766.
_MOST_VALUES = 10_000


class SqlStore:
    """Implements ``dl2d.core.store.Store``; one object serves any number of threads.

    Parameters
    ----------
    url
        ``sqlite:////path/file`` or ``postgresql://user@host/database``. ``sqlite://`` is a store in memory, which lives
        as long as the object and needs no ``db upgrade``.
    progress_seconds
        Least time between two points of a job's progress series; a job's last report is always kept.

    Raises
    ------
    SchemaOutdated
        The database does not exist, is empty, or has another schema than this code.
    StoreUnavailable
        It cannot be reached.
    StoreError
        The URL is not one.
    """

    def __init__(self, url: str, *, progress_seconds: float = 10.0) -> None:
        self._place = Place.parse(url)
        self._progress_seconds = progress_seconds
        if self._place.is_missing():
            raise SchemaOutdated(f"there is no store at {self._place}; `dl2d db upgrade` creates it")
        self._database = Database(self._place)
        self._lease = _lease_of(self._database)
        self._term: int | None = None
        try:
            if self._place.in_memory:
                schema.make_in_memory(self._database)
            else:
                with self._database.reading("opening the store") as connection:
                    schema.check(connection, self._place)
        except BaseException:
            self._database.close()
            raise
        self._upsert = postgresql.insert if self._place.is_postgresql else sqlite.insert
        self._keep_speed, self._keep_report = self._replacing(SpeedRow), self._replacing(TaskReportRow)
        #: Versions of learned policies, in the same database.
        self.registry = SqlRegistry(self._database)

    # Lease

    def acquire(self, holder: str) -> None:
        """See ``Store.acquire``."""
        if self._term is not None:
            return
        self._lease.take(holder)
        try:
            with self._database.writing("taking the lease") as connection:
                term = 1 + (connection.execute(select(LeaseRow.term).where(LeaseRow.name == _LEASE)).scalar() or 0)
                held = {"holder": holder, "term": term, "since": time.time()}
                connection.execute(
                    self._upsert(LeaseRow)
                    .values(name=_LEASE, **held)
                    .on_conflict_do_update(index_elements=["name"], set_=held)
                )
        except BaseException:
            self._lease.release()
            raise
        self._term = term
        self._database.fence = self

    def check(self, connection: Connection) -> None:
        """Refuse to write once another daemon has taken the store, e.g. while PostgreSQL was away.

        The row is locked until the transaction ends, so no daemon can take over in the middle of it.
        """
        self._lease.check()
        if not self._place.is_postgresql:
            return
        found = connection.execute(
            select(LeaseRow.term, LeaseRow.holder).where(LeaseRow.name == _LEASE).with_for_update(read=True)
        ).one_or_none()
        if found is None or found.term != self._term:
            other = "nobody we know" if found is None else found.holder
            raise AlreadyRunning(
                f"the store {self._place} was taken over by another daemon ({other}); this one must end"
            )

    def close(self) -> None:
        """See ``Store.close``."""
        self._database.fence = None
        self._lease.release()
        self._database.close()

    # Jobs

    def next_job_id(self, cluster: str) -> str:
        """See ``Store.next_job_id``."""
        with self._database.writing("numbering a job") as connection:
            connection.execute(
                self._upsert(JobIdRow)
                .values(cluster=cluster, last=1)
                .on_conflict_do_update(index_elements=["cluster"], set_={"last": JobIdRow.last + 1})
            )
            # The row is locked by the statement before, so nobody else can have counted on.
            return str(connection.execute(select(JobIdRow.last).where(JobIdRow.cluster == cluster)).scalar_one())

    def add_job(self, job: Job) -> None:
        """See ``Store.add_job``."""
        values = rows.of_job(job)
        with self._database.writing(f"keeping job {job.key.slug}") as connection:
            try:
                connection.execute(insert(table_of(JobRow)), values)
            except IntegrityError as error:
                # The slug is the only thing that is unique; a value that is missing says so by itself.
                if "unique" not in str(error.orig).lower():
                    raise
                raise DuplicateJob(f"job {job.key.slug} is known already") from error

    def job(self, key: JobKey) -> Job | None:
        """See ``Store.job``."""
        found = self._jobs("looking up a job", _jobs().where(JobRow.slug == key.slug))
        return found[0] if found else None

    def find_jobs(self, text: str) -> tuple[Job, ...]:
        """See ``Store.find_jobs``."""
        if "\0" in text:
            return ()
        named = (JobRow.slug == text) | (JobRow.id == text) | (JobRow.name == text)
        return self._jobs("looking up a job", _jobs().where(named))[::-1]

    def jobs(self, *, live: bool, limit: int | None = None) -> tuple[Job, ...]:
        """See ``Store.jobs``."""
        query = _jobs()
        if live:
            query = query.where(JobRow.state.in_(_LIVE_JOBS))
        if limit is not None:
            # Longer numbers are greater, as in the order of the result.
            query = query.order_by(JobRow.submitted.desc(), func.length(JobRow.id).desc(), JobRow.id.desc())
            query = query.limit(limit)
        return self._jobs("listing jobs", query)

    def change_job(self, key: JobKey, change: JobChange, at: float) -> Job:
        """See ``Store.change_job``."""
        with self._database.writing(f"changing job {key.slug}") as connection:
            row = _locked_job(connection, key)
            values = _job_values(row, change, at)
            if values:
                connection.execute(_change_job(), {"which": row.number, **values})
            if "ended_at" in values and row.progress_at > (row.series_at or 0.0):
                self._add_to_series(connection, row, rows.to_progress(row, row.progress_at))
            return rows.to_job(_locked_job(connection, key))

    def report_progress(self, key: JobKey, progress: Progress, tasks: Sequence[TaskReport] = ()) -> None:
        """See ``Store.report_progress``.

        May be lost by a power cut, not by a crash of this process: a coordinator says it all again a second later.
        """
        with self._database.writing(f"keeping progress of job {key.slug}", durable=False) as connection:
            row = _locked_job(connection, key)
            values = rows.of_progress(progress, at="progress_at")
            connection.execute(_change_job(), {"which": row.number, **values})
            last = row.series_at
            if last is None or (progress.at > last and progress.at - last >= self._progress_seconds):
                self._add_to_series(connection, row, progress)
            if tasks:
                connection.execute(self._keep_report, [rows.of_task_report(report, row.number) for report in tasks])

    def task_reports(self, key: JobKey) -> tuple[TaskReport, ...]:
        """See ``Store.task_reports``."""
        table = table_of(TaskReportRow)
        query = select(*table.c).join(JobRow, JobRow.number == table.c.job_number).where(JobRow.slug == key.slug)
        # worker-10 comes after worker-9
        query = query.order_by(func.length(table.c.task), table.c.task)
        with self._database.reading(f"reading tasks of job {key.slug}") as connection:
            found = tuple(map(rows.to_task_report, connection.execute(query)))
        return tuple(sorted(found, key=lambda report: not report.task.startswith("worker")))

    def series(self, key: JobKey) -> tuple[Progress, ...]:
        """See ``Store.series``."""
        query = (
            select(*_columns(ProgressRow))
            .join(JobRow, JobRow.number == ProgressRow.job_number)
            .where(JobRow.slug == key.slug)
            .order_by(ProgressRow.at)
        )
        with self._database.reading(f"reading progress of job {key.slug}") as connection:
            return tuple(rows.to_progress(row, row.at) for row in connection.execute(query))

    def speeds(self, kinds: Collection[TrainingKind], *, others: int = 0) -> tuple[MeasuredSpeeds, ...]:
        """See ``Store.speeds``."""
        key = (SpeedRow.model, SpeedRow.architecture, SpeedRow.consistency)
        points: dict[TrainingKind, list[SpeedPoint]] = defaultdict(list)
        asked = {tuple(map(str, kind)) for kind in kinds}
        with self._database.reading("reading measured speeds") as connection:
            if others:
                latest = select(*key).group_by(*key).order_by(func.max(SpeedRow.at).desc(), *key)
                found = map(tuple, connection.execute(latest.limit(others + len(asked))))
                asked |= set([kind for kind in found if kind not in asked][:others])
            for batch in _batches(asked, _MOST_VALUES // len(key)):
                query = select(*_columns(SpeedRow)).where(tuple_(*key).in_(batch))
                for row in connection.execute(query.order_by(*key, SpeedRow.workers, SpeedRow.ps)):
                    kind = TrainingKind(row.model, Architecture(row.architecture), Consistency(row.consistency))
                    points[kind].append(rows.to_tally(row).point)
        return tuple(MeasuredSpeeds(kind, tuple(points[kind])) for kind in sorted(points))

    def job_speeds(self, jobs: Collection[JobKey]) -> tuple[JobSpeeds, ...]:
        """See ``Store.job_speeds``. Reads the progress of these jobs once; means are made by the database."""
        table = table_of(ProgressRow)
        size = (table.c.job_number, table.c.workers, table.c.ps)
        newest_first = func.row_number().over(partition_by=size, order_by=table.c.at.desc())
        slugs = {key.slug: key for key in jobs}
        found: dict[JobKey, list[SpeedPoint]] = defaultdict(list)
        with self._database.reading("reading speeds of jobs") as connection:
            for batch in _batches(slugs):
                numbered = (
                    select(JobRow.slug, *size[1:], table.c.at, table.c.samples_per_second, newest_first.label("back"))
                    .join(JobRow, JobRow.number == table.c.job_number)
                    .where(JobRow.slug.in_(batch), table.c.samples_per_second.is_not(None), table.c.workers > 0)
                    .subquery()
                )
                of_size = (numbered.c.slug, numbered.c.workers, numbered.c.ps)
                query = (
                    select(
                        *of_size,
                        func.avg(numbered.c.samples_per_second).label("mean"),
                        func.count().label("times"),
                        func.min(numbered.c.at).label("first"),
                        func.max(numbered.c.at).label("last"),
                    )
                    .where(numbered.c.back <= MOST_MEASUREMENTS)
                    .group_by(*of_size)
                    .order_by(*of_size)
                )
                for row in connection.execute(query):
                    at = Allocation(row.workers, row.ps)
                    found[slugs[row.slug]].append(SpeedPoint(at, row.mean, row.times, 1, row.last, row.first))
        return tuple(JobSpeeds(key, tuple(found[key])) for key in sorted(found))

    def losses(self, jobs: Collection[JobKey]) -> tuple[MeasuredLoss, ...]:
        """See ``Store.losses``. Reads the progress of these jobs once; what comes back is thinned by the database."""
        table = table_of(ProgressRow)
        newest_first = func.row_number().over(partition_by=table.c.job_number, order_by=table.c.at.desc())
        slugs = {key.slug: key for key in jobs}
        found: dict[JobKey, list[LossPoint]] = defaultdict(list)
        with self._database.reading("reading losses") as connection:
            for batch in _batches(slugs):
                numbered = (
                    select(
                        JobRow.slug,
                        table.c.epoch,
                        table.c.loss,
                        table.c.at,
                        (newest_first - 1).label("back"),
                        func.count().over(partition_by=table.c.job_number).label("total"),
                    )
                    .join(JobRow, JobRow.number == table.c.job_number)
                    .where(JobRow.slug.in_(batch), table.c.loss.is_not(None))
                    .subquery()
                )
                apart = (numbered.c.total + (MOST_LOSSES - 1)) // MOST_LOSSES
                query = select(numbered).where(numbered.c.back % apart == 0).order_by(numbered.c.slug, numbered.c.at)
                for row in connection.execute(query):
                    found[slugs[row.slug]].append(LossPoint(row.epoch, row.loss))
        return tuple(MeasuredLoss(key, tuple(found[key])) for key in sorted(found))

    def _replacing(self, model: type[Base]) -> Executable:
        """A statement that adds a row, or puts its values into the one that has its key."""
        table = table_of(model)
        upsert, key = self._upsert(table), [column.name for column in table.primary_key]
        values = {column.name: upsert.excluded[column.name] for column in table.c if column.name not in key}
        return upsert.on_conflict_do_update(index_elements=key, set_=values)

    def _jobs(self, doing: str, query: Select[Any]) -> tuple[Job, ...]:
        with self._database.reading(doing) as connection:
            found = connection.execute(query).all()
        return tuple(sorted(map(rows.to_job, found), key=lambda job: rows.submit_order(job.key)))

    def _add_to_series(self, connection: Connection, row: Row[Any], progress: Progress) -> None:
        values = rows.of_progress(progress, at="at")
        connection.execute(insert(table_of(ProgressRow)), {"job_number": row.number, **values})
        connection.execute(_change_job(), {"which": row.number, "series_at": progress.at})
        if not values["samples_per_second"] or not progress.workers:
            return
        kind, speed = TrainingKind.of(rows.to_job(row).request), values["samples_per_second"]
        same_kind = {
            "model": kind.model,
            "architecture": kind.architecture.value,
            "consistency": kind.consistency.value,
        }
        key = {**same_kind, "workers": progress.workers, "ps": progress.ps}
        known = connection.execute(_one_speed(), key).one_or_none()
        size = Allocation(progress.workers, progress.ps)
        before = None if row.strayed_workers is None else Allocation(row.strayed_workers, row.strayed_ps)
        counted = count(
            None if known is None else rows.to_tally(known),
            size,
            speed,
            job=row.slug,
            at=progress.at,
            strayed=before,
        )
        if counted.strayed != before:
            where = (None, None) if counted.strayed is None else counted.strayed
            strayed = {"strayed_workers": where[0], "strayed_ps": where[1]}
            connection.execute(_change_job(), {"which": row.number, **strayed})
        if counted.tally is None:
            return
        connection.execute(self._keep_speed, {**key, **rows.of_tally(counted.tally)})
        if counted.wrong is not None:
            _retract(connection, same_kind, counted.wrong)

    # Tasks and resizes

    def ask_tasks(self, starts: Sequence[Start], at: float) -> tuple[Task, ...]:
        """See ``Store.ask_tasks``. Raises ``StoreError`` if a job is not known."""
        if not starts:
            return ()
        tasks: list[Task] = []
        with self._database.writing(f"asking for {len(starts)} tasks") as connection:
            numbers = _job_numbers(connection, {start.job for start in starts}, lock=True)
            last = _last_ordinals(connection, numbers.values())
            for start in starts:
                counted = (numbers[start.job], start.role.value)
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
            connection.execute(insert(table_of(TaskRow)), [rows.of_task(task, numbers[task.job]) for task in tasks])
            asked = [Step(task, numbers[task.job], GROW, ResizeEvent(TaskState.ASKED, at), new=True) for task in tasks]
            keep_steps(connection, asked)
        return tuple(tasks)

    def tasks(self, *, live: bool, job: JobKey | None = None) -> tuple[Task, ...]:
        """See ``Store.tasks``."""
        query = _tasks()
        if live:
            query = query.where(TaskRow.state.in_(_LIVE_TASKS))
        if job is not None:
            query = query.where(JobRow.slug == job.slug)
        with self._database.reading("listing tasks") as connection:
            found = connection.execute(query).all()
        return tuple(sorted(map(_task, found), key=rows.task_order))

    def change_tasks(self, changes: Sequence[TaskChange], at: float) -> tuple[Task, ...]:
        """See ``Store.change_tasks``. Raises ``StoreError`` if a task is not known."""
        if not changes:
            return ()
        with self._database.writing(f"moving {len(changes)} tasks") as connection:
            numbers = _job_numbers(connection, {change.job for change in changes})
            before = _locked_tasks(connection, {(numbers[change.job], change.task) for change in changes})
            after = dict(before)
            steps: list[Step] = []
            for change in changes:
                named = (numbers[change.job], change.task)
                if named not in after:
                    raise StoreError(f"job {change.job.slug} has no task {change.task}")
                task, step = advanced(after[named], change, numbers[change.job], at)
                after[named] = task
                steps += [step] if step else []
            update_tasks(connection, [(named[0], task) for named, task in after.items() if task != before[named]])
            keep_steps(connection, steps)
        return tuple(task for named, task in after.items() if task.state is not before[named].state)

    def resizes(self, job: JobKey | None = None, *, limit: int = 1000) -> tuple[Resize, ...]:
        """See ``Store.resizes``."""
        newest = select(ResizeRow, JobRow.cluster, JobRow.id.label("job_id"), JobRow.submitted).join(
            JobRow, JobRow.number == ResizeRow.job_number
        )
        if job is not None:
            newest = newest.where(JobRow.slug == job.slug)
        order = ("began_at", "job_number", "task", "direction")
        columns = table_of(ResizeRow).c
        chosen = newest.order_by(*(columns[name].desc() for name in order)).limit(limit).subquery()
        joined = (
            select(chosen, ResizeEventRow.state, ResizeEventRow.at, ResizeEventRow.note)
            .join(
                ResizeEventRow,
                (ResizeEventRow.job_number == chosen.c.job_number)
                & (ResizeEventRow.task == chosen.c.task)
                & (ResizeEventRow.direction == chosen.c.direction),
            )
            .order_by(*(chosen.c[name].desc() for name in order), ResizeEventRow.step)
        )
        found: dict[tuple[int, str, str], tuple[Row[Any], list[ResizeEvent]]] = {}
        with self._database.reading("listing resizes") as connection:
            for row in connection.execute(joined):
                _, events = found.setdefault((row.job_number, row.task, row.direction), (row, []))
                events.append(ResizeEvent(TaskState(row.state), row.at, row.note))
        return tuple(
            Resize(
                JobKey(row.cluster, row.job_id, row.submitted),
                row.task,
                Role(row.role),
                row.node,
                row.direction,
                tuple(events),
            )
            for row, events in found.values()
        )

    def add_runtime_plans(self, job: JobKey, plans: Sequence[RuntimePlan]) -> None:
        """See ``Store.add_runtime_plans``. Raises ``StoreError`` if the job is not known."""
        if not plans:
            return
        with self._database.writing(f"keeping plans of job {job.slug}") as connection:
            number = _job_numbers(connection, {job})[job]
            connection.execute(
                self._upsert(table_of(RuntimePlanRow)).on_conflict_do_nothing(),
                [rows.of_runtime_plan(plan, number) for plan in plans],
            )

    def runtime_plans(self, job: JobKey) -> tuple[RuntimePlan, ...]:
        """See ``Store.runtime_plans``."""
        query = (
            select(*_columns(RuntimePlanRow))
            .join(JobRow, JobRow.number == RuntimePlanRow.job_number)
            .where(JobRow.slug == job.slug)
            .order_by(RuntimePlanRow.number)
        )
        with self._database.reading(f"reading plans of job {job.slug}") as connection:
            return tuple(map(rows.to_runtime_plan, connection.execute(query)))

    # Slots and decisions

    def record_slot(self, slot: Slot) -> None:
        """See ``Store.record_slot``. Raises ``StoreError`` if the number is taken or a job is not known."""
        values = rows.of_slot(slot)
        with self._database.writing(f"recording slot {slot.number}") as connection:
            numbers = _job_numbers(connection, {decided.job for decided in slot.decision.jobs})
            connection.execute(insert(table_of(SlotRow)), values)
            decided = [rows.of_decision(slot.number, numbers[each.job], each) for each in slot.decision.jobs]
            if decided:
                connection.execute(insert(table_of(DecisionRow)), decided)

    def last_slot_number(self) -> int:
        """See ``Store.last_slot_number``."""
        with self._database.reading("reading the last slot") as connection:
            return connection.execute(select(func.max(SlotRow.number))).scalar() or 0

    def slot(self, number: int) -> Slot | None:
        """See ``Store.slot``."""
        with self._database.reading(f"reading slot {number}") as connection:
            row = connection.execute(select(*_columns(SlotRow)).where(SlotRow.number == number)).one_or_none()
        return None if row is None else rows.to_slot(row)

    def slots(self, *, limit: int = 100) -> tuple[SlotSummary, ...]:
        """See ``Store.slots``."""
        large = {"snapshot", "decision", "proposed", "shadow", "plan", "outcome"}
        small = [column for column in _columns(SlotRow) if column.name not in large]
        query = select(*small).order_by(SlotRow.number.desc()).limit(limit)
        with self._database.reading("listing slots") as connection:
            return tuple(map(rows.to_summary, connection.execute(query)))

    def history(self, begin: float, end: float) -> History:
        """See ``RecordingStore.history``."""
        return read_history(self._database, begin, end, self.speeds)

    def enter_mode(self, mode: Mode, *, at: float, by: str, reason: str) -> ModeChange | None:
        """See ``SiteStore.enter_mode``."""
        with self._database.writing(f"entering mode {mode}") as connection:
            last = connection.execute(_mode_changes(1)).one_or_none()
            change = ModeChange(at, None if last is None else Mode(last.after), mode, by, reason)
            if change.before is mode:
                return None
            connection.execute(insert(table_of(ModeChangeRow)), rows.of_mode_change(change))
        return change

    def mode_changes(self, *, limit: int = 100) -> tuple[ModeChange, ...]:
        """See ``SiteStore.mode_changes``."""
        with self._database.reading("listing changes of mode") as connection:
            return tuple(map(rows.to_mode_change, connection.execute(_mode_changes(limit))))

    def decisions(self, job: JobKey, *, limit: int = 100) -> tuple[DecisionEntry, ...]:
        """See ``Store.decisions``."""
        of_slot: list[Any] = [SlotRow.at, SlotRow.policy, SlotRow.policy_version, SlotRow.inputs_hash, SlotRow.measure]
        query = (
            select(*_columns(DecisionRow), *of_slot)
            .join(SlotRow, SlotRow.number == DecisionRow.slot)
            .join(JobRow, JobRow.number == DecisionRow.job_number)
            .where(JobRow.slug == job.slug)
            .order_by(DecisionRow.slot.desc())
            .limit(limit)
        )
        with self._database.reading(f"reading decisions on job {job.slug}") as connection:
            return tuple(rows.to_decision(row, job) for row in connection.execute(query))


def _lease_of(database: Database) -> Lease:
    place = database.place
    if place.file is not None:
        return FileLease(place, place.file)
    if not place.is_postgresql:
        return NoLease()
    lease = ServerLease(place, database.engine)
    event.listen(database.engine, "connect", lambda *_: lease.doubt())
    return lease


def _mode_changes(limit: int) -> Select[Any]:
    return select(*_columns(ModeChangeRow)).order_by(ModeChangeRow.number.desc()).limit(limit)


def _columns(table: type[Base]) -> list[Any]:
    return list(table_of(table).c)


# Statements are built once: that takes longer than SQLite takes to run them.


@functools.cache
def _jobs() -> Select[Any]:
    return select(*_columns(JobRow))


@functools.cache
def _lock_job() -> Select[Any]:
    return _jobs().where(JobRow.slug == bindparam("which")).with_for_update()


@functools.cache
def _change_job() -> Update:
    table = table_of(JobRow)
    return update(table).where(table.c.number == bindparam("which"))


@functools.cache
def _one_speed() -> Select[Any]:
    of_key = [column == bindparam(column.name) for column in table_of(SpeedRow).primary_key]
    return select(*_columns(SpeedRow)).where(*of_key).with_for_update()


@functools.cache
def _tasks() -> Select[Any]:
    key = (JobRow.cluster.label("job_cluster"), JobRow.id.label("job_id"), JobRow.submitted.label("job_submitted"))
    return select(*_columns(TaskRow), *key).join(JobRow, JobRow.number == TaskRow.job_number)


def _task(row: Row[Any]) -> Task:
    return rows.to_task(row, JobKey(row.job_cluster, row.job_id, row.job_submitted))


def _batches(values: Iterable[Any], size: int = _MOST_VALUES) -> Iterable[list[Any]]:
    """Values sorted (so that two writers lock rows in the same order) and cut to what one statement can take."""
    ordered = sorted(values)
    return (ordered[start : start + size] for start in range(0, len(ordered), size))


def _retract(connection: Connection, kind: Mapping[str, str], job: str) -> None:
    """Forget what nobody but a job showed of a kind."""
    of_kind = [getattr(SpeedRow, name) == value for name, value in kind.items()]
    alone = select(*_columns(SpeedRow)).where(*of_kind, SpeedRow.job == job, SpeedRow.jobs == 1).with_for_update()
    for row in connection.execute(alone).all():
        here = (*of_kind, SpeedRow.workers == row.workers, SpeedRow.ps == row.ps)
        left = rows.to_tally(row).without(job)
        if left is None:
            connection.execute(delete(SpeedRow).where(*here))
        else:
            connection.execute(update(SpeedRow).where(*here).values(**rows.of_tally(left)))


def _locked_job(connection: Connection, key: JobKey) -> Row[Any]:
    row = connection.execute(_lock_job(), {"which": key.slug}).one_or_none()
    if row is None:
        raise StoreError(f"there is no job {key.slug}")
    return row


def _job_values(row: Row[Any], change: JobChange, at: float) -> dict[str, Any]:
    """The columns that a change sets, after the rule that jobs only move forward."""
    values: dict[str, Any] = {}
    if change.anchor is not None:
        values["anchor"] = change.anchor
    if change.address is not None:
        values["address"] = change.address
    state = JobState(row.state)
    if state.ended:
        return values
    if change.end_reason is not None:
        values["end_reason"] = change.end_reason
    if change.digest is not None:
        values["digest"] = change.digest
    if change.request is not None:
        values |= rows.of_request(change.request)
    if change.state is not None and _job_rank(change.state) > _job_rank(state):
        values["state"] = change.state.value
        if change.state is JobState.RUNNING:
            values["started_at"] = at
        if change.state.ended:
            values["ended_at"] = at
    return values


def _job_rank(state: JobState) -> int:
    return 3 if state.ended else (JobState.SUBMITTED, JobState.READY, JobState.RUNNING).index(state)


def _job_numbers(connection: Connection, keys: Iterable[JobKey], *, lock: bool = False) -> dict[JobKey, int]:
    slugs = {key.slug: key for key in keys}
    numbers: dict[JobKey, int] = {}
    for batch in _batches(slugs):
        query = select(JobRow.slug, JobRow.number).where(JobRow.slug.in_(batch)).order_by(JobRow.number)
        for row in connection.execute(query.with_for_update() if lock else query):
            numbers[slugs[row.slug]] = row.number
    if len(numbers) < len(slugs):
        missing = sorted(key.slug for key in slugs.values() if key not in numbers)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StoreError(f"there is no job {missing[0]}{more}")
    return numbers


def _last_ordinals(connection: Connection, jobs: Iterable[int]) -> dict[tuple[int, str], int]:
    last: dict[tuple[int, str], int] = {}
    for batch in _batches(jobs):
        query = (
            select(TaskRow.job_number, TaskRow.role, func.max(TaskRow.ordinal))
            .where(TaskRow.job_number.in_(batch))
            .group_by(TaskRow.job_number, TaskRow.role)
        )
        last |= {(job, role): ordinal for job, role, ordinal in connection.execute(query)}
    return last


def _locked_tasks(connection: Connection, named: set[tuple[int, str]]) -> dict[tuple[int, str], Task]:
    found: dict[tuple[int, str], Task] = {}
    for batch in _batches(named, _MOST_VALUES // 2):
        query = (
            _tasks()
            .where(tuple_(TaskRow.job_number, TaskRow.id).in_(batch))
            .order_by(TaskRow.job_number, TaskRow.id)
            .with_for_update(of=TaskRow)
        )
        found |= {(row.job_number, row.id): _task(row) for row in connection.execute(query)}
    return found
