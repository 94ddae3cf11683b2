"""Common part of policies that enlarge jobs by marginal gain: minimum sizes, speeds, and sampling of unknown kinds.

Optimus and lookahead continue from there: they choose the job that is enlarged next, and the tasks that it gets.

Sampling: jobs of an unknown kind run at a few sizes for a while, so that a speed function can be fitted to them (Peng
et al., "Optimus", EuroSys 2018, section 3.2). Here they train meanwhile. The sizes are spread over workers and PSs; the
authors' code uses equal numbers of both, so that the coefficient of w/p cannot be fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dl2d.core.array_types import Floats
from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Constraint, Reason
from dl2d.core.jobs import NOTHING, TASK_ROLES, Allocation, Architecture, Job, JobRequest, Role
from dl2d.core.measured_speeds_and_losses import KnownSpeeds, SpeedPoint, TrainingKind
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.packing.room_in_limits import Blocked
from dl2d.core.resources import Resources
from dl2d.policies.common.greedy_allocation import GreedyAllocation
from dl2d.throughput.optimus_speed_model import SpeedFit, adds_information, fit_speed, number_of_terms, terms_at, usable

#: Maximum number of counts of one role that are considered for sampling.
_MAX_COUNTS = 32


class Sampling:
    """Sizes of one kind: those that were measured, and those that are being sampled.

    They are enough for a fit if at least ``min_sizes`` distinct sizes are among them, and the terms of the kind's
    function are linearly independent at them.
    """

    def __init__(self, kind: TrainingKind, measured: Iterable[Allocation], min_sizes: int) -> None:
        self._kind = kind
        self._min_sizes = min_sizes
        self._sizes = list(dict.fromkeys(measured))
        # Result of ``enough``, and the number of sizes that it is for.
        self._enough, self._enough_for = False, -1

    @property
    def sizes(self) -> int:
        """Number of sizes."""
        return len(self._sizes)

    def enough(self) -> bool:
        """Whether these sizes are enough for a fit."""
        if self._enough_for != len(self._sizes):
            self._enough_for, self._enough = len(self._sizes), self._determine_terms()
        return self._enough

    def informative(self, candidates: Sequence[Allocation]) -> list[Allocation]:
        """Candidates that a fit needs: new ones; once there are ``min_sizes``, those that determine another term."""
        known = set(self._sizes)
        new = [size for size in candidates if size not in known]
        if len(self._sizes) < self._min_sizes or not new:
            return new
        informative = adds_information(self._kind, self._sizes, new)
        return [size for size, adds in zip(new, informative.tolist(), strict=True) if adds]

    def farthest(self, candidates: Sequence[Allocation]) -> Allocation:
        """Candidate with the largest distance to the nearest size; of equals the one with fewest tasks, then workers.

        Distances are Euclidean, of (log2 workers, log2 PSs). If there is no size yet, it is the smallest candidate.
        """
        order = sorted(candidates, key=lambda size: (size.tasks, size.workers))
        if not self._sizes:
            return order[0]
        differences = _logarithms(order)[:, None, :] - _logarithms(self._sizes)[None, :, :]
        squared_distances = (differences**2).sum(axis=2).min(axis=1)
        return order[int(np.round(squared_distances, 9).argmax())]

    def take(self, size: Allocation) -> None:
        """Add a size that is being sampled."""
        self._sizes.append(size)

    def _determine_terms(self) -> bool:
        terms = number_of_terms(self._kind)
        if len(self._sizes) < max(self._min_sizes, terms):
            return False
        rows = terms_at(self._kind, self._sizes)
        largest = np.abs(rows).max(axis=0)
        # Terms are scaled to a maximum of 1, since they differ by orders of magnitude.
        return bool(largest.all()) and int(np.linalg.matrix_rank(rows / largest, tol=1e-6)) == terms


def candidates(request: JobRequest) -> list[Allocation]:
    """Sizes at which a job may be sampled; of many counts of a role, some that are in geometric progression."""
    workers = [count for count in range(request.min_workers, request.max_workers + 1) if request.allows(count)]
    if request.architecture is Architecture.ALLREDUCE:
        return [Allocation(count, request.min_ps) for count in _thinned(workers)]
    counts = _thinned(list(range(max(request.min_ps, 1), request.max_ps + 1)))
    return [Allocation(count, ps) for count in _thinned(workers) for ps in counts]


def _thinned(counts: list[int]) -> list[int]:
    if len(counts) <= _MAX_COUNTS:
        return counts
    spread = np.geomspace(counts[0], counts[-1], _MAX_COUNTS)
    indices = np.searchsorted(counts, spread - 1e-9).clip(max=len(counts) - 1)
    return [counts[index] for index in dict.fromkeys(indices.tolist())]


def _logarithms(sizes: Sequence[Allocation]) -> Floats:
    return np.log2(np.maximum(np.array(sizes, dtype=np.float64), 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class JobGroup:
    """Jobs with equal speeds, bounds and demands, for which policies compute once."""

    #: One of the jobs.
    job: Job
    #: Seconds per sample, ``seconds[ps, workers]``, infinite where nothing is trained; (max_ps + 1, max_workers + 1).
    seconds: Floats
    #: Capacity of the whole cluster.
    capacity: Resources

    def seconds_at(self, size: Allocation) -> float:
        """Seconds per sample at a size."""
        return float(self.seconds[size.ps, size.workers])

    def speed(self, size: Allocation) -> str:
        """Speed at a size, as text for reasons."""
        return f"{1 / self.seconds_at(size):.4g} samples/s"

    def share(self, step: Allocation) -> float:
        """Dominant share of the cluster that tasks take; infinite where the cluster lacks one of their resources."""
        return self.job.request.demand_of(step).dominant_share(self.capacity)[0]


@dataclass(slots=True)
class _KindSpeeds:
    """Measured speeds of a kind in this snapshot, and sizes that are sampled."""

    kind: TrainingKind
    points: tuple[SpeedPoint, ...]
    #: Function fitted to the points; None where they are too few.
    fit: SpeedFit | None
    sampling: Sampling
    #: Sizes to sample next, by the number of sizes in ``sampling`` and the bounds of a job.
    sizes_to_sample: dict[tuple[object, ...], list[Allocation]] = field(default_factory=dict)

    def grid(self, request: JobRequest) -> Floats:
        """Samples per second at each size: as measured, otherwise as fitted; shape (max_ps + 1, max_workers + 1)."""
        shape = (request.max_ps + 1, request.max_workers + 1)
        speeds = np.zeros(shape) if self.fit is None else self.fit.grid(request.max_workers, request.max_ps)
        for (workers, ps), speed, *_ in self.points:
            if ps < shape[0] and workers < shape[1]:
                speeds[ps, workers] = speed
        return speeds

    def to_sample(self, request: JobRequest) -> list[Allocation]:
        """Sizes within a job's bounds that are to be sampled; empty where a function can be fitted already."""
        if self.sampling.enough():
            return []
        key = (self.sampling.sizes, request.bounds)
        if key not in self.sizes_to_sample:
            self.sizes_to_sample[key] = self.sampling.informative(candidates(request))
        return self.sizes_to_sample[key]


class GrowingJobs:
    """Jobs of a snapshot while they are enlarged, each addressed by its index there.

    On creation each gets its floor, then its minimum in submit order; then jobs of kinds with unknown speeds are
    enlarged to sizes at which they are sampled.

    Parameters
    ----------
    known
        Speeds of all jobs; None to fit them to the measurements in the snapshot.
    sample_sizes
        Least number of distinct sizes at which a kind is measured before its fit is used; never fewer than a fit needs.
    end_at_first_failure
        Whether nothing is added any more after the first job for whose minimum nodes have no room.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        packing: Packing,
        *,
        known: KnownSpeeds | None,
        sample_sizes: int = 0,
        end_at_first_failure: bool = False,
    ) -> None:
        self.jobs = snapshot.jobs
        self.allocation = GreedyAllocation(snapshot, packing)
        #: Reason why nothing may be added to any job any more; None as long as tasks may be added.
        self.ended: Reason | None = None
        self._end_at_first_failure = end_at_first_failure
        self._known = known
        self._capacity = snapshot.capacity
        self._held = [self.allocation.held[job.key] for job in self.jobs]
        #: By role, demand and the nodes that jobs may use: why none of these had room for one more such task.
        self._full: dict[tuple[Role, Resources, frozenset[str] | None], Blocked] = {}
        self._start()
        #: Size of each job now.
        self.sizes = [self.allocation.allocations[job.key] for job in self.jobs]
        self._kinds = {} if known is not None else _kinds(snapshot, sample_sizes)
        self._groups: dict[tuple[object, ...], JobGroup] = {}
        #: Arrays of known speeds, kept alive since their ids are in the keys of groups.
        self._known_grids: list[Floats] = []
        #: Group of each job; None for one that did not start or whose speeds are unknown.
        self.groups = [self._group(job) if job.key not in self.allocation.reasons else None for job in self.jobs]
        self._sample()

    def add(self, index: int, step: Allocation) -> Blocked | None:
        """Give a job more tasks, all or none; returns why there is no room for them, None if it got them.

        Once no node has room for one more task of a demand, none will have it later in this decision, so the packing is
        not tried again for that demand by jobs that may use the same nodes.
        """
        job = self.jobs[index]
        blocked = (self._full and self.known_full(index, step)) or self.allocation.add(job, step)
        if not blocked:
            self.sizes[index] = self.sizes[index].plus(step)
            return None
        if step.tasks == 1 and blocked.constraint is not Constraint.LIMIT:
            self._full[self._full_key(job, blocked.role)] = blocked
        return blocked

    def known_full(self, index: int, step: Allocation) -> Blocked | None:
        """Why nodes had no room for such tasks before in this decision; None if that is not known.

        Tasks that run already may stay even on a node that accepts no new ones, so the packing is always tried for
        them.
        """
        for role in TASK_ROLES:
            if step.count(role) and self._held[index].count(role) <= self.sizes[index].count(role):
                blocked = self._full.get(self._full_key(self.jobs[index], role))
                if blocked is not None:
                    return blocked
        return None

    def _full_key(self, job: Job, role: Role) -> tuple[Role, Resources, frozenset[str] | None]:
        return role, job.request.demand(role), self.allocation.may_use.get(job.key)

    def _start(self) -> None:
        """Give every job its minimum, in submit order."""
        refused: dict[tuple[object, ...], Reason] = {}
        for job, held in zip(self.jobs, self._held, strict=True):
            if self.allocation.allocations[job.key] != NOTHING:
                continue
            if self.ended is not None:
                self.allocation.refuse(job, self.ended)
                continue
            step = self.allocation.next_bundle(job)
            assert step is not None, "a job without tasks has a next bundle: its minimum"
            # Room only decreases: if it was too little for one job, it is for the next with the same demands.
            key = (job.request.worker, job.request.ps, step, self.allocation.room_key(job))
            if held == NOTHING and key in refused:
                self.allocation.refuse(job, refused[key])
            elif (stopped := self.allocation.grow(job)) is not None:
                refused[key] = stopped
                if self._end_at_first_failure and stopped.constraint is not Constraint.LIMIT:
                    self.ended = ended_at(job)

    def _group(self, job: Job) -> JobGroup | None:
        request = job.request
        if self._known is not None:
            grid = self._known.grid(job)
            key: tuple[object, ...] = (id(grid), request.bounds, request.worker, request.ps)
            if key not in self._groups:
                self._known_grids.append(grid)
                self._groups[key] = self._new_group(job, grid)
            return self._groups[key]
        kind = self._kinds[TrainingKind.of(request)]
        if kind.to_sample(request):
            return None
        key = (kind.kind, request.bounds, request.worker, request.ps)
        if key not in self._groups:
            self._groups[key] = self._new_group(job, kind.grid(request))
        return self._groups[key]

    def _new_group(self, job: Job, grid: Floats) -> JobGroup:
        # Grids of all-reduce jobs have one row, even if the bounds of the job include PSs.
        speeds = np.broadcast_to(grid, (job.request.max_ps + 1, job.request.max_workers + 1))
        return JobGroup(job, seconds_per_sample(speeds), self._capacity)

    def _sample(self) -> None:
        """Enlarge jobs of unknown kinds to sizes that are to be measured; the other jobs of these kinds keep theirs.

        A job that runs at a size which is to be measured stays there until it is.
        """
        unknown = [
            index
            for index, job in enumerate(self.jobs)
            if self.groups[index] is None and job.key not in self.allocation.reasons
        ]
        for index in unknown:
            held = self._held[index]
            if held in self._kind(index).to_sample(self.jobs[index].request):
                self._sample_at(index, held)
        crowded: set[tuple[object, ...]] = set()
        for index in unknown:
            job = self.jobs[index]
            if job.key not in self.allocation.reasons and not self._sample_somewhere(index, crowded):
                kind = self._kind(index)
                text = f"keeps its size, because {_measured(kind)}, too few to predict the speed at others"
                self.allocation.refuse(job, Reason(Constraint.QUEUE, text))

    def _sample_somewhere(self, index: int, crowded: set[tuple[object, ...]]) -> bool:
        """Enlarge a job to the farthest size for which there is room; returns whether there was one.

        ``crowded`` has the keys of jobs for which there was none, and is extended.
        """
        kind, job, now = self._kind(index), self.jobs[index], self.sizes[index]
        request = job.request
        possible = [size for size in kind.to_sample(request) if size.covers(now)]
        key = (kind.kind, kind.sampling.sizes, now, request.bounds, request.worker, request.ps,
               self.allocation.room_key(job))  # fmt: skip
        holds_no_more = now.covers(self._held[index])
        if holds_no_more and key in crowded:
            return False
        while possible:
            size = kind.sampling.farthest(possible)
            if self._sample_at(index, size):
                return True
            # If there is no room for a size, there is none for any that is larger.
            possible = [other for other in possible if not other.covers(size)]
        crowded.add(key)
        return False

    def _sample_at(self, index: int, size: Allocation) -> bool:
        """Enlarge a job to a size in order to measure it there; returns whether there was room."""
        kind, now = self._kind(index), self.sizes[index]
        step = size.beyond(now)
        if not size.covers(now) or (step != NOTHING and (self.ended is not None or self.add(index, step) is not None)):
            return False
        text = f"runs at {size} to measure its speed, because {_measured(kind)}"
        kind.sampling.take(size)
        self.allocation.refuse(self.jobs[index], Reason(Constraint.SATISFIED, text))
        return True

    def _kind(self, index: int) -> _KindSpeeds:
        return self._kinds[TrainingKind.of(self.jobs[index].request)]


def seconds_per_sample(speeds: Floats) -> Floats:
    """1 / samples per second, infinite where nothing is trained."""
    seconds = np.full(speeds.shape, np.inf)
    np.divide(1.0, speeds, out=seconds, where=speeds > 0)
    return seconds


def ended_at(job: Job) -> Reason:
    """Reason of jobs that get no more because nodes had no room for this one."""
    text = f"no job is enlarged after {job.key.id} ({job.request.name}), for which nodes have no room"
    return Reason(Constraint.QUEUE, text)


def _measured(kind: _KindSpeeds) -> str:
    return f"speeds of {kind.kind.model} are known at only {len(kind.points)} sizes"


def _kinds(snapshot: Snapshot, sample_sizes: int) -> Mapping[TrainingKind, _KindSpeeds]:
    measured = {speeds.kind: usable(speeds.kind, speeds.points) for speeds in snapshot.speeds}
    kinds = {}
    for kind in dict.fromkeys(TrainingKind.of(job.request) for job in snapshot.jobs):
        points = measured.get(kind, ())
        sizes = [point.allocation for point in points]
        sampling = Sampling(kind, sizes, max(sample_sizes, number_of_terms(kind)))
        kinds[kind] = _KindSpeeds(kind, points, fit_speed(kind, points), sampling)
    return kinds
