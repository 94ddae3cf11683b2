"""DL2: the policy that learns. Which job grows next, and to which size, is decided by weights that were trained.

After Peng et al., "DL2: A deep learning-driven scheduler for deep learning clusters" (arXiv:1909.06040): a learned
policy sizes workers and parameter servers in each slot. How it decides is our own: ``dl2d.policies.dl2.size_steps``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Alternative, Constraint, Decision, Reason
from dl2d.core.errors import CheckpointError
from dl2d.core.jobs import NOTHING, Allocation, Architecture, Consistency, Job, JobKey, JobRequest, Role
from dl2d.core.measured import MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.core.packing import Blocked, Packing
from dl2d.core.policy import Evidence
from dl2d.core.resources import Shortfall
from dl2d.policies.common.checkpoint import Checkpoint, checkpoint_in, read_checkpoint, version_of
from dl2d.policies.common.greedy import Filling, next_bundle
from dl2d.policies.common.predicted_speeds import in_next_slot, stays
from dl2d.policies.dl2.exploration import BOLDER, scouts
from dl2d.policies.dl2.greedy_packing import Heads
from dl2d.policies.dl2.locality import Layouts, largest, least_seconds
from dl2d.policies.dl2.pareto_frontier import Grid, Surface, Surfaces, alike, amounts_of, sizes_of, surfaces, weight_of
from dl2d.policies.dl2.size_steps import (
    FEATURES,
    LEAST_LEFT,
    Crowd,
    Floats,
    Ints,
    choose,
    look,
    score,
    weight_count,
)
from dl2d.throughput.gaussian_process import OPTIMISM, GaussianProcess
from dl2d.throughput.observations import (
    Points,
    by_kind,
    calibration,
    informative,
    merged_kinds,
    scaled,
    speeds_at,
    without_drift,
)
from dl2d.throughput.relabelling import Labels, Shown
from dl2d.throughput.remaining_work import samples_left

_NAME: Final = "dl2"
#: Folder of the checkpoint that comes with dl2d.
SHIPPED: Final = Path(__file__).parent / "default"
#: Jumps that are told of a job.
_ALTERNATIVES: Final = 3


class Dl2:
    """Sizes jobs by jumps, scored by learned weights.

    Speeds are believed from what was measured: when the checkpoint was trained, and on this cluster, which counts where
    both measured one size; a kind that is faster or slower here altogether has all its speeds from there put right
    (``dl2d.throughput.observations``). All sizes are chosen in the totals of the cluster; then the tasks are packed,
    in an order that leaves little unused, and what has no room is left off and what is free given to others. Where the
    placement lays a job on as few nodes as hold it, its speeds are those there (``dl2d.policies.dl2.locality``).

    Parameters
    ----------
    checkpoint
        What was learned.
    optimism, resize_seconds, slot_seconds
        In place of the checkpoint's: by how many standard deviations speeds are hoped to be above what is believed (by
        default half of one at least for kinds of jobs that the checkpoint does not know);
        what a resize costs, so that a job's size is changed only where it pays; the length of an interval.

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
        #: What was learned.
        self.checkpoint = checkpoint
        settings = {
            **checkpoint.settings,
            **{
                name: value
                for name, value in (
                    ("optimism", optimism), ("resize_seconds", resize_seconds), ("slot_seconds", slot_seconds)
                )
                if value is not None
            },
        }  # fmt: skip
        try:
            self._hidden = int(settings["hidden"])
            self._slot_seconds = float(settings["slot_seconds"])
            self._optimism = float(settings["optimism"])
            self._resize_seconds = float(settings["resize_seconds"])
            self._weights: Floats = np.asarray(checkpoint.weights["scorer"], dtype=np.float64)[None]
            known = from_arrays(checkpoint.weights, settings["kinds"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"checkpoint of {_NAME}: lacks, or has no fit, {error}") from error
        unlike = settings.get("features", list(FEATURES)) != list(FEATURES)
        if settings.get("design") != "jumps" or unlike or self._weights.shape != (1, weight_count(self._hidden)):
            raise CheckpointError(
                f"checkpoint of {_NAME}: design {settings.get('design')!r} with weights of shape "
                f"{self._weights.shape[1:]}{' for other features' if unlike else ''}; this dl2d has 'jumps' with "
                f"{weight_count(self._hidden)}: train it again (dl2d train)"
            )
        if not self._slot_seconds > 0 or self._resize_seconds < 0 or not np.isfinite(self._optimism):
            raise CheckpointError(f"checkpoint of {_NAME}: slot_seconds must be over 0, resize_seconds 0 or more")
        #: Where nothing was asked for, kinds that the checkpoint does not know are explored.
        self._explored = self._optimism if optimism is not None else max(self._optimism, OPTIMISM)
        own = {"optimism": optimism, "resize_seconds": resize_seconds, "slot_seconds": slot_seconds}
        self._version = version_of(checkpoint, own)
        self._least_seconds = {speeds.kind: least_seconds(speeds.points) for speeds in known}
        self._known = by_kind(known)

    @property
    def name(self) -> str:
        """``dl2``."""
        return _NAME

    @property
    def version(self) -> str:
        """Of the checkpoint: the beginning of its digest, and settings that were put in place of its own."""
        return self._version

    @property
    def needs(self) -> frozenset[Evidence]:
        """Measured speeds, those of each job too."""
        return frozenset({Evidence.SPEEDS, Evidence.JOB_SPEEDS})

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``. Cost: jumps x (jobs + sizes of a job), then tasks x log nodes."""
        del rng
        layouts = Layouts(snapshot, self._least_seconds, self._expected) if packing.gathers else None
        if layouts is not None:
            snapshot = layouts.apart()
        filling = Filling(snapshot, packing)
        deciding = _Deciding(snapshot, filling, packing, layouts)
        groups, of_job = self._group(deciding)
        for place, group in enumerate(of_job):
            if group < 0:
                deciding.minimum_only(place)
        alternatives = {}
        if groups:
            alternatives = self._fill(deciding, Surfaces(groups), np.array(of_job, dtype=np.int64))
        return filling.decision(
            self.name,
            self.version,
            measure="score of the next jump",
            alternatives=alternatives,
            nodes=deciding.nodes,
        )

    def _group(self, deciding: _Deciding) -> tuple[list[Surface], list[int]]:
        """Surfaces, and which of them each job has, alike jobs the same; -1 for a job that no size is known for."""
        belief = GaussianProcess(self._observations(deciding.snapshot))
        labels = Labels(deciding.snapshot, belief)
        every = [labels.of(job) for job in deciding.snapshot.jobs]
        first = scouts(deciding.snapshot, labels) if self._explored > 0 else frozenset()
        hoped = [
            self._hoped(shown.request) * (BOLDER if job.key in first else 1.0)
            for job, shown in zip(deciding.snapshot.jobs, every, strict=True)
        ]
        whole = (*deciding.names, *deciding.capacity.tolist())
        # Keys are long: they are hashed as seldom as can be.
        numbers: dict[tuple[object, ...], int] = {}
        firsts: list[tuple[Shown, Allocation, Allocation, float]] = []
        of_key = []
        for place, (job, shown, optimism) in enumerate(zip(deciding.snapshot.jobs, every, hoped, strict=True)):
            held = deciding.held[job.key] if self._resize_seconds else NOTHING
            key = (*alike(shown.request), shown.own, deciding.floors[place], held, optimism, whole)
            if deciding.layouts is not None:
                key += deciding.layouts.key(shown.request)
            number = numbers.setdefault(key, len(numbers))
            of_key.append(number)
            if number == len(firsts):
                firsts.append((shown, deciding.floors[place], held, optimism))
        found = surfaces([self._grid(belief, deciding, *first) for first in firsts])
        groups: dict[Surface, int] = {}
        of_job = []
        for number in of_key:
            one = found[number]
            of_job.append(-1 if one is None else groups.setdefault(one, len(groups)))
        return list(groups), of_job

    def _hoped(self, request: JobRequest) -> float:
        """Deviations that are hoped for where nobody is bolder."""
        return self._optimism if TrainingKind.of(request) in self._known else self._explored

    def _grid(
        self,
        belief: GaussianProcess,
        deciding: _Deciding,
        shown: Shown,
        floor: Allocation,
        held: Allocation,
        optimism: float,
    ) -> Grid:
        """What a job's surface is made of."""
        request = shown.request
        rates = belief.speeds(request, optimism, shown.own)
        if deciding.layouts is not None:
            rates = deciding.layouts.together(request, rates)
        rates = in_next_slot(rates, held, self._resize_seconds / self._slot_seconds)
        return Grid(
            rates,
            worker=amounts_of(request.worker, deciding.names),
            ps=amounts_of(request.ps, deciding.names),
            capacity=deciding.capacity.tolist(),
            may=sizes_of(request),
            start=floor,
            keep=held if stays(rates, held) else None,
        )

    def _fill(self, deciding: _Deciding, surfaces: Surfaces, of_job: Ints) -> dict[JobKey, tuple[Alternative, ...]]:
        (places,) = np.nonzero(of_job >= 0)
        jobs = [deciding.snapshot.jobs[place] for place in places.tolist()]
        group = of_job[places]
        samples = np.array([_work_left(job) for job in jobs])
        present = np.ones((1, len(jobs)), dtype=np.bool_)
        crowd = Crowd.of(surfaces, group[None], present, samples[None], np.array([self._slot_seconds]))
        nothing = np.zeros((1, len(jobs)), dtype=np.int64)
        first = choose(surfaces, crowd, nothing, deciding.left(), self._weights)
        blocked = deciding.give(jobs, surfaces.sizes[group, first.states[0]])
        states = first.states
        if blocked:
            # What had no room on a node is given to others.
            still = present.copy()
            still[0, list(blocked)] = False
            rest = replace(crowd, present=still)
            states = choose(surfaces, rest, states, deciding.left(), self._weights, growing=True).states
            wanted = surfaces.sizes[group, states[0]]
            blocked |= deciding.give(jobs, np.where(still[0][:, None], wanted, 0))
        return self._explain(deciding, surfaces, crowd, jobs, states, blocked, deciding.left()[0])

    def _explain(
        self,
        deciding: _Deciding,
        surfaces: Surfaces,
        crowd: Crowd,
        jobs: Sequence[Job],
        states: Ints,
        blocked: Mapping[int, Blocked],
        left: Ints,
    ) -> dict[JobKey, tuple[Alternative, ...]]:
        """Keep the reason of each job; returns its best jumps, room or not."""
        rows, numbers = np.nonzero(crowd.present)
        jumps = look(surfaces, crowd, rows, numbers, states[0])
        group = crowd.surface[0]
        there = surfaces.there[group, states[0]]
        scores = np.where(there, score(self._weights, jumps), -np.inf)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :_ALTERNATIVES]
        alternatives = {}
        for number, job in enumerate(jobs):
            options = [
                Alternative(Allocation(*surfaces.sizes[group[number], to].tolist()), float(scores[number, to]))
                for to in best[number].tolist()
                if there[number, to]
            ]
            alternatives[job.key] = tuple(options)
            has = deciding.filling.allocations[job.key]
            if number in blocked:
                what = blocked[number]
                reason = Reason(what.constraint, f"was to have more than {has}: {what}", what.shortfalls)
            elif not options:
                reason = Reason(Constraint.SATISFIED, f"no larger size is believed to be 1 % faster than {has}")
            else:
                to = int(best[number, 0])
                faster = (
                    float(
                        np.expm1(
                            surfaces.log_rate[group[number], to] - surfaces.log_rate[group[number], states[0, number]]
                        )
                    )
                    if has != NOTHING
                    else 0.0
                )
                step = surfaces.need[group[number], to] - surfaces.need[group[number], states[0, number]]
                reason = deciding.no_room(options[0].allocation, has, faster, step, left)
            deciding.filling.refuse(job, reason)
        return alternatives

    def _expected(self, request: JobRequest) -> Floats:
        """Samples/s of a job as predicted from the checkpoint's measurements alone."""
        return self._checkpoint_model.speeds(request)

    @cached_property
    def _checkpoint_model(self) -> GaussianProcess:
        return GaussianProcess(self._known)

    def _observations(self, snapshot: Snapshot) -> dict[TrainingKind, Points]:
        """The checkpoint's measurements, calibrated for this cluster, and informative ones that were made on it."""
        requests = largest(snapshot)
        in_group = {kind[1:]: request for kind, request in requests.items()}
        known = dict(self._known)
        measured = {kind: without_drift(points) for kind, points in by_kind(snapshot.speeds).items()}
        for kind in known.keys() & measured.keys():
            # A kind that has no job now is asked about within the bounds of another.
            request = requests.get(kind) or in_group.get(kind[1:])
            if request is None:
                continue
            expected = speeds_at(self._expected(replace(request, model=kind.model)), measured[kind])
            factor = calibration(measured[kind], expected, known[kind])
            known[kind] = scaled(known[kind], factor)
            if kind in requests or factor != 1.0:
                measured[kind] = informative(measured[kind], factor * expected)
        return merged_kinds(known, measured)


class _Deciding:
    """The cluster in one decision: amounts as arrays, and tasks being given."""

    def __init__(self, snapshot: Snapshot, filling: Filling, packing: Packing, layouts: Layouts | None) -> None:
        self.snapshot = snapshot
        #: What jobs gain by lying on few nodes, where the placement lays them so.
        self.layouts = layouts
        self.filling = filling
        self._packing = packing
        self.held = filling.held
        afresh = all(size == NOTHING for size in self.held.values())
        self._sign = 1.0 if packing.head_only else -1.0
        self._heads = Heads(filling, packing) if packing.head_only and afresh else None
        #: What each job cannot fall below, and has already.
        self.floors = [filling.allocations[job.key] for job in snapshot.jobs]
        whole = snapshot.capacity
        named = {name for name, _ in whole.thousandths}
        for request in {id(job.request): job.request for job in snapshot.jobs}.values():
            named |= {name for part in (request.worker, request.ps) for name, _ in part.thousandths}
        self.names = sorted(named) or ["cpu"]
        self.capacity: Ints = np.array(amounts_of(whole, self.names), dtype=np.int64)

    @property
    def nodes(self) -> Sequence[tuple[JobKey, Role, str]]:
        """Where tasks are to go, where that is not left to the placement."""
        return () if self._heads is None else self._heads.nodes

    def left(self) -> Ints:
        """What nodes that take tasks have free, all together; shape (1, R)."""
        return np.array([amounts_of(self._packing.left(), self.names)], dtype=np.int64)

    def minimum_only(self, place: int) -> None:
        """A job of which nothing is known gets what it needs to start, if there is room."""
        job = self.snapshot.jobs[place]
        if self.floors[place] != NOTHING:
            self.filling.refuse(job, Reason(Constraint.FLOOR, f"keeps {self.floors[place]}; no larger size is known"))
        elif self.filling.grow(job) is None:
            self.filling.refuse(job, Reason(Constraint.SATISFIED, "no size is known to be faster than its least"))

    def give(self, jobs: Sequence[Job], sizes: Ints) -> dict[int, Blocked]:
        """Add tasks up to these sizes, shape (jobs, 2), and return what stopped which job.

        What stays comes first, where it is: what is new then finds nodes as they will be. Of that least sizes come
        first, the largest of them first. The rest goes on so, except where tasks go to the least used node or nowhere:
        there small tasks even the nodes out, and one that is full too early would block all. On a cluster that is empty
        it is then small tasks first altogether, and nodes are named: placing goes job by job.
        """
        parts = [(job.request.worker, job.request.ps) for job in jobs]
        amounts = {part: amounts_of(part, self.names) for part in {*chain(*parts)}}
        demand = np.array([[amounts[worker], amounts[ps]] for worker, ps in parts], dtype=np.int64)
        weight = weight_of(demand, self.capacity)
        if self._heads is not None:
            return self._heads.give(jobs, sizes, weight)
        filling, blocked = self.filling, dict[int, Blocked]()
        weights, wanted = weight.tolist(), sizes.tolist()
        self._keep(jobs, wanted)
        starts: list[tuple[float, int, Allocation]] = []
        for number, job in enumerate(jobs):
            if filling.allocations[job.key] == NOTHING and any(wanted[number]):
                step = filling.next_bundle(job)
                assert step is not None, "a job that has nothing can have its minimum"
                starts.append((-(weights[number][0] * step.workers + weights[number][1] * step.ps), number, step))
        for _, number, step in sorted(starts):
            stopped = filling.add(jobs[number], step)
            if stopped is not None:
                blocked[number] = stopped
        for turn in np.argsort(self._sign * weight.T.reshape(-1), kind="stable").tolist():
            worker, number = turn < len(jobs), turn % len(jobs)
            if number in blocked and filling.allocations[jobs[number].key] == NOTHING:
                continue
            stopped = self._add(jobs[number], Role.WORKER if worker else Role.PS, wanted[number][int(not worker)])
            if stopped is not None:
                blocked.setdefault(number, stopped)
        return blocked

    def _keep(self, jobs: Sequence[Job], wanted: Sequence[Sequence[int]]) -> None:
        """Give jobs what they have already of these sizes, workers and PSs, where that is a size that they may have."""
        kept = []
        for job, size in zip(jobs, wanted, strict=True):
            workers, ps = map(min, self.held[job.key], size)
            has = self.filling.allocations[job.key]
            if has == NOTHING:
                least = next_bundle(job, NOTHING)
                if least is None or least.workers > workers or least.ps > ps:
                    continue
            more = Allocation(max(workers - has.workers, 0), max(ps - has.ps, 0))
            if more != NOTHING:
                kept.append((job, more))
        self.filling.keep(kept)

    def _add(self, job: Job, role: Role, most: int) -> Blocked | None:
        """Give tasks of one role up to a count: all, or one after the other for as long as there is room."""
        now = self.filling.allocations[job.key].count(role)
        if most <= now:
            return None
        stopped = self._step(job, role, most - now)
        if stopped is None:
            return None
        for count in range(now + 1, most):
            if role is Role.PS or job.request.allows(count):
                blocked = self._step(job, role, count - now)
                if blocked is not None:
                    return blocked
                now = count
        return stopped

    def _step(self, job: Job, role: Role, count: int) -> Blocked | None:
        return self.filling.add(job, Allocation(count, 0) if role is Role.WORKER else Allocation(0, count))

    def no_room(self, larger: Allocation, has: Allocation, faster: float, step: Ints, left: Ints) -> Reason:
        """Why the next jump was not made."""
        short = tuple(
            Shortfall(name, wanted / 1000, max(had, 0) / 1000)
            for name, wanted, had in zip(self.names, step.tolist(), left.tolist(), strict=True)
            if wanted > had
        )
        gain = f"{larger} would be {faster:.0%} faster than {has}" if has != NOTHING else f"waits to start at {larger}"
        if not short:
            return Reason(Constraint.QUEUE, f"{gain}; the room went to jumps that are worth more")
        missing = "; ".join(map(str, short))
        return Reason(Constraint.CAPACITY, f"{gain}; the cluster has too little left ({missing})", short)


def _work_left(job: Job) -> float:
    """Samples."""
    declared = samples_left(job, job.progress.epoch + job.request.epochs)
    return max(samples_left(job), LEAST_LEFT * declared, 1e-9)


def as_arrays(measured: Sequence[MeasuredSpeeds]) -> tuple[dict[str, NDArray[Any]], list[list[str]]]:
    """Measurements for a checkpoint: rows of kind, workers, PSs, how many, shape (n, 4); means, shape (n,); kinds."""
    rows = [
        (number, *point.allocation, point.measurements)
        for number, speeds in enumerate(measured)
        for point in speeds.points
    ]
    means = [point.samples_per_second for speeds in measured for point in speeds.points]
    kinds = [[speeds.kind.model, str(speeds.kind.architecture), str(speeds.kind.consistency)] for speeds in measured]
    arrays: dict[str, NDArray[Any]] = {
        "measured_sizes": np.array(rows, dtype=np.int64).reshape(-1, 4),
        "measured_speeds": np.array(means, dtype=np.float64),
    }
    return arrays, kinds


def from_arrays(arrays: Mapping[str, NDArray[Any]], kinds: Sequence[Sequence[str]]) -> tuple[MeasuredSpeeds, ...]:
    """Inverse of ``as_arrays``; a ``KeyError``, ``ValueError`` or ``IndexError`` where they are not such arrays."""
    points: list[list[SpeedPoint]] = [[] for _ in kinds]
    rows, means = arrays["measured_sizes"].tolist(), arrays["measured_speeds"].tolist()
    for (kind, workers, ps, times), mean in zip(rows, means, strict=True):
        points[kind].append(SpeedPoint(Allocation(workers, ps), mean, times))
    return tuple(
        MeasuredSpeeds(TrainingKind(model, Architecture(architecture), Consistency(consistency)), tuple(own))
        for (model, architecture, consistency), own in zip(kinds, points, strict=True)
    )


def from_checkpoint(folder: str | os.PathLike[str]) -> Dl2:
    """The policy that a checkpoint holds; a folder of ``dl2d train`` will do. Raises ``CheckpointError``."""
    return Dl2(read_checkpoint(checkpoint_in(folder), policy=_NAME))


def shipped(
    checkpoint: Checkpoint | None = None,
    *,
    optimism: float | None = None,
    resize_seconds: float | None = None,
    slot_seconds: float | None = None,
) -> Dl2:
    """Learned: jobs jump to larger sizes in the order of scores that a checkpoint gives, by default dl2d's own."""
    if checkpoint is None:
        checkpoint = read_checkpoint(SHIPPED, policy=_NAME)
    return Dl2(checkpoint, optimism=optimism, resize_seconds=resize_seconds, slot_seconds=slot_seconds)
