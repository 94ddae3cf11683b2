"""``jobs.epoch`` is NULL where nobody reports it: 0 said that such a job had done nothing."""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"

_UNREPORTED = "static AND address = ''"
_VIEWS = ("decision_history", "shadow_decisions", "job_completion", "utilization_hourly", "resize_log",
          "policy_performance", "user_usage", "failures_by_cause", "waiting_now")  # fmt: skip


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE jobs ALTER COLUMN epoch DROP NOT NULL")
        op.execute(f"UPDATE jobs SET epoch = NULL WHERE {_UNREPORTED}")  # noqa: S608 - constants of this file
        return
    # A copy of the table, as alembic makes it, cannot be renamed while others refer to it. SQLite drops no column that
    # a view uses; dl2d.store.schema_version creates the views anew.
    for view in _VIEWS:
        op.execute(f"DROP VIEW IF EXISTS {view}")
    op.execute("ALTER TABLE jobs ADD COLUMN epoch_new DOUBLE")
    op.execute(f"UPDATE jobs SET epoch_new = CASE WHEN {_UNREPORTED} THEN NULL ELSE epoch END")  # noqa: S608 - as above
    op.execute("ALTER TABLE jobs DROP COLUMN epoch")
    op.execute("ALTER TABLE jobs RENAME COLUMN epoch_new TO epoch")
