"""Long-waiting jobs: while a job has waited for too long, jobs submitted later that have no tasks get none.

Room for a job whose minimum size is large becomes free little by little. Most policies give it at once to jobs that
need less, and while such jobs keep coming, the large one never starts. So when a job has waited for
``guard.hold_back_after_seconds``, later jobs that have no tasks and may use some of the same nodes are held back:

- Jobs that run keep their minimum sizes, and policies may give them the room that is free until then.
- When the long-waiting job has room, later jobs that have room beside it are not held back any more.
- Jobs are held back only in the first half of each doubling of that time (with 24 hours: from hour 24 to 36, 48 to 72,
  96 to 144 ...), and only if the long-waiting job is expected to have room by the end of that period. Otherwise a job
  that runs for days would keep the remainder of the cluster idle. Since the periods grow, one of them is in the end
  longer than all jobs that run at its beginning still take, and the long-waiting job gets its tasks. Then its period
  lasts until it trains.
- A running job is expected to run for as long again as it has run, or until its steps are done by its last report,
  whichever is later. (Reports alone would not do: some scripts cannot say how many steps are left, and a user could
  let others wait by false ones.) So no job waits for one that began to run before the long-waiting job was submitted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from msgspec import structs

from dl2d.core.cluster import HeldBack, Snapshot
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey, JobState
from dl2d.core.packing.bin_packing import JobDemand, Packing, job_demand
from dl2d.core.placement import Placement

#: Maximum number of different demands of jobs that have waited for too long for which it is examined when they have
#: room, the longest waiting first.
_MAX_EXAMINED = 4
#: Maximum number of later jobs for which it is examined whether they have room beside that job.
_MAX_LATER_EXAMINED = 256


def held_back(
    snapshot: Snapshot, placement: Placement, *, after_seconds: float, unable: Collection[JobKey]
) -> HeldBack | None:
    """The jobs that are held back, and the one that has waited for too long; None if none is held back.

    Parameters
    ----------
    after_seconds
        For how long a job waits before others are held back; 0: they never are.
    unable
        Jobs of which no task would start: their coordinators are silent, or they wait after failed attempts.
    """
    if not after_seconds:
        return None
    held = snapshot.held()
    waiting = [job for job in snapshot.jobs if not job.static and _waits(job, held[job.key]) and job.key not in unable]
    due = [
        (job, end)
        for job in waiting
        if (end := _period_end(job, snapshot.at, after_seconds)) > snapshot.at
        or (held[job.key] != NOTHING and snapshot.at >= job.key.submitted + after_seconds)
    ]
    # In most decisions no job is due: then nothing is packed.
    long_waiting = _first_with_room(due, snapshot, placement) if due else None
    if long_waiting is None:
        return None
    sets, every = snapshot.may_use(), frozenset(node.name for node in snapshot.nodes)
    nodes = sets.get(long_waiting.key, every)
    after_it = snapshot.jobs[snapshot.jobs.index(long_waiting) + 1 :]
    later = [
        job
        for job in after_it
        if held[job.key] == NOTHING and not job.static and job.key not in unable
        if not nodes.isdisjoint(sets.get(job.key, every))
    ]  # fmt: skip
    packing = _beside_floors(snapshot, placement)
    if later and packing.add(long_waiting, long_waiting.request.min_size) is None:
        beside = {job.key for job in later[:_MAX_LATER_EXAMINED] if packing.add(job, job.request.min_size) is None}
        later = [job for job in later if job.key not in beside]
    return HeldBack(long_waiting.key, tuple(job.key for job in later)) if later else None


def without_held_back(snapshot: Snapshot) -> Snapshot:
    """The snapshot for policies: without the jobs that are held back."""
    if snapshot.held_back is None:
        return snapshot
    later = frozenset(snapshot.held_back.jobs)
    return structs.replace(snapshot, jobs=tuple(job for job in snapshot.jobs if job.key not in later), held_back=None)


def with_held_back(decision: Decision, snapshot: Snapshot) -> Decision:
    """The decision on the jobs of ``without_held_back``, and nothing for those that are held back."""
    if snapshot.held_back is None:
        return decision
    key = snapshot.held_back.long_waiting
    job = next(job for job in snapshot.jobs if job.key == key)
    text = (
        f"waits until job {key.id} ({job.request.name}), which was submitted earlier, has started: that has waited for "
        f"its minimum size of {job.request.min_size} for {(snapshot.at - key.submitted) / 3600:.1f} h"
    )
    reason = Reason(Constraint.HELD_BACK, text)
    entries = {entry.job: entry for entry in decision.jobs}
    for later in snapshot.held_back.jobs:
        entries[later] = JobDecision(later, NOTHING, reason, guarded=(reason,))
    return replace(decision, jobs=tuple(entries[job.key] for job in snapshot.jobs))


def jobs_held_back(decision: Decision) -> frozenset[JobKey]:
    """The jobs that a decision gives nothing since they are held back."""
    return frozenset(entry.job for entry in decision.jobs if entry.reason.constraint is Constraint.HELD_BACK)


def _waits(job: Job, held: Allocation) -> bool:
    """Whether a job has no tasks, or has not trained with the first ones: until it does, policies may take these away.

    Where running jobs have no floors (the simulator's default), they stay ``ready`` while they train.
    """
    return job.state is JobState.READY and (held == NOTHING or not job.progress.epoch)


def _period_end(job: Job, at: float, after_seconds: float) -> float:
    """When the period ends in which others are held back for a job; ``at`` or earlier if there is none now."""
    waited = (at - job.key.submitted) / after_seconds
    if waited < 1:
        return at
    doubling: float = 2.0 ** (math.frexp(waited)[1] - 1)
    return job.key.submitted + 1.5 * doubling * after_seconds


def _first_with_room(due: Iterable[tuple[Job, float]], snapshot: Snapshot, placement: Placement) -> Job | None:
    """The first of the jobs, each with the end of its period, whose minimum size is expected to fit by then.

    It has to fit beside running jobs that are expected to run for longer, jobs of others and what is kept free for
    these, and in its limits. Of equal demands the longest waiting is examined.
    """
    may_use, examined = snapshot.may_use(), set[JobDemand]()
    empty = Packing.for_decision(snapshot.nodes, snapshot.tasks, placement, snapshot.node_sets, snapshot.limits)
    for job, end in due:
        size = job.request.min_size
        demand = job_demand(job.request, size, may_use.get(job.key))
        if demand in examined or not empty.fits(job, size):
            continue
        if _beside_floors(snapshot, placement, running_after=end).fits(job, size):
            return job
        examined.add(demand)
        if len(examined) == _MAX_EXAMINED:
            break
    return None


def _beside_floors(snapshot: Snapshot, placement: Placement, *, running_after: float = -math.inf) -> Packing:
    """A packing with the floors of jobs that are expected to run after that time."""
    packing = Packing.for_decision(snapshot.nodes, snapshot.tasks, placement, snapshot.node_sets, snapshot.limits)
    floors = dict(snapshot.floors)
    for job in snapshot.jobs:
        if job.key in floors and _expected_end(job, snapshot.at) > running_after:
            packing.add(job, floors[job.key], beyond_limits=True)
    return packing


def _expected_end(job: Job, at: float) -> float:
    """When a job that runs is expected to end: after as long again as it has run, or when its steps are done."""
    progress, began = job.progress, job.key.submitted if job.started_at is None else job.started_at
    expected = at + max(at - began, 0.0)
    if progress.total_versions is None or not progress.steps_per_second:
        return expected
    return max(expected, progress.at + (progress.total_versions - progress.version) / progress.steps_per_second)
