"""The store in SQL: SQLite in a file on the head node, or PostgreSQL.

This module opens the database and holds the lease; tables and the operations on them are in the modules of ``jobs``,
``tasks``, ``resizes``, ``membership_changes``, ``slots_and_decisions``, ``kind_speeds``, ``resize_guard_state``,
``mode_changes``, ``canaries`` and ``policy_versions``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from typing import Literal

from sqlalchemy import Connection, select, update

from dl2d.core.errors import AlreadyRunning, SchemaOutdated
from dl2d.core.jobs import JobKey, Progress
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds, TrainingKind
from dl2d.core.progress_callback import Count, uncounted
from dl2d.core.store import History, LeaseSign, RetentionTimes, TaskReport
from dl2d.store import retention, schema_version
from dl2d.store.connections_and_transactions import Database, StoreLocation
from dl2d.store.lease import LeaseRow, lease_of
from dl2d.store.site_history_reader import read_history
from dl2d.store.tables.canaries import SqlCanaries
from dl2d.store.tables.jobs import SqlJobs, report_progress
from dl2d.store.tables.kind_speeds import speeds
from dl2d.store.tables.membership_changes import SqlRuntimePlans
from dl2d.store.tables.mode_changes import SqlModes
from dl2d.store.tables.policy_versions import SqlRegistry
from dl2d.store.tables.resize_guard_state import SqlGuardState
from dl2d.store.tables.resizes import SqlResizes
from dl2d.store.tables.row_mapping import upsert
from dl2d.store.tables.slots_and_decisions import SqlSlots
from dl2d.store.tables.tasks import SqlTasks, keep_task_reports

_LEASE = "daemon"


class SqlStore(SqlJobs, SqlTasks, SqlResizes, SqlRuntimePlans, SqlSlots, SqlGuardState, SqlModes, SqlCanaries):
    """Implements ``dl2d.core.store.TickStore``; one object serves any number of threads.

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
        self._place = StoreLocation.parse(url)
        self._progress_seconds = progress_seconds
        if self._place.is_missing():
            raise SchemaOutdated(
                f"there is no store at {self._place}; the daemon's first start or `dl2d db upgrade` creates it"
            )
        super().__init__(Database(self._place))
        self._lease = lease_of(self._database)
        #: Term of the lease that this process holds, its name in it, and whether it has the lock as well.
        self._term: int | None = None
        self._holder = ""
        self._locked = False
        try:
            if self._place.in_memory:
                schema_version.make_in_memory(self._database)
            else:
                with self._database.reading("opening the store") as connection:
                    schema_version.check(connection, self._place)
        except BaseException:
            self._database.close()
            raise
        #: Versions of learned policies, in the same database.
        self.registry = SqlRegistry(self._database)

    # Lease

    def acquire(self, holder: str, *, silent: LeaseSign | None = None) -> None:
        """Become the only daemon on this store until ``close``, also across a crash of this process.

        Raises ``AlreadyRunning``, naming the holder. ``holder`` is a text for people: host and pid. With ``silent``,
        the lease is taken from a holder whose last sign of life that was, if it still is. Raises ``SchemaOutdated`` if
        the store was upgraded for another version of dl2d since it was opened.
        """
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
                schema_version.check(connection, self._place)  # it may have been upgraded since it was opened
                now = self._sign_in(connection, "update")
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
        self._database.fence = self._check_fence

    def renew_lease(self) -> None:
        """Give a sign of life as the holder. Raises ``AlreadyRunning`` if another daemon has the lease.

        Takes the lock as well, where a silent holder had kept it.
        """
        if not self._locked:
            with contextlib.suppress(AlreadyRunning):
                self._lease.take(self._holder)
                self._locked = True
        with self._database.writing("renewing the lease", durable=False) as connection:
            renewed = update(LeaseRow).where(LeaseRow.name == _LEASE).values(renewals=LeaseRow.renewals + 1)
            connection.execute(renewed)

    def lease_sign(self) -> LeaseSign | None:
        """Last sign of life of the holder; None if nobody ever held the lease. May raise ``SchemaOutdated``."""
        with self._database.reading("reading the lease") as connection:
            schema_version.check(connection, self._place)
            return self._sign_in(connection)

    def _sign_in(self, connection: Connection, lock: Literal["share", "update"] | None = None) -> LeaseSign | None:
        """The sign in the table; ``lock`` keeps others from changing it until the transaction ends."""
        chosen = select(LeaseRow.holder, LeaseRow.term, LeaseRow.renewals).where(LeaseRow.name == _LEASE)
        row = connection.execute(chosen.with_for_update(read=lock == "share") if lock else chosen).one_or_none()
        return None if row is None else LeaseSign(row.holder, row.term, row.renewals)

    def check_lease(self) -> None:
        """See ``TickStore.check_lease``."""
        if self._term is None:
            return
        with self._database.reading("checking the lease") as connection:
            self._check_term(self._sign_in(connection))

    def _check_fence(self, connection: Connection) -> None:
        """Refuse to write once another daemon has taken the store, e.g. while this one stood still.

        The row is locked until the transaction ends (in SQLite the whole database is), so no daemon can take over in
        the middle of it.
        """
        if self._locked:
            self._lease.check()
        self._check_term(self._sign_in(connection, "share"))

    def _check_term(self, sign: LeaseSign | None) -> None:
        if sign is None or sign.term != self._term:
            other = "nobody we know" if sign is None else sign.holder
            raise AlreadyRunning(
                f"the store {self._place} was taken over by another daemon ({other}); this one must end"
            )

    def close(self) -> None:
        """Give up the lease and all connections."""
        self._database.fence = None
        self._lease.release()
        self._database.close()

    def report_progress(self, key: JobKey, progress: Progress, tasks: Sequence[TaskReport] = ()) -> None:
        """See ``TickStore.report_progress``.

        May be lost by a power cut, not by a crash of this process: a coordinator says it all again a second later.
        """
        with self._database.writing(f"keeping progress of job {key.slug}", durable=False) as connection:
            number = report_progress(connection, key, progress, self._progress_seconds)
            keep_task_reports(connection, number, tasks)

    def speeds(self, kinds: Collection[TrainingKind], *, others: int = 0) -> tuple[MeasuredSpeeds, ...]:
        """See ``TickStore.speeds``."""
        with self._database.reading("reading measured speeds") as connection:
            return speeds(connection, kinds, others)

    def history(self, begin: float, end: float, *, unreported: bool = False, progress: Count = uncounted) -> History:
        """What was recorded in that time. Commands and environments are left out.

        ``unreported``: also of jobs that no coordinator reports on. Their epochs are the hours that they ran.
        ``progress`` is told how many of how many recorded hours are read.
        """
        with self._database.reading("reading what was recorded") as connection:
            return read_history(connection, begin, end, unreported=unreported, progress=progress)

    def prune(self, keep: RetentionTimes, now: float) -> int:
        """Delete some rows that are too old, or give back some space; returns 0 if there is nothing left to do."""
        with self._database.writing("deleting old rows", durable=False) as connection:
            return retention.prune(connection, keep, now) or retention.give_back_space(connection)

    def size(self) -> int:
        """Bytes that the store takes on disk."""
        return self._database.size()
