"""Status of a job, as its coordinator reports it, and the contract of membership sources, which are told it.

A membership source says which tasks should be members of a job: dl2d, a schedule, or MXNet.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from pslite.job.load_balancing import Straggler
from pslite.job.step_time_and_usage_statistics import StepTimes, Usage

#: exit status of a program that has handled SIGTERM and ends because of it
TERMINATED = 128 + signal.SIGTERM


Role = Literal["worker", "ps"]
MemberPhase = Literal["joined", "active", "draining", "left"]
JobPhase = Literal["waiting", "running", "finished", "failed", "cancelled"]


class Cause(enum.StrEnum):
    """Why a task's process is not there any more."""

    #: status 0, to the end of the job
    DONE = "done"
    #: status 0, because the job went on without it
    DRAINED = "drained"
    #: another status
    FAILED = "failed"
    #: a signal, sent by a user or caused by a defect
    KILLED = "killed"
    #: the kernel ended it, or a process of its, for lack of memory
    OUT_OF_MEMORY = "out-of-memory"
    #: it was given up, since the job made no progress because of it
    HUNG = "hung"
    #: there never was a process
    NOT_STARTED = "not-started"
    #: it was given up, nothing is heard of it, and nobody has reported how its process ended: its machine may be gone
    LOST = "lost"


def signal_in_words(number: int) -> str:
    """Return "signal 9 (SIGKILL)"."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


class Suspension(msgspec.Struct, frozen=True, kw_only=True):
    """How long workers that were ready to push were not let to, in milliseconds."""

    p50: float = 0.0
    max: float = 0.0


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """One finished plan."""

    number: int
    first_version: int
    workers: int
    servers: int
    added: list[str]
    removed: list[str]
    moved_bytes: int
    prepare_ms: float
    move_ms: float
    suspension_ms: Suspension
    #: of the workers that trained before too: the longest step from when the plan was prepared until it was done, and
    #: the median one before that; None where none has reported them
    longest_step_ms: float | None = None
    median_step_ms: float | None = None


class MemberReport(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the job."""

    task: str
    role: Role
    state: MemberPhase
    host: str
    pid: int
    #: what its processes used last, as its dl2-run saw it
    usage: Usage | None = None
    #: how long its last steps took, if it is a worker
    steps: StepTimes | None = None
    #: why its process ended, if it has, and how in words if that was not as it should
    cause: Cause | None = None
    how: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished job has produced."""

    #: SHA-256 over the SHA-256 of every block's final weights
    digest: str
    versions: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a job, as it is reported to the daemon."""

    address: str
    incarnation: str
    state: JobPhase
    reason: str | None
    version: int
    total_versions: int | None
    epoch: float
    epochs: float | None
    loss: float | None
    steps_per_second: float | None
    samples_per_second: float | None
    members: list[MemberReport]
    plan: int
    plans: list[PlanReport]
    result: Result | None
    #: members that are slower than the others
    stragglers: list[Straggler] = []
    #: of scripts with loops of their own: by how many batches of one worker an epoch advances with each version
    batches_per_version: int | None = None
    #: of a job that no worker can join: how many it has
    most_workers: int | None = None
    #: of scripts with loops of their own: epochs done at version `versions_before`, where they began
    epochs_before: int = 0
    versions_before: int = 0
    #: tasks whose dl2-run is connected, and whose process has not joined yet
    starting: list[str] | None = None
    #: the result is known: all members end, and none is replaced
    ending: bool = False


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the source of members asks for. `members` None: everybody who joins becomes a member."""

    members: frozenset[str] | None = None
    stop: bool = False
    #: why the job ends (`stop`), where it was not cancelled
    reason: str = ""
    heartbeat_seconds: float = 1.0


class MembershipSource(Protocol):
    """Decides which tasks should be members of a job, and takes the reports of its coordinator."""

    def start(self, address: str, token: bytes, wake: Callable[[], None]) -> None:
        """The coordinator listens at `address`. `wake` may be called from any thread to have `exchange` called soon."""

    def exchange(self, status: Status, *, urgent: bool) -> Reply | None:
        """Take the status without waiting; return the newest request, None if there is none yet.

        `status` has every plan ever finished and every member that ever left; `urgent` says that something has changed
        that must be reported at once.
        """

    def close(self, status: Status) -> None:
        """The job is over; may wait a bounded time until the last status is delivered."""
