"""Membership changes as coordinators report them: table ``runtime_plans``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Index, Row, delete, select
from sqlalchemy.orm import Mapped

from dl2d.core.jobs import JobKey
from dl2d.core.store import RuntimePlan
from dl2d.store.connections_and_transactions import StoreTables
from dl2d.store.tables.jobs import JobRow, job_numbers
from dl2d.store.tables.row_mapping import Base, JobNumber, Json, Mapping, column, table_of, upsert

#: Plans of a job that are kept, the last ones by number.
MAX_KEPT = 1000


class RuntimePlanRow(Base):
    """A membership change as the job's coordinator reported it; of each job, the last 1000."""

    __tablename__ = "runtime_plans"
    __table_args__ = (Index(None, "at"),)

    job_number: Mapped[JobNumber]
    number: Mapped[int] = column("the coordinator's number of the plan", primary_key=True, autoincrement=False)
    at: Mapped[float] = column("when the report came, seconds since 1970")
    first_version: Mapped[int] = column("first version trained under the plan")
    workers: Mapped[int] = column("workers under the plan")
    servers: Mapped[int] = column("parameter servers under the plan")
    added: Mapped[tuple[str, ...]] = column("task ids, JSON", Json(tuple[str, ...]))
    removed: Mapped[tuple[str, ...]] = column("task ids, JSON", Json(tuple[str, ...]))
    moved_bytes: Mapped[int] = column("bytes of parameters that were moved")
    prepare_ms: Mapped[float] = column("time to prepare it, ms")
    move_ms: Mapped[float] = column("time to move parameters, ms")
    suspension_p50_ms: Mapped[float] = column("time that workers were suspended, median, ms")
    suspension_max_ms: Mapped[float] = column("longest time that a worker was suspended, ms")
    longest_step_ms: Mapped[float | None] = column("longest step around the resize, ms")
    median_step_ms: Mapped[float | None] = column("median step before the resize, ms")


_RUNTIME_PLAN = Mapping(RuntimePlan, RuntimePlanRow)


def runtime_plan_of(row: Row[Any]) -> RuntimePlan:
    """A membership change from a row of ``runtime_plans``."""
    return _RUNTIME_PLAN.record(row, f"runtime plan {row.number}")


def _delete_older(connection: Connection, job_number: int) -> None:
    """Delete all plans of a job but the last ``MAX_KEPT``, since its coordinator may report any number of them."""
    number = RuntimePlanRow.number
    of_job = RuntimePlanRow.job_number == job_number
    newest_deleted = select(number).where(of_job).order_by(number.desc()).offset(MAX_KEPT).limit(1).scalar_subquery()
    connection.execute(delete(table_of(RuntimePlanRow)).where(of_job, number <= newest_deleted))


class SqlRuntimePlans(StoreTables):
    """Membership changes of jobs."""

    def add_runtime_plans(self, job: JobKey, plans: Sequence[RuntimePlan]) -> None:
        """Keep plans that a coordinator reported, the last ``MAX_KEPT`` of the job; a number that is known already is
        passed over.

        Raises ``StoreError`` if the job is not known.
        """
        if not plans:
            return
        with self._database.writing(f"keeping plans of job {job.slug}") as connection:
            number = job_numbers(connection, {job})[job]
            values = [_RUNTIME_PLAN.values(plan, job_number=number) for plan in plans]
            connection.execute(upsert(connection, RuntimePlanRow, replace=False), values)
            _delete_older(connection, number)

    def runtime_plans(self, job: JobKey, *, limit: int | None = None) -> tuple[RuntimePlan, ...]:
        """Plans by number; the last ``limit`` of them."""
        query = (
            select(table_of(RuntimePlanRow))
            .join(JobRow, JobRow.number == RuntimePlanRow.job_number)
            .where(JobRow.slug == job.slug)
            .order_by(RuntimePlanRow.number.desc())
            .limit(limit)
        )
        return tuple(map(runtime_plan_of, self._rows(f"reading plans of job {job.slug}", query)))[::-1]
