"""Measured training speeds by kind of job and size: table ``speeds``."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection, Index, Row, Select, bindparam, delete, select, update
from sqlalchemy.orm import Mapped

from dl2d.core.jobs import Allocation, Architecture, Consistency
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds, SpeedPoint, Tally, TrainingKind, count
from dl2d.store.tables.row_mapping import (
    Base,
    Choice,
    PsKey,
    UserText,
    Values,
    WorkersKey,
    column,
    table_of,
    upsert,
)


class SpeedRow(Base):
    """Measured speed of jobs of a kind at one size."""

    __tablename__ = "speeds"
    __table_args__ = (Index(None, "at"),)

    model: Mapped[UserText] = column("model type", primary_key=True)
    architecture: Mapped[Architecture] = column("ps or allreduce", Choice(Architecture), primary_key=True)
    consistency: Mapped[Consistency] = column("sync or async", Choice(Consistency), primary_key=True)
    workers: Mapped[WorkersKey]
    ps: Mapped[PsKey]
    samples_per_second: Mapped[float] = column("mean over the measurements, samples/s")
    measurements: Mapped[int] = column("number of rows of progress in the mean")
    jobs: Mapped[int] = column("number of jobs that showed it, one after the other")
    at: Mapped[float] = column("when it was measured last, seconds since 1970")
    since: Mapped[float] = column("when this speed was measured first, seconds since 1970")
    previous_speed: Mapped[float] = column("the speed before it changed, samples/s; 0 where it has not")
    job: Mapped[str] = column("slug of the job that showed it last")
    other_samples_per_second: Mapped[float | None] = column("mean of reports that contradict it, samples/s")
    other_measurements: Mapped[int] = column("number of these reports")
    other_jobs: Mapped[int] = column("number of jobs that said so")
    other_since: Mapped[float] = column("when the first of them was measured, seconds since 1970")
    other_job: Mapped[str] = column("slug of the job that said so last")


_KIND = (SpeedRow.model, SpeedRow.architecture, SpeedRow.consistency)
#: Rows that are read at a time to find the kinds that were measured last.
_PAGE = 256


def _values(tally: Tally) -> Values:
    point, other = tally.point._asdict(), tally.other
    del point["allocation"]
    return {
        "at": point.pop("last_measured"),
        "since": point.pop("first_measured"),
        **point,
        "job": tally.job,
        "other_samples_per_second": None if other is None else other.samples_per_second,
        "other_measurements": 0 if other is None else other.measurements,
        "other_jobs": 0 if other is None else other.jobs,
        "other_since": 0.0 if other is None else other.first_measured,
        "other_job": tally.other_job,
    }


def _tally(row: Row[Any]) -> Tally:
    size = Allocation(row.workers, row.ps)
    point = SpeedPoint(size, row.samples_per_second, row.measurements, row.jobs, row.at, row.since, row.previous_speed)
    other = row.other_samples_per_second
    if other is None:
        return Tally(point, row.job)
    said = SpeedPoint(size, other, row.other_measurements, row.other_jobs, row.other_since, row.other_since)
    return Tally(point, row.job, said, row.other_job)


def speeds(connection: Connection, kinds: Collection[TrainingKind], others: int) -> tuple[MeasuredSpeeds, ...]:
    """See ``TickStore.speeds``."""
    points: dict[TrainingKind, list[SpeedPoint]] = {}
    asked = {TrainingKind(*kind) for kind in kinds}
    asked |= _measured_last(connection, asked, others)
    for kind in asked:  # SQLite reads the whole table for a list of kinds
        points[kind] = [_tally(row).point for row in connection.execute(_speeds_of_kind(), kind._asdict())]
    return tuple(MeasuredSpeeds(kind, tuple(points[kind])) for kind in sorted(points) if points[kind])


def _measured_last(connection: Connection, but: Collection[TrainingKind], limit: int) -> set[TrainingKind]:
    """The kinds but some that were measured last, of equals the first in order; reads no more rows than it needs."""
    query = select(*_KIND).order_by(SpeedRow.at.desc(), *_KIND, SpeedRow.workers, SpeedRow.ps).limit(_PAGE)
    found: set[TrainingKind] = set()
    offset = 0
    while len(found) < limit:
        rows = connection.execute(query.offset(offset)).all()
        for row in rows:
            kind = TrainingKind(*row)
            if kind not in but and len(found) < limit:
                found.add(kind)
        if len(rows) < _PAGE:
            break
        offset += _PAGE
    return found


def count_speed(
    connection: Connection,
    kind: TrainingKind,
    size: Allocation,
    samples_per_second: float,
    *,
    job: str,
    at: float,
    quarantined: Allocation | None,
) -> Allocation | None:
    """Count the measured speed of a job for its kind; returns where it is quarantined now (see ``count``)."""
    same_kind = kind._asdict()
    key = {**same_kind, "workers": size.workers, "ps": size.ps}
    known = connection.execute(_one_speed(), key).one_or_none()
    counted = count(
        None if known is None else _tally(known), size, samples_per_second, job=job, at=at, quarantined=quarantined
    )
    if counted.tally is not None:
        connection.execute(upsert(connection, SpeedRow, replace=True), {**key, **_values(counted.tally)})
    if counted.mislabelled is not None:
        _retract(connection, same_kind, counted.mislabelled)
    return counted.quarantined


def _retract(connection: Connection, kind: Mapping[str, str], job: str) -> None:
    """Remove speeds of a kind that only one job showed."""
    of_kind = [getattr(SpeedRow, name) == value for name, value in kind.items()]
    alone = select(table_of(SpeedRow)).where(*of_kind, SpeedRow.job == job, SpeedRow.jobs == 1).with_for_update()
    for row in connection.execute(alone).all():
        here = (*of_kind, SpeedRow.workers == row.workers, SpeedRow.ps == row.ps)
        left = _tally(row).without(job)
        if left is None:
            connection.execute(delete(SpeedRow).where(*here))
        else:
            connection.execute(update(SpeedRow).where(*here).values(**_values(left)))


@functools.cache
def _speeds_of_kind() -> Select[Any]:
    of_kind = [column == bindparam(column.key, type_=column.type) for column in _KIND]
    return select(table_of(SpeedRow)).where(*of_kind).order_by(SpeedRow.workers, SpeedRow.ps)


@functools.cache
def _one_speed() -> Select[Any]:
    of_key = [column == bindparam(column.name, type_=column.type) for column in table_of(SpeedRow).primary_key]
    return select(table_of(SpeedRow)).where(*of_key).with_for_update()
