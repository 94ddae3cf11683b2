"""Renewals of the lease: a waiting standby sees by them whether the holder still lives."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.add_column("lease", sa.Column("renewals", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
