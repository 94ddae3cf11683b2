"""Index on when jobs ended: each tick reads those that ended last."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_index(op.f("ix_jobs_ended_at"), "jobs", ["ended_at"])
