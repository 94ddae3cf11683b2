"""Queued jobs: elastic jobs of which tasks wait in the resource manager's own queue until it is their turn. Pure.

Tasks are submitted for nodes that have room at that moment. Where jobs of others wait for whatever room becomes free,
the resource manager gives it to them before the next tick sees it, and an elastic job that has nothing would never
start. After ``queue_seconds`` of that, what a job lacks of its minimum size is therefore submitted without a node, in
place of tasks that were submitted for one and wait there: these tasks have a place in the queue like any job, and start
on the nodes that the resource manager chooses. Other elastic jobs give up tasks to them as to jobs of others, since the
plug-in lists them among the claims.

Until all of them run and the job trains, no policy decides on it (``Snapshot.queued``). They are withdrawn, and the
policy decides on the job again, when no other job has waited for the same nodes for ``ALONE_SECONDS``, or when some
have run for ``MAX_STARTING_SECONDS`` and it does not train: otherwise jobs could hold room for ever that others lack.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from dl2d.core.cluster import NodeState, Snapshot, Task, TaskState, parse_tag
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.error_wording import some_of
from dl2d.core.jobs import NOTHING, TASK_ROLES, Allocation, Job, JobKey, JobState
from dl2d.core.limit_room import LimitRoom
from dl2d.core.resource_manager import RmListing
from dl2d.core.resources import Resources
from dl2d.core.task_starts_and_stops import Plan, Start, Stop

#: For how long no other job waits for the same nodes before queued tasks are withdrawn.
ALONE_SECONDS: Final = 60.0
#: For how long tasks of a queued job may run without it training before all are withdrawn.
MAX_STARTING_SECONDS: Final = 1800.0


@dataclass(frozen=True, slots=True)
class QueueHistory:
    """Since when, in seconds on a monotonic clock, by job."""

    #: Tasks of its minimum size have not run while jobs of others waited for nodes that it may use.
    lacking_since: Mapping[JobKey, float] = field(default_factory=dict)
    #: Not since, but when jobs of others waited last for nodes that it may use.
    others_at: Mapping[JobKey, float] = field(default_factory=dict)
    #: It is queued and does not train yet.
    ready: frozenset[JobKey] = frozenset()
    #: That, and some of its tasks run.
    starting_since: Mapping[JobKey, float] = field(default_factory=dict)


NEVER_QUEUED: Final = QueueHistory()


def is_queued(task: Task) -> bool:
    """Whether a task waits in the resource manager's queue for any node."""
    return task.state is TaskState.ASKED and not task.node


def queued_jobs(jobs: Iterable[Job], tasks: Iterable[Task], history: QueueHistory) -> frozenset[JobKey]:
    """Those of the jobs of which tasks are queued, or which have tasks that were and do not train yet."""
    starting = history.ready.intersection(job.key for job in jobs if job.state is JobState.READY)
    return frozenset(task.job for task in tasks if is_queued(task) or (task.job in starting and task.state.wanted))


def queue_tasks(
    plan: Plan, snapshot: Snapshot, listing: RmListing, history: QueueHistory, *,
    unable: Collection[JobKey], queue_seconds: float, now: float,
) -> tuple[Plan, QueueHistory]:  # fmt: skip
    """The plan with tasks that are queued (starts without a node) and withdrawn, and the next history.

    Parameters
    ----------
    listing
        The listing of which the snapshot was made. From an incomplete one nothing is concluded.
    unable
        Jobs of which no task would start: their coordinators are silent, or they wait after failed attempts.
    queue_seconds
        How long a job lacks tasks while others wait before they are queued (``Timeouts.queue_seconds``).
    now
        Seconds on a monotonic clock.
    """
    if listing.incomplete:
        return plan, history
    waiting = _WaitingJobs(snapshot, listing)
    jobs = [job for job in (*snapshot.jobs, *snapshot.queued) if not job.static and job.key not in unable]
    lacking = {job.key: lacks for job in jobs if any(lacks := waiting.lacks(job))}
    candidates = [job for job in snapshot.jobs if job.key in lacking]
    others_at = {
        job.key: now if waiting.others_wait(job) else history.others_at.get(job.key, now if was_queued else -math.inf)
        for some, was_queued in ((candidates, False), (snapshot.queued, True))
        for job in some
    }
    beside_others = {key for key, at in others_at.items() if now - at < ALONE_SECONDS}
    lacking_since = _since(history.lacking_since, beside_others & lacking.keys(), now)
    ready = frozenset(job.key for job in snapshot.queued if job.state is JobState.READY)
    running = {task.job for task in snapshot.tasks if task.state.wanted and not is_queued(task)}
    starting_since = _since(history.starting_since, ready & running, now)
    queued = {job.key for job in snapshot.queued}
    withdrawn = queued - beside_others
    given_up = {key for key, since in starting_since.items() if now - since >= MAX_STARTING_SECONDS}
    # Of a queued job some tasks may have failed, or may not have been submitted yet.
    due = queued - withdrawn - given_up
    due |= {key for key, since in lacking_since.items() if now - since >= queue_seconds} - queued
    starts = tuple(_starts([job for job in jobs if job.key in due and job.key in lacking], lacking, snapshot))
    newly_queued = {start.job for start in starts} - queued
    stopping = {(stop.job, stop.task) for stop in plan.stops}
    stops = tuple(
        Stop(task.job, task.id)
        for task in snapshot.tasks
        if task.state.wanted and (task.job, task.id) not in stopping
        if task.job in given_up
        or (task.job in withdrawn and is_queued(task))
        or (task.job in newly_queued and task.state is TaskState.ASKED)
    )
    if starts or stops:
        # The last starts are the replacements of moved tasks.
        first = plan.first_replacement
        kept = (start for start in plan.starts[:first] if start.job not in newly_queued)
        plan = replace(plan, starts=(*starts, *kept, *plan.starts[first:]), stops=(*plan.stops, *stops))
    return plan, QueueHistory(lacking_since, others_at, ready - given_up - withdrawn, starting_since)


def with_queued_jobs(decision: Decision, snapshot: Snapshot) -> Decision:
    """The decision with an entry for each queued job: it keeps what it has and what waits for it."""
    if not snapshot.queued:
        return decision
    sizes, queued = _sizes_of_queued(snapshot), defaultdict(list)
    for task in filter(is_queued, snapshot.tasks):
        queued[task.job].append(task.id)
    entries = []
    for job in snapshot.queued:
        names = queued[job.key]
        text = (
            "jobs of others wait for whatever room becomes free; what it lacks of its smallest size waits in the "
            f"resource manager's queue: {some_of(names)}"
            if names
            else "its first tasks, which waited in the resource manager's queue, run, and it does not train yet"
        )
        entries.append(JobDecision(job.key, sizes[job.key], Reason(Constraint.QUEUE, text), sizes[job.key]))
    return replace(decision, jobs=(*decision.jobs, *entries))


def _sizes_of_queued(snapshot: Snapshot) -> dict[JobKey, Allocation]:
    """The tasks that queued jobs have, those in the queue included."""
    return replace(snapshot, jobs=snapshot.queued).held()


class _WaitingJobs:
    """Which jobs lack tasks of their minimum sizes, and which have jobs of others waiting for the same nodes."""

    def __init__(self, snapshot: Snapshot, listing: RmListing) -> None:
        # Tasks that wait for room on a node may have lost it to others.
        begun = replace(snapshot, tasks=tuple(task for task in snapshot.tasks if task.state is not TaskState.ASKED))
        self._held = {**begun.held(), **_sizes_of_queued(snapshot)}
        self._floors = dict(snapshot.floors) | {job.key: job.request.min_size for job in snapshot.queued}
        self._nodes = {node.name: node.capacity for node in snapshot.nodes if node.state is NodeState.UP}
        self._eligible_nodes = listing.eligible_nodes
        own = {job.handle for job in listing.jobs if parse_tag(job.tag) is not None}
        self._fitting: dict[tuple[Resources, frozenset[str] | None], bool] = {}
        self._others_wait: dict[frozenset[str] | None, bool] = {}
        #: The nodes for which jobs of others wait; None for all.
        self._waited_for = {
            claim.eligible for claim in listing.claims if not claim.standing and claim.handle not in own
        }

    def lacks(self, job: Job) -> Allocation:
        """What a job lacks of its minimum size; nothing if no empty node that it may use holds such a task."""
        held = self._held[job.key]
        least = job.request.min_size if held == NOTHING else self._floors.get(job.key, NOTHING)
        lacks = least.beyond(held)
        if not any(lacks):
            return NOTHING
        nodes = self._may_use(job)
        demands = [job.request.demand(role) for role in TASK_ROLES if lacks.count(role)]
        return lacks if all(self._fits(demand, nodes) for demand in demands) else NOTHING

    def others_wait(self, job: Job) -> bool:
        """Whether jobs that are not dl2d's wait for nodes that a job may use."""
        nodes = self._may_use(job)
        if nodes not in self._others_wait:
            self._others_wait[nodes] = any(
                nodes is None or others is None or not nodes.isdisjoint(others) for others in self._waited_for
            )
        return self._others_wait[nodes]

    def _may_use(self, job: Job) -> frozenset[str] | None:
        """The nodes that a job may use; None for all."""
        eligible = self._eligible_nodes.get(job.anchor)
        return None if eligible is None else eligible.nodes

    def _fits(self, demand: Resources, nodes: frozenset[str] | None) -> bool:
        """Whether an empty one of these nodes holds a task; many jobs demand the same on the same nodes."""
        if (demand, nodes) not in self._fitting:
            self._fitting[demand, nodes] = any(
                demand.fits_in(room) for name, room in self._nodes.items() if nodes is None or name in nodes
            )
        return self._fitting[demand, nodes]


def _since(before: Mapping[JobKey, float], keys: Iterable[JobKey], now: float) -> dict[JobKey, float]:
    return {key: before.get(key, now) for key in keys}


def _starts(jobs: Iterable[Job], lacking: Mapping[JobKey, Allocation], snapshot: Snapshot) -> Iterator[Start]:
    """The tasks to queue, of those jobs whose limits have room for them."""
    room, held = LimitRoom(snapshot.limits), snapshot.held()
    for job in snapshot.jobs:
        room.take(job, held[job.key])
    for job in jobs:
        lacks = lacking[job.key]
        if room.blocked(job, lacks) is not None:
            continue
        room.take(job, lacks)
        for role in TASK_ROLES:
            yield from [Start(job.key, role, "", job.request.demand(role))] * lacks.count(role)
