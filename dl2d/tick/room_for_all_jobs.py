"""Room that all jobs together have on the nodes that take new tasks, and tasks that take no part of it. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from dl2d.core.cluster import NodeState, Snapshot
from dl2d.core.jobs import TASK_ROLES, Allocation, Job, JobKey, Role
from dl2d.core.resources import Resources


def room_on_nodes(snapshot: Snapshot) -> dict[str, Mapping[str, int]]:
    """What all jobs together may hold on each node that takes new tasks, in thousandths by resource.

    It is what others leave, and at least what runs there; tasks that leave for a claim do not count as running.
    """
    leaving = _leaving(snapshot)
    ours: dict[str, list[Resources]] = defaultdict(list)
    kept: dict[str, list[Resources]] = defaultdict(list)
    for task in snapshot.tasks:
        ours[task.node].append(task.room)
        if task.state.wanted and not (leaving and task.tag in leaving):
            kept[task.node].append(task.room)
    room: dict[str, Mapping[str, int]] = {}
    for node in snapshot.nodes:
        if node.state is not NodeState.UP:
            continue
        used = node.used.minus(Resources.total(ours[node.name])) if node.name in ours else node.used
        free = dict(node.capacity.minus(used).thousandths) if used.thousandths else dict(node.capacity.thousandths)
        for name, amount in Resources.total(kept[node.name]).thousandths if node.name in kept else ():
            free[name] = max(free.get(name, 0), amount)
        room[node.name] = free
    return room


def tasks_on_closed_nodes(snapshot: Snapshot) -> dict[JobKey, Allocation]:
    """How many tasks of each job are on nodes that take no new tasks, without those that leave for a claim.

    Nobody gets their room when they end.
    """
    leaving = _leaving(snapshot)
    up = {node.name for node in snapshot.nodes if node.state is NodeState.UP}
    found = Counter(
        (task.job, task.role)
        for task in snapshot.tasks
        if task.node not in up and task.state.wanted and not (leaving and task.tag in leaving)
    )
    return {key: Allocation(*(found[key, role] for role in TASK_ROLES)) for key in {key for key, _ in found}}


def tasks_without_room(
    lacking: Sequence[tuple[Job, Allocation]], snapshot: Snapshot, room: Mapping[str, Mapping[str, int]]
) -> dict[JobKey, Allocation]:
    """Of the tasks that jobs lack, those that the nodes that they may use could not hold even without other jobs.

    ``room`` is that of ``room_on_nodes``. Jobs whose tasks could all be held are left out.
    """
    if not lacking:
        return {}
    may_use = snapshot.may_use()
    usable: dict[JobKey, Collection[str]] = {job.key: may_use.get(job.key, room.keys()) for job, _ in lacking}
    own = Counter(
        (task.job, task.role)
        for task in snapshot.tasks
        if task.job in usable and task.state.wanted and task.node in room and task.node in usable[task.job]
    )
    #: How many of so many tasks with a demand nodes could hold, by the nodes that their job may use.
    held: dict[tuple[frozenset[str] | None, Resources, int], int] = {}

    def without_room(job: Job, role: Role, count: int) -> int:
        wanted = count + own[job.key, role]
        alike = may_use.get(job.key), job.request.demand(role), wanted
        if alike not in held:
            held[alike] = _count_held((room[name] for name in usable[job.key] if name in room), *alike[1:])
        return min(wanted - held[alike], count)

    found = {
        job.key: Allocation(*(without_room(job, role, tasks.count(role)) for role in TASK_ROLES))
        for job, tasks in lacking
    }
    return {key: tasks for key, tasks in found.items() if any(tasks)}


def _count_held(rooms: Iterable[Mapping[str, int]], demand: Resources, most: int) -> int:
    """How many tasks with a demand nodes with this room could hold, up to ``most``."""
    count = 0
    for room in rooms:
        count += min([room.get(name, 0) // amount for name, amount in demand.thousandths], default=most)
        if count >= most:
            return most
    return count


def _leaving(snapshot: Snapshot) -> frozenset[str]:
    """Tags of the tasks that leave for a claim."""
    return frozenset(tag for claim in snapshot.claims for tag in claim.leaving)
