"""Guard: applies the site's limits to a decision; every change has its reason. Pure."""

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
from dl2d.tick.context import GuardRules


@dataclass(frozen=True, slots=True)
class LastResize:
    """When a job was last decided to grow and to shrink; seconds since 1970."""

    up: float = float("-inf")
    down: float = float("-inf")


@dataclass(frozen=True, slots=True)
class ResizeHistory:
    """When each job was last resized, which the guard needs for its cool-downs."""

    resized: Mapping[JobKey, LastResize] = field(default_factory=dict)

    def after(self, decision: Decision, at: float) -> ResizeHistory:
        """The history after a decision was carried out, without jobs that are gone."""
        resized = {}
        for decided in decision.jobs:
            last = self.resized.get(decided.job, LastResize())
            grows, shrinks = _direction(decided.previous, decided.allocation)
            resized[decided.job] = LastResize(at if grows else last.up, at if shrinks else last.down)
        return ResizeHistory(resized)


def check(decision: Decision, snapshot: Snapshot) -> None:
    """Check that a decision has one allocation within bounds for every job of the snapshot.

    Raises
    ------
    PolicyError
        It has not; names the job and the bounds.
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


def check_scores(decision: Decision) -> None:
    """Check that the scores of alternatives are finite: where they are not, a network has overflowed.

    Raises
    ------
    PolicyError
        One is not; names the job.
    """
    for entry in decision.jobs:
        if not all(math.isfinite(option.score) for option in entry.alternatives):
            raise PolicyError(f"job {entry.job.id} has an alternative whose score is no number")


def guard(
    decision: Decision,
    snapshot: Snapshot,
    rules: GuardRules,
    history: ResizeHistory,
    *,
    silent: Collection[JobKey] = (),
) -> Decision:
    """The decision after the site's rules were applied, each change with its reason.

    In this order: jobs whose coordinator is silent stay as they are, limits per user, cool-downs, churn.
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
    held: dict[str, Resources] = defaultdict(Resources)
    result = []
    for entry in entries:
        job = jobs[entry.job]
        user = job.owner.user
        allocation = entry.allocation
        floor = floors.get(entry.job, NOTHING)
        while not _within(held[user] + job.request.demand_of(allocation), rules.per_user, limited):
            smaller = _smaller(job, allocation, floor)
            if smaller is None:
                break
            allocation = smaller
        held[user] += job.request.demand_of(allocation)
        if allocation != entry.allocation:
            text = f"jobs of {user} may hold {rules.per_user} together"
            entry = entry.changed_by(allocation, Reason(Constraint.LIMIT, text))  # noqa: PLW2901
        result.append(entry)
    return result


def _within(demand: Resources, limit: Resources, limited: set[str]) -> bool:
    return all(short.resource not in limited for short in demand.shortfalls(limit))


def _smaller(job: Job, allocation: Allocation, floor: Allocation) -> Allocation | None:
    """One step down towards the floor; None where there is no step left."""
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
    recent = max(last.up, last.down)
    for wanted, seconds, word in ((grows, rules.cooldown_up, "grow"), (shrinks, rules.cooldown_down, "shrink")):
        if wanted and at - recent < seconds:
            text = f"was resized {at - recent:.0f} s ago and may {word} again after {seconds:g} s"
            return entry.changed_by(entry.previous, Reason(Constraint.COOLDOWN, text))
    return entry


def _limit_churn(entries: list[JobDecision], rules: GuardRules) -> list[JobDecision]:
    if rules.churn <= 0:
        return entries
    left = rules.churn
    result = []
    for entry in entries:
        adds = max(entry.allocation.workers - entry.previous.workers, 0) + max(
            entry.allocation.ps - entry.previous.ps, 0
        )
        if adds > left and entry.previous != NOTHING:
            text = f"this interval's {rules.churn} starts are used up"
            entry = entry.changed_by(entry.previous, Reason(Constraint.CHURN, text))  # noqa: PLW2901
        elif adds > left and left < rules.churn:
            # A job that has nothing yet waits, unless its first bundle alone is more than a whole interval's starts.
            text = f"this interval's {rules.churn} starts are used up"
            entry = entry.changed_by(NOTHING, Reason(Constraint.CHURN, text))  # noqa: PLW2901
        else:
            left = max(left - adds, 0)
        result.append(entry)
    return result


def _direction(before: Allocation, after: Allocation) -> tuple[bool, bool]:
    grows = after.workers > before.workers or after.ps > before.ps
    shrinks = after.workers < before.workers or after.ps < before.ps
    return grows, shrinks
