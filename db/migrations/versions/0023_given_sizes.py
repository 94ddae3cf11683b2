"""What the site's scheduler gave each job, beside what dl2d would have given it in mode shadow."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    for name in ("given_workers", "given_ps"):
        op.add_column(
            "shadow_allocations", sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0"))
        )
    if op.get_bind().execute(sa.text("SELECT 1 FROM shadow_allocations LIMIT 1")).first() is None:
        return  # the update would read all decisions
    op.execute(
        "UPDATE shadow_allocations SET given_workers = decisions.workers, given_ps = decisions.ps FROM decisions "
        "WHERE decisions.slot = shadow_allocations.slot AND decisions.job_number = shadow_allocations.job_number"
    )
