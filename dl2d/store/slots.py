"""Scheduling intervals and what was decided for each job in them: tables ``slots`` and ``decisions``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, ForeignKey, Index, Row, func, insert, select
from sqlalchemy.orm import Mapped, mapped_column

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Alternative, Constraint, Decision, JobDecision, Reason
from dl2d.core.errors import StoreError
from dl2d.core.jobs import Allocation, JobKey
from dl2d.core.plan import Outcome, Plan
from dl2d.core.resources import Shortfall
from dl2d.core.store import DecisionEntry, Slot, SlotSummary
from dl2d.store.jobs import JobRow, job_numbers
from dl2d.store.mapping import (
    Base,
    Choice,
    CompressedJson,
    FreeText,
    Json,
    Mapping,
    Values,
    columns,
    decoded_json,
    table_of,
)


@dataclass(frozen=True, slots=True)
class DecisionDetail:
    """Parts of a job's decision that have no column of their own."""

    shortfalls: tuple[Shortfall, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    guarded: tuple[Reason, ...] = ()


class SlotRow(Base):
    """One scheduling interval. The large columns are JSON, compressed by zlib where that is shorter."""

    __tablename__ = "slots"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[float] = mapped_column(index=True)
    policy: Mapped[str]
    policy_version: Mapped[str]
    measure: Mapped[str] = mapped_column(comment="what the scores of alternatives measure")
    inputs_hash: Mapped[str] = mapped_column(comment="SHA-256 over snapshot, policy, version and seed")
    seed: Mapped[str] = mapped_column(comment="decimal; text because it may have more than 64 bits")
    seconds: Mapped[float] = mapped_column(comment="duration of the whole tick")
    changed: Mapped[int] = mapped_column(comment="jobs whose allocation was changed")
    started: Mapped[int] = mapped_column(comment="tasks")
    draining: Mapped[int] = mapped_column(comment="tasks")
    failures: Mapped[int]
    snapshot: Mapped[Snapshot] = mapped_column(CompressedJson(Snapshot))
    decision: Mapped[Decision] = mapped_column(CompressedJson(Decision), comment="as carried out")
    proposed: Mapped[Decision | None] = mapped_column(
        CompressedJson(Decision), comment="as the policy gave it; NULL where the guard changed nothing"
    )
    shadow: Mapped[Decision | None] = mapped_column(
        CompressedJson(Decision),
        comment="what dl2d would have carried out; NULL where it was in charge or was not asked",
    )
    plan: Mapped[Plan] = mapped_column(CompressedJson(Plan))
    outcome: Mapped[Outcome] = mapped_column(CompressedJson(Outcome))


class DecisionRow(Base):
    """What was decided for one job in one slot, and why."""

    __tablename__ = "decisions"
    __table_args__ = (Index(None, "job_number", "slot"),)

    slot: Mapped[int] = mapped_column(ForeignKey("slots.number"), primary_key=True, autoincrement=False)
    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"), primary_key=True, autoincrement=False)
    workers: Mapped[int]
    ps: Mapped[int]
    previous_workers: Mapped[int]
    previous_ps: Mapped[int]
    binding_constraint: Mapped[Constraint] = mapped_column(Choice(Constraint), comment="the binding constraint")
    reason: Mapped[str] = mapped_column(FreeText(), comment="why, in words")
    guard: Mapped[str] = mapped_column(FreeText(), comment="what the guard changed, in words; empty for nothing")
    detail: Mapped[DecisionDetail | None] = mapped_column(
        Json(DecisionDetail), comment="shortfalls, alternatives and the guard's reasons, JSON"
    )


_SLOT = Mapping(Slot, SlotRow)
_SUMMARY = Mapping(SlotSummary, SlotRow)
_NO_DETAIL = DecisionDetail()


def record_slot(connection: Connection, slot: Slot) -> None:
    """See ``Store.record_slot``. Raises ``StoreError`` if the number is taken or a job is not known."""
    _check_scores(slot)
    numbers = job_numbers(connection, {decided.job for decided in slot.decision.jobs})
    values = _SLOT.values(
        slot,
        **_SUMMARY.values(SlotSummary.of(slot)),
        measure=slot.decision.measure,
        seed=str(slot.seed),
        proposed=None if slot.proposed == slot.decision else slot.proposed,
    )
    connection.execute(insert(table_of(SlotRow)), values)
    decided = [_decision_values(slot.number, numbers[each.job], each) for each in slot.decision.jobs]
    if decided:
        connection.execute(insert(table_of(DecisionRow)), decided)


def _check_scores(slot: Slot) -> None:
    """Raise ``StoreError`` where a score is not finite: JSON has no such numbers, the slot could not be read back."""
    shadow = slot.shadow.jobs if slot.shadow is not None else ()
    for decided in (*slot.proposed.jobs, *slot.decision.jobs, *shadow):
        for alternative in decided.alternatives:
            if not math.isfinite(alternative.score):
                raise StoreError(
                    f"recording slot {slot.number}: policy {slot.proposed.policy} gave job {decided.job.slug} an "
                    f"alternative {alternative.allocation} with score {alternative.score}, which is not a finite number"
                )


def _decision_values(slot: int, job_number: int, decided: JobDecision) -> Values:
    detail = DecisionDetail(decided.reason.shortfalls, decided.alternatives, decided.guarded)
    return {
        "slot": slot,
        "job_number": job_number,
        "workers": decided.allocation.workers,
        "ps": decided.allocation.ps,
        "previous_workers": decided.previous.workers,
        "previous_ps": decided.previous.ps,
        "binding_constraint": decided.reason.constraint,
        "reason": decided.reason.text,
        "guard": "; ".join(reason.text for reason in decided.guarded),
        "detail": None if detail == _NO_DETAIL else detail,
    }


def last_slot_number(connection: Connection) -> int:
    """See ``Store.last_slot_number``."""
    return connection.execute(select(func.max(SlotRow.number))).scalar() or 0


def slot(connection: Connection, number: int) -> Slot | None:
    """See ``Store.slot``."""
    row = connection.execute(select(*columns(SlotRow)).where(SlotRow.number == number)).one_or_none()
    if row is None:
        return None
    found = _SLOT.record(row, f"slot {number}", seed=int(row.seed))
    # A slot in which the guard changed nothing holds its decision once.
    return found if row.proposed is not None else replace(found, proposed=found.decision)


def snapshot(connection: Connection, number: int) -> Snapshot:
    """What the policy was given in a slot that was recorded."""
    row = connection.execute(select(SlotRow.snapshot).where(SlotRow.number == number)).one()
    found: Snapshot = decoded_json(row, table_of(SlotRow).c.snapshot, f"slot {number}")
    return found


def slots(connection: Connection, limit: int) -> tuple[SlotSummary, ...]:
    """See ``Store.slots``."""
    query = select(*_SUMMARY.columns).order_by(SlotRow.number.desc()).limit(limit)
    return tuple(_SUMMARY.record(row, f"slot {row.number}") for row in connection.execute(query))


def decisions(connection: Connection, job: JobKey, limit: int) -> tuple[DecisionEntry, ...]:
    """See ``Store.decisions``."""
    of_slot: list[Any] = [SlotRow.at, SlotRow.policy, SlotRow.policy_version, SlotRow.inputs_hash, SlotRow.measure]
    query = (
        select(*columns(DecisionRow), *of_slot)
        .join(SlotRow, SlotRow.number == DecisionRow.slot)
        .join(JobRow, JobRow.number == DecisionRow.job_number)
        .where(JobRow.slug == job.slug)
        .order_by(DecisionRow.slot.desc())
        .limit(limit)
    )
    return tuple(_entry(row, job) for row in connection.execute(query))


def _entry(row: Row[Any], job: JobKey) -> DecisionEntry:
    """One job's decision from a row of ``decisions`` joined with its slot."""
    what = f"decision of slot {row.slot} on job {job.slug}"
    detail: DecisionDetail = decoded_json(row, table_of(DecisionRow).c.detail, what) or _NO_DETAIL
    return DecisionEntry(
        slot=row.slot,
        at=row.at,
        policy=row.policy,
        policy_version=row.policy_version,
        inputs_hash=row.inputs_hash,
        measure=row.measure,
        decided=JobDecision(
            job=job,
            allocation=Allocation(row.workers, row.ps),
            reason=Reason(constraint=row.binding_constraint, text=row.reason, shortfalls=detail.shortfalls),
            previous=Allocation(row.previous_workers, row.previous_ps),
            alternatives=detail.alternatives,
            guarded=detail.guarded,
        ),
    )
