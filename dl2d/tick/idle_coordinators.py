"""Deadlock among idle coordinators: finds which coordinators without tasks go back into the queue so that one job has
room for its tasks.

Where users submit anchors that hold resources, the resource manager may start so many that no job has room for its
tasks. If a job has lacked its minimum size for ``queue_seconds`` plus one slot and would fit without some idle
coordinators of later jobs, the latest of these are requeued. They lose no work, since they have not
trained. (By that time a decision was made on the job, and its tasks wait in the queue, if there is one.)

- One job at a time is the beneficiary: until it has its tasks, only its tasks wait in the queue, all together, so that
  the room does not go to tasks of several jobs of which none can start (``queued_tasks``). It is the beneficiary for
  ``MAX_BENEFICIARY_SECONDS`` at most; after that another job can be.
- Other coordinators that wait may take the room before it. They are requeued as soon as they are ready, and each time
  twice as many as the time before.
- A coordinator that was requeued starts again after 2 x (``queue_seconds`` + slot) at the earliest, doubled with each
  time that its job was requeued before, for whatever reason, up to 32 times (5 doublings). The resource manager starts
  it then, also if dl2d has ended meanwhile. When no job lacks tasks any more and there is room, it starts sooner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from dl2d.core.cluster import Node, Snapshot, submit_order
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey, JobState, Role
from dl2d.core.packing.bin_packing import JobDemand, Packing, job_demand
from dl2d.core.packing.room_in_limits import LimitRoom
from dl2d.core.placement import Placement
from dl2d.core.resize_guard_state import Requeue
from dl2d.core.resource_manager import RmJob, RmJobState
from dl2d.core.resources import NO_RESOURCES, WHOLE_NODE, Resources

#: Maximum time for which coordinators are requeued for the same job.
MAX_BENEFICIARY_SECONDS = 3600.0
#: Maximum number of times that the time until a coordinator starts again is doubled.
_MAX_DOUBLINGS = 5
#: Slurm starts a job that was requeued no sooner than after two minutes, as its credential is valid until then.
_MIN_QUEUED_SECONDS = 130.0
#: Maximum number of coordinators that one repeated round requeues.
_MAX_PER_ROUND = 32
#: Maximum number of different demands of jobs that are examined per tick.
_MAX_EXAMINED = 16
#: Maximum number of chosen coordinators for which it is checked whether they can stay.
_MAX_CHECKED = 64


@dataclass(frozen=True, slots=True)
class IdleHistory:
    """What earlier ticks have seen and done; times are seconds on a monotonic clock."""

    #: Since when each ready job has lacked tasks of its minimum size.
    lacking_since: Mapping[JobKey, float] = field(default_factory=dict)
    #: Job for which coordinators are requeued; None: no job.
    beneficiary: JobKey | None = None
    #: When it became that job.
    beneficiary_since: float = 0.0
    #: How many times coordinators were requeued for it.
    rounds: int = 0
    #: Jobs whose coordinators the resource manager does not requeue.
    refused: frozenset[JobKey] = frozenset()
    #: Job with which the next tick continues, if there were more demands than it could examine; None: with the first.
    continue_at: JobKey | None = None


@dataclass(frozen=True, slots=True)
class CoordinatorRequeue:
    """An idle coordinator that is requeued."""

    job: Job
    anchor: RmJob
    #: In how many seconds it starts again at the earliest.
    seconds: float
    requeue: Requeue


@dataclass(frozen=True, slots=True)
class Requeues:
    """Coordinators to requeue, and anchors that were requeued and may start again now."""

    leaving: tuple[CoordinatorRequeue, ...] = ()
    returning: tuple[tuple[JobKey, RmJob], ...] = ()


def find_requeues(
    snapshot: Snapshot, submitted: Sequence[Job], anchors: Mapping[JobKey, RmJob], history: IdleHistory, *,
    requeued: Mapping[JobKey, Requeue], placement: Placement, unable: Collection[JobKey],
    foreign_jobs_wait: bool, wait_seconds: float, now: float,
) -> tuple[Requeues, IdleHistory]:  # fmt: skip
    """Which idle coordinators are requeued or start again, and the next history.

    Parameters
    ----------
    snapshot
        The cluster, without room for claims.
    submitted
        Jobs whose coordinators have not called yet.
    anchors
        The anchor of each job that is listed.
    requeued
        Jobs whose coordinators were requeued (``GuardState.requeued``).
    unable
        Jobs of which no task would start: their coordinators are silent, they wait after failed attempts, or they are
        held back.
    foreign_jobs_wait
        Whether foreign jobs wait for room.
    wait_seconds
        How long a job lacks tasks of its minimum size before idle coordinators are requeued for it.
    now
        Seconds on a monotonic clock.
    """
    held, begun = snapshot.held(), snapshot.begun()
    ready = [job for job in snapshot.jobs if job.state is JobState.READY and not job.static]
    lacking = [job for job in ready if not begun.get(job.key, NOTHING).covers(job.request.min_size)]
    since = {job.key: history.lacking_since.get(job.key, now) for job in lacking}
    refused = history.refused & {job.key for job in (*ready, *submitted)}
    beneficiary = history.beneficiary
    if beneficiary is not None and now - history.beneficiary_since > MAX_BENEFICIARY_SECONDS:
        if beneficiary in since:
            since[beneficiary] = now
        beneficiary = None
    room = _Room(snapshot, anchors, requeued, placement)
    limits = LimitRoom(snapshot.limits)
    for job in snapshot.jobs:
        limits.take(job, held[job.key])
    with_tasks = {task.job for task in snapshot.tasks}
    idle = [
        job
        for job in ready
        if job.key not in with_tasks and job.key not in history.refused and job.key not in requeued
        if _may_leave(job, anchors.get(job.key))
    ]
    may_use = snapshot.may_use()
    examined = set[JobDemand]()
    continue_at: JobKey | None = None
    for job in lacking:
        is_beneficiary = job.key == beneficiary
        if history.continue_at and not is_beneficiary and submit_order(job.key) < submit_order(history.continue_at):
            continue
        lacks = job.request.min_size.beyond(held[job.key])
        due = now - since[job.key] >= wait_seconds and job.key not in unable and lacks != NOTHING
        if not due or limits.blocked(job, lacks) is not None:
            continue
        # Of equal jobs the earliest has the most coordinators behind it.
        demand = job_demand(job.request, lacks, may_use.get(job.key))
        if demand in examined:
            continue
        if len(examined) >= _MAX_EXAMINED and not is_beneficiary:
            continue_at = continue_at or job.key
            continue
        examined.add(demand)
        if room.fits(job, lacks):
            if is_beneficiary:  # the room that coordinators have left for it, or are leaving, is free or about to be
                return Requeues(), replace(history, lacking_since=since)
            continue
        later = [each for each in idle if submit_order(each.key) > submit_order(job.key)]
        rounds, became = (history.rounds, history.beneficiary_since) if is_beneficiary else (0, now)
        leaving = room.coordinators_to_requeue(job, lacks, later[::-1], rounds)
        if leaving:
            found = tuple(_requeue_of(each, anchors[each.key], job, snapshot.at, wait_seconds) for each in leaving)
            return Requeues(found), IdleHistory(since, job.key, became, rounds + 1, refused)
    next_history = IdleHistory(since, refused=refused, continue_at=continue_at)
    if lacking or foreign_jobs_wait:
        return Requeues(), next_history
    returning = room.returning([job for job in submitted if job.key in requeued and job.key not in refused])
    return Requeues(returning=returning), next_history


def _may_leave(job: Job, anchor: RmJob | None) -> bool:
    """Whether a ready job has never trained, and its anchor runs, holds room and may be requeued."""
    trained = job.progress.version > 0 or job.started_at is not None or job.coordinator_end
    if anchor is None or trained:
        return False
    runs = anchor.state is RmJobState.RUNNING and not anchor.not_executing
    return runs and bool(anchor.node) and bool(anchor.held.thousandths)


def _requeue_of(job: Job, anchor: RmJob, beneficiary: Job, at: float, wait_seconds: float) -> CoordinatorRequeue:
    seconds = 2 * wait_seconds * 2 ** min(anchor.requeues, _MAX_DOUBLINGS)
    return CoordinatorRequeue(job, anchor, seconds, Requeue(at, _reason(job, beneficiary)))


def _reason(job: Job, beneficiary: Job) -> str:
    """Why a job's coordinator is requeued, for its user, to whom foreign jobs are not named."""
    own = beneficiary.owner.user == job.owner.user
    name = f"job {beneficiary.key.id} ({beneficiary.request.name})" if own else "another user's job"
    return (
        f"coordinators without tasks held the room that {name} needed to start; this job was among those submitted last"
    )


class _Room:
    """Room on nodes when all that leaves has left, and all running jobs have their minimum sizes."""

    def __init__(
        self,
        snapshot: Snapshot,
        anchors: Mapping[JobKey, RmJob],
        requeued: Mapping[JobKey, Requeue],
        placement: Placement,
    ) -> None:
        self._snapshot = snapshot
        self._placement = placement
        self._anchors = anchors
        self._may_use = snapshot.may_use()
        floors, kept = dict(snapshot.floors), dict[tuple[JobKey, Role], int]()
        self._free: dict[str, list[Resources]] = {}
        for task in sorted(snapshot.tasks, key=lambda task: task.number):
            group = task.group
            kept[group] = kept.get(group, 0) + task.state.wanted
            surplus = task.job in floors and kept[group] > floors[task.job].count(task.role)
            if not task.state.wanted or surplus:
                self._free.setdefault(task.node, []).append(task.room)
        for key, anchor in anchors.items():
            leaves = anchor.state is RmJobState.ENDING or key in requeued
            if leaves and anchor.state.holds_resources and anchor.node:
                self._free.setdefault(anchor.node, []).append(anchor.held)
        self._as_it_is: Packing | None = None

    def _packing(self, leaving: Sequence[Job] = ()) -> Packing:
        """The room, also without the coordinators of these jobs."""
        free = {name: list(rooms) for name, rooms in self._free.items()}
        for job in leaving:
            anchor = self._anchors[job.key]
            free.setdefault(anchor.node, []).append(anchor.held)
        nodes = [_without(node, free[node.name]) if node.name in free else node for node in self._snapshot.nodes]
        return Packing(nodes, self._placement, node_sets=self._snapshot.node_sets)

    def fits(self, job: Job, size: Allocation, leaving: Sequence[Job] = ()) -> bool:
        """Whether there is room for tasks of a job, also without the coordinators of ``leaving``."""
        if leaving:
            return self._packing(leaving).fits(job, size)
        self._as_it_is = self._as_it_is or self._packing()
        return self._as_it_is.fits(job, size)

    def coordinators_to_requeue(self, job: Job, size: Allocation, idle: Sequence[Job], rounds: int) -> list[Job]:
        """Latest idle coordinators whose room is enough for ``size``; empty if all together are not enough.

        In round n > 0 at least min(2^n, ``_MAX_PER_ROUND``). ``idle`` has the latest first.
        """
        nodes = self._may_use.get(job.key)
        usable = [each for each in idle if nodes is None or self._anchors[each.key].node in nodes]
        if not usable or not self.fits(job, size, usable):
            return []
        low, high = 0, len(usable)  # too few, enough
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(job, size, usable[:middle]) else (middle, high)
        if rounds:
            return usable[: max(high, min(2**rounds, _MAX_PER_ROUND))]
        leaving = usable[:high]
        for each in leaving[:-1][::-1][:_MAX_CHECKED]:
            others = [other for other in leaving if other is not each]
            leaving = others if self.fits(job, size, others) else leaving
        return leaving

    def returning(self, jobs: Sequence[Job]) -> tuple[tuple[JobKey, RmJob], ...]:
        """The anchors of those of the requeued jobs for which there is room with their minimum sizes, earliest first.

        None as long as one that starts again is on its way: it runs and has not reported yet, or the resource manager
        has not looked at it yet. One that waits for something else, such as a hold of its user, does not count.
        """
        waiting = [(job, self._anchors[job.key]) for job in jobs if job.key in self._anchors]
        if any(anchor.state is not RmJobState.PENDING or not anchor.reason for _, anchor in waiting):
            return ()
        packing, found = self._packing(), list[tuple[JobKey, RmJob]]()
        for job, anchor in sorted(waiting, key=lambda each: submit_order(each[0].key)):
            if not anchor.begins_later or self._snapshot.at - job.key.submitted < _MIN_QUEUED_SECONDS:
                continue
            placed, _ = packing.place_all(anchor.held, Role.COORDINATOR, 1)
            if not placed or packing.add(job, job.request.min_size) is not None:
                break
            found.append((job.key, anchor))
        return tuple(found)


def _without(node: Node, leaving: Sequence[Resources]) -> Node:
    """A node when something has left it; where nothing else is on it, it is a whole one."""
    used = node.used.minus(Resources.total(leaving))
    rest = any(amount for name, amount in used.thousandths if name != WHOLE_NODE)
    return structs.replace(node, used=used if rest else NO_RESOURCES)
