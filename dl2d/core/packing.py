"""Tasks on nodes: which fit, where, and what is missing when they don't."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add, sub

import numpy as np
from numpy.typing import NDArray

from dl2d.core.cluster import Node, NodeState, Task
from dl2d.core.decision import Constraint
from dl2d.core.jobs import Allocation, Job, JobKey, JobRequest, Role
from dl2d.core.placement import Placement
from dl2d.core.resources import NO_RESOURCES, Resources, Shortfall

#: Amounts in the order of ``Packing._names``, in thousandths.
_Vector = tuple[int, ...]
#: A node in a heap: its place in the order, which one it is, and its count of changes when it was put in.
_Entry = tuple[float, int, int]
#: The demand that every node has room for.
_ANY: _Vector = ()

#: A task that was added: its node, its demand, and whose incumbent it was.
_Step = tuple[int, _Vector, tuple[JobKey, Role] | None]

#: Demands whose nodes are kept in order; for further ones all nodes are looked at each time.
_MOST_HEAPS = 32

_ROLES = (Role.WORKER, Role.PS)


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why a task has no room: on the node that comes nearest, what is wanted and what there is."""

    role: Role
    constraint: Constraint
    nearest: str
    shortfalls: tuple[Shortfall, ...]

    def __str__(self) -> str:
        missing = "; ".join(map(str, self.shortfalls)) or "no node takes tasks"
        match self.constraint:
            case Constraint.INFEASIBLE:
                return f"a {self.role} is larger than any node ({missing} on {self.nearest or 'every node'})"
            case Constraint.FRAGMENTED:
                return f"no single node has room for a {self.role} ({missing} on {self.nearest})"
            case _:
                return f"no room for a {self.role} ({missing} on {self.nearest or 'every node'})"


@dataclass(slots=True, eq=False)
class _Level:
    """What is used and reserved on a node: one record for all nodes on which it is the same."""

    capacity: _Vector
    used: _Vector
    reserved: _Vector
    load: float
    #: Levels that taking or giving back something leads to, by (demand, change of used, change of reserved).
    after: dict[tuple[_Vector, int, int], _Level] = field(default_factory=dict)
    #: The heaps that nodes of this level belong into, out of the first so many that there were.
    heaps: list[list[_Entry]] = field(default_factory=list)
    heaps_known: int = -1
    _fitting: dict[_Vector, bool] = field(default_factory=dict)

    def fits(self, demand: _Vector, *, clear: bool = False) -> bool:
        """Whether there is room for a demand; ``clear`` of what is reserved."""
        if clear:
            amounts = zip(demand, self.used, self.reserved, self.capacity, strict=False)
            return all(wanted + taken + kept <= whole for wanted, taken, kept, whole in amounts if wanted)
        known = self._fitting.get(demand)
        if known is None:
            pairs = zip(demand, self.used, self.capacity, strict=False)
            known = self._fitting[demand] = all(wanted + taken <= whole for wanted, taken, whole in pairs if wanted)
        return known


class Packing:
    """Room on nodes while tasks are added, in exact thousandths.

    Tasks that run already (``incumbents``) are not in the packing at first. When their job is given tasks again, they
    are taken up where they are; until then new tasks keep out of their way as long as there is other room.

    For each of the first demands that are asked for, the nodes with room for it are kept in a heap by the placement's
    order: adding a task then costs O(demands x log nodes). Asking for a new demand costs O(nodes), as does each task of
    any further demand, and saying why there is no room.
    """

    def __init__(self, nodes: Sequence[Node], placement: Placement, *, incumbents: Iterable[Task] = ()) -> None:
        """``node.used`` counts as taken for good: pass what others hold (see ``for_decision``), or what all hold."""
        self._nodes = tuple(nodes)
        self._placement = placement
        self._keeps_bundles, self._head_only = placement.keeps_bundles, placement.head_only
        self._index = {node.name: place for place, node in enumerate(self._nodes)}
        incumbents = tuple(incumbents)
        names = {name for node in self._nodes for name, _ in node.capacity.thousandths}
        self._names = sorted(names | {name for task in incumbents for name, _ in task.demand.thousandths})
        #: Amounts in the order of the names: most nodes and tasks are alike.
        self._known: dict[Resources, tuple[int, ...]] = {}
        #: By the identity of demands, which are kept so that it stays their own: many tasks have the very same one.
        self._vectors: dict[int, tuple[Resources, _Vector | None]] = {}
        self._bundles: dict[int, tuple[JobRequest, Resources]] = {}
        #: How many incumbents wait to be taken up again: without any, nothing is reserved.
        self._waiting = 0
        self._incumbents: dict[tuple[JobKey, Role], list[tuple[int, _Vector]]] = defaultdict(list)
        reserved: dict[int, _Vector] = {}
        for task in sorted(incumbents, key=lambda task: task.number, reverse=True):
            place = self._index.get(task.node)
            if place is not None:
                demand = self._amounts(task.demand)
                self._incumbents[task.job, task.role].append((place, demand))
                reserved[place] = tuple(map(add, reserved.get(place, (0,) * len(self._names)), demand))
                self._waiting += 1
        self._levels: dict[tuple[_Vector, _Vector, _Vector], _Level] = {}
        nothing = (0,) * len(self._names)
        self._at = [
            self._level(self._amounts(node.capacity), self._amounts(node.used), reserved.get(place, nothing))
            for place, node in enumerate(self._nodes)
        ]
        self._takes = [node.state is NodeState.UP for node in self._nodes]
        #: Counts the changes of each node: an entry of a heap with an older count is stale.
        self._stamps = [0] * len(self._nodes)
        #: By demand, and whether room that is reserved does not count.
        self._heaps: dict[tuple[_Vector, bool], list[_Entry]] = {}
        #: Numbers what is used where: the same steps lead to the same state, so that a reason is found once in each.
        self._states = itertools.count(1)
        self._state = 0
        self._reached: dict[tuple[int, int, _Vector], int] = {}
        self._reasons: dict[tuple[int, Resources, Role], Blocked] = {}
        #: The node that lacks the least of a demand, and its level then. While that is its level and nothing was given
        #: back, every other node lacks as much as it did, or more.
        self._least: dict[Resources, tuple[int, _Level]] = {}
        #: For which demands it was found, in turn.
        self._found: list[Resources] = []
        #: Demands that no node has room for: none will have, unless something is given back. And the same in turn.
        self._full: set[Resources] = set()
        self._refused: list[Resources] = []
        #: For demands that were refused: why no node could ever hold them, or None where one could.
        self._infeasible: dict[Resources, Blocked | None] = {}
        #: The same as matrices, for questions about all nodes at once; shape (resources, nodes). Nodes that have
        #: changed since are brought up to date when the next question comes.
        shape = (len(self._nodes), len(self._names))
        self._capacities = np.array([level.capacity for level in self._at], dtype=np.int64).reshape(shape).T.copy()
        self._free = np.zeros_like(self._capacities)
        self._clear = np.empty_like(self._capacities)
        self._loads = np.empty(len(self._nodes))
        self._changed = set(range(len(self._nodes)))
        self._up = np.array(self._takes, dtype=bool)
        #: What is free on nodes that take tasks, summed; shape (resources,).
        self._total = np.zeros(len(self._names), dtype=np.int64)

    @classmethod
    def for_decision(cls, nodes: Sequence[Node], tasks: Iterable[Task], placement: Placement) -> Packing:
        """A packing in which all our tasks may be given anew: only what others hold is taken.

        ``node.used`` must count all of ``tasks``. Tasks that are meant to stay are the incumbents.
        """
        tasks = tuple(tasks)
        ours: dict[str, list[Resources]] = defaultdict(list)
        for task in tasks:
            ours[task.node].append(task.demand)
        others = [
            Node(node.name, node.capacity, node.used.minus(Resources.total(ours[node.name])), node.state)
            if node.name in ours
            else node
            for node in nodes
        ]
        return cls(others, placement, incumbents=[task for task in tasks if task.state.wanted])

    @property
    def head_only(self) -> bool:
        """Whether a task goes to the first node in the placement's order or to none."""
        return self._head_only

    @property
    def gathers(self) -> bool:
        """Whether new tasks of a job are laid on as few nodes as hold them."""
        return self._placement.gathers

    def add(self, job: Job, delta: Allocation) -> Blocked | None:
        """Add tasks of a job, workers and PSs in turn, all or none; returns what stood in the way."""
        if not self._waiting and sum(delta) == 1:
            role = Role.WORKER if delta.workers else Role.PS
            step = self._place_new(job.request.demand(role), role)
            return step if isinstance(step, Blocked) else None
        begun = self._state, len(self._found), len(self._refused)
        done, blocked = self._give(job, delta)
        if blocked is not None:
            self._rewind(done, *begun)
        return blocked

    def fits(self, job: Job, delta: Allocation) -> bool:
        """Whether ``add`` would find room for these tasks; nothing is added."""
        begun = self._state, len(self._found), len(self._refused)
        done, blocked = self._give(job, delta)
        self._rewind(done, *begun)
        return blocked is None

    def _give(self, job: Job, delta: Allocation) -> tuple[list[_Step], Blocked | None]:
        """Add tasks in turn, up to the first that has no room; returns those that were, and what stood in its way."""
        done: list[_Step] = []
        request = job.request
        apart = [(role, request.demand(role), many) for role, many in zip(_ROLES, delta, strict=True) if many]
        for number in range(max(delta)):
            parts = apart
            bundled = self._keeps_bundles and number < delta.workers and number < delta.ps
            if bundled and not any(self._incumbents.get((job.key, role)) for role in _ROLES):
                parts = [(Role.WORKER, self.bundle(request), delta.workers)]
            for role, demand, many in parts:
                if number >= many:
                    continue
                taken_up = self._take_up(job.key, role) if self._waiting else None
                step = taken_up or self._place_new(demand, role)
                if isinstance(step, Blocked):
                    return done, step
                done.append(step)
        return done, None

    def _rewind(self, done: Sequence[_Step], state: int, found: int, refused: int) -> None:
        """Take back what was added, and what was found out while there was less room than there is now."""
        if not done:
            return
        for taken in reversed(done):
            self._undo(taken)
        self._state = state
        while len(self._found) > found:
            self._least.pop(self._found.pop(), None)
        while len(self._refused) > refused:
            self._full.remove(self._refused.pop())

    def bundle(self, request: JobRequest) -> Resources:
        """What a worker and a PS ask for together."""
        known = self._bundles.get(id(request))
        if known is None:
            # The request is kept as well, so that its identity stays its own.
            known = self._bundles[id(request)] = request, request.worker + request.ps
        return known[1]

    def place(self, demand: Resources, role: Role) -> str | Blocked:
        """Add one new task; returns its node, or what stood in the way."""
        step = self._place_new(demand, role)
        return step if isinstance(step, Blocked) else self._nodes[step[0]].name

    def place_all(self, demand: Resources, role: Role, many: int) -> tuple[list[str], Blocked | None]:
        """Add new tasks one by one, as many as have room; returns their nodes, and what stood in the way."""
        placed: list[str] = []
        for _ in range(many):
            step = self._place_new(demand, role)
            if isinstance(step, Blocked):
                return placed, step
            placed.append(self._nodes[step[0]].name)
        return placed, None

    def place_on(self, node: str, demand: Resources) -> bool:
        """Add one new task on a node of the caller's choice; returns whether it has room and takes tasks."""
        place = self._index.get(node)
        vector = self._vector(demand)
        if place is None or vector is None or not self._takes[place] or not self._at[place].fits(vector):
            return False
        self._take(place, vector)
        return True

    def gather(
        self, request: JobRequest, new: Allocation, there: Mapping[str, Allocation]
    ) -> list[tuple[Role, str]] | None:
        """Add tasks of a job on as few nodes as hold them evenly, all or none; returns their nodes.

        The nodes that hold tasks of the job already (``there``) are joined by the first others in the order that have
        room for a worker and a PS, one more at a time, until the job's workers and its PSs can both be laid evenly:
        each new one goes to the node with the fewest of its role. None where no number of nodes will do.
        """
        vectors = [self._vector(request.demand(role)) for role in _ROLES]
        together = tuple(
            sum(amounts)
            for amounts in zip(
                *(vector for role, vector in zip(_ROLES, vectors, strict=True) if vector and new.count(role)),
                strict=True,
            )
        )
        if any(vector is None and new.count(role) for role, vector in zip(_ROLES, vectors, strict=True)):
            return None
        places = [place for name in there if (place := self._index.get(name)) is not None and self._takes[place]]
        places.sort(key=lambda place: (self._at[place].load, place))
        has = [[there[self._nodes[place].name].count(role) for place in places] for role in _ROLES]
        most = max(sum(counts) + new.count(role) for role, counts in zip(_ROLES, has, strict=True))
        order = self._in_order(together)
        laid = self._evenly(places, has, vectors, new)
        while laid is None and len(places) < most:
            place = next((place for place in order if place not in places), None)
            if place is None:
                break
            places.append(place)
            for counts in has:
                counts.append(0)
            laid = self._evenly(places, has, vectors, new)
        order.close()
        for role, place in laid or ():
            vector = vectors[_ROLES.index(role)]
            assert vector is not None
            self._take(place, vector)
        return None if laid is None else [(role, self._nodes[place].name) for role, place in laid]

    def room(self) -> dict[str, Resources]:
        """What is free on each node that takes tasks."""
        return {node.name: self._room_on(place) for place, node in enumerate(self._nodes) if self._takes[place]}

    def left(self) -> Resources:
        """What is free on all nodes that take tasks together."""
        self._catch_up()
        return Resources(
            tuple((name, free) for name, free in zip(self._names, self._total.tolist(), strict=True) if free)
        )

    def room_on(self, node: str) -> Resources:
        """What is free on a node, whether it takes tasks or not; nothing where there is no such node."""
        return self._room_on(self._index[node]) if node in self._index else NO_RESOURCES

    def remove(self, node: str, demand: Resources) -> None:
        """Take a task out again that was placed by anything but ``add``."""
        self._undo((self._index[node], self._amounts(demand), None))
        self._state = next(self._states)
        self._least.clear()
        self._full.clear()
        self._refused.clear()

    def _take_up(self, job: JobKey, role: Role) -> _Step | None:
        waiting = self._incumbents.get((job, role))
        if not waiting:
            return None
        place, demand = waiting[-1]
        if not self._at[place].fits(demand):
            return None
        waiting.pop()
        self._waiting -= 1
        self._take(place, demand, kept=-1)
        return place, demand, (job, role)

    def _place_new(self, demand: Resources, role: Role) -> _Step | Blocked:
        vector = self._vector(demand)
        full = bool(self._full) and demand in self._full
        if vector is None or full:
            place = None
        elif self._waiting or self._head_only:
            place = self._choose(vector)
        else:
            place = self._first(vector, clear=False)
        if vector is None or place is None:
            # Where only the first node is tried, another may be the first next time.
            if not full and not self._head_only:
                self._full.add(demand)
                self._refused.append(demand)
            asked = (self._state, demand, role)
            if asked not in self._reasons:
                self._reasons[asked] = self._why_not(demand, role)
            return self._reasons[asked]
        self._take(place, vector)
        return place, vector, None

    def _choose(self, demand: _Vector) -> int | None:
        """First node in the order with room, out of the way of incumbents where there is such a one."""
        if self._head_only:
            head = self._first(_ANY, clear=False)
            return head if head is not None and self._at[head].fits(demand) else None
        clear = self._first(demand, clear=True) if self._waiting else None
        return self._first(demand, clear=False) if clear is None else clear

    def _first(self, demand: _Vector, *, clear: bool) -> int | None:
        """First node in the order with room."""
        heap = self._heaps.get((demand, clear))
        if heap is None:
            heap = self._heap(demand, clear=clear)
        if heap is not None:
            stamps = self._stamps
            while heap and heap[0][2] != stamps[heap[0][1]]:
                heapq.heappop(heap)
            return heap[0][1] if heap else None
        fitting = self._fitting(demand, clear=clear)
        place = int(np.where(fitting, self._loads, np.inf).argmin()) if fitting.size else 0
        return place if fitting.any() else None

    def _in_order(self, demand: _Vector) -> Generator[int]:
        """All nodes with room in the order. Nothing may be taken before the generator is closed."""
        heap = self._heap(demand, clear=False)
        if heap is None:
            places = np.flatnonzero(self._fitting(demand, clear=False))
            yield from places[np.argsort(self._loads[places], kind="stable")].tolist()
            return
        passed: list[_Entry] = []
        try:
            while self._first(demand, clear=False) is not None:
                passed.append(heapq.heappop(heap))
                yield passed[-1][1]
        finally:
            for entry in passed:
                heapq.heappush(heap, entry)

    def _evenly(
        self, places: Sequence[int], has: Sequence[Sequence[int]], vectors: Sequence[_Vector | None], new: Allocation
    ) -> list[tuple[Role, int]] | None:
        """Each new task with the fewest of its role, the first of equals; None where one has no room there."""
        if not places:
            return None
        laid: list[tuple[Role, int]] = []
        taken: dict[int, list[int]] = {}
        for role, counts_now, vector in zip(_ROLES, has, vectors, strict=True):
            counts = list(counts_now)
            for _ in range(new.count(role)):
                assert vector is not None
                which = counts.index(min(counts))
                counts[which] += 1
                laid.append((role, places[which]))
                so_far = taken.get(places[which])
                taken[places[which]] = list(vector) if so_far is None else list(map(add, so_far, vector))
        return laid if all(self._at[place].fits(tuple(amounts)) for place, amounts in taken.items()) else None

    def _heap(self, demand: _Vector, *, clear: bool) -> list[_Entry] | None:
        """The nodes with room for a demand; None where too many demands have a heap already."""
        heap = self._heaps.get((demand, clear))
        if heap is None and len(self._heaps) < _MOST_HEAPS:
            places = np.flatnonzero(self._fitting(demand, clear=clear)).tolist()
            heap = [(self._at[place].load, place, self._stamps[place]) for place in places]
            heapq.heapify(heap)
            self._heaps[demand, clear] = heap
        return heap

    def _fitting(self, demand: _Vector, *, clear: bool) -> NDArray[np.bool_]:
        """Which nodes take tasks and have room; shape (nodes,)."""
        self._catch_up()
        fitting = self._up.copy()
        for wanted, had in zip(demand, self._clear if clear else self._free, strict=False):
            if wanted:
                fitting &= had >= wanted
        return fitting

    def _catch_up(self) -> None:
        """Bring the matrices up to date."""
        if not self._changed:
            return
        places = list(self._changed)
        # Few nodes differ from all others: their amounts are looked at once.
        numbers: dict[_Level, int] = {}
        which = [numbers.setdefault(self._at[place], len(numbers)) for place in places]
        shape = (len(numbers), len(self._names))
        used = np.array([level.used for level in numbers], dtype=np.int64).reshape(shape)[which].T
        reserved = np.array([level.reserved for level in numbers], dtype=np.int64).reshape(shape)[which].T
        up = self._up[places]
        self._total -= np.maximum(self._free[:, places], 0)[:, up].sum(axis=1)
        self._free[:, places] = self._capacities[:, places] - used
        self._total += np.maximum(self._free[:, places], 0)[:, up].sum(axis=1)
        self._clear[:, places] = self._free[:, places] - reserved
        self._loads[places] = np.array([level.load for level in numbers])[which]
        self._changed.clear()

    def _take(self, place: int, demand: _Vector, *, kept: int = 0) -> None:
        step = (self._state, place, demand)
        reached = self._reached.get(step)
        if reached is None:
            reached = self._reached[step] = next(self._states)
        self._state = reached
        self._change(place, demand, 1, kept)

    def _undo(self, step: _Step) -> None:
        place, demand, incumbent = step
        if incumbent is not None:
            self._incumbents[incumbent].append((place, demand))
            self._waiting += 1
        self._change(place, demand, -1, 0 if incumbent is None else 1)

    def _change(self, place: int, demand: _Vector, used: int, kept: int) -> None:
        """Add a demand, so many times, to what is used and to what is reserved on a node."""
        level = self._at[place]
        after = level.after.get((demand, used, kept))
        if after is None:
            changed = [level.used, level.reserved]
            for which, sign in enumerate((used, kept)):
                if sign:
                    changed[which] = tuple(map(add if sign > 0 else sub, changed[which], demand))
            after = level.after[demand, used, kept] = self._level(level.capacity, *changed)
        self._at[place] = after
        self._changed.add(place)
        stamp = self._stamps[place] = self._stamps[place] + 1
        if not self._takes[place]:
            return
        if after.heaps_known != len(self._heaps):
            after.heaps_known = len(self._heaps)
            after.heaps = [heap for (asked, clear), heap in self._heaps.items() if after.fits(asked, clear=clear)]
        entry = (after.load, place, stamp)
        for heap in after.heaps:
            heapq.heappush(heap, entry)

    def _level(self, capacity: _Vector, used: _Vector, reserved: _Vector) -> _Level:
        level = self._levels.get((capacity, used, reserved))
        if level is None:
            load = self._placement.load(used, capacity)
            level = self._levels[capacity, used, reserved] = _Level(capacity, used, reserved, load)
        return level

    def _why_not(self, demand: Resources, role: Role) -> Blocked:
        """Name the binding constraint, on the node that lacks the least (as a fraction of the demand)."""
        if not self._up.any():
            return Blocked(role, Constraint.CAPACITY, "", demand.shortfalls(NO_RESOURCES))
        if demand not in self._infeasible:
            nearest = self._nodes[self._nearest(demand, self._capacities)]
            missing = demand.shortfalls(nearest.capacity)
            blocked = Blocked(role, Constraint.INFEASIBLE, nearest.name, missing) if missing else None
            self._infeasible[demand] = blocked
        if (infeasible := self._infeasible[demand]) is not None:
            return replace(infeasible, role=role)
        self._catch_up()
        known = self._least.get(demand)
        if known is None or self._at[known[0]] is not known[1]:
            place = self._nearest(demand, np.maximum(self._free, 0))
            self._least[demand] = known = place, self._at[place]
            self._found.append(demand)
        place = known[0]
        in_total = any(wanted > had for wanted, had in zip(self._amounts(demand), self._total.tolist(), strict=True))
        constraint = Constraint.CAPACITY if in_total else Constraint.FRAGMENTED
        return Blocked(role, constraint, self._nodes[place].name, demand.shortfalls(self._room_on(place)))

    def _nearest(self, demand: Resources, room: NDArray[np.int64]) -> int:
        """Node that takes tasks and lacks the least of a demand, as a fraction of it; the first of equals."""
        wanted = np.array(self._amounts(demand), dtype=np.float64)
        asked = wanted > 0
        lack = (np.maximum(wanted[asked, None] - room[asked], 0) / wanted[asked, None]).sum(axis=0)
        return int(np.where(self._up, lack, np.inf).argmin())

    def _vector(self, demand: Resources) -> _Vector | None:
        """Amounts in the order of ``_names``, or None where no node has any of something that is asked for."""
        found = self._vectors.get(id(demand))
        if found is None:
            known = {name for name, _ in demand.thousandths} <= set(self._names)
            found = self._vectors[id(demand)] = demand, self._amounts(demand) if known else None
        return found[1]

    def _amounts(self, resources: Resources) -> _Vector:
        known = self._known.get(resources)
        if known is None:
            given = dict(resources.thousandths)
            known = self._known[resources] = tuple([given.get(name, 0) for name in self._names])
        return known

    def _room_on(self, place: int) -> Resources:
        level = self._at[place]
        free = zip(self._names, level.capacity, level.used, strict=True)
        return Resources(tuple((name, whole - taken) for name, whole, taken in free if whole > taken))
