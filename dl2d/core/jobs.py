"""Elastic jobs: identity, request, owner, state and progress."""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from dl2d.core.resources import NO_RESOURCES, WHOLE_NODE, Resources

#: An epoch of a job of which only the time is known.
HOUR_SECONDS = 3600.0


class JobKey(NamedTuple):
    """Identity of a job. Resource managers use ids again, so the submit time belongs to it (seconds since 1970)."""

    cluster: str
    id: str
    submitted: int

    @property
    def slug(self) -> str:
        """The key as one word for URLs, file names and task tags."""
        return f"{self.cluster}.{self.id}.{self.submitted}"

    @classmethod
    def from_slug(cls, slug: str) -> JobKey:
        """Inverse of ``slug``. Raises ``ValueError`` if the text is not a slug."""
        match = _SLUG.fullmatch(slug)
        if match is None:
            raise ValueError(f"{slug!r} is not cluster.id.submitted")
        return cls(match[1], match[2], int(match[3]))


_SLUG = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.(0|[1-9][0-9]{0,11})")


class Role(enum.StrEnum):
    """What a task does in its job."""

    WORKER = "worker"
    PS = "ps"
    #: Role of a job's anchor, which is started like a task but counted in no allocation.
    COORDINATOR = "coordinator"


#: Roles of the tasks that an allocation counts.
TASK_ROLES = (Role.WORKER, Role.PS)


class Architecture(enum.StrEnum):
    """How the workers of a job combine their gradients."""

    PS = "ps"
    ALLREDUCE = "allreduce"


class Consistency(enum.StrEnum):
    """Whether updates wait for every worker (``sync``) or not (``async``)."""

    SYNC = "sync"
    ASYNC = "async"


class Durability(enum.StrEnum):
    """Whether parameter servers keep replicas of each other's part of the model (``durable``) or not (``none``)."""

    NONE = "none"
    DURABLE = "durable"


class Allocation(NamedTuple):
    """How many tasks of each kind a job has or should have."""

    workers: int
    ps: int

    def count(self, role: Role) -> int:
        """Number of tasks of one role."""
        return self.workers if role is Role.WORKER else self.ps if role is Role.PS else 1

    @property
    def tasks(self) -> int:
        """Number of tasks of both roles."""
        return self.workers + self.ps

    def common(self, other: Allocation) -> Allocation:
        """The tasks that both have."""
        return Allocation(min(self.workers, other.workers), min(self.ps, other.ps))

    def larger(self, other: Allocation) -> Allocation:
        """The tasks that either has."""
        return Allocation(max(self.workers, other.workers), max(self.ps, other.ps))

    def plus(self, tasks: Allocation) -> Allocation:
        """With some tasks more."""
        return Allocation(self.workers + tasks.workers, self.ps + tasks.ps)

    def beyond(self, other: Allocation) -> Allocation:
        """The tasks that it has more than another."""
        return Allocation(max(self.workers - other.workers, 0), max(self.ps - other.ps, 0))

    def covers(self, other: Allocation) -> bool:
        """Whether it has all tasks of another."""
        return self.workers >= other.workers and self.ps >= other.ps

    def __str__(self) -> str:
        return f"{self.workers}w+{self.ps}ps"


NOTHING = Allocation(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What a user requests; see ``dl2d.core.job_request_parser`` for the keys, defaults and checks."""

    #: Name for people; not unique.
    name: str
    #: Type of the model, for learning from earlier jobs of the same type.
    model: str
    epochs: float
    #: Samples in one epoch, or None where only ``steps_per_epoch`` was declared.
    samples_per_epoch: float | None
    #: Updates in one epoch, or None where only ``samples_per_epoch`` was declared.
    steps_per_epoch: float | None
    #: Global batch size in samples; that of one worker if the script has a loop of its own. None if undeclared.
    batch: int | None
    #: Demand of one worker.
    worker: Resources
    #: Demand of one parameter server.
    ps: Resources
    min_workers: int = 1
    max_workers: int = 16
    min_ps: int = 1
    max_ps: int = 16
    #: Worker counts that the job can run with, ascending; empty for any within the bounds.
    allowed_workers: tuple[int, ...] = ()
    architecture: Architecture = Architecture.PS
    consistency: Consistency = Consistency.SYNC
    #: Durability of a script that does not set it itself.
    durability: Durability = Durability.NONE
    #: Size that its user asks for: that of a static job, or the maximum that an elastic one declares; ``NOTHING`` if it
    #: declares none. A policy may give another one.
    asked_size: Allocation = NOTHING

    def demand(self, role: Role) -> Resources:
        """Resources of one task of a role; a coordinator counts as nothing beside the tasks it leads."""
        return self.worker if role is Role.WORKER else self.ps if role is Role.PS else NO_RESOURCES

    def demand_of(self, allocation: Allocation) -> Resources:
        """Resources of a whole allocation."""
        return self.worker * allocation.workers + self.ps * allocation.ps

    @property
    def has_whole_nodes(self) -> bool:
        """Whether each of its tasks gets a node of its own."""
        return self.worker.get(WHOLE_NODE) >= 1

    @property
    def epoch_samples(self) -> float:
        """Samples of an epoch; where neither they nor the batch size were declared, an update counts as one sample."""
        return self.samples_per_epoch or (self.steps_per_epoch or 1.0) * (self.batch or 1)

    @property
    def min_size(self) -> Allocation:
        """Smallest allocation that the job can run with; it starts with this as a whole or not at all.

        0 workers where none is allowed within the bounds, which ``dl2d.core.job_request_parser`` refuses.
        """
        workers = next(
            (count for count in range(max(self.min_workers, 1), self.max_workers + 1) if self.allows(count)), 0
        )
        return Allocation(workers, self.min_ps)

    @property
    def max_size(self) -> Allocation:
        """Largest allocation within the job's bounds."""
        return Allocation(self.max_workers, self.max_ps)

    @property
    def bounds(self) -> tuple[Architecture, int, int, tuple[int, ...], int, int]:
        """All that says which sizes the job may have: the architecture, the bounds and the allowed worker counts."""
        return (
            self.architecture, self.min_workers, self.max_workers, self.allowed_workers, self.min_ps, self.max_ps
        )  # fmt: skip

    def allows(self, workers: int) -> bool:
        """Whether the job can run with this many workers."""
        in_bounds = self.min_workers <= workers <= self.max_workers
        return in_bounds and (not self.allowed_workers or workers in self.allowed_workers)

    def largest_allowed(self, workers: int) -> int:
        """Largest worker count up to ``workers`` that the job can run with; 0 if there is none."""
        return next((count for count in range(min(workers, self.max_workers), 0, -1) if self.allows(count)), 0)

    def largest_within(self, size: Allocation) -> Allocation:
        """Largest size with no more tasks that the job can have; without workers if it can have none of the counts."""
        return Allocation(self.largest_allowed(size.workers), min(size.ps, self.max_ps))


class User(NamedTuple):
    """A user of the cluster. Ids of accounts that were removed are used again, so the name belongs to it."""

    uid: int
    name: str


@dataclass(frozen=True, slots=True)
class Owner:
    """The account a job belongs to: its tasks run as this user and group and with these limits."""

    user: str
    uid: int
    gid: int
    account: str = ""
    #: Partition or queue of its tasks; several are separated by commas.
    partition: str = ""
    qos: str = ""


class Launch(msgspec.Struct, frozen=True, gc=False):
    """How a task of the job is started: the user's command, folder and environment."""

    argv: tuple[str, ...]
    cwd: str
    env: tuple[tuple[str, str], ...] = ()

    def without_environment(self) -> Launch:
        """Command and folder alone."""
        return msgspec.structs.replace(self, env=())


#: Launch of a job that dl2d does not start, or whose command must not be shown.
NO_LAUNCH = Launch((), "")


class JobState(enum.StrEnum):
    """State of a job.

    ``submitted``: known, its coordinator has not called yet. ``ready``: its coordinator runs and waits for tasks.
    ``running``: it trains. The rest are ends: ``finished`` did all epochs, ``failed`` ended by itself without,
    ``cancelled`` was ended by its owner or an admin, ``lost`` vanished from the resource manager without a word.
    """

    SUBMITTED = "submitted"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        """Whether the job will not run again."""
        return self in _ENDED

    @property
    def rank(self) -> int:
        """Position in a job's life; a job never goes to a state of lower or equal rank. All ends have one rank."""
        return 3 if self.ended else (JobState.SUBMITTED, JobState.READY, JobState.RUNNING).index(self)


_ENDED = frozenset({JobState.FINISHED, JobState.FAILED, JobState.CANCELLED, JobState.LOST})


class FailureCause(enum.StrEnum):
    """Why a job or task failed, as one word for statistics; the words of its end have the details."""

    #: The process ended with an error: a task's, or that of the job's coordinator.
    FAILED = "failed"
    #: It reached its time limit or deadline.
    TIME_LIMIT = "time-limit"
    #: It needed more memory than it had.
    OUT_OF_MEMORY = "out-of-memory"
    #: The job's coordinator reported that the training failed.
    TRAINING_FAILED = "training-failed"
    #: Several attempts in a row to start the job's tasks failed.
    TASKS_FAILED = "tasks-failed"
    #: Ended from outside: by its user or an administrator, or by preemption where the resource manager does not say so.
    CANCELLED = "cancelled"
    #: The resource manager has given its room to another job.
    PREEMPTED = "preempted"
    #: Its node went down.
    NODE_LOST = "node-lost"
    #: The resource manager does not list it any more.
    NOT_LISTED = "not-listed"
    #: Its start never reached the resource manager.
    NOT_STARTED = "not-started"
    #: The resource manager refused to start it.
    REFUSED = "refused"
    #: The resource manager has put it back into its queue. A job goes on as another one of the same id; a task is
    #: replaced.
    REQUEUED = "requeued"

    @property
    def is_own(self) -> bool:
        """Whether the process ended because of what it did, and not from outside."""
        return self in (FailureCause.FAILED, FailureCause.TIME_LIMIT, FailureCause.OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a job as its coordinator reported it last."""

    #: When it said so, seconds since 1970; 0 for never.
    at: float = 0.0
    #: Completed updates.
    version: int = 0
    total_versions: int | None = None
    #: Completed epochs.
    epoch: float = 0.0
    loss: float | None = None
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    #: Allocation that trains now.
    workers: int = 0
    ps: int = 0

    def finite(self) -> Progress:
        """The same with None for a loss or speed that is not a finite number."""
        numbers = (self.loss, self.steps_per_second, self.samples_per_second)
        if all(value is None or math.isfinite(value) for value in numbers):
            return self
        loss, steps, samples = (value if value is not None and math.isfinite(value) else None for value in numbers)
        return replace(self, loss=loss, steps_per_second=steps, samples_per_second=samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as the store keeps it."""

    key: JobKey
    request: JobRequest
    owner: Owner
    launch: Launch
    state: JobState = JobState.SUBMITTED
    #: Handle of the anchor in the resource manager; empty until the anchor was started.
    anchor: str = ""
    #: host:port of the coordinator; empty until it called.
    address: str = ""
    progress: Progress = field(default_factory=Progress)
    #: When the job first had a confirmed allocation, and when it ended; seconds since 1970.
    started_at: float | None = None
    ended_at: float | None = None
    #: By state: of an ended job why it ended as it did; of a submitted one what its anchor waits for; of a ready or
    #: running one how its coordinator was ended (see ``coordinator_end``), empty while it runs.
    end_reason: str = ""
    #: SHA-256 of the final weights.
    digest: str = ""
    #: The scheduler in charge runs it at a size that was fixed when it came: dl2d only observes it, in any mode.
    static: bool = False

    @property
    def coordinator_end(self) -> str:
        """How the coordinator of a live job was ended from outside, by its own last report; empty while it runs.

        The job stays live until the resource manager says what became of the anchor.
        """
        return self.end_reason if self.state in (JobState.READY, JobState.RUNNING) else ""

    @property
    def unreported(self) -> bool:
        """Whether no coordinator reports its progress; its epochs are hours then, declared ones its time limit."""
        return self.static and not self.address

    @property
    def script_epochs(self) -> float | None:
        """Epochs that its script trains in all, as its coordinator's reports imply; None where they do not."""
        progress = self.progress
        if not progress.version or not progress.epoch or progress.total_versions is None:
            return None
        return progress.total_versions * progress.epoch / progress.version

    def progress_at(self, at: float) -> Progress:
        """What its coordinator last said or, where it has none, the hours that it has run; ``at``: seconds since 1970.

        What a job without a coordinator did is not known, only for how long: no speed, no loss, no version.
        """
        if not self.unreported or self.started_at is None:
            return self.progress
        end = at if self.ended_at is None else self.ended_at
        return replace(self.progress, at=end, epoch=max(end - self.started_at, 0.0) / HOUR_SECONDS)
