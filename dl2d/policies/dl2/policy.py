"""DL2, the default policy: sizes all jobs anew in each slot, by steps in the order of learned scores.

After Peng et al., "DL2: A deep learning-driven scheduler for deep learning clusters" (arXiv:1909.06040): a learned
policy sizes workers and parameter servers in each slot. How it decides is our own (``dl2d.policies.dl2.size_steps``);
``dl2d.policies.dl2_paper`` has the paper's design.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Alternative, Constraint, Decision, Reason
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey
from dl2d.core.packing import Blocked, Packing
from dl2d.core.policy import Evidence
from dl2d.core.resources import Shortfall
from dl2d.policies.common.checkpoint import Checkpoint, checkpoint_in, read_checkpoint, version_of
from dl2d.policies.common.greedy import GreedyAllocation
from dl2d.policies.common.predicted_speeds import can_keep, speeds_in_next_slot
from dl2d.policies.dl2.checkpoint_contents import NAME, Parameters
from dl2d.policies.dl2.greedy_packing import GreedyPacking, HeadOnlyPacking
from dl2d.policies.dl2.pareto_frontier import (
    ParetoFrontier,
    ParetoFrontiers,
    SizeGrid,
    allowed_sizes,
    amounts_of,
    frontier_key,
    pareto_frontiers,
    task_weight,
)
from dl2d.policies.dl2.predictions import Basis, KnownSpeeds, Predictions
from dl2d.policies.dl2.scoring import MIN_WORK_LEFT, ClusterJobs, Floats, Ints, describe_steps, score
from dl2d.policies.dl2.size_steps import choose_sizes
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.remaining_work import samples_left

#: Folder of the checkpoint that comes with dl2d.
DEFAULT_CHECKPOINT: Final = Path(__file__).parent / "default"
#: Most steps of a job that are reported as alternatives.
_MAX_ALTERNATIVES: Final = 3


class Dl2:
    """Chooses the sizes of all jobs by learned scores of size steps, and packs them on the nodes.

    A decision has four stages, as they stand in ``decide``:

    1. Speeds of each job at each size are predicted (``predictions``).
    2. Of the sizes that a job may have, those on its Pareto frontier are kept (``pareto_frontier``).
    3. In the totals of the cluster, jobs are enlarged step by step; the step with the highest score is made next
       (``size_steps``).
    4. The tasks are packed on the nodes (``greedy_packing``). What has no room there is dropped, and stage 3 and 4 are
       done once more for the other jobs.

    Parameters
    ----------
    checkpoint
        What was learned.
    optimism, resize_seconds, slot_seconds
        In place of the checkpoint's: standard deviations that are added to predicted speeds (by default at least half
        of one for kinds of jobs that the checkpoint does not know); what a resize costs, so that a job's size is
        changed only where it pays; the length of an interval.

    Raises
    ------
    CheckpointError
        The checkpoint is of another design, or something in it is missing or has another shape.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        optimism: float | None = None,
        resize_seconds: float | None = None,
        slot_seconds: float | None = None,
    ) -> None:
        own = {"optimism": optimism, "resize_seconds": resize_seconds, "slot_seconds": slot_seconds}
        #: What was learned.
        self.checkpoint = checkpoint
        self._parameters = Parameters.of(checkpoint, own)
        self._known = KnownSpeeds(self._parameters)
        self._version = version_of(checkpoint, own)
        #: Of the last decision: only time depends on it, for what it has is taken over where it would come out alike.
        self._last_model: GaussianProcess | None = None

    @property
    def name(self) -> str:
        """``dl2``."""
        return NAME

    @property
    def version(self) -> str:
        """Of the checkpoint: the beginning of its digest, and settings that were put in place of its own."""
        return self._version

    @property
    def needs(self) -> frozenset[Evidence]:
        """Measured speeds, those of each job too."""
        return frozenset({Evidence.SPEEDS, Evidence.JOB_SPEEDS})

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``. Cost: steps x (jobs + sizes of a job), then tasks x log nodes."""
        del rng
        allocation = GreedyAllocation(snapshot, packing)  # floors are given
        cluster = _Cluster.of(snapshot)
        predictions = Predictions(
            snapshot, self._known, self._parameters, gathers=packing.gathers, before=self._last_model
        )
        self._last_model = predictions.model
        frontiers, of_job = self._frontiers(snapshot, allocation, cluster, predictions)
        sized = [(job, which) for job, which in zip(snapshot.jobs, of_job, strict=True) if which is not None]
        for job, which in zip(snapshot.jobs, of_job, strict=True):
            if which is None:
                _give_least(allocation, job)
        fresh = all(size == NOTHING for size in allocation.held.values())
        packer = (
            HeadOnlyPacking(allocation, packing)
            if packing.head_only and fresh
            else GreedyPacking(allocation, smallest_first=packing.head_only)
        )
        alternatives = {}
        if sized:
            jobs, group = [job for job, _ in sized], np.array([which for _, which in sized])
            alternatives = self._size(allocation, packing, packer, cluster, ParetoFrontiers(frontiers), jobs, group)
        return allocation.decision(
            self.name, self.version, measure="score of the next step", alternatives=alternatives, nodes=packer.nodes
        )

    def _frontiers(
        self, snapshot: Snapshot, allocation: GreedyAllocation, cluster: _Cluster, predictions: Predictions
    ) -> tuple[list[ParetoFrontier], list[int | None]]:
        """Pareto frontiers, one for equal jobs, and which of them each job has; None where no size is possible."""
        numbers: dict[tuple[object, ...], int] = {}
        grids: list[SizeGrid] = []
        of_job = []
        for job, basis in zip(snapshot.jobs, predictions.bases, strict=True):
            floor = allocation.allocations[job.key]
            held = allocation.held[job.key] if self._parameters.resize_seconds else NOTHING
            key = (*frontier_key(basis.request), basis.own, basis.optimism, floor, held)
            number = numbers.setdefault(key, len(numbers))
            if number == len(grids):
                grids.append(self._grid(predictions.speeds(basis), basis, floor, held, cluster))
            of_job.append(number)
        made = pareto_frontiers(grids)
        possible = [number for number, one in enumerate(made) if one is not None]
        places = {number: place for place, number in enumerate(possible)}
        return [one for one in made if one is not None], [places.get(number) for number in of_job]

    def _grid(self, speeds: Floats, basis: Basis, floor: Allocation, held: Allocation, cluster: _Cluster) -> SizeGrid:
        """Speeds and demands of a job at all sizes, where every size but the one that it has costs a resize."""
        request, parameters = basis.request, self._parameters
        speeds = speeds_in_next_slot(speeds, held, parameters.resize_seconds / parameters.slot_seconds)
        return SizeGrid(
            speeds,
            worker=amounts_of(request.worker, cluster.names),
            ps=amounts_of(request.ps, cluster.names),
            capacity=cluster.capacity.tolist(),
            may=allowed_sizes(request),
            start=floor,
            keep=held if can_keep(speeds, held) else None,
        )

    def _size(
        self,
        allocation: GreedyAllocation,
        packing: Packing,
        packer: GreedyPacking | HeadOnlyPacking,
        cluster: _Cluster,
        frontiers: ParetoFrontiers,
        jobs: Sequence[Job],
        group: Ints,
    ) -> dict[JobKey, tuple[Alternative, ...]]:
        """Choose sizes, pack them, and give the room of what could not be packed to others; returns alternatives."""
        weight = cluster.task_weights(jobs)
        samples = np.array([_work_left(job) for job in jobs])
        present = np.ones((1, len(jobs)), dtype=np.bool_)
        waiting = ClusterJobs.of(
            frontiers, group[None], present, samples[None], np.array([self._parameters.slot_seconds])
        )
        start, weights = np.zeros((1, len(jobs)), dtype=np.int64), self._parameters.weights
        states = choose_sizes(frontiers, waiting, start, cluster.left(packing), weights).states
        blocked = packer.give(jobs, frontiers.sizes[group, states[0]], weight)
        if blocked:
            others = present.copy()
            others[0, list(blocked)] = False
            larger = replace(waiting, present=others)
            states = choose_sizes(frontiers, larger, states, cluster.left(packing), weights, only_larger=True).states
            wanted = np.where(others[0][:, None], frontiers.sizes[group, states[0]], 0)
            blocked |= packer.give(jobs, wanted, weight)
        steps, left = _NextSteps.of(frontiers, waiting, states[0], weights), cluster.left(packing)[0]
        for number, job in enumerate(jobs):
            has = allocation.allocations[job.key]
            allocation.refuse(job, _reason(steps, number, has, blocked.get(number), cluster, left))
        return {job.key: steps.alternatives(number) for number, job in enumerate(jobs)}


class _Cluster(NamedTuple):
    """Resources of a cluster as arrays: names, and what there is of each, in thousandths, shape (R,)."""

    names: list[str]
    capacity: Ints

    @classmethod
    def of(cls, snapshot: Snapshot) -> _Cluster:
        """All resources that the cluster has or a job asks for."""
        whole = snapshot.capacity
        names = {name for name, _ in whole.thousandths}
        for request in {id(job.request): job.request for job in snapshot.jobs}.values():
            names |= {name for part in (request.worker, request.ps) for name, _ in part.thousandths}
        order = sorted(names) or ["cpu"]
        return cls(order, np.array(amounts_of(whole, order), dtype=np.int64))

    def left(self, packing: Packing) -> Ints:
        """What nodes that take tasks have free, all together; shape (1, R)."""
        return np.array([amounts_of(packing.left(), self.names)], dtype=np.int64)

    def task_weights(self, jobs: Sequence[Job]) -> Floats:
        """Weight of a worker and of a PS of each job, by which larger tasks are told from smaller; shape (jobs, 2)."""
        parts = [(job.request.worker, job.request.ps) for job in jobs]
        amounts = {part: amounts_of(part, self.names) for both in parts for part in both}
        demand = np.array([[amounts[worker], amounts[ps]] for worker, ps in parts], dtype=np.int64)
        return task_weight(demand, self.capacity)


class _NextSteps(NamedTuple):
    """Steps from the sizes that were chosen, had there been room; jobs x sizes of a frontier."""

    frontiers: ParetoFrontiers
    #: Frontier of each job and its size on it, shape (jobs,).
    group: Ints
    states: Ints
    #: Score of each step, -inf where there is none; and the sizes with the best ones, best first.
    scores: Floats
    best: Ints

    @classmethod
    def of(cls, frontiers: ParetoFrontiers, jobs: ClusterJobs, states: Ints, weights: Floats) -> _NextSteps:
        """Score the steps of all jobs."""
        rows, numbers = np.nonzero(jobs.present)
        group = jobs.frontier[0]
        scores = score(weights, describe_steps(frontiers, jobs, rows, numbers, states))
        scores = np.where(frontiers.exists[group, states], scores, -np.inf)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :_MAX_ALTERNATIVES]
        return cls(frontiers, group, states, scores, best)

    def alternatives(self, number: int) -> tuple[Alternative, ...]:
        """Best steps of a job, whether there is room for them or not."""
        scores = self.scores[number]
        there = [to for to in self.best[number].tolist() if np.isfinite(scores[to])]
        return tuple(Alternative(self._size(number, to), float(scores[to])) for to in there)

    def _size(self, number: int, to: int) -> Allocation:
        return Allocation(*self.frontiers.sizes[self.group[number], to].tolist())

    def first(self, number: int) -> tuple[Allocation, float, Ints]:
        """Best step of a job: its size, by which part it is faster, and what more it takes, shape (R,)."""
        group, now, to = self.group[number], self.states[number], int(self.best[number, 0])
        rates, need = self.frontiers.log_rate[group], self.frontiers.need[group]
        return self._size(number, to), float(np.expm1(rates[to] - rates[now])), need[to] - need[now]


def _reason(
    steps: _NextSteps, number: int, has: Allocation, blocked: Blocked | None, cluster: _Cluster, left: Ints
) -> Reason:
    """Why a job gets no more; ``left`` is what the cluster has free, shape (R,)."""
    if blocked is not None:
        return Reason(blocked.constraint, f"was to have more than {has}: {blocked}", blocked.shortfalls)
    if not np.isfinite(steps.scores[number]).any():
        return Reason(Constraint.SATISFIED, f"no larger size is predicted to be 1 % faster than {has}")
    larger, faster, step = steps.first(number)
    short = tuple(
        Shortfall(name, wanted / 1000, max(had, 0) / 1000)
        for name, wanted, had in zip(cluster.names, step.tolist(), left.tolist(), strict=True)
        if wanted > had
    )
    gain = f"{larger} would be {faster:.0%} faster than {has}" if has != NOTHING else f"waits to start at {larger}"
    if not short:
        return Reason(Constraint.QUEUE, f"{gain}; the room went to jobs with higher scores")
    missing = "; ".join(map(str, short))
    return Reason(Constraint.CAPACITY, f"{gain}; the cluster has too little left ({missing})", short)


def _give_least(allocation: GreedyAllocation, job: Job) -> None:
    """Give a job for which no size is possible what it needs to start, if there is room."""
    has = allocation.allocations[job.key]
    if has != NOTHING:
        allocation.refuse(job, Reason(Constraint.FLOOR, f"keeps {has}; no larger size is known"))
    elif allocation.grow(job) is None:
        allocation.refuse(job, Reason(Constraint.SATISFIED, "no size is known to be faster than its least"))


def _work_left(job: Job) -> float:
    """Samples that are left, but at least a part of the declared ones."""
    declared = samples_left(job, job.progress.epoch + job.request.epochs)
    return max(samples_left(job), MIN_WORK_LEFT * declared, 1e-9)


def from_checkpoint(folder: str | os.PathLike[str]) -> Dl2:
    """The policy that a checkpoint holds; a folder of ``dl2d train`` will do. Raises ``CheckpointError``."""
    return Dl2(read_checkpoint(checkpoint_in(folder), policy=NAME))


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
