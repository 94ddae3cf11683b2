"""Speeds and losses of live jobs in bounded space, and indexes for what ticks and heartbeats read."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_IS_LIVE = sa.text("ended_at IS NULL")
_ENDED = ("finished", "failed", "cancelled", "lost")
#: Measurements of a speed and points of a loss that are kept.
_MEASUREMENTS, _POINTS = 16, 128
#: Rows that are read at a time.
_ROWS = 10_000


def upgrade() -> None:
    op.create_table(
        "job_speeds",
        _job(),
        *(sa.Column(name, sa.BigInteger(), primary_key=True, autoincrement=False) for name in ("workers", "ps")),
        sa.Column("samples_per_second", sa.Double(), nullable=False),
        sa.Column("measurements", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=False) for name in ("at", "since")),
        sa.Column("last", sa.Text(), nullable=False),
    )
    op.create_table("job_losses", _job(), sa.Column("curve", sa.Text(), nullable=False))
    op.execute("UPDATE tasks SET ended_at = since WHERE state IN ('released', 'failed') AND ended_at IS NULL")
    op.create_index("ix_tasks_live", "tasks", ["job_number"], sqlite_where=_IS_LIVE, postgresql_where=_IS_LIVE)
    op.create_index(
        "ix_jobs_elastic_ended_at", "jobs", ["ended_at", "number"],
        sqlite_where=sa.text("static IS 0"), postgresql_where=sa.text("static IS FALSE"),
    )  # fmt: skip
    op.create_index(op.f("ix_runtime_plans_at"), "runtime_plans", ["at"])
    op.create_index(op.f("ix_speeds_at"), "speeds", ["at"])
    _fill()


def _job() -> sa.Column:
    return sa.Column("job_number", _NUMBER, sa.ForeignKey("jobs.number"), primary_key=True, autoincrement=False)


def _fill() -> None:
    """Count the rows of progress of each live job, one after the other."""
    connection = op.get_bind()
    jobs = sa.table("jobs", sa.column("number"), sa.column("state"))
    names = ("job_number", "at", "epoch", "loss", "samples_per_second", "workers", "ps")
    progress = sa.table("progress", *map(sa.column, names))
    live = sa.select(jobs.c.number).where(jobs.c.state.not_in(_ENDED))
    for number in connection.execute(live).scalars().all():
        sizes: dict[tuple[int, int], list[tuple[float, float]]] = {}
        curve: dict[str, Any] = {"points": [], "stride": 1, "total": 0, "last": None}
        of_job = sa.select(progress).where(progress.c.job_number == number).order_by(progress.c.at)
        for row in connection.execute(of_job, execution_options={"yield_per": _ROWS}):
            if row.samples_per_second is not None and row.workers > 0:
                measured = sizes.setdefault((row.workers, row.ps), [])
                measured.append((row.at, row.samples_per_second))
                del measured[:-_MEASUREMENTS]
            if row.loss is not None:
                _add_loss(curve, (row.epoch, row.loss))
        _insert(connection, number, sizes, curve)


def _add_loss(curve: dict[str, Any], point: tuple[float, float]) -> None:
    """Keep each ``stride``-th point; the stride doubles where there are too many."""
    if curve["total"] % curve["stride"] == 0:
        curve["points"].append(point)
        if len(curve["points"]) > _POINTS:
            curve["points"], curve["stride"] = curve["points"][::2], 2 * curve["stride"]
    curve["total"], curve["last"] = curve["total"] + 1, point


def _insert(connection: sa.Connection, number: int, sizes: dict[tuple[int, int], Any], curve: dict[str, Any]) -> None:
    names = ("job_number", "workers", "ps", "samples_per_second", "measurements", "at", "since", "last")
    speeds = sa.table("job_speeds", *map(sa.column, names))
    for (workers, ps), measured in sizes.items():
        values = {
            "job_number": number,
            "workers": workers,
            "ps": ps,
            "samples_per_second": math.fsum(speed for _, speed in measured) / len(measured),
            "measurements": len(measured),
            "at": measured[-1][0],
            "since": measured[0][0],
            "last": msgspec.json.encode(measured).decode(),
        }
        connection.execute(sa.insert(speeds).values(values))
    if curve["total"]:
        losses = sa.table("job_losses", sa.column("job_number"), sa.column("curve"))
        values = {"job_number": number, "curve": msgspec.json.encode(curve).decode()}
        connection.execute(sa.insert(losses).values(values))
