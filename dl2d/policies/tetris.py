"""Tetris: machine after machine is packed with what aligns best and is soon done (Grandl et al., SIGCOMM 2014)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import ClassVar, NamedTuple

import numpy as np

from dl2d.core.cluster import Snapshot, Task
from dl2d.core.decision import Alternative, Constraint, Decision, Reason
from dl2d.core.jobs import NOTHING, TASK_ROLES, Allocation, Job, JobKey, Role
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.packing.room_in_limits import Blocked
from dl2d.core.policy import NO_EVIDENCE, Evidence
from dl2d.core.resources import Resources
from dl2d.policies.common.greedy_allocation import GreedyAllocation, next_bundle
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

    The paper packs tasks. Here the unit is what a job grows by at once, a worker and a PS at the most, placed on one
    machine. A step of more tasks (a minimum, the next allowed worker count) begins at the machine and goes on where the
    placement lays tasks, all or none of it. When no unit has room on any machine, what is left is packed once more
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
            raise ValueError(f"shortness: must be 0 or more, not {shortness!r}")
        self._shortness = shortness
        self._whole_bundles = whole_bundles
        settings = "" if shortness == 1.0 else f" shortness={shortness:g}"
        #: Version of the code, and the settings that change decisions where they are not the usual.
        self.version = "2" + settings + (" whole_bundles" if whole_bundles else "")

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``. Cost: bundles x jobs, vectorised."""
        del rng
        work, running = _remaining_work(snapshot), _running(snapshot)
        for_targets = None
        if running:
            for_targets = self._machines(snapshot, packing.anew(), work, {})
            for_targets.fill()
        machines = self._machines(snapshot, packing, work, running)
        if for_targets is not None:
            targets = for_targets.allocation.allocations
            machines.keep(targets)
            machines.fill(targets)
        machines.fill()
        alternatives: dict[JobKey, tuple[Alternative, ...]] = {}
        for order, job in enumerate(snapshot.jobs):
            reason, alternatives[job.key] = _explained(order, job, machines, for_targets)
            machines.allocation.refuse(job, reason)
        return machines.allocation.decision(
            self, measure="alignment less weighed remaining work", alternatives=alternatives, nodes=machines.nodes()
        )

    def _machines(
        self, snapshot: Snapshot, packing: Packing, work: Mapping[JobKey, float], running: _Running
    ) -> _MachinePacking:
        return _MachinePacking(snapshot, packing, work, running, self._shortness, whole_bundles=self._whole_bundles)


#: Tasks of jobs that run already, those that stay longest first.
_Running = Mapping[tuple[JobKey, Role], Sequence[Task]]
#: New tasks that are placed on one node together.
_Unit = tuple[Role, ...]


def _running(snapshot: Snapshot) -> _Running:
    jobs, nodes = {job.key for job in snapshot.jobs}, {node.name for node in snapshot.nodes}
    found: dict[tuple[JobKey, Role], list[Task]] = defaultdict(list)
    for task in sorted(snapshot.tasks, key=attrgetter("number")):
        if task.state.wanted and task.job in jobs and task.node in nodes:
            found[task.group].append(task)
    return found


class _Choice(NamedTuple):
    """What went on the last machine that had room for a job's next unit, and what it and the job itself scored."""

    node: str
    order: int
    score: float
    own: float


def _remaining_work(snapshot: Snapshot) -> dict[JobKey, float]:
    """Remaining time of each job x what it holds meanwhile; seconds x average machines."""
    count = sum(node.is_open for node in snapshot.nodes)
    whole = dict(snapshot.capacity.thousandths)

    def machines(demand: Resources) -> float:
        """A demand in average machines: the sum of its fractions of each resource."""
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


class _MachinePacking:
    """Packing, machine after machine. A job's next unit waits for room until there is none or the job has its maximum.

    Jobs are named by their places in the snapshot.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        packing: Packing,
        work: Mapping[JobKey, float],
        running: _Running,
        shortness: float,
        *,
        whole_bundles: bool,
    ) -> None:
        self.jobs = jobs = snapshot.jobs
        known = {job.key for job in jobs}
        for task in snapshot.tasks:
            # Tasks of jobs that are not decided on stay where they are.
            if task.state.wanted and task.job not in known:
                packing.place_on(task.node, task.room)
        self.packing = packing
        self.allocation = GreedyAllocation(snapshot, packing, whole_bundles=whole_bundles)
        self._running = running
        self._shortness = shortness
        self._whole_bundles = whole_bundles
        #: Where new tasks are placed.
        self._placed: dict[JobKey, list[tuple[Role, str]]] = defaultdict(list)
        open_nodes = packing.room()
        self._capacity = {node.name: node.capacity for node in snapshot.nodes if node.name in open_nodes}
        listed = {*self._capacity.values(), *(job.request.demand(role) for job in jobs for role in TASK_ROLES)}
        self._resources = sorted({name for demand in listed for name, _ in demand.thousandths})
        #: Places of the jobs that may not use all machines, with those that they may use.
        may_use = snapshot.may_use()
        self._restricted = [(order, may_use[job.key]) for order, job in enumerate(jobs) if job.key in may_use]
        #: Next steps of the jobs; which of them wait, and what their first units take, shape (resources, jobs).
        self._steps: list[Allocation] = [NOTHING] * len(jobs)
        self._waits = np.zeros(len(jobs), dtype=np.bool_)
        self._units = np.zeros((len(self._resources), len(jobs)))
        self._work = np.array([work[job.key] for job in jobs])
        #: Machine, job and score of each choice; of each job, the last in which it waited and had room, and its score.
        self._choices: list[tuple[str, int, float]] = []
        self._last = np.full(len(jobs), -1)
        self._scored = np.zeros(len(jobs))
        #: Score of the last unit of each job that was packed.
        self.packed: dict[JobKey, float] = {}

    def next_step(self, job: Job, target: Allocation | None = None) -> Allocation | None:
        """What a job should be given next, room or not, up to a target."""
        has = self.allocation.allocations[job.key]
        if target is not None:
            if target == has:
                return None
            job = replace(job, request=replace(job.request, max_workers=target.workers, max_ps=target.ps))
        return next_bundle(job, has, whole=self._whole_bundles)

    def last_choice(self, order: int) -> _Choice | None:
        """What went on the last machine that had room for a job's next unit."""
        which = self._last[order]
        if which < 0:
            return None
        node, chosen, score = self._choices[which]
        return _Choice(node, chosen, score, float(self._scored[order]))

    def waiting_task(self, job: Job, role: Role) -> Task | None:
        """The next task of a job that runs and was not given to it again yet."""
        has = self.allocation.allocations[job.key].count(role)
        return next(iter(self._running.get((job.key, role), ())[has:]), None)

    def keep(self, targets: Mapping[JobKey, Allocation]) -> None:
        """Let tasks that run stay, up to targets."""
        for job in self.jobs:
            has, request = self.allocation.allocations[job.key], job.request
            size = has.larger(self._runs(job)).common(targets[job.key])
            size = Allocation(request.largest_allowed(size.workers), size.ps)
            more = size.beyond(has)
            if size.workers >= request.min_workers and size.ps >= request.min_ps and more != NOTHING:
                self.allocation.keep([(job, more)])

    def fill(self, targets: Mapping[JobKey, Allocation] | None = None) -> None:
        """Fill machine after machine with the units that score highest: bundle by bundle, and then task by task."""
        limits = targets or {}
        for pairs in (True, False):
            for order in np.argsort(self._work, kind="stable").tolist():
                self._wait(order, limits.get(self.jobs[order].key), pairs=pairs)
            for node in self._capacity:
                while self._waits.any() and (chosen := self._choose(node)) is not None:
                    order, score = chosen
                    job = self.jobs[order]
                    if self._give(job, self._steps[order], pairs=pairs, node=node):
                        self.packed[job.key] = score
                        self._wait(order, limits.get(job.key), pairs=pairs)
                    else:
                        self._waits[order] = False

    def _choose(self, node: str) -> tuple[int, float] | None:
        """The job with the highest score of those whose units have room on a machine, and that score."""
        fits, alignment = self._waits.copy(), np.zeros(len(self.jobs))
        for order, nodes in self._restricted:
            fits[order] &= node in nodes
        rows = (room.in_order(self._resources) for room in (self.packing.room_on(node), self._capacity[node]))
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
        self._choices.append((node, best, float(scores[best])))
        return best, float(scores[best])

    def _wait(self, order: int, limit: Allocation | None, *, pairs: bool) -> None:
        """Have a job wait for room for its next new tasks, once those that run already were given to it again."""
        job, self._waits[order] = self.jobs[order], False
        while limit != NOTHING and (step := self.next_step(job, limit)) is not None:
            units = self._new_units(job, step, pairs=pairs)
            if units:
                self._waits[order] = self.allocation.limited(job, step) is None
                self._steps[order] = step
                self._units[:, order] = self._demand(job, units[0]).in_order(self._resources)
                return
            if not self._give(job, step):
                return

    def _new_units(self, job: Job, step: Allocation, *, pairs: bool) -> list[_Unit]:
        """The new tasks of a step in units: with ``pairs`` a worker and a PS together as long as there are both."""
        workers, ps = step.beyond(self._again(job, step))
        both = min(workers, ps) if pairs else 0
        units: list[_Unit] = [TASK_ROLES] * both
        return units + [(Role.WORKER,)] * (workers - both) + [(Role.PS,)] * (ps - both)

    def _again(self, job: Job, step: Allocation) -> Allocation:
        """The tasks of a step that run already."""
        return self._runs(job).beyond(self.allocation.allocations[job.key]).common(step)

    def _runs(self, job: Job) -> Allocation:
        """How many tasks of a job run."""
        workers, ps = (len(self._running.get((job.key, role), ())) for role in TASK_ROLES)
        return Allocation(workers, ps)

    def _demand(self, job: Job, unit: _Unit) -> Resources:
        return self.packing.bundle(job.request) if len(unit) > 1 else job.request.demand(unit[0])

    def _give(self, job: Job, step: Allocation, *, pairs: bool = False, node: str = "") -> bool:
        """Give a job a step, all or none, if its limits allow that.

        Tasks that run stay where they are; new units go on the machine, or where the placement lays them.
        """
        packing, again = self.packing, self._again(job, step)
        if self.allocation.limited(job, step) is not None:
            return False
        taken: list[tuple[str, Resources]] = []
        placed: list[tuple[Role, str]] = []
        for unit in self._new_units(job, step, pairs=pairs):
            demand = self._demand(job, unit)
            here = node and packing.place_on(node, demand, job.key)
            at = node if here else packing.place(demand, unit[0], job.key, limited=False)
            if isinstance(at, Blocked):
                break
            taken.append((at, demand))
            placed += [(role, at) for role in unit]
        given = len(placed) == step.beyond(again).tasks and (again == NOTHING or packing.stay([(job, again)])[0])
        if not given:
            for at, demand in taken:
                packing.remove(at, demand)
            return False
        packing.limits.take(job, step.beyond(again))
        self._placed[job.key] += placed
        self.allocation.give(job, step)
        return True

    def nodes(self) -> list[tuple[JobKey, Role, str]]:
        """Where the tasks of all jobs are: those that stay, and new ones."""
        stay = [
            (job.key, role, task.node)
            for job in self.jobs
            for role in TASK_ROLES
            for task in self._running.get((job.key, role), ())[: self.allocation.allocations[job.key].count(role)]
        ]
        return stay + [(key, role, node) for key, placed in self._placed.items() for role, node in placed]


def _explained(
    order: int, job: Job, machines: _MachinePacking, for_targets: _MachinePacking | None
) -> tuple[Reason, tuple[Alternative, ...]]:
    """Why a job gets no more, and the scores of what it has and of its next bundle."""
    has = machines.allocation.allocations[job.key]
    options = [Alternative(has, machines.packed[job.key])] if job.key in machines.packed else []
    step = machines.next_step(job)
    if step is None:
        return Reason(Constraint.SATISFIED, f"has its maximum of {has}"), tuple(options)
    last = machines.last_choice(order)
    if last is None and for_targets is not None:
        # Its own room was given away when targets were found.
        last = for_targets.last_choice(order)
    behind = ""
    if last is not None:
        options.append(Alternative(has.plus(step), last.own))
        if last.order != order:
            preferred = machines.jobs[last.order]
            behind = (
                f"; on {last.node}, the last with room for it, {preferred.key.id} ({preferred.request.name}) scored "
                f"{last.score:.3g} and it {last.own:.3g}"
            )
    if (limit := machines.allocation.limited(job, step)) is not None:
        reason, behind = limit.reason(str(limit)), ""
    else:
        reason = _why_not(job, step, machines)
    return replace(reason, text=f"next bundle of {step}: {reason.text}{behind}"), tuple(options)


def _why_not(job: Job, step: Allocation, machines: _MachinePacking) -> Reason:
    """What stood in the way of a job's next step."""
    packing = machines.packing
    for role in TASK_ROLES:
        if not step.count(role):
            continue
        if (task := machines.waiting_task(job, role)) is not None:
            if not task.room.fits_in(packing.room_on(task.node)):
                return Reason(Constraint.QUEUE, f"the room of a {role} on {task.node} went to others")
            continue
        demand = job.request.demand(role)
        at = packing.place(demand, role, job.key)
        if isinstance(at, Blocked):
            return at.reason(str(at))
        packing.remove(at, demand, job.key)
    return Reason(Constraint.FRAGMENTED, "there is room for each of its tasks, but not for all together")
