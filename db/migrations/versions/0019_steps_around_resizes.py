"""How long steps took around a resize."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    for name in ("longest_step_ms", "median_step_ms"):
        op.add_column("runtime_plans", sa.Column(name, sa.Double(), nullable=True))
