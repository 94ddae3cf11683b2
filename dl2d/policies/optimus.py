"""Optimus: the task with the largest marginal gain is added first (Peng et al., EuroSys 2018)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dl2d.core.array_types import Floats
from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Alternative, Constraint, Decision, Reason
from dl2d.core.jobs import Allocation, Architecture, Job
from dl2d.core.measured_speeds_and_losses import KnownSpeeds
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.packing.room_in_limits import Blocked
from dl2d.core.policy import NO_EVIDENCE, Evidence
from dl2d.policies.common.marginal_gain import GrowingJobs, JobGroup, ended_at, seconds_per_sample
from dl2d.throughput.optimus_loss_curve import fit_losses
from dl2d.throughput.remaining_time import Remaining, samples_left, until_settled


class _Option(NamedTuple):
    """One PS more, or as many workers more as the next allowed count takes, for a job of some size."""

    step: Allocation
    #: Seconds saved per sample that is left, over the dominant share of the step unless shares do not count.
    gain: float


class _Choice(NamedTuple):
    """What a job of some size could be given next; ``best`` is None where nothing makes it faster."""

    options: tuple[_Option, ...]
    best: _Option | None


class _Steps:
    """Choices of the jobs of a group, computed once for each size that one of them reaches."""

    def __init__(self, group: JobGroup, seconds: Floats, *, by_resources: bool) -> None:
        """``seconds`` may go beyond what the jobs may have: ``seconds[ps, workers]``."""
        self._group = group
        self._seconds = seconds
        self._by_resources = by_resources
        self._choices: dict[Allocation, _Choice] = {}

    def at(self, size: Allocation) -> _Choice:
        """What a job of this size could be given."""
        choice = self._choices.get(size)
        if choice is None:
            choice = self._choices[size] = self._choose(size)
        return choice

    def _choose(self, size: Allocation) -> _Choice:
        request, (most_ps, most_workers) = self._group.job.request, self._seconds.shape
        steps = [Allocation(0, 1)] if request.architecture is Architecture.PS and size.ps + 1 < most_ps else []
        more = next((count for count in range(size.workers + 1, request.max_workers + 1) if request.allows(count)), 0)
        more = more or request.max_workers + 1
        if more < most_workers:
            steps.append(Allocation(more - size.workers, 0))
        options = tuple(_Option(step, self._gain(size, step)) for step in steps)
        best = max(options, key=lambda option: option.gain, default=None)  # of equals the first: the PS
        return _Choice(options, best if best is not None and best.gain > 0 else None)

    def _gain(self, size: Allocation, step: Allocation) -> float:
        before = float(self._seconds[size.ps, size.workers])
        after = float(self._seconds[size.plus(step)[::-1]])
        saved = before - after if math.isfinite(after) or math.isfinite(before) else 0.0
        if not self._by_resources:
            return saved
        share = self._group.share(step)
        if share == 0.0:
            return math.inf if saved > 0 else saved
        return saved / share if math.isfinite(share) else 0.0


class Optimus:
    """Adds, again and again, the task that saves most remaining time per unit of the resources it takes.

    Each job starts at its minimum, in submit order. The gain of one worker more is
    ``(t(p, w) - t(p, w + 1)) / share``, with t the remaining seconds (samples left over speed) and share the largest
    fraction of the cluster's capacity that the task takes of any one resource; that of one PS more likewise (paper,
    section 4.1, with shares in place of amounts, whose units differ from resource to resource). The larger of the two
    counts, the PS's where they are equal; the job with the largest goes first, the one submitted first where they are
    equal. A job whose task has no room gets no more, and all ends when no gain is positive. Where a job may have only
    some counts of workers, its step goes to the next of them.

    Speeds are fitted to what was measured (``dl2d.throughput.optimus_speed_model``, paper section 3.2); a size that was
    measured has the speed that it had. Jobs of kinds that were measured too little are sampled
    (``dl2d.policies.common.marginal_gain``).
    Alternatives are scored by gains: 0 for staying as it is.

    Parameters
    ----------
    known
        The true speeds, instead of fitted ones: ``optimus-true``.
    convergence
        A job ends when an epoch lowers its loss by less than this part of its largest loss, as fitted to its losses so
        far (``dl2d.throughput.optimus_loss_curve``, paper section 3.1): ``optimus-loss``. By default it ends after its
        declared epochs.
    sample_sizes
        Distinct sizes at which a kind is measured, at least, before its fit is used; never fewer than the function has
        terms: 5 for synchronous jobs, 4 for asynchronous ones, 3 for all-reduce.
    by_resources
        Divide gains by shares of resources; the DL2 authors' simulator does not.
    end_at_first_failure
        End for everybody at the first task that has no room, as the DL2 authors' simulator does.
    beyond
        Speeds of jobs that are alike for one worker and one PS more than they may have, shaped as
        ``KnownSpeeds.grid``. Such a step is looked at too, and where it is the better one the job gets no more, even of
        the other role, as in the DL2 authors' simulator.
    """

    def __init__(
        self,
        *,
        known: KnownSpeeds | None = None,
        convergence: float | None = None,
        sample_sizes: int = 0,
        by_resources: bool = True,
        end_at_first_failure: bool = False,
        beyond: Callable[[Job], Floats] | None = None,
    ) -> None:
        if convergence is not None and not convergence > 0:
            raise ValueError(f"convergence: must be more than 0, not {convergence!r}")
        if known is None:
            # On a busy machine its first import may take longer than a decision may.
            import scipy.optimize  # noqa: F401, PLC0415
        self._known = known
        self._convergence = convergence
        self._sample_sizes = sample_sizes
        self._by_resources = by_resources
        self._end_at_first_failure = end_at_first_failure
        self._beyond = beyond
        #: ``optimus``, with what it is told in place of measuring it.
        self.name = "optimus" + ("" if known is None else "-true") + ("" if convergence is None else "-loss")
        settings = {
            "convergence": convergence,
            "sample_sizes": sample_sizes,
            "by_resources": None if by_resources else "no",
            "end_at_first_failure": end_at_first_failure,
            "beyond": None if beyond is None else "yes",
        }
        #: Version of the code, and the settings that change decisions where they are not the usual.
        self.version = " ".join(["2", *(f"{key}={value}" for key, value in settings.items() if value)])
        #: Speeds unless it is told, and losses where they tell when a job ends.
        self.needs = NO_EVIDENCE if known is not None else frozenset({Evidence.SPEEDS})
        if convergence is not None:
            self.needs |= {Evidence.LOSSES}

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``. Cost: tasks x (log jobs + log nodes), and a grid for each kind of job."""
        del rng
        growing = GrowingJobs(
            snapshot,
            packing,
            known=self._known,
            sample_sizes=self._sample_sizes,
            end_at_first_failure=self._end_at_first_failure,
        )
        left = self._remaining(snapshot)
        steps: dict[JobGroup | None, _Steps] = {}
        for group in dict.fromkeys(growing.groups):
            if group is not None:
                seconds = group.seconds if self._beyond is None else seconds_per_sample(self._beyond(group.job))
                steps[group] = _Steps(group, seconds, by_resources=self._by_resources)
        if growing.ended is None:
            self._fill(growing, left, steps)
        alternatives = {}
        for place, (job, group, size) in enumerate(zip(snapshot.jobs, growing.groups, growing.sizes, strict=True)):
            if group in steps:
                choice = steps[group].at(size)
                growing.allocation.refuse(job, growing.ended or _satisfied(growing, place, choice, left[place]))
                alternatives[job.key] = _alternatives(size, job, choice, left[place].samples)
        unit = "seconds saved per unit of dominant share" if self._by_resources else "seconds saved"
        return growing.allocation.decision(self, measure=unit, alternatives=alternatives)

    def _fill(self, growing: GrowingJobs, left: list[Remaining], steps: dict[JobGroup | None, _Steps]) -> None:
        """Add tasks until no gain is positive or none has room."""
        queue = [
            (-best.gain * remaining.samples, place, best.step)
            for place, (group, size, remaining) in enumerate(zip(growing.groups, growing.sizes, left, strict=True))
            if group in steps and (best := steps[group].at(size).best) is not None
        ]
        heapq.heapify(queue)
        while queue:
            _, place, step = queue[0]
            job = growing.jobs[place]
            if _is_beyond(job, growing.sizes[place], step):
                growing.allocation.refuse(job, Reason(Constraint.SATISFIED, _beyond(step)))
            elif (blocked := growing.add(place, step)) is not None:
                growing.allocation.refuse(job, _no_room(growing, place, step, blocked, left[place]))
                if self._end_at_first_failure and blocked.constraint is not Constraint.LIMIT:
                    growing.ended = ended_at(job)
                    return
            elif (best := steps[growing.groups[place]].at(growing.sizes[place]).best) is not None:
                heapq.heapreplace(queue, (-best.gain * left[place].samples, place, best.step))
                continue
            heapq.heappop(queue)

    def _remaining(self, snapshot: Snapshot) -> list[Remaining]:
        if self._convergence is None:
            return [Remaining(samples_left(job)) for job in snapshot.jobs]
        fits = fit_losses([loss.points for loss in snapshot.losses])
        of_job = {loss.job: fit for loss, fit in zip(snapshot.losses, fits, strict=True)}
        return [until_settled(job, of_job.get(job.key), self._convergence) for job in snapshot.jobs]


def _beyond(step: Allocation) -> str:
    role, other = ("workers", "PS") if step.workers else ("PSs", "worker")
    return f"has its maximum of {role}, and one more of them would help more than a {other}"


def _is_beyond(job: Job, size: Allocation, step: Allocation) -> bool:
    return not job.request.max_size.covers(size.plus(step))


def _no_room(growing: GrowingJobs, place: int, step: Allocation, blocked: Blocked, left: Remaining) -> Reason:
    size, group = growing.sizes[place], growing.groups[place]
    assert group is not None
    before = left.samples * group.seconds_at(size)
    saved = before - left.samples * group.seconds_at(size.plus(step))
    tasks = "1 PS" if step.ps else f"{step.workers} worker{'' if step.workers == 1 else 's'}"
    text = f"{tasks} more would save {saved:.4g} s of {before:.4g} s: {blocked}"
    return blocked.reason(_noted(text, left))


def _satisfied(growing: GrowingJobs, place: int, choice: _Choice, left: Remaining) -> Reason:
    size, group = growing.sizes[place], growing.groups[place]
    assert group is not None
    if not choice.options:
        text = f"has its maximum of {size}"
    else:
        text = f"one task more would not make it faster than {group.speed(size)}"
    return Reason(Constraint.SATISFIED, _noted(text, left))


def _noted(text: str, left: Remaining) -> str:
    return f"{text}; work left {left.note}" if left.note else text


def _alternatives(size: Allocation, job: Job, choice: _Choice, samples: float) -> tuple[Alternative, ...]:
    """The size as it is and with a task more of either role, in that order; those with a finite gain."""
    scored = [Alternative(size, 0.0)]
    for step, gain in choice.options:
        if not _is_beyond(job, size, step) and math.isfinite(gain):
            scored.append(Alternative(size.plus(step), gain * samples))
    return tuple(scored)


def until_losses_settle() -> Optimus:
    """``optimus-loss``: a job ends when an epoch lowers its loss by less than a thousandth of its largest loss."""
    return Optimus(convergence=0.001)
