"""From a decision to single starts and stops. Starts use only room that is free at this moment."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat

from dl2d.core.cluster import Snapshot, Task, TaskState
from dl2d.core.decision import Decision
from dl2d.core.jobs import NOTHING, Allocation, JobKey, JobRequest, Role
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
    held = snapshot.held()
    requests = {job.key: job.request for job in snapshot.jobs}
    surplus = {
        (job.key, role): max(held[job.key].count(role) - allocations[job.key].count(role), 0)
        for job in snapshot.jobs
        if job.key in allocations
        for role in _ROLES
    }
    packing = Packing(snapshot.nodes, placement)
    starts, deferred = _start(_wanted(snapshot, decision, held), requests, held, packing)
    wants = [
        Want((item.job, item.role), requests[item.job].demand(item.role))
        for item in deferred
        for _ in range(item.count)
    ]
    staying = [task for (key, _), tasks in by_kind.items() if key not in silent for task in tasks]
    room = room_with_leavers(packing.room(), snapshot.tasks) if wants else {}
    clearing = clear(wants, room, staying, surplus)
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
        if not count:
            continue
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


def _wanted(
    snapshot: Snapshot, decision: Decision, held: Mapping[JobKey, Allocation]
) -> Iterator[tuple[JobKey, tuple[Role, ...]]]:
    """What each job lacks, bundle by bundle: in the order in which it was decided, then what the guard added."""
    allocations = decision.allocations()
    there = {(key, role): has.count(role) for key, has in held.items() for role in _ROLES}
    lacks = {
        (job.key, role): max(allocations[job.key].count(role) - there[job.key, role], 0)
        for job in snapshot.jobs
        if job.key in allocations
        for role in _ROLES
    }
    rest = (
        (job.key, bundle)
        for job in snapshot.jobs
        if job.key in allocations
        for bundle in (
            Allocation(job.request.min_workers, job.request.min_ps),
            *repeat(Allocation(1, 1), max(allocations[job.key])),
        )
    )
    for key, bundle in chain(decision.actions, rest):
        if not lacks[key, Role.WORKER] and not lacks[key, Role.PS]:
            continue
        new: list[Role] = []
        # Workers and servers in turn, so that what fits makes whole bundles.
        for number in range(max(bundle)):
            for role in _ROLES:
                if number >= bundle.count(role):
                    continue
                if there[key, role] > 0:
                    there[key, role] -= 1
                elif lacks[key, role] > 0:
                    lacks[key, role] -= 1
                    new.append(role)
        if new:
            yield key, tuple(new)


def _start(
    wanted: Iterable[tuple[JobKey, tuple[Role, ...]]],
    requests: Mapping[JobKey, JobRequest],
    held: Mapping[JobKey, Allocation],
    packing: Packing,
) -> tuple[list[Start], list[Deferred]]:
    starts: list[Start] = []
    waiting: dict[Kind, tuple[int, Blocked]] = {}
    waits_whole: dict[JobKey, Blocked] = {}
    begun = {key for key, has in held.items() if has != NOTHING}
    for key, roles in wanted:
        request = requests[key]
        placed: list[Start] = []
        blocked: Blocked | None = waits_whole.get(key)
        missing: list[tuple[Role, Blocked]] = []
        for role in roles:
            before = blocked or (waiting[key, role][1] if (key, role) in waiting else None)
            node = before or packing.place(request.demand(role), role)
            if isinstance(node, Blocked):
                missing.append((role, node))
            else:
                placed.append(Start(key, role, node, request.demand(role)))
        counts = Counter(start.role for start in placed)
        too_few = counts[Role.WORKER] < request.min_workers or counts[Role.PS] < request.min_ps
        if key not in begun and (missing or too_few):
            # Its first bundle is its minimum: as a whole or not at all.
            for start in placed:
                packing.remove(start.node, start.demand)
            placed = []
            if missing:
                # What it waits for is room for the role that has none.
                why = waits_whole.setdefault(key, missing[0][1])
                missing = [(role, why) for role in roles if role is why.role]
        elif placed:
            begun.add(key)
        starts += placed
        for role, why in missing:
            count, first = waiting.get((key, role), (0, why))
            waiting[key, role] = (count + 1, first)
    deferred = [
        Deferred(key, role, count, why.nearest, why.shortfalls) for (key, role), (count, why) in waiting.items()
    ]
    return starts, deferred
