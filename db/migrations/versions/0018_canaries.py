"""Canaries, the groups of their jobs, and the policy that decided on each job where there were two."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "canaries",
        sa.Column("number", _NUMBER, primary_key=True),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("policy", "version", "fallback")),
        sa.Column("share", sa.Double(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("partition", "account", "state", "reason")),
        sa.Column("began_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
    )
    op.create_table(
        "canary_jobs",
        sa.Column("canary", _NUMBER, sa.ForeignKey("canaries.number"), primary_key=True, autoincrement=False),
        sa.Column("job_number", _NUMBER, sa.ForeignKey("jobs.number"), primary_key=True, autoincrement=False),
        sa.Column("in_group", sa.Boolean(), nullable=False),
    )
    op.create_index(None, "canary_jobs", ["job_number"])
    for name in ("policy", "policy_version"):
        op.add_column("decisions", sa.Column(name, sa.Text(), nullable=True))
