"""What tasks use, how long their steps take, which are slow, and why they ended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "task_reports",
        sa.Column("job_number", _NUMBER, nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False, comment="when the report came"),
        sa.Column("cpu_seconds", sa.Double(), nullable=True, comment="since the task began"),
        sa.Column("cpu_percent", sa.Double(), nullable=True, comment="of one core, in the last interval"),
        sa.Column("memory", sa.Double(), nullable=True, comment="resident, MiB"),
        sa.Column("memory_peak", sa.Double(), nullable=True, comment="MiB"),
        sa.Column("gpus", sa.BigInteger(), nullable=False, comment="how many it has, as far as is known"),
        sa.Column("gpu_percent", sa.Double(), nullable=True, comment="mean over its GPUs"),
        sa.Column("gpu_memory", sa.Double(), nullable=True, comment="MiB, of all of them"),
        sa.Column("step_ms", sa.Double(), nullable=True, comment="mean over its last steps"),
        sa.Column("step_p95_ms", sa.Double(), nullable=True),
        sa.Column("cause", sa.Text(), nullable=False, comment="why its process ended; empty while it runs"),
        sa.Column("how", sa.Text(), nullable=False, comment="the same in words"),
        sa.Column("slow", sa.Double(), nullable=True, comment="times as long as others for the same work"),
        sa.Column("slow_reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name=op.f("fk_task_reports_job_number_jobs")),
        sa.PrimaryKeyConstraint("job_number", "task", name=op.f("pk_task_reports")),
    )


def downgrade() -> None:
    op.drop_table("task_reports")
