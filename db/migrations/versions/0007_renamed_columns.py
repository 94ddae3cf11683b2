"""Columns take the names that code and documentation use."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"

_RENAMED = (
    ("decisions", "bound_by", "binding_constraint"),
    ("speeds", "before", "previous_speed"),
    ("task_reports", "slow", "slowdown"),
    ("task_reports", "slow_reason", "slowdown_reason"),
    ("jobs", "strayed_workers", "quarantined_workers"),
    ("jobs", "strayed_ps", "quarantined_ps"),
)


def upgrade() -> None:
    for table, old, new in _RENAMED:
        op.execute(f"ALTER TABLE {table} RENAME COLUMN {old} TO {new}")
        # SQLite renames the columns of views with those of their tables.
        if table == "decisions" and op.get_context().dialect.name == "postgresql":
            op.execute(f"ALTER VIEW IF EXISTS decision_history RENAME COLUMN {old} TO {new}")
