"""Measured speeds by kind of job and size, for policies that learn from them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "speeds",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("architecture", sa.Text(), nullable=False, comment="ps or allreduce"),
        sa.Column("consistency", sa.Text(), nullable=False, comment="sync or async"),
        sa.Column("workers", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("ps", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("samples_per_second", sa.Double(), nullable=False, comment="mean over the measurements"),
        sa.Column("measurements", sa.BigInteger(), nullable=False, comment="rows of progress that count in the mean"),
        sa.PrimaryKeyConstraint("model", "architecture", "consistency", "workers", "ps", name=op.f("pk_speeds")),
    )


def downgrade() -> None:
    op.drop_table("speeds")
