"""Guard: checks a decision and applies the site's limits to it; each change is recorded with its reason. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.errors import PolicyError
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey, JobRequest
from dl2d.core.resources import Resources
from dl2d.tick.tick_context import GuardRules


@dataclass(frozen=True, slots=True)
class ResizeHistory:
    """When each job was last resized, which the guard needs for its cool-downs."""

    #: When another allocation than the job had was last decided, seconds since 1970. A job's start counts as well.
    resized_at: Mapping[JobKey, float] = field(default_factory=dict)

    def after(self, decision: Decision, at: float) -> ResizeHistory:
        """The history after a decision was made at time ``at``, without jobs that are gone."""
        changed = {entry.job: at for entry in decision.jobs if entry.allocation != entry.previous}
        kept = {entry.job: self.resized_at[entry.job] for entry in decision.jobs if entry.job in self.resized_at}
        return ResizeHistory(kept | changed)


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
    entries = [_cool_down(entry, history.resized_at.get(entry.job), snapshot.at, rules) for entry in entries]
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
    floors = dict(snapshot.floors)
    given: dict[str, Resources] = defaultdict(Resources)
    result = []
    for entry in entries:
        job = jobs[entry.job]
        user = job.owner.user
        allocation = entry.allocation
        floor = floors.get(entry.job, NOTHING)
        while exceeded := _exceeded(given[user] + job.request.demand_of(allocation), rules.per_user):
            smaller = _smaller(job.request, allocation, floor, exceeded)
            if smaller is None:
                break
            allocation = smaller
        given[user] += job.request.demand_of(allocation)
        if allocation != entry.allocation:
            text = f"jobs of {user} may hold {rules.per_user} together"
            entry = entry.changed_by(allocation, Reason(Constraint.LIMIT, text))  # noqa: PLW2901
        result.append(entry)
    return result


def _exceeded(demand: Resources, limit: Resources) -> set[str]:
    """The resources of which a demand is more than a limit, which limits only the resources that it names."""
    return {name for name, _ in limit.thousandths} & {short.resource for short in demand.shortfalls(limit)}


def _smaller(
    request: JobRequest, allocation: Allocation, floor: Allocation, exceeded: Collection[str]
) -> Allocation | None:
    """The next smaller allocation within the job's bounds and not below its floor; None if there is none.

    Tasks of roles that need an exceeded resource are taken away, in this order:

    1. while there are more PSs than workers, a PS;
    2. as many workers as it takes to the next allowed number of workers, and with them the PSs beyond that number;
    3. if there can be no fewer workers, a PS;
    4. if there can be no fewer tasks and the job has no floor, all tasks.
    """
    if allocation == NOTHING:
        return None
    workers, ps = request.largest_allowed(allocation.workers - 1), max(request.min_ps, floor.ps)
    fewer_workers = _needs(request.worker, exceeded) and workers >= max(floor.workers, 1)
    fewer_ps = _needs(request.ps, exceeded) and allocation.ps > ps
    if fewer_ps and (allocation.ps > allocation.workers or not fewer_workers):
        return Allocation(allocation.workers, allocation.ps - 1)
    if fewer_workers:
        return Allocation(workers, min(allocation.ps, max(workers, ps)))
    return NOTHING if floor == NOTHING else None


def _needs(demand: Resources, resources: Collection[str]) -> bool:
    return any(name in resources for name, _ in demand.thousandths)


def _cool_down(entry: JobDecision, resized_at: float | None, at: float, rules: GuardRules) -> JobDecision:
    """The entry, with the job's previous allocation if the job was resized too recently. A start is never delayed.

    A resize that adds tasks of one role and removes tasks of the other has to wait for both cool-downs.
    """
    before, after = entry.previous, entry.allocation
    if resized_at is None or before == NOTHING:
        return entry
    grows = after.workers > before.workers or after.ps > before.ps
    shrinks = after.workers < before.workers or after.ps < before.ps
    elapsed = at - resized_at
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
