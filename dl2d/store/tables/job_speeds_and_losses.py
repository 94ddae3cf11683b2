"""Measured speeds and training losses of single live jobs, in bounded space: tables ``job_speeds`` and ``job_losses``.

Each row of a job's progress is added when it is written. Both are deleted when the job ends.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Select, bindparam, select
from sqlalchemy.orm import Mapped

from dl2d.core.jobs import Allocation, JobKey, Progress
from dl2d.core.measured_speeds_and_losses import (
    MAX_MEASUREMENTS,
    JobSpeeds,
    LossCurve,
    LossPoint,
    MeasuredLoss,
    SpeedPoint,
    mean_point,
)
from dl2d.store.tables.row_mapping import (
    Base,
    JobNumber,
    Json,
    PsKey,
    WorkersKey,
    batches,
    column,
    decoded_json,
    table_of,
    upsert,
)

_Measurements = tuple[tuple[float, float], ...]


class JobSpeedRow(Base):
    """Measured speed of a live job at one size: the mean of its last measurements there."""

    __tablename__ = "job_speeds"

    job_number: Mapped[JobNumber]
    workers: Mapped[WorkersKey]
    ps: Mapped[PsKey]
    samples_per_second: Mapped[float] = column("mean over the measurements, samples/s")
    measurements: Mapped[int] = column("number of rows of progress in the mean, the last 16 at most")
    at: Mapped[float] = column("when the last of them was measured, seconds since 1970")
    since: Mapped[float] = column("when the first of them was measured, seconds since 1970")
    last: Mapped[_Measurements] = column(
        "the measurements, JSON: seconds since 1970 and samples/s, oldest first", Json(_Measurements)
    )


def count_speed(connection: Connection, job_number: int, progress: Progress) -> None:
    """Add the speed in a row of a job's progress, if it has one; ``progress`` is finite."""
    if progress.samples_per_second is None or not progress.workers:
        return
    key = {"job_number": job_number, "workers": progress.workers, "ps": progress.ps}
    row = connection.execute(_one_speed(), key).one_or_none()
    before: _Measurements = () if row is None else decoded_json(row, _LAST, f"speeds of job number {job_number}")
    last = (*before, (progress.at, progress.samples_per_second))[-MAX_MEASUREMENTS:]
    point = mean_point(Allocation(progress.workers, progress.ps), last)
    values = {
        "samples_per_second": point.samples_per_second,
        "measurements": point.measurements,
        "at": point.last_measured,
        "since": point.first_measured,
        "last": last,
    }
    connection.execute(upsert(connection, JobSpeedRow, replace=True), {**key, **values})


def speeds(connection: Connection, jobs: Mapping[int, JobKey]) -> tuple[JobSpeeds, ...]:
    """See ``TickStore.job_speeds``; ``jobs`` by number."""
    names = ("job_number", "workers", "ps", "samples_per_second", "measurements", "at", "since")
    read = [table_of(JobSpeedRow).c[name] for name in names]
    points: dict[JobKey, list[SpeedPoint]] = defaultdict(list)
    for batch in batches(jobs):
        query = select(*read).where(JobSpeedRow.job_number.in_(batch)).order_by(*read[:3])
        for number, workers, ps, mean, times, at, since in connection.execute(query):
            points[jobs[number]].append(SpeedPoint(Allocation(workers, ps), mean, times, 1, at, since))
    return tuple(JobSpeeds(key, tuple(points[key])) for key in sorted(points))


_LAST = table_of(JobSpeedRow).c.last


@functools.cache
def _one_speed() -> Select[Any]:
    of_key = [column == bindparam(column.name) for column in table_of(JobSpeedRow).primary_key]
    return select(_LAST).where(*of_key)


class JobLossRow(Base):
    """Training loss of a live job: reports evenly spread over its time, and the last."""

    __tablename__ = "job_losses"

    job_number: Mapped[JobNumber]
    curve: Mapped[LossCurve] = column(
        "at most 128 of its reports, the number from one to the next, and the last, JSON", Json(LossCurve)
    )


def count_loss(connection: Connection, job_number: int, progress: Progress) -> None:
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
        for row in connection.execute(select(table_of(JobLossRow)).where(JobLossRow.job_number.in_(batch))):
            key = jobs[row.job_number]
            curve: LossCurve = decoded_json(row, _CURVE, f"losses of job {key.slug}")
            found.append(MeasuredLoss(key, curve.thinned()))
    return tuple(sorted(found, key=lambda loss: loss.job))


_CURVE = table_of(JobLossRow).c.curve


@functools.cache
def _one_curve() -> Select[Any]:
    return select(_CURVE).where(table_of(JobLossRow).c.job_number == bindparam("job_number"))
