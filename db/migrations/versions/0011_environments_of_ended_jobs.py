"""Environments of jobs that have ended are forgotten, as those of jobs that end from now on are."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

_BATCH = 500


def upgrade() -> None:
    connection = op.get_bind()
    columns = (sa.column("number", sa.Integer), sa.column("ended_at", sa.Double), sa.column("launch", sa.Text))
    jobs = sa.table("jobs", *columns)
    after = -1
    while rows := connection.execute(
        sa.select(jobs.c.number, jobs.c.launch)
        .where(jobs.c.number > after, jobs.c.ended_at.is_not(None))
        .order_by(jobs.c.number)
        .limit(_BATCH)
    ).all():
        after = rows[-1].number
        for row in rows:
            launch = json.loads(row.launch)
            if launch.pop("env", None):
                connection.execute(sa.update(jobs).where(jobs.c.number == row.number).values(launch=json.dumps(launch)))
