"""Canaries, the groups of their jobs, and the policy that decided on each job where there were two."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_VIEWS = ("decision_history", "shadow_decisions", "job_completion", "utilization_hourly", "resize_log",
          "policy_performance", "user_usage", "failures_by_cause", "waiting_now")  # fmt: skip


def upgrade() -> None:
    op.create_table(
        "canaries",
        sa.Column(
            "number",
            _NUMBER,
            nullable=False,
            comment="in the order in which they began",
        ),
        sa.Column("policy", sa.Text(), nullable=False, comment="policy that decides on the jobs of its group"),
        sa.Column("version", sa.Text(), nullable=False, comment="its version"),
        sa.Column("fallback", sa.Text(), nullable=False, comment="policy that decides on the other jobs"),
        sa.Column(
            "share", sa.Double(), nullable=False, comment="fraction of jobs in the group; 0 with a partition or account"
        ),
        sa.Column("partition", sa.Text(), nullable=False, comment="partition of the jobs in the group, or empty"),
        sa.Column("account", sa.Text(), nullable=False, comment="account of the jobs in the group, or empty"),
        sa.Column("began_at", sa.Double(), nullable=False, comment="seconds since 1970"),
        sa.Column("ended_at", sa.Double(), nullable=True, comment="seconds since 1970; NULL while it runs"),
        sa.Column("state", sa.Text(), nullable=False, comment="running promoted withdrawn stopped"),
        sa.Column("reason", sa.Text(), nullable=False, comment="why it ended, in words"),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_canaries")),
        comment="A policy version in mode canary, which decides on some of the jobs.",
    )
    op.create_table(
        "canary_jobs",
        sa.Column("canary", _NUMBER, autoincrement=False, nullable=False, comment="canaries.number"),
        sa.Column("job_number", _NUMBER, autoincrement=False, nullable=False, comment="jobs.number"),
        sa.Column(
            "in_group",
            sa.Boolean(),
            nullable=False,
            comment="whether the policy decides on it; otherwise the fallback does",
        ),
        sa.ForeignKeyConstraint(["canary"], ["canaries.number"], name=op.f("fk_canary_jobs_canary")),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name=op.f("fk_canary_jobs_job_number")),
        sa.PrimaryKeyConstraint("canary", "job_number", name=op.f("pk_canary_jobs")),
        comment="The group of a job in a canary.",
    )
    op.create_index(op.f("ix_canary_jobs_job_number"), "canary_jobs", ["job_number"])
    policy = "in mode canary the policy that decided on the job; NULL where that is the slot's"
    op.add_column("decisions", sa.Column("policy", sa.Text(), nullable=True, comment=policy))
    op.add_column("decisions", sa.Column("policy_version", sa.Text(), nullable=True, comment="its version"))


def downgrade() -> None:
    for view in _VIEWS:  # SQLite drops no column that a view uses; dl2d.store.schema creates the views anew
        op.execute(f"DROP VIEW IF EXISTS {view}")
    op.drop_column("decisions", "policy_version")
    op.drop_column("decisions", "policy")
    op.drop_table("canary_jobs")
    op.drop_table("canaries")
