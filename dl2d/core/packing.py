"""Tasks on nodes: which fit, where, and what is missing when they don't."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add, attrgetter, is_not, le, sub
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dl2d.core.cluster import Node, NodeState, Task
from dl2d.core.decision import Constraint
from dl2d.core.jobs import Allocation, Job, JobKey, JobRequest, Role
from dl2d.core.placement import Placement
from dl2d.core.resources import NO_RESOURCES, Resources, Shortfall

#: Amounts in the order of ``Packing._names``, in thousandths.
_Vector = tuple[int, ...]
#: The demand that every node has room for.
_ANY: _Vector = ()
#: Tasks that were added, one to each of some nodes that were alike: their demand, the nodes, the levels that those were
#: and are at, and, of a single one that was taken up again, whose incumbent it was.
_Step = tuple[_Vector, Sequence[int], "_Level", "_Level", tuple[JobKey, Role] | None]

#: Demands whose nodes are kept in order; for further ones all nodes are looked at each time.
_MOST_ORDERS = 32

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

    #: No other level has it.
    number: int
    capacity: _Vector
    used: _Vector
    reserved: _Vector
    load: float
    #: What is free, nothing where more is used than there is; and what is clear of what is reserved, too.
    free: _Vector
    clear: _Vector
    #: Nodes at this level that take tasks, a heap; and such as were there once: they are not at it any more.
    places: list[int] = field(default_factory=list)
    #: Levels that new tasks lead to, by their demands; and those that incumbents lead to that are taken up, where
    #: they have room.
    after: dict[_Vector, _Level] = field(default_factory=dict)
    taken_up: dict[_Vector, _Level] = field(default_factory=dict)

    def fits(self, demand: _Vector, *, clear: bool = False) -> bool:
        """Whether there is room for a demand; ``clear`` of what is reserved."""
        return all(map(le, demand, self.clear if clear else self.free))

    def first(self, at: Sequence[_Level]) -> int | None:
        """First of its nodes, where ``at`` says at which level each node is."""
        places = self.places
        while places and at[places[0]] is not self:
            heapq.heappop(places)
        return places[0] if places else None

    def pop(self, at: Sequence[_Level], many: int, end: int) -> list[int]:
        """Take out the first of its nodes, so many at most, and those before ``end`` alone; at least one is there."""
        places = self.places
        popped = [heapq.heappop(places)]
        while places and len(popped) < many:
            place = places[0]
            # A node that came back may stand there twice.
            if at[place] is not self or place == popped[-1]:
                heapq.heappop(places)
            elif place < end:
                popped.append(heapq.heappop(places))
            else:
                break
        return popped


class _Order:
    """Levels with room for a demand by the placement's order of their first nodes: a heap with one entry for each.

    An entry may be behind, at a node that was first once; it is brought up to date when it comes to the top. And which
    nodes came to levels since is asked only when the order is: most demands have their turn, and that is all.
    """

    __slots__ = ("_clear", "_demand", "_entries", "_heard", "_posted")

    def __init__(
        self, demand: _Vector, levels: Iterable[_Level], at: Sequence[_Level], heard: int, *, clear: bool
    ) -> None:
        self._demand, self._clear = demand, clear
        #: The node at which each level was entered.
        self._posted = {
            level: place
            for level in levels
            if level.places and level.fits(demand, clear=clear) and (place := level.first(at)) is not None
        }
        self._entries = [(level.load, place, level.number, level) for level, place in self._posted.items()]
        heapq.heapify(self._entries)
        #: How much of what came is known.
        self._heard = heard

    def hear(self, came: Sequence[_Level], at: Sequence[_Level]) -> None:
        """Enter levels that nodes have come to, in the order in which all of them did."""
        for number in range(self._heard, len(came)):
            level = came[number]
            if level.places and level.fits(self._demand, clear=self._clear):
                place = level.first(at)
                posted = self._posted.get(level)
                if place is not None and (posted is None or place < posted):
                    self._posted[level] = place
                    heapq.heappush(self._entries, (level.load, place, level.number, level))
        self._heard = len(came)

    def first(self, at: Sequence[_Level]) -> int | None:
        """First node in the order."""
        entries = self._entries
        while entries:
            load, place, number, level = entries[0]
            first = level.first(at)
            if first == place:
                return place
            if first is None or self._posted.get(level) != place:
                # No node is there any more, or another entry of this level came before.
                heapq.heappop(entries)
                if first is None:
                    self._posted.pop(level, None)
            else:
                self._posted[level] = first
                heapq.heapreplace(entries, (load, first, number, level))
        return None

    def end(self, load: float, nodes: int) -> int:
        """Node up to which those of the first level, whose load this is, come before all others, at least."""
        others = self._entries[1:3]
        if not others:
            return nodes
        other = min(others)
        return other[1] if other[0] <= load else nodes


class _Begun(NamedTuple):
    """What was known when adding began: how many steps were made, reasons found and demands refused."""

    steps: int
    found: int
    refused: int


@dataclass(slots=True)
class _Rooms:
    """Room as matrices, for questions about all nodes at once; shape (resources, nodes)."""

    capacities: NDArray[np.int64]
    free: NDArray[np.int64]
    #: Free of what is reserved, too.
    clear: NDArray[np.int64]
    #: Places in the order, and which nodes take tasks; shape (nodes,).
    loads: NDArray[np.float64]
    up: NDArray[np.bool_]
    #: Nodes that have changed since: they are brought up to date when the next question comes.
    changed: set[int]


class Packing:
    """Room on nodes while tasks are added, in exact thousandths.

    Tasks that run already (``incumbents``) are not in the packing at first. When their job is given tasks again, they
    are taken up where they are; until then new tasks keep out of their way as long as there is other room.

    Nodes that are alike in what they have and in what is used are one level. For each of the first demands that are
    asked for, the levels with room for it are kept in a heap by the placement's order: adding a task then costs
    O(demands + log nodes), and several at once, which go to nodes of one level in turn, O(log nodes) each. Asking for a
    new demand costs O(levels); each task of any further demand, and saying why there is no room, O(nodes).
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        placement: Placement,
        *,
        incumbents: Iterable[Task] = (),
        leaving: Iterable[Task] = (),
        counted: bool = False,
    ) -> None:
        """``node.used`` is taken for good, less what these tasks have if they are ``counted`` in it."""
        self._nodes = tuple(nodes)
        self._placement = placement
        self._keeps_bundles, self._head_only = placement.keeps_bundles, placement.head_only
        self._index = {node.name: place for place, node in enumerate(self._nodes)}
        incumbents, leaving = tuple(incumbents), tuple(leaving)
        # Most demands are of few kinds, and most nodes are alike: each is looked at once.
        demands = {id(task.demand): task.demand for task in incumbents + leaving}
        capacities = {node.capacity for node in self._nodes}
        self._names = sorted({name for each in (*capacities, *demands.values()) for name, _ in each.thousandths})
        #: Amounts in the order of the names: most nodes and tasks are alike.
        self._known: dict[Resources, tuple[int, ...]] = {}
        #: By the identity of demands, which are kept so that it stays their own: many tasks have the very same one.
        self._vectors: dict[int, tuple[Resources, _Vector | None]] = {}
        self._bundles: dict[int, tuple[JobRequest, Resources]] = {}
        #: How many incumbents wait to be taken up again: without any, nothing is reserved.
        self._waiting = 0
        self._incumbents: dict[tuple[JobKey, Role], list[tuple[int, _Vector]]] = defaultdict(list)
        vectors = {number: self._amounts(demand) for number, demand in demands.items()}
        held: list[list[int]] = [[] for _ in self._nodes]
        for task in sorted(incumbents, key=attrgetter("number"), reverse=True):
            found = self._index.get(task.node)
            if found is not None:
                demand = id(task.demand)
                self._incumbents[task.job, task.role].append((found, vectors[demand]))
                held[found].append(demand)
                self._waiting += 1
        left: dict[int, list[int]] = defaultdict(list)
        for task in leaving:
            if task.node in self._index:
                left[self._index[task.node]].append(id(task.demand))
        nothing = self._nothing = (0,) * len(self._names)
        self._levels: dict[tuple[_Vector, _Vector, _Vector], _Level] = {}
        forms: dict[tuple[Resources, Resources, tuple[int, ...], tuple[int, ...]], _Level] = {}
        at: list[_Level] = []
        for place, node in enumerate(self._nodes):
            form = node.capacity, node.used, tuple(held[place]), tuple(left[place]) if place in left else ()
            level = forms.get(form)
            if level is None:
                reserved, gone = (_total([vectors[each] for each in some], nothing) for some in form[2:])
                used = self._amounts(node.used)
                if counted:
                    used = tuple(map(max, map(sub, used, map(add, reserved, gone)), nothing))
                level = forms[form] = self._level(self._amounts(node.capacity), used, reserved)
            at.append(level)
        #: The level of each node, and nodes that came to one since levels' heaps and orders were asked last.
        self._at = at
        self._came: list[int] = []
        #: Levels whose heaps have got nodes, in turn.
        self._grown: list[_Level] = []
        self._takes = [node.state is NodeState.UP for node in self._nodes]
        for place in itertools.compress(range(len(self._nodes)), self._takes):
            # In ascending order, which is one for a heap.
            self._at[place].places.append(place)
        #: By demand, and whether room that is reserved does not count.
        self._orders: dict[tuple[_Vector, bool], _Order] = {}
        #: Steps so far, since the last task was taken out.
        self._steps: list[_Step] = []
        #: What is free on nodes that take tasks, summed, after so many steps: found where it is asked for.
        total = nothing
        for level in self._levels.values():
            total = _plus(total, len(level.places), level.free)
        self._totals = [(0, total)]
        #: Numbers what is used where: the same steps lead to the same state, so that a reason is found once in each.
        #: Only where a reason is asked for: after so many steps it was this state.
        self._states = itertools.count(1)
        self._reached: dict[tuple[int, int, _Vector], int] = {}
        self._numbered = [(0, 0)]
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
        #: Made when first asked about.
        self._rooms: _Rooms | None = None

    @classmethod
    def for_decision(cls, nodes: Sequence[Node], tasks: Iterable[Task], placement: Placement) -> Packing:
        """A packing in which all our tasks may be given anew: only what others hold is taken.

        ``node.used`` must count all of ``tasks``. Tasks that are meant to stay are the incumbents.
        """
        wanted, leaving = list[Task](), list[Task]()
        for task in tasks:
            (wanted if task.state.wanted else leaving).append(task)
        return cls(nodes, placement, incumbents=wanted, leaving=leaving, counted=True)

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
            return self._place_new(job.request.demand(role), role)
        begun = self._begin()
        blocked = self._give(job, delta)
        if blocked is not None:
            self._rewind(begun)
        return blocked

    def fits(self, job: Job, delta: Allocation) -> bool:
        """Whether ``add`` would find room for these tasks; nothing is added."""
        begun = self._begin()
        blocked = self._give(job, delta)
        self._rewind(begun)
        return blocked is None

    def stay(self, sizes: Sequence[tuple[JobKey, Allocation]]) -> list[bool]:
        """Take up incumbents of jobs where they are, of each job so many or none; returns of which.

        Adding them finds the same room, but one after the other. What was done before cannot be taken back any more.
        """
        at, was, stayed = self._at, list(self._at), list[bool]()
        for key, size in sizes:
            workers, servers = waiting = [self._incumbents.get((key, role), []) for role in _ROLES]
            tasks = workers[: -size.workers - 1 : -1] + servers[: -size.ps - 1 : -1]
            levels = [at[place] for place, _ in tasks]
            stays = len(tasks) == sum(size)
            if stays:
                for place, demand in tasks:
                    after = at[place].taken_up.get(demand) or self._taken_up(at[place], demand)
                    if after is None:
                        stays = False
                        break
                    at[place] = after
            stayed.append(stays)
            if stays:
                for some, many in zip(waiting, size, strict=True):
                    del some[len(some) - many :]
                self._waiting -= len(tasks)
            else:
                for (place, _), level in zip(tasks, levels, strict=True):
                    at[place] = level
        moved = list(itertools.compress(range(len(at)), map(is_not, at, was)))
        self._changed(moved)
        self._came += itertools.compress(moved, [self._takes[place] for place in moved])
        total = self._nothing
        for level, many in Counter(itertools.compress(at, self._takes)).items():
            total = _plus(total, many, level.free)
        self._begin_anew(total)
        return stayed

    def _taken_up(self, level: _Level, demand: _Vector) -> _Level | None:
        """The level at which a node is where an incumbent was taken up, or None where it has no room."""
        if not level.fits(demand):
            return None
        used, reserved = tuple(map(add, level.used, demand)), tuple(map(sub, level.reserved, demand))
        after = level.taken_up[demand] = self._level(level.capacity, used, reserved)
        return after

    def _give(self, job: Job, delta: Allocation) -> Blocked | None:
        """Add tasks in turn, up to the first that has no room; returns what stood in its way."""
        both = min(delta)
        for _ in range(both):
            blocked = self._give_both(job)
            if blocked is not None:
                return blocked
        for role, many in zip(_ROLES, delta, strict=True):
            if many > both:
                blocked = self._give_alone(job, role, many - both)
                if blocked is not None:
                    return blocked
        return None

    def _give_both(self, job: Job) -> Blocked | None:
        """Add a worker and a PS."""
        if self._keeps_bundles and not any(self._incumbents.get((job.key, role)) for role in _ROLES):
            return self._place_new(self.bundle(job.request), Role.WORKER)
        for role in _ROLES:
            blocked = self._give_alone(job, role, 1)
            if blocked is not None:
                return blocked
        return None

    def _give_alone(self, job: Job, role: Role, many: int) -> Blocked | None:
        """Add tasks of one role: those that are to be taken up where they are come first."""
        if self._waiting:
            many -= self._take_up(job.key, role, many)
        return self._place_new(job.request.demand(role), role, many) if many else None

    def _begin(self) -> _Begun:
        return _Begun(len(self._steps), len(self._found), len(self._refused))

    def _rewind(self, begun: _Begun) -> None:
        """Take back what was added, and what was found out while there was less room than there is now."""
        steps = self._steps
        if len(steps) == begun.steps:
            return
        while len(steps) > begun.steps:
            demand, places, before, after, incumbent = steps.pop()
            if incumbent is not None:
                self._incumbents[incumbent].append((places[0], demand))
                self._waiting += 1
            for place in reversed(places):
                # What came last to a heap is often at its end, and only there it can be taken away at once.
                if after.places and after.places[-1] == place:
                    after.places.pop()
            self._come(places, before)
        for known in (self._numbered, self._totals):
            while known[-1][0] > begun.steps:
                known.pop()
        while len(self._found) > begun.found:
            self._least.pop(self._found.pop(), None)
        while len(self._refused) > begun.refused:
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
        blocked = self._place_new(demand, role)
        return self._nodes[self._steps[-1][1][0]].name if blocked is None else blocked

    def place_all(self, demand: Resources, role: Role, many: int) -> tuple[list[str], Blocked | None]:
        """Add new tasks one by one, as many as have room; returns their nodes, and what stood in the way."""
        begun = len(self._steps)
        blocked = self._place_new(demand, role, many) if many else None
        return [self._nodes[place].name for _, places, *_ in self._steps[begun:] for place in places], blocked

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
        return Resources(tuple((name, free) for name, free in zip(self._names, self._total(), strict=True) if free))

    def room_on(self, node: str) -> Resources:
        """What is free on a node, whether it takes tasks or not; nothing where there is no such node."""
        return self._room_on(self._index[node]) if node in self._index else NO_RESOURCES

    def remove(self, node: str, demand: Resources) -> None:
        """Take a task out again that was placed by anything but ``add``."""
        place = self._index[node]
        before = self._at[place]
        used = tuple(map(sub, before.used, self._amounts(demand)))
        after = self._level(before.capacity, used, before.reserved)
        total = self._total()
        if self._takes[place]:
            total = _plus(_plus(total, 1, after.free), -1, before.free)
        self._come((place,), after)
        self._begin_anew(total)

    def _begin_anew(self, total: _Vector) -> None:
        """From what is free now; what was done before cannot be taken back any more."""
        self._steps.clear()
        self._numbered, self._totals = [(0, next(self._states))], [(0, total)]
        self._least.clear()
        self._full.clear()
        self._refused.clear()

    def _take_up(self, job: JobKey, role: Role, most: int) -> int:
        """Take up so many incumbents where they are, up to the first that has no room there; returns how many."""
        whose = (job, role)
        waiting = self._incumbents.get(whose)
        if not waiting:
            return 0
        steps, at = self._steps, self._at
        begun = len(steps)
        for place, demand in waiting[: -most - 1 : -1]:
            before = at[place]
            after = before.taken_up.get(demand) or self._taken_up(before, demand)
            if after is None:
                break
            at[place] = after
            steps.append((demand, (place,), before, after, whose))
        places = [places[0] for _, places, *_ in itertools.islice(steps, begun, None)]
        if places:
            del waiting[-len(places) :]
            self._waiting -= len(places)
            self._changed(places)
            takes = self._takes
            self._came += [place for place in places if takes[place]]
        return len(places)

    def _place_new(self, demand: Resources, role: Role, many: int = 1) -> Blocked | None:
        """Add new tasks one after the other; returns what stood in the way of one."""
        vector = self._vector(demand)
        full = bool(self._full) and demand in self._full
        if vector is not None and not full:
            while many and (placed := self._lay(vector, many)):
                many -= placed
        if not many:
            return None
        # Where only the first node is tried, another may be the first next time.
        if not full and not self._head_only:
            self._full.add(demand)
            self._refused.append(demand)
        asked = (self._state(), demand, role)
        if asked not in self._reasons:
            self._reasons[asked] = self._why_not(demand, role)
        return self._reasons[asked]

    def _lay(self, demand: _Vector, most: int) -> int:
        """Add one new task, and of those that follow such as go to nodes that are alike; returns how many."""
        order, place = self._choose(demand)
        if place is None:
            return 0
        before = self._at[place]
        after = self._after(before, demand)
        places: Sequence[int] = (place,)
        if order is not None:
            if most > 1 and after.load > before.load:
                # A node that was given one comes after all that are as it was.
                places = before.pop(self._at, most, order.end(before.load, len(self._nodes)))
            else:
                heapq.heappop(before.places)
        self._steps.append((demand, places, before, after, None))
        self._move(places, after)
        self._enter(places, after)
        return len(places)

    def _choose(self, demand: _Vector) -> tuple[_Order | None, int | None]:
        """First node with room, out of the way of incumbents where there is such a one; and the order it is from."""
        if self._head_only:
            order, head = self._first(_ANY, clear=False)
            return order, head if head is not None and self._at[head].fits(demand) else None
        if self._waiting:
            order, clear = self._first(demand, clear=True)
            if clear is not None:
                return order, clear
        return self._first(demand, clear=False)

    def _first(self, demand: _Vector, *, clear: bool) -> tuple[_Order | None, int | None]:
        """First node in the order with room; and that order, if it is kept."""
        order = self._order(demand, clear=clear)
        if order is not None:
            return order, order.first(self._at)
        fitting = self._fitting(demand, clear=clear)
        place = int(np.where(fitting, self._caught_up().loads, np.inf).argmin()) if fitting.size else 0
        return None, place if fitting.any() else None

    def _in_order(self, demand: _Vector) -> Generator[int]:
        """All nodes with room in the order. Nothing may be taken before the generator is closed."""
        order = self._order(demand, clear=False)
        if order is None:
            places = np.flatnonzero(self._fitting(demand, clear=False))
            yield from places[np.argsort(self._caught_up().loads[places], kind="stable")].tolist()
            return
        passed: list[int] = []
        try:
            while (place := order.first(self._at)) is not None:
                passed += self._at[place].pop(self._at, 1, 0)
                yield place
        finally:
            for place in passed:
                self._enter((place,), self._at[place])

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

    def _order(self, demand: _Vector, *, clear: bool) -> _Order | None:
        """The order of nodes with room for a demand; None where too many demands have one already."""
        if self._came:
            self._settle()
        order = self._orders.get((demand, clear))
        if order is not None:
            order.hear(self._grown, self._at)
        elif len(self._orders) < _MOST_ORDERS:
            order = _Order(demand, self._levels.values(), self._at, len(self._grown), clear=clear)
            self._orders[demand, clear] = order
        return order

    def _fitting(self, demand: _Vector, *, clear: bool) -> NDArray[np.bool_]:
        """Which nodes take tasks and have room; shape (nodes,)."""
        rooms = self._caught_up()
        fitting = rooms.up.copy()
        for wanted, had in zip(demand, rooms.clear if clear else rooms.free, strict=False):
            if wanted:
                fitting &= had >= wanted
        return fitting

    def _caught_up(self) -> _Rooms:
        """Room as matrices, up to date."""
        rooms, shape = self._rooms, (len(self._names), len(self._nodes))
        if rooms is None:
            capacities, free, clear = (np.zeros(shape, dtype=np.int64) for _ in range(3))
            loads, up = np.empty(len(self._nodes)), np.array(self._takes, dtype=bool)
            rooms = self._rooms = _Rooms(capacities, free, clear, loads, up, set(range(len(self._nodes))))
        if rooms.changed:
            places = list(rooms.changed)
            # Few nodes differ from all others: their amounts are looked at once.
            numbers: dict[_Level, int] = {}
            which = [numbers.setdefault(self._at[place], len(numbers)) for place in places]
            capacity, used, reserved = (
                np.array(amounts, dtype=np.int64).reshape(len(numbers), len(self._names))[which].T
                for amounts in zip(*((level.capacity, level.used, level.reserved) for level in numbers), strict=True)
            )
            rooms.capacities[:, places] = capacity
            rooms.free[:, places] = capacity - used
            rooms.clear[:, places] = capacity - used - reserved
            rooms.loads[places] = np.array([level.load for level in numbers])[which]
            rooms.changed.clear()
        return rooms

    def _take(self, place: int, demand: _Vector) -> None:
        """Add a task to a node."""
        before = self._at[place]
        after = self._after(before, demand)
        self._steps.append((demand, (place,), before, after, None))
        self._come((place,), after)

    def _come(self, places: Sequence[int], level: _Level) -> None:
        """Have nodes at another level, without a word to orders yet; all take tasks, or it is one."""
        self._move(places, level)
        if self._takes[places[0]]:
            self._came += places

    def _move(self, places: Sequence[int], level: _Level) -> None:
        self._changed(places)
        for place in places:
            self._at[place] = level

    def _changed(self, places: Iterable[int]) -> None:
        """Have nodes be looked at again where all are."""
        if self._rooms is not None:
            self._rooms.changed.update(places)

    def _settle(self) -> None:
        """Have nodes stand in the heaps of the levels that they came to: not of those that they passed in between."""
        levels: dict[_Level, list[int]] = defaultdict(list)
        for place in sorted({*self._came}):
            levels[self._at[place]].append(place)
        self._came.clear()
        for level, places in levels.items():
            self._enter(places, level)

    def _enter(self, places: Sequence[int], level: _Level) -> None:
        """Have nodes, in ascending order, stand in the heap of the level that they are at."""
        if level.places:
            for place in places:
                heapq.heappush(level.places, place)
        else:
            level.places += places
        self._grown.append(level)

    def _after(self, level: _Level, demand: _Vector) -> _Level:
        """The level at which a node is where a new task was added."""
        after = level.after.get(demand)
        if after is None:
            used = tuple(map(add, level.used, demand))
            after = level.after[demand] = self._level(level.capacity, used, level.reserved)
        return after

    def _level(self, capacity: _Vector, used: _Vector, reserved: _Vector) -> _Level:
        level = self._levels.get((capacity, used, reserved))
        if level is None:
            load = self._placement.load(used, capacity)
            free = tuple(map(max, map(sub, capacity, used), self._nothing))
            clear = tuple(map(max, map(sub, free, reserved), self._nothing))
            level = _Level(len(self._levels), capacity, used, reserved, load, free, clear)
            self._levels[capacity, used, reserved] = level
        return level

    def _state(self) -> int:
        """Number of what is used where."""
        since, state = self._numbered[-1]
        if since < len(self._steps):
            for demand, places, *_ in itertools.islice(self._steps, since, None):
                for place in places:
                    step = (state, place, demand)
                    reached = self._reached.get(step)
                    if reached is None:
                        reached = self._reached[step] = next(self._states)
                    state = reached
            self._numbered.append((len(self._steps), state))
        return state

    def _total(self) -> _Vector:
        """What is free on nodes that take tasks, summed."""
        since, total = self._totals[-1]
        if since < len(self._steps):
            came: dict[_Level, int] = defaultdict(int)
            for _, places, before, after, _ in itertools.islice(self._steps, since, None):
                if self._takes[places[0]]:
                    came[after] += len(places)
                    came[before] -= len(places)
            for level, many in came.items():
                total = _plus(total, many, level.free)
            self._totals.append((len(self._steps), total))
        return total

    def _why_not(self, demand: Resources, role: Role) -> Blocked:
        """Name the binding constraint, on the node that lacks the least (as a fraction of the demand)."""
        rooms = self._caught_up()
        if not rooms.up.any():
            return Blocked(role, Constraint.CAPACITY, "", demand.shortfalls(NO_RESOURCES))
        if demand not in self._infeasible:
            nearest = self._nodes[self._nearest(demand, rooms.capacities)]
            missing = demand.shortfalls(nearest.capacity)
            blocked = Blocked(role, Constraint.INFEASIBLE, nearest.name, missing) if missing else None
            self._infeasible[demand] = blocked
        if (infeasible := self._infeasible[demand]) is not None:
            return replace(infeasible, role=role)
        known = self._least.get(demand)
        if known is None or self._at[known[0]] is not known[1]:
            place = self._nearest(demand, np.maximum(rooms.free, 0))
            self._least[demand] = known = place, self._at[place]
            self._found.append(demand)
        place = known[0]
        in_total = any(wanted > had for wanted, had in zip(self._amounts(demand), self._total(), strict=True))
        constraint = Constraint.CAPACITY if in_total else Constraint.FRAGMENTED
        return Blocked(role, constraint, self._nodes[place].name, demand.shortfalls(self._room_on(place)))

    def _nearest(self, demand: Resources, room: NDArray[np.int64]) -> int:
        """Node that takes tasks and lacks the least of a demand, as a fraction of it; the first of equals."""
        wanted = np.array(self._amounts(demand), dtype=np.float64)
        asked = wanted > 0
        lack = (np.maximum(wanted[asked, None] - room[asked], 0) / wanted[asked, None]).sum(axis=0)
        return int(np.where(self._caught_up().up, lack, np.inf).argmin())

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


def _total(amounts: Sequence[_Vector], nothing: _Vector) -> _Vector:
    return tuple(map(sum, zip(*amounts, strict=True))) if amounts else nothing


def _plus(total: _Vector, times: int, amounts: _Vector) -> _Vector:
    return tuple([whole + times * amount for whole, amount in zip(total, amounts, strict=True)])
