"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "job_ids",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", name=op.f("pk_job_ids")),
    )
    op.create_table(
        "jobs",
        sa.Column(
            "number",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            nullable=False,
            comment="dl2d's own number of the job",
        ),
        sa.Column("slug", sa.Text(), nullable=False, comment="cluster.id.submitted"),
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False, comment="the resource manager's id; used again by some managers"),
        sa.Column("submitted", sa.BigInteger(), nullable=False, comment="whole seconds since 1970"),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("user_name", sa.Text(), nullable=False),
        sa.Column("uid", sa.BigInteger(), nullable=False),
        sa.Column("gid", sa.BigInteger(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("partition", sa.Text(), nullable=False),
        sa.Column("qos", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False, comment="submitted ready running finished failed cancelled lost"),
        sa.Column("anchor", sa.Text(), nullable=False, comment="handle of the anchor in the resource manager"),
        sa.Column("address", sa.Text(), nullable=False, comment="host:port of the coordinator"),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False, comment="SHA-256 of the final weights"),
        sa.Column("progress_at", sa.Double(), nullable=False, comment="time of the last report, 0 for none"),
        sa.Column("version", sa.BigInteger(), nullable=False, comment="completed updates"),
        sa.Column("total_versions", sa.BigInteger(), nullable=True),
        sa.Column("epoch", sa.Double(), nullable=False, comment="completed epochs"),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("steps_per_second", sa.Double(), nullable=True),
        sa.Column("samples_per_second", sa.Double(), nullable=True),
        sa.Column("workers", sa.BigInteger(), nullable=False, comment="workers that train now"),
        sa.Column("ps", sa.BigInteger(), nullable=False, comment="parameter servers that train now"),
        sa.Column("series_at", sa.Double(), nullable=True, comment="time of the newest row in progress"),
        sa.Column("request", sa.Text(), nullable=False, comment="what the user asked for, JSON"),
        sa.Column(
            "launch",
            sa.Text(),
            nullable=False,
            comment="command, folder and environment, JSON; may hold the user's secrets",
        ),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_jobs")),
        sa.UniqueConstraint("slug", name=op.f("uq_jobs_slug")),
    )
    op.create_index(op.f("ix_jobs_id"), "jobs", ["id"], unique=False)
    op.create_index(op.f("ix_jobs_name"), "jobs", ["name"], unique=False)
    op.create_index(op.f("ix_jobs_state"), "jobs", ["state"], unique=False)
    op.create_index(op.f("ix_jobs_submitted"), "jobs", ["submitted"], unique=False)
    op.create_table(
        "lease",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column(
            "term",
            sa.BigInteger(),
            nullable=False,
            comment="grows by one with each holder; a holder of an older term may not write",
        ),
        sa.Column("since", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_lease")),
    )
    op.create_table(
        "slots",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.Text(), nullable=False),
        sa.Column("measure", sa.Text(), nullable=False, comment="what the scores of alternatives measure"),
        sa.Column("inputs_hash", sa.Text(), nullable=False, comment="SHA-256 over snapshot, policy, version and seed"),
        sa.Column("seed", sa.Text(), nullable=False, comment="decimal; text because it may have more than 64 bits"),
        sa.Column("seconds", sa.Double(), nullable=False, comment="duration of the whole tick"),
        sa.Column("changed", sa.BigInteger(), nullable=False, comment="jobs whose allocation was changed"),
        sa.Column("started", sa.BigInteger(), nullable=False, comment="tasks"),
        sa.Column("draining", sa.BigInteger(), nullable=False, comment="tasks"),
        sa.Column("failures", sa.BigInteger(), nullable=False),
        sa.Column("snapshot", sa.LargeBinary(), nullable=False),
        sa.Column("decision", sa.LargeBinary(), nullable=False, comment="as carried out"),
        sa.Column(
            "proposed",
            sa.LargeBinary(),
            nullable=True,
            comment="as the policy gave it; NULL where the guard changed nothing",
        ),
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("outcome", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_slots")),
    )
    op.create_index(op.f("ix_slots_at"), "slots", ["at"], unique=False)
    op.create_table(
        "decisions",
        sa.Column("slot", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column(
            "job_number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False
        ),
        sa.Column("workers", sa.BigInteger(), nullable=False),
        sa.Column("ps", sa.BigInteger(), nullable=False),
        sa.Column("previous_workers", sa.BigInteger(), nullable=False),
        sa.Column("previous_ps", sa.BigInteger(), nullable=False),
        sa.Column("bound_by", sa.Text(), nullable=False, comment="the binding constraint"),
        sa.Column("reason", sa.Text(), nullable=False, comment="why, in words"),
        sa.Column("guard", sa.Text(), nullable=False, comment="what the guard changed, in words; empty for nothing"),
        sa.Column("detail", sa.Text(), nullable=True, comment="shortfalls, alternatives and the guard's reasons, JSON"),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name=op.f("fk_decisions_job_number")),
        sa.ForeignKeyConstraint(["slot"], ["slots.number"], name=op.f("fk_decisions_slot")),
        sa.PrimaryKeyConstraint("slot", "job_number", name=op.f("pk_decisions")),
    )
    op.create_index(op.f("ix_decisions_job_number_slot"), "decisions", ["job_number", "slot"], unique=False)
    op.create_table(
        "progress",
        sa.Column("job_number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("total_versions", sa.BigInteger(), nullable=True),
        sa.Column("epoch", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("steps_per_second", sa.Double(), nullable=True),
        sa.Column("samples_per_second", sa.Double(), nullable=True),
        sa.Column("workers", sa.BigInteger(), nullable=False),
        sa.Column("ps", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name=op.f("fk_progress_job_number")),
        sa.PrimaryKeyConstraint("job_number", "at", name=op.f("pk_progress")),
    )
    op.create_table(
        "runtime_plans",
        sa.Column("job_number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False, comment="when the report came"),
        sa.Column("first_version", sa.BigInteger(), nullable=False, comment="first version trained under the plan"),
        sa.Column("workers", sa.BigInteger(), nullable=False),
        sa.Column("servers", sa.BigInteger(), nullable=False),
        sa.Column("added", sa.Text(), nullable=False, comment="task ids, JSON"),
        sa.Column("removed", sa.Text(), nullable=False, comment="task ids, JSON"),
        sa.Column("moved_bytes", sa.BigInteger(), nullable=False),
        sa.Column("prepare_ms", sa.Double(), nullable=False),
        sa.Column("move_ms", sa.Double(), nullable=False),
        sa.Column("suspension_p50_ms", sa.Double(), nullable=False, comment="median over workers"),
        sa.Column("suspension_max_ms", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name=op.f("fk_runtime_plans_job_number")),
        sa.PrimaryKeyConstraint("job_number", "number", name=op.f("pk_runtime_plans")),
    )
    op.create_table(
        "tasks",
        sa.Column("job_number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("id", sa.Text(), nullable=False, comment="role-ordinal, unique in the job"),
        sa.Column("role", sa.Text(), nullable=False, comment="worker or ps"),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("demand", sa.Text(), nullable=False, comment="resources, JSON; memory in MiB"),
        sa.Column(
            "state",
            sa.Text(),
            nullable=False,
            comment="asked granted joined confirmed draining drained released failed",
        ),
        sa.Column("handle", sa.Text(), nullable=False, comment="id in the resource manager"),
        sa.Column("asked_at", sa.Double(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False, comment="when the present state began"),
        sa.Column("note", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name=op.f("fk_tasks_job_number")),
        sa.PrimaryKeyConstraint("job_number", "id", name=op.f("pk_tasks")),
    )
    op.create_index(op.f("ix_tasks_job_number_role_ordinal"), "tasks", ["job_number", "role", "ordinal"], unique=True)
    op.create_index(op.f("ix_tasks_state"), "tasks", ["state"], unique=False)
    op.create_table(
        "resizes",
        sa.Column("job_number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("direction", sa.Text(), nullable=False, comment="grow or shrink"),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("began_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_number", "task"], ["tasks.job_number", "tasks.id"], name=op.f("fk_resizes_job_number_task")
        ),
        sa.PrimaryKeyConstraint("job_number", "task", "direction", name=op.f("pk_resizes")),
    )
    op.create_index(op.f("ix_resizes_began_at"), "resizes", ["began_at"], unique=False)
    op.create_index(op.f("ix_resizes_job_number_began_at"), "resizes", ["job_number", "began_at"], unique=False)
    op.create_table(
        "resize_events",
        sa.Column("job_number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("direction", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False, comment="position of the state in its machine, to sort by"),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_number", "task", "direction"],
            ["resizes.job_number", "resizes.task", "resizes.direction"],
            name=op.f("fk_resize_events_job_number_task_direction"),
        ),
        sa.PrimaryKeyConstraint("job_number", "task", "direction", "state", name=op.f("pk_resize_events")),
    )


def downgrade() -> None:
    op.execute("DROP VIEW IF EXISTS resize_history")
    op.execute("DROP VIEW IF EXISTS decision_history")
    op.drop_table("resize_events")
    op.drop_index(op.f("ix_resizes_job_number_began_at"), table_name="resizes")
    op.drop_index(op.f("ix_resizes_began_at"), table_name="resizes")
    op.drop_table("resizes")
    op.drop_index(op.f("ix_tasks_state"), table_name="tasks")
    op.drop_index(op.f("ix_tasks_job_number_role_ordinal"), table_name="tasks")
    op.drop_table("tasks")
    op.drop_table("runtime_plans")
    op.drop_table("progress")
    op.drop_index(op.f("ix_decisions_job_number_slot"), table_name="decisions")
    op.drop_table("decisions")
    op.drop_index(op.f("ix_slots_at"), table_name="slots")
    op.drop_table("slots")
    op.drop_table("lease")
    op.drop_index(op.f("ix_jobs_submitted"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_state"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_name"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_id"), table_name="jobs")
    op.drop_table("jobs")
    op.drop_table("job_ids")
