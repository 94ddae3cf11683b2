"""The schema with which upgrades begin: databases of earlier revisions are from before the first release."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _columns(kind: sa.types.TypeEngine, *names: str, nullable: bool = False) -> list[sa.Column]:
    return [sa.Column(name, kind, nullable=nullable) for name in names]


def _texts(*names: str) -> list[sa.Column]:
    return _columns(sa.Text(), *names)


def _counts(*names: str) -> list[sa.Column]:
    return _columns(sa.BigInteger(), *names)


def _floats(*names: str) -> list[sa.Column]:
    return _columns(sa.Double(), *names)


def _unknown_floats(*names: str) -> list[sa.Column]:
    return _columns(sa.Double(), *names, nullable=True)


def _job() -> sa.Column:
    return sa.Column("job_number", _NUMBER, sa.ForeignKey("jobs.number"), primary_key=True, autoincrement=False)


def _key(name: str, kind: sa.types.TypeEngine) -> sa.Column:
    """One of several columns of a primary key."""
    return sa.Column(name, kind, primary_key=True, autoincrement=False)


def _reported() -> list[sa.Column]:
    return [
        *_counts("version", "workers", "ps"), *_columns(sa.BigInteger(), "total_versions", nullable=True),
        *_floats("epoch"), *_unknown_floats("loss", "steps_per_second", "samples_per_second"),
    ]  # fmt: skip


def _of_task() -> list[sa.Column]:
    return [_key("job_number", sa.BigInteger()), _key("task", sa.Text()), _key("direction", sa.Text())]


def upgrade() -> None:
    _create_jobs()
    _create_slots()
    _create_tasks()
    _create_policy_versions()
    op.create_table("job_ids", _key("cluster", sa.Text()), *_counts("last"))
    op.create_table("lease", _key("name", sa.Text()), *_texts("holder"), *_counts("term"), *_floats("since"))
    op.create_table(
        "mode_changes",
        sa.Column("number", _NUMBER, primary_key=True),
        *_floats("at"),
        *_texts("before", "after", "by", "reason"),
    )


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", _NUMBER, primary_key=True),
        sa.Column("slug", sa.Text(), nullable=False, unique=True),
        *_texts("cluster", "id", "name", "model", "user_name", "account", "partition", "qos"),
        *_texts("state", "anchor", "address", "end_reason", "digest", "request", "launch"),
        *_counts("submitted", "uid", "gid"),
        *_floats("progress_at"),
        *_unknown_floats("started_at", "ended_at", "series_at"),
        *_columns(sa.BigInteger(), "strayed_workers", "strayed_ps", nullable=True),
        sa.Column("static", sa.Boolean(), nullable=False, server_default=sa.false()),
        *_reported(),
    )
    for name in ("id", "name", "state", "submitted"):
        op.create_index(None, "jobs", [name])
    op.create_table("progress", _job(), _key("at", sa.Double()), *_reported())
    op.create_table(
        "speeds",
        *(_key(name, sa.Text()) for name in ("model", "architecture", "consistency")),
        *(_key(name, sa.BigInteger()) for name in ("workers", "ps")),
        *_counts("measurements", "jobs", "other_measurements", "other_jobs"),
        *_floats("samples_per_second", "at", "since", "before", "other_since"),
        *_unknown_floats("other_samples_per_second"),
        *_texts("job", "other_job"),
    )


def _create_slots() -> None:
    op.create_table(
        "slots",
        _key("number", sa.BigInteger()),
        *_floats("at", "seconds"),
        *_texts("policy", "policy_version", "measure", "inputs_hash", "seed"),
        *_counts("changed", "started", "draining", "failures"),
        *_columns(sa.LargeBinary(), "snapshot", "decision", "plan", "outcome"),
        *_columns(sa.LargeBinary(), "proposed", "shadow", nullable=True),
    )
    op.create_index(None, "slots", ["at"])
    op.create_table(
        "decisions",
        sa.Column("slot", sa.BigInteger(), sa.ForeignKey("slots.number"), primary_key=True, autoincrement=False),
        _job(),
        *_counts("workers", "ps", "previous_workers", "previous_ps"),
        *_texts("bound_by", "reason", "guard"),
        *_columns(sa.Text(), "detail", nullable=True),
    )
    op.create_index("ix_decisions_job_number_slot", "decisions", ["job_number", "slot"])


def _create_tasks() -> None:
    op.create_table(
        "tasks",
        _job(),
        _key("id", sa.Text()),
        *_counts("ordinal"),
        *_texts("role", "node", "demand", "state", "handle", "note"),
        *_floats("asked_at", "since"),
    )
    op.create_index("ix_tasks_job_number_role_ordinal", "tasks", ["job_number", "role", "ordinal"], unique=True)
    op.create_index(None, "tasks", ["state"])
    op.create_table(
        "resizes",
        *_of_task(),
        *_texts("role", "node"),
        *_floats("began_at"),
        sa.ForeignKeyConstraint(["job_number", "task"], ["tasks.job_number", "tasks.id"]),
    )
    op.create_index(None, "resizes", ["began_at"])
    op.create_index("ix_resizes_job_number_began_at", "resizes", ["job_number", "began_at"])
    op.create_table(
        "resize_events",
        *_of_task(),
        _key("state", sa.Text()),
        *_counts("step"),
        *_floats("at"),
        *_texts("note"),
        sa.ForeignKeyConstraint(
            ["job_number", "task", "direction"], ["resizes.job_number", "resizes.task", "resizes.direction"]
        ),
    )
    op.create_table(
        "task_reports",
        _job(),
        _key("task", sa.Text()),
        *_floats("at"),
        *_unknown_floats("cpu_seconds", "cpu_percent", "memory", "memory_peak", "gpu_percent", "gpu_memory"),
        *_unknown_floats("step_ms", "step_p95_ms", "slow"),
        *_counts("gpus"),
        *_texts("cause", "how", "slow_reason"),
    )
    op.create_table(
        "runtime_plans",
        _job(),
        _key("number", sa.BigInteger()),
        *_floats("at", "prepare_ms", "move_ms", "suspension_p50_ms", "suspension_max_ms"),
        *_counts("first_version", "workers", "servers", "moved_bytes"),
        *_texts("added", "removed"),
    )


def _create_policy_versions() -> None:
    op.create_table(
        "policy_versions",
        sa.Column("number", _NUMBER, primary_key=True),
        *_texts("policy", "digest", "parent", "folder", "origin", "metrics", "state"),
        *_floats("at"),
        *_unknown_floats("data_from", "data_to"),
        *_counts("jobs"),
        sa.UniqueConstraint("policy", "digest", name="uq_policy_versions_policy_digest"),
    )
    op.create_index("ix_policy_versions_policy_state", "policy_versions", ["policy", "state"])
    op.create_table(
        "policy_changes",
        sa.Column("number", _NUMBER, primary_key=True),
        sa.Column("version", _NUMBER, sa.ForeignKey("policy_versions.number"), nullable=False),
        sa.Column("replaced", _NUMBER, sa.ForeignKey("policy_versions.number"), nullable=True),
        *_floats("at"),
        *_texts("before", "after", "by", "reason"),
        *_columns(sa.Boolean(), "rollback"),
    )
    op.create_index(None, "policy_changes", ["version"])
    op.create_table(
        "policy_trials",
        sa.Column("number", _NUMBER, primary_key=True),
        *_texts("policy", "candidate", "current", "days", "cases", "reason"),
        *_floats("at"),
        *_unknown_floats("change", "low", "high"),
        *_columns(sa.Boolean(), "passed"),
    )
    op.create_table(
        "learning_runs",
        sa.Column("number", _NUMBER, primary_key=True),
        *_texts("policy", "state", "note"),
        *_floats("started_at"),
        *_unknown_floats("ended_at"),
    )
