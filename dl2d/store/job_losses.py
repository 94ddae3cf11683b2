"""Training losses of single live jobs, in bounded space: table ``job_losses``.

The loss in each row of a job's progress is added when that is written. The losses of a job are deleted when it ends.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, ForeignKey, Select, bindparam, select
from sqlalchemy.orm import Mapped, mapped_column

from dl2d.core.jobs import JobKey, Progress
from dl2d.core.measured_losses import LossCurve, LossPoint, MeasuredLoss
from dl2d.store.row_mapping import Base, Json, batches, columns, decoded_json, table_of, upsert


class JobLossRow(Base):
    """Training loss of a live job: reports evenly spread over its time, and the last."""

    __tablename__ = "job_losses"

    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"), primary_key=True, comment="jobs.number")
    curve: Mapped[LossCurve] = mapped_column(
        Json(LossCurve), comment="at most 128 of its reports, the number from one to the next, and the last, JSON"
    )


def count(connection: Connection, job_number: int, progress: Progress) -> None:
    """Add the loss in a row of a job's progress, if it has one; ``progress`` is finite."""
    if progress.loss is None:
        return
    row = connection.execute(_one_curve(), {"job_number": job_number}).one_or_none()
    curve = LossCurve() if row is None else decoded_json(row, _CURVE, f"losses of job number {job_number}")
    curve = curve.added(LossPoint(progress.epoch, progress.loss))
    connection.execute(upsert(connection, JobLossRow, replace=True), {"job_number": job_number, "curve": curve})


def losses(connection: Connection, jobs: Mapping[int, JobKey]) -> tuple[MeasuredLoss, ...]:
    """See ``TickStore.losses``; ``jobs`` by number."""
    found: list[MeasuredLoss] = []
    for batch in batches(jobs):
        for row in connection.execute(select(*columns(JobLossRow)).where(JobLossRow.job_number.in_(batch))):
            key = jobs[row.job_number]
            curve: LossCurve = decoded_json(row, _CURVE, f"losses of job {key.slug}")
            found.append(MeasuredLoss(key, curve.thinned()))
    return tuple(sorted(found, key=lambda loss: loss.job))


_CURVE = table_of(JobLossRow).c.curve


@functools.cache
def _one_curve() -> Select[Any]:
    return select(_CURVE).where(table_of(JobLossRow).c.job_number == bindparam("job_number"))
