"""Contract of the store, which keeps everything that dl2d observed and decided, and a site's history as read from it.

Writes are atomic and durable when the call returns. Jobs and tasks only move forward through their states, so the
tick and the job API may both write: whoever comes second with an older state changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import msgspec

from dl2d.core.cluster import Node, NodeSet, Snapshot, Task, TaskState
from dl2d.core.decision import Decision, JobDecision
from dl2d.core.jobs import Allocation, FailureCause, Job, JobKey, JobRequest, JobState, Launch, Owner, Progress, Role
from dl2d.core.measured_speeds_and_losses import JobSpeeds, MeasuredLoss, MeasuredSpeeds, TrainingKind
from dl2d.core.plan_of_starts_and_stops import Deferred, Failure, Outcome, Plan, Start
from dl2d.core.resize_guard_state import GuardState


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A scheduling interval, with everything that is needed to recompute its decision bit for bit."""

    number: int
    #: Seconds since 1970.
    at: float
    snapshot: Snapshot
    #: As the policy gave it, before the guard; where no policy was asked, the same as ``decision``.
    proposed: Decision
    #: As it was carried out, by dl2d or by the scheduler in charge.
    decision: Decision
    plan: Plan
    outcome: Outcome
    #: SHA-256 over snapshot, policy name and version, placement, and seed.
    inputs_hash: str
    #: Seed of the generator that the policy was given.
    seed: int
    #: How long the whole tick took.
    seconds: float
    #: What dl2d would have carried out, after the guard, where another scheduler was in charge; else None.
    shadow: Decision | None = None


@dataclass(frozen=True, slots=True)
class SlotSummary:
    """What a list of slots shows."""

    number: int
    at: float
    policy: str
    policy_version: str
    inputs_hash: str
    seconds: float
    #: Jobs whose allocation was changed.
    changed: int
    started: int
    draining: int
    failures: int


@dataclass(frozen=True, slots=True)
class DecisionEntry:
    """One job's decision in one slot."""

    slot: int
    at: float
    policy: str
    policy_version: str
    inputs_hash: str
    measure: str
    decided: JobDecision


@dataclass(frozen=True, slots=True)
class ResizeEvent:
    """A state that a resize entered, and when."""

    state: TaskState
    at: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Resize:
    """One task coming (``grow``) or going (``shrink``), with every state it went through."""

    job: JobKey
    task: str
    role: Role
    node: str
    direction: str
    events: tuple[ResizeEvent, ...]


@dataclass(frozen=True, slots=True)
class TaskTime:
    """Since when a task held its resources, and until when; seconds since 1970."""

    task: Task
    granted_at: float
    #: None if it still holds them.
    ended_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimePlan:
    """A membership change as the job's coordinator reports it, times in milliseconds."""

    number: int
    #: Seconds since 1970, when the report came.
    at: float
    #: First version trained under it.
    first_version: int
    workers: int
    servers: int
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    moved_bytes: int = 0
    prepare_ms: float = 0.0
    move_ms: float = 0.0
    suspension_p50_ms: float = 0.0
    suspension_max_ms: float = 0.0
    #: The longest step around the resize, and the median step before it, of workers that trained before and after it.
    longest_step_ms: float | None = None
    median_step_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """Last report of a job's coordinator on one of its tasks."""

    task: str
    #: Seconds since 1970.
    at: float
    #: Processor time since the task began, and share of one core in the last interval.
    cpu_seconds: float | None = None
    cpu_percent: float | None = None
    #: Resident memory of all its processes, and the most that was seen, MiB.
    memory: float | None = None
    memory_peak: float | None = None
    #: How many GPUs it has, as far as is known; their mean use, and their memory in use together, MiB.
    gpus: int = 0
    gpu_percent: float | None = None
    gpu_memory: float | None = None
    #: Of a worker's last steps.
    step_ms: float | None = None
    step_p95_ms: float | None = None
    #: Why its process ended (``out-of-memory``), empty while it runs; and how in words, if not as it should.
    cause: str = ""
    how: str = ""
    #: How many times as long as others it takes for the same work; None unless it is a straggler. And why.
    slowdown: float | None = None
    slowdown_reason: str = ""


@dataclass(frozen=True, slots=True)
class JobChange:
    """Fields of a job to be changed; None leaves a field as it is."""

    state: JobState | None = None
    anchor: str | None = None
    address: str | None = None
    end_reason: str | None = None
    digest: str | None = None
    request: JobRequest | None = None
    launch: Launch | None = None
    owner: Owner | None = None
    #: For statistics, where ``state`` is one of failure.
    cause: FailureCause | None = None
    #: What its anchor waits for: the end reason of a job that is still submitted, not kept of another one.
    waits_for: str | None = None

    def applied(self, job: Job, at: float) -> Job:
        """The job after this change, by the rules of ``TickStore.change_job``."""
        fields: tuple[str, ...] = ("anchor", "address")
        if not job.state.ended:
            fields += ("end_reason", "digest", "request", "launch", "owner")
        given: dict[str, Any] = {name: value for name in fields if (value := getattr(self, name)) is not None}
        if self.waits_for is not None and job.state is JobState.SUBMITTED:
            given["end_reason"] = self.waits_for
        if self.state is not None and self.state.rank > job.state.rank:
            given["state"] = self.state
            if job.state is JobState.SUBMITTED and not self.state.ended:
                given.setdefault("end_reason", "")  # what its anchor waited for
            if self.state is JobState.RUNNING:
                given["started_at"] = at
            if self.state.ended:
                given["ended_at"] = at
                # Nothing is started for it any more, and a user's environment is nobody else's business.
                given["launch"] = job.launch.without_environment()
        return replace(job, **given)


class TaskChange(msgspec.Struct, frozen=True, gc=False):
    """A step of a task's state machine. ``handle``, ``note``, ``node`` and ``submitted`` are kept where None."""

    job: JobKey
    task: str
    state: TaskState
    handle: str | None = None
    note: str | None = None
    #: For statistics, where ``state`` is ``failed``.
    cause: FailureCause | None = None
    #: When the task entered the state, seconds since 1970; None for the time of the call.
    at: float | None = None
    #: Node on which the resource manager has put it, where that is not the one it was asked for.
    node: str | None = None
    #: When the resource manager accepted it, seconds since 1970.
    submitted: int | None = None

    def applied(self, task: Task, at: float) -> Task:
        """The task after this change: its state moves forward or not at all."""
        forward = self.state.rank > task.state.rank
        return msgspec.structs.replace(
            task,
            state=self.state if forward else task.state,
            since=task.since if not forward else at if self.at is None else self.at,
            handle=task.handle if self.handle is None else self.handle,
            note=task.note if self.note is None else self.note,
            node=task.node if self.node is None else self.node,
            submitted=task.submitted if self.submitted is None else self.submitted,
        )


class JobSlot(NamedTuple):
    """What a slot holds about one job."""

    #: Decision on the job as it was carried out; None where there is none.
    entry: DecisionEntry | None
    #: As ``Slot.proposed`` and ``Slot.shadow`` have it.
    proposed: JobDecision | None
    shadow: DecisionEntry | None
    deferred: tuple[Deferred, ...]
    failures: tuple[Failure, ...]
    #: The only nodes that its new tasks could use, None for all; and how many nodes there were.
    usable: NodeSet | None
    nodes: int


class JobList(NamedTuple):
    """The newest of some jobs."""

    #: In submit order, without their commands. Only the last of those that ended.
    jobs: tuple[Job, ...]
    #: How many there are in all.
    total: int


@dataclass(frozen=True, slots=True)
class LeaseSign:
    """A sign of life of the lease's holder: two are equal if the holder gave none in between."""

    holder: str
    #: Grows with each holder.
    term: int
    #: Grows with each sign.
    renewals: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionTimes:
    """How long a site keeps what it recorded, seconds; infinity for ever."""

    #: Progress of jobs over time.
    progress: float = math.inf
    #: Decisions on single jobs.
    decisions: float = math.inf
    #: Slots, with what their policy was given, and with their decisions.
    slots: float = math.inf
    #: Jobs from their end on, with all that belongs to them; the measured speeds of a kind from the last one on.
    jobs: float = math.inf


class TickStore(Protocol):
    """What a tick reads and writes. Every method may raise ``StoreUnavailable``; then nothing of the call was kept."""

    def add_job(self, job: Job) -> None:
        """Keep a new job. Raises ``DuplicateJob`` if the key is known."""
        ...

    def job(self, key: JobKey) -> Job | None:
        """The job, ended or not."""
        ...

    def known_jobs(self, keys: Collection[JobKey]) -> frozenset[JobKey]:
        """Those of these jobs that the store has, ended or not."""
        ...

    def jobs(self, *, live: bool, limit: int | None = None) -> tuple[Job, ...]:
        """Jobs in submit order: those that have not ended, or (``live=False``) all; the newest ``limit`` of them."""
        ...

    def last_ended(self, limit: int) -> tuple[Job, ...]:
        """The elastic jobs that ended last, at most ``limit``, without their commands; the last one comes first."""
        ...

    def change_job(self, key: JobKey, change: JobChange, at: float) -> Job:
        """Apply a change and return the job. An ended job keeps its state, its end reason and digest.

        ``started_at`` is set when the state first becomes running, ``ended_at`` when it becomes an end.
        A running job does not go back to ready. The environment of a job that ends is forgotten.
        Raises ``StoreError`` if there is no such job.
        """
        ...

    def report_progress(self, key: JobKey, progress: Progress, tasks: Sequence[TaskReport] = ()) -> None:
        """Set the job's progress, and add it to its series (thinned to the store's ``progress_seconds``).

        ``tasks`` replace the last reports on them.
        """
        ...

    def speeds(self, kinds: Collection[TrainingKind], *, others: int = 0) -> tuple[MeasuredSpeeds, ...]:
        """Measured speeds of these kinds, sorted by kind; kinds without measurements are left out.

        And of as many as ``others`` other kinds: those that were measured last, of equals the first in order.

        A report that enters the job's series and has a speed counts once, for the size at which it says the job trains,
        as ``count`` has it: old measurements lose their weight, what one job alone says otherwise does not count, and
        what it alone showed at other sizes is forgotten where two others know better.
        """
        ...

    def job_speeds(self, jobs: Collection[JobKey]) -> tuple[JobSpeeds, ...]:
        """Measured speeds of each of these live jobs, sorted by key; jobs without measurements are left out.

        The mean of the last ``MAX_MEASUREMENTS`` reports in the job's series at each size, speed 0 included.
        """
        ...

    def losses(self, jobs: Collection[JobKey]) -> tuple[MeasuredLoss, ...]:
        """Losses of these live jobs (see ``LossCurve``), sorted by key; jobs that reported none are left out."""
        ...

    def ask_tasks(self, starts: Sequence[Start], at: float) -> tuple[Task, ...]:
        """Keep new tasks in state ``asked``, numbered on from the job's last of that role, in one transaction."""
        ...

    def tasks(self, *, live: bool, job: JobKey | None = None) -> tuple[Task, ...]:
        """Tasks by job (submit order), role and number: those not ended, or (``live=False``) all."""
        ...

    def change_tasks(self, changes: Sequence[TaskChange], at: float) -> tuple[Task, ...]:
        """Move tasks forward in one transaction; returns those that moved.

        A change to a state of lower or equal rank changes no state (a new handle or note is still kept).
        States in between that were not seen are not invented.
        """
        ...

    def record_slot(self, slot: Slot) -> None:
        """Keep a slot and its decisions."""
        ...

    def assign_canary(self, canary: int, groups: Mapping[JobKey, bool]) -> frozenset[JobKey]:
        """Record whether jobs are in a canary's group, of those that have no record yet.

        Returns those of the jobs that are recorded to be in it. Raises ``StoreError`` if a job is not known.
        """
        ...

    def check_lease(self) -> None:
        """Raise ``AlreadyRunning`` if another daemon has taken the lease; called before each call that acts."""
        ...

    def keep_guard_state(self, guard_state: GuardState) -> None:
        """Replace the guard's state."""
        ...

    def guard_state(self) -> GuardState:
        """The guard's state as it was kept last; empty if it never was."""
        ...

    def last_slot_number(self) -> int:
        """Number of the newest slot; 0 if there is none."""
        ...


#: Sizes that a job came to have and when, oldest first, from its start on; ``NOTHING`` where it was paused.
RecordedSizes = tuple[tuple[float, Allocation], ...]


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The cluster at one moment."""

    at: float
    #: ``used`` is what others held, without dl2d's own tasks.
    nodes: tuple[Node, ...]
    #: Completed epochs of the jobs that were there.
    epochs: Mapping[JobKey, float]
    #: Policy that decided then; empty if unknown.
    policy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What was recorded from ``begin`` up to ``end``, seconds since 1970."""

    begin: float
    end: float
    #: All that were there at some time in between, in submit order, as they are now.
    jobs: tuple[Job, ...]
    #: At most one an hour, oldest first.
    cluster_states: tuple[ClusterState, ...]
    #: All that was measured of the jobs' kinds, also before.
    speeds: tuple[MeasuredSpeeds, ...]
    #: Changes of membership, as coordinators measured them.
    plans: tuple[RuntimePlan, ...]
    #: Seconds from asking for a task until it took part, of each that did.
    starts: tuple[float, ...]
    #: Sizes that jobs came to have, with times in seconds since 1970.
    sizes: Mapping[JobKey, RecordedSizes] = field(default_factory=dict)
    #: Time from which jobs and decisions are complete, in seconds since 1970; 0: all are stored.
    complete_from: float = 0.0
    #: Kinds whose speeds are assumed, since no job reported any.
    assumed: frozenset[TrainingKind] = frozenset()
