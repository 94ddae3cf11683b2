"""Scheduling intervals and what was decided in them.

Tables ``slots``, ``decisions``, ``shadow_allocations`` and ``slot_resources``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from sqlalchemy import Column, Connection, Index, Row, Select, exists, func, insert, or_, select
from sqlalchemy.orm import Mapped

from dl2d.core.cluster import NodeSet, Snapshot
from dl2d.core.decision import Alternative, Constraint, Decider, Decision, JobDecision, Reason
from dl2d.core.errors import StoreError
from dl2d.core.jobs import NOTHING, Allocation, JobKey, User
from dl2d.core.json_codec import T, decode
from dl2d.core.plan_of_starts_and_stops import Deferred, Failure, Outcome, Plan
from dl2d.core.resources import WHOLE_NODE, Resources, Shortfall
from dl2d.core.store import DecisionEntry, JobSlot, Slot, SlotSummary
from dl2d.store.connections_and_transactions import StoreTables
from dl2d.store.tables.jobs import JobRow, job_numbers, owned_by
from dl2d.store.tables.policy_versions import version_number
from dl2d.store.tables.row_mapping import (
    EMPTY,
    ZERO,
    Base,
    Choice,
    CompressedJson,
    JobNumber,
    Json,
    Mapping,
    SlotNumber,
    UserText,
    Values,
    VersionNumber,
    batches,
    column,
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

    number: Mapped[int] = column("number of the slot, from 1", primary_key=True, autoincrement=False)
    at: Mapped[float] = column("when it was decided, seconds since 1970", index=True)
    policy: Mapped[str] = column("policy that decided; observed where the site's scheduler did, canary where two did")
    policy_version: Mapped[str] = column(
        "version of the policy; name and release of the site's scheduler; names and versions of both policies"
    )
    version_number: Mapped[VersionNumber | None] = column(
        "policy_versions.number of what decided; NULL if not a version"
    )
    fallback: Mapped[UserText] = column("why the fallback decided, in words; empty if it did not", server_default=EMPTY)
    shadow_policy: Mapped[str | None] = column("policy that was asked in mode shadow; otherwise NULL")
    shadow_policy_version: Mapped[str | None] = column("its version")
    shadow_version_number: Mapped[VersionNumber | None] = column("its policy_versions.number; NULL if not a version")
    measure: Mapped[str] = column("what the scores of alternatives measure")
    inputs_hash: Mapped[str] = column("SHA-256 over snapshot, policy, version and seed")
    seed: Mapped[str] = column("decimal; text because it may have more than 64 bits")
    seconds: Mapped[float] = column("duration of the whole tick, s")
    changed: Mapped[int] = column("number of jobs whose allocation was changed")
    started: Mapped[int] = column("number of tasks that were started")
    draining: Mapped[int] = column("number of tasks that were asked to leave")
    failures: Mapped[int] = column("number of requests that the resource manager refused or did not answer")
    snapshot: Mapped[Snapshot] = column("what the policy was given, JSON", CompressedJson(Snapshot))
    decision: Mapped[Decision] = column("decision as carried out, JSON", CompressedJson(Decision))
    proposed: Mapped[Decision | None] = column(
        "decision as the policy gave it, JSON; NULL where the guard changed nothing", CompressedJson(Decision)
    )
    shadow: Mapped[Decision | None] = column(
        "what dl2d would have carried out, JSON; NULL where it was in charge or was not asked", CompressedJson(Decision)
    )
    plan: Mapped[Plan] = column("starts, stops and deferred starts of the tick, JSON", CompressedJson(Plan))
    outcome: Mapped[Outcome] = column("outcome of the plan, JSON", CompressedJson(Outcome))


class _Decided:
    """Columns of a decision on one job in one slot."""

    slot: Mapped[SlotNumber]
    job_number: Mapped[JobNumber]
    workers: Mapped[int] = column("workers decided on")
    ps: Mapped[int] = column("parameter servers decided on")
    binding_constraint: Mapped[Constraint] = column("what kept the job from more", Choice(Constraint))
    reason: Mapped[UserText] = column("why, in words")
    guard: Mapped[UserText] = column("what the guard changed, in words; empty for nothing")


class DecisionRow(_Decided, Base):
    """What was decided for one job in one slot, and why."""

    __tablename__ = "decisions"
    __table_args__ = (Index(None, "job_number", "slot"),)

    previous_workers: Mapped[int] = column("workers that the job had")
    previous_ps: Mapped[int] = column("parameter servers that the job had")
    policy: Mapped[str | None] = column(
        "in mode canary the policy that decided on the job; NULL where that is the slot's"
    )
    policy_version: Mapped[str | None] = column("its version")
    version_number: Mapped[VersionNumber | None] = column("its policy_versions.number; NULL if not a version")
    detail: Mapped[DecisionDetail | None] = column(
        "shortfalls, alternatives and the guard's reasons, JSON", Json(DecisionDetail)
    )


class ShadowAllocationRow(_Decided, Base):
    """What dl2d would have given one job in one slot in mode shadow, and why."""

    __tablename__ = "shadow_allocations"
    __table_args__ = (Index(None, "job_number", "slot"),)

    given_workers: Mapped[int] = column("workers that the job was given in the slot", server_default=ZERO)
    given_ps: Mapped[int] = column("parameter servers that the job was given in the slot", server_default=ZERO)


class SlotResourceRow(Base):
    """Capacity and use of one resource in one slot."""

    __tablename__ = "slot_resources"

    slot: Mapped[SlotNumber]
    resource: Mapped[str] = column("cpu, gpu, memory (MiB) or another one", primary_key=True)
    capacity: Mapped[float] = column("of all nodes that take tasks, in units of the resource; memory in MiB")
    used: Mapped[float] = column("in use on these nodes, by whomever; memory in MiB")
    held: Mapped[float] = column("held on these nodes by tasks of jobs that dl2d knows; memory in MiB")


class _Part(msgspec.Struct):
    """A large column of a slot, of which only the entries on one job are decoded."""

    policy: str = ""
    policy_version: str = ""
    measure: str = ""
    jobs: list[msgspec.Raw] = []
    deferred: list[msgspec.Raw] = []
    failures: list[msgspec.Raw] = []
    nodes: list[msgspec.Raw] = []
    node_sets: list[msgspec.Raw] = []


class _Subject(msgspec.Struct):
    """The job or jobs that an entry of a part is about."""

    job: JobKey | None = None
    jobs: tuple[JobKey, ...] = ()


_SUBJECT = msgspec.json.Decoder(_Subject)
_PARTS: list[Column[Any]] = [
    Column(name, CompressedJson(_Part)) for name in ("snapshot", "decision", "proposed", "shadow", "plan", "outcome")
]
_SLOT = Mapping(Slot, SlotRow)
_SUMMARY = Mapping(SlotSummary, SlotRow)
_NO_DETAIL = DecisionDetail()
#: More than the number of any slot.
_AFTER_ALL_SLOTS = 1 << 62


class SqlSlots(StoreTables):
    """Slots and the decisions in them."""

    def record_slot(self, slot: Slot) -> None:
        """See ``TickStore.record_slot``. Raises ``StoreError`` if the number is taken or a job is not known."""
        _check_scores(slot)
        shadow, decision, outcome = slot.shadow, slot.decision, slot.outcome
        with self._database.writing(f"recording slot {slot.number}") as connection:
            numbers = job_numbers(connection, {decided.job for decided in decision.jobs})
            values = _SLOT.values(
                slot,
                policy=decision.policy,
                policy_version=decision.policy_version,
                measure=decision.measure,
                changed=sum(decided.allocation != decided.previous for decided in decision.jobs),
                started=len(outcome.started),
                draining=len(outcome.draining),
                failures=len(outcome.failures),
                seed=str(slot.seed),
                proposed=None if slot.proposed == decision else slot.proposed,
                version_number=version_number(connection, decision.policy, decision.policy_version),
                fallback=slot.proposed.fallback_cause,
            )
            if shadow is not None:
                values["shadow_policy"], values["shadow_policy_version"] = shadow.policy, shadow.policy_version
                number = version_number(connection, shadow.policy, shadow.policy_version)
                values["shadow_version_number"] = number
            given = {each.job: each.allocation for each in decision.jobs}
            deciders = {each.by for each in decision.jobs if each.by is not None}
            versions: dict[Decider | None, int | None] = {by: version_number(connection, *by) for by in deciders}
            connection.execute(insert(table_of(SlotRow)), values)
            rows = {
                DecisionRow: [
                    {**_decision_values(slot.number, numbers[each.job], each), "version_number": versions.get(each.by)}
                    for each in decision.jobs
                ],
                ShadowAllocationRow: [
                    {
                        **_decided_values(slot.number, numbers[each.job], each),
                        "given_workers": given.get(each.job, NOTHING).workers,
                        "given_ps": given.get(each.job, NOTHING).ps,
                    }
                    for each in (() if shadow is None else shadow.jobs)
                ],
                SlotResourceRow: [{"slot": slot.number, **use} for use in resource_use(slot.snapshot)],
            }
            for model, of_model in rows.items():
                if of_model:
                    connection.execute(insert(table_of(model)), of_model)

    def last_slot_number(self) -> int:
        """See ``TickStore.last_slot_number``."""
        with self._database.reading("reading the last slot") as connection:
            return _last_slot_number(connection)

    def slot(self, number: int) -> Slot | None:
        """A whole slot, to be recomputed."""
        rows = self._rows(f"reading slot {number}", select(table_of(SlotRow)).where(SlotRow.number == number))
        if not rows:
            return None
        row = rows[0]
        found = _SLOT.record(row, f"slot {number}", seed=int(row.seed))
        # A slot in which the guard changed nothing holds its decision once.
        return found if row.proposed is not None else replace(found, proposed=found.decision)

    def job_slot(self, number: int, job: JobKey) -> JobSlot | None:
        """What a slot holds about a job, which takes a small part of the time of reading the whole slot."""
        table = table_of(SlotRow).c
        chosen = (table.number, table.at, table.inputs_hash, *(table[part.name] for part in _PARTS))
        what = f"slot {number}"
        rows = self._rows(f"reading {what}", select(*chosen).where(table.number == number))
        if not rows:
            return None
        row = rows[0]
        snapshot, decision, proposed, shadow, plan, outcome = (decoded_json(row, part, what) for part in _PARTS)
        try:
            return JobSlot(
                entry=_part_entry(row, decision, job),
                proposed=next(iter(_about(job, (proposed or decision).jobs, JobDecision)), None),
                shadow=None if shadow is None else _part_entry(row, shadow, job),
                deferred=_about(job, plan.deferred, Deferred),
                failures=_about(job, outcome.failures, Failure),
                usable=next(iter(_about(job, snapshot.node_sets, NodeSet)), None),
                nodes=len(snapshot.nodes),
            )
        except msgspec.MsgspecError as error:
            raise StoreError(
                f"{what} cannot be read: {error}; it is damaged or from another version of dl2d"
            ) from error

    def grown_jobs(self, number: int, owner: User | None = None) -> tuple[JobDecision, ...]:
        """Decisions of a slot that gave jobs of one owner, or of all, more tasks than they had."""
        more = DecisionRow.workers + DecisionRow.ps > DecisionRow.previous_workers + DecisionRow.previous_ps
        query: Select[Any] = (
            select(table_of(DecisionRow), JobRow.cluster, JobRow.id, JobRow.submitted)
            .join(JobRow, JobRow.number == DecisionRow.job_number)
            .where(DecisionRow.slot == number, more, *owned_by(owner))
            .order_by(DecisionRow.job_number)
        )
        rows = self._rows(f"reading decisions of slot {number}", query)
        return tuple(_decided(row, JobKey(row.cluster, row.id, row.submitted)) for row in rows)

    def slots(
        self, *, limit: int = 100, policy: str | None = None, outside: Iterable[tuple[float, float]] = (),
        with_jobs: bool = False,
    ) -> tuple[SlotSummary, ...]:  # fmt: skip
        """Newest first: those in which one policy decided, or all, outside some times (from, until; the latter is not
        one of them).

        ``with_jobs``: only those with decisions on jobs. Slots that are older than all decisions count as well: their
        decisions may have been deleted.

        Slots that do not count are passed over by number, time, policy and the index of decisions, some 20 us each.
        """
        query = select(*_SUMMARY.columns).order_by(SlotRow.number.desc()).limit(limit)
        query = query.where(*(or_(SlotRow.at < begin, SlotRow.at >= end) for begin, end in outside))
        if policy is not None:
            query = query.where(SlotRow.policy == policy)
        if with_jobs:
            first_decided = func.coalesce(select(func.min(DecisionRow.slot)).scalar_subquery(), _AFTER_ALL_SLOTS)
            query = query.where(exists().where(DecisionRow.slot == SlotRow.number) | (SlotRow.number < first_decided))
        return tuple(_SUMMARY.record(row, f"slot {row.number}") for row in self._rows("listing slots", query))

    def decisions(self, job: JobKey, *, limit: int = 100, changed: bool = False) -> tuple[DecisionEntry, ...]:
        """The job's decisions, newest first; with ``changed`` those that changed its allocation."""
        of_slot: list[Any] = [
            SlotRow.at, SlotRow.policy.label("slot_policy"), SlotRow.policy_version.label("slot_policy_version"),
            SlotRow.inputs_hash, SlotRow.measure,
        ]  # fmt: skip
        query = (
            select(table_of(DecisionRow), *of_slot)
            .join(SlotRow, SlotRow.number == DecisionRow.slot)
            .join(JobRow, JobRow.number == DecisionRow.job_number)
            .where(JobRow.slug == job.slug)
            .order_by(DecisionRow.slot.desc())
            .limit(limit)
        )
        if changed:
            workers, ps = DecisionRow.workers != DecisionRow.previous_workers, DecisionRow.ps != DecisionRow.previous_ps
            query = query.where(workers | ps)
        return tuple(_entry(row, job) for row in self._rows(f"reading decisions on job {job.slug}", query))

    def last_decisions(self, jobs: Collection[JobKey]) -> dict[JobKey, JobDecision]:
        """Decisions of the newest slot on those of these jobs that it decided on."""
        slugs = {job.slug: job for job in jobs}
        with self._database.reading("reading the last decisions") as connection:
            query: Select[Any] = (
                select(table_of(DecisionRow), JobRow.slug)
                .join(JobRow, JobRow.number == DecisionRow.job_number)
                .where(DecisionRow.slot == _last_slot_number(connection))
            )
            return {
                slugs[row.slug]: _decided(row, slugs[row.slug])
                for batch in batches(slugs)
                for row in connection.execute(query.where(JobRow.slug.in_(batch)))
            }


def _last_slot_number(connection: Connection) -> int:
    return connection.execute(select(func.max(SlotRow.number))).scalar() or 0


def resource_use(snapshot: Snapshot) -> list[Values]:
    """Capacity and use of each resource on the nodes that take tasks: columns of ``slot_resources`` without the slot.

    A resource that only other nodes have has a capacity of 0.
    """
    up = {node.name: node for node in snapshot.nodes if node.is_open}
    capacity = Resources.total(node.capacity for node in up.values()).as_dict()
    used = Resources.total(node.used for node in up.values()).as_dict()
    held = Resources.total(task.room for task in snapshot.tasks if task.node in up).as_dict()
    names = Resources.total(node.capacity for node in snapshot.nodes).as_dict()
    return [
        {
            "resource": name,
            "capacity": capacity.get(name, 0.0),
            "used": used.get(name, 0.0),
            "held": held.get(name, 0.0),
        }
        for name in names
        if name != WHOLE_NODE
    ]


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


def _decided_values(slot: int, job_number: int, decided: JobDecision) -> Values:
    return {
        "slot": slot,
        "job_number": job_number,
        "workers": decided.allocation.workers,
        "ps": decided.allocation.ps,
        "binding_constraint": decided.reason.constraint,
        "reason": decided.reason.text,
        "guard": "; ".join(reason.text for reason in decided.guarded),
    }


def _decision_values(slot: int, job_number: int, decided: JobDecision) -> Values:
    detail = DecisionDetail(decided.reason.shortfalls, decided.alternatives, decided.guarded)
    policy, version = decided.by or (None, None)
    return {
        **_decided_values(slot, job_number, decided),
        "previous_workers": decided.previous.workers,
        "previous_ps": decided.previous.ps,
        "policy": policy,
        "policy_version": version,
        "detail": None if detail == _NO_DETAIL else detail,
    }


def _part_entry(row: Row[*tuple[Any, ...]], part: _Part, job: JobKey) -> DecisionEntry | None:
    for decided in _about(job, part.jobs, JobDecision):
        name, version = decided.by or (part.policy, part.policy_version)
        return DecisionEntry(row.number, row.at, name, version, row.inputs_hash, part.measure, decided)
    return None


def _about(job: JobKey, entries: list[msgspec.Raw], kind: type[T]) -> tuple[T, ...]:
    subjects = ((entry, _SUBJECT.decode(entry)) for entry in entries)
    return tuple(decode(entry, kind) for entry, about in subjects if about.job == job or job in about.jobs)


def snapshot(connection: Connection, number: int) -> Snapshot:
    """What the policy was given in a slot that was recorded."""
    row = connection.execute(select(SlotRow.snapshot).where(SlotRow.number == number)).one()
    found: Snapshot = decoded_json(row, table_of(SlotRow).c.snapshot, f"slot {number}")
    return found


def _entry(row: Row[Any], job: JobKey) -> DecisionEntry:
    """One job's decision from a row of ``decisions`` joined with its slot."""
    decided = _decided(row, job)
    name, version = decided.by or (row.slot_policy, row.slot_policy_version)
    return DecisionEntry(
        slot=row.slot,
        at=row.at,
        policy=name,
        policy_version=version,
        inputs_hash=row.inputs_hash,
        measure=row.measure,
        decided=decided,
    )


def _decided(row: Row[Any], job: JobKey) -> JobDecision:
    what = f"decision of slot {row.slot} on job {job.slug}"
    detail: DecisionDetail = decoded_json(row, table_of(DecisionRow).c.detail, what) or _NO_DETAIL
    return JobDecision(
        job=job,
        allocation=Allocation(row.workers, row.ps),
        reason=Reason(constraint=row.binding_constraint, text=row.reason, shortfalls=detail.shortfalls),
        previous=Allocation(row.previous_workers, row.previous_ps),
        alternatives=detail.alternatives,
        guarded=detail.guarded,
        by=None if row.policy is None else Decider(row.policy, row.policy_version),
    )
