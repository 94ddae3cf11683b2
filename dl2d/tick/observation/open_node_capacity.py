"""Room that all jobs together have on the nodes that take new tasks, and tasks that take no part of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from dl2d.core.cluster import Snapshot
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
        if not node.is_open:
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
    up = {node.name for node in snapshot.nodes if node.is_open}
    found = Counter(
        task.group
        for task in snapshot.tasks
        if task.node not in up and task.state.wanted and not (leaving and task.tag in leaving)
    )
    return {key: Allocation(*(found[key, role] for role in TASK_ROLES)) for key in {key for key, _ in found}}


def floor_tasks_without_room(
    floors: Sequence[tuple[Job, Allocation]], snapshot: Snapshot, room: Mapping[str, Mapping[str, int]]
) -> dict[JobKey, Allocation]:
    """The tasks that jobs lack of their floors and that would have no room even if no job had more than its floor.

    A task has room if it passes three tests, in which what jobs have of their floors comes first, and then what they
    lack, in the order of ``floors``:

    1. the nodes that its job may use could hold it, each by itself, without other jobs;
    2. these nodes together have room for it beside the floors of the jobs that may use no other nodes;
    3. all nodes together have room for it beside the floors of all jobs.

    ``room`` is that of ``room_on_nodes``. Jobs without such tasks are left out.
    """
    held, sets, every = snapshot.held(), snapshot.may_use(), frozenset(room)
    lacking = [(job, floor.beyond(held[job.key])) for job, floor in floors if not held[job.key].covers(floor)]
    if not lacking:
        return {}
    # Equal sets are one object: sets of thousands of names are compared slowly.
    same = {every: every}
    open_nodes: dict[frozenset[str], frozenset[str]] = {}
    for nodes in set(sets.values()):
        usable_nodes = nodes & every
        open_nodes[nodes] = same.setdefault(usable_nodes, usable_nodes)
    usable = {job.key: open_nodes[sets[job.key]] if job.key in sets else every for job, _ in floors}
    own: dict[tuple[JobKey, Role], Counter[str]] = defaultdict(Counter)
    for task in snapshot.tasks:
        if task.state.wanted:
            own[task.group][task.node] += 1

    def own_on(job: Job, role: Role, nodes: Collection[str]) -> int:
        return sum(count for node, count in own[job.key, role].items() if node in nodes)

    #: Of the tasks that jobs lack, those for which there is room.
    fitting: dict[tuple[JobKey, Role], int] = {}
    #: How many of so many tasks with a demand nodes could hold.
    possible: dict[tuple[frozenset[str], Resources, int], int] = {}
    for job, lacks in lacking:
        for role in TASK_ROLES:
            nodes, has = usable[job.key], own_on(job, role, usable[job.key])
            alike = nodes, job.request.demand(role), has + lacks.count(role)
            if alike not in possible:
                possible[alike] = _count_held((room[node] for node in nodes), *alike[1:])
            fitting[job.key, role] = max(possible[alike] - has, 0)
    for nodes in sorted(dict.fromkeys((*(usable[job.key] for job, _ in lacking), every)), key=len):
        left = Counter[str]()
        for node in nodes:
            left.update(room[node])
        within = {each: each <= nodes for each in same}
        for job, floor in floors:
            for role in TASK_ROLES if within[usable[job.key]] else ():
                has, here = held[job.key].count(role), own_on(job, role, nodes)
                _take(left, job.request.demand(role), max(min(floor.count(role), has) - (has - here), 0))
        for job, _ in lacking:
            for role in TASK_ROLES if within[usable[job.key]] else ():
                demand, count = job.request.demand(role), fitting[job.key, role]
                fitting[job.key, role] = max(
                    min([count, *(left[name] // most for name, most in demand.thousandths)]), 0
                )
                _take(left, demand, fitting[job.key, role])
    found = {
        job.key: lacks.beyond(Allocation(*(fitting[job.key, role] for role in TASK_ROLES))) for job, lacks in lacking
    }
    return {key: tasks for key, tasks in found.items() if any(tasks)}


def _take(left: Counter[str], demand: Resources, count: int) -> None:
    """Take the room of so many tasks with a demand."""
    for name, amount in demand.thousandths:
        left[name] -= count * amount


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
    return frozenset(tag for grant in snapshot.grants for tag in grant.leaving)
