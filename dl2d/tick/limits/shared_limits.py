"""Limits on what jobs hold together, for policies and the guard: the site's and the resource manager's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dl2d.core.cluster import SharedLimit, Snapshot, Task
from dl2d.core.jobs import Allocation, Job, JobKey, Owner
from dl2d.core.packing.room_in_limits import amounts_of_size, amounts_with_tasks
from dl2d.core.resource_manager import GrowthLimit
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.tick.tick_context import GuardRules


def left_by_site_limits(snapshot: Snapshot, rules: GuardRules) -> list[GrowthLimit]:
    """What the site's limits leave the jobs besides what they have."""
    limits, found = site_limits(owners_of(snapshot), rules), []
    held, by_key = (snapshot.held(), {job.key: job for job in snapshot.jobs}) if limits else ({}, {})
    for limit in limits:
        jobs = [by_key[key] for key in limit.jobs]
        has = Resources.total(job.request.demand_of(held[job.key]) for job in jobs)
        left = {name: most / 1000 - has.get(name) for name, most in limit.most}
        found.append(GrowthLimit(frozenset(job.anchor for job in jobs), left, limit.text, enforced=False))
    return found


def limits_for_policies(
    snapshot: Snapshot, rules: GuardRules, growth_limits: Collection[GrowthLimit], *, silent: Collection[JobKey] = ()
) -> tuple[SharedLimit, ...]:
    """The limits of the jobs of a snapshot as a policy sees them (``Snapshot.limits``).

    Jobs whose coordinator is ``silent`` are in none: they keep what they have, and the others have the remainder.

    If the jobs of a limit of the resource manager have more than it allows by now, the limit is cut into one bound for
    each job: the larger of what the job has and its minimum size. Which of them yield to others is then decided by the
    guard. The bound of a job that has nothing is its minimum size if the limit has room for that beside the minimum
    sizes of the jobs before it and of those that have tasks; otherwise 0.
    """
    limits = site_limits(owners_of(snapshot), rules)
    of_manager = manager_limits(snapshot, growth_limits)
    if not limits and not of_manager:
        return ()
    held = snapshot.held()
    by_key = {job.key: job for job in snapshot.jobs}
    has = {key: _with_tasks(job, held[key]) for key, job in by_key.items()}
    for limit in of_manager:
        together = dict(Resources.total(has[key] for key in limit.jobs).thousandths)
        excess = {name for name, amount in limit.most if together.get(name, 0) > max(amount, 0)}
        if not excess:
            limits.append(limit)
            continue
        if len(excess) < len(limit.most):
            limits.append(replace(limit, most=tuple(bound for bound in limit.most if bound[0] not in excess)))
        # What the limit leaves for minimum sizes of jobs that have nothing, beside what the others keep for certain.
        smallest = {key: _with_tasks(by_key[key], by_key[key].request.min_size) for key in limit.jobs}
        names = [name for name, _ in limit.most]
        kept = Resources.total(has[key].minimum(smallest[key]) for key in limit.jobs).in_order(names)
        spare = [most - amount for (_, most), amount in zip(limit.most, kept, strict=True)]
        for key in limit.jobs:
            most = has[key].maximum(smallest[key])
            if has[key] == NO_RESOURCES:
                needed = smallest[key].in_order(names)
                if all(amount <= max(left, 0) for amount, left in zip(needed, spare, strict=True)):
                    spare = [left - amount for amount, left in zip(needed, spare, strict=True)]
                else:
                    most = NO_RESOURCES
            order = sorted(excess)
            limits.append(SharedLimit((key,), tuple(zip(order, most.in_order(order), strict=True)), limit.text))
    return tuple(without_jobs(limits, {key: has[key] for key in silent if key in has}))


def without_jobs(limits: Iterable[SharedLimit], kept: Mapping[JobKey, Resources]) -> Iterator[SharedLimit]:
    """The limits for the other jobs, where some hold what they keep; without limits that no other job is in."""
    for limit in limits:
        theirs = dict(Resources.total(kept[job] for job in limit.jobs if job in kept).thousandths)
        others = tuple(job for job in limit.jobs if job not in kept)
        if others:
            most = tuple((name, amount - theirs.get(name, 0)) for name, amount in limit.most)
            yield replace(limit, jobs=others, most=most)


def site_limits(owners: Mapping[JobKey, Owner], rules: GuardRules) -> list[SharedLimit]:
    """The site's limits on jobs with these owners: those of users first, and those of partitions last."""
    scopes: tuple[tuple[str, Resources, Callable[[Owner], Sequence[str]]], ...] = (
        ("of", rules.per_user, lambda owner: [owner.user]),
        ("of account", rules.per_account, lambda owner: [owner.account]),
        # The tasks of a job may run in several partitions.
        ("in partition", rules.per_partition, lambda owner: owner.partition.split(",")),
    )
    found = []
    for words, limit, names_of in scopes:
        members: dict[str, list[JobKey]] = defaultdict(list)
        for key, owner in owners.items() if limit.thousandths else ():
            for name in filter(None, names_of(owner)):
                members[name].append(key)
        found += [
            SharedLimit(tuple(keys), limit.thousandths, f"jobs {words} {name} may hold {limit} together")
            for name, keys in members.items()
        ]
    return found


def owners_of(snapshot: Snapshot) -> dict[JobKey, Owner]:
    """The owner of each job of a snapshot."""
    return {job.key: job.owner for job in snapshot.jobs}


def manager_limits(snapshot: Snapshot, growth_limits: Collection[GrowthLimit]) -> list[SharedLimit]:
    """The resource manager's limits: what their jobs have, and what is left to them besides.

    Tasks that do not run yet count as growth. The jobs may have more than a limit allows by now.
    """
    if not growth_limits:
        return []
    by_anchor = {job.anchor: (number, job.key) for number, job in enumerate(snapshot.jobs)}
    tasks_of: dict[JobKey, list[Task]] = defaultdict(list)
    for task in snapshot.tasks:
        tasks_of[task.job].append(task)
    limits = []
    for limit in growth_limits:
        members = [key for _, key in sorted(by_anchor[anchor] for anchor in limit.anchors & by_anchor.keys())]
        tasks = [task for key in members for task in tasks_of[key]]
        running = [task.demand for task in tasks if task.has_begun]
        runs = dict(amounts_with_tasks(Resources.total(running), len(running)))
        allowed = [(name, runs.get(name, 0) + round(1000 * left)) for name, left in sorted(limit.left.items())]
        if members:
            limits.append(SharedLimit(tuple(members), tuple(allowed), limit.reason, limit.makes_room_for))
    return limits


def _with_tasks(job: Job, size: Allocation) -> Resources:
    """What a job of this size takes of limits, the number of its tasks included."""
    return Resources(tuple(sorted(entry for entry in amounts_of_size(job.request, size) if entry[1])))
