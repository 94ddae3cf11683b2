"""State of the guard: resizes, starts, refusals and stop requests on which its rules depend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dl2d.core.backoff_after_failed_starts import StartFailures
from dl2d.core.jobs import JobKey


class NodeTrouble(NamedTuple):
    """Consecutive attempts to start a task of a job on a node that the resource manager refused, or that failed."""

    attempts: int
    #: When the last one was refused or failed, seconds since 1970.
    at: float
    #: Why, in the resource manager's words.
    reason: str
    #: Whether a task failed there or did not start in time, rather than that the resource manager refused it. Such a
    #: node is used where the smallest size of the job needs it.
    failed: bool = False


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


class Requeue(NamedTuple):
    """A coordinator without tasks that was put back into the resource manager's queue, since others need its room."""

    #: When the requeue was requested, seconds since 1970; 0 once the requeued run is listed.
    at: float
    #: Why, in words for users.
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    """What happened to jobs and tasks, as far as later decisions depend on it. Times are seconds since 1970."""

    #: When a task of the job last started, joined, began to leave or left, for live jobs.
    resized_at: Mapping[JobKey, float] = field(default_factory=dict)
    #: When each task that was asked for within the last ``schedule.slot_seconds`` was asked for, by tag.
    started_at: Mapping[str, float] = field(default_factory=dict)
    #: Failed attempts to start tasks, of jobs that have any.
    start_failures: Mapping[JobKey, StartFailures] = field(default_factory=dict)
    #: Nodes that were refused to a job, or on which tasks of it failed or did not start, by name of the node.
    avoided_nodes: Mapping[JobKey, Mapping[str, NodeTrouble]] = field(default_factory=dict)
    #: By what it is, in words for users.
    learned_limits: Mapping[str, LearnedLimit] = field(default_factory=dict)
    #: When each job of the resource manager was last asked to stop, by handle and submit time (``17.1795253932``).
    stops_asked: Mapping[str, float] = field(default_factory=dict)
    #: Jobs whose coordinator was asked to go back into the queue, or waits there since.
    requeued: Mapping[JobKey, Requeue] = field(default_factory=dict)
