"""Changes of mode, jobs that the scheduler in charge runs, and what dl2d would have decided in its place."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "mode_changes",
        sa.Column("number", _NUMBER, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("before", sa.Text(), nullable=False, comment="empty for the first"),
        sa.Column("after", sa.Text(), nullable=False, comment="observe shadow live"),
        sa.Column("by", sa.Text(), nullable=False, comment="the daemon's process and machine"),
        sa.Column("reason", sa.Text(), nullable=False, comment="start or reload"),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_mode_changes")),
    )
    # SQLite cannot take the default away again without a copy of the table, which the views forbid.
    op.add_column(
        "jobs",
        sa.Column(
            "static",
            sa.Boolean(),
            nullable=False,
            server_default=sa.false(),
            comment="the scheduler in charge runs it at a fixed size; dl2d looks on",
        ),
    )
    op.add_column(
        "slots",
        sa.Column(
            "shadow",
            sa.LargeBinary(),
            nullable=True,
            comment="what dl2d would have carried out; NULL where it was in charge or was not asked",
        ),
    )


def downgrade() -> None:
    op.drop_column("slots", "shadow")
    op.drop_column("jobs", "static")
    op.drop_table("mode_changes")
