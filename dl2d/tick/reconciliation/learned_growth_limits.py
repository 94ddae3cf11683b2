"""Limits of the resource manager that it does not list, learned from tasks that waited for them.

A task that waits for such a limit is withdrawn. The limit is remembered, and for a while the jobs that it covers do not
grow beyond it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dl2d.core.backoff_after_failed_starts import doubled
from dl2d.core.cluster import Task
from dl2d.core.jobs import Job, JobKey
from dl2d.core.resize_guard_state import GuardState, LearnedLimit
from dl2d.core.resource_manager import GrowthLimit, RmJob
from dl2d.core.resources import Resources

#: How long the jobs that wait for a limit do not grow; doubled each time that they are found waiting again, up to the
#: maximum. If they had more than the last time, the limit is not constant: the time is then doubled this often at most.
_LIMIT_SECONDS = 60.0
_MAX_LIMIT_SECONDS = 3600.0
_MAX_TIMES_AFTER_GROWTH = 4
#: How long a limit is remembered after the jobs may grow again.
_FORGET_SECONDS = 600.0


def _retry_at(limit: LearnedLimit) -> float:
    """When the jobs of a limit may grow again, seconds since 1970."""
    return limit.at + doubled(_LIMIT_SECONDS, limit.times, _MAX_LIMIT_SECONDS)


def remember_growth_limits(
    guard_state: GuardState, jobs: Sequence[Job], tasks: Sequence[Task], withdrawn: Mapping[str, RmJob], at: float
) -> GuardState:
    """Guard state with the limits for which the tasks waited that this tick withdraws.

    ``withdrawn`` as ``withdrawn_tasks`` has it. Limits of which no job is among the live ones, ``jobs``, are dropped.
    """
    anchors = {job.key: job.anchor for job in jobs}
    found: dict[str, GrowthLimit] = {}
    for task in tasks if withdrawn else ():
        limit = withdrawn[task.tag].limit if task.tag in withdrawn else None
        if limit is not None:
            known = found.get(limit.reason, limit)
            found[limit.reason] = replace(known, anchors=known.anchors | {anchors[task.job]})
    return replace(guard_state, learned_limits=_learned_limits(guard_state.learned_limits, found, jobs, tasks, at))


def _learned_limits(
    known: Mapping[str, LearnedLimit],
    found: Mapping[str, GrowthLimit],
    jobs: Iterable[Job],
    tasks: Iterable[Task],
    at: float,
) -> dict[str, LearnedLimit]:
    anchors = {job.anchor: job.key for job in jobs if job.anchor}
    running: dict[JobKey, list[Resources]] = defaultdict(list)
    for task in tasks if found else ():
        if task.has_begun and task.state.wanted:
            running[task.job].append(task.demand)
    learned = {
        reason: limit._replace(at=min(limit.at, at))
        for reason, limit in known.items()
        if at < _retry_at(limit) + _FORGET_SECONDS and anchors.keys() & limit.anchors
    }
    for reason, limit in found.items():
        members = sorted(limit.anchors & anchors.keys())
        holds = Resources.total(demand for anchor in members for demand in running[anchors[anchor]])
        had = {name: holds.get(name) + left for name, left in limit.left.items()}
        times = learned[reason].times + 1 if reason in learned else 1
        if reason in learned and any(amount > learned[reason].had.get(name, 0.0) for name, amount in had.items()):
            times = min(times, _MAX_TIMES_AFTER_GROWTH)
        learned[reason] = LearnedLimit(tuple(members), had, times, at)
    return learned


def growth_limits_in_force(
    guard_state: GuardState, jobs: Iterable[Job], tasks: Iterable[Task], at: float
) -> tuple[GrowthLimit, ...]:
    """The limits that hold at this time since tasks were found to wait for them a short while ago."""
    active = {reason: limit for reason, limit in guard_state.learned_limits.items() if at < _retry_at(limit)}
    if not active:
        return ()
    keys = {job.key: job.anchor for job in jobs}
    running: dict[str, list[Resources]] = defaultdict(list)
    for task in tasks:
        if task.has_begun and task.job in keys:
            running[keys[task.job]].append(task.demand)
    limits = []
    for reason, limit in active.items():
        holds = Resources.total(demand for anchor in limit.anchors for demand in running[anchor])
        # Negative where they hold more by now: withdrawn tasks that have not ended count as well.
        left = {name: had - holds.get(name) for name, had in limit.had.items()}
        limits.append(GrowthLimit(frozenset(limit.anchors), left, reason))
    return tuple(limits)
