"""Lookahead: the jump to any larger size that saves most time for what it takes is made first."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numpy as np

from dl2d.core.array_types import Floats
from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Alternative, Constraint, Decision, Reason
from dl2d.core.jobs import Allocation, Role
from dl2d.core.measured_speeds_and_losses import KnownSpeeds
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.packing.room_in_limits import Blocked
from dl2d.core.policy import NO_EVIDENCE, Evidence
from dl2d.policies.common.marginal_gain import GrowingJobs, JobGroup
from dl2d.policies.common.speeds_after_resize import DEFAULT_OPTIMISM, PredictedSpeeds
from dl2d.throughput.remaining_time import samples_left

#: A jump that saves less than this part of the remaining time is not made.
_WORTHWHILE = 0.01
#: A jump without room is cut by this part of the tasks it adds, at least by one.
_CUT = 8


class _Jump(NamedTuple):
    """A step to a larger size, and what it is worth."""

    step: Allocation
    #: Seconds saved per sample that is left, over the dominant share of the step.
    gain: float


class _Jumps:
    """Best enlargements of the jobs of a group, computed once for each size and limit that one of them reaches."""

    def __init__(self, group: JobGroup) -> None:
        self._group = group
        request = group.job.request
        allowed = [request.allows(count) for count in range(request.max_workers + 1)]
        self._allowed = np.array(allowed, dtype=bool)
        self._shares = _shares(group)
        self._best: dict[tuple[Allocation, Allocation], _Jump | None] = {}

    def best(self, size: Allocation, most: Allocation) -> _Jump | None:
        """The jump from ``size`` to at most ``most`` with the largest gain; None where none is worthwhile."""
        asked = (size, most)
        if asked not in self._best:
            self._best[asked] = self._find(size, most)
        return self._best[asked]

    def _find(self, size: Allocation, most: Allocation) -> _Jump | None:
        after = self._group.seconds[size.ps : most.ps + 1, size.workers : most.workers + 1]
        before = float(after[0, 0])
        shares = self._shares[: after.shape[0], : after.shape[1]]
        possible = np.isfinite(after) & np.isfinite(shares)
        possible &= self._allowed[size.workers : most.workers + 1] | (np.arange(after.shape[1]) == 0)
        possible[0, 0] = False
        with np.errstate(divide="ignore", invalid="ignore"):
            if math.isfinite(before):
                saved = before - after
                possible &= saved >= _WORTHWHILE * before
                gains = saved / shares
            else:
                # Anything is better than no speed at all: the most speed for what it takes.
                gains = 1 / (after * shares)
        if not possible.any():
            return None
        # Of equals the fewest PSs, then the fewest workers.
        ps, workers = divmod(int(np.where(possible, gains, -np.inf).argmax()), after.shape[1])
        gain = float(gains[ps, workers]) if math.isfinite(before) else math.inf
        return _Jump(Allocation(workers, ps), gain)


def _shares(group: JobGroup) -> Floats:
    """Dominant share of the cluster that so many PSs and workers more take; shape (max_ps + 1, max_workers + 1)."""
    request = group.job.request
    worker, ps, whole = (dict(amounts.thousandths) for amounts in (request.worker, request.ps, group.capacity))
    shares = np.zeros((request.max_ps + 1, request.max_workers + 1))
    more_ps, more_workers = np.indices(shares.shape)
    for name in {*worker, *ps}:
        taken = more_workers * worker.get(name, 0) + more_ps * ps.get(name, 0)
        part = taken / whole[name] if whole.get(name) else np.where(taken > 0, np.inf, 0.0)
        np.maximum(shares, part, out=shares)
    return shares


class Lookahead:
    """Like Optimus, but not one task at a time: a job may jump to any larger size.

    Each job starts at its minimum, in submit order. Then, again and again, the jump of any job to any larger size
    within its bounds is made that saves most remaining seconds per unit of the largest share of the cluster that the
    added tasks take of any one resource; of equal ones that of the job submitted first, with the fewest PSs, then
    workers. So a speed surface with dips and flat parts, where one task more brings nothing but several do, is no
    obstacle. Jumps that save less than 1 % of the job's remaining time are not made.

    A jump that has no room is undone and cut down: from then on the job may have an eighth fewer of the tasks that the
    jump adds in the role that had no room (at least one fewer), and queues again with its best jump within that. It
    gets no more when that leaves no jump that is worthwhile.

    Speeds are those that may be hoped for (``dl2d.throughput.gaussian_process``): of sizes that are believed to be
    equally fast the one of which less is known is the better one to run at, for it is measured there. Or they are told.
    Alternatives are scored by gains: 0 for staying as it is.

    No paper: it is what a perfect hill climb could do where Optimus stops at the first dip, as a baseline.

    Parameters
    ----------
    known
        The true speeds, instead of believed ones: ``lookahead-true``.
    optimism
        Deviations that are added to the mean of what is believed; below 0 it goes by the lower bound.
    resize_seconds, slot_seconds
        What a resize costs, so that a job's size is changed only where it pays, of believed speeds; the length of an
        interval.
    """

    def __init__(
        self,
        *,
        known: KnownSpeeds | None = None,
        optimism: float = DEFAULT_OPTIMISM,
        resize_seconds: float = 0.0,
        slot_seconds: float = 1200.0,
    ) -> None:
        if not math.isfinite(optimism):
            raise ValueError(f"optimism: must be a number, not {optimism!r}")
        if not (0 <= resize_seconds < math.inf and 0 < slot_seconds < math.inf):
            raise ValueError(
                f"resize_seconds must be 0 or more, slot_seconds over 0, not {resize_seconds!r} and {slot_seconds!r}"
            )
        self._known = known
        self._optimism = optimism
        #: Fraction of a slot that a resize costs.
        self._lost = resize_seconds / slot_seconds
        if known is not None:
            self.name, self.version, self.needs = "lookahead-true", "2", NO_EVIDENCE
            return
        self.name = "lookahead"
        settings = f" optimism={optimism:g}" if optimism != DEFAULT_OPTIMISM else ""
        costs = f" resize_seconds={resize_seconds:g} slot_seconds={slot_seconds:g}" if resize_seconds else ""
        #: Version of the code, and the settings where they are not the usual.
        self.version = "4" + settings + costs
        #: Speeds, those of each job too.
        self.needs = frozenset({Evidence.SPEEDS, Evidence.JOB_SPEEDS})

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``. Cost: tasks x log nodes, jumps x log jobs, a grid for each size reached."""
        del rng
        known = self._known or PredictedSpeeds(snapshot, optimism=self._optimism, lost=self._lost)
        growing = GrowingJobs(snapshot, packing, known=known)
        left = [samples_left(job) for job in snapshot.jobs]
        jumps: dict[JobGroup | None, _Jumps] = {
            group: _Jumps(group) for group in dict.fromkeys(growing.groups) if group is not None
        }
        stopped = _fill(growing, left, jumps)
        alternatives = {}
        for place, (job, group, size) in enumerate(zip(snapshot.jobs, growing.groups, growing.sizes, strict=True)):
            if group not in jumps:
                continue
            jump = jumps[group].best(size, job.request.max_size)
            growing.allocation.refuse(job, _reason(growing, place, left[place], jump, stopped.get(place)))
            scored = [Alternative(size, 0.0)]
            if jump is not None and math.isfinite(jump.gain):
                scored.append(Alternative(size.plus(jump.step), jump.gain * left[place]))
            alternatives[job.key] = tuple(scored)
        return growing.allocation.decision(
            self,
            measure="seconds saved per unit of dominant share",
            alternatives=alternatives,
        )


def _fill(growing: GrowingJobs, left: list[float], jumps: dict[JobGroup | None, _Jumps]) -> dict[int, Blocked]:
    """Make jumps until none is worthwhile or has room; returns what last stood in the way of which job."""
    most = [job.request.max_size for job in growing.jobs]
    stopped: dict[int, Blocked] = {}
    queue: list[tuple[float, int, Allocation]] = []

    def look(place: int) -> None:
        jump = jumps[growing.groups[place]].best(growing.sizes[place], most[place])
        if jump is not None:
            heapq.heappush(queue, (-jump.gain * left[place], place, jump.step))

    for place, group in enumerate(growing.groups):
        if group in jumps:
            look(place)
    while queue:
        _, place, step = heapq.heappop(queue)
        blocked = growing.add(place, step)
        if blocked is not None:
            stopped[place] = blocked
            most[place] = _cut(growing, place, step, most[place], blocked)
        look(place)
    return stopped


def _cut(growing: GrowingJobs, place: int, step: Allocation, most: Allocation, blocked: Blocked) -> Allocation:
    """The most that a job may have after a jump had no room."""
    size, worker = growing.sizes[place], blocked.role is Role.WORKER
    added = step.count(blocked.role)
    # Where there is no room for a single one, nothing is left to try.
    full = growing.known_full(place, Allocation(1, 0) if worker else Allocation(0, 1))
    kept = 0 if full else added - max(added // _CUT, 1)
    return Allocation(size.workers + kept, most.ps) if worker else Allocation(most.workers, size.ps + kept)


def _reason(growing: GrowingJobs, place: int, left: float, jump: _Jump | None, blocked: Blocked | None) -> Reason:
    size, group = growing.sizes[place], growing.groups[place]
    assert group is not None
    if jump is None:
        text = f"no larger size would save 1 % of its time at {group.speed(size)}"
        return Reason(
            Constraint.SATISFIED, f"has its maximum of {size}" if size == growing.jobs[place].request.max_size else text
        )
    assert blocked is not None, "a job with a worthwhile jump was stopped by something"
    larger = size.plus(jump.step)
    before, after = left * group.seconds_at(size), left * group.seconds_at(larger)
    text = f"{larger} would save {before - after:.4g} s of {before:.4g} s: {blocked}"
    return blocked.reason(text)
