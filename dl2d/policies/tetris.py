"""Tetris: machine after machine is packed with what aligns best and is soon done (Grandl et al., SIGCOMM 2014)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dl2d.core.cluster import NodeState, Snapshot, Task
from dl2d.core.decision import Alternative, Constraint, Decision, JobDecision, Reason
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey, Role
from dl2d.core.packing import Blocked, Packing
from dl2d.core.policy import NO_EVIDENCE, Evidence
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.policies.common.greedy import next_bundle
from dl2d.policies.common.pace import pace
from dl2d.policies.machines import Machines, Vector
from dl2d.throughput.remaining_work import samples_left

_ROLES = (Role.WORKER, Role.PS)
#: Largest amount of remaining work that is told apart, so that sums stay finite.
_MOST_WORK = 1e100

#: Cuts new tasks into those that go on one machine together.
_Units = Callable[[Allocation], list[tuple[Role, ...]]]


class Tetris:
    """Fills machine after machine with the bundle of the highest score.

    A bundle's score on a machine is its alignment less its job's remaining work. Alignment (paper, section 3.2) is the
    dot product of what the bundle takes and what the machine has free, both as fractions of the machine's capacity.
    Remaining work (section 3.3) is remaining time x resources held: samples left over the samples per second and
    bundle at which the job last trained (one that has not: as others of its type), times the fractions of an average
    machine that a bundle takes. It is weighed by ``shortness`` x mean alignment / mean work, the means over all jobs
    whose next bundle has room on the machine. Equal scores go to the job submitted first.

    The paper packs tasks. Here the unit is what a job grows by at once, a worker and a PS at the most, laid on one
    machine. A step of more tasks (a minimum, the next allowed worker count) begins at the machine and goes on at the
    first that have room, all or none of it. When no unit has room on any machine, what is left is packed once more
    task by task, so that a worker and its PS may lie on two.

    The paper preempts nothing, as its tasks are short. A task of training lasts as long as its job, so here the cluster
    is packed anew at each decision. Where tasks run already, that first gives each job a target; then each keeps what
    it has up to its target, free room is packed up to the targets, and what is still free beyond them. Tasks that stay
    do not move.

    Parameters
    ----------
    shortness
        The paper's m: 0 packs by alignment alone, more favours jobs with little work left.
    whole_bundles
        A job grows by a worker and a PS together, and stops when it has all it may have of either.
    """

    def __init__(self, *, shortness: float = 1.0, whole_bundles: bool = False) -> None:
        if not 0.0 <= shortness < math.inf:
            msg = f"shortness: must be 0 or more, not {shortness!r}"
            raise ValueError(msg)
        self._shortness = shortness
        self._whole_bundles = whole_bundles

    @property
    def name(self) -> str:
        """``tetris``."""
        return "tetris"

    @property
    def version(self) -> str:
        """Of the code, and the settings that change decisions where they are not the usual."""
        shortness = "" if self._shortness == 1.0 else f" shortness={self._shortness:g}"
        return "1" + shortness + (" whole_bundles" if self._whole_bundles else "")

    @property
    def needs(self) -> frozenset[Evidence]:
        """Nothing beyond nodes, jobs and tasks."""
        return NO_EVIDENCE

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``.

        Cost: bundles x (log jobs + shapes, vectorised), and machines; shapes are the distinct demands of units.
        """
        del rng
        room = packing.room()
        demands = {job.request.demand(role) for job in snapshot.jobs for role in _ROLES}
        machines = Machines(snapshot.nodes, room, demands | {task.demand for task in snapshot.tasks})
        jobs = _jobs(snapshot, machines)
        known = {job.key for job in snapshot.jobs}
        for task in snapshot.tasks:
            # Who is not to be decided on stays where it is.
            if task.state.wanted and task.job not in known and task.node in machines.places:
                machines.take(machines.places[task.node], machines.vector(task.demand))
        before = list(machines.free)
        anew = None
        if any(entry.runs[role] for entry in jobs for role in _ROLES):
            anew = self._filling([entry.afresh() for entry in jobs], machines.copy())
            anew.floors()
            anew.fill()
        filling = self._filling(jobs, machines)
        filling.floors()
        if anew is not None:
            targets = [entry.has for entry in anew.jobs]
            filling.keep(targets)
            filling.fill(targets)
        filling.fill()
        held = snapshot.held()
        why = _Reasons(filling, anew, packing, before)
        decided = [why.decision(entry, held.get(entry.job.key, NOTHING)) for entry in jobs]
        return Decision(
            policy=self.name,
            policy_version=self.version,
            jobs=tuple(decided),
            measure="alignment less weighed remaining work",
            actions=tuple(filling.actions),
            nodes=tuple((entry.job.key, role, node) for entry in jobs for role, node in entry.laid),
        )

    def _filling(self, jobs: Sequence[_Job], machines: Machines) -> _Filling:
        return _Filling(jobs, machines, self._shortness, whole_bundles=self._whole_bundles)


class _Running(msgspec.Struct, frozen=True, gc=False):
    """A task that runs already. ``place`` is None where its node takes no new tasks: it may stay all the same."""

    node: str
    place: int | None
    demand: Vector


@dataclass(slots=True, eq=False)
class _Job:
    """A job while it is given bundles."""

    job: Job
    order: int
    #: Remaining work, in seconds x average machines.
    work: float
    floor: Allocation
    vectors: Mapping[Role, Vector]
    #: Tasks that run and were not given to it again yet, the oldest last.
    runs: dict[Role, list[_Running]]
    has: Allocation = NOTHING
    #: Where its tasks are to be.
    laid: list[tuple[Role, str]] = field(default_factory=list)
    #: Score of the last unit that was packed.
    score: float | None = None

    def afresh(self) -> _Job:
        """The job as if nothing of it ran."""
        runs: dict[Role, list[_Running]] = {role: [] for role in _ROLES}
        return _Job(self.job, self.order, self.work, self.floor, self.vectors, runs)


def _jobs(snapshot: Snapshot, machines: Machines) -> list[_Job]:
    runs: dict[JobKey, dict[Role, list[Task]]] = {job.key: {role: [] for role in _ROLES} for job in snapshot.jobs}
    for task in snapshot.tasks:
        if task.state.wanted and task.job in runs and task.role in _ROLES:
            runs[task.job][task.role].append(task)
    floors = dict(snapshot.floors)
    work = _remaining_work(snapshot)
    return [
        _Job(
            job,
            order,
            work[job.key],
            floors.get(job.key, NOTHING),
            {role: machines.vector(job.request.demand(role)) for role in _ROLES},
            {
                role: [
                    _Running(task.node, machines.places.get(task.node), machines.vector(task.demand))
                    for task in _newest_first(tasks)
                ]
                for role, tasks in runs[job.key].items()
            },
        )
        for order, job in enumerate(snapshot.jobs)
    ]


def _newest_first(tasks: list[Task]) -> list[Task]:
    return sorted(tasks, key=lambda task: task.number, reverse=True) if len(tasks) > 1 else tasks


def _remaining_work(snapshot: Snapshot) -> dict[JobKey, float]:
    """Remaining time of each job x what it holds meanwhile; seconds x average machines."""
    count = sum(node.state is NodeState.UP for node in snapshot.nodes)
    whole = dict(snapshot.capacity.thousandths)

    def machines(demand: Resources) -> float:
        return sum(count * amount / whole[name] for name, amount in demand.thousandths if name in whole)

    def per_bundle(job: Job) -> float | None:
        """Measured samples per second for each bundle's worth of resources that it held meanwhile."""
        progress, request = job.progress, job.request
        if not progress.samples_per_second:
            return None
        bundle = machines(request.demand_of(_bundle(job)))
        holding = machines(request.demand_of(Allocation(progress.workers, progress.ps)))
        return progress.samples_per_second * (bundle / holding if bundle and holding else 1.0)

    speeds = pace(snapshot, per_bundle)
    return {
        job.key: min(samples_left(job) / speeds[job.key] * machines(job.request.demand_of(_bundle(job))), _MOST_WORK)
        for job in snapshot.jobs
    }


def _bundle(job: Job) -> Allocation:
    return Allocation(1, min(job.request.max_ps, 1))


def _pairs(new: Allocation) -> list[tuple[Role, ...]]:
    """Units of new tasks: a worker and a PS together as long as there are both."""
    pairs = min(new)
    return [_ROLES] * pairs + _singly(Allocation(new.workers - pairs, new.ps - pairs))


def _singly(new: Allocation) -> list[tuple[Role, ...]]:
    units: list[tuple[Role, ...]] = [(Role.WORKER,)] * new.workers
    return units + [(Role.PS,)] * new.ps


class _Shapes:
    """Jobs by the demand of their next unit; of those with equal demand, the first is the one with least work left."""

    def __init__(self, machines: Machines, shortness: float) -> None:
        self._machines = machines
        self._shortness = shortness
        self._numbers: dict[Vector, int] = {}
        self._demands: list[Vector] = []
        self._queues: list[list[tuple[float, int]]] = []
        # One number for each shape: jobs in it, their work together, the least work and the place in the order of the
        # job that has it. Grown by doubling.
        self._count = np.zeros(0)
        self._work = np.zeros(0)
        self._least = np.zeros(0)
        self._order = np.zeros(0)
        #: What was found for a machine of some capacity with so much free: the shapes that fit, and their alignment.
        self._seen: dict[tuple[Vector, Vector], tuple[NDArray[np.intp], NDArray[np.float64]]] = {}
        self.alive = 0
        #: Each choice so far, and the last one in which a shape had room.
        self._choices: list[tuple[int, float, float, int, tuple[NDArray[np.intp], NDArray[np.float64]]]] = []
        self._last = np.zeros(0, dtype=np.int64)

    def number(self, demand: Vector) -> int:
        """The shape of a demand."""
        number = self._numbers.get(demand)
        if number is None:
            number = self._numbers[demand] = len(self._demands)
            self._demands.append(demand)
            self._queues.append([])
            self._seen.clear()
            if number >= len(self._count):
                more = max(16, number)
                for name in ("_count", "_work", "_least", "_order"):
                    setattr(self, name, np.append(getattr(self, name), np.zeros(more)))
                self._last = np.append(self._last, np.full(more, -1))
        return number

    def enter(self, shape: int, entry: _Job) -> None:
        """A job's next unit is of this shape."""
        heapq.heappush(self._queues[shape], (entry.work, entry.order))
        self._count[shape] += 1
        self._work[shape] += entry.work
        self.alive += 1
        self._look(shape)

    def leave(self, shape: int) -> None:
        """The first job of a shape is no candidate any more."""
        work, _ = heapq.heappop(self._queues[shape])
        self._count[shape] -= 1
        self._work[shape] = self._work[shape] - work if self._queues[shape] else 0.0
        self.alive -= 1
        self._look(shape)

    def empty(self) -> None:
        """No job is a candidate any more."""
        for shape, queue in enumerate(self._queues):
            queue.clear()
            self._count[shape] = self._work[shape] = 0.0
        self.alive = 0

    def best(self, place: int) -> tuple[int, int, float] | None:
        """The shape, job and score that should go on a machine next; None where nothing has room."""
        fitting, alignment = self._fitting(place)
        if not len(fitting):
            return None
        count = self._count[fitting]
        work = float(self._work[fitting].sum())
        # Both means are over the same jobs, so their quotient is that of the sums.
        weight = self._shortness * float((count * alignment).sum()) / work if work > 0 else 0.0
        scores = np.where(count > 0, alignment - weight * self._least[fitting], -np.inf)
        which = int(scores.argmax())
        score = float(scores[which])
        if score == -math.inf:
            return None
        equal = scores == score
        if np.count_nonzero(equal) > 1:
            which = int(np.where(equal, self._order[fitting], np.inf).argmin())
        shape = int(fitting[which])
        order = self._queues[shape][0][1]
        self._last[fitting] = len(self._choices)
        self._choices.append((place, weight, score, order, (fitting, alignment)))
        return shape, order, score

    def last_choice(self, demand: Vector, work: float) -> _Choice | None:
        """What went on the last machine that had room for a unit, and what a job with so much work scored there."""
        shape = self._numbers.get(demand)
        if shape is None or self._last[shape] < 0:
            return None
        place, weight, score, order, (fitting, alignment) = self._choices[int(self._last[shape])]
        own = float(alignment[np.searchsorted(fitting, shape)]) - weight * work
        return _Choice(place, order, score, own)

    def _look(self, shape: int) -> None:
        if self._queues[shape]:
            self._least[shape], self._order[shape] = self._queues[shape][0]

    def _fitting(self, place: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """The shapes that have room on a machine, ascending, and their alignment with it."""
        capacity, free = self._machines.capacity[place], self._machines.free[place]
        found = self._seen.get((capacity, free))
        if found is None:
            demands = np.array(self._demands, dtype=np.int64).reshape(len(self._demands), len(free))
            fitting = np.flatnonzero((demands <= np.array(free, dtype=np.int64)).all(axis=1))
            weights = [had / whole**2 if whole else 0.0 for had, whole in zip(free, capacity, strict=True)]
            found = self._seen[capacity, free] = fitting, (demands[fitting] * np.array(weights)).sum(axis=1)
        return found


class _Cut(NamedTuple):
    """Units of new tasks: which tasks, and what they take together."""

    roles: tuple[tuple[Role, ...], ...]
    demands: tuple[Vector, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    """A job that was preferred on a machine, and by how much."""

    place: int
    order: int
    score: float
    own: float


class _Filling:
    """Machines being filled."""

    def __init__(self, jobs: Sequence[_Job], machines: Machines, shortness: float, *, whole_bundles: bool) -> None:
        self.jobs = jobs
        self.machines = machines
        self.shapes = _Shapes(machines, shortness)
        self.actions: list[tuple[JobKey, Allocation]] = []
        self._whole_bundles = whole_bundles
        #: Steps of new tasks for which there was no room: there never will be, as room only shrinks.
        self._hopeless: set[tuple[Vector, ...]] = set()
        self._cuts: dict[tuple[Vector, Vector, Allocation, _Units], _Cut] = {}

    def step(self, entry: _Job, target: Allocation | None = None) -> Allocation | None:
        """What a job should be given next, room or not, up to a target."""
        job = entry.job
        if target is not None:
            if target == entry.has:
                return None
            job = replace(job, request=replace(job.request, max_workers=target.workers, max_ps=target.ps))
        return next_bundle(job, entry.has, whole=self._whole_bundles)

    def floors(self) -> None:
        """Give each job its floor; it stands even where there is no room for it."""
        for entry in self.jobs:
            if entry.floor == NOTHING or self._lay(entry, entry.floor, _singly, None):
                continue
            for role in _ROLES:
                for _ in range(entry.floor.count(role)):
                    self._lay(entry, Allocation(role is Role.WORKER, role is Role.PS), _singly, None)
            self.actions = [action for action in self.actions if action[0] != entry.job.key]
            self.actions.append((entry.job.key, entry.floor))
            entry.has = entry.floor

    def keep(self, targets: Iterable[Allocation]) -> None:
        """Let tasks that run stay, up to targets."""
        for entry, target in zip(self.jobs, targets, strict=True):
            runs, has, request = entry.runs, entry.has, entry.job.request
            workers = request.largest_allowed(min(has.workers + len(runs[Role.WORKER]), target.workers))
            ps = min(has.ps + len(runs[Role.PS]), target.ps)
            if workers >= request.min_workers and ps >= request.min_ps:
                more = Allocation(max(workers - has.workers, 0), max(ps - has.ps, 0))
                if more != NOTHING:
                    self._lay(entry, more, _singly, None)

    def fill(self, targets: Sequence[Allocation] | None = None) -> None:
        """Pack bundle by bundle, and then task by task."""
        limits: Sequence[Allocation | None] = targets if targets is not None else [None] * len(self.jobs)
        for units in (_pairs, _singly):
            self._sweep([(entry, limit) for entry, limit in zip(self.jobs, limits, strict=True)], units)

    def _sweep(self, candidates: list[tuple[_Job, Allocation | None]], units: _Units) -> None:
        steps: dict[int, Allocation] = {}
        limits = {entry.order: limit for entry, limit in candidates}
        for entry, limit in sorted(candidates, key=lambda candidate: candidate[0].work):
            if limit != NOTHING:
                shape = self._next(entry, limit, units, steps)
                if shape is not None:
                    self.shapes.enter(shape, entry)
        for place in range(len(self.machines.names)):
            if not self.shapes.alive:
                return
            while (choice := self.shapes.best(place)) is not None:
                shape, order, score = choice
                entry = self.jobs[order]
                following = None
                if self._lay(entry, steps[order], units, place):
                    entry.score = score
                    following = self._next(entry, limits[order], units, steps)
                if following != shape:
                    self.shapes.leave(shape)
                    if following is not None:
                        self.shapes.enter(following, entry)
        self.shapes.empty()

    def _next(self, entry: _Job, limit: Allocation | None, units: _Units, steps: dict[int, Allocation]) -> int | None:
        """Shape of a job's next unit, once tasks that run already were given to it again; None where there is none."""
        while True:
            step = self.step(entry, limit)
            if step is None:
                return None
            new = _new(entry, step)
            if new != NOTHING:
                break
            if not self._lay(entry, step, units, None):
                return None
        steps[entry.order] = step
        demands = self._cut(entry, new, units).demands
        return None if demands in self._hopeless else self.shapes.number(demands[0])

    def last_choice(self, entry: _Job, step: Allocation) -> _Choice | None:
        """What went on the last machine that had room for the new tasks of a job's step."""
        for units in (_pairs, _singly):
            demands = self._cut(entry, _new(entry, step), units).demands
            choice = self.shapes.last_choice(demands[0], entry.work) if demands else None
            if choice is not None:
                return choice
        return None

    def _cut(self, entry: _Job, new: Allocation, units: _Units) -> _Cut:
        """The units of new tasks, and what each takes."""
        workers, ps = entry.vectors[Role.WORKER], entry.vectors[Role.PS]
        cut = self._cuts.get((workers, ps, new, units))
        if cut is None:
            demands = {(Role.WORKER,): workers, (Role.PS,): ps, _ROLES: tuple(map(add, workers, ps))}
            roles = units(new)
            cut = self._cuts[workers, ps, new, units] = _Cut(tuple(roles), tuple(demands[each] for each in roles))
        return cut

    def _lay(self, entry: _Job, step: Allocation, units: _Units, place: int | None) -> bool:
        """Give a job a step, all or none.

        Tasks that run stay where they are; new units go on the machine, or on the first that has room.
        """
        machines = self.machines
        taken: list[tuple[int, Vector]] = []
        laid: list[tuple[Role, str]] = []
        again = {role: min(step.count(role), len(entry.runs[role])) for role in _ROLES}
        room = True
        for role, count in again.items():
            for running in entry.runs[role][len(entry.runs[role]) - count :]:
                if running.place is not None:
                    room = room and machines.fits(running.place, running.demand)
                    if not room:
                        break
                    machines.take(running.place, running.demand)
                    taken.append((running.place, running.demand))
                laid.append((role, running.node))
        new = self._cut(entry, _new(entry, step), units)
        for roles, demand in zip(new.roles, new.demands, strict=True):
            at = place if place is not None and machines.fits(place, demand) else machines.first_with_room(demand)
            room = room and at is not None
            if not room or at is None:
                break
            machines.take(at, demand)
            taken.append((at, demand))
            laid += ((role, machines.names[at]) for role in roles)
        if not room:
            for at, demand in taken:
                machines.give_back(at, demand)
            if new.demands and not any(again.values()):
                self._hopeless.add(new.demands)
            return False
        for role, count in again.items():
            del entry.runs[role][len(entry.runs[role]) - count :]
        entry.laid += laid
        entry.has = Allocation(entry.has.workers + step.workers, entry.has.ps + step.ps)
        self.actions.append((entry.job.key, step))
        return True


def _new(entry: _Job, step: Allocation) -> Allocation:
    """The tasks of a step that do not run yet."""
    runs = entry.runs
    return Allocation(max(step.workers - len(runs[Role.WORKER]), 0), max(step.ps - len(runs[Role.PS]), 0))


class _Reasons:
    """Why each job has what it has."""

    def __init__(self, filling: _Filling, anew: _Filling | None, packing: Packing, before: Sequence[Vector]) -> None:
        """``before`` is what was free on each machine at first; ``packing`` is brought to where the machines are."""
        self._filling = filling
        self._anew = anew
        self._packing = packing
        machines = filling.machines
        for place, (had, free) in enumerate(zip(before, machines.free, strict=True)):
            taken = zip(machines.resources, had, free, strict=True)
            demand = Resources(tuple((name, first - last) for name, first, last in taken if first > last))
            if demand != NO_RESOURCES:
                packing.place_on(machines.names[place], demand)
        self._blocked: dict[tuple[Resources, Role], Blocked | None] = {}

    def decision(self, entry: _Job, previous: Allocation) -> JobDecision:
        """A job's decision, with its reason and scores."""
        job, has, filling = entry.job, entry.has, self._filling
        options = [] if entry.score is None else [Alternative(has, entry.score)]
        step = filling.step(entry)
        if step is None:
            reason = Reason(Constraint.SATISFIED, f"has its maximum of {has}")
            return JobDecision(job.key, has, reason, previous, tuple(options))
        last = filling.last_choice(entry, step)
        if last is None and self._anew is not None:
            # Its own room was given away when targets were found.
            other = self._anew.jobs[entry.order]
            following = self._anew.step(other)
            last = self._anew.last_choice(other, following) if following is not None else None
        if last is not None:
            more = Allocation(has.workers + step.workers, has.ps + step.ps)
            options.append(Alternative(more, last.own))
        return JobDecision(job.key, has, self._why(entry, step, last), previous, tuple(options))

    def _why(self, entry: _Job, step: Allocation, last: _Choice | None) -> Reason:
        machines, jobs = self._filling.machines, self._filling.jobs
        behind = ""
        if last is not None and last.order != entry.order:
            job = jobs[last.order].job
            behind = (
                f"; on {machines.names[last.place]}, the last with room for it, {job.key.id} ({job.request.name}) "
                f"scored {last.score:.3g} and it {last.own:.3g}"
            )
        for role in _ROLES:
            if entry.runs[role] and step.count(role):
                running = entry.runs[role][-1]
                if running.place is not None and not machines.fits(running.place, running.demand):
                    text = f"next bundle of {step}: the room of a {role} on {running.node} went to others"
                    return Reason(Constraint.QUEUE, text + behind)
            elif step.count(role) and (blocked := self._room_for(entry.job.request.demand(role), role)) is not None:
                return Reason(blocked.constraint, f"next bundle of {step}: {blocked}{behind}", blocked.shortfalls)
        text = f"next bundle of {step}: there is room for each of its tasks, but not for all together"
        return Reason(Constraint.FRAGMENTED, text + behind)

    def _room_for(self, demand: Resources, role: Role) -> Blocked | None:
        if (demand, role) not in self._blocked:
            node = self._packing.place(demand, role)
            if isinstance(node, str):
                self._packing.remove(node, demand)
            self._blocked[demand, role] = node if isinstance(node, Blocked) else None
        return self._blocked[demand, role]
