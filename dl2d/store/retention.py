"""Deletes rows that are older than a site keeps them, in small steps, and gives the space back to the file system.

Each step is one short transaction, so that ticks and heartbeats never wait long.
"""

from __future__ import annotations

import math
import sqlite3
from typing import cast

from sqlalchemy import Connection, and_, delete, exists, func, select, text

from dl2d.core.store import RetentionTimes
from dl2d.store.tables.canaries import CanaryJobRow
from dl2d.store.tables.job_speeds_and_losses import JobLossRow, JobSpeedRow
from dl2d.store.tables.jobs import JobRow, ProgressRow
from dl2d.store.tables.kind_speeds import SpeedRow
from dl2d.store.tables.membership_changes import RuntimePlanRow
from dl2d.store.tables.resizes import ResizeEventRow, ResizeRow
from dl2d.store.tables.row_mapping import Base, table_of
from dl2d.store.tables.slots_and_decisions import DecisionRow, ShadowAllocationRow, SlotResourceRow, SlotRow
from dl2d.store.tables.tasks import TaskReportRow, TaskRow

#: Maximum number of rows of progress, and of slots, that one step deletes.
_ROWS, _SLOTS = 2000, 5
#: Pages of SQLite that one step gives back, and the share of free pages in the file above which it does.
_PAGES, _FREE_SHARE = 500, 0.1
#: Tables with rows of a job, in an order in which they can be deleted.
_OF_JOB: tuple[type[Base], ...] = (
    DecisionRow, ShadowAllocationRow, ResizeEventRow, ResizeRow, TaskReportRow, RuntimePlanRow, TaskRow, JobSpeedRow,
    JobLossRow, CanaryJobRow,
)  # fmt: skip


#: A job with old progress. The query steps through the index from job to job, so that jobs without progress, as most
#: ended ones are, cost nothing.
_JOB_WITH_OLD_PROGRESS = text("""
    WITH RECURSIVE jobs_with_progress(number) AS (
        SELECT min(job_number) FROM progress
        UNION ALL
        SELECT (SELECT min(job_number) FROM progress WHERE job_number > number) FROM jobs_with_progress
        WHERE number IS NOT NULL
    )
    SELECT number FROM jobs_with_progress
    WHERE EXISTS (SELECT 1 FROM progress WHERE job_number = number AND at < :before)
    LIMIT 1
""")


def prune(connection: Connection, keep: RetentionTimes, now: float) -> int:
    """Delete some of the rows that are too old; returns how many, 0 if there are none left.

    ``now`` is in seconds since 1970.
    """
    return (
        _prune_progress(connection, now - keep.progress)
        or _prune_decisions(connection, now - keep.decisions)
        or _prune_slots(connection, now - keep.slots)
        or _prune_jobs(connection, now - keep.jobs)
        or _prune_speeds(connection, now - keep.jobs)
    )


def _prune_progress(connection: Connection, before: float) -> int:
    """Delete old progress of one job."""
    number = connection.execute(_JOB_WITH_OLD_PROGRESS, {"before": before}).scalar()
    return 0 if number is None else _delete_progress(connection, number, before)


def _delete_progress(connection: Connection, number: int, before: float) -> int:
    """Delete at most ``_ROWS`` rows of progress of a job, the oldest first; never those from ``before`` on."""
    of_job = and_(ProgressRow.job_number == number, ProgressRow.at < before)
    next_step = select(ProgressRow.at).where(of_job).order_by(ProgressRow.at).offset(_ROWS).limit(1)
    end = connection.execute(next_step).scalar()
    rows = and_(of_job, ProgressRow.at < (before if end is None else end))
    return connection.execute(delete(table_of(ProgressRow)).where(rows)).rowcount


def _prune_decisions(connection: Connection, before: float) -> int:
    """Delete the decisions of the oldest slot that has any, if it is too old."""
    deleted = 0
    for model in (DecisionRow, ShadowAllocationRow):
        table = table_of(model)
        slot = connection.execute(select(func.min(table.c.slot))).scalar()
        if slot is None:
            continue
        old = select(SlotRow.number).where(SlotRow.number == slot, SlotRow.at < before)
        if connection.execute(old).scalar() is not None:
            deleted += connection.execute(delete(table).where(table.c.slot == slot)).rowcount
    return deleted


def _prune_slots(connection: Connection, before: float) -> int:
    """Delete old slots with their decisions. The newest one stays, since the next slot's number follows from it."""
    newest = select(func.max(SlotRow.number)).scalar_subquery()
    old = select(SlotRow.number).where(SlotRow.at < before, SlotRow.number < newest).order_by(SlotRow.at)
    numbers = connection.execute(old.limit(_SLOTS)).scalars().all()
    if not numbers:
        return 0
    for model in (DecisionRow, ShadowAllocationRow, SlotResourceRow):
        connection.execute(delete(table_of(model)).where(table_of(model).c.slot.in_(numbers)))
    return connection.execute(delete(table_of(SlotRow)).where(SlotRow.number.in_(numbers))).rowcount


def _prune_jobs(connection: Connection, before: float) -> int:
    """Delete an old job that has ended, with all that belongs to it; one with tasks that have not ended stays."""
    live = exists().where(TaskRow.job_number == JobRow.number, TaskRow.ended_at.is_(None))
    old = select(JobRow.number).where(JobRow.ended_at < before, ~live).order_by(JobRow.ended_at).limit(1)
    number = connection.execute(old).scalar()
    if number is None:
        return 0
    if deleted := _delete_progress(connection, number, math.inf):
        return deleted
    for model in _OF_JOB:
        connection.execute(delete(table_of(model)).where(table_of(model).c.job_number == number))
    return connection.execute(delete(table_of(JobRow)).where(JobRow.number == number)).rowcount


def _prune_speeds(connection: Connection, before: float) -> int:
    """Delete the speeds of a kind of which no size was measured since a time."""
    speeds = table_of(SpeedRow)
    kind = speeds.c.model, speeds.c.architecture, speeds.c.consistency
    old = select(*kind).group_by(*kind).having(func.max(speeds.c.at) < before).limit(1)
    found = connection.execute(old).first()
    if found is None:
        return 0
    return connection.execute(
        delete(speeds).where(*(column == value for column, value in zip(kind, found, strict=True)))
    ).rowcount


def give_back_space(connection: Connection) -> int:
    """Shorten SQLite's file a little where much of it is free; returns by how many pages.

    PostgreSQL leaves this to autovacuum. Free pages are used for new rows in any case; a file whose ``auto_vacuum`` is
    not incremental keeps its size.
    """
    if connection.dialect.name != "sqlite":
        return 0
    free, pages = _free_pages(connection)
    if free <= _FREE_SHARE * pages:
        return 0
    # Each step of the statement frees one page, so it is stepped to its end, although it returns no rows.
    cast("sqlite3.Connection", connection.connection.driver_connection).execute(
        f"PRAGMA incremental_vacuum({_PAGES})"
    ).fetchall()
    return free - _free_pages(connection)[0]


def _free_pages(connection: Connection) -> tuple[int, int]:
    free, pages = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()) for name in ("freelist_count", "page_count")
    )
    return free, pages
