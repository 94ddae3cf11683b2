"""State of a snapshot's jobs while the paper's policy sizes them: sizes, room, observations, allowed actions.

Observations and actions are those of ``dl2d.simulation.vectorized.dl2_paper_sizing``.

Jobs are gone through in submit order, in batches of J. In each, tasks are given one step at a time: a worker, a PS or
one of both for one of the jobs, until enough. To a job that has less than its minimum size each of them gives what it
lacks of that, as a whole: below it, no job can run. Where a job allows only some worker counts, a step of workers leads
to the next of them, and one of both adds as many PSs. To a job of fixed size (a static job, and any where the encoding
has fixed sizes) each gives what it lacks of the size that its user asks for, if there is room for that when no other
job has any tasks; a job that runs at this size keeps it, and none gets more. A learned policy takes the steps that its
network chooses; in supervised learning, those are taken that led to a recorded decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dl2d.core.array_types import Bools, Floats, Ints
from dl2d.core.cluster import Snapshot
from dl2d.core.decision import FOR_WANT_OF_ROOM, Reason
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.packing.room_in_limits import Blocked
from dl2d.core.resources import Resources
from dl2d.policies.common.greedy_allocation import GreedyAllocation
from dl2d.policies.dl2_paper.exploration import drawn_size
from dl2d.policies.dl2_paper.observation import (
    ObservationEncoding,
    dominant_share,
    job_features,
    size_features,
)
from dl2d.throughput.remaining_time import ranks_by_remaining_time, remaining_seconds

#: What the actions of a job give it that may have any number of workers.
STEPS = (Allocation(1, 0), Allocation(0, 1), Allocation(1, 1))
_BUNDLE = 2


class Sizing:
    """A snapshot whose jobs are being sized; floors, and first bundles where the encoding has them, are given at once.

    Parameters
    ----------
    packing
        Made for the snapshot's decision; is filled.
    exploration
        Probability that a job has a drawn size (``dl2d.policies.dl2_paper.exploration.drawn_size``): it is given that
        at once, after first bundles, and no more.
    """

    def __init__(
        self, snapshot: Snapshot, packing: Packing, encoding: ObservationEncoding, *, exploration: float = 0.0
    ) -> None:
        self.encoding = encoding
        self._snapshot = snapshot
        self._packing = packing
        self._types = {model: place for place, model in enumerate(encoding.models)}
        self._least = {job.key: job.request.min_size for job in snapshot.jobs}
        #: What a job's first step leads to. It has to be computed before any job has tasks.
        self._first = {
            job.key: self._fixed_size(job) if self.is_fixed(job) else job.request.min_size for job in snapshot.jobs
        }
        self.allocation = GreedyAllocation(snapshot, packing)
        drawn = ((job.key, drawn_size(job, snapshot.slot, exploration)) for job in snapshot.jobs)
        self._drawn = {key: size for key, size in drawn if size is not None}
        self._floors = dict(snapshot.floors)
        #: Why a job's last step had no room.
        self.reasons: dict[JobKey, Reason] = {}
        #: The job without room that kept another from its minimum size.
        self.waits_behind: dict[JobKey, Job] = {}
        #: Capacity of the cluster by resource, in the encoding's order, shape (R,); what it has nothing of counts 1.
        self.capacity = np.maximum(self.amounts(snapshot.capacity), 1)
        self._used = self.amounts(snapshot.capacity) - self.amounts(packing.left())
        #: Remaining time of each job in slots, and its place in this order; empty where the network sees neither.
        self._times: dict[JobKey, tuple[float, int]] = {}
        if encoding.remaining_times:
            seconds = remaining_seconds(snapshot)
            slots = np.array(list(seconds.values())) / encoding.slot_seconds
            places = ranks_by_remaining_time(slots, np.zeros(len(slots), dtype=np.int64))
            self._times = dict(zip(seconds, zip(slots.tolist(), places.tolist(), strict=True), strict=True))
        #: Numbers of kinds of steps, and which kinds are known to have no room; see ``kinds``.
        self._kinds: dict[tuple[object, ...], int] = {}
        self.closed: set[int] = set()
        #: Why there is no room for the minimum size of jobs that have none, by kind.
        self._starts: dict[int, Reason | None] = {}
        for job in snapshot.jobs:
            first = self._first[job.key]
            if self.is_fixed(job) and self.floor(job) != NOTHING and self.allocation.held[job.key].covers(first):
                self._add(job, first.beyond(self.allocation.allocations[job.key]))
        if encoding.first_bundles:
            self._give_bundles()
        for job in snapshot.jobs:
            if job.key in self._drawn:
                self._add(job, self._drawn[job.key].beyond(self.allocation.allocations[job.key]))

    def batches(self) -> Iterator[Batch]:
        """One after the other; each is to be over when the next is asked for."""
        jobs, size = self._snapshot.jobs, self.encoding.window
        for start in range(0, len(jobs), size):
            yield Batch(self, jobs[start : start + size], self._snapshot.at)

    def floor(self, job: Job) -> Allocation:
        """What the job keeps whatever is decided."""
        return self._floors.get(job.key, NOTHING)

    def is_fixed(self, job: Job) -> bool:
        """Whether the job is of fixed size: it gets the size that its user asks for, or nothing."""
        return job.static or self.encoding.fixed_sizes

    def most(self, job: Job) -> Allocation:
        """What the job may get at most."""
        if job.key in self._drawn:
            return self._drawn[job.key]
        asked = self.asked_size(job) if self.is_fixed(job) else NOTHING
        return asked if asked.covers(self._least[job.key]) else _allowed(job, job.request.max_size)

    def type_of(self, job: Job) -> int:
        """Place of its one-hot; -1 for a type that the network does not know."""
        return self._types.get(job.request.model, -1)

    def asked_size(self, job: Job) -> Allocation:
        """What its user asks for, or else the usual size of its type; its minimum where that is unknown."""
        kind, asked = self.type_of(job), job.request.asked_size
        usual = self.encoding.usual_sizes[kind] if kind >= 0 else NOTHING
        sizes = (size for size in (asked, usual) if size != NOTHING)
        return _allowed(job, next(sizes, self._least[job.key]).common(job.request.max_size))

    def first_size(self, job: Job) -> Allocation:
        """What a job's first step leads to: its minimum size, or the one that its user asks for."""
        return self._first[job.key]

    def remaining_times(self, jobs: Sequence[Job]) -> Floats | None:
        """Remaining times of jobs, and their places, shape (jobs, 2); None where the network sees neither."""
        return np.array([self._times[job.key] for job in jobs]) if self._times else None

    def _fixed_size(self, job: Job) -> Allocation:
        """The size that a job's user asks for.

        For an elastic job it is the minimum where there is no room for that even without other jobs.
        """
        asked, least = self.asked_size(job), self._least[job.key]
        return asked if asked.covers(least) and (job.static or self._packing.fits(job, asked)) else least

    def free(self) -> Floats:
        """Free share of each resource, shape (R,)."""
        return 1.0 - self._used / self.capacity

    def steps(self, job: Job) -> Sequence[Allocation]:
        """What each of a job's three actions gives it now: what it lacks of its first size, or a step beyond it."""
        has, first, allowed = self.allocation.allocations[job.key], self._first[job.key], job.request.allowed_workers
        if not has.covers(first):
            return (first.beyond(has),) * len(STEPS)
        if not allowed:
            return STEPS
        workers = min((count for count in allowed if count > has.workers), default=has.workers) - has.workers
        ps = min(workers, max(self.most(job).ps - has.ps, 0))
        return Allocation(workers, 0), Allocation(0, 1), Allocation(workers, ps)

    def steps_left(self, job: Job) -> dict[int, Allocation]:
        """Actions of a job that do not lead beyond its bounds, and what each gives, whether there is room or not."""
        has, most = self.allocation.allocations[job.key], _allowed(job, job.request.max_size)
        steps = enumerate(self.steps(job))
        return {number: step for number, step in steps if most.covers(has.plus(STEPS[number]))}

    def kinds(self, job: Job) -> list[int]:
        """Kinds of a job's three steps: steps of one kind have room alike.

        They are of one kind where both tasks ask for the same, as many are added, and the jobs have the same limits and
        may use the same nodes; but a job whose own tasks run, and may be taken up again, has kinds of its own.
        """
        return [self._kind(job, step) for step in self.steps(job)]

    def _kind(self, job: Job, step: Allocation) -> int:
        own = job.key if self.allocation.held.get(job.key, NOTHING) != NOTHING else None
        kind = (job.request.worker, job.request.ps, step, own, self.allocation.room_key(job))
        return self._kinds.setdefault(kind, len(self._kinds))

    def look(self, jobs: Sequence[Job]) -> None:
        """Find out which steps of these jobs have no room, so that ``closed`` has them."""
        seen: set[int] = set()
        for job in jobs:
            for step in self.steps_left(job).values():
                kind = self._kind(job, step)
                if kind not in seen and kind not in self.closed:
                    seen.add(kind)
                    if not self._packing.fits(job, step):
                        self.closed.add(kind)

    def add(self, job: Job, number: int) -> bool:
        """Give a job a step; returns whether there was room."""
        return self._try(job, self.steps(job)[number])

    def _try(self, job: Job, step: Allocation) -> bool:
        blocked = self._add(job, step)
        if blocked is not None:
            self.closed.add(self._kind(job, step))
            self.reasons[job.key] = blocked.reason(f"next step of {step}: {blocked}")
        return blocked is None

    def _add(self, job: Job, step: Allocation) -> Blocked | None:
        """Give a job tasks, all or none; returns why there is no room for them, None if it got them."""
        blocked = self.allocation.add(job, step)
        if blocked is not None:
            return blocked
        self._used += step.workers * self.amounts(job.request.worker) + step.ps * self.amounts(job.request.ps)
        if self._packing.first_node_only:
            # Another node may be the one that is tried now.
            self.closed.clear()
        return None

    def no_room(self, job: Job) -> Reason | None:
        """Why there is no room for a job's minimum size where it has nothing, else for any further step.

        None where there is room, or no step is left to take. To be asked when all is given.
        """
        if self.allocation.allocations[job.key] != NOTHING:
            left = list(self.steps_left(job).values())
            if not left or not self.closed.issuperset(self._kind(job, step) for step in left):
                return None
            limit = self.allocation.limited(job, left[0])
            return self.reasons.get(job.key) or (None if limit is None else limit.reason(f"next step: {limit}"))
        least = self._least[job.key]
        kind = self._kind(job, least)
        if kind not in self._starts:
            blocked = None if self._packing.fits(job, least) else self.allocation.add(job, least)
            self._starts[kind] = None if blocked is None else blocked.reason(f"next step of {least}: {blocked}")
        return self._starts[kind]

    def amounts(self, demand: Resources) -> Ints:
        """Thousandths of a demand in the order of the encoding's resources, shape (R,)."""
        return np.array(demand.in_order(self.encoding.resources), dtype=np.int64)

    def give_last_bundles(self) -> frozenset[JobKey]:
        """Where the encoding has last bundles, give them after the last step; returns the jobs that got one."""
        if not self.encoding.last_bundles:
            return frozenset()
        before = dict(self.allocation.allocations)
        self._give_bundles()
        if self.encoding.fixed_sizes:
            self._give_rest()
        return frozenset(key for key, size in self.allocation.allocations.items() if size != before[key])

    def _give_bundles(self) -> None:
        """Give each job in turn its minimum size, or a static job its fixed size, where nodes have room for it.

        With last bundles, which are for a teacher that serves one job after the other, and on the authors' placement,
        which tries one node only, it ends at the first that waits for room. One that may use some of the nodes only
        keeps those jobs waiting that may use the same.
        """
        in_order = self.encoding.last_bundles or self._packing.first_node_only
        #: The first job without room of those that may use the same nodes.
        first_waiting: dict[frozenset[str] | None, Job] = {}
        for job in self._snapshot.jobs:
            bundle = (self._first if job.static else self._least)[job.key]
            lacks = bundle.beyond(self.allocation.allocations[job.key])
            if lacks == NOTHING:
                continue
            may_use = self.allocation.may_use.get(job.key)
            ahead = first_waiting.get(None) or first_waiting.get(may_use)
            if ahead is not None:
                self.waits_behind[job.key] = ahead
            elif not self._try(job, lacks) and in_order and self._waits_for_room(job, lacks):
                first_waiting[may_use] = job

    def _waits_for_room(self, job: Job, lacks: Allocation) -> bool:
        """Whether a job that was refused these tasks can have them when others have ended."""
        return self.reasons[job.key].constraint in FOR_WANT_OF_ROOM and self.allocation.waiting_helps(job, lacks)

    def _give_rest(self) -> None:
        """Give jobs that have less than their first size as much of it as there is room for, in submit order."""
        for job in self._snapshot.jobs:
            while not job.static and (has := self.allocation.allocations[job.key]) != NOTHING:
                step = self.allocation.next_bundle(job)
                if step is None or not self._first[job.key].covers(has.plus(step)) or self._add(job, step) is not None:
                    break


class Batch:
    """Up to J jobs of a ``Sizing``, with the observation of them and the actions that are left; both follow each step.

    Action 3i + k gives job i the step ``STEPS[k]``; action 3J, void, ends the batch.
    """

    def __init__(self, sizing: Sizing, jobs: Sequence[Job], now: float) -> None:
        self.jobs = jobs
        self._sizing = sizing
        encoding = sizing.encoding
        self._layout = layout = encoding.layout
        #: Shape (1, length).
        self.observation = np.zeros((1, layout.length), dtype=np.float32)
        self._features = layout.jobs_of(self.observation)[0, : len(jobs)]
        self._free = layout.free_of(self.observation)[0]
        self._of_sizes = np.array(layout.size_features)
        #: Workers and PSs, at present, as users ask for (where the network sees that), and at most, shape (jobs, 2).
        self._sizes = np.array([sizing.allocation.allocations[job.key] for job in jobs], dtype=np.int64)
        self._asked = np.array([sizing.asked_size(job) for job in jobs]) if layout.asked_sizes else None
        self._most = np.array([sizing.most(job) for job in jobs], dtype=np.int64)
        self._demand = np.array([(sizing.amounts(job.request.worker), sizing.amounts(job.request.ps)) for job in jobs])
        #: Kinds of each job's steps, shape (jobs, 3); see ``Sizing.kinds``.
        self._kinds = np.array([sizing.kinds(job) for job in jobs], dtype=np.int64)
        declared = np.array([job.request.epochs for job in jobs])
        done = np.array([job.progress.epoch for job in jobs])
        self._features[:] = job_features(
            layout,
            types=np.array([sizing.type_of(job) for job in jobs]),
            ages=np.array([max(int((now - job.key.submitted) // encoding.slot_seconds), 0) for job in jobs]),
            remaining=np.maximum(declared - np.where(np.isfinite(done), done, 0.0), 0.0),
            declared=declared,
            places=np.arange(len(jobs)),
            times=sizing.remaining_times(jobs),
        )
        self._show(np.arange(len(jobs)))

    def sizes(self) -> Ints:
        """Workers and PSs of each job of the window, shape (J, 2); 0 where there is no job."""
        sizes = np.zeros((self._layout.window, 2), dtype=np.int64)
        sizes[: len(self.jobs)] = self._sizes
        return sizes

    def mask(self) -> Bools:
        """Which actions are allowed and not known to have no room, shape (3J + 1,); void always is."""
        mask = np.zeros(self._sizing.encoding.void + 1, dtype=np.bool_)
        mask[-1] = True
        steps = mask[: self._kinds.size].reshape(self._kinds.shape)
        steps[:, :_BUNDLE] = self._sizes < self._most
        steps[:, _BUNDLE] = steps[:, 0] & steps[:, 1]
        if self._sizing.closed:
            steps &= ~np.isin(self._kinds, list(self._sizing.closed))
        return mask

    def act(self, action: int) -> bool:
        """Take a step (not void); returns whether there was room."""
        place, number = divmod(action, len(STEPS))
        job = self.jobs[place]
        if not self._sizing.add(job, number):
            return False
        self._sizes[place] = self._sizing.allocation.allocations[job.key]
        self._kinds[place] = self._sizing.kinds(job)
        self._show(np.array([place]))
        return True

    def _show(self, places: Ints) -> None:
        """Bring the observation up to date where these jobs have other sizes."""
        sizes, asked = self._sizes[places], None if self._asked is None else self._asked[places]
        shares = dominant_share(sizes, self._demand[places], self._sizing.capacity)
        self._features[places[:, None], self._of_sizes] = size_features(self._layout, sizes, shares, asked)
        self._free[:] = self._sizing.free()


def _allowed(job: Job, size: Allocation) -> Allocation:
    """A size with a worker count that the job allows: the largest up to this, or else its least."""
    request = job.request
    if not request.allowed_workers:
        return size
    return Allocation(request.largest_allowed(size.workers) or request.min_size.workers, size.ps)
