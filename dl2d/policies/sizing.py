"""What DL2's network sees of a snapshot, and what it may do: number for number as ``dl2d.simulation.windows`` has it.

Jobs are gone through in submit order, in batches of J. In each, tasks are given one step at a time: a worker, a PS or
one of both for one of the jobs, until enough. A learned policy takes the steps that its network says; a lesson, those
that led to a decision that was recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Constraint, Reason
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey
from dl2d.core.packing import Blocked, Packing
from dl2d.core.resources import Resources
from dl2d.policies.filling import Filling

#: Features of a job behind its one-hot type, and what they are divided by: as in ``dl2d.simulation.windows``.
_SCALARS: Final = 5
_EXTRAS: Final = 4
_AGE_SCALE: Final = 3.0
_REMAINING_SCALE: Final = 8.0
_TASKS_SCALE: Final = 16.0
_PLACE_SCALE: Final = 4.0
#: What the actions of a job give it.
STEPS: Final = (Allocation(1, 0), Allocation(0, 1), Allocation(1, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How a snapshot is shown."""

    #: J.
    window: int
    #: Types and resources in the order of the inputs.
    models: tuple[str, ...]
    resources: tuple[str, ...]
    #: Each job has its least size before the first step.
    first_bundles: bool
    slot_seconds: float
    #: Jobs show their place in the batch, the remaining fraction of their epochs and logarithms of their tasks, too.
    extras: bool = False

    @property
    def width(self) -> int:
        """Features of a job."""
        return len(self.models) + _SCALARS + _EXTRAS * self.extras

    @property
    def inputs(self) -> int:
        """Length of an observation."""
        return self.window * self.width + len(self.resources)

    @property
    def void(self) -> int:
        """The action that ends a batch: 3J."""
        return 3 * self.window

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """From a checkpoint's settings.

        Raises
        ------
        KeyError, TypeError, ValueError
            One is missing or is no such thing.
        """
        return cls(
            window=int(settings["window"]),
            models=tuple(settings["models"]),
            resources=tuple(settings["resources"]),
            first_bundles=bool(settings["first_bundles"]),
            slot_seconds=float(settings["slot_seconds"]),
            extras=bool(settings.get("extras", False)),
        )


class Sizing:
    """A snapshot whose jobs are being sized; floors, and first bundles where the sight has them, are given at once.

    Parameters
    ----------
    packing
        Made for the snapshot's decision; is filled.
    """

    def __init__(self, snapshot: Snapshot, packing: Packing, sight: Sight) -> None:
        self.filling = Filling(snapshot, packing)
        self.sight = sight
        self._snapshot = snapshot
        self._packing = packing
        self._floors = dict(snapshot.floors)
        self._held = snapshot.held()
        #: Why a job's last step had no room.
        self.reasons: dict[JobKey, Reason] = {}
        capacity = dict(snapshot.capacity.thousandths)
        # What a cluster has nothing of takes no share.
        self._whole = np.array([max(capacity.get(name, 0), 1) for name in sight.resources], dtype=np.int64)
        free = dict(Resources.total(packing.room().values()).thousandths)
        self._used = np.array([capacity.get(name, 0) - free.get(name, 0) for name in sight.resources], dtype=np.int64)
        self._demands: dict[Resources, NDArray[np.int64]] = {}
        #: Steps that had no room since something was last added.
        self._blocked: set[tuple[Resources, Resources, Allocation, JobKey | None]] = set()
        self._types = {model: place for place, model in enumerate(sight.models)}
        if sight.first_bundles:
            self._give_first_bundles()

    def batches(self) -> Iterator[Batch]:
        """One after the other; each is to be over when the next is asked for."""
        jobs, size = self._snapshot.jobs, self.sight.window
        for start in range(0, len(jobs), size):
            yield Batch(self, jobs[start : start + size], self._snapshot.at)

    def floor(self, job: Job) -> Allocation:
        """What the job keeps whatever is decided."""
        return self._floors.get(job.key, NOTHING)

    def type_of(self, job: Job) -> int | None:
        """Place of its one-hot; None for a type that the network does not know."""
        return self._types.get(job.request.model)

    def free(self) -> NDArray[np.float64]:
        """Free share of each resource."""
        free: NDArray[np.float64] = 1.0 - self._used / self._whole
        return free

    def shown(self, job: Job) -> tuple[float, float, float]:
        """Dominant share, workers and PSs of a job, scaled."""
        workers, ps = self.filling.allocations[job.key]
        held = workers * self._amounts(job.request.worker) + ps * self._amounts(job.request.ps)
        return float((held / self._whole).max(initial=0.0)), workers / _TASKS_SCALE, ps / _TASKS_SCALE

    def allowed(self, job: Job) -> list[bool]:
        """Which steps are within the job's most and not known to have no room."""
        has = self.filling.allocations[job.key]
        return [grows(job, has, step) and self._key(job, step) not in self._blocked for step in STEPS]

    def look(self, jobs: Sequence[Job]) -> None:
        """Find out which steps of these jobs have no room, so that ``allowed`` knows it."""
        seen: set[tuple[Resources, Resources, Allocation, JobKey | None]] = set()
        for job in jobs:
            has = self.filling.allocations[job.key]
            for step in STEPS:
                if not grows(job, has, step):
                    continue
                key = self._key(job, step)
                if key in seen or key in self._blocked:
                    continue
                seen.add(key)
                if not self._packing.fits(job, step):
                    self._blocked.add(key)

    def add(self, job: Job, step: Allocation) -> bool:
        """Give a job a step; returns whether there was room."""
        blocked: Blocked | None = self.filling.add(job, step)
        if blocked is None:
            self._used += step.workers * self._amounts(job.request.worker) + step.ps * self._amounts(job.request.ps)
            # A placement that looks at one node alone may look at another now.
            self._blocked.clear()
            return True
        self._blocked.add(self._key(job, step))
        self.reasons[job.key] = Reason(blocked.constraint, f"next step of {step}: {blocked}", blocked.shortfalls)
        return False

    def _key(self, job: Job, step: Allocation) -> tuple[Resources, Resources, Allocation, JobKey | None]:
        """Equal demands have room alike, except where a job's own tasks are there to be taken up again."""
        own = job.key if self._held.get(job.key, NOTHING) != NOTHING else None
        return job.request.worker, job.request.ps, step, own

    def _amounts(self, demand: Resources) -> NDArray[np.int64]:
        if demand not in self._demands:
            given = dict(demand.thousandths)
            self._demands[demand] = np.array([given.get(name, 0) for name in self.sight.resources], dtype=np.int64)
        return self._demands[demand]

    def _give_first_bundles(self) -> None:
        """Its least size to each job in turn, bundle by bundle, until something has no room."""
        for job in self._snapshot.jobs:
            least = _least(job)
            now = self.floor(job)
            workers, ps = max(least.workers - now.workers, 0), max(least.ps - now.ps, 0)
            bundles = min(workers, ps)
            steps = [STEPS[2]] * bundles + [STEPS[0]] * (workers - bundles) + [STEPS[1]] * (ps - bundles)
            for step in steps:
                if not self.add(job, step):
                    if self.reasons[job.key].constraint is Constraint.INFEASIBLE:
                        break
                    return


class Batch:
    """J jobs or fewer, the steps that they may be given, and the observation, which follows them."""

    def __init__(self, sizing: Sizing, jobs: Sequence[Job], now: float) -> None:
        self.jobs = jobs
        self._sizing = sizing
        sight = sizing.sight
        self._types = len(sight.models)
        #: Shape (1, inputs).
        self.observation = np.zeros((1, sight.inputs), dtype=np.float32)
        self._columns = self.observation[0, : sight.window * sight.width].reshape(sight.window, sight.width)
        self._free = self.observation[0, sight.window * sight.width :]
        for place, job in enumerate(jobs):
            kind = sizing.type_of(job)
            column = self._columns[place]
            if kind is not None:
                column[kind] = 1.0
            age = max(int((now - job.key.submitted) // sight.slot_seconds), 0)
            done = job.progress.epoch if math.isfinite(job.progress.epoch) else 0.0
            remaining = max(job.request.epochs - done, 0.0)
            column[self._types] = np.log1p(age) / _AGE_SCALE
            column[self._types + 1] = np.log1p(remaining) / _REMAINING_SCALE
            if sight.extras:
                column[self._types + _SCALARS] = place / _PLACE_SCALE
                column[self._types + _SCALARS + 1] = remaining / job.request.epochs
            self._show(place)
        self._free[:] = sizing.free()

    def mask(self) -> NDArray[np.bool_]:
        """Which actions are allowed and not known to have no room, shape (3J + 1,); void always is."""
        mask = np.zeros(self._sizing.sight.void + 1, dtype=np.bool_)
        mask[-1] = True
        for place, job in enumerate(self.jobs):
            mask[3 * place : 3 * place + 3] = self._sizing.allowed(job)
        return mask

    def act(self, action: int) -> bool:
        """Take a step (not void); returns whether there was room."""
        place, number = divmod(action, 3)
        if not self._sizing.add(self.jobs[place], STEPS[number]):
            return False
        self._show(place)
        self._free[:] = self._sizing.free()
        return True

    def _show(self, place: int) -> None:
        sizing, column = self._sizing, self._columns[place]
        column[self._types + 2 : self._types + _SCALARS] = sizing.shown(self.jobs[place])
        if sizing.sight.extras:
            column[-2:] = np.log1p(sizing.filling.allocations[self.jobs[place].key])


def grows(job: Job, has: Allocation, step: Allocation) -> bool:
    """Whether a step stays within a job's most."""
    return has.workers + step.workers <= job.request.max_workers and has.ps + step.ps <= job.request.max_ps


def usable(job: Job, has: Allocation, floor: Allocation) -> Allocation:
    """What of an allocation the job can run with: not less than its floor, or nothing."""
    workers = max(job.request.largest_allowed(has.workers), floor.workers)
    enough = workers and has.ps >= job.request.min_ps and workers >= job.request.min_workers
    return Allocation(workers, has.ps) if enough else floor


def _least(job: Job) -> Allocation:
    request = job.request
    workers = next((count for count in range(1, request.max_workers + 1) if request.allows(count)), 0)
    return Allocation(workers, request.min_ps)
