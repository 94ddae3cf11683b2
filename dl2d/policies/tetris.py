"""Tetris: machine after machine is packed with what aligns best and is soon done (Grandl et al., SIGCOMM 2014)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import ClassVar, NamedTuple

import numpy as np

from dl2d.core.array_types import Ints
from dl2d.core.cluster import NodeState, SharedLimit, Snapshot
from dl2d.core.decision import Alternative, Constraint, Decision, JobDecision, Reason
from dl2d.core.jobs import NOTHING, TASK_ROLES, Allocation, Job, JobKey, Role
from dl2d.core.limit_room import Blocked, LimitRoom
from dl2d.core.packing import Packing
from dl2d.core.policy import NO_EVIDENCE, Evidence
from dl2d.core.resources import Resources
from dl2d.policies.common.greedy_allocation import next_bundle
from dl2d.throughput.remaining_time import measured_or_mean_speeds, samples_left

#: Largest amount of remaining work that is told apart, so that sums stay finite.
_MAX_WORK = 1e100


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

    name: ClassVar[str] = "tetris"
    needs: ClassVar[frozenset[Evidence]] = NO_EVIDENCE

    def __init__(self, *, shortness: float = 1.0, whole_bundles: bool = False) -> None:
        if not 0.0 <= shortness < math.inf:
            msg = f"shortness: must be 0 or more, not {shortness!r}"
            raise ValueError(msg)
        self._shortness = shortness
        self._whole_bundles = whole_bundles
        settings = "" if shortness == 1.0 else f" shortness={shortness:g}"
        #: Of the code, and the settings that change decisions where they are not the usual.
        self.version = "1" + settings + (" whole_bundles" if whole_bundles else "")

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``. Cost: bundles x jobs, vectorised."""
        del rng
        held, machines = snapshot.held(), _Machines(snapshot, packing)
        jobs = _jobs(snapshot, machines)
        before, anew = machines.free.copy(), None
        if any(entry.runs[role] for entry in jobs for role in TASK_ROLES):
            anew = self._filling([entry.afresh() for entry in jobs], machines, snapshot.limits)
            anew.give_floors(held)
            anew.fill()
            machines.free = before.copy()
        filling = self._filling(jobs, machines, snapshot.limits)
        filling.give_floors(held)
        if anew is not None:
            targets = [entry.has for entry in anew.jobs]
            filling.keep(targets)
            filling.fill(targets)
        filling.fill()
        # The packing has the same tasks then, and says what stands in the way of more.
        for name, taken in zip(machines.names, before - machines.free, strict=True):
            if taken.any():
                packing.place_on(name, machines.resources_of(taken))

        @cache
        def blocked(demand: Resources, role: Role, job: JobKey | None) -> Blocked | None:
            node = packing.place(demand, role, job)
            if isinstance(node, Blocked):
                return node
            packing.remove(node, demand, job)
            return None

        return Decision(
            policy=self.name,
            policy_version=self.version,
            jobs=tuple(_decided(entry, held[entry.job.key], filling, anew, blocked) for entry in jobs),
            measure="alignment less weighed remaining work",
            actions=tuple(filling.actions),
            nodes=tuple((entry.job.key, role, node) for entry in jobs for role, node in entry.laid),
        )

    def _filling(self, jobs: Sequence[_Job], machines: _Machines, limits: Sequence[SharedLimit]) -> _Filling:
        return _Filling(jobs, machines, LimitRoom(limits), self._shortness, whole_bundles=self._whole_bundles)


class _Machines:
    """The nodes that take tasks, in their order, and what is free on them for the jobs of a snapshot."""

    def __init__(self, snapshot: Snapshot, packing: Packing) -> None:
        room = packing.room()
        known = {job.key for job in snapshot.jobs}
        for task in snapshot.tasks:
            # Who is not to be decided on stays where it is.
            if task.state.wanted and task.job not in known and task.node in room:
                room[task.node] = room[task.node].minus(task.room)
        nodes = [node for node in snapshot.nodes if node.name in room]
        #: Which of the machines a job may use, for jobs that may not use all.
        self.may_use = {
            job: np.array([node.name in names for node in nodes], dtype=np.bool_)
            for job, names in snapshot.may_use().items()
        }
        listed = {node.capacity for node in nodes} | {task.room for task in snapshot.tasks}
        listed |= {job.request.demand(role) for job in snapshot.jobs for role in TASK_ROLES}
        self.resources = sorted({name for demand in listed for name, _ in demand.thousandths})
        self.names = [node.name for node in nodes]
        self.places = {name: place for place, name in enumerate(self.names)}
        #: Shape (machines, resources).
        self.capacity, self.free = np.zeros((2, len(nodes), len(self.resources)), dtype=np.int64)
        for place, node in enumerate(nodes):
            self.capacity[place], self.free[place] = self.amounts(node.capacity), self.amounts(room[node.name])

    def amounts(self, demand: Resources) -> Ints:
        """A demand as a row: thousandths of each of ``resources``, in their order."""
        return np.array(demand.in_order(self.resources), dtype=np.int64)

    def resources_of(self, amounts: Ints) -> Resources:
        """The inverse of ``amounts``."""
        return Resources(
            tuple((name, left) for name, left in zip(self.resources, amounts.tolist(), strict=True) if left)
        )

    def fits(self, place: int, demand: Ints) -> bool:
        """Whether a machine has room."""
        return bool((demand <= self.free[place]).all())

    def takes(self, place: int, job: JobKey) -> bool:
        """Whether a job may use a machine."""
        return job not in self.may_use or bool(self.may_use[job][place])

    def first_with_room(self, demand: Ints, job: JobKey) -> int | None:
        """The first machine with room that a job may use."""
        fits = (demand <= self.free).all(axis=1)
        if job in self.may_use:
            fits &= self.may_use[job]
        return int(fits.argmax()) if fits.any() else None


class _Running(NamedTuple):
    """A task that runs already. ``place`` is None where its node takes no new tasks: it may stay all the same."""

    node: str
    place: int | None
    demand: Ints


class _Choice(NamedTuple):
    """What went on the last machine that had room for a job's next unit, and what it and the job itself scored."""

    place: int
    order: int
    score: float
    own: float


@dataclass(slots=True, eq=False)
class _Job:
    """A job while it is given bundles."""

    job: Job
    order: int
    #: Remaining work, in seconds x average machines.
    work: float
    floor: Allocation
    #: What tasks take that are laid on one machine together.
    demands: dict[tuple[Role, ...], Ints]
    #: Tasks that run and were not given to it again yet, the oldest last.
    runs: dict[Role, list[_Running]]
    has: Allocation = NOTHING
    #: Where its tasks are to be.
    laid: list[tuple[Role, str]] = field(default_factory=list)
    #: Score of the last unit that was packed.
    score: float | None = None

    def afresh(self) -> _Job:
        """The job as if nothing of it ran."""
        return _Job(self.job, self.order, self.work, self.floor, self.demands, {role: [] for role in TASK_ROLES})

    def again(self, step: Allocation, role: Role) -> list[_Running]:
        """The tasks of a step that run already."""
        return self.runs[role][max(len(self.runs[role]) - step.count(role), 0) :]

    def new(self, step: Allocation, *, pairs: bool) -> list[tuple[Role, ...]]:
        """The new tasks of a step in units: with ``pairs`` a worker and a PS together as long as there are both."""
        workers, ps = (max(step.count(role) - len(self.runs[role]), 0) for role in TASK_ROLES)
        both = min(workers, ps) if pairs else 0
        units: list[tuple[Role, ...]] = [TASK_ROLES] * both
        return units + [(Role.WORKER,)] * (workers - both) + [(Role.PS,)] * (ps - both)


def _jobs(snapshot: Snapshot, machines: _Machines) -> list[_Job]:
    floors, work = dict(snapshot.floors), _remaining_work(snapshot)
    jobs = {}
    for order, job in enumerate(snapshot.jobs):
        worker, ps = (machines.amounts(job.request.demand(role)) for role in TASK_ROLES)
        demands = {(Role.WORKER,): worker, (Role.PS,): ps, TASK_ROLES: worker + ps}
        runs: dict[Role, list[_Running]] = {role: [] for role in TASK_ROLES}
        jobs[job.key] = _Job(job, order, work[job.key], floors.get(job.key, NOTHING), demands, runs)
    for task in sorted(snapshot.tasks, key=attrgetter("number"), reverse=True):
        if task.state.wanted and task.job in jobs and task.role in TASK_ROLES:
            running = _Running(task.node, machines.places.get(task.node), machines.amounts(task.room))
            jobs[task.job].runs[task.role].append(running)
    return list(jobs.values())


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

    speeds = measured_or_mean_speeds(snapshot, per_bundle)
    return {
        job.key: min(samples_left(job) / speeds[job.key] * machines(job.request.demand_of(_bundle(job))), _MAX_WORK)
        for job in snapshot.jobs
    }


def _bundle(job: Job) -> Allocation:
    return Allocation(1, min(job.request.max_ps, 1))


class _Filling:
    """Machines being filled. A job's next unit waits for room, until there is none or it has all it may have."""

    def __init__(
        self,
        jobs: Sequence[_Job],
        machines: _Machines,
        limits: LimitRoom,
        shortness: float,
        *,
        whole_bundles: bool,
    ) -> None:
        self.jobs = jobs
        self.machines = machines
        self.limits = limits
        self.actions: list[tuple[JobKey, Allocation]] = []
        self._shortness = shortness
        self._whole_bundles = whole_bundles
        #: Steps of new tasks for which there was no room: there never will be, as room only shrinks.
        self._hopeless: set[tuple[object, ...]] = set()
        #: Orders of the jobs that may not use all machines, with those that they may use.
        may_use = machines.may_use
        self._restricted = [(each.order, may_use[each.job.key]) for each in jobs if each.job.key in may_use]
        #: Next steps of the jobs; which of them wait, and what their first units take, shape (resources, jobs).
        self._steps: list[Allocation] = [NOTHING] * len(jobs)
        self._waits = np.zeros(len(jobs), dtype=np.bool_)
        self._units = np.zeros((len(machines.resources), len(jobs)))
        self._work = np.array([entry.work for entry in jobs])
        #: Machine, job and score of each choice; of each job, the last in which it waited and had room, and its score.
        self._choices: list[tuple[int, int, float]] = []
        self._last = np.full(len(jobs), -1)
        self._scored = np.zeros(len(jobs))

    def next_step(self, entry: _Job, target: Allocation | None = None) -> Allocation | None:
        """What a job should be given next, room or not, up to a target."""
        job = entry.job
        if target is not None:
            if target == entry.has:
                return None
            job = replace(job, request=replace(job.request, max_workers=target.workers, max_ps=target.ps))
        return next_bundle(job, entry.has, whole=self._whole_bundles)

    def last_choice(self, order: int) -> _Choice | None:
        """What went on the last machine that had room for a job's next unit."""
        which = self._last[order]
        if which < 0:
            return None
        place, chosen, score = self._choices[which]
        return _Choice(place, chosen, score, float(self._scored[order]))

    def give_floors(self, held: Mapping[JobKey, Allocation]) -> None:
        """Give each job its floor; it stands even where there is no room for it.

        What jobs have of their floors comes first, so that what others lack of theirs does not take its room.
        """
        for part in (Allocation.common, Allocation.beyond):
            for entry in self.jobs:
                tasks = part(entry.floor, held[entry.job.key])
                self.limits.take(entry.job, tasks)
                if tasks != NOTHING and not self._lay(entry, tasks):
                    for role in TASK_ROLES:
                        for _ in range(tasks.count(role)):
                            self._lay(entry, Allocation(int(role is Role.WORKER), int(role is Role.PS)))
        for entry in self.jobs:
            entry.has = entry.floor
        self.actions = [(entry.job.key, entry.floor) for entry in self.jobs if entry.floor != NOTHING]

    def keep(self, targets: Iterable[Allocation]) -> None:
        """Let tasks that run stay, up to targets."""
        for entry, target in zip(self.jobs, targets, strict=True):
            runs, has, request = entry.runs, entry.has, entry.job.request
            size = has.plus(Allocation(len(runs[Role.WORKER]), len(runs[Role.PS]))).common(target)
            size = Allocation(request.largest_allowed(size.workers), size.ps)
            more = size.beyond(has)
            if size.workers >= request.min_workers and size.ps >= request.min_ps and more != NOTHING:
                self._give(entry, more)

    def fill(self, targets: Sequence[Allocation] | None = None) -> None:
        """Fill machine after machine with the units that score highest: bundle by bundle, and then task by task."""
        limits = [None] * len(self.jobs) if targets is None else targets
        for pairs in (True, False):
            for entry in sorted(self.jobs, key=lambda entry: entry.work):
                self._wait(entry, limits[entry.order], pairs=pairs)
            for place in range(len(self.machines.names)):
                while self._waits.any() and (chosen := self._choose(place)) is not None:
                    entry, score = chosen
                    if self._give(entry, self._steps[entry.order], pairs=pairs, place=place):
                        entry.score = score
                        self._wait(entry, limits[entry.order], pairs=pairs)
                    else:
                        self._waits[entry.order] = False

    def _choose(self, place: int) -> tuple[_Job, float] | None:
        """The job with the highest score of those whose units have room on a machine, and that score."""
        fits, alignment = self._waits.copy(), np.zeros(len(self.jobs))
        for order, machines in self._restricted:
            fits[order] &= machines[place]
        rows = self.machines.free[place].tolist(), self.machines.capacity[place].tolist()
        for unit, free, capacity in zip(self._units, *rows, strict=True):
            fits &= unit <= free
            if capacity:
                alignment += unit * (free / capacity**2)
        if not fits.any():
            return None
        work = float(self._work[fits].sum())
        # Both means are over the same jobs, so their quotient is that of the sums.
        weight = self._shortness * float(alignment[fits].sum()) / work if work > 0 else 0.0
        scores = np.where(fits, alignment - weight * self._work, -np.inf)
        best = int(scores.argmax())  # of equals the job submitted first
        self._last[fits], self._scored[fits] = len(self._choices), scores[fits]
        self._choices.append((place, best, float(scores[best])))
        return self.jobs[best], float(scores[best])

    def _wait(self, entry: _Job, limit: Allocation | None, *, pairs: bool) -> None:
        """Have a job wait for room for its next new tasks, once those that run already were given to it again."""
        order, self._waits[entry.order] = entry.order, False
        while limit != NOTHING and (step := self.next_step(entry, limit)) is not None:
            units = entry.new(step, pairs=pairs)
            if units:
                allowed = self.limits.blocked(entry.job, step) is None
                self._waits[order] = allowed and self._kind(entry, units) not in self._hopeless
                self._steps[order], self._units[:, order] = step, entry.demands[units[0]]
                return
            if not self._give(entry, step):
                return

    def _give(self, entry: _Job, step: Allocation, *, pairs: bool = False, place: int | None = None) -> bool:
        """``_lay``, where the limits of the job allow the step."""
        given = self.limits.blocked(entry.job, step) is None and self._lay(entry, step, pairs=pairs, place=place)
        if given:
            self.limits.take(entry.job, step)
        return given

    def _lay(self, entry: _Job, step: Allocation, *, pairs: bool = False, place: int | None = None) -> bool:
        """Lay a step of a job on machines, all or none.

        Tasks that run stay where they are; new units go on the machine, or on the first that has room.
        """
        machines, units = self.machines, entry.new(step, pairs=pairs)
        again = [(role, running) for role in TASK_ROLES for running in entry.again(step, role)]
        taken: list[tuple[int, Ints]] = []

        def take(at: int | None, demand: Ints) -> bool:
            if at is None or not machines.fits(at, demand):
                return False
            machines.free[at] -= demand
            taken.append((at, demand))
            return True

        laid = [(role, running.node) for role, running in again]
        room = all(running.place is None or take(running.place, running.demand) for _, running in again)
        for unit in units if room else ():
            demand = entry.demands[unit]
            here = place is not None and machines.fits(place, demand) and machines.takes(place, entry.job.key)
            at = place if here else machines.first_with_room(demand, entry.job.key)
            room = take(at, demand)
            if not room or at is None:
                break
            laid += [(role, machines.names[at]) for role in unit]
        if not room:
            for at, demand in taken:
                machines.free[at] += demand
            if units and not again:
                self._hopeless.add(self._kind(entry, units))
            return False
        for role in TASK_ROLES:
            del entry.runs[role][len(entry.runs[role]) - len(entry.again(step, role)) :]
        entry.laid += laid
        entry.has = entry.has.plus(step)
        self.actions.append((entry.job.key, step))
        return True

    def _kind(self, entry: _Job, units: Sequence[tuple[Role, ...]]) -> tuple[object, ...]:
        """The same for new tasks that take the same."""
        only = entry.job.key if entry.job.key in self.machines.may_use else None
        return (entry.job.request.worker, entry.job.request.ps, only, *units)


def _decided(
    entry: _Job,
    previous: Allocation,
    filling: _Filling,
    anew: _Filling | None,
    blocked: Callable[[Resources, Role, JobKey | None], Blocked | None],
) -> JobDecision:
    """A job's decision, with its reason and scores."""
    job, has = entry.job, entry.has
    options = [] if entry.score is None else [Alternative(has, entry.score)]
    step = filling.next_step(entry)
    if step is None:
        reason = Reason(Constraint.SATISFIED, f"has its maximum of {has}")
        return JobDecision(job.key, has, reason, previous, tuple(options))
    last = filling.last_choice(entry.order)
    if last is None and anew is not None:
        # Its own room was given away when targets were found.
        last = anew.last_choice(entry.order)
    behind = ""
    if last is not None:
        options.append(Alternative(has.plus(step), last.own))
        if last.order != entry.order:
            preferred = filling.jobs[last.order].job
            behind = (
                f"; on {filling.machines.names[last.place]}, the last with room for it, {preferred.key.id} "
                f"({preferred.request.name}) scored {last.score:.3g} and it {last.own:.3g}"
            )
    if (limit := filling.limits.blocked(job, step)) is not None:
        reason, behind = limit.reason(str(limit)), ""
    else:
        reason = _why_not(entry, step, filling.machines, blocked)
    reason = replace(reason, text=f"next bundle of {step}: {reason.text}{behind}")
    return JobDecision(job.key, has, reason, previous, tuple(options))


def _why_not(
    entry: _Job,
    step: Allocation,
    machines: _Machines,
    blocked: Callable[[Resources, Role, JobKey | None], Blocked | None],
) -> Reason:
    """What stood in the way of a job's next step."""
    for role in TASK_ROLES:
        if not step.count(role):
            continue
        if entry.runs[role]:
            running = entry.runs[role][-1]
            if running.place is not None and not machines.fits(running.place, running.demand):
                return Reason(Constraint.QUEUE, f"the room of a {role} on {running.node} went to others")
            continue
        only = entry.job.key if entry.job.key in machines.may_use else None
        if (why := blocked(entry.job.request.demand(role), role, only)) is not None:
            return why.reason(str(why))
    return Reason(Constraint.FRAGMENTED, "there is room for each of its tasks, but not for all together")
