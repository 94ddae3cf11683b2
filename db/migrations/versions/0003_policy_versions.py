"""Versions of learned policies, what became of them, how they compared, and the learners that made them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "policy_versions",
        sa.Column("number", _NUMBER, nullable=False, comment="in the order in which they were registered"),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False, comment="SHA-256 of what decides"),
        sa.Column("parent", sa.Text(), nullable=False, comment="digest of the version that training began with"),
        sa.Column("folder", sa.Text(), nullable=False, comment="where the checkpoint is"),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("data_from", sa.Double(), nullable=True, comment="jobs from then on were learned from"),
        sa.Column("data_to", sa.Double(), nullable=True),
        sa.Column("jobs", sa.BigInteger(), nullable=False, comment="so many jobs were learned from"),
        sa.Column("metrics", sa.Text(), nullable=False, comment="how well it did in training, JSON"),
        sa.Column("state", sa.Text(), nullable=False, comment="candidate live retired rejected"),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_policy_versions")),
        sa.UniqueConstraint("policy", "digest", name=op.f("uq_policy_versions_policy_digest")),
    )
    op.create_index(op.f("ix_policy_versions_policy_state"), "policy_versions", ["policy", "state"])
    op.create_table(
        "policy_changes",
        sa.Column("number", _NUMBER, nullable=False),
        sa.Column("version", _NUMBER, nullable=False, comment="number of the version"),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("before", sa.Text(), nullable=False),
        sa.Column("after", sa.Text(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False, comment="a user, gate or daemon"),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("replaced", _NUMBER, nullable=True, comment="version that was live until then"),
        sa.Column("rollback", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["version"], ["policy_versions.number"], name=op.f("fk_policy_changes_version_policy_versions")
        ),
        sa.ForeignKeyConstraint(
            ["replaced"], ["policy_versions.number"], name=op.f("fk_policy_changes_replaced_policy_versions")
        ),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_policy_changes")),
    )
    op.create_index(op.f("ix_policy_changes_version"), "policy_changes", ["version"])
    op.create_table(
        "policy_trials",
        sa.Column("number", _NUMBER, nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("candidate", sa.Text(), nullable=False, comment="digest"),
        sa.Column("current", sa.Text(), nullable=False, comment="digest of the version that decided then"),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("days", sa.Text(), nullable=False, comment="recorded days, JSON"),
        sa.Column("cases", sa.Text(), nullable=False, comment="mean completion times in slots by workload, JSON"),
        sa.Column("change", sa.Double(), nullable=True, comment="candidate by current, less 1"),
        sa.Column("low", sa.Double(), nullable=True, comment="95 % interval of change"),
        sa.Column("high", sa.Double(), nullable=True),
        sa.Column("passed", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_policy_trials")),
    )
    op.create_table(
        "learning_runs",
        sa.Column("number", _NUMBER, nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False, comment="running finished failed stopped lost"),
        sa.Column("note", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_learning_runs")),
    )


def downgrade() -> None:
    op.drop_table("learning_runs")
    op.drop_table("policy_trials")
    op.drop_table("policy_changes")
    op.drop_table("policy_versions")
