"""Table of the guard's memory: cool-downs, failed starts and stop requests survive a restart."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "guard_memory",
        sa.Column("name", sa.Text(), nullable=False, comment="always guard"),
        sa.Column(
            "memory", sa.Text(), nullable=False, comment="times by job, task and handle, seconds since 1970, JSON"
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_guard_memory")),
        comment="Resizes, starts, failed starts and stop requests on which the guard's rules depend.",
    )


def downgrade() -> None:
    op.drop_table("guard_memory")
