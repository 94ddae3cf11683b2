"""Queued tasks: tasks of elastic jobs that wait in the resource manager's own queue until it is their turn.

Tasks are submitted for nodes that have room at that moment. Where jobs of others wait for whatever room becomes free,
the resource manager gives it to them before the next tick sees it, and an elastic job that has nothing would never
start. After ``queue_seconds`` of that, what a job lacks of its minimum size is therefore submitted without a node:
these tasks have a place in the queue like any job, and start on the nodes that the resource manager chooses. Other
elastic jobs give up tasks to them as to jobs of others, since the plug-in lists them among the claims. It is the same
where jobs run that the resource manager preempts for such tasks: no node shows room for them, and nobody need wait.

They wait beside what the policy decides on the job, which does not see them before they run. As soon as the job has its
minimum size, from wherever, those that still wait are withdrawn. A job that has not trained yet keeps what runs until
the rest does (``starting_jobs``), but not for ever, since jobs could wait for one another. For the same reason such a
job is queued only if its minimum size has no more than one task of each role, and with its server only when its worker
runs, since a server may start long before.

For how long it keeps its worker: one job at a time, the one that has kept it for the longest, for as long as it had
waited since its submission when the worker began to run; all others for ``MAX_HELD_SECONDS``. Then the job gives the
worker up and is queued anew.

- Every job starts in the end, however long the queue is. What it had waited is longer than its worker's turn in the
  queue took, so usually longer than its server's turn takes. If that takes even longer, the worker is given up in vain,
  but by the next time the job has waited at least twice as long. With ``MAX_HELD_SECONDS`` for all, no job would ever
  start where a turn takes longer, and each worker would be idle for that time.
- No deadlock. All these times are finite. While one job keeps its worker for long, what others keep becomes free every
  ``MAX_HELD_SECONDS``, and what they submit next waits behind the server of the first one. That one remains the one
  that has kept its worker for the longest until it trains or gives it up, since others begin later.

With more tasks of a role, no bound on the time for which a part is kept is good. With a long one the job may hold room
in vain even if it is the only one that keeps a part: the resource manager chooses nodes one task at a time, and may put
the first ones where they leave no node large enough for the next. With a short one the job never starts where the jobs
of others end less often than that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dl2d.core.cluster import Snapshot, Task, TaskState
from dl2d.core.jobs import NOTHING, TASK_ROLES, Allocation, Job, JobKey, JobState
from dl2d.core.packing.room_in_limits import LimitRoom
from dl2d.core.placement import Placement
from dl2d.core.plan_of_starts_and_stops import Plan, Start, Stop
from dl2d.core.resource_manager import RmListing
from dl2d.tick.avoided_nodes import EmptyNodes

#: For how long jobs of others still count as waiting when none is listed any more.
WAITED_SECONDS = 60.0
#: For how long a job that does not train keeps tasks while it lacks others, unless it is the one that keeps them for
#: longer; then all are given up, and queued anew.
MAX_HELD_SECONDS = 600.0
#: Maximum number of jobs of which tasks are queued in one tick.
_MAX_JOBS = 64


@dataclass(frozen=True, slots=True)
class QueueHistory:
    """What earlier ticks have seen; times are seconds on a monotonic clock."""

    #: Since when tasks of each job's minimum size have not run while jobs of others waited for nodes that it may use,
    #: or ran there that these tasks may preempt.
    lacking_since: Mapping[JobKey, float] = field(default_factory=dict)
    #: When there were such jobs of others last.
    others_at: Mapping[JobKey, float] = field(default_factory=dict)
    #: Jobs that did not train and of which tasks were queued.
    queued: frozenset[JobKey] = frozenset()
    #: Since when such a job has had tasks that run while it lacked others.
    held_since: Mapping[JobKey, float] = field(default_factory=dict)


def is_queued(task: Task) -> bool:
    """Whether a task waits in the resource manager's queue for any node."""
    return task.state is TaskState.ASKED and not task.node


def starting_jobs(jobs: Iterable[Job], tasks: Iterable[Task], history: QueueHistory) -> frozenset[JobKey]:
    """Jobs that do not train yet and of which tasks run, while others are queued or these were."""
    tasks = [task for task in tasks if task.state.wanted]
    queued = history.queued.union(task.job for task in tasks if is_queued(task))
    begun = {task.job for task in tasks if task.has_begun} if queued else frozenset[JobKey]()
    return frozenset(job.key for job in jobs if job.state is JobState.READY and job.key in queued & begun)


def queue_tasks(
    plan: Plan, snapshot: Snapshot, listing: RmListing, queued: Iterable[Task], history: QueueHistory, *,
    placement: Placement, unable: Collection[JobKey], queue_seconds: float, now: float,
    beneficiary: JobKey | None = None,
) -> tuple[Plan, QueueHistory]:  # fmt: skip
    """The plan with tasks that are queued (starts without a node) and withdrawn, and the next history.

    Parameters
    ----------
    listing
        The listing of which the snapshot was made. From an incomplete one nothing is concluded.
    queued
        Tasks that wait for any node, which the snapshot does not have.
    unable
        Jobs of which no task would start: their coordinators are silent, or they wait after failed attempts.
    queue_seconds
        How long a job lacks tasks while others wait before they are queued (``Timeouts.queue_seconds``).
    now
        Seconds on a monotonic clock.
    beneficiary
        The job for which idle coordinators are put back (``idle_coordinators``), if there is one. Of jobs that may use
        the same nodes and have no task that runs, only its tasks wait, all of them at once.
    """
    if listing.incomplete:
        return plan, history
    queued = sorted(queued, key=lambda task: task.number)
    lacking = _Lacking(snapshot, listing, placement, beneficiary)
    jobs = [job for job in snapshot.jobs if not job.static and any(lacking.tasks[job.key])]
    others_at = {
        job.key: now if lacking.others_come_first(job) else history.others_at.get(job.key, -math.inf) for job in jobs
    }
    since = {key: history.lacking_since.get(key, now) for key, at in others_at.items() if now - at < WAITED_SECONDS}
    held = {job.key for job in jobs if job.state is JobState.READY and job.key in history.queued and lacking.has(job)}
    held_since = {key: history.held_since.get(key, now) for key in held}
    given_up = _given_up(held_since, snapshot, now)
    room = lacking.limit_room()
    behind_beneficiary = lacking.behind_beneficiary()
    needed, stops = _still_needed(queued, lacking, snapshot, given_up, behind_beneficiary, room)
    withdrawn = {stop.job for stop in stops} - behind_beneficiary
    since = {key: at for key, at in since.items() if key not in withdrawn}
    have_queued = {task.job for task in needed}
    starting = {start.job for start in plan.starts}
    # Of the tasks of a job that were queued some may have failed, or may not have been submitted yet.
    due = [
        job
        for job in jobs
        if job.key in have_queued
        or job.key in history.queued
        or now - since.get(job.key, math.inf) >= (0.0 if job.key == beneficiary else queue_seconds)
        if not (job.key in unable or job.key in starting or job.key in given_up or job.key in behind_beneficiary)
        if lacking.may_be_queued(job)
    ]
    starts = tuple(_starts(due, lacking, needed, room))
    if starts or stops:
        # The last starts are the replacements of moved tasks.
        index = plan.first_replacement
        all_starts = (*plan.starts[:index], *starts, *plan.starts[index:])
        plan = replace(plan, starts=all_starts, stops=(*plan.stops, *stops))
    known = {*history.queued, *(task.job for task in queued), *(start.job for start in starts)}
    have_tasks = {*have_queued, *(start.job for start in starts)}
    have_tasks |= {task.job for task in snapshot.tasks if task.state.wanted}
    ready = {job.key for job in snapshot.jobs if job.state is JobState.READY}
    return plan, QueueHistory(since, others_at, frozenset(known & have_tasks & ready - given_up), held_since)


def _given_up(held_since: Mapping[JobKey, float], snapshot: Snapshot, now: float) -> frozenset[JobKey]:
    """Jobs that have kept a part of their tasks for too long."""
    late = frozenset(key for key, at in held_since.items() if now - at >= MAX_HELD_SECONDS)
    if not late:
        return late
    # By the store, as a daemon that has started again begins anew with ``held_since``.
    begun_at: dict[JobKey, float] = defaultdict(lambda: math.inf)
    for task in snapshot.tasks:
        if task.state.wanted and task.has_begun:
            begun_at[task.job] = min(task.since, begun_at[task.job])
    longest = min(held_since, key=lambda key: (held_since[key], begun_at[key], key.submitted, key))
    waited = begun_at[longest] - longest.submitted
    return late - {longest} if now - held_since[longest] < waited else late


def _still_needed(
    queued: Sequence[Task],
    lacking: _Lacking,
    snapshot: Snapshot,
    given_up: Collection[JobKey],
    behind_beneficiary: Collection[JobKey],
    room: LimitRoom,
) -> tuple[list[Task], list[Stop]]:
    """The queued tasks that their jobs still lack and that have room in limits, and the stops of the others.

    Of jobs that are ``given_up`` all tasks stop, and of those ``behind_beneficiary`` all that wait. ``room`` is then
    without that of the needed ones.
    """
    needed = list[Task]()
    stops = [Stop(task.job, task.id) for task in snapshot.tasks if task.job in given_up and task.state.wanted]
    jobs, sizes = {job.key: job for job in snapshot.jobs}, _sizes(())
    for task in queued:
        sizes[task.job] = size = sizes[task.job].plus(_one(task))
        job = jobs.get(task.job)
        if job is None:  # its coordinator has to be heard first
            needed.append(task)
            continue
        is_lacked = size.count(task.role) <= lacking.tasks[job.key].count(task.role)
        leaves = job.key in given_up or job.key in behind_beneficiary
        if leaves or not is_lacked or room.blocked(job, _one(task)) is not None:
            stops.append(Stop(task.job, task.id))
        else:
            needed.append(task)
            room.take(job, _one(task))
    return needed, stops


def _starts(jobs: Iterable[Job], lacking: _Lacking, queued: Sequence[Task], room: LimitRoom) -> Iterator[Start]:
    """The tasks to queue, of those jobs whose limits have room for them beside the tasks that run and wait.

    The next tick queues those of further jobs than ``_MAX_JOBS``.
    """
    waiting, count = _sizes(queued), 0
    for job in jobs:
        more = lacking.tasks[job.key].beyond(waiting.get(job.key, NOTHING))
        if any(more) and room.blocked(job, more) is None:
            room.take(job, more)
            count += 1
            for role in TASK_ROLES:
                yield from [Start(job.key, role, "", job.request.demand(role))] * more.count(role)
        if count == _MAX_JOBS:
            return


def _sizes(tasks: Iterable[Task]) -> dict[JobKey, Allocation]:
    """How many of these tasks each job has."""
    sizes: dict[JobKey, Allocation] = defaultdict(lambda: NOTHING)
    for task in tasks:
        sizes[task.job] = sizes[task.job].plus(_one(task))
    return sizes


def _one(task: Task) -> Allocation:
    """The size that has this task alone."""
    return Allocation(*(int(role is task.role) for role in TASK_ROLES))


class _Lacking:
    """What jobs lack of their minimum sizes, and which have jobs of others waiting for the same nodes."""

    def __init__(
        self, snapshot: Snapshot, listing: RmListing, placement: Placement, beneficiary: JobKey | None
    ) -> None:
        floors = dict(snapshot.floors)
        # Tasks that wait for room on a node may have lost it to others.
        self._begun = snapshot.begun()
        #: Of jobs that train what they lack of their floors, of others that of their minimum sizes, workers first.
        self.tasks = {
            job.key: floors.get(job.key, job.request.min_size).beyond(self._begun[job.key]) for job in snapshot.jobs
        }
        for key, lacks in self.tasks.items():
            if key not in floors and lacks.workers and key != beneficiary:
                self.tasks[key] = lacks._replace(ps=0)
        self._snapshot = snapshot
        self._beneficiary = next((job for job in snapshot.jobs if job.key == beneficiary), None)
        self._training = floors.keys()
        self._up = frozenset(node.name for node in listing.nodes if node.is_open)
        self._empty = EmptyNodes(listing.nodes, placement)
        self._eligible_nodes = listing.eligible_nodes
        self._may_preempt = listing.may_preempt
        #: The nodes for which jobs of others wait; None for all.
        self._waited_for = {claim.eligible for claim in listing.claims if not claim.standing and not claim.is_task}
        self._others_wait: dict[frozenset[str], bool] = {}

    def has(self, job: Job) -> bool:
        """Whether any task of a job has begun to run and is not to leave."""
        return self._begun[job.key] != NOTHING

    def behind_beneficiary(self) -> frozenset[JobKey]:
        """Jobs of which no task has begun to run, and that may use a node that the beneficiary may use."""
        if self._beneficiary is None:
            return frozenset()
        nodes = self._may_use(self._beneficiary)
        return frozenset(
            job.key
            for job in self._snapshot.jobs
            if job.key != self._beneficiary.key and job.state is JobState.READY and not job.static and not self.has(job)
            if not nodes.isdisjoint(self._may_use(job))
        )

    def limit_room(self) -> LimitRoom:
        """What limits leave beside the tasks that have begun to run."""
        room = LimitRoom(self._snapshot.limits)
        for job in self._snapshot.jobs:
            room.take(job, self._begun[job.key])
        return room

    def may_be_queued(self, job: Job) -> bool:
        """Whether a job trains, or can train with one task of each role at most; and empty nodes hold its tasks."""
        small = job.key in self._training or max(job.request.min_size) <= 1
        return small and self._empty.hold(job, self._may_use(job))

    def others_come_first(self, job: Job) -> bool:
        """Whether jobs that are not dl2d's wait for nodes that a job may use, or any run there that it may preempt."""
        if job.anchor in self._may_preempt:
            return True
        nodes = self._may_use(job)
        if nodes not in self._others_wait:
            self._others_wait[nodes] = any(
                others is None or not nodes.isdisjoint(others) for others in self._waited_for
            )
        return self._others_wait[nodes]

    def _may_use(self, job: Job) -> frozenset[str]:
        """The nodes that a job may use."""
        eligible = self._eligible_nodes.get(job.anchor)
        return self._up if eligible is None else eligible.nodes
