"""Bin packing of tasks on nodes: where they fit, and what is missing where they do not.

A change of a job's allocation is cut into batches of equal tasks. In each batch, tasks that run already are taken up
where they are, and new ones go to the first nodes in the placement's order that have room (``node_classes``).
What cannot be had whole is undone, with the reason why not (``no_room_reasons``). Limits on what jobs hold
together are kept as well (``room_in_limits``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from operator import add, attrgetter, sub

from msgspec import structs

from dl2d.core.cluster import Node, NodeSet, NodeState, SharedLimit, Task, TaskGroup
from dl2d.core.jobs import TASK_ROLES, Allocation, Job, JobKey, JobRequest, Role
from dl2d.core.packing.no_room_reasons import NoRoomReasons
from dl2d.core.packing.node_classes import EVERY_NODE, NodeClass, NodeClasses, Vector
from dl2d.core.packing.resource_vectors import ResourceVectors
from dl2d.core.packing.room_in_limits import Blocked, LimitRoom
from dl2d.core.placement import Placement, keeps_bundles
from dl2d.core.resources import NO_RESOURCES, Resources

#: Demands of a worker and of a PS, how many of them, and the nodes that they may use (None: all nodes).
JobDemand = tuple[Resources, Resources, Allocation, frozenset[str] | None]
#: Equal tasks that are added one after the other.
_Batch = tuple[Role, Resources, int]
#: Equal tasks that were added, one to each of some nodes; the class that these were of; and whose task it is, where
#: one that runs already was taken up.
_Step = tuple[Sequence[int], NodeClass, Vector, TaskGroup | None]


def job_demand(request: JobRequest, size: Allocation, nodes: frozenset[str] | None) -> JobDemand:
    """Key of all that decides whether nodes have room for so many tasks of a job: of equal ones, one is examined."""
    return request.worker, request.ps, size, nodes


class Packing:
    """Room on nodes while tasks are added, in exact thousandths.

    Tasks that run already (``incumbents``) are not in the packing at first. When their job is given tasks again, they
    are taken up where they are; until then their room is reserved: new tasks keep out of it as long as there is other
    room.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        placement: Placement,
        *,
        incumbents: Iterable[Task] = (),
        leaving: Iterable[Task] = (),
        counted: bool = False,
        node_sets: Sequence[NodeSet] = (),
        limits: Sequence[SharedLimit] = (),
    ) -> None:
        """``node.used`` is taken for good, less what these tasks have if they are ``counted`` in it.

        New tasks of the jobs in ``node_sets`` go to nodes of their set only. The jobs in ``limits`` have nothing at
        first.
        """
        #: What limits leave the jobs besides what was added.
        self.limits = LimitRoom(limits)
        self._limited = bool(limits)
        self._nodes = tuple(nodes)
        self._placement = placement
        self._number = {node.name: number for number, node in enumerate(self._nodes)}
        self._draining = [number for number, node in enumerate(self._nodes) if node.state is NodeState.DRAINING]
        incumbents, leaving = tuple(incumbents), tuple(leaving)
        #: Makes the packing as it is before anything is added.
        self._anew = partial(
            Packing, nodes, placement, incumbents=incumbents, leaving=leaving, counted=counted, node_sets=node_sets,
            limits=limits,
        )  # fmt: skip
        self._node_sets = tuple(node_sets)
        # Most nodes and most demands are equal: each is looked at once.
        demands = {task.room for task in incumbents} | {task.room for task in leaving}
        self._vectors = ResourceVectors({node.capacity for node in self._nodes} | demands, node_sets)
        self._bundles: dict[tuple[Resources, Resources], Resources] = {}
        #: Tasks that run and were not taken up yet, those with the lowest numbers last.
        self._incumbents: dict[TaskGroup, list[tuple[int, Vector]]] = defaultdict(list)
        self._classes = NodeClasses(placement, *self._vectors.sizes)
        self._append_nodes(incumbents, leaving, demands, counted=counted)
        #: What was added since the last call of ``add`` or its like.
        self._steps: list[_Step] = []
        self._reasons = NoRoomReasons(self._nodes, placement, self._classes, self._vectors)

    @classmethod
    def for_decision(
        cls,
        nodes: Sequence[Node],
        tasks: Iterable[Task],
        placement: Placement,
        node_sets: Sequence[NodeSet] = (),
        limits: Sequence[SharedLimit] = (),
    ) -> Packing:
        """A packing in which all tasks of dl2d may be given anew: only what others hold is taken.

        ``node.used`` must count all of ``tasks``. Tasks that are meant to stay are the incumbents.
        """
        wanted, leaving = list[Task](), list[Task]()
        for task in tasks:
            (wanted if task.state.wanted else leaving).append(task)
        return cls(
            nodes, placement, incumbents=wanted, leaving=leaving, counted=True, node_sets=node_sets, limits=limits
        )  # fmt: skip

    def anew(self) -> Packing:
        """The packing as it was before anything was added."""
        return self._anew()

    def empty(self) -> Packing:
        """A packing of the same nodes with nothing on them: no task of dl2d, and no job of others. It has no limits."""
        nodes = [structs.replace(node, used=NO_RESOURCES) for node in self._nodes]
        return Packing(nodes, self._placement, node_sets=self._node_sets)

    def _append_nodes(
        self, incumbents: Iterable[Task], leaving: Iterable[Task], demands: Iterable[Resources], *, counted: bool
    ) -> None:
        held: dict[int, list[Vector]] = defaultdict(list)
        gone: dict[int, list[Vector]] = defaultdict(list)
        vectors = self._vectors
        amounts = {demand: vectors.amounts(demand) for demand in demands}
        for task in sorted(incumbents, key=attrgetter("number"), reverse=True):
            if (number := self._number.get(task.node)) is not None:
                demand = amounts[task.room]
                self._incumbents[task.group].append((number, (*demand, EVERY_NODE)))
                held[number].append(demand)
        for task in leaving:
            if (number := self._number.get(task.node)) is not None:
                gone[number].append(amounts[task.room])
        nothing = (0,) * vectors.sizes[0]
        member_of = vectors.member_of()
        known: dict[tuple[object, ...], NodeClass] = {}
        for number, node in enumerate(self._nodes):
            of_sets = member_of.get(node.name, 0)
            like = node.capacity, node.used, tuple(held.get(number, ())), tuple(gone.get(number, ())), of_sets
            node_class = known.get(like)
            if node_class is None:
                reserved, left = (tuple(map(sum, zip(nothing, *some, strict=True))) for some in like[2:4])
                used = vectors.amounts(node.used)
                if counted:
                    used = tuple(map(max, map(sub, used, map(add, reserved, left)), nothing))
                node_class = known[like] = self._classes.of(vectors.amounts(node.capacity), used, reserved, of_sets)
            self._classes.append(node_class, takes_tasks=node.is_open)

    @property
    def first_node_only(self) -> bool:
        """Whether a task goes to the first node in the placement's order or to none."""
        return self._placement.first_node_only

    @property
    def gathers(self) -> bool:
        """Whether new tasks of a job are laid on as few nodes as hold them."""
        return self._placement.gathers

    def add(self, job: Job, delta: Allocation, *, beyond_limits: bool = False) -> Blocked | None:
        """Add tasks of a job, workers and PSs in turn, all or none; returns what stood in the way.

        Those of a floor, which come before limits, count in them as well (``beyond_limits``), whether nodes have room
        for them or not.
        """
        if self._limited and beyond_limits:
            self.limits.take(job, delta)
        elif self._limited and (blocked := self.limits.blocked(job, delta)) is not None:
            return blocked
        without_room = self._add(job, delta)
        if without_room is None:
            if self._limited and not beyond_limits:
                self.limits.take(job, delta)
            return None
        role, demand, _ = without_room
        blocked = self._reasons.reason(demand, role, job.key)
        self._undo()
        return blocked

    def fits(self, job: Job, delta: Allocation) -> bool:
        """Whether ``add`` would find room for these tasks; nothing is added."""
        if self.limits.blocked(job, delta) is not None:
            return False
        without_room = self._add(job, delta)
        self._undo()
        return without_room is None

    def stay(self, sizes: Iterable[tuple[Job, Allocation]]) -> list[bool]:
        """Take up incumbents of jobs where they are, of each job so many or none; returns of which."""
        stayed = []
        for job, size in sizes:
            self._steps.clear()
            stays = self.limits.blocked(job, size) is None and all(
                self._take_up(job.key, role, size.count(role)) == size.count(role) for role in TASK_ROLES
            )
            if stays:
                self.limits.take(job, size)
            else:
                self._undo()
            stayed.append(stays)
        return stayed

    def _add(self, job: Job, delta: Allocation) -> _Batch | None:
        """Add tasks of a job in turn, up to the first that has no room; returns its batch."""
        self._steps.clear()
        for batch in self._batches(job, delta):
            role, demand, count = batch
            if self._incumbents:
                count -= self._take_up(job.key, role, count)
            if count and self._place(demand, count, job.key):
                return batch
        return None

    def _batches(self, job: Job, delta: Allocation) -> Iterator[_Batch]:
        """A change of allocation as batches, in the order in which they are added."""
        request, pairs = job.request, min(delta)
        as_bundles = keeps_bundles(self._placement, request)
        for _ in range(pairs):
            # Bundles are only for new tasks: those that run may be on two nodes.
            if as_bundles and not any((job.key, role) in self._incumbents for role in TASK_ROLES):
                yield (Role.WORKER, self.bundle(request), 1)
            else:
                yield (Role.WORKER, request.worker, 1)
                yield (Role.PS, request.ps, 1)
        if delta.workers > pairs:
            yield (Role.WORKER, request.worker, delta.workers - pairs)
        if delta.ps > pairs:
            yield (Role.PS, request.ps, delta.ps - pairs)

    def _take_up(self, job: JobKey, role: Role, count: int) -> int:
        """Take up so many incumbents where they are, up to the first that has no room there; returns how many."""
        group, classes = (job, role), self._classes
        waiting = self._incumbents.get(group, [])
        taken = 0
        while taken < count and waiting:
            node, demand = waiting[-1]
            before = classes.class_of[node]
            if not before.fits(demand):
                break
            classes.move((node,), classes.with_reserved(before, demand))
            self._steps.append(((node,), before, demand, group))
            waiting.pop()
            taken += 1
        if not waiting:
            self._incumbents.pop(group, None)
        return taken

    def _place(self, demand: Resources, count: int, job: JobKey | None) -> int:
        """Add equal new tasks to the first nodes that have room; returns how many are left without."""
        vector, classes = self._vectors.demand(demand, job), self._classes
        if vector is None:
            return count
        while count:
            nodes: Sequence[int] = ()
            if self._incumbents and not self._placement.first_node_only:
                nodes = classes.next_nodes(vector, count, unreserved=True)
            nodes = nodes or classes.next_nodes(vector, count, unreserved=False)
            if not nodes:
                break
            self._put(nodes, vector)
            count -= len(nodes)
        return count

    def _put(self, nodes: Sequence[int], demand: Vector) -> None:
        """Add a task to each of some nodes of one class."""
        before = self._classes.class_of[nodes[0]]
        self._classes.move(nodes, self._classes.with_task(before, demand))
        self._steps.append((nodes, before, demand, None))

    def _undo(self) -> None:
        """Take back what was added last."""
        if not self._steps:
            return
        while self._steps:
            nodes, before, demand, incumbent = self._steps.pop()
            self._classes.move(nodes, before)
            if incumbent is not None:
                self._incumbents[incumbent].append((nodes[0], demand))
        self._reasons.forget_nearest()

    def bundle(self, request: JobRequest) -> Resources:
        """What a worker and a PS ask for together."""
        parts = request.worker, request.ps
        if parts not in self._bundles:
            self._bundles[parts] = request.worker + request.ps
        return self._bundles[parts]

    def place(self, demand: Resources, role: Role, job: JobKey | None = None, *, limited: bool = True) -> str | Blocked:
        """Add one new task of a job, on the nodes that it may use; returns its node, or what stood in the way."""
        nodes, blocked = self.place_all(demand, role, 1, job, limited=limited)
        return nodes[0] if blocked is None else blocked

    def place_all(
        self, demand: Resources, role: Role, count: int, job: JobKey | None = None, *, limited: bool = True
    ) -> tuple[list[str], Blocked | None]:
        """Add new tasks one by one, as many as have room; returns their nodes, and what stood in the way.

        Limits are neither checked nor counted unless ``limited``.
        """
        self._steps.clear()
        allowed = count if job is None or not limited else self.limits.allowed(job, demand, count)
        without_room = self._place(demand, allowed, job)
        nodes = [self._nodes[number].name for step_nodes, *_ in self._steps for number in step_nodes]
        if job is not None and limited:
            self.limits.take_tasks(job, demand, len(nodes))
        if without_room:
            return nodes, self._reasons.reason(demand, role, job)
        return nodes, self.limits.blocked_task(job, demand, role) if job is not None and allowed < count else None

    def place_on(self, node: str, demand: Resources, job: JobKey | None = None) -> bool:
        """Add one new task on a node of the caller's choice; returns whether it has room and takes the job's tasks.

        Limits are neither checked nor counted.
        """
        number, vector = self._number.get(node), self._vectors.demand(demand, job)
        if number is None or vector is None or not self._classes.takes_tasks[number]:
            return False
        fits = self._classes.class_of[number].fits(vector)
        if fits:
            self._put((number,), vector)
        return fits

    def remove(self, node: str, demand: Resources, job: JobKey | None = None) -> None:
        """Remove a task that ``place`` or ``place_all`` added; with ``job``, out of this job's limits, too."""
        if job is not None:
            self.limits.take_tasks(job, demand, -1)
        number = self._number[node]
        before = self._classes.class_of[number]
        used = tuple(map(sub, before.used, self._vectors.amounts(demand)))
        self._classes.move((number,), self._classes.of(before.capacity, used, before.reserved, before.member_of))
        self._reasons.forget_nearest()

    def gather(
        self, request: JobRequest, new: Allocation, there: Mapping[str, Allocation], job: JobKey | None = None
    ) -> list[tuple[Role, str]] | None:
        """Add tasks of a job on as few nodes as hold them evenly, all or none; returns their nodes.

        The nodes that hold tasks of the job already (``there``) are joined by the first others in the order that have
        room for a worker and a PS, one more at a time, until the job's workers and its PSs can both be laid evenly:
        each new one goes to the node with the fewest of its role. None where no number of nodes will do.
        """
        demands = {role: self._vectors.demand(request.demand(role), job) for role in TASK_ROLES if new.count(role)}
        vectors = {role: vector for role, vector in demands.items() if vector is not None}
        if len(vectors) < len(demands):
            return None
        classes = self._classes
        nodes = [number for name in there if (number := self._number.get(name)) is not None]
        nodes = [number for number in nodes if classes.takes_tasks[number]]
        nodes.sort(key=lambda number: (classes.class_of[number].load, number))
        has = {role: [there[self._nodes[number].name].count(role) for number in nodes] for role in TASK_ROLES}
        most = max(sum(has[role]) + new.count(role) for role in TASK_ROLES)
        laid = self._evenly(nodes, has, vectors, new)
        with closing(classes.in_order(self._vectors.together(*vectors.values()))) as others:
            while laid is None and len(nodes) < most:
                other = next((number for number in others if number not in nodes), None)
                if other is None:
                    break
                nodes.append(other)
                for counts in has.values():
                    counts.append(0)
                laid = self._evenly(nodes, has, vectors, new)
        for role, number in laid or ():
            self._put((number,), vectors[role])
        return None if laid is None else [(role, self._nodes[number].name) for role, number in laid]

    def _evenly(
        self,
        nodes: Sequence[int],
        has: Mapping[Role, Sequence[int]],
        vectors: Mapping[Role, Vector],
        new: Allocation,
    ) -> list[tuple[Role, int]] | None:
        """Each new task with the fewest of its role, the first of equals; None where one has no room there."""
        if not nodes:
            return None
        laid: list[tuple[Role, int]] = []
        taken: dict[int, Vector] = {}
        for role, vector in vectors.items():
            counts = list(has[role])
            for _ in range(new.count(role)):
                which = counts.index(min(counts))
                counts[which] += 1
                number = nodes[which]
                laid.append((role, number))
                taken[number] = self._vectors.together(taken[number], vector) if number in taken else vector
        return laid if all(self._classes.class_of[number].fits(amounts) for number, amounts in taken.items()) else None

    def room(self) -> dict[str, Resources]:
        """What is free on each node that takes tasks."""
        rooms: dict[NodeClass, Resources] = {}
        for node_class in self._classes.class_of:
            if node_class not in rooms:
                rooms[node_class] = self._vectors.resources(node_class.free)
        taking = zip(self._nodes, self._classes.class_of, self._classes.takes_tasks, strict=True)
        return {node.name: rooms[node_class] for node, node_class, takes_tasks in taking if takes_tasks}

    def left(self) -> Resources:
        """What is free on all nodes that take tasks together, and the room of incumbents on draining ones."""
        kept = [self._classes.class_of[number].reserved for number in self._draining] if self._incumbents else []
        total = self._classes.matrices().total
        return self._vectors.resources(map(sum, zip(total, *kept, strict=False)) if kept else total)

    def room_on(self, node: str) -> Resources:
        """What is free on a node, whether it takes tasks or not; nothing where there is no such node."""
        number = self._number.get(node)
        return NO_RESOURCES if number is None else self._vectors.resources(self._classes.class_of[number].free)
