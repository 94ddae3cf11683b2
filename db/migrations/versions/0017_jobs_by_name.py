"""Index of jobs by name with their ends: looking up a name reads a bounded number of jobs."""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_index(op.f("ix_jobs_name_ended_at"), "jobs", ["name", "ended_at"])
    op.drop_index(op.f("ix_jobs_name"), table_name="jobs")
