"""Deferring starts: limits have no room for them yet, the job is in back-off, or no more may be submitted now.

The limits are the site's and those of the resource manager that it does not enforce. The guard limits what is decided.
Tasks that leave still hold what they have, and a task that is moved runs beside its replacement for a while. Starts for
which the resource manager is not to be asked yet are deferred as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from dl2d.core.cluster import Snapshot, TaskGroup, task_tag
from dl2d.core.jobs import NOTHING, TASK_ROLES, Allocation, JobKey, Owner
from dl2d.core.packing.room_in_limits import LimitRoom
from dl2d.core.plan_of_starts_and_stops import Deferred, Plan, Start, Stop
from dl2d.core.resource_manager import GrowthLimit, StartAllowance
from dl2d.core.resources import Resources, Shortfall
from dl2d.tick.limits.shared_limits import manager_limits, site_limits
from dl2d.tick.tick_context import GuardRules

#: Why a start waits until another task of its job and role has left.
_LEAVES_FIRST = (
    "waits until a task of its job and role that is leaving has ended: a limit, or the time after failed starts, "
    "allows no further task now"
)
#: Why a start of a job that has nothing waits although no task of its role is leaving.
_STARTS_WHOLE = "waits for the other tasks of its job's smallest size"


def groups_without_replacement(
    snapshot: Snapshot, backing_off: Collection[JobKey], growth_limits: Iterable[GrowthLimit]
) -> frozenset[TaskGroup]:
    """Jobs and roles of which no task is to be moved, since its replacement would not start.

    The job is ``backing_off``, or a limit that the resource manager enforces leaves too little for a task. In other
    limits the replacement of a task of a floor starts (``within_limits``).
    """
    found = {(key, role) for key in backing_off for role in TASK_ROLES}
    jobs = {job.anchor: job for job in snapshot.jobs}
    for limit in (limit for limit in growth_limits if limit.enforced):
        for job in [jobs[handle] for handle in limit.anchors & jobs.keys()]:
            found |= {(job.key, role) for role in TASK_ROLES if not limit.allows(job.request.demand(role), 1)}
    return frozenset(found)


def within_limits(
    plan: Plan,
    snapshot: Snapshot,
    owners: Mapping[JobKey, Owner],
    rules: GuardRules,
    without_replacement: Collection[TaskGroup] = (),
    growth_limits: Iterable[GrowthLimit] = (),
) -> Plan:
    """The plan without the starts that have no room in a limit now; they are deferred, as those without room on a node.

    ===================================================================  ========================================
    start for which a limit has no room                                  what becomes of it
    ===================================================================  ========================================
    new task up to the floor of a running job                            starts
    new tasks of the minimum size of a job that has nothing              deferred together, with all of the job
    other new task                                                       deferred
    replacement of a task of the floor that reaches its time limit or    starts, one of each job and role at a
    leaves a claimed node                                                time; the other tasks stay
    replacement of a task beyond the floor that reaches its time limit   the task stops
    other replacement                                                    the task stays
    ===================================================================  ========================================

    ``owners`` are those of the jobs of all tasks in the snapshot. Of the resource manager's ``growth_limits`` those
    count that it does not enforce. No task of a job and role in ``without_replacement`` starts while another one of it
    is leaving.
    """
    waiting = _behind_leaving_tasks(plan, snapshot, without_replacement)
    plan = _without(plan, waiting) if waiting else plan
    not_enforced = [limit for limit in growth_limits if not limit.enforced]
    limits = [*site_limits(owners, rules), *manager_limits(snapshot, not_enforced)] if plan.starts else []
    if not limits:
        return plan
    room = LimitRoom(limits)
    for task in snapshot.tasks:
        room.take_tasks(task.job, task.demand, 1)
    requests, floors, held = {job.key: job.request for job in snapshot.jobs}, dict(snapshot.floors), snapshot.held()
    replaced = _floor_tasks_replaced(plan, snapshot)
    by_job: dict[JobKey, list[int]] = defaultdict(list)
    for index, start in enumerate(plan.starts):
        by_job[start.job].append(index)
    deferred: dict[int, _Lack] = {}
    for key, indices in by_job.items():
        has, floor = held[key], floors.get(key, NOTHING)
        first = requests[key].min_size if has == NOTHING else None
        present = Counter({role: has.count(role) for role in TASK_ROLES})
        for unit in _units(plan.starts, indices, first):
            role = plan.starts[unit[0]].role
            demand = Resources.total(plan.starts[index].demand for index in unit)
            blocked = room.blocked_task(key, demand, role)
            below_floor = has != NOTHING and present[role] < floor.count(role)
            if blocked is not None and not below_floor and replaced.isdisjoint(unit):
                lack = _Lack(blocked.limit, blocked.shortfalls)
                deferred |= dict.fromkeys(unit, lack)
                if has == NOTHING and unit[0] == indices[0]:  # not even its minimum size
                    deferred |= dict.fromkeys(indices, lack)
                    break
                continue
            room.take_tasks(key, demand, 1)
            present[role] += len(unit)
    return _with_expiring_stopped(plan, _without(plan, deferred), snapshot) if deferred else plan


def within_allowance(plan: Plan, allowance: StartAllowance) -> Plan:
    """The plan with no more starts than may be submitted now, those of moved tasks first; the others are deferred."""
    late = (*range(plan.first_replacement, len(plan.starts)), *range(plan.first_replacement))[allowance.tasks :]
    return _without(plan, dict.fromkeys(late, _Lack(postponed=allowance.reason))) if late else plan


def _floor_tasks_replaced(plan: Plan, snapshot: Snapshot) -> set[int]:
    """Indices of the starts that replace a task of a floor which has to go: it expires, or leaves for a claim.

    At most one of each job and role, and none while another task of them leaves: so a floor exceeds a limit by no more
    than one task of a role.
    """
    going = snapshot.expiring.union(*(grant.leaving for grant in snapshot.grants))
    floors, stopping = dict(snapshot.floors), {(stop.job, stop.task) for stop in plan.stops}
    staying = Counter[TaskGroup]()
    leaving = set[TaskGroup]()
    for task in snapshot.tasks:
        group = task.group
        if not task.state.wanted or (task.job, task.id) in stopping:
            leaving.add(group)
        elif task.tag not in going:
            staying[group] += 1
    # The worker of rank 0 comes last. With a floor of one it is the one that stays, while the others stop.
    return {
        indices[-1] if floors[key].count(role) == 1 else indices[0]
        for (key, role), indices in _replacements_on_floors(plan, going, floors, staying).items()
        if (key, role) not in leaving
    }


def _replacements_on_floors(
    plan: Plan, going: Collection[str], floors: Mapping[JobKey, Allocation], staying: Counter[TaskGroup]
) -> dict[TaskGroup, list[int]]:
    """Indices of the starts that replace tasks ``going`` of jobs whose tasks ``staying`` are fewer than their floor."""
    found: dict[TaskGroup, list[int]] = defaultdict(list)
    for index, move, start in plan.replacements():
        group = move.job, start.role
        if task_tag(move.job, move.task) in going and staying[group] < floors.get(move.job, NOTHING).count(start.role):
            found[group].append(index)
    return found


def _with_expiring_stopped(plan: Plan, kept: Plan, snapshot: Snapshot) -> Plan:
    """The plan ``kept``, in which tasks that expire stop if ``plan`` moved them, and they are beyond their floors.

    At their time limit they would end all the same, without having drained.
    """
    floors, held = dict(snapshot.floors), snapshot.held()
    roles = {(task.job, task.id): task.role for task in snapshot.tasks}
    beyond = Counter(
        {
            (key, role): held[key].count(role) - floors.get(key, NOTHING).count(role)
            for key in held
            for role in TASK_ROLES
        }
    )
    # Tasks that wait in the queue are not in the snapshot.
    placed = [(stop.job, stop.task) for stop in kept.stops if (stop.job, stop.task) in roles]
    beyond.subtract((job, roles[job, task]) for job, task in placed)
    stops, kept_moves = [], set(kept.moves)
    for move in plan.moves:
        group = move.job, roles[move.job, move.task]
        if move not in kept_moves and task_tag(move.job, move.task) in snapshot.expiring and beyond[group] > 0:
            beyond[group] -= 1
            stops.append(Stop(move.job, move.task))
    return replace(kept, stops=(*kept.stops, *stops))


def _behind_leaving_tasks(
    plan: Plan, snapshot: Snapshot, without_replacement: Collection[TaskGroup]
) -> dict[int, _Lack]:
    """The starts for which there is room only when a task of the same job and role has left, by index.

    Exempt: the replacement of an expiring task of the floor. What leaves may take longer than the time that is left.
    """
    if not without_replacement:
        return {}
    leaving = {task.group for task in snapshot.tasks if not task.state.wanted}
    leaving &= set(without_replacement)
    expiring = _expiring_floor_tasks_replaced(plan, snapshot)
    held = snapshot.held()
    waiting = {
        index for index, start in enumerate(plan.starts) if (start.job, start.role) in leaving and index not in expiring
    }
    # What a job that has nothing starts with is its minimum size, as a whole or not at all.
    whole = {plan.starts[index].job for index in waiting if held[plan.starts[index].job] == NOTHING}
    return {
        index: _Lack(postponed=_LEAVES_FIRST if index in waiting else _STARTS_WHOLE)
        for index, start in enumerate(plan.starts)
        if index in waiting or start.job in whole
    }


def _expiring_floor_tasks_replaced(plan: Plan, snapshot: Snapshot) -> set[int]:
    """Indices of the starts that replace a task of a floor that expires, one of each job and role.

    Of several it is the last, that of the worker of rank 0 if it expires.
    """
    staying = Counter(task.group for task in snapshot.tasks if task.state.wanted and task.tag not in snapshot.expiring)
    found = _replacements_on_floors(plan, snapshot.expiring, dict(snapshot.floors), staying)
    return {indices[-1] for indices in found.values()}


class _Lack(NamedTuple):
    """Why a start is deferred; see ``Deferred``."""

    limit: str = ""
    shortfalls: tuple[Shortfall, ...] = ()
    postponed: str = ""


def _without(plan: Plan, deferred: Mapping[int, _Lack]) -> Plan:
    """The plan without the starts at these indices, which are deferred."""
    return replace(
        plan,
        starts=tuple(start for index, start in enumerate(plan.starts) if index not in deferred),
        deferred=(*plan.deferred, *_deferred(plan.starts[: plan.first_replacement], deferred)),
        moves=tuple(move for index, move, _ in plan.replacements() if index not in deferred),
    )


def _units(starts: Sequence[Start], indices: Sequence[int], first: Allocation | None) -> list[list[int]]:
    """The starts of a job that go together: those that make up the size ``first``, if it is given; then single ones."""
    if first is None:
        return [[index] for index in indices]
    missing = {role: first.count(role) for role in TASK_ROLES}
    together: list[int] = []
    others: list[int] = []
    for index in indices:
        role = starts[index].role
        (together if missing[role] > 0 else others).append(index)
        missing[role] -= 1
    return [together, *([index] for index in others)]


def _deferred(starts: Sequence[Start], lacks: Mapping[int, _Lack]) -> Iterable[Deferred]:
    """One record for each job and role. Tasks that were to be moved have not been decided on, so they are left out."""
    groups: dict[TaskGroup, list[int]] = defaultdict(list)
    for index, start in enumerate(starts):
        if index in lacks:
            groups[start.job, start.role].append(index)
    for (key, role), indices in groups.items():
        lack = lacks[indices[0]]
        yield Deferred(key, role, len(indices), "", lack.shortfalls, lack.limit, lack.postponed)
