"""Plan of a tick: single starts and stops of tasks, and their outcome."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from dl2d.core.cluster import Task, TaskState
from dl2d.core.jobs import JobKey, Role
from dl2d.core.resources import Resources, Shortfall


class Start(msgspec.Struct, frozen=True, gc=False):
    """A task to be started on a node; in the resource manager's queue, which chooses it, where ``node`` is empty."""

    job: JobKey
    role: Role
    node: str
    demand: Resources

    def task(self, number: int, at: float = 0.0, state: TaskState = TaskState.ASKED) -> Task:
        """The task, by its number among those of its job and role, as it is from a time on."""
        return Task(
            job=self.job, id=f"{self.role}-{number}", role=self.role, node=self.node, demand=self.demand, state=state,
            asked_at=at, since=at,
        )  # fmt: skip


class Stop(msgspec.Struct, frozen=True, gc=False):
    """A task to be drained."""

    job: JobKey
    task: str


@dataclass(frozen=True, slots=True)
class Move:
    """A task that is replaced on another node: for a larger task, for a claim, or since its time limit is near.

    It leaves after the replacement, of the same job and role, has started on ``node``.
    """

    job: JobKey
    task: str
    node: str


class Deferred(msgspec.Struct, frozen=True, gc=False):
    """Tasks of one job and role that were decided on but have no room yet; the next tick tries again."""

    job: JobKey
    role: Role
    count: int
    #: The node that lacks the least for such a task.
    nearest: str
    #: The resources that are missing there.
    shortfalls: tuple[Shortfall, ...]
    #: Limit of the site in which there is no room before tasks that leave have ended; ``nearest`` is empty then.
    limit: str = ""
    #: Why the resource manager is not asked for them yet; nothing is missing then.
    postponed: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """All starts and stops of a tick. Starts use only resources that the resource manager reports as free."""

    #: New tasks. The last ones are the replacements of the moved tasks: as many as ``moves``, in the same order.
    starts: tuple[Start, ...] = ()
    stops: tuple[Stop, ...] = ()
    deferred: tuple[Deferred, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def first_replacement(self) -> int:
        """Index in ``starts`` of the first replacement; the replacement of ``moves[0]`` is there."""
        return len(self.starts) - len(self.moves)

    def replacements(self) -> Iterator[tuple[int, Move, Start]]:
        """Each move with the start that replaces its task, and before them the index of that in ``starts``."""
        first = self.first_replacement
        return zip(range(first, len(self.starts)), self.moves, self.starts[first:], strict=True)


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that the resource manager refused or did not answer."""

    job: JobKey
    #: What was requested, such as ``start worker-3 on n1``.
    what: str
    #: What the resource manager answered.
    error: str
    #: Whether it refused the request; otherwise it did not answer.
    refused: bool = False
    #: Whether it never starts such a task of the job.
    never_starts: bool = False
    #: The node on which the resource manager starts no task of the job, where it refused that.
    node: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a plan."""

    #: Tags of the tasks that the resource manager accepted.
    started: tuple[str, ...] = ()
    #: Tags of the tasks that were told to drain.
    draining: tuple[str, ...] = ()
    #: Starts that the resource manager refused or did not answer.
    failures: tuple[Failure, ...] = ()
