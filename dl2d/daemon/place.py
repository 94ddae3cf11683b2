"""From a decision to single starts and stops. Starts use only room that is free at this moment."""

from __future__ import annotations

from collections import defaultdict

from dl2d.core.cluster import Snapshot, Task, TaskState
from dl2d.core.decision import Decision
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey, Role
from dl2d.core.packing import Blocked, Packing, Scores
from dl2d.core.plan import Deferred, Plan, Start, Stop

_ROLES = (Role.WORKER, Role.PS)


def place(snapshot: Snapshot, decision: Decision, scores: Scores) -> Plan:
    """Plan the difference between what each job has and what was decided.

    Tasks that stay keep their node. Of those that leave, the ones that have not begun go first, then the newest.
    A job that has nothing starts with its minimum as a whole or not at all, so that jobs do not block one another with
    halves. What has no room now is deferred; room that draining tasks still hold counts as taken.
    """
    allocations = decision.allocations()
    by_job: dict[tuple[JobKey, Role], list[Task]] = defaultdict(list)
    for task in snapshot.tasks:
        if task.state.wanted:
            by_job[task.job, task.role].append(task)
    packing = Packing(snapshot.nodes, scores)
    starts: list[Start] = []
    stops: list[Stop] = []
    deferred: list[Deferred] = []
    for job in snapshot.jobs:
        target = allocations.get(job.key)
        if target is None:
            continue
        has = Allocation(len(by_job[job.key, Role.WORKER]), len(by_job[job.key, Role.PS]))
        for role in _ROLES:
            surplus = has.count(role) - target.count(role)
            if surplus > 0:
                leaving = sorted(by_job[job.key, role], key=_first_to_leave)[:surplus]
                stops += [Stop(job.key, task.id) for task in leaving]
        started, missing = _start(job, has, target, packing)
        starts += started
        deferred += missing
    return Plan(tuple(starts), tuple(stops), tuple(deferred))


def _first_to_leave(task: Task) -> tuple[bool, int]:
    begun = task.state.rank >= TaskState.JOINED.rank
    return begun, -task.number


def _start(job: Job, has: Allocation, target: Allocation, packing: Packing) -> tuple[list[Start], list[Deferred]]:
    missing = Allocation(max(target.workers - has.workers, 0), max(target.ps - has.ps, 0))
    if missing == NOTHING:
        return [], []
    request = job.request
    at_once = Allocation(request.min_workers, request.min_ps) if has == NOTHING else NOTHING
    starts: list[Start] = []
    blocked: dict[Role, Blocked] = {}
    # Workers and servers in turn, so that what fits makes whole bundles.
    wanted = [role for number in range(max(missing)) for role in _ROLES if number < missing.count(role)]
    for role in wanted:
        if role in blocked:
            continue
        demand = request.demand(role)
        node = packing.place(demand, role)
        if isinstance(node, Blocked):
            blocked[role] = node
        else:
            starts.append(Start(job.key, role, node, demand))
    placed = Allocation(*(sum(start.role is role for start in starts) for role in _ROLES))
    if placed.workers < at_once.workers or placed.ps < at_once.ps:
        for start in starts:
            packing.remove(start.node, start.demand)
        starts, placed = [], NOTHING
    short = [
        Deferred(job.key, role, missing.count(role) - placed.count(role), why.nearest, why.shortfalls)
        for role, why in blocked.items()
    ]
    return starts, short
