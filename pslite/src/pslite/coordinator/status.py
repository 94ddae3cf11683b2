"""What a coordinator says of its job to the director."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pslite.coordinator.job_state import Record, Seated
from pslite.coordinator.progress import Progress
from pslite.job.load_balancing import Straggler
from pslite.job.measurements import Usage
from pslite.job.status import Cause, MemberReport, Status, signal_in_words
from pslite.net.messages import AgentExit


def report(record: Record, progress: Progress, usage: Mapping[str, Usage], stragglers: Sequence[Straggler]) -> Status:
    """Return the state of a job; `usage` is what tasks used last."""
    spec, rate = record.spec, progress.rate()
    return Status(
        address=record.address,
        incarnation=record.incarnation,
        state=record.state,
        reason=record.reason,
        version=record.version,
        total_versions=spec.total_versions if spec and not spec.open else None,
        epoch=record.version / spec.steps_per_epoch if spec and not spec.open else 0.0,
        epochs=float(spec.epochs) if spec and not spec.open else None,
        loss=progress.loss,
        steps_per_second=rate,
        samples_per_second=(
            rate * spec.samples / spec.steps_per_epoch if rate is not None and spec and not spec.open else None
        ),
        members=[_member(member, record.exits.get(task), usage.get(task)) for task, member in record.members.items()],
        plan=record.plan.number if record.plan else 0,
        plans=list(record.reports),
        result=record.result if record.state == "finished" else None,
        stragglers=list(stragglers),
    )


def _member(member: Seated, told: AgentExit | None, usage: Usage | None) -> MemberReport:
    return MemberReport(
        task=member.task,
        role=member.role,
        state=member.state,
        host=member.host,
        pid=member.pid,
        usage=usage,
        steps=member.steps,
        cause=None if told is None else _cause(member, told),
        how="" if told is None or told.cause is Cause.DONE else how_it_ended(told),
    )


def _cause(member: Seated, told: AgentExit) -> Cause:
    """Why a process ended: whether it was asked to go is known here, not to its dl2-run."""
    return Cause.DRAINED if told.cause is Cause.DONE and member.drained else told.cause


def how_it_ended(told: AgentExit) -> str:
    """Say how a process died."""
    tail = f": {told.text}" if told.text else ""
    if told.cause is Cause.NOT_STARTED:
        return f"died: {told.text}"
    if told.signal:
        return f"died: killed by {signal_in_words(told.signal)}{tail}"
    return f"died: its process ended with status {told.status}{tail}"
