"""What speeds were measured when and by whom, and what was said of them that is far off."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_COLUMNS = (
    ("jobs", sa.BigInteger(), "0", "jobs that showed it, one after the other"),
    ("at", sa.Double(), "0", "when it was measured last"),
    ("since", sa.Double(), "0", "when this speed was measured first"),
    ("before", sa.Double(), "0", "the speed before it changed, 0 where it has not"),
    ("job", sa.Text(), "", "slug of the job that showed it last"),
    ("other_measurements", sa.BigInteger(), "0", "so many of them"),
    ("other_jobs", sa.BigInteger(), "0", "jobs that said so"),
    ("other_since", sa.Double(), "0", None),
    ("other_job", sa.Text(), "", None),
)


def upgrade() -> None:
    with op.batch_alter_table("speeds") as table:
        for name, kind, first, comment in _COLUMNS:
            table.add_column(sa.Column(name, kind, nullable=False, server_default=first, comment=comment))
        table.add_column(
            sa.Column(
                "other_samples_per_second",
                sa.Double(),
                nullable=True,
                comment="what the last reports said that is far off",
            )
        )
    op.add_column(
        "jobs",
        sa.Column("strayed_workers", sa.BigInteger(), nullable=True, comment="where its speed was set aside last"),
    )
    op.add_column("jobs", sa.Column("strayed_ps", sa.BigInteger(), nullable=True))
    # Rows from before have the defaults; the code always says what it writes.
    with op.batch_alter_table("speeds") as table:
        for name, *_ in _COLUMNS:
            table.alter_column(name, server_default=None)


def downgrade() -> None:
    op.drop_column("jobs", "strayed_ps")
    op.drop_column("jobs", "strayed_workers")
    with op.batch_alter_table("speeds") as table:
        for name in ("other_samples_per_second", *(name for name, *_ in reversed(_COLUMNS))):
            table.drop_column(name)
