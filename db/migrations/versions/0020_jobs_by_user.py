"""Indexes of jobs by user: what users ask for through the job API takes no longer where others have many jobs."""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.create_index(op.f("ix_jobs_uid_ended_at"), "jobs", ["uid", "ended_at"])
    op.create_index(op.f("ix_jobs_uid_name_ended_at"), "jobs", ["uid", "name", "ended_at"])
