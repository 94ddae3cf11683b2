"""Start of a greedy allocation by marginal gain: jobs at their minimum, with their speeds, or sampled to learn these.

Optimus and lookahead go on from there: which job is enlarged next, and by what, is theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Constraint, Reason
from dl2d.core.jobs import NOTHING, Allocation, Job, JobRequest, Role
from dl2d.core.measured_speeds import KnownSpeeds, SpeedPoint, TrainingKind
from dl2d.core.packing import Blocked, Packing
from dl2d.core.resources import Resources
from dl2d.policies.common.greedy import GreedyAllocation
from dl2d.policies.common.speed_sampling import Sampling, candidates
from dl2d.throughput.optimus_model import SpeedFit, fit_speed, number_of_terms, usable

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class JobGroup:
    """Jobs with equal speeds, bounds and demands, so that what is computed for one holds for all of them."""

    #: One of them.
    job: Job
    #: Seconds per sample, ``seconds[ps, workers]``, infinite where nothing is trained; (max_ps + 1, max_workers + 1).
    seconds: _Floats
    #: All that the cluster has.
    capacity: Resources

    def seconds_at(self, size: Allocation) -> float:
        """Seconds per sample at a size."""
        return float(self.seconds[size.ps, size.workers])

    def speed(self, size: Allocation) -> str:
        """Speed at a size, for people."""
        return f"{1 / self.seconds_at(size):.4g} samples/s"

    def share(self, step: Allocation) -> float:
        """Dominant share of the cluster that some tasks take; infinite where there is no such resource."""
        return self.job.request.demand_of(step).dominant_share(self.capacity)[0]


@dataclass(slots=True)
class _KindSpeeds:
    """Measured speeds of a kind in this snapshot, the function fitted to them, and the sizes that are sampled."""

    kind: TrainingKind
    points: tuple[SpeedPoint, ...]
    fit: SpeedFit | None
    sampling: Sampling
    #: Sizes to sample next, by the number of sizes that there are and the bounds of a job.
    wanted_sizes: dict[tuple[object, ...], list[Allocation]] = field(default_factory=dict)

    def grid(self, request: JobRequest) -> _Floats:
        """Samples per second: as measured, else as fitted."""
        shape = (request.max_ps + 1, request.max_workers + 1)
        speeds = np.zeros(shape) if self.fit is None else self.fit.grid(request.max_workers, request.max_ps)
        for (workers, ps), speed, *_ in self.points:
            if ps < shape[0] and workers < shape[1]:
                speeds[ps, workers] = speed
        return speeds

    def wanted(self, request: JobRequest) -> list[Allocation]:
        """Sizes at which a job could be sampled, so that a function can be fitted; none where it can already."""
        if self.sampling.enough():
            return []
        asked = (self.sampling.sizes, *_bounds(request))
        if asked not in self.wanted_sizes:
            self.wanted_sizes[asked] = self.sampling.telling(candidates(request))
        return self.wanted_sizes[asked]


class GrowingJobs:
    """Jobs of a snapshot, each known by its place there, while they are enlarged.

    Each has its floor, then its minimum in submit order; jobs whose speeds are unknown are sampled.

    Parameters
    ----------
    known
        The speeds of all jobs; without them they are fitted to what the snapshot says was measured.
    sample_sizes
        Least number of distinct sizes at which a kind is measured before its fit is used; never fewer than a fit needs.
    end_at_first_failure
        Add nothing more after the first job whose minimum has no room.
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
        #: Why nothing more may be added, once that is so.
        self.ended: Reason | None = None
        self._end_at_first_failure = end_at_first_failure
        self._known = known
        self._capacity = snapshot.capacity
        held = snapshot.held()
        self._held = [held[job.key] for job in self.jobs]
        #: What stood in the way of one more task of a demand, once no node had room for it.
        self._full: dict[tuple[Role, Resources], Blocked] = {}
        self._start()
        #: Size of each job now.
        self.sizes = [self.allocation.allocations[job.key] for job in self.jobs]
        self._kinds = {} if known is not None else _kinds(snapshot, sample_sizes)
        self._groups: dict[tuple[object, ...], JobGroup] = {}
        #: Kept, since groups are told apart by the identity of arrays.
        self._known_grids: list[_Floats] = []
        #: Group of each job; None for one that did not start or whose speeds are unknown.
        self.groups = [self._group(job) if job.key not in self.allocation.reasons else None for job in self.jobs]
        self._sample()

    def add(self, place: int, step: Allocation) -> Blocked | None:
        """Give a job more tasks, all or none; returns what stood in the way.

        Where no node has room for one more task of a demand, none will have it later in this decision, so other jobs
        with that demand are not tried.
        """
        job, now = self.jobs[place], self.sizes[place]
        blocked = (self._full and self.known_full(place, step)) or self.allocation.add(job, step)
        if not blocked:
            self.sizes[place] = Allocation(now.workers + step.workers, now.ps + step.ps)
            return None
        if step.workers + step.ps == 1:
            self._full[blocked.role, job.request.demand(blocked.role)] = blocked
        return blocked

    def known_full(self, place: int, step: Allocation) -> Blocked | None:
        """What stood in the way of such tasks before, if anything.

        Tasks that run already may stay even on a node that takes no new ones, so they are always tried.
        """
        for role in (Role.WORKER, Role.PS):
            if step.count(role) and self._held[place].count(role) <= self.sizes[place].count(role):
                blocked = self._full.get((role, self.jobs[place].request.demand(role)))
                if blocked is not None:
                    return blocked
        return None

    def _start(self) -> None:
        """Give every job its minimum, in submit order."""
        refused: dict[tuple[Resources, Resources, Allocation], Reason] = {}
        for job, held in zip(self.jobs, self._held, strict=True):
            if self.allocation.allocations[job.key] != NOTHING:
                continue
            if self.ended is not None:
                self.allocation.refuse(job, self.ended)
                continue
            step = self.allocation.next_bundle(job)
            assert step is not None, "a job that has nothing can have its minimum"
            # Room only gets less: what had none for one job has none for the next that asks for the same.
            like = (job.request.worker, job.request.ps, step)
            if held == NOTHING and like in refused:
                self.allocation.refuse(job, refused[like])
            elif (stopped := self.allocation.grow(job)) is not None:
                refused[like] = stopped
                if self._end_at_first_failure:
                    self.ended = ended_at(job)

    def _group(self, job: Job) -> JobGroup | None:
        request = job.request
        if self._known is not None:
            grid = self._known.grid(job)
            key = (id(grid), *_bounds(request), request.worker, request.ps)
            if key not in self._groups:
                self._known_grids.append(grid)
                self._groups[key] = self._new_group(job, grid)
            return self._groups[key]
        kind = self._kinds[TrainingKind.of(request)]
        if kind.wanted(request):
            return None
        key = (kind.kind, *_bounds(request), request.worker, request.ps)
        if key not in self._groups:
            self._groups[key] = self._new_group(job, kind.grid(request))
        return self._groups[key]

    def _new_group(self, job: Job, grid: _Floats) -> JobGroup:
        # Some have one row only: all-reduce jobs, whatever number of PSs they are said to have.
        speeds = np.broadcast_to(grid, (job.request.max_ps + 1, job.request.max_workers + 1))
        return JobGroup(job, seconds_per_sample(speeds), self._capacity)

    def _sample(self) -> None:
        """Enlarge jobs of unknown kinds to sizes that are to be measured; those that are not needed stay as they are.

        A job that runs at a size which was not measured yet stays there until it is.
        """
        waiting = [
            place
            for place, job in enumerate(self.jobs)
            if self.groups[place] is None and job.key not in self.allocation.reasons
        ]
        for place in waiting:
            held = self._held[place]
            if held in self._kind(place).wanted(self.jobs[place].request):
                self._sample_at(place, held)
        crowded: set[tuple[object, ...]] = set()
        for place in waiting:
            job = self.jobs[place]
            if job.key not in self.allocation.reasons and not self._sample_somewhere(place, crowded):
                kind = self._kind(place)
                text = f"keeps its size, for {_measured(kind)}, which does not say what more would bring"
                self.allocation.refuse(job, Reason(Constraint.QUEUE, text))

    def _sample_somewhere(self, place: int, crowded: set[tuple[object, ...]]) -> bool:
        """Enlarge a job to the farthest size with room; ``crowded`` keeps what had room for none."""
        kind, request, now = self._kind(place), self.jobs[place].request, self.sizes[place]
        left = [size for size in kind.wanted(request) if size.workers >= now.workers and size.ps >= now.ps]
        like = (kind.kind, kind.sampling.sizes, now, *_bounds(request), request.worker, request.ps)
        holds_no_more = self._held[place].workers <= now.workers and self._held[place].ps <= now.ps
        if holds_no_more and like in crowded:
            return False
        while left:
            size = kind.sampling.farthest(left)
            if self._sample_at(place, size):
                return True
            # No room for this one, so none for any that is larger.
            left = [other for other in left if other.workers < size.workers or other.ps < size.ps]
        crowded.add(like)
        return False

    def _sample_at(self, place: int, size: Allocation) -> bool:
        """Grow a job to a size in order to measure it there, if there is room."""
        kind, now = self._kind(place), self.sizes[place]
        step = Allocation(size.workers - now.workers, size.ps - now.ps)
        if min(step) < 0 or (step != NOTHING and (self.ended is not None or self.add(place, step) is not None)):
            return False
        text = f"samples {size}, for {_measured(kind)}"
        kind.sampling.take(size)
        self.allocation.refuse(self.jobs[place], Reason(Constraint.SATISFIED, text))
        return True

    def _kind(self, place: int) -> _KindSpeeds:
        return self._kinds[TrainingKind.of(self.jobs[place].request)]


def seconds_per_sample(speeds: _Floats) -> _Floats:
    """1 / samples per second, infinite where nothing is trained."""
    seconds = np.full(speeds.shape, np.inf)
    np.divide(1.0, speeds, out=seconds, where=speeds > 0)
    return seconds


def ended_at(job: Job) -> Reason:
    """Reason of the other jobs where the allocation ended at this one."""
    return Reason(Constraint.QUEUE, f"filling ended at {job.key.id} ({job.request.name}), which has no room for more")


def _measured(kind: _KindSpeeds) -> str:
    return f"speeds of {kind.kind.model} are known at {len(kind.points)} sizes only"


def _bounds(request: JobRequest) -> tuple[object, ...]:
    return (
        request.architecture, request.min_workers, request.max_workers, request.min_ps, request.max_ps,
        request.allowed_workers,
    )  # fmt: skip


def _kinds(snapshot: Snapshot, sample_sizes: int) -> Mapping[TrainingKind, _KindSpeeds]:
    measured = {speeds.kind: usable(speeds.kind, speeds.points) for speeds in snapshot.speeds}
    kinds = {}
    for kind in dict.fromkeys(TrainingKind.of(job.request) for job in snapshot.jobs):
        points = measured.get(kind, ())
        sizes = [point.allocation for point in points]
        sampling = Sampling(kind, sizes, max(sample_sizes, number_of_terms(kind)))
        kinds[kind] = _KindSpeeds(kind, points, fit_speed(kind, points), sampling)
    return kinds
