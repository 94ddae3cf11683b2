"""Observations and actions of DL2's network on a snapshot: those of ``dl2d.simulation.vectorized.windows``.

Jobs are gone through in submit order, in batches of J. In each, tasks are given one step at a time: a worker, a PS or
one of both for one of the jobs, until enough. To a job that has less than its least size each of them gives what it
lacks of that, as a whole: below it, no job can run. A learned policy takes the steps that its network says; a lesson,
those that led to a decision that was recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Constraint, Reason
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey
from dl2d.core.packing import Blocked, Packing
from dl2d.core.resources import Resources
from dl2d.policies.filling import Filling

#: Features of a job behind its one-hot type, and what they are divided by.
_SCALARS: Final = 5
_EXTRAS: Final = 4
_AGE_SCALE: Final = 3.0
_REMAINING_SCALE: Final = 8.0
_TASKS_SCALE: Final = 16.0
_PLACE_SCALE: Final = 4.0
#: What the actions of a job give it.
STEPS: Final = (Allocation(1, 0), Allocation(0, 1), Allocation(1, 1))
_BUNDLE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How a snapshot is shown."""

    #: J.
    window: int
    #: Types and resources in the order of the inputs.
    models: tuple[str, ...]
    resources: tuple[str, ...]
    #: Each elastic job has its least size before the first step.
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
        self._head_only = packing.head_only
        self._floors = dict(snapshot.floors)
        self._held = snapshot.held()
        #: Why a job's last step had no room.
        self.reasons: dict[JobKey, Reason] = {}
        capacity = dict(snapshot.capacity.thousandths)
        #: All there is of each resource of the sight; what a cluster has nothing of takes no share.
        self.whole = [max(capacity.get(name, 0), 1) for name in sight.resources]
        free = dict(packing.left().thousandths)
        self._used = [capacity.get(name, 0) - free.get(name, 0) for name in sight.resources]
        #: Free share of each resource.
        self.free = [1.0 - used / whole for used, whole in zip(self._used, self.whole, strict=True)]
        #: Amounts by the identity of demands, which are kept so that it stays their own.
        self._demands: dict[int, tuple[Resources, tuple[int, ...]]] = {}
        #: Numbers of steps that have room alike; and which of them are not known to have none.
        self._kinds: dict[tuple[Resources, Resources, Allocation, JobKey | None], int] = {}
        self.open = np.ones(0, dtype=np.bool_)
        self.all_open = True
        #: Why there is no room for the least size of jobs that have none, by what they ask for.
        self._starts: dict[tuple[Resources, Resources, Allocation], Reason | None] = {}
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

    def step(self, job: Job, number: int) -> Allocation:
        """What an action gives a job now: its least size to one that has less, whatever the action."""
        has, least = self.filling.allocations[job.key], job.request.least
        missing = Allocation(max(least.workers - has.workers, 0), max(least.ps - has.ps, 0))
        return STEPS[number] if missing == NOTHING else missing

    def kinds(self, job: Job) -> list[int]:
        """Numbers of a job's three steps in ``open``: equal demands have room alike.

        They do not where a job's own tasks are there to be taken up again.
        """
        own = job.key if self._held.get(job.key, NOTHING) != NOTHING else None
        found = []
        for number in range(len(STEPS)):
            kind = job.request.worker, job.request.ps, self.step(job, number), own
            found.append(self._kinds.setdefault(kind, len(self._kinds)))
        if len(self._kinds) > len(self.open):
            more = np.ones(len(self._kinds) + len(self.open), dtype=np.bool_)
            more[: len(self.open)] = self.open
            self.open = more
        return found

    def look(self, jobs: Sequence[Job]) -> None:
        """Find out which steps of these jobs have no room, so that ``open`` knows it."""
        seen: set[int] = set()
        for job in jobs:
            has = self.filling.allocations[job.key]
            for number, kind in enumerate(self.kinds(job)):
                if grows(job, has, STEPS[number]) and kind not in seen and self.open[kind]:
                    seen.add(kind)
                    self.open[kind] = self._packing.fits(job, self.step(job, number))
                    self.all_open &= bool(self.open[kind])

    def add(self, job: Job, number: int) -> bool:
        """Give a job a step; returns whether there was room."""
        step = self.step(job, number)
        blocked: Blocked | None = self.filling.add(job, step)
        if blocked is None:
            self._take(job.request.worker, step.workers)
            self._take(job.request.ps, step.ps)
            if self._head_only:
                # Another node may be looked at now.
                self.open[:] = self.all_open = True
            return True
        kind = self.kinds(job)[number]
        self.open[kind] = self.all_open = False
        self.reasons[job.key] = _refused(step, blocked)
        return False

    def _take(self, demand: Resources, count: int) -> None:
        for place, amount in enumerate(self.amounts(demand)):
            if amount and count:
                used = self._used[place] = self._used[place] + amount * count
                self.free[place] = 1.0 - used / self.whole[place]

    def no_room(self, job: Job) -> Reason | None:
        """Why there is no room for a job's least size where it has nothing, else for any further step.

        None where there is room, or no step is left to take. To be asked when all is given.
        """
        has = self.filling.allocations[job.key]
        if has == NOTHING:
            least = job.request.least
            kind = job.request.worker, job.request.ps, least
            if self._held.get(job.key, NOTHING) != NOTHING:
                return self._why(job, least)
            if kind not in self._starts:
                self._starts[kind] = self._why(job, least)
            return self._starts[kind]
        kinds = [kind for step, kind in zip(STEPS, self.kinds(job), strict=True) if grows(job, has, step)]
        return None if not kinds or self.open[kinds].any() else self.reasons.get(job.key)

    def _why(self, job: Job, step: Allocation) -> Reason | None:
        if self._packing.fits(job, step):
            return None
        blocked = self.filling.add(job, step)
        return None if blocked is None else _refused(step, blocked)

    def amounts(self, demand: Resources) -> tuple[int, ...]:
        """Thousandths of a demand in the order of the sight's resources."""
        known = self._demands.get(id(demand))
        if known is None:
            given = dict(demand.thousandths)
            known = demand, tuple([given.get(name, 0) for name in self.sight.resources])
            self._demands[id(demand)] = known
        return known[1]

    def _give_first_bundles(self) -> None:
        """Give each elastic job in turn its least size, until one has no room.

        A job that runs at a fixed size waits for room for all of that.
        """
        for job in self._snapshot.jobs:
            if job.static:
                continue
            has, least = self.filling.allocations[job.key], job.request.least
            if has.workers >= least.workers and has.ps >= least.ps:
                continue
            if not self.add(job, _BUNDLE) and self.reasons[job.key].constraint is not Constraint.INFEASIBLE:
                return


class Batch:
    """J jobs or fewer, the steps that they may be given, and the observation, which follows them."""

    def __init__(self, sizing: Sizing, jobs: Sequence[Job], now: float) -> None:
        self.jobs = jobs
        self._sizing = sizing
        sight = sizing.sight
        self._types, self._extras = len(sight.models), sight.extras
        self._allocations, self._keys = sizing.filling.allocations, [job.key for job in jobs]
        #: Shape (1, inputs).
        self.observation = np.zeros((1, sight.inputs), dtype=np.float32)
        self.columns = self.observation[0, : sight.window * sight.width].reshape(sight.window, sight.width)
        self.free = self.observation[0, sight.window * sight.width :]
        self._shown = list(self.columns[: len(jobs)])
        #: Of each job: amounts of a worker and of a PS with the whole, and the most of both.
        self._amounts = [
            tuple(zip(sizing.amounts(job.request.worker), sizing.amounts(job.request.ps), sizing.whole, strict=True))
            for job in jobs
        ]
        self._most = [(job.request.max_workers, job.request.max_ps) for job in jobs]
        #: Steps beyond each job's most, and the numbers of all in ``Sizing.open``; shape (jobs, 3).
        self._beyond = np.ones(sight.void + 1, dtype=np.bool_)
        self._beyond[-1] = False
        self._ends = self._beyond[: len(STEPS) * len(jobs)].reshape(len(jobs), len(STEPS))
        self._ends[:] = False
        self._kinds = np.array([sizing.kinds(job) for job in jobs], dtype=np.int64).reshape(len(jobs), len(STEPS))
        self._closed = self._beyond.copy()
        self._choices = self._closed[: len(STEPS) * len(jobs)].reshape(len(jobs), len(STEPS))
        for place, job in enumerate(jobs):
            kind = sizing.type_of(job)
            column = self.columns[place]
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
            self._look(place)
        self._show_free()

    def mask(self) -> NDArray[np.bool_]:
        """Which actions are allowed and not known to have no room, shape (3J + 1,); void always is."""
        return ~self.closed()

    def closed(self) -> NDArray[np.bool_]:
        """The others. Not to be changed; changes with the next step."""
        if self._sizing.all_open:
            return self._beyond
        np.logical_not(self._sizing.open[self._kinds], out=self._choices)
        self._choices |= self._ends
        return self._closed

    def act(self, action: int) -> bool:
        """Take a step (not void); returns whether there was room."""
        place, number = divmod(action, len(STEPS))
        job = self.jobs[place]
        if not self._sizing.add(job, number):
            return False
        self._kinds[place] = self._sizing.kinds(job)
        self._look(place)
        self._show_free()
        return True

    def _look(self, place: int) -> None:
        """Bring a job's column, and what it may still be given, up to date."""
        workers, ps = self._allocations[self._keys[place]]
        self._show(place, workers, ps)
        most, most_ps = self._most[place]
        end, end_ps = workers >= most, ps >= most_ps
        if end or end_ps:
            # For good: tasks are only added.
            self._ends[place] = end, end_ps, True

    def _show(self, place: int, workers: int, ps: int) -> None:
        """Show dominant share, workers and PSs of a job, scaled."""
        share = 0.0
        for one, other, whole in self._amounts[place]:
            own = (workers * one + ps * other) / whole
            if own > share:  # noqa: PLR1730 - a call of ``max`` takes longer, thousands of times a slot
                share = own
        # Numbers one by one: an array of a few takes longer.
        column, at = self._shown[place], self._types + 2
        column[at], column[at + 1], column[at + 2] = share, workers / _TASKS_SCALE, ps / _TASKS_SCALE
        if self._extras:
            column[-2], column[-1] = _log1p(workers), _log1p(ps)

    def _show_free(self) -> None:
        free = self.free
        for place, share in enumerate(self._sizing.free):
            free[place] = share


@cache
def _log1p(count: int) -> float:
    # numpy's, whose last bit need not be the same as math's
    return float(np.log1p(count))


def grows(job: Job, has: Allocation, step: Allocation) -> bool:
    """Whether a step stays within a job's most."""
    return has.workers + step.workers <= job.request.max_workers and has.ps + step.ps <= job.request.max_ps


def usable(job: Job, has: Allocation, floor: Allocation) -> Allocation:
    """What of an allocation the job can run with: not less than its floor, or nothing."""
    workers = max(job.request.largest_allowed(has.workers), floor.workers)
    enough = workers and has.ps >= job.request.min_ps and workers >= job.request.min_workers
    return Allocation(workers, has.ps) if enough else floor


def _refused(step: Allocation, blocked: Blocked) -> Reason:
    return Reason(blocked.constraint, f"next step of {step}: {blocked}", blocked.shortfalls)
