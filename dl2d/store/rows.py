"""Between rows and records."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Row

from dl2d.core.cluster import Snapshot, Task, TaskState
from dl2d.core.codec import decode, encode
from dl2d.core.decision import Alternative, Constraint, Decision, JobDecision, Reason
from dl2d.core.errors import StoreError
from dl2d.core.jobs import Allocation, Job, JobKey, JobRequest, JobState, Launch, Owner, Progress, Role
from dl2d.core.measured import SpeedPoint, Tally
from dl2d.core.mode import Mode, ModeChange
from dl2d.core.plan import Outcome, Plan
from dl2d.core.resources import Resources, Shortfall
from dl2d.core.store import DecisionEntry, ResizeEvent, RuntimePlan, Slot, SlotSummary, TaskReport

T = TypeVar("T")
Values = dict[str, Any]
_ROLES = list(Role)
# A snapshot of 1,000 jobs (3.9 MB) takes 5 ms and shrinks to 70 kB; level 6 takes 12 ms to come to 56 kB.
_ZLIB_LEVEL = 3
_LARGEST_RECORD = 1 << 30


@dataclass(frozen=True, slots=True)
class DecisionDetail:
    """What of a job's decision has no column of its own."""

    shortfalls: tuple[Shortfall, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    guarded: tuple[Reason, ...] = ()


_NO_DETAIL = DecisionDetail()


def pack(record: object) -> bytes:
    """A record as JSON, compressed where that is shorter."""
    plain = encode(record)
    packed = zlib.compress(plain, _ZLIB_LEVEL)
    return packed if len(packed) < len(plain) else plain


def unpack(data: bytes, kind: type[T], what: str) -> T:
    """Inverse of ``pack``.

    Raises
    ------
    StoreError
        The data is damaged or was written by a version with other records.
    """
    try:
        if data[:1] not in {b"{", b"["}:
            stream = zlib.decompressobj()
            plain = stream.decompress(data, _LARGEST_RECORD)
            if not stream.eof:
                raise StoreError(f"{what} is cut short or larger than {_LARGEST_RECORD} bytes")
            data = plain
        return decode(data, kind)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise StoreError(f"{what} cannot be read: {error}; it is damaged or from another version") from error


def finite(value: float | None) -> float | None:
    """None for what is not a number: SQLite has no NaN, and both databases shall answer alike."""
    return value if value is not None and math.isfinite(value) else None


def submit_order(key: JobKey) -> tuple[int, int, int, str, str]:
    """Sort key of a job: submit time, then id, numbers before words and by value."""
    number = int(key.id) if key.id.isdecimal() else None
    return (key.submitted, number is None, number or 0, "" if number is not None else key.id, key.cluster)


def of_job(job: Job) -> Values:
    """A job's columns.

    Raises
    ------
    StoreError
        The key has characters that would make it ambiguous.
    """
    try:
        plain = JobKey.from_slug(job.key.slug) == job.key
    except ValueError:
        plain = False
    if not plain:
        raise StoreError(f"{tuple(job.key)!r} is no job key: cluster and id may have letters, digits, _ and - only")
    return {
        "slug": job.key.slug,
        "cluster": job.key.cluster,
        "id": job.key.id,
        "submitted": job.key.submitted,
        "user_name": job.owner.user,
        "uid": job.owner.uid,
        "gid": job.owner.gid,
        "account": job.owner.account,
        "partition": job.owner.partition,
        "qos": job.owner.qos,
        "state": job.state.value,
        "anchor": job.anchor,
        "address": job.address,
        "started_at": job.started_at,
        "ended_at": job.ended_at,
        "end_reason": job.end_reason,
        "digest": job.digest,
        "static": job.static,
        **of_progress(job.progress, at="progress_at"),
        "series_at": None,
        **of_request(job.request),
        "launch": encode(job.launch).decode(),
    }


def of_request(request: JobRequest) -> Values:
    """Columns of what a job asks for."""
    return {"name": request.name, "model": request.model, "request": encode(request).decode()}


def to_job(row: Row[Any]) -> Job:
    """A job from a row of ``jobs``."""
    what = f"job {row.slug}"
    return Job(
        key=JobKey(row.cluster, row.id, row.submitted),
        request=unpack(row.request.encode(), JobRequest, what),
        owner=Owner(row.user_name, row.uid, row.gid, row.account, row.partition, row.qos),
        launch=unpack(row.launch.encode(), Launch, what),
        state=JobState(row.state),
        anchor=row.anchor,
        address=row.address,
        progress=to_progress(row, row.progress_at),
        started_at=row.started_at,
        ended_at=row.ended_at,
        end_reason=row.end_reason,
        digest=row.digest,
        static=bool(row.static),
    )


def of_progress(progress: Progress, *, at: str) -> Values:
    """Columns of a progress report; ``at`` names the column of its time."""
    return {
        at: progress.at,
        "version": progress.version,
        "total_versions": progress.total_versions,
        "epoch": progress.epoch,
        "loss": finite(progress.loss),
        "steps_per_second": finite(progress.steps_per_second),
        "samples_per_second": finite(progress.samples_per_second),
        "workers": progress.workers,
        "ps": progress.ps,
    }


def to_progress(row: Row[Any], at: float) -> Progress:
    """Progress from a row of ``progress`` or ``jobs``."""
    return Progress(
        at=at,
        version=row.version,
        total_versions=row.total_versions,
        epoch=row.epoch,
        loss=row.loss,
        steps_per_second=row.steps_per_second,
        samples_per_second=row.samples_per_second,
        workers=row.workers,
        ps=row.ps,
    )


def of_tally(tally: Tally) -> Values:
    """Columns of what was measured at one size, but for the size."""
    point, other = tally.point, tally.other
    return {
        "samples_per_second": point.samples_per_second,
        "measurements": point.measurements,
        "jobs": point.jobs,
        "at": point.at,
        "since": point.since,
        "before": point.before,
        "job": tally.job,
        "other_samples_per_second": None if other is None else other.samples_per_second,
        "other_measurements": 0 if other is None else other.measurements,
        "other_jobs": 0 if other is None else other.jobs,
        "other_since": 0.0 if other is None else other.since,
        "other_job": tally.other_job,
    }


def to_tally(row: Row[Any]) -> Tally:
    """What was measured at one size, from a row of ``speeds``."""
    size = Allocation(row.workers, row.ps)
    point = SpeedPoint(size, row.samples_per_second, row.measurements, row.jobs, row.at, row.since, row.before)
    other = row.other_samples_per_second
    if other is None:
        return Tally(point, row.job)
    said = SpeedPoint(size, other, row.other_measurements, row.other_jobs, row.other_since, row.other_since)
    return Tally(point, row.job, said, row.other_job)


def of_task(task: Task, job_number: int) -> Values:
    """A task's columns."""
    return {
        "job_number": job_number,
        "id": task.id,
        "role": task.role.value,
        "ordinal": task.number,
        "node": task.node,
        "demand": encode(task.demand.as_dict()).decode(),
        "state": task.state.value,
        "handle": task.handle,
        "asked_at": task.asked_at,
        "since": task.since,
        "note": task.note,
    }


def to_task(row: Row[Any], job: JobKey) -> Task:
    """A task from a row of ``tasks``."""
    return Task(
        job=job,
        id=row.id,
        role=Role(row.role),
        node=row.node,
        demand=Resources.of(unpack(row.demand.encode(), dict[str, float], f"task {row.id} of job {job.slug}")),
        state=TaskState(row.state),
        handle=row.handle,
        asked_at=row.asked_at,
        since=row.since,
        note=row.note,
    )


def task_order(task: Task) -> tuple[tuple[int, int, int, str, str], int, int]:
    """Sort key of a task: its job's submit order, role, number."""
    return (submit_order(task.job), _ROLES.index(task.role), task.number)


def of_mode_change(change: ModeChange) -> Values:
    """A mode change's columns."""
    before = "" if change.before is None else change.before.value
    return {"at": change.at, "before": before, "after": change.after.value, "by": change.by, "reason": change.reason}


def to_mode_change(row: Row[Any]) -> ModeChange:
    """A mode change from its row."""
    return ModeChange(row.at, Mode(row.before) if row.before else None, Mode(row.after), row.by, row.reason)


def of_event(job_number: int, task: str, direction: str, event: ResizeEvent) -> Values:
    """A resize event's columns."""
    return {
        "job_number": job_number,
        "task": task,
        "direction": direction,
        "state": event.state.value,
        "step": event.state.rank,
        "at": event.at,
        "note": event.note,
    }


def of_runtime_plan(plan: RuntimePlan, job_number: int) -> Values:
    """A runtime plan's columns."""
    return {
        "job_number": job_number,
        "number": plan.number,
        "at": plan.at,
        "first_version": plan.first_version,
        "workers": plan.workers,
        "servers": plan.servers,
        "added": encode(plan.added).decode(),
        "removed": encode(plan.removed).decode(),
        "moved_bytes": plan.moved_bytes,
        "prepare_ms": plan.prepare_ms,
        "move_ms": plan.move_ms,
        "suspension_p50_ms": plan.suspension_p50_ms,
        "suspension_max_ms": plan.suspension_max_ms,
    }


def to_runtime_plan(row: Row[Any]) -> RuntimePlan:
    """A runtime plan from its row."""
    what = f"runtime plan {row.number}"
    return RuntimePlan(
        number=row.number,
        at=row.at,
        first_version=row.first_version,
        workers=row.workers,
        servers=row.servers,
        added=unpack(row.added.encode(), tuple[str, ...], what),
        removed=unpack(row.removed.encode(), tuple[str, ...], what),
        moved_bytes=row.moved_bytes,
        prepare_ms=row.prepare_ms,
        move_ms=row.move_ms,
        suspension_p50_ms=row.suspension_p50_ms,
        suspension_max_ms=row.suspension_max_ms,
    )


def of_task_report(report: TaskReport, job_number: int) -> Values:
    """A task report's columns."""
    return {"job_number": job_number, **{field.name: getattr(report, field.name) for field in fields(TaskReport)}}


def to_task_report(row: Row[Any]) -> TaskReport:
    """A task report from its row."""
    return TaskReport(**{field.name: getattr(row, field.name) for field in fields(TaskReport)})


def of_slot(slot: Slot) -> Values:
    """A slot's columns.

    Raises
    ------
    StoreError
        A score is not a finite number: JSON has none of those, so the slot could not be read back.
    """
    shadow = slot.shadow.jobs if slot.shadow is not None else ()
    for decided in (*slot.proposed.jobs, *slot.decision.jobs, *shadow):
        for alternative in decided.alternatives:
            if not math.isfinite(alternative.score):
                raise StoreError(
                    f"recording slot {slot.number}: policy {slot.proposed.policy} gave job {decided.job.slug} an "
                    f"alternative {alternative.allocation} with score {alternative.score}, which is not a finite number"
                )
    return {
        "number": slot.number,
        "at": slot.at,
        "policy": slot.decision.policy,
        "policy_version": slot.decision.policy_version,
        "measure": slot.decision.measure,
        "inputs_hash": slot.inputs_hash,
        "seed": str(slot.seed),
        "seconds": slot.seconds,
        "changed": sum(decided.allocation != decided.previous for decided in slot.decision.jobs),
        "started": len(slot.outcome.started),
        "draining": len(slot.outcome.draining),
        "failures": len(slot.outcome.failures),
        "snapshot": pack(slot.snapshot),
        "decision": pack(slot.decision),
        "proposed": None if slot.proposed == slot.decision else pack(slot.proposed),
        "shadow": None if slot.shadow is None else pack(slot.shadow),
        "plan": pack(slot.plan),
        "outcome": pack(slot.outcome),
    }


def to_slot(row: Row[Any]) -> Slot:
    """A slot from its row."""
    what = f"slot {row.number}"
    decision = unpack(row.decision, Decision, what)
    return Slot(
        number=row.number,
        at=row.at,
        snapshot=unpack(row.snapshot, Snapshot, what),
        proposed=decision if row.proposed is None else unpack(row.proposed, Decision, what),
        decision=decision,
        plan=unpack(row.plan, Plan, what),
        outcome=unpack(row.outcome, Outcome, what),
        inputs_hash=row.inputs_hash,
        seed=int(row.seed),
        seconds=row.seconds,
        shadow=None if row.shadow is None else unpack(row.shadow, Decision, what),
    )


def to_summary(row: Row[Any]) -> SlotSummary:
    """A slot's summary from its row."""
    return SlotSummary(
        row.number,
        row.at,
        row.policy,
        row.policy_version,
        row.inputs_hash,
        row.seconds,
        row.changed,
        row.started,
        row.draining,
        row.failures,
    )


def of_decision(slot: int, job_number: int, decided: JobDecision) -> Values:
    """Columns of one job's decision."""
    detail = DecisionDetail(decided.reason.shortfalls, decided.alternatives, decided.guarded)
    return {
        "slot": slot,
        "job_number": job_number,
        "workers": decided.allocation.workers,
        "ps": decided.allocation.ps,
        "previous_workers": decided.previous.workers,
        "previous_ps": decided.previous.ps,
        "bound_by": decided.reason.constraint.value,
        "reason": decided.reason.text,
        "guard": "; ".join(reason.text for reason in decided.guarded),
        "detail": None if detail == _NO_DETAIL else encode(detail).decode(),
    }


def to_decision(row: Row[Any], job: JobKey) -> DecisionEntry:
    """One job's decision from a row of ``decisions`` joined with its slot."""
    detail = _NO_DETAIL
    if row.detail is not None:
        detail = unpack(row.detail.encode(), DecisionDetail, f"decision of slot {row.slot} on job {job.slug}")
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
            reason=Reason(constraint=Constraint(row.bound_by), text=row.reason, shortfalls=detail.shortfalls),
            previous=Allocation(row.previous_workers, row.previous_ps),
            alternatives=detail.alternatives,
            guarded=detail.guarded,
        ),
    )
