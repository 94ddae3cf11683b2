"""Shadow decisions, use of resources, causes and times of tasks as rows and columns; views with timestamps."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
#: Slots that are read at a time.
_BATCH = 200


def upgrade() -> None:
    op.create_table(
        "shadow_allocations",
        sa.Column("slot", sa.BigInteger(), sa.ForeignKey("slots.number"), primary_key=True, autoincrement=False),
        sa.Column("job_number", _NUMBER, sa.ForeignKey("jobs.number"), primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("workers", "ps")),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("binding_constraint", "reason", "guard")),
    )
    op.create_index("ix_shadow_allocations_job_number_slot", "shadow_allocations", ["job_number", "slot"])
    op.create_table(
        "slot_resources",
        sa.Column("slot", sa.BigInteger(), sa.ForeignKey("slots.number"), primary_key=True, autoincrement=False),
        sa.Column("resource", sa.Text(), primary_key=True),
        *(sa.Column(name, sa.Double(), nullable=False) for name in ("capacity", "used", "held")),
    )
    for table, name, kind, default in (
        ("jobs", "end_cause", sa.Text(), "''"),
        ("jobs", "epochs", sa.Double(), "0"),
        ("jobs", "max_workers", sa.BigInteger(), "0"),
        ("jobs", "max_ps", sa.BigInteger(), "0"),
        ("tasks", "cause", sa.Text(), "''"),
        ("slots", "fallback", sa.Text(), "''"),
    ):
        op.add_column(table, sa.Column(name, kind, nullable=False, server_default=sa.text(default)))
    for table, name, kind in (
        ("jobs", "worker_demand", sa.Text()),
        ("jobs", "ps_demand", sa.Text()),
        ("tasks", "granted_at", sa.Double()),
        ("tasks", "ended_at", sa.Double()),
        ("resizes", "granted_at", sa.Double()),
        ("resizes", "ended_at", sa.Double()),
        ("slots", "shadow_policy", sa.Text()),
        ("slots", "shadow_policy_version", sa.Text()),
    ):
        op.add_column(table, sa.Column(name, kind, nullable=True))
    number = _NUMBER.compile(op.get_context().dialect)
    op.execute(
        f"ALTER TABLE slots ADD COLUMN version_number {number} "
        "CONSTRAINT fk_slots_version_number REFERENCES policy_versions (number)"
    )
    _fill_tasks()
    _fill_resizes()
    _fill_jobs()
    _fill_slots()


def _fill_tasks() -> None:
    """Times of tasks, from the events of their resizes."""
    op.execute(
        """
        UPDATE tasks SET
            granted_at = (SELECT min(at) FROM resize_events AS e WHERE e.job_number = tasks.job_number
                          AND e.task = tasks.id AND e.state IN ('granted', 'joined', 'confirmed')),
            ended_at = (SELECT max(at) FROM resize_events AS e WHERE e.job_number = tasks.job_number
                        AND e.task = tasks.id AND e.state IN ('released', 'failed'))
        """
    )


def _fill_resizes() -> None:
    op.execute(
        """
        UPDATE resizes SET
            granted_at = (SELECT min(at) FROM resize_events AS e WHERE e.job_number = resizes.job_number
                          AND e.task = resizes.task AND e.direction = resizes.direction
                          AND e.state IN ('granted', 'joined', 'confirmed')),
            ended_at = (SELECT min(at) FROM resize_events AS e WHERE e.job_number = resizes.job_number
                        AND e.task = resizes.task AND e.direction = resizes.direction
                        AND e.state IN ('confirmed', 'released', 'failed'))
        """
    )


def _fill_jobs() -> None:
    """What users asked for, from their requests."""
    connection = op.get_bind()
    asked_for = ("epochs", "max_workers", "max_ps", "worker_demand", "ps_demand")
    jobs = sa.table("jobs", *(sa.column(name) for name in ("number", "request", *asked_for)))
    for number, request in connection.execute(sa.select(jobs.c.number, jobs.c.request)).all():
        asked = msgspec.json.decode(request)
        values = {
            "epochs": asked.get("epochs", 0),
            "max_workers": asked.get("max_workers", 0),
            "max_ps": asked.get("max_ps", 0),
            "worker_demand": _demand(asked.get("worker")),
            "ps_demand": _demand(asked.get("ps")),
        }
        connection.execute(sa.update(jobs).where(jobs.c.number == number).values(values))


def _demand(resources: Any) -> str:
    amounts = {name: amount / 1000 for name, amount in (resources or {}).get("thousandths", ())}
    whole = {name: int(amount) if amount == int(amount) else amount for name, amount in amounts.items()}
    return msgspec.json.encode(whole, order="deterministic").decode()


def _fill_slots() -> None:
    """Use of resources from snapshots, what decided, and rows of what dl2d would have done in mode shadow."""
    connection = op.get_bind()
    # Decisions name a version by the first digits of its digest.
    op.execute(
        """
        UPDATE slots SET version_number = (
            SELECT max(v.number) FROM policy_versions AS v WHERE v.policy = slots.policy
            AND substr(v.digest, 1, length(slots.policy_version)) = slots.policy_version)
        WHERE policy_version <> ''
        """
    )
    jobs = sa.table("jobs", sa.column("number"), sa.column("slug"))
    numbers = {slug: number for number, slug in connection.execute(sa.select(jobs.c.number, jobs.c.slug))}
    stored = ("number", "snapshot", "decision", "proposed", "shadow")
    decided_by = ("fallback", "shadow_policy", "shadow_policy_version")
    slots = sa.table("slots", *(sa.column(name) for name in (*stored, *decided_by)))
    resources = sa.table(
        "slot_resources", *(sa.column(name) for name in ("slot", "resource", "capacity", "used", "held"))
    )
    columns = ("slot", "job_number", "workers", "ps", "binding_constraint", "reason", "guard")
    allocations = sa.table("shadow_allocations", *(sa.column(name) for name in columns))
    last = 0
    while True:
        query = sa.select(*(slots.c[name] for name in stored)).where(slots.c.number > last)
        rows = connection.execute(query.order_by(slots.c.number).limit(_BATCH)).all()
        if not rows:
            break
        last = rows[-1].number
        use = [values for row in rows for values in _use(row.number, _decoded(row.snapshot))]
        if use:
            connection.execute(sa.insert(resources), use)
        for row in rows:
            values = {}
            if why := _why_fallback(_decoded(row.proposed or row.decision)):
                values["fallback"] = why
            if row.shadow is not None:
                shadow = _decoded(row.shadow)
                values |= {"shadow_policy": shadow["policy"], "shadow_policy_version": shadow["policy_version"]}
                if found := list(_shadow(row.number, shadow, numbers)):
                    connection.execute(sa.insert(allocations), found)
            if values:
                connection.execute(sa.update(slots).where(slots.c.number == row.number).values(values))


def _decoded(stored: bytes) -> Any:
    return msgspec.json.decode(stored if stored[:1] in {b"{", b"["} else zlib.decompress(stored))


def _why_fallback(decision: Any) -> str:
    """Why the fallback decided, from the reasons of the first job; "" where it did not, or no job was there."""
    guarded = (reason for entry in decision["jobs"][:1] for reason in entry.get("guarded", ()))
    return next((reason["text"] for reason in guarded if reason["constraint"] == "fallback"), "")


def _use(slot: int, snapshot: Any) -> Iterator[dict[str, Any]]:
    up = [node for node in snapshot["nodes"] if node.get("state", "up") == "up"]
    capacity = _total(node["capacity"] for node in up)
    used = _total(node.get("used", {}) for node in up)
    held = _total(task["demand"] for task in snapshot["tasks"])
    for name, amount in capacity.items():
        values = {"capacity": amount, "used": used.get(name, 0.0), "held": held.get(name, 0.0)}
        yield {"slot": slot, "resource": name, **values}


def _total(parts: Iterator[Any]) -> dict[str, float]:
    amounts: dict[str, int] = {}
    for part in parts:
        for name, amount in part.get("thousandths", ()):
            amounts[name] = amounts.get(name, 0) + amount
    return {name: amount / 1000 for name, amount in amounts.items()}


def _shadow(slot: int, decision: Any, numbers: dict[str, int]) -> Iterator[dict[str, Any]]:
    for entry in decision["jobs"]:
        workers, ps = entry["allocation"]
        reason = entry["reason"]
        yield {
            "slot": slot,
            "job_number": numbers[".".join(map(str, entry["job"]))],
            "workers": workers,
            "ps": ps,
            "binding_constraint": reason["constraint"],
            "reason": reason["text"],
            "guard": "; ".join(each["text"] for each in entry.get("guarded", ())),
        }
