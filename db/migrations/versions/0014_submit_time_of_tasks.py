"""``tasks.submitted``: the resource manager gives handles again, so the submit time belongs to a task's identity."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("tasks", sa.Column("submitted", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
