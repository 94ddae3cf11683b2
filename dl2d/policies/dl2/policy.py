"""DL2, the default policy: sizes all jobs anew in each slot, by steps in the order of learned scores.

As in Peng et al., "DL2: A deep learning-driven scheduler for deep learning clusters" (arXiv:1909.06040), a learned
policy decides the workers and parameter servers of all jobs in each slot. The method of deciding is different
(``dl2d.policies.dl2.size_search``); ``dl2d.policies.dl2_paper`` has the paper's design.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from dl2d.core.array_types import Bools, Floats, Ints
from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Alternative, Constraint, Decision, Reason
from dl2d.core.jobs import NOTHING, TASK_ROLES, Allocation, Job, JobKey, JobRequest
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.packing.room_in_limits import Blocked
from dl2d.core.packing.tasks_that_make_room import TaskGroups, WaitingTask, make_room
from dl2d.core.policy import Evidence
from dl2d.core.resources import Shortfall
from dl2d.policies.common.checkpoint import Checkpoint, read_checkpoint, version_of
from dl2d.policies.common.greedy_allocation import GreedyAllocation
from dl2d.policies.common.speeds_after_resize import can_keep, speeds_in_next_slot
from dl2d.policies.dl2.checkpoint_contents import NAME, Parameters
from dl2d.policies.dl2.greedy_packing import FirstNodeOnlyPacking, GreedyPacking
from dl2d.policies.dl2.pareto_frontier import (
    MIN_SPEED_UP,
    FrontierArrays,
    ParetoFrontier,
    SizeGrid,
    allowed_sizes,
    frontier_key,
    pareto_frontiers,
    summed_shares,
)
from dl2d.policies.dl2.scoring import ClusterJobs, describe_steps, score
from dl2d.policies.dl2.size_search import JobLimits, choose_sizes
from dl2d.policies.dl2.speed_predictions import CheckpointSpeeds, Predictions
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.remaining_time import samples_left

#: Folder of the checkpoint that comes with dl2d.
DEFAULT_CHECKPOINT = Path(__file__).parent / "default"
#: Thousandths by resource.
Amounts = tuple[tuple[str, int], ...]
#: Stands for no limit, in thousandths.
_UNLIMITED = 1 << 62
#: Maximum number of steps of a job that are reported as alternatives.
_MAX_ALTERNATIVES = 3


class Dl2:
    """Chooses the sizes of all jobs by learned scores of size steps, and packs them on the nodes.

    A decision has four stages, in the order of ``decide``. Jobs of which no size is possible get their minimum sizes
    before stage 3, if there is room.

    1. Speeds of each job at each size are predicted (``predictions``).
    2. The sizes that a job may have are reduced to those on its Pareto frontier (``pareto_frontier``).
    3. Within the total resources of the cluster and the limits of the jobs, these are enlarged step by step; the step
       with the highest score is made next (``size_search``, ``scoring``).
    4. The tasks are packed on the nodes (``greedy_packing``). Tasks that fit on no node are dropped, and stages 3 and 4
       are done once more for the other jobs. If a job cannot start because no single node has room for one of its
       tasks, stages 3 and 4 are repeated with the minimum sizes of jobs that start placed before running tasks beyond
       floors. The second result is used if fewer jobs wait for this reason, and moves of running tasks can start one.

    Parameters
    ----------
    checkpoint
        Learned weights and measured speeds.
    optimism
        Standard deviations that are added to predicted speeds; by default the checkpoint's setting, and at least 0.5
        for kinds without checkpoint speeds.
    resize_seconds
        Time for which a job does not train when it is resized: a size is changed only where it saves more. By default
        the checkpoint's setting.
    slot_seconds
        Length of a slot; by default the checkpoint's setting.

    Raises
    ------
    CheckpointError
        The checkpoint is of another design, an entry is missing or has another shape, or a setting is out of range.
    """

    name: ClassVar[str] = NAME
    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.SPEEDS, Evidence.JOB_SPEEDS})

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        optimism: float | None = None,
        resize_seconds: float | None = None,
        slot_seconds: float | None = None,
    ) -> None:
        overrides = {"optimism": optimism, "resize_seconds": resize_seconds, "slot_seconds": slot_seconds}
        #: Learned weights and measured speeds.
        self.checkpoint = checkpoint
        self._parameters = Parameters.of(checkpoint, overrides)
        self._checkpoint_speeds = CheckpointSpeeds(self._parameters)
        #: Beginning of the checkpoint's digest, and the settings that replace the checkpoint's.
        self.version = version_of(checkpoint, overrides)
        #: Model of the previous decision. Only the time of a decision depends on it: results that would be the same are
        #: not computed again.
        self._last_model: GaussianProcess | None = None

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``. Cost: steps x (jobs + sizes of a job), then tasks x log nodes."""
        del rng
        allocation, cluster = GreedyAllocation(snapshot, packing), _Cluster.of(snapshot)  # gives jobs their floors
        options = self._size_options(snapshot, packing, allocation, cluster)
        decision = self._decide_from_options(snapshot, packing, allocation, cluster, options, starts_first=False)
        if snapshot.tasks and (fragmented := _fragmented_starts(decision)):
            packing = packing.anew()
            allocation = GreedyAllocation(snapshot, packing)
            other = self._decide_from_options(snapshot, packing, allocation, cluster, options, starts_first=True)
            remaining = _fragmented_starts(other)
            if len(remaining) < len(fragmented) and _moves_start_one(fragmented - remaining, other, snapshot):
                return other
        return decision

    def _decide_from_options(
        self,
        snapshot: Snapshot,
        packing: Packing,
        allocation: GreedyAllocation,
        cluster: _Cluster,
        options: SizeOptions | None,
        *,
        starts_first: bool,
    ) -> Decision:
        """Choose sizes and pack the tasks (stages 3 and 4); ``starts_first`` is as in ``GreedyPacking``."""
        with_options = set() if options is None else {job.key for job in options.jobs}
        for job in snapshot.jobs:
            if job.key not in with_options:
                _give_minimum(allocation, job)
        nothing_runs = all(size == NOTHING for size in allocation.held.values())
        packing_on_first_nodes = (
            FirstNodeOnlyPacking(allocation, packing) if packing.first_node_only and nothing_runs else None
        )
        packer = packing_on_first_nodes or GreedyPacking(
            allocation, smallest_first=packing.first_node_only, starts_first=starts_first
        )
        alternatives = {} if options is None else self._choose_and_pack(allocation, packing, packer, cluster, options)
        return allocation.decision(
            self,
            measure="score of the next step",
            alternatives=alternatives,
            nodes=() if packing_on_first_nodes is None else packing_on_first_nodes.nodes,
        )

    def size_options(self, snapshot: Snapshot, packing: Packing) -> SizeOptions | None:
        """Compute the sizes of which a decision chooses; None where no job has a possible size."""
        return self._size_options(snapshot, packing, GreedyAllocation(snapshot, packing), _Cluster.of(snapshot))

    def _size_options(
        self, snapshot: Snapshot, packing: Packing, allocation: GreedyAllocation, cluster: _Cluster
    ) -> SizeOptions | None:
        predictions = Predictions(
            snapshot, self._checkpoint_speeds, self._parameters, gathers=packing.gathers, previous=self._last_model
        )
        self._last_model = predictions.model
        frontiers, frontier_of_jobs = self._frontiers(snapshot, allocation, cluster, predictions)
        sized = [
            (job, frontier)
            for job, frontier in zip(snapshot.jobs, frontier_of_jobs, strict=True)
            if frontier is not None
        ]
        if not sized:
            return None
        jobs, frontier_of = [job for job, _ in sized], np.array([frontier for _, frontier in sized])
        arrays, takes_part = FrontierArrays(frontiers), np.ones((1, len(jobs)), dtype=np.bool_)
        samples = np.array([samples_left(job) for job in jobs])
        cluster_jobs = ClusterJobs.of(
            arrays, frontier_of[None], takes_part, samples[None], np.array([self._parameters.slot_seconds])
        )
        return SizeOptions(jobs, arrays, cluster_jobs, cluster.free(packing))

    def _frontiers(
        self, snapshot: Snapshot, allocation: GreedyAllocation, cluster: _Cluster, predictions: Predictions
    ) -> tuple[list[ParetoFrontier], list[int | None]]:
        """Compute Pareto frontiers, one for all equal jobs.

        Returns
        -------
        The frontiers, and for each job the index of its own; None where no size is possible.
        """
        grid_indices: dict[tuple[object, ...], int] = {}
        grids: list[SizeGrid] = []
        grid_of_jobs = []
        for job, inputs in zip(snapshot.jobs, predictions.inputs, strict=True):
            floor = allocation.allocations[job.key]
            # Where a resize costs nothing, it does not matter what the job has.
            held = allocation.held[job.key] if self._parameters.resize_seconds else NOTHING
            most = allocation.most(job)
            key = (*frontier_key(inputs.request), inputs.own_measurements, inputs.optimism, floor, held, most)
            grid_index = grid_indices.setdefault(key, len(grid_indices))
            if grid_index == len(grids):
                grids.append(self._grid(predictions.speeds(inputs), inputs.request, floor, held, most, cluster))
            grid_of_jobs.append(grid_index)
        frontiers: list[ParetoFrontier] = []
        frontier_indices: dict[int, int] = {}
        for grid_index, frontier in enumerate(pareto_frontiers(grids)):
            if frontier is not None:
                frontier_indices[grid_index] = len(frontiers)
                frontiers.append(frontier)
        return frontiers, [frontier_indices.get(grid_index) for grid_index in grid_of_jobs]

    def _grid(
        self,
        speeds: Floats,
        request: JobRequest,
        floor: Allocation,
        held: Allocation,
        most: Amounts,
        cluster: _Cluster,
    ) -> SizeGrid:
        """Speeds and demands of a job at all sizes, where every size except the one that it has costs a resize.

        Parameters
        ----------
        most
            The most that its limits allow it, of resources of which it could have more.
        """
        parameters = self._parameters
        speeds = speeds_in_next_slot(speeds, held, parameters.resize_seconds / parameters.slot_seconds)
        return SizeGrid(
            speeds,
            worker=request.worker.in_order(cluster.names),
            ps=request.ps.in_order(cluster.names),
            capacity=cluster.capacity.tolist(),
            allowed=allowed_sizes(request) & _within(most, request) if most else allowed_sizes(request),
            base=floor,
            held=held if can_keep(speeds, held) else None,
        )

    def _choose_and_pack(
        self,
        allocation: GreedyAllocation,
        packing: Packing,
        packer: GreedyPacking | FirstNodeOnlyPacking,
        cluster: _Cluster,
        options: SizeOptions,
    ) -> dict[JobKey, tuple[Alternative, ...]]:
        """Choose sizes and pack them; resources of tasks that fit on no node go to other jobs. Returns alternatives."""
        jobs, frontiers, cluster_jobs, _ = options
        frontier_of = cluster_jobs.frontier[0]
        summed_shares = cluster.summed_shares(jobs)
        bases, weights = np.zeros((1, len(jobs)), dtype=np.int64), self._parameters.weights
        positions = choose_sizes(
            frontiers, cluster_jobs, bases, cluster.free(packing), weights, limits=cluster.limits(jobs, packing)
        )  # fmt: skip
        blocked = packer.give(jobs, frontiers.sizes[frontier_of, positions[0]], summed_shares)
        if blocked:
            unblocked = cluster_jobs.takes_part.copy()
            unblocked[0, list(blocked)] = False
            # The factors "load" and "relative" keep the values of all jobs, so scores do not change between the rounds.
            others = replace(cluster_jobs, takes_part=unblocked)
            positions = choose_sizes(
                frontiers, others, positions, cluster.free(packing), weights,
                only_larger=True, limits=cluster.limits(jobs, packing),
            )  # fmt: skip
            # Size 0: blocked jobs get no more tasks.
            sizes = np.where(unblocked[0][:, None], frontiers.sizes[frontier_of, positions[0]], 0)
            blocked |= packer.give(jobs, sizes, summed_shares)
        steps, free = _NextSteps.of(frontiers, cluster_jobs, positions[0], weights), cluster.free(packing)[0]
        for index, job in enumerate(jobs):
            size = allocation.allocations[job.key]
            if size == job.request.max_size:
                reason = Reason(Constraint.SATISFIED, f"has its maximum of {size}")
            else:
                limited = _limit_reason(allocation, job, steps, index) if index not in blocked else None
                reason = limited or _reason(steps, index, size, blocked.get(index), cluster, free)
            allocation.refuse(job, reason)
        return {job.key: steps.alternatives(index) for index, job in enumerate(jobs)}


class SizeOptions(NamedTuple):
    """What sizes are chosen from: jobs of which some size is possible, the sizes of each, and the free resources."""

    jobs: list[Job]
    frontiers: FrontierArrays
    #: Features of the jobs, in one cluster.
    cluster_jobs: ClusterJobs
    #: Free resources of all nodes that accept tasks, shape (1, R).
    free: Ints


class _Cluster(NamedTuple):
    """Resources of a cluster as arrays."""

    #: Names of R resources.
    names: list[str]
    #: Amounts that the cluster has, in thousandths, shape (R,).
    capacity: Ints

    @classmethod
    def of(cls, snapshot: Snapshot) -> _Cluster:
        """Collect all resources that the cluster has or a job needs."""
        capacity = snapshot.capacity
        names = {name for name, _ in capacity.thousandths}
        for request in {id(job.request): job.request for job in snapshot.jobs}.values():
            names |= {name for demand in (request.worker, request.ps) for name, _ in demand.thousandths}
        order = sorted(names) or ["cpu"]
        return cls(order, np.array(capacity.in_order(order), dtype=np.int64))

    def free(self, packing: Packing) -> Ints:
        """Free resources of all nodes that accept tasks, shape (1, R)."""
        return np.array([packing.left().in_order(self.names)], dtype=np.int64)

    def limits(self, jobs: Sequence[Job], packing: Packing) -> JobLimits | None:
        """The limits of these jobs, as far as they leave something; None if no job is in a limit."""
        numbers = [packing.limits.of(job.key) for job in jobs]
        if not any(numbers):
            return None
        left: list[int] = []
        indices: dict[int, list[tuple[int, int]]] = {}
        for number in sorted(set[int]().union(*numbers)):
            amounts = [(name, amount) for name, amount in packing.limits.left(number).items() if name in self.names]
            indices[number] = [(len(left) + place, self.names.index(name)) for place, (name, _) in enumerate(amounts)]
            left += [max(amount, 0) for _, amount in amounts]
        of_jobs = [[pair for number in each for pair in indices[number]] for each in numbers]
        padded = np.zeros((len(jobs), max(map(len, of_jobs)), 2), dtype=np.int64)
        padded[..., 0] = len(left)
        for row, pairs in zip(padded, of_jobs, strict=True):
            if pairs:
                row[: len(pairs)] = pairs
        return JobLimits(np.array([*left, _UNLIMITED], dtype=np.int64), padded[..., 0], padded[..., 1])

    def summed_shares(self, jobs: Sequence[Job]) -> Floats:
        """Summed shares of a worker and of a PS of each job, by which tasks are sorted, shape (jobs, 2)."""
        demands = [(job.request.worker, job.request.ps) for job in jobs]
        amounts = {demand: demand.in_order(self.names) for roles in demands for demand in roles}
        demand = np.array([[amounts[worker], amounts[ps]] for worker, ps in demands], dtype=np.int64)
        return summed_shares(demand, self.capacity)


class _NextSteps(NamedTuple):
    """Possible further steps from the chosen sizes, whether there are resources for them or not."""

    frontiers: FrontierArrays
    #: Index of each job's frontier, shape (jobs,).
    frontier_of: Ints
    #: Position of each job's chosen size on its frontier, shape (jobs,).
    positions: Ints
    #: Score of the step to each position, -inf where there is none; shape (jobs, C).
    scores: Floats
    #: Positions to which the steps with the highest scores lead, the highest first; shape (jobs, _MAX_ALTERNATIVES).
    best: Ints

    @classmethod
    def of(cls, frontiers: FrontierArrays, cluster_jobs: ClusterJobs, positions: Ints, weights: Floats) -> _NextSteps:
        """Score the steps of all jobs."""
        clusters, jobs = np.nonzero(cluster_jobs.takes_part)
        frontier_of = cluster_jobs.frontier[0]
        scores = score(weights, describe_steps(frontiers, cluster_jobs, clusters, jobs, positions))
        scores = np.where(frontiers.is_step[frontier_of, positions], scores, -np.inf)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :_MAX_ALTERNATIVES]
        return cls(frontiers, frontier_of, positions, scores, best)

    def alternatives(self, index: int) -> tuple[Alternative, ...]:
        """Steps of the job at an index with the highest scores."""
        scores = self.scores[index]
        positions = [position for position in self.best[index].tolist() if np.isfinite(scores[position])]
        return tuple(Alternative(self._size_at(index, position), float(scores[position])) for position in positions)

    def _size_at(self, index: int, position: int) -> Allocation:
        return Allocation(*self.frontiers.sizes[self.frontier_of[index], position].tolist())

    def best_step(self, index: int) -> tuple[Allocation, float, Ints]:
        """Step of the job at an index with the highest score.

        Returns
        -------
        Its new size, its relative speed-up, and the resources that it takes, shape (R,).
        """
        frontier, before, after = self.frontier_of[index], self.positions[index], int(self.best[index, 0])
        log_speed, need = self.frontiers.log_speed[frontier], self.frontiers.need[frontier]
        speed_up = float(np.expm1(log_speed[after] - log_speed[before]))
        return self._size_at(index, after), speed_up, need[after] - need[before]


def _within(most: Amounts, request: JobRequest) -> Bools:
    """Whether each size takes no more than this of each resource; shape (max_ps + 1, max_workers + 1)."""
    names = [name for name, _ in most]
    worker, ps = (np.array(demand.in_order(names), dtype=np.int64) for demand in (request.worker, request.ps))
    more_ps, more_workers = np.indices((request.max_ps + 1, request.max_workers + 1))
    taken = more_workers[..., None] * worker + more_ps[..., None] * ps
    return np.asarray((taken <= np.array([amount for _, amount in most], dtype=np.int64)).all(axis=2))


def _limit_reason(allocation: GreedyAllocation, job: Job, steps: _NextSteps, index: int) -> Reason | None:
    """Reason of a job whose limits leave too little for its next step; None if it has another one."""
    size = allocation.allocations[job.key]
    if np.isfinite(steps.scores[index]).any():
        step = steps.best_step(index)[0].beyond(size)
    else:
        bundle = allocation.next_bundle(job) if allocation.most(job) else None
        step = bundle or NOTHING
    limit = None if step == NOTHING else allocation.limited(job, step)
    return None if limit is None else limit.reason(f"next step of {step}: {limit}")


def _reason(
    steps: _NextSteps, index: int, size: Allocation, blocked: Blocked | None, cluster: _Cluster, free: Ints
) -> Reason:
    """Reason why a job is not enlarged beyond its size.

    Parameters
    ----------
    index
        Index of the job.
    blocked
        Reason why tasks of the job could not be placed; None where all were.
    free
        Free resources of the cluster, shape (R,).
    """
    if blocked is not None:
        text = f"cannot start: {blocked}" if size == NOTHING else f"cannot be enlarged beyond {size}: {blocked}"
        return blocked.reason(text)
    if not np.isfinite(steps.scores[index]).any():
        percent = f"{100 * (MIN_SPEED_UP - 1):.0f} %"
        return Reason(Constraint.SATISFIED, f"no larger size is predicted to be {percent} faster than {size}")
    larger, speed_up, need = steps.best_step(index)
    shortfalls = tuple(
        Shortfall(name, wanted / 1000, max(had, 0) / 1000)
        for name, wanted, had in zip(cluster.names, need.tolist(), free.tolist(), strict=True)
        if wanted > had
    )
    if size == NOTHING:
        gain = f"waits to start at {larger}"
    else:
        gain = f"{larger} is predicted to be {speed_up:.0%} faster than {size}"
    if not shortfalls:
        return Reason(Constraint.QUEUE, f"{gain}; the resources went to jobs whose steps had higher scores")
    lacking = "; ".join(map(str, shortfalls))
    return Reason(Constraint.CAPACITY, f"{gain}; the cluster has too few free resources ({lacking})", shortfalls)


def _fragmented_starts(decision: Decision) -> frozenset[JobKey]:
    """Jobs that have and get nothing although there is room for their tasks, but not on a single node."""
    return frozenset(
        entry.job
        for entry in decision.jobs
        if entry.allocation == entry.previous == NOTHING and entry.reason.constraint is Constraint.FRAGMENTED
    )


def _moves_start_one(jobs: Collection[JobKey], decision: Decision, snapshot: Snapshot) -> bool:
    """Whether moves of tasks beyond floors can start at least one of these jobs.

    The packing ignores where running tasks are now, so moves may not lead to it.
    """
    held, floors, groups = snapshot.held(), dict(snapshot.floors), TaskGroups.of(snapshot, decision)
    free = {node.name: node.capacity.minus(node.used) for node in snapshot.nodes if node.is_open}
    for task in groups.draining:
        if task.node in free:
            free[task.node] += task.room
    requests = {job.key: job.request for job in snapshot.jobs if job.key not in snapshot.silent}
    beyond_floors = [
        task
        for (key, role), tasks in groups.wanted.items()
        if key in requests
        for task in sorted(tasks, key=attrgetter("number"))[floors.get(key, NOTHING).count(role) :]
    ]
    waiting = [
        WaitingTask((key, role), requests[key].demand(role))
        for key in dict.fromkeys(key for key, _ in decision.actions)
        if key in requests and held[key] == NOTHING
        for role in TASK_ROLES
        for _ in range(requests[key].min_size.count(role))
    ]
    #: Demands that some node has room for now. As where tasks are placed, these get theirs first.
    have_room = {task.demand for task in waiting if any(task.demand.fits_in(room) for room in free.values())}
    waiting.sort(key=lambda task: task.demand not in have_room)
    made = make_room(waiting, free, beyond_floors, groups.surplus, snapshot.may_use())
    blocked = {task.group[0] for task in made.without_room}
    return any(key not in blocked for key in jobs)


def _give_minimum(allocation: GreedyAllocation, job: Job) -> None:
    """Give a job for which no size is possible its minimum size, if there is room for it."""
    size = allocation.allocations[job.key]
    allowed = "its limits allow and that " if allocation.most(job) else ""
    no_size = f"no size that {allowed}fits in the cluster has a predicted speed above 0"
    if size != NOTHING:
        allocation.refuse(job, Reason(Constraint.FLOOR, f"keeps {size}: {no_size}"))
    elif allocation.grow(job) is None:
        allocation.refuse(job, Reason(Constraint.SATISFIED, f"has its minimum size: {no_size}"))


def with_checkpoint(
    checkpoint: Checkpoint | None = None,
    *,
    optimism: float | None = None,
    resize_seconds: float | None = None,
    slot_seconds: float | None = None,
) -> Dl2:
    """Learned: enlarges jobs in the order of scores that a checkpoint gives, by default dl2d's own."""
    if checkpoint is None:
        checkpoint = read_checkpoint(DEFAULT_CHECKPOINT, policy=NAME)
    return Dl2(checkpoint, optimism=optimism, resize_seconds=resize_seconds, slot_seconds=slot_seconds)
