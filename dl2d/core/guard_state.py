"""State of the guard: resizes, starts, refusals and stop requests on which its rules depend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from dl2d.core.jobs import JobKey

#: Maximum seconds between two attempts to start a job's tasks.
MAX_BACKOFF_SECONDS: Final = 600.0


def doubled(seconds: float, failures: int, most: float) -> float:
    """A delay that is ``seconds`` after the first failure in a row, and twice as long after each further one."""
    return min(seconds * 2.0 ** min(max(failures - 1, 0), 30), most)


class StartFailures(NamedTuple):
    """Consecutive attempts to start tasks of a job that were refused, or whose tasks ended before they joined it."""

    #: Attempts in which tasks ended; so many (``Timeouts.start_failures``) end the job.
    attempts: int = 0
    #: How the last attempt ended.
    last: str = ""
    #: When the last attempt ended, seconds since 1970.
    at: float = 0.0
    #: Attempts in which tasks were ended from outside, or the resource manager lost tasks that waited. They delay the
    #: next one, and count less, since the job may not have caused them.
    from_outside: int = 0
    #: Attempts that only delay the next one: the resource manager refused the starts, or the job was training.
    not_counted: int = 0

    @property
    def counted(self) -> int:
        """Number of attempts that count towards the end of the job: all of the first kind, a tenth of the second."""
        return self.attempts + self.from_outside // 10

    @property
    def in_a_row(self) -> int:
        """Number of attempts of all kinds."""
        return self.attempts + self.from_outside + self.not_counted

    def retry_at(self, backoff_seconds: float) -> float:
        """When the next attempt may begin: after ``backoff_seconds``, doubled with each further failure.

        Never later than ``MAX_BACKOFF_SECONDS`` after the failure.
        """
        return self.at + doubled(backoff_seconds, self.in_a_row, MAX_BACKOFF_SECONDS)


class NodeRefusal(NamedTuple):
    """Consecutive attempts to start a task of a job on a node that the resource manager has refused."""

    attempts: int
    #: When the last one was refused, seconds since 1970.
    at: float
    #: Why, in the resource manager's words.
    reason: str

    @property
    def retry_at(self) -> float:
        """When the next task may be asked for there: after 5 minutes, doubled with each further one, at most 1 h."""
        return self.at + doubled(300.0, self.attempts, 3600.0)


class LearnedLimit(NamedTuple):
    """Limit of the resource manager that tasks of some jobs were found to wait for."""

    #: Handles of the jobs' anchors.
    anchors: tuple[str, ...]
    #: What these jobs' tasks had together then, of each resource that is limited.
    had: Mapping[str, float]
    #: How often in a row it was found.
    times: int
    #: When it was found last, seconds since 1970.
    at: float

    @property
    def retry_at(self) -> float:
        """When these jobs may grow again: after a minute, doubled each time that the limit is found again."""
        return self.at + doubled(60.0, self.times, MAX_BACKOFF_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    """What happened to jobs and tasks, as far as later decisions depend on it. Times are seconds since 1970."""

    #: When a task of the job last started, joined, began to leave or left, for live jobs.
    resized_at: Mapping[JobKey, float] = field(default_factory=dict)
    #: When each task that was asked for within the last ``schedule.slot_seconds`` was asked for, by tag.
    started_at: Mapping[str, float] = field(default_factory=dict)
    #: Failed attempts to start tasks, of jobs that have any.
    start_failures: Mapping[JobKey, StartFailures] = field(default_factory=dict)
    #: Nodes that were refused to jobs, by name of the node.
    refused_nodes: Mapping[JobKey, Mapping[str, NodeRefusal]] = field(default_factory=dict)
    #: By what it is, in words for users.
    learned_limits: Mapping[str, LearnedLimit] = field(default_factory=dict)
    #: When each job of the resource manager was last asked to stop, by handle and submit time (``17.1795253932``).
    stops_asked: Mapping[str, float] = field(default_factory=dict)
