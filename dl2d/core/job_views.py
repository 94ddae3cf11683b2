"""Contract of what users see of jobs, which commands read from the store or from the daemon's job API."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dl2d.core.cluster import Task
from dl2d.core.daemon_mode_and_canary import Mode, ModeChange
from dl2d.core.decision import JobDecision
from dl2d.core.jobs import Job, JobKey
from dl2d.core.plan_of_starts_and_stops import Deferred, Failure
from dl2d.core.store import DecisionEntry, Resize, RuntimePlan, SlotSummary, TaskReport, TaskTime

#: Jobs, slots or decisions that one call lists at most.
MAX_LISTED = 10_000
#: Decisions that one request for ``JobViews.why`` may ask the job API for: for each, a slot is read.
MAX_DECISIONS = 5


class JobStatus(NamedTuple):
    """A job with its newest decision."""

    job: Job
    #: None before the first decision and after the end.
    decided: JobDecision | None


class TaskStatus(NamedTuple):
    """A task and the newest report of its coordinator on it."""

    id: str
    #: None where the resource manager has not listed the task of an observed job yet.
    task: Task | None
    report: TaskReport | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusView:
    """The newest jobs that have not ended or, if one job was asked for, that job with its tasks."""

    #: Number of the newest slot.
    slot: int
    #: Mode that the daemon is in, or was in last.
    mode: Mode
    store_bytes: int
    #: In submit order.
    jobs: tuple[JobStatus, ...]
    #: How many older ones there are.
    left_out: int = 0
    #: Those that have not ended, and those that failed.
    tasks: tuple[TaskStatus, ...] = ()
    #: Where no job was asked for: tasks of jobs of which some hold their resources and do not execute.
    tasks_of_suspended: tuple[Task, ...] = ()


@dataclass(frozen=True, slots=True)
class DecisionView:
    """A decision on a job, with its deferred and failed steps."""

    entry: DecisionEntry
    deferred: tuple[Deferred, ...] = ()
    failures: tuple[Failure, ...] = ()
    #: Decision on the job that the guard was given; None where it is not recorded, or an observed one.
    proposed: JobDecision | None = None
    #: In mode shadow the decision of dl2d, which is not carried out.
    shadow: DecisionEntry | None = None
    #: Where the job got less, or nothing: decisions of the slot that gave other jobs more.
    grown: tuple[JobDecision, ...] = ()
    #: Which nodes its tasks may use, where these are not all.
    may_use: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyView:
    """Decisions on a job, oldest first, with its live tasks and the reports on those that were lost."""

    job: Job
    decisions: tuple[DecisionView, ...]
    tasks: tuple[Task, ...]
    lost: tuple[TaskReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView:
    """What was done, oldest first: of one job, or of the cluster; what does not belong to the one asked is empty."""

    #: The job that was asked for, and its runs where it was requeued; None for the cluster.
    job: Job | None = None
    runs: tuple[Job, ...] = ()
    decisions: tuple[DecisionEntry, ...] = ()
    modes: tuple[ModeChange, ...] = ()
    slots: tuple[SlotSummary, ...] = ()
    resizes: tuple[Resize, ...] = ()
    plans: tuple[tuple[JobKey, RuntimePlan], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageView:
    """Times during which the tasks of a job held their resources: of all its runs, or of one that was asked for."""

    #: The last run.
    job: Job
    times: tuple[TaskTime, ...]
    runs: int = 1


class JobViews(Protocol):
    """What one user may see. Methods raise ``RequestError`` if there is no such job that they may see."""

    def status(self, job: str | None, *, ended_since: float | None, limit: int) -> StatusView:
        """A job, or all that have not ended and, with ``ended_since``, those that ended after it; newest ``limit``."""
        ...

    def why(self, job: str, *, slot: int | None, limit: int) -> WhyView:
        """The decision of a slot on a job, or its newest ``limit`` ones."""
        ...

    def history(self, job: str | None, *, limit: int) -> HistoryView:
        """The newest ``limit`` changes of a job, or of the cluster. Raises ``Denied`` if the user may not see that."""
        ...

    def usage(self, job: str) -> UsageView:
        """What a job used in all its runs, or in one if its slug is given."""
        ...


def request_payload(method: str, url: str, target: str) -> str:
    """Payload of the credential with which a user sends one request: it binds the credential to daemon and request.

    ``url`` is the base URL of the daemon's job API, as its address file has it; ``target`` path and query as sent.
    """
    return f"dl2d-request:{hashlib.sha256(f'{method} {url} {target}'.encode()).hexdigest()}"
