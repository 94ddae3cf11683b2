"""From a decision to single starts and stops. Starts use only room that is free at this moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from dl2d.core.cluster import Snapshot, Task, TaskState
from dl2d.core.decision import Decision
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey, Role
from dl2d.core.packing import Blocked, Packing
from dl2d.core.placement import Placement
from dl2d.core.plan import Deferred, Move, Plan, Start, Stop
from dl2d.daemon.room import Kind, Want, clear, room_with_leavers

_ROLES = (Role.WORKER, Role.PS)


def place(snapshot: Snapshot, decision: Decision, placement: Placement, *, silent: Collection[JobKey] = ()) -> Plan:
    """Plan the difference between what each job has and what was decided.

    Tasks that stay keep their node. Of those that leave, the ones go first whose room somebody waits for, then those
    that have not begun, then the newest. A task may be moved to let a larger one in (``dl2d.daemon.room``). A job that
    has nothing starts with its minimum as a whole or not at all, so that jobs do not block one another with halves.
    What has no room now is deferred; room that draining tasks still hold counts as taken. Nothing of a ``silent`` job
    is moved: its coordinator would not let the old task go.
    """
    allocations = decision.allocations()
    by_kind: dict[Kind, list[Task]] = defaultdict(list)
    for task in snapshot.tasks:
        if task.state.wanted:
            by_kind[task.job, task.role].append(task)
    packing = Packing(snapshot.nodes, placement)
    starts: list[Start] = []
    deferred: list[Deferred] = []
    surplus: dict[Kind, int] = {}
    for job in snapshot.jobs:
        target = allocations.get(job.key)
        if target is None:
            continue
        has = Allocation(len(by_kind[job.key, Role.WORKER]), len(by_kind[job.key, Role.PS]))
        surplus |= {(job.key, role): max(has.count(role) - target.count(role), 0) for role in _ROLES}
        started, missing = _start(job, has, target, packing)
        starts += started
        deferred += missing
    demands = {job.key: job.request for job in snapshot.jobs}
    wants = [
        Want((item.job, item.role), demands[item.job].demand(item.role)) for item in deferred for _ in range(item.count)
    ]
    staying = [task for (key, _), tasks in by_kind.items() if key not in silent for task in tasks]
    clearing = clear(wants, room_with_leavers(packing.room(), snapshot.tasks), staying, surplus)
    moves = tuple(_moves(clearing.moving, packing))
    starts += [Start(task.job, task.role, move.node, task.demand) for task, move in moves]
    return Plan(
        starts=tuple(starts),
        stops=tuple(_stops(by_kind, surplus, clearing.leaving)),
        deferred=tuple(deferred),
        moves=tuple(move for _, move in moves),
    )


def _stops(by_kind: Mapping[Kind, list[Task]], surplus: Mapping[Kind, int], leaving: Sequence[Task]) -> Iterator[Stop]:
    """As many of each kind as there are too many: those that make room for others first."""
    makes_room = set(leaving)
    for kind, count in surplus.items():
        tasks = sorted(by_kind[kind], key=lambda task: (task not in makes_room, *_first_to_leave(task)))
        for task in tasks[:count]:
            yield Stop(task.job, task.id)


def _moves(moving: Sequence[Task], packing: Packing) -> Iterator[tuple[Task, Move]]:
    """Start another of a task's kind elsewhere; the next tick finds one too many, and the one in the way leaves."""
    for task in moving:
        node = packing.place(task.demand, task.role)
        if isinstance(node, Blocked):
            continue
        if node == task.node:
            packing.remove(node, task.demand)
        else:
            yield task, Move(task.job, task.id, node)


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
