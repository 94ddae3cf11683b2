"""Table of the guard's memory: cool-downs, failed starts and stop requests survive a restart."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "guard_memory",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("memory", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_guard_memory")),
    )
