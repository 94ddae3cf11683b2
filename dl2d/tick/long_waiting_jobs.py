"""Long-waiting jobs: later jobs are held back until one that has waited for too long has started. Pure.

Room for a job whose minimum size is large becomes free little by little. Most policies give it at once to jobs that
need less, and while such jobs keep coming, the large one never starts. When a job has waited for
``guard.hold_back_after_seconds`` and nothing but elastic jobs stands in its way, those submitted after it that have no
tasks are therefore not given any, if they may use some of the same nodes. Jobs that run keep their minimum sizes, and
may use the free room meanwhile. Once the job has room, later ones start if they have room beside it.

A job that runs for days may keep the room occupied for as long. Hence the others are held back only in the first half
of each doubling of that time (with 24 hours: from hour 24 to 36, 48 to 72, 96 to 144 ...), and only if the room is
expected to be free by the end of that period. Since the periods grow, one of them is in the end longer than all jobs
that run at its beginning still take, and the job gets its tasks; then its period lasts until it trains. The end of a
job follows from the steps that it has left and its speed, as its coordinator reported them; where it did not, the job
counts as ending in time.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from dl2d.core.cluster import HeldBack, Snapshot
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey, JobState
from dl2d.core.packing import Packing
from dl2d.core.placement import Placement

#: Maximum number of jobs of which one may hold others back in a decision, the longest waiting first; and of later jobs
#: that are let through beside it.
MAX_FIRST: Final = 4
MAX_LATER: Final = 256


def held_back(
    snapshot: Snapshot, placement: Placement, *, after_seconds: float, unable: Collection[JobKey]
) -> HeldBack | None:
    """The jobs that are held back, and the one that has waited for too long; None if there is none.

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
    first = next((job for job, end in due[:MAX_FIRST] if _fits(job, snapshot, placement, running_after=end)), None)
    if first is None:
        return None
    sets, every = snapshot.may_use(), frozenset(node.name for node in snapshot.nodes)
    nodes = sets.get(first.key, every)
    after_first = snapshot.jobs[snapshot.jobs.index(first) + 1 :]
    later = [
        job
        for job in after_first
        if held[job.key] == NOTHING and not job.static and not nodes.isdisjoint(sets.get(job.key, every))
    ]
    packing = _beside_floors(snapshot, placement)
    if later and packing.add(first, first.request.min_size) is None:
        beside = {job.key for job in later[:MAX_LATER] if packing.add(job, job.request.min_size) is None}
        later = [job for job in later if job.key not in beside]
    return HeldBack(first.key, tuple(job.key for job in later)) if later else None


def without_held_back(snapshot: Snapshot) -> Snapshot:
    """The snapshot for policies: without the jobs that are held back."""
    if snapshot.held_back is None:
        return snapshot
    later = frozenset(snapshot.held_back.jobs)
    return replace(snapshot, jobs=tuple(job for job in snapshot.jobs if job.key not in later), held_back=None)


def with_held_back(decision: Decision, snapshot: Snapshot) -> Decision:
    """The decision on the jobs of ``without_held_back``, and nothing for those that are held back."""
    if snapshot.held_back is None:
        return decision
    first = next(job for job in snapshot.jobs if job.key == snapshot.held_back.first)
    text = (
        f"waits until {first.key.id} ({first.request.name}) has started, which has waited for {first.request.min_size} "
        f"for {(snapshot.at - first.key.submitted) / 3600:.1f} h"
    )
    reason = Reason(Constraint.QUEUE, text)
    entries = {entry.job: entry for entry in decision.jobs}
    for key in snapshot.held_back.jobs:
        entries[key] = JobDecision(key, NOTHING, reason, guarded=(reason,))
    return replace(decision, jobs=tuple(entries[job.key] for job in snapshot.jobs))


def jobs_held_back(decision: Decision) -> frozenset[JobKey]:
    """The jobs that a decision gives nothing since they are held back."""
    return frozenset(
        entry.job for entry in decision.jobs if any(reason.constraint is Constraint.QUEUE for reason in entry.guarded)
    )


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


def _fits(job: Job, snapshot: Snapshot, placement: Placement, *, running_after: float) -> bool:
    """Whether the minimum size of a job fits beside jobs that are expected to run after that time.

    Room in limits counts as well. Jobs of others, and what is kept free for these, keep their room.
    """
    return _beside_floors(snapshot, placement, running_after=running_after).fits(job, job.request.min_size)


def _beside_floors(snapshot: Snapshot, placement: Placement, *, running_after: float = -math.inf) -> Packing:
    """A packing with the floors of jobs that are expected to run after that time."""
    packing = Packing.for_decision(snapshot.nodes, snapshot.tasks, placement, snapshot.node_sets, snapshot.limits)
    floors = dict(snapshot.floors)
    for job in snapshot.jobs:
        if job.key in floors and _expected_end(job) > running_after:
            packing.add(job, floors[job.key], beyond_limits=True)
    return packing


def _expected_end(job: Job) -> float:
    """When a job that runs ends, by its last report; the time of this report where that does not say."""
    progress = job.progress
    if progress.total_versions is None or not progress.steps_per_second:
        return progress.at
    return progress.at + (progress.total_versions - progress.version) / progress.steps_per_second
