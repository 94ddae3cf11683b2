"""Guard: checks a decision and applies the site's limits to it; each change is recorded with its reason. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.errors import PolicyError
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey
from dl2d.core.resources import Resources
from dl2d.tick.tick_context import GuardRules


@dataclass(frozen=True, slots=True)
class LastResize:
    """When a job was last resized; seconds since 1970."""

    #: When it was last decided to grow.
    up: float = float("-inf")
    #: When it was last decided to shrink.
    down: float = float("-inf")


@dataclass(frozen=True, slots=True)
class ResizeHistory:
    """When each job was last resized, which the guard needs for its cool-downs."""

    resized: Mapping[JobKey, LastResize] = field(default_factory=dict)

    def after(self, decision: Decision, at: float) -> ResizeHistory:
        """The history after a decision was carried out at time ``at``, without jobs that are gone."""
        resized = {}
        for decided in decision.jobs:
            last = self.resized.get(decided.job, LastResize())
            grows, shrinks = _direction(decided.previous, decided.allocation)
            resized[decided.job] = LastResize(at if grows else last.up, at if shrinks else last.down)
        return ResizeHistory(resized)


def check_decision(decision: Decision, snapshot: Snapshot) -> None:
    """Check that a decision has one allocation within bounds for every job of the snapshot, and finite scores.

    Scores that are not finite mean that the numbers of a learned policy have overflowed.

    Raises
    ------
    PolicyError
        The decision is not valid; names the job and what it may have.
    """
    decided = {entry.job: entry.allocation for entry in decision.jobs}
    if len(decided) != len(decision.jobs) or decided.keys() != {job.key for job in snapshot.jobs}:
        raise PolicyError(f"policy {decision.policy} did not decide for every job exactly once")
    floors = dict(snapshot.floors)
    for job in snapshot.jobs:
        workers, ps = decided[job.key]
        request, floor = job.request, floors.get(job.key, NOTHING)
        in_bounds = (request.allows(workers) and request.min_ps <= ps <= request.max_ps) or (workers, ps) == NOTHING
        if not in_bounds or workers < floor.workers or ps < floor.ps:
            raise PolicyError(
                f"policy {decision.policy} gave job {job.key.id} {decided[job.key]}; it may have "
                f"{request.min_workers} to {request.max_workers} workers, {request.min_ps} to {request.max_ps} PSs "
                f"and not less than {floor}"
            )
    for entry in decision.jobs:
        for alternative in entry.alternatives:
            if not math.isfinite(alternative.score):
                raise PolicyError(
                    f"policy {decision.policy} gave job {entry.job.id} an alternative {alternative.allocation} "
                    f"with score {alternative.score}, which is not a finite number"
                )


def guard(
    decision: Decision,
    snapshot: Snapshot,
    rules: GuardRules,
    history: ResizeHistory,
    *,
    silent: Collection[JobKey] = (),
) -> Decision:
    """The decision after the site's rules were applied.

    The rules are, in this order: jobs whose coordinator is ``silent`` keep their allocation; limits per user;
    cool-downs; churn.
    """
    jobs = {job.key: job for job in snapshot.jobs}
    entries = [
        _keep_silent(entry, jobs[entry.job], snapshot.at) if entry.job in silent else entry for entry in decision.jobs
    ]
    entries = _limit_users(entries, jobs, snapshot, rules)
    entries = [_cool_down(entry, history.resized.get(entry.job), snapshot.at, rules) for entry in entries]
    entries = _limit_churn(entries, rules)
    return replace(decision, jobs=tuple(entries))


def _keep_silent(entry: JobDecision, job: Job, at: float) -> JobDecision:
    if entry.allocation == entry.previous:
        return entry
    text = f"coordinator silent for {at - job.progress.at:.0f} s: allocation unchanged until it reports again"
    return entry.changed_by(entry.previous, Reason(Constraint.SILENT, text))


def _limit_users(
    entries: list[JobDecision], jobs: Mapping[JobKey, Job], snapshot: Snapshot, rules: GuardRules
) -> list[JobDecision]:
    if not rules.per_user.thousandths:
        return entries
    limited = {name for name, _ in rules.per_user.thousandths}
    floors = dict(snapshot.floors)
    given: dict[str, Resources] = defaultdict(Resources)
    result = []
    for entry in entries:
        job = jobs[entry.job]
        user = job.owner.user
        allocation = entry.allocation
        floor = floors.get(entry.job, NOTHING)
        while not _within(given[user] + job.request.demand_of(allocation), rules.per_user, limited):
            smaller = _smaller(job, allocation, floor)
            if smaller is None:
                break
            allocation = smaller
        given[user] += job.request.demand_of(allocation)
        if allocation != entry.allocation:
            text = f"jobs of {user} may hold {rules.per_user} together"
            entry = entry.changed_by(allocation, Reason(Constraint.LIMIT, text))  # noqa: PLW2901
        result.append(entry)
    return result


def _within(demand: Resources, limit: Resources, limited: set[str]) -> bool:
    return all(short.resource not in limited for short in demand.shortfalls(limit))


def _smaller(job: Job, allocation: Allocation, floor: Allocation) -> Allocation | None:
    """The next smaller allocation that the job may have; None if there is none above its floor."""
    request = job.request
    workers = request.largest_allowed(allocation.workers - 1)
    ps = min(allocation.ps, max(workers, request.min_ps, floor.ps))
    if workers < max(floor.workers, 1):
        return NOTHING if floor == NOTHING and allocation != NOTHING else None
    return Allocation(workers, ps)


def _cool_down(entry: JobDecision, last: LastResize | None, at: float, rules: GuardRules) -> JobDecision:
    if last is None or entry.previous == NOTHING:
        return entry
    grows, shrinks = _direction(entry.previous, entry.allocation)
    elapsed = at - max(last.up, last.down)
    for applies, seconds, verb in ((grows, rules.cooldown_up, "grow"), (shrinks, rules.cooldown_down, "shrink")):
        if applies and elapsed < seconds:
            text = f"was resized {elapsed:.0f} s ago and may {verb} again after {seconds:g} s"
            return entry.changed_by(entry.previous, Reason(Constraint.COOLDOWN, text))
    return entry


def _limit_churn(entries: list[JobDecision], rules: GuardRules) -> list[JobDecision]:
    if rules.churn <= 0:
        return entries
    reason = Reason(Constraint.CHURN, f"this slot's {rules.churn} starts are used up")
    starts_left = rules.churn
    result = []
    for entry in entries:
        allocation, previous = entry.allocation, entry.previous
        starts = max(allocation.workers - previous.workers, 0) + max(allocation.ps - previous.ps, 0)
        # A job that has nothing may exceed the number if it is the first of the slot: it might never start otherwise.
        if starts > starts_left and (previous != NOTHING or starts_left < rules.churn):
            result.append(entry.changed_by(previous, reason))
        else:
            starts_left = max(starts_left - starts, 0)
            result.append(entry)
    return result


def _direction(before: Allocation, after: Allocation) -> tuple[bool, bool]:
    """Whether a resize adds tasks of a role, and whether it removes tasks of a role; it may do both."""
    grows = after.workers > before.workers or after.ps > before.ps
    shrinks = after.workers < before.workers or after.ps < before.ps
    return grows, shrinks
