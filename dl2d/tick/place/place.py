"""Place: turns a decision into single starts and stops. Starts use only resources that are free at this moment."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat

from dl2d.core.cluster import Snapshot, Task
from dl2d.core.decision import Decision
from dl2d.core.jobs import NOTHING, Allocation, JobKey, JobRequest, Role
from dl2d.core.packing import Blocked, Packing
from dl2d.core.placement import Placement
from dl2d.core.resources import Resources
from dl2d.core.tick_plan import Deferred, Move, Plan, Start, Stop
from dl2d.tick.place.make_room import Kind, WaitingTask, leaving_order, make_room
from dl2d.tick.place.target_nodes import TargetNodes

_ROLES = (Role.WORKER, Role.PS)
#: Tasks that a policy gave a job at once; workers and servers in turn.
Step = tuple[Role, ...]


def place(snapshot: Snapshot, decision: Decision, placement: Placement, *, silent: Collection[JobKey] = ()) -> Plan:
    """Plan the difference between what each job has and what was decided.

    Tasks that stay keep their node. Of those that leave, the ones go first whose room somebody waits for, then those
    that have not begun, then the newest. A task may be moved to let a larger one in (see ``make_room``). A job
    that has nothing starts with its least size as a whole or not at all, so that jobs do not block one another with
    halves; in which steps it was decided does not matter, nor that its tasks have no room in the order of the steps
    where they have it with the larger ones first.
    What has no room now is deferred; room that draining tasks still hold counts as taken. Nothing of a ``silent`` job
    is moved: its coordinator would not let the old task go.

    Where the decision names nodes, those tasks leave first that it would have elsewhere, and new ones go to its nodes
    or wait for them; only what will have no room there is placed as everything else is (see ``locality``).
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
    targets = TargetNodes(decision, by_kind, surplus)
    starting = _Starting(snapshot, requests, held, packing, targets, keeps_bundles=placement.keeps_bundles)
    wanted = _wanted(snapshot, decision, held)
    if placement.gathers:
        _start_gathered(starting, wanted, allocations, by_kind)
    else:
        for key, steps in wanted:
            starting.start(key, steps)
    deferred = starting.deferred()
    wants = [WaitingTask(kind, requests[kind[0]].demand(kind[1])) for kind in starting.held_back]
    wants += [
        WaitingTask((item.job, item.role), requests[item.job].demand(item.role))
        for item in deferred
        if (item.job, item.role) not in starting.expecting
        for _ in range(item.count)
    ]
    settled = {(task.job, task.id) for tasks in targets.leaving.values() for task in tasks}
    staying = [
        task
        for (key, _), tasks in by_kind.items()
        if key not in silent
        for task in tasks
        if (task.job, task.id) not in settled
    ]
    open_surplus = {kind: count for kind, count in surplus.items() if kind not in targets.leaving}
    room = targets.expected(packing, snapshot.tasks) if wants else {}
    made = make_room(wants, room, staying, open_surplus)
    moves = tuple(_moves(made.moving, packing))
    starts = [*starting.starts, *(Start(task.job, task.role, move.node, task.demand) for task, move in moves)]
    stops = chain(
        (Stop(task.job, task.id) for tasks in targets.leaving.values() for task in tasks),
        _stops(by_kind, open_surplus, made.leaving),
    )
    return Plan(
        starts=tuple(starts), stops=tuple(stops), deferred=tuple(deferred), moves=tuple(move for _, move in moves)
    )


def _stops(by_kind: Mapping[Kind, list[Task]], surplus: Mapping[Kind, int], leaving: Sequence[Task]) -> Iterator[Stop]:
    """As many of each kind as there are too many: those that make room for others first."""
    makes_room = set(leaving)
    for kind, count in surplus.items():
        if not count:
            continue
        tasks = sorted(by_kind[kind], key=lambda task: (task not in makes_room, *leaving_order(task)))
        for task in tasks[:count]:
            yield Stop(task.job, task.id)


def _moves(moving: Iterable[tuple[Task, str]], packing: Packing) -> Iterator[tuple[Task, Move]]:
    """Start another of a task's kind elsewhere; the next tick finds one too many, and the one in the way leaves.

    Only on the node that was chosen: room on another may be what a waiting task is about to get. Where room has yet to
    become free, the next tick sees.
    """
    for task, node in moving:
        if packing.place_on(node, task.demand):
            yield task, Move(task.job, task.id, node)


def _wanted(
    snapshot: Snapshot, decision: Decision, held: Mapping[JobKey, Allocation]
) -> Iterator[tuple[JobKey, Sequence[Step]]]:
    """What each job lacks, step by step: in the order in which it was decided, then what the guard added.

    The first steps of a job that has nothing are put together until they are its least size, which comes as one; what
    they hold beyond that comes next. A policy may thus give workers and servers one at a time.
    """
    allocations = decision.allocations()
    there = {(key, role): has.count(role) for key, has in held.items() for role in _ROLES}
    lacks = {
        (job.key, role): max(allocations[job.key].count(role) - there[job.key, role], 0)
        for job in snapshot.jobs
        if job.key in allocations
        for role in _ROLES
    }
    least = {job.key: job.request.least for job in snapshot.jobs}
    #: Steps of jobs that have nothing and have not reached their least size.
    first: dict[JobKey, list[Step]] = {key: [] for key, has in held.items() if has == NOTHING}
    rest = (
        (job.key, bundle)
        for job in snapshot.jobs
        if job.key in allocations
        for bundle in (least[job.key], *repeat(Allocation(1, 1), max(allocations[job.key])))
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
        if not new:
            continue
        if key not in first:
            yield key, (tuple(new),)
            continue
        first[key].append(tuple(new))
        if _reaches(list(chain(*first[key])), least[key]):
            begin, beyond = _split(first.pop(key), least[key])
            yield key, begin
            if beyond:
                yield key, beyond


def _reaches(roles: Sequence[Role], size: Allocation) -> bool:
    """Whether there are as many tasks of each role as a size has."""
    return roles.count(Role.WORKER) >= size.workers and roles.count(Role.PS) >= size.ps


def _split(steps: Sequence[Step], size: Allocation) -> tuple[Sequence[Step], Sequence[Step]]:
    """The first tasks of the steps that make up a size, and what is left of each step."""
    lacks = {role: size.count(role) for role in _ROLES}
    begin: list[Step] = []
    beyond: list[Step] = []
    for step in steps:
        own: list[Role] = []
        others: list[Role] = []
        for role in step:
            (own if lacks[role] > 0 else others).append(role)
            lacks[role] -= 1
        begin += [tuple(own)] if own else []
        beyond += [tuple(others)] if others else []
    return begin, beyond


def _start_gathered(
    starting: _Starting,
    wanted: Iterable[tuple[JobKey, Sequence[Step]]],
    allocations: Mapping[JobKey, Allocation],
    by_kind: Mapping[Kind, Sequence[Task]],
) -> None:
    """Start the new tasks of a job together, the smallest job first; one by one where that cannot be done."""
    given: dict[JobKey, list[Sequence[Step]]] = defaultdict(list)
    for key, steps in wanted:
        given[key].append(steps)
    for key in sorted(given, key=lambda key: sum(allocations[key])):  # stable: equal ones as they were decided
        roles_there = {role: Counter(task.node for task in by_kind.get((key, role), ())) for role in _ROLES}
        there = {
            node: Allocation(roles_there[Role.WORKER][node], roles_there[Role.PS][node])
            for node in chain(*roles_there.values())
        }
        if not starting.gather(key, list(chain(*chain(*given[key]))), there):
            for steps in given[key]:
                starting.start(key, steps)


class _Starting:
    """Starts so far, and what waits."""

    def __init__(
        self,
        snapshot: Snapshot,
        requests: Mapping[JobKey, JobRequest],
        held: Mapping[JobKey, Allocation],
        packing: Packing,
        targets: TargetNodes,
        *,
        keeps_bundles: bool,
    ) -> None:
        self.starts: list[Start] = []
        #: Kinds that wait for room of which it is settled who leaves it to them.
        self.expecting: set[Kind] = set()
        #: Tasks that had room and yet wait, for the rest of their first bundle has none: theirs must not be given away.
        self.held_back: list[Kind] = []
        self._tasks = snapshot.tasks
        self._requests = requests
        self._packing = packing
        self._targets = targets
        self._keeps_bundles = keeps_bundles
        self._waiting: dict[Kind, tuple[int, Blocked]] = {}
        self._waits_whole: dict[JobKey, Blocked] = {}
        self._begun = {key for key, has in held.items() if has != NOTHING}

    def gather(self, key: JobKey, roles: Sequence[Role], there: Mapping[str, Allocation]) -> bool:
        """Start tasks of a job evenly on as few nodes as hold them, if some do."""
        if self._targets.names(key):
            return False
        new = Allocation(roles.count(Role.WORKER), roles.count(Role.PS))
        request = self._requests[key]
        if key not in self._begun and not _reaches(roles, request.least):
            return False
        laid = self._packing.gather(request, new, there)
        if laid is None:
            return False
        self._begun.add(key)
        for role, node in laid:
            self._targets.took(node, request.demand(role))
            self.starts.append(Start(key, role, node, request.demand(role)))
        return True

    def start(self, key: JobKey, steps: Sequence[Step]) -> None:
        """Start tasks of some steps as far as there is room; all or none where they are the job's first."""
        placed, missing = self._place(key, steps) if key in self._begun else self._place_first(key, steps)
        self.starts += placed
        for role, why in missing:
            count, first = self._waiting.get((key, role), (0, why))
            self._waiting[key, role] = (count + 1, first)

    def _place_first(self, key: JobKey, steps: Sequence[Step]) -> tuple[list[Start], list[tuple[Role, Blocked]]]:
        """Place the first tasks of a job, all or none: as they were decided, or else the larger ones first.

        A small task that comes first may take the only room that a larger one has.
        """
        request = self._requests[key]
        orders = [steps]
        if key not in self._waits_whole and not self._targets.names(key):
            larger = Role.PS if request.worker.fits_in(request.ps) else Role.WORKER
            orders.append([tuple(sorted(chain(*steps), key=lambda role: role is not larger))])
        for order in orders:
            placed, missing = self._place(key, order)
            if not missing and _reaches([start.role for start in placed], request.least):
                self._begun.add(key)
                return placed, []
            for start in placed:
                self._packing.remove(start.node, start.demand)
                self._targets.gave_back(start.node, start.demand)
        self.held_back += [(key, start.role) for start in placed]
        if not missing:
            return [], []
        # What it waits for is room for the role that has none.
        why = self._waits_whole.setdefault(key, missing[0][1])
        return [], [(role, why) for role in chain(*steps) if role is why.role]

    def _place(self, key: JobKey, steps: Sequence[Step]) -> tuple[list[Start], list[tuple[Role, Blocked]]]:
        """Place tasks one after the other; returns those that have room, and what the others wait for."""
        request = self._requests[key]
        placed: list[Start] = []
        missing: list[tuple[Role, Blocked]] = []
        for unit in chain.from_iterable(self._units(key, step) for step in steps):
            demand = request.demand(unit[0]) if len(unit) == 1 else self._packing.bundle(request)
            before = self._waits_whole.get(key)
            if before is None and (key, unit[0]) in self._waiting:
                before = self._waiting[key, unit[0]][1]
            node = before or self._find((key, unit[0]), demand)
            for role in unit:
                if isinstance(node, Blocked):
                    missing.append((role, node))
                else:
                    placed.append(Start(key, role, node, request.demand(role)))
        return placed, missing

    def deferred(self) -> list[Deferred]:
        """What waits, and for what."""
        return [
            Deferred(key, role, count, why.nearest, why.shortfalls)
            for (key, role), (count, why) in self._waiting.items()
        ]

    def _units(self, key: JobKey, roles: Sequence[Role]) -> Sequence[tuple[Role, ...]]:
        """What goes to one node: single tasks, or bundles where the placement keeps them and no node is named."""
        if not self._keeps_bundles or self._targets.names(key):
            return [(role,) for role in roles]
        workers, ps = roles.count(Role.WORKER), roles.count(Role.PS)
        alone = Role.WORKER if workers > ps else Role.PS
        return [(Role.WORKER, Role.PS)] * min(workers, ps) + [(alone,)] * abs(workers - ps)

    def _find(self, kind: Kind, demand: Resources) -> str | Blocked:
        node = self._targets.place(kind, demand, self._packing, self._tasks)
        if node is not None:
            if isinstance(node, Blocked):
                self.expecting.add(kind)
            return node
        node = self._packing.place(demand, kind[1])
        if isinstance(node, str):
            self._targets.took(node, demand)
        return node
