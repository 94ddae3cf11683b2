"""Trials of policies in mode canary, and the groups of their jobs: tables ``canaries`` and ``canary_jobs``."""

from __future__ import annotations

from collections.abc import Mapping as AnyMapping
from typing import Any

from sqlalchemy import ForeignKey, Index, Row, insert, select, update
from sqlalchemy.orm import Mapped

from dl2d.core.daemon_mode_and_canary import Canary, CanaryJob, CanaryState
from dl2d.core.jobs import JobKey, JobRequest, JobState
from dl2d.core.measured_speeds_and_losses import TrainingKind
from dl2d.store.connections_and_transactions import StoreTables
from dl2d.store.tables.jobs import JobRow, job_numbers
from dl2d.store.tables.policy_versions import version_number
from dl2d.store.tables.row_mapping import (
    NUMBER,
    Base,
    Choice,
    JobNumber,
    Mapping,
    Moment,
    UserText,
    VersionNumber,
    batches,
    column,
    decoded_json,
    table_of,
)


class CanaryRow(Base):
    """A policy version in mode canary, which decides on some of the jobs."""

    __tablename__ = "canaries"

    number: Mapped[int] = column("number in the order in which they began", NUMBER, primary_key=True)
    policy: Mapped[str] = column("policy that decides on the jobs of its group")
    version: Mapped[UserText] = column("its version")
    version_number: Mapped[VersionNumber | None] = column("policy_versions.number of version; NULL if not a version")
    fallback: Mapped[str] = column("policy that decides on the other jobs")
    share: Mapped[float] = column("fraction of all jobs in the group, 0 to 1; 0 with a partition or account")
    partition: Mapped[UserText] = column("partition of the jobs in the group, or empty")
    account: Mapped[UserText] = column("account of the jobs in the group, or empty")
    began_at: Mapped[Moment]
    ended_at: Mapped[float | None] = column("seconds since 1970; NULL while it runs")
    state: Mapped[CanaryState] = column("running promoted withdrawn stopped", Choice(CanaryState))
    reason: Mapped[UserText] = column("why it ended, in words")


class CanaryJobRow(Base):
    """The group of a job in a canary."""

    __tablename__ = "canary_jobs"
    __table_args__ = (Index(None, "job_number"),)

    canary: Mapped[int] = column(
        "canaries.number", ForeignKey("canaries.number"), primary_key=True, autoincrement=False
    )
    job_number: Mapped[JobNumber]
    in_group: Mapped[bool] = column("whether the policy decides on it; otherwise the fallback does")


_CANARY = Mapping(Canary, CanaryRow)


class SqlCanaries(StoreTables):
    """Canaries, and the groups of their jobs."""

    def assign_canary(self, canary: int, groups: AnyMapping[JobKey, bool]) -> frozenset[JobKey]:
        """See ``TickStore.assign_canary``."""
        with self._database.writing("recording groups of a canary") as connection:
            numbers = job_numbers(connection, groups)
            known: dict[int, bool] = {}
            for batch in batches(numbers.values()):
                query = select(CanaryJobRow.job_number, CanaryJobRow.in_group)
                query = query.where(CanaryJobRow.canary == canary, CanaryJobRow.job_number.in_(batch))
                known |= {row.job_number: row.in_group for row in connection.execute(query)}
            new = {numbers[key]: in_group for key, in_group in groups.items() if numbers[key] not in known}
            if new:
                rows = [{"canary": canary, "job_number": number, "in_group": new[number]} for number in sorted(new)]
                connection.execute(insert(table_of(CanaryJobRow)), rows)
        return frozenset(key for key, number in numbers.items() if (known | new)[number])

    def keep_canary(self, canary: Canary) -> Canary:
        """Add a canary that has no number yet, or replace the record of one that was running; returns it as kept."""
        table = table_of(CanaryRow)
        values = _CANARY.values(canary)
        number = values.pop("number")
        with self._database.writing("recording a canary") as connection:
            if number:
                running = (table.c.number == number) & (table.c.state == CanaryState.RUNNING)
                connection.execute(update(table).where(running).values(values))
            else:
                values["version_number"] = version_number(connection, canary.policy, canary.version)
                number = connection.execute(insert(table).values(values).returning(table.c.number)).scalar_one()
            row = connection.execute(select(*table.c).where(table.c.number == number)).one()
        return _CANARY.record(row, f"canary {number}")

    def canaries(self, *, limit: int = 100) -> tuple[Canary, ...]:
        """Canaries, newest first."""
        query = select(table_of(CanaryRow)).order_by(CanaryRow.number.desc()).limit(limit)
        return tuple(_CANARY.record(row, f"canary {row.number}") for row in self._rows("listing canaries", query))

    def canary_jobs(self, canary: Canary) -> tuple[CanaryJob, ...]:
        """Jobs that were submitted after a canary began and assigned in it, in no particular order."""
        shown: list[Any] = [JobRow.slug, JobRow.submitted, JobRow.ended_at, JobRow.state, JobRow.request]
        shown.append(CanaryJobRow.in_group)
        query = (
            select(*shown)
            .join(CanaryJobRow, CanaryJobRow.job_number == JobRow.number)
            .where(CanaryJobRow.canary == canary.number, JobRow.submitted >= canary.began_at)
        )
        return tuple(map(_canary_job, self._rows("reading jobs of a canary", query)))


def _canary_job(row: Row[Any]) -> CanaryJob:
    request: JobRequest = decoded_json(row, table_of(JobRow).c.request, f"job {row.slug}")
    unit = "samples" if request.samples_per_epoch or request.batch else "steps"
    return CanaryJob(
        in_group=row.in_group,
        kind=(TrainingKind.of(request), unit),
        work=request.epochs * request.epoch_samples,
        submitted=row.submitted,
        ended_at=row.ended_at,
        finished=row.state is JobState.FINISHED,
    )
