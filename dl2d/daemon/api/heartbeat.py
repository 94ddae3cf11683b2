"""Heartbeat: the schema of a coordinator's report, and the changes that follow from one."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from dl2d.core.cluster import Task, TaskState
from dl2d.core.jobs import FailureCause, Job, JobRequest, JobState, Progress, Role
from dl2d.core.store import JobChange, RuntimePlan, TaskChange, TaskReport
from pslite.job.job_status import Cause
from pslite.job.printable_text import printable

# Bounds of what one report may hold.
MAX_MEMBERS = 20_000
MAX_TEXT = 4096
MAX_GPUS = 256
#: Plans taken from a report; each becomes a row in the store. A coordinator reports at most 200 at a time; older
#: runtimes reported all that they had not reported yet.
MAX_PLANS = 200
#: Tasks that all plans of a report together add and remove; the store keeps no more of them.
MAX_PLAN_TASKS = 20_000
#: Characters kept of a text on a task of a static job, which dl2d does not start.
MAX_STATIC_TEXT = 500

# No control characters: these words go into environments, the database and the log.
_Word = Annotated[str, Field(max_length=300, pattern=r"^[^\x00-\x1f\x7f]*$")]
# A longer text is cut and not refused: it may say why a job ended.
_Text = Annotated[str, BeforeValidator(lambda said: said[:MAX_TEXT] if isinstance(said, str) else said)]
# The newest of a longer list are taken, which come last.
_Plans = BeforeValidator(lambda said: said[-MAX_PLANS:] if isinstance(said, list) else said)
_TaskId = Annotated[str, Field(pattern=r"^(worker|ps)-[0-9]{1,18}$")]
#: Ids of tasks that a coordinator starts itself; what it says of others is not kept.
_STATIC_TASK = re.compile(r"(worker|ps)-([0-9]{1,6})")
#: A task that replaces one that has ended has the next number; of so many more than the job may have at a time, what
#: its coordinator says is kept.
_MAX_REPLACED = 100
_Count = Annotated[int, Field(ge=0, le=2**62)]
_MIB = 1 << 20
#: Range of training speeds, in samples or updates a second; a speed outside it counts as not reported. Speeds are
#: shared by all jobs of a kind, and their logarithms are taken.
_MIN_SPEED, _MAX_SPEED = 1e-9, 1e15
#: Largest number of epochs, and largest absolute value of a loss, that a report may state.
_MAX_EPOCH, _MAX_LOSS = 1e12, 1e30


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


#: A number, 0 and none if it is not finite.
_Finite = Annotated[float, AfterValidator(lambda value: _finite(value) or 0.0)]
_FiniteOrNone = Annotated[float | None, AfterValidator(_finite)]


class _Message(BaseModel):
    # Unknown keys are let through: a newer runtime may say more than this daemon understands.
    model_config = ConfigDict(extra="ignore", frozen=True)


class Gpu(_Message):
    """A device of a task."""

    percent: float = 0.0
    memory_bytes: _Count = 0


class Usage(_Message):
    """What the processes of a task use."""

    cpu_seconds: float = 0.0
    cpu_percent: float = 0.0
    memory_bytes: _Count = 0
    memory_peak: _Count = 0
    gpus: Annotated[tuple[Gpu, ...], Field(max_length=MAX_GPUS, fail_fast=True)] = ()


class Steps(_Message):
    """How long a worker's last steps took."""

    mean_ms: float = 0.0
    p95_ms: float = 0.0


class Straggler(_Message):
    """A task that is slower than others."""

    task: _Word
    factor: float
    reason: _Text = ""


class Member(_Message):
    """A task as its coordinator sees it."""

    task: _Word
    role: Literal["worker", "ps"]
    state: Literal["joined", "active", "draining", "left"]
    host: _Word = ""
    pid: int = 0
    #: left out as long as there is nothing new
    usage: Usage | None = None
    steps: Steps | None = None
    #: why its process has ended, and how in words
    cause: _Word | None = None
    how: _Text = ""


class Suspension(_Message):
    """How long workers had to wait with a finished push, milliseconds."""

    p50: _Finite = 0.0
    max: _Finite = 0.0


class PlanReport(_Message):
    """A membership change that is complete."""

    number: _Count
    first_version: _Count
    workers: _Count
    servers: _Count
    added: Annotated[tuple[_TaskId, ...], Field(max_length=MAX_MEMBERS, fail_fast=True)] = ()
    removed: Annotated[tuple[_TaskId, ...], Field(max_length=MAX_MEMBERS, fail_fast=True)] = ()
    moved_bytes: _Count = 0
    prepare_ms: _Finite = 0.0
    move_ms: _Finite = 0.0
    suspension_ms: Suspension = Suspension()
    longest_step_ms: _FiniteOrNone = None
    median_step_ms: _FiniteOrNone = None


class Result(_Message):
    """What came out of the training."""

    digest: _Word
    versions: _Count = 0


class Heartbeat(_Message):
    """A coordinator's report: every few seconds, and at once when something changed."""

    address: _Word
    incarnation: _Word = ""
    # Which process sends it, and a number that grows with each: it is taken once. Older runtimes say neither.
    sender: _Word = ""
    number: _Count = 0
    state: Literal["waiting", "running", "finished", "failed", "cancelled"]
    reason: _Text | None = None
    version: _Count = 0
    total_versions: _Count | None = None
    epoch: float = 0.0
    epochs: float | None = None
    loss: float | None = None
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    members: Annotated[tuple[Member, ...], Field(max_length=MAX_MEMBERS, fail_fast=True)] = ()
    plan: _Count = 0
    plans: Annotated[tuple[PlanReport, ...], Field(fail_fast=True), _Plans] = ()
    result: Result | None = None
    # From which version on weights are not those of an undisturbed run: a server was lost with optimizer state.
    inexact_from: _Count | None = None
    stragglers: Annotated[tuple[Straggler, ...], Field(max_length=MAX_MEMBERS, fail_fast=True)] = ()
    # Of a script with a loop of its own: by how many batches of one worker the epoch advances with each version.
    batches_per_version: _Count | None = None
    # Of a job that no worker can join any more: how many it has.
    most_workers: _Count | None = None
    # Of a script with a loop of its own: epochs that it had done at version `versions_before`, where it began.
    epochs_before: _Count = 0
    versions_before: _Count = 0
    # Tasks whose dl2-run is connected and whose process has not joined yet; older runtimes do not say.
    starting: Annotated[tuple[_TaskId, ...], Field(max_length=MAX_MEMBERS, fail_fast=True)] | None = None
    # Its training is done: all members end, and none is replaced.
    ending: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatChanges:
    """What a heartbeat changes."""

    job: JobChange | None
    progress: Progress
    tasks: tuple[TaskChange, ...]
    plans: tuple[RuntimePlan, ...]
    #: Members that no task of the job accounts for.
    unknown: tuple[str, ...]
    #: What is new about members, but for unknown ones where the tasks of the job are known.
    reports: tuple[TaskReport, ...] = ()


_JOB_STATES = {
    "waiting": JobState.READY,
    "running": JobState.RUNNING,
    "finished": JobState.FINISHED,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
}
_TASK_STATES = {"joined": TaskState.JOINED, "active": TaskState.CONFIRMED, "left": TaskState.DRAINED}


def receive(
    job: Job,
    tasks: tuple[Task, ...],
    beat: Heartbeat,
    at: float,
    *,
    anchor_decides: bool = False,
    reported: Callable[[], Collection[str]] = tuple,
) -> HeartbeatChanges:
    """Read a heartbeat of a job that has not ended.

    Parameters
    ----------
    tasks
        Those of its members that are tasks, ended or not.
    anchor_decides
        Whether a job whose coordinator was ended from outside is cancelled only when its anchor is: the resource
        manager may put the anchor back into its queue.
    reported
        Returns the members of which the store has a report. It keeps further reports of these also when a static job
        may have fewer members than it declared.
    """
    known = {task.id: task for task in tasks}
    changes = []
    unknown = []
    for member in beat.members:
        task = known.get(member.task)
        if task is None:
            unknown.append(member.task)
            continue
        reached = _TASK_STATES.get(member.state)
        # A task that left without being asked to has ended, perhaps with its job; the resource manager tells how. One
        # that is lost may be listed as running for minutes, if its machine has crashed. It can never join again.
        lost = member.state == "left" and member.cause == Cause.LOST
        if reached is None or (reached is TaskState.DRAINED and task.state.wanted and not lost):
            continue
        if reached.rank > task.state.rank:
            note = f"its coordinator gave up this task: {_plain(member.how)}" if lost and task.state.wanted else None
            changes.append(TaskChange(job.key, task.id, reached, note=note))
    not_recorded = set(unknown)
    if job.static:  # the store has none of its tasks: its coordinator starts them itself
        not_recorded = {member.task for member in beat.members if not _is_static_task(member.task, job.request)}
        not_recorded.difference_update(reported() if not_recorded else ())
    state = _JOB_STATES[beat.state]
    end_reason = _end_reason(job.request, beat, state) if state.ended else ""
    if state is JobState.CANCELLED and anchor_decides:
        # The job stays live. If this is its first report, the reason would be lost in its state before.
        state = JobState.READY
    moved = job.state is not state and not (state is JobState.READY and job.state is JobState.RUNNING)
    change = JobChange(
        state=state if moved else None,
        address=beat.address if beat.address != job.address else None,
        end_reason=end_reason if end_reason != job.end_reason else None,
        digest=beat.result.digest if beat.result is not None else None,
        request=_without_newcomers(job.request, beat.most_workers),
        cause=FailureCause.TRAINING_FAILED if state is JobState.FAILED else None,
    )
    active = _active_counts(job, known, beat)
    return HeartbeatChanges(
        job=change if change != JobChange() else None,
        progress=Progress(
            at=at,
            version=beat.version,
            total_versions=beat.total_versions,
            epoch=_epoch(job.request, beat),
            loss=_within(beat.loss, -_MAX_LOSS, _MAX_LOSS),
            steps_per_second=_speed(beat.steps_per_second),
            samples_per_second=_samples_per_second(job.request, beat),
            # Speeds are kept for each size, so there are no more of them than a job may have.
            workers=min(active[Role.WORKER], job.request.max_workers),
            ps=min(active[Role.PS], job.request.max_ps),
        ),
        tasks=tuple(changes),
        plans=_plans(beat.plans, at, job.request.max_workers + job.request.max_ps),
        unknown=tuple(unknown),
        reports=_reports(beat, at, not_recorded, MAX_STATIC_TEXT if job.static else MAX_TEXT),
    )


def _active_counts(job: Job, known: Mapping[str, Task], beat: Heartbeat) -> Counter[Role]:
    """How many members of each role train.

    Of a job whose tasks dl2d starts only these count: all jobs of its kind are sized by the speeds at the sizes that it
    reports, so it must not report speeds at sizes that it does not have.
    """
    active = {member.task: Role(member.role) for member in beat.members if member.state == "active"}
    if not job.static:
        active = {name: task.role for name, task in known.items() if name in active and not task.state.ended}
    return Counter(active.values())


def _is_static_task(name: str, request: JobRequest) -> bool:
    """Whether a job that starts its tasks itself may have one of this name."""
    match = _STATIC_TASK.fullmatch(name)
    if match is None:
        return False
    most = request.max_workers if match[1] == "worker" else request.max_ps
    return most > 0 and int(match[2]) < most + _MAX_REPLACED


def _without_newcomers(request: JobRequest, most: int | None) -> JobRequest | None:
    """The request of a job that can have at most so many workers; None where it allows no more already."""
    if not most or most >= request.max_workers:
        return None
    allowed = tuple(count for count in request.allowed_workers if count <= most)
    return replace(request, min_workers=min(request.min_workers, most), max_workers=most, allowed_workers=allowed)


def _epoch(request: JobRequest, beat: Heartbeat) -> float:
    """Epochs done. A script with a loop of its own (MXNet's KVStore) reports none: they follow from its updates."""
    epoch = _within(beat.epoch, 0.0, _MAX_EPOCH) or 0.0
    if beat.epochs is not None:
        return epoch
    if epoch:
        return beat.epochs_before + epoch
    trained = max(beat.version - beat.versions_before, 0) * _version_samples(request, beat) / request.epoch_samples
    return min(beat.epochs_before + trained, request.epochs)


def _version_samples(request: JobRequest, beat: Heartbeat) -> int:
    """Samples by which the epoch advances with each version, for a script with a loop of its own.

    Its declared batch is that of one worker. If ``steps_per_epoch`` was declared, a version is one of these steps.
    """
    workers = beat.batches_per_version if request.samples_per_epoch is not None else None
    return (request.batch or 1) * (workers or 1)


def _samples_per_second(request: JobRequest, beat: Heartbeat) -> float | None:
    """Training speed, from the updates in a second where the script has a loop of its own; None if it stands still."""
    samples, steps = _speed(beat.samples_per_second), _speed(beat.steps_per_second)
    return _speed(steps * _version_samples(request, beat)) if samples is None and steps else samples


def _reports(beat: Heartbeat, at: float, not_recorded: set[str], max_text: int) -> tuple[TaskReport, ...]:
    """What the heartbeat reports about each member, except those of which nothing is recorded."""
    stragglers = {straggler.task: straggler for straggler in beat.stragglers}
    # The last of two members of one name counts.
    found = {
        member.task: _report(member, stragglers.get(member.task), at, max_text)
        for member in beat.members
        if member.task not in not_recorded and (member.usage, member.steps, member.cause) != (None, None, None)
    }
    return tuple(found.values())


def _report(member: Member, straggler: Straggler | None, at: float, max_text: int) -> TaskReport:
    usage, steps = member.usage, member.steps
    ended = member.cause is not None and member.cause != Cause.LOST  # of a lost one the resource manager says how
    report = TaskReport(
        task=member.task,
        at=at,
        step_ms=_finite(steps.mean_ms) if steps is not None else None,
        step_p95_ms=_finite(steps.p95_ms) if steps is not None else None,
        cause=(member.cause or "") if ended else "",
        how=_plain(member.how)[:max_text] if ended else "",
        slowdown=_finite(straggler.factor) if straggler is not None else None,
        slowdown_reason=_plain(straggler.reason)[:max_text] if straggler is not None else "",
    )
    if usage is None:
        return report
    gpus = usage.gpus
    return replace(
        report,
        cpu_seconds=_finite(usage.cpu_seconds),
        cpu_percent=_finite(usage.cpu_percent),
        # A task that has ended has none.
        memory=usage.memory_bytes / _MIB if usage.memory_bytes else None,
        memory_peak=usage.memory_peak / _MIB,
        gpus=len(gpus),
        gpu_percent=_finite(sum(gpu.percent for gpu in gpus) / len(gpus)) if gpus else None,
        gpu_memory=sum(gpu.memory_bytes for gpu in gpus) / _MIB if gpus else None,
    )


def _end_reason(request: JobRequest, beat: Heartbeat, state: JobState) -> str:
    # a script with a loop of its own may end before its last epoch
    whole = beat.epochs is not None or _epoch(request, beat) >= request.epochs
    finished = "did all epochs" if whole else "its script has ended"
    said = _plain(beat.reason) or (finished if state is JobState.FINISHED else "no reason given")
    if beat.inexact_from is None:
        return said
    return f"{said}; inexact from version {beat.inexact_from} on, because optimizer state was lost with a server"


def stop_answer(heartbeat_seconds: float, reason: str = "") -> dict[str, object]:
    """The answer to the coordinator of a job that has ended; ``reason`` is why it failed, for the job's output."""
    answer = {"members": [], "stop": True, "heartbeat_seconds": heartbeat_seconds}
    return {**answer, "reason": reason} if reason else answer


def targets(tasks: tuple[Task, ...]) -> list[str]:
    """Ids of the tasks that should be members."""
    return [task.id for task in tasks if task.state.wanted]


def _plans(plans: tuple[PlanReport, ...], at: float, most: int) -> tuple[RuntimePlan, ...]:
    """The plans as they are kept, each with at most so many of the tasks that it adds, and of those that it removes."""
    kept, left = [], MAX_PLAN_TASKS
    for plan in plans:
        added = plan.added[: min(most, left)]
        left -= len(added)
        removed = plan.removed[: min(most, left)]
        left -= len(removed)
        kept.append(_plan(plan, at, added, removed))
    return tuple(kept)


def _plan(plan: PlanReport, at: float, added: tuple[str, ...], removed: tuple[str, ...]) -> RuntimePlan:
    return RuntimePlan(
        at=at, added=added, removed=removed,
        suspension_p50_ms=plan.suspension_ms.p50, suspension_max_ms=plan.suspension_ms.max,
        **plan.model_dump(exclude={"added", "removed", "suspension_ms"}),
    )  # fmt: skip


def _plain(text: str | None) -> str:
    return printable(text or "", keep="\n\t")


def _within(value: float | None, least: float, most: float) -> float | None:
    return value if value is not None and least <= value <= most else None


def _speed(value: float | None) -> float | None:
    """A reported speed, or 0 for a standstill; None if it is outside the range of speeds."""
    return value if value == 0.0 else _within(value, _MIN_SPEED, _MAX_SPEED)
