"""Place: turns a decision into single starts and stops. Starts use only resources that are free at this moment."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from types import MappingProxyType

from dl2d.core.cluster import Snapshot, Task, TaskGroup
from dl2d.core.decision import Decision
from dl2d.core.jobs import NOTHING, TASK_ROLES, Allocation, JobKey, JobRequest, Role
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.packing.room_in_limits import Blocked
from dl2d.core.packing.task_leaving_order import LeavingOrder, leaving_order_by_reason, rank_0_worker
from dl2d.core.packing.tasks_that_make_room import RoomMade, TaskGroups, WaitingTask, make_room
from dl2d.core.placement import Placement, keeps_bundles
from dl2d.core.plan_of_starts_and_stops import Deferred, Move, Plan, Start, Stop
from dl2d.core.resources import Resources
from dl2d.tick.place.nodes_chosen_by_policy import NamedNodes
from dl2d.tick.place.stop_or_move_leaving_tasks import replace_vacating, vacating_tasks

#: Roles of the new tasks that one action of a decision gives a job, workers and servers alternating.
RoleSequence = tuple[Role, ...]


def place(
    snapshot: Snapshot,
    decision: Decision,
    placement: Placement,
    *,
    keep: Collection[JobKey] = (),
    without_replacement: Collection[TaskGroup] = (),
    positions: Mapping[str, int] = MappingProxyType({}),
) -> Plan:
    """Plan the starts and stops that lead from what each job has to what was decided.

    - Tasks that stay keep their node. Of a job that shrinks, tasks whose resources a waiting task needs leave first,
      then those on nodes that take no new tasks (last, if it shrinks for want of room: nobody gets the room there),
      then tasks that have not joined, then the newest. Tasks may be moved to make room for a larger one
      (``make_room``), but not of a job in ``keep``, as one whose coordinator is silent: it would not
      drain the old task.
      The worker of rank 0 leaves last, and is not moved to make room.
    - A job that has nothing starts with its minimum size as a whole or not at all, so that jobs do not block one
      another with incomplete sizes. In which increments it was decided does not matter.
    - Tasks that have no room now are deferred. Resources of draining tasks are not free.
    - Where the decision names nodes, tasks on other nodes leave first, and new tasks start on the named nodes or wait
      for them. Tasks that will have no room there are placed like all others (``NamedNodes``).
    - Tasks that leave a node for a claim of the snapshot, or reach their time limit soon, leave first. If their job
      does not shrink they stop or move (``replace_vacating``), also by whether their job and role is in
      ``without_replacement``: no new task of these would start at present.
    - Where the resource manager only stops tasks of the highest position (``positions``, by tag) and chooses the nodes
      itself, those leave, and neither named nodes nor moves count.
    """
    if positions:
        decision = replace(decision, nodes=())
    allocations, held = decision.allocations(), snapshot.held()
    tasks_by_group = TaskGroups.of(snapshot, decision)
    groups, surplus = tasks_by_group.wanted, tasks_by_group.surplus
    requests = {job.key: job.request for job in snapshot.jobs}
    rank_0_workers = {
        first
        for (_, role), tasks in groups.items()
        if role is Role.WORKER and (first := rank_0_worker(tasks)) is not None
    }
    vacating = vacating_tasks(snapshot, groups, keep)
    packing = Packing(snapshot.nodes, placement, node_sets=snapshot.node_sets)
    overused = {node.name: node.used.minus(node.capacity) for node in snapshot.nodes if snapshot.grants}
    may_use, leaving_order = snapshot.may_use(), leaving_order_by_reason(snapshot, decision)
    targets = NamedNodes(decision, tasks_by_group, packing, rank_0_workers, leaving_order, overused, vacating, may_use)
    leaving_targets = [task for tasks in targets.leaving.values() for task in tasks]

    # Vacate claimed nodes, and replace tasks that reach their time limit
    vacated = replace_vacating(
        vacating,
        snapshot,
        {group: len(tasks) - surplus.get(group, 0) for group, tasks in groups.items()},
        {group: count for group, count in surplus.items() if group not in targets.leaving},
        targets,
        packing,
        rank_0_workers=rank_0_workers,
        without_replacement=without_replacement,
    )
    open_surplus = vacated.surplus

    # Start new tasks where they have room
    placer = _Placer(requests, held, packing, targets, placement)
    increments = _increments(snapshot, decision, held)
    if placement.gathers:
        _start_gathered(placer, increments, allocations, groups)
    else:
        for key, job_increments in increments:
            placer.start(key, job_increments)

    # Make room for the tasks that wait
    leaving_ids = {(task.job, task.id) for task in (*leaving_targets, *vacating)}
    movable = [
        task
        for (key, role), tasks in groups.items()
        if key in requests and key not in keep  # a job that has ended may still have tasks
        if (key, role) not in without_replacement or surplus.get((key, role))
        for task in tasks
        if (task.job, task.id) not in leaving_ids
        and (task not in rank_0_workers or surplus.get((key, role)) == len(tasks))
    ]
    waiting = [*vacated.waiting, *placer.waiting_for_room()]
    room_made = RoomMade((), ())
    if waiting and not positions:
        room_made = make_room(waiting, targets.free_later(), movable, open_surplus, may_use)
    moves = [*vacated.moves, *_moves(room_made.moving, packing)]

    # Stop tasks of jobs that shrink
    others = {group: [task for task in tasks if task not in vacating] for group, tasks in groups.items()}
    surplus_leaving = _leaving(
        others if vacating else groups, open_surplus, room_made.leaving, rank_0_workers, leaving_order, positions
    )
    leaving = chain(leaving_targets, vacated.stopping, surplus_leaving)
    replacements = (Start(task.job, task.role, move.node, task.demand) for task, move in moves)
    return Plan(
        starts=(*placer.starts, *replacements),
        stops=tuple(Stop(task.job, task.id) for task in leaving),
        deferred=tuple(placer.deferred()),
        moves=tuple(move for _, move in moves),
    )


def _leaving(
    groups: Mapping[TaskGroup, list[Task]],
    surplus: Mapping[TaskGroup, int],
    making_room: Iterable[Task],
    rank_0_workers: Collection[Task],
    leaving_order: LeavingOrder,
    positions: Mapping[str, int],
) -> Iterator[Task]:
    """The surplus tasks of each group: those of the highest positions, or that make room for waiting tasks, first."""
    makes_room = set(making_room)

    def order(task: Task) -> tuple[float, bool, bool, bool, bool, int]:
        # A task without a position waits for a container.
        position = positions.get(task.tag, math.inf) if positions else 0
        return -position, task in rank_0_workers, task not in makes_room, *leaving_order(task)

    for group, count in surplus.items():
        if count:
            yield from sorted(groups[group], key=order)[:count]


def _moves(moving: Iterable[tuple[Task, str]], packing: Packing) -> Iterator[tuple[Task, Move]]:
    """The moves whose replacement has room on its node now; the next tick tries the others again.

    A replacement starts on the chosen node only, since a waiting task may be about to get the room on another one. The
    next tick finds one task more than was decided, and stops the old task.
    """
    for task, node in moving:
        if packing.place_on(node, task.demand, task.job):
            yield task, Move(task.job, task.id, node)


def _increments(
    snapshot: Snapshot, decision: Decision, held: Mapping[JobKey, Allocation]
) -> Iterator[tuple[JobKey, Sequence[RoleSequence]]]:
    """The tasks that jobs do not have yet, in the order in which they were decided; then those that the guard added.

    The first increments of a job that has nothing are collected until they reach its minimum size, and come as one;
    what they hold beyond it comes next. So a policy may give workers and servers one at a time.
    """
    allocations = decision.allocations()
    #: Tasks that run and that no increment has accounted for yet.
    running = {(key, role): allocation.count(role) for key, allocation in held.items() for role in TASK_ROLES}
    missing = {
        (job.key, role): max(allocations[job.key].count(role) - running[job.key, role], 0)
        for job in snapshot.jobs
        if job.key in allocations
        for role in TASK_ROLES
    }
    min_sizes = {job.key: job.request.min_size for job in snapshot.jobs}
    #: Increments of jobs that have nothing and have not reached their minimum size.
    collected: dict[JobKey, list[RoleSequence]] = {key: [] for key, allocation in held.items() if allocation == NOTHING}
    not_in_actions = (
        (job.key, bundle)
        for job in snapshot.jobs
        if job.key in allocations
        for bundle in (min_sizes[job.key], *repeat(Allocation(1, 1), max(allocations[job.key])))
    )
    for key, added in chain(decision.actions, not_in_actions):
        if not missing[key, Role.WORKER] and not missing[key, Role.PS]:
            continue
        new: list[Role] = []
        # Workers and servers alternate, so that the tasks that have room make whole bundles.
        for number in range(max(added)):
            for role in TASK_ROLES:
                if number >= added.count(role):
                    continue
                if running[key, role] > 0:
                    running[key, role] -= 1
                elif missing[key, role] > 0:
                    missing[key, role] -= 1
                    new.append(role)
        if not new:
            continue
        if key not in collected:
            yield key, (tuple(new),)
            continue
        collected[key].append(tuple(new))
        if _size(list(chain(*collected[key]))).covers(min_sizes[key]):
            first, beyond = _split(collected.pop(key), min_sizes[key])
            yield key, first
            if beyond:
                yield key, beyond


def _size(roles: Sequence[Role]) -> Allocation:
    """The number of tasks of each role."""
    return Allocation(*map(roles.count, TASK_ROLES))


def _split(
    increments: Sequence[RoleSequence], size: Allocation
) -> tuple[Sequence[RoleSequence], Sequence[RoleSequence]]:
    """Split increments into the first tasks that make up a size, and the tasks beyond it."""
    missing = {role: size.count(role) for role in TASK_ROLES}
    first: list[RoleSequence] = []
    beyond: list[RoleSequence] = []
    for increment in increments:
        needed: list[Role] = []
        more: list[Role] = []
        for role in increment:
            (needed if missing[role] > 0 else more).append(role)
            missing[role] -= 1
        first += [tuple(needed)] if needed else []
        beyond += [tuple(more)] if more else []
    return first, beyond


def _start_gathered(
    placer: _Placer,
    increments: Iterable[tuple[JobKey, Sequence[RoleSequence]]],
    allocations: Mapping[JobKey, Allocation],
    groups: Mapping[TaskGroup, Sequence[Task]],
) -> None:
    """Start the new tasks of a job together, the smallest job first; one by one if they cannot be gathered."""
    by_job: dict[JobKey, list[Sequence[RoleSequence]]] = defaultdict(list)
    for key, job_increments in increments:
        by_job[key].append(job_increments)
    for key in sorted(by_job, key=lambda key: allocations[key].tasks):  # stable: equal ones in decided order
        workers, ps = (Counter(task.node for task in groups.get((key, role), ())) for role in TASK_ROLES)
        running = {node: Allocation(workers[node], ps[node]) for node in chain(workers, ps)}
        roles = [role for job_increments in by_job[key] for sequence in job_increments for role in sequence]
        if not placer.gather(key, roles, running):
            for job_increments in by_job[key]:
                placer.start(key, job_increments)


class _Placer:
    """Places new tasks on nodes, one after the other, and collects their starts and the tasks that wait."""

    def __init__(
        self,
        requests: Mapping[JobKey, JobRequest],
        held: Mapping[JobKey, Allocation],
        packing: Packing,
        targets: NamedNodes,
        placement: Placement,
    ) -> None:
        self.starts: list[Start] = []
        #: Groups whose tasks wait for a node that the decision names, and which tasks are about to leave.
        self._waiting_for_target: set[TaskGroup] = set()
        #: Groups of tasks that have room but wait since another task of their job's minimum size has none. One entry
        #: for each task. ``make_room`` keeps their room for them.
        self._waiting_for_minimum_size: list[TaskGroup] = []
        self._requests = requests
        self._packing = packing
        self._targets = targets
        self._placement = placement
        #: Number of tasks that wait, and why the first of them does.
        self._waiting: dict[TaskGroup, tuple[int, Blocked]] = {}
        #: Jobs that have nothing and for whose minimum size there is no room, and why.
        self._start_blocked: dict[JobKey, Blocked] = {}
        #: Jobs that have tasks, new ones included.
        self._started = {key for key, allocation in held.items() if allocation != NOTHING}

    def gather(self, key: JobKey, roles: Sequence[Role], running: Mapping[str, Allocation]) -> bool:
        """Start all new tasks of a job evenly on as few nodes as possible; returns False if that cannot be done.

        ``running`` are the job's tasks on each node.
        """
        if self._targets.has_nodes_for(key):
            return False
        new, request = _size(roles), self._requests[key]
        if key not in self._started and not new.covers(request.min_size):
            return False
        gathered = self._packing.gather(request, new, running, key)
        if gathered is None:
            return False
        self._started.add(key)
        for role, node in gathered:
            self._targets.reserve(node, request.demand(role))
            self.starts.append(Start(key, role, node, request.demand(role)))
        return True

    def start(self, key: JobKey, increments: Sequence[RoleSequence]) -> None:
        """Start the tasks of increments that have room; all or none if the job has nothing yet."""
        place_tasks = self._place if key in self._started else self._place_unstarted
        starts, blocked_tasks = place_tasks(key, increments)
        self.starts += starts
        for role, blocked in blocked_tasks:
            count, first_blocked = self._waiting.get((key, role), (0, blocked))
            self._waiting[key, role] = (count + 1, first_blocked)

    def deferred(self) -> list[Deferred]:
        """The tasks that wait, and the resources that they wait for."""
        return [
            Deferred(key, role, count, blocked.nearest, blocked.shortfalls)
            for (key, role), (count, blocked) in self._waiting.items()
        ]

    def waiting_for_room(self) -> list[WaitingTask]:
        """The tasks for which room can be made: those that wait for the rest of their job's minimum size, and others.

        Not those that wait for a named node.
        """
        waiting = [
            group
            for group, (count, _) in self._waiting.items()
            if group not in self._waiting_for_target
            for _ in range(count)
        ]
        groups = (*self._waiting_for_minimum_size, *waiting)
        return [WaitingTask((key, role), self._requests[key].demand(role)) for key, role in groups]

    def _place_unstarted(
        self, key: JobKey, increments: Sequence[RoleSequence]
    ) -> tuple[list[Start], list[tuple[Role, Blocked]]]:
        """Place tasks of a job that has none, all or none: in the decided order, or else those of one role first.

        In the decided order, a small task may take the only room that a larger one has. Tasks beyond the minimum size
        of a job for whose minimum size there is no room wait as well.
        """
        request = self._requests[key]
        orders = [increments]
        if key not in self._start_blocked and not self._targets.has_nodes_for(key):
            larger = Role.PS if request.worker.fits_in(request.ps) else Role.WORKER
            larger_first = sorted(chain(*increments), key=lambda role: role is not larger)
            orders += [[tuple(reversed(larger_first))], [tuple(larger_first)]]
        for order in orders:
            starts, blocked_tasks = self._place(key, order)
            if not blocked_tasks and _size([start.role for start in starts]).covers(request.min_size):
                self._started.add(key)
                return starts, []
            for start in starts:
                self._packing.remove(start.node, start.demand)
                self._targets.release(start.node, start.demand)
        if not blocked_tasks:
            self._waiting_for_minimum_size += [(key, start.role) for start in starts]
            return [], []
        # Only tasks of the role that has no room count as waiting; the others are held back.
        blocked = self._start_blocked.setdefault(key, blocked_tasks[0][1])
        self._waiting_for_minimum_size += [(key, start.role) for start in starts if start.role is not blocked.role]
        return [], [(role, blocked) for role in chain(*increments) if role is blocked.role]

    def _place(self, key: JobKey, increments: Sequence[RoleSequence]) -> tuple[list[Start], list[tuple[Role, Blocked]]]:
        """Place tasks one after the other; returns those that have room, and what the others wait for."""
        request = self._requests[key]
        starts: list[Start] = []
        blocked_tasks: list[tuple[Role, Blocked]] = []
        for unit in chain.from_iterable(self._units(key, increment) for increment in increments):
            role = unit[0]
            # A task does not overtake another one of its group that waits already.
            blocked = self._start_blocked.get(key)
            if blocked is None and (key, role) in self._waiting:
                _, blocked = self._waiting[key, role]
            demand = request.demand(role) if len(unit) == 1 else self._packing.bundle(request)
            found = blocked or self._find((key, role), demand)
            if isinstance(found, Blocked):
                blocked_tasks += [(role, found) for role in unit]
            else:
                starts += [Start(key, role, found, request.demand(role)) for role in unit]
        return starts, blocked_tasks

    def _units(self, key: JobKey, roles: RoleSequence) -> Sequence[tuple[Role, ...]]:
        """Tasks that go to one node together: bundles if the placement keeps them and no node is named, else single."""
        if not keeps_bundles(self._placement, self._requests[key]) or self._targets.has_nodes_for(key):
            return [(role,) for role in roles]
        workers, ps = _size(roles)
        unpaired = Role.WORKER if workers > ps else Role.PS
        return [(Role.WORKER, Role.PS)] * min(workers, ps) + [(unpaired,)] * abs(workers - ps)

    def _find(self, group: TaskGroup, demand: Resources) -> str | Blocked:
        """Add a task to the packing, on a named node if there is one; returns its node, or what it waits for."""
        node = self._targets.place(group, demand)
        if isinstance(node, Blocked):
            self._waiting_for_target.add(group)
        if node is not None:
            return node
        node = self._packing.place(demand, group[1], group[0])
        if isinstance(node, str):
            self._targets.reserve(node, demand)
        return node
