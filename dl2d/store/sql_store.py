"""The store in SQL: SQLite in a file on the head node, or PostgreSQL.

This module opens the database, holds the lease and begins transactions; tables and statements are in the modules of
``jobs``, ``tasks``, ``scheduling_slots``, ``kind_speeds``, ``modes``, ``canaries`` and ``policy_versions``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Connection, select, update

from dl2d.core.canary import Canary, CanaryJob
from dl2d.core.cluster import Task
from dl2d.core.daemon_mode import Mode, ModeChange
from dl2d.core.decision import JobDecision
from dl2d.core.errors import AlreadyRunning, SchemaOutdated
from dl2d.core.guard_state import GuardState
from dl2d.core.jobs import Job, JobKey, Progress, User
from dl2d.core.measured_losses import MeasuredLoss
from dl2d.core.measured_speeds import JobSpeeds, MeasuredSpeeds, TrainingKind
from dl2d.core.site_history import History
from dl2d.core.store import (
    DecisionEntry,
    JobChange,
    JobList,
    JobSlot,
    Keep,
    LeaseSign,
    Resize,
    RuntimePlan,
    Slot,
    SlotSummary,
    TaskChange,
    TaskReport,
    TaskTime,
)
from dl2d.core.tick_plan import Start
from dl2d.store import canaries as canary_queries
from dl2d.store import guard_state as guard_state_queries
from dl2d.store import jobs as job_queries
from dl2d.store import kind_speeds as speed_queries
from dl2d.store import mode_changes as mode_queries
from dl2d.store import resizes as resize_queries
from dl2d.store import retention, schema
from dl2d.store import runtime_plans as plan_queries
from dl2d.store import scheduling_slots as slot_queries
from dl2d.store import tasks as task_queries
from dl2d.store.database import Database, Place
from dl2d.store.lease import LeaseRow, lease_of
from dl2d.store.policy_versions import SqlRegistry
from dl2d.store.row_mapping import upsert
from dl2d.store.site_history import read_history

_LEASE = "daemon"


class SqlStore:
    """Implements ``dl2d.core.store.Store``; one object serves any number of threads.

    Parameters
    ----------
    url
        ``sqlite:////path/file`` or ``postgresql://user@host/database``. ``sqlite://`` is a store in memory, which lives
        as long as the object and needs no ``db upgrade``.
    progress_seconds
        Minimum time between two points of a job's progress series; a job's last report is always kept.

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
            raise SchemaOutdated(
                f"there is no store at {self._place}; the daemon's first start or `dl2d db upgrade` creates it"
            )
        self._database = Database(self._place)
        self._lease = lease_of(self._database)
        #: Term of the lease that this process holds, its name in it, and whether it has the lock as well.
        self._term: int | None = None
        self._holder = ""
        self._locked = False
        try:
            if self._place.in_memory:
                schema.make_in_memory(self._database)
            else:
                with self._database.reading("opening the store") as connection:
                    schema.check(connection, self._place)
        except BaseException:
            self._database.close()
            raise
        #: Versions of learned policies, in the same database.
        self.registry = SqlRegistry(self._database)

    # Lease

    def acquire(self, holder: str, *, silent: LeaseSign | None = None) -> None:
        """See ``Store.acquire``."""
        if self._term is not None:
            return
        try:
            self._lease.take(holder)
            self._locked = True
        except AlreadyRunning:
            if silent is None:
                raise
        try:
            with self._database.writing("taking the lease") as connection:
                schema.check(connection, self._place)  # it may have been upgraded since it was opened
                now = self._sign_in(connection, locks=True)
                if silent is not None and now != silent:
                    raise AlreadyRunning(f"the store {self._place} is held by another daemon, which is alive")
                term = 1 + (0 if now is None else now.term)
                held = {"name": _LEASE, "holder": holder, "term": term, "since": time.time(), "renewals": 0}
                connection.execute(upsert(connection, LeaseRow, replace=True), held)
        except BaseException:
            self._lease.release()
            self._locked = False
            raise
        self._term, self._holder = term, holder
        self._database.fence = self

    def renew_lease(self) -> None:
        """See ``Store.renew_lease``. Takes the lock as well, where a silent holder had kept it."""
        if not self._locked:
            with contextlib.suppress(AlreadyRunning):
                self._lease.take(self._holder)
                self._locked = True
        with self._database.writing("renewing the lease", durable=False) as connection:
            renewed = update(LeaseRow).where(LeaseRow.name == _LEASE).values(renewals=LeaseRow.renewals + 1)
            connection.execute(renewed)

    def lease_sign(self) -> LeaseSign | None:
        """See ``Store.lease_sign``."""
        with self._database.reading("reading the lease") as connection:
            schema.check(connection, self._place)
            return self._sign_in(connection)

    def _sign_in(self, connection: Connection, *, locks: bool = False) -> LeaseSign | None:
        """The sign in the table; ``locks`` keeps others from changing it until the transaction ends."""
        chosen = select(LeaseRow.holder, LeaseRow.term, LeaseRow.renewals).where(LeaseRow.name == _LEASE)
        row = connection.execute(chosen.with_for_update() if locks else chosen).one_or_none()
        return None if row is None else LeaseSign(row.holder, row.term, row.renewals)

    def check_lease(self) -> None:
        """See ``TickStore.check_lease``."""
        if self._term is None:
            return
        with self._database.reading("checking the lease") as connection:
            self._check_term(self._sign_in(connection))

    def check(self, connection: Connection) -> None:
        """Refuse to write once another daemon has taken the store, e.g. while this one stood still.

        The row is locked until the transaction ends (in SQLite the whole database is), so no daemon can take over in
        the middle of it.
        """
        if self._locked:
            self._lease.check()
        chosen = select(LeaseRow.holder, LeaseRow.term, LeaseRow.renewals).where(LeaseRow.name == _LEASE)
        row = connection.execute(chosen.with_for_update(read=True)).one_or_none()
        self._check_term(None if row is None else LeaseSign(row.holder, row.term, row.renewals))

    def _check_term(self, sign: LeaseSign | None) -> None:
        if sign is None or sign.term != self._term:
            other = "nobody we know" if sign is None else sign.holder
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
            return job_queries.next_job_id(connection, cluster)

    def add_job(self, job: Job) -> None:
        """See ``Store.add_job``."""
        with self._database.writing(f"keeping job {job.key.slug}") as connection:
            job_queries.add_job(connection, job)

    def job(self, key: JobKey) -> Job | None:
        """See ``Store.job``."""
        with self._database.reading("looking up a job") as connection:
            return job_queries.job(connection, key)

    def known_jobs(self, keys: Collection[JobKey]) -> frozenset[JobKey]:
        """See ``Store.known_jobs``."""
        with self._database.reading("looking up jobs") as connection:
            return job_queries.known_jobs(connection, keys)

    def find_jobs(self, text: str, owner: User | None = None) -> tuple[Job, ...]:
        """See ``Store.find_jobs``."""
        with self._database.reading("looking up a job") as connection:
            return job_queries.find_jobs(connection, text, owner)

    def list_jobs(self, owner: User | None = None, *, ended_since: float, limit: int) -> JobList:
        """See ``Store.list_jobs``."""
        with self._database.reading("listing jobs") as connection:
            return job_queries.list_jobs(connection, owner, ended_since, limit)

    def jobs(self, *, live: bool, limit: int | None = None) -> tuple[Job, ...]:
        """See ``Store.jobs``."""
        with self._database.reading("listing jobs") as connection:
            return job_queries.jobs(connection, live=live, limit=limit)

    def last_ended(self, limit: int) -> tuple[Job, ...]:
        """See ``Store.last_ended``."""
        with self._database.reading("listing ended jobs") as connection:
            return job_queries.last_ended(connection, limit)

    def change_job(self, key: JobKey, change: JobChange, at: float) -> Job:
        """See ``Store.change_job``."""
        with self._database.writing(f"changing job {key.slug}") as connection:
            return job_queries.change_job(connection, key, change, at)

    def report_progress(self, key: JobKey, progress: Progress, tasks: Sequence[TaskReport] = ()) -> None:
        """See ``Store.report_progress``.

        May be lost by a power cut, not by a crash of this process: a coordinator says it all again a second later.
        """
        with self._database.writing(f"keeping progress of job {key.slug}", durable=False) as connection:
            number = job_queries.report_progress(connection, key, progress, self._progress_seconds)
            task_queries.keep_task_reports(connection, number, tasks)

    def series(self, key: JobKey) -> tuple[Progress, ...]:
        """See ``Store.series``."""
        with self._database.reading(f"reading progress of job {key.slug}") as connection:
            return job_queries.series(connection, key)

    def job_speeds(self, jobs: Collection[JobKey]) -> tuple[JobSpeeds, ...]:
        """See ``Store.job_speeds``."""
        with self._database.reading("reading speeds of jobs") as connection:
            return job_queries.job_speeds(connection, jobs)

    def losses(self, jobs: Collection[JobKey]) -> tuple[MeasuredLoss, ...]:
        """See ``Store.losses``."""
        with self._database.reading("reading losses") as connection:
            return job_queries.losses(connection, jobs)

    def speeds(self, kinds: Collection[TrainingKind], *, others: int = 0) -> tuple[MeasuredSpeeds, ...]:
        """See ``Store.speeds``."""
        with self._database.reading("reading measured speeds") as connection:
            return speed_queries.speeds(connection, kinds, others)

    # Tasks and resizes

    def ask_tasks(self, starts: Sequence[Start], at: float) -> tuple[Task, ...]:
        """See ``Store.ask_tasks``. Raises ``StoreError`` if a job is not known."""
        if not starts:
            return ()
        with self._database.writing(f"asking for {len(starts)} tasks") as connection:
            return task_queries.ask_tasks(connection, starts, at)

    def tasks(self, *, live: bool, job: JobKey | None = None) -> tuple[Task, ...]:
        """See ``Store.tasks``."""
        with self._database.reading("listing tasks") as connection:
            return task_queries.tasks(connection, live=live, job=job)

    def named_tasks(self, job: JobKey, names: Collection[str]) -> tuple[Task, ...]:
        """See ``Store.named_tasks``."""
        if not names:
            return ()
        with self._database.reading(f"looking up tasks of job {job.slug}") as connection:
            return task_queries.named_tasks(connection, job, names)

    def change_tasks(self, changes: Sequence[TaskChange], at: float) -> tuple[Task, ...]:
        """See ``Store.change_tasks``. Raises ``StoreError`` if a task is not known."""
        if not changes:
            return ()
        with self._database.writing(f"moving {len(changes)} tasks") as connection:
            return task_queries.change_tasks(connection, changes, at)

    def resizes(self, job: JobKey | None = None, *, limit: int = 1000) -> tuple[Resize, ...]:
        """See ``Store.resizes``."""
        with self._database.reading("listing resizes") as connection:
            return resize_queries.resizes(connection, job, limit)

    def task_times(self, job: JobKey) -> tuple[TaskTime, ...]:
        """See ``Store.task_times``."""
        with self._database.reading(f"reading tasks of job {job.slug}") as connection:
            return task_queries.task_times(connection, job)

    def task_reports(self, key: JobKey) -> tuple[TaskReport, ...]:
        """See ``Store.task_reports``."""
        with self._database.reading(f"reading tasks of job {key.slug}") as connection:
            return task_queries.task_reports(connection, key)

    def add_runtime_plans(self, job: JobKey, plans: Sequence[RuntimePlan]) -> None:
        """See ``Store.add_runtime_plans``. Raises ``StoreError`` if the job is not known."""
        if not plans:
            return
        with self._database.writing(f"keeping plans of job {job.slug}") as connection:
            plan_queries.add_runtime_plans(connection, job, plans)

    def runtime_plans(self, job: JobKey, *, limit: int | None = None) -> tuple[RuntimePlan, ...]:
        """See ``Store.runtime_plans``."""
        with self._database.reading(f"reading plans of job {job.slug}") as connection:
            return plan_queries.runtime_plans(connection, job, limit)

    # Slots and decisions

    def record_slot(self, slot: Slot) -> None:
        """See ``Store.record_slot``. Raises ``StoreError`` if the number is taken or a job is not known."""
        with self._database.writing(f"recording slot {slot.number}") as connection:
            slot_queries.record_slot(connection, slot)

    def last_slot_number(self) -> int:
        """See ``Store.last_slot_number``."""
        with self._database.reading("reading the last slot") as connection:
            return slot_queries.last_slot_number(connection)

    def slot(self, number: int) -> Slot | None:
        """See ``Store.slot``."""
        with self._database.reading(f"reading slot {number}") as connection:
            return slot_queries.slot(connection, number)

    def job_slot(self, number: int, job: JobKey) -> JobSlot | None:
        """See ``Store.job_slot``."""
        with self._database.reading(f"reading slot {number}") as connection:
            return slot_queries.job_slot(connection, number, job)

    def grown_jobs(self, number: int, owner: User | None = None) -> tuple[JobDecision, ...]:
        """See ``Store.grown_jobs``."""
        with self._database.reading(f"reading decisions of slot {number}") as connection:
            return slot_queries.grown_jobs(connection, number, owner)

    def slots(self, *, limit: int = 100) -> tuple[SlotSummary, ...]:
        """See ``Store.slots``."""
        with self._database.reading("listing slots") as connection:
            return slot_queries.slots(connection, limit)

    def decisions(self, job: JobKey, *, limit: int = 100, changed: bool = False) -> tuple[DecisionEntry, ...]:
        """See ``Store.decisions``."""
        with self._database.reading(f"reading decisions on job {job.slug}") as connection:
            return slot_queries.decisions(connection, job, limit, changed=changed)

    def last_decisions(self, jobs: Collection[JobKey]) -> dict[JobKey, JobDecision]:
        """See ``Store.last_decisions``."""
        with self._database.reading("reading the last decisions") as connection:
            return slot_queries.last_decisions(connection, jobs)

    def keep_guard_state(self, memory: GuardState) -> None:
        """See ``TickStore.keep_guard_state``."""
        with self._database.writing("keeping the guard's state") as connection:
            guard_state_queries.keep(connection, memory)

    def guard_state(self) -> GuardState:
        """See ``TickStore.guard_state``."""
        with self._database.reading("reading the guard's state") as connection:
            return guard_state_queries.kept(connection)

    # Canaries

    def assign_canary(self, canary: int, groups: Mapping[JobKey, bool]) -> frozenset[JobKey]:
        """See ``TickStore.assign_canary``."""
        with self._database.writing("recording groups of a canary") as connection:
            return canary_queries.assign(connection, canary, groups)

    def keep_canary(self, canary: Canary) -> Canary:
        """See ``SiteStore.keep_canary``."""
        with self._database.writing("recording a canary") as connection:
            return canary_queries.keep(connection, canary)

    def canaries(self, *, limit: int = 100) -> tuple[Canary, ...]:
        """See ``SiteStore.canaries``."""
        with self._database.reading("listing canaries") as connection:
            return canary_queries.newest(connection, limit)

    def canary_jobs(self, canary: Canary) -> tuple[CanaryJob, ...]:
        """See ``SiteStore.canary_jobs``."""
        with self._database.reading("reading jobs of a canary") as connection:
            return canary_queries.jobs_of(connection, canary)

    # The site

    def history(self, begin: float, end: float, *, unreported: bool = False) -> History:
        """See ``RecordingStore.history``."""
        with self._database.reading("reading what was recorded") as connection:
            return read_history(connection, begin, end, unreported=unreported)

    def enter_mode(self, mode: Mode, *, at: float, by: str, reason: str) -> ModeChange | None:
        """See ``SiteStore.enter_mode``."""
        with self._database.writing(f"entering mode {mode}") as connection:
            return mode_queries.enter(connection, mode, at=at, by=by, reason=reason)

    def mode_changes(self, *, limit: int = 100) -> tuple[ModeChange, ...]:
        """See ``SiteStore.mode_changes``."""
        with self._database.reading("listing changes of mode") as connection:
            return mode_queries.changes(connection, limit)

    def prune(self, keep: Keep, now: float) -> int:
        """See ``SiteStore.prune``."""
        with self._database.writing("deleting old rows", durable=False) as connection:
            return retention.prune(connection, keep, now) or retention.give_back_space(connection)

    def size(self) -> int:
        """See ``SiteStore.size``."""
        return self._database.size()
