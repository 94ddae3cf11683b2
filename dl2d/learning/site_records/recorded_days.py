"""Recorded days of a site: which jobs came when, how much they had to train, and on which nodes.

Days are those of a recorded history, or are put together from the hours of several.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from dl2d.core.jobs import NOTHING, Allocation, Architecture, Job, JobRequest, JobState, Owner
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds, TrainingKind
from dl2d.core.progress_callback import Count, uncounted
from dl2d.core.resources import Resources
from dl2d.core.store import ClusterState, History, RecordedSizes
from dl2d.simulation.speeds.speed_models import MAX_TASKS

DAY_SECONDS = 86_400.0
_HOUR_SECONDS = 3600.0
#: Epochs that a job which trains on beyond its declared epochs is assumed to need, as a multiple of those it has done.
_BEYOND_DECLARED = 1.1
#: Time for which a job that reports nothing and still runs is assumed to run, as a multiple of the time it has run: of
#: jobs that have run for some time, about half end within as long again (Harchol-Balter and Downey, 1997). Its time
#: limit says little.
_STILL_RUNS = 2.0
#: Least epochs that a job does.
_MIN_EPOCHS = 1e-6


@dataclass(frozen=True, slots=True)
class DayJob:
    """A job of a day: when it came, seconds from the day's beginning, and its epochs: really, and as declared."""

    request: JobRequest
    at: float
    epochs: float
    declared: float
    #: Sizes that it was recorded with; their times are in seconds from the day's beginning. If the job did not end on
    #: this day, the last one is the largest that it had, at the end of the day.
    sizes: RecordedSizes = ()
    #: Whether it ended before the day did.
    ended: bool = True
    #: Whose job it was; None for nobody known.
    owner: Owner | None = None
    #: Whether nobody reported its speed.
    unreported: bool = False
    #: Whether the job has ended, so that its number of epochs is known.
    length_known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """What came on one day, on which nodes. Jobs that were there when it began come at 0, with what they had left."""

    name: str
    #: Seconds since 1970; 0 for a day that was put together.
    begin: float
    jobs: tuple[DayJob, ...]
    #: What each node offered dl2d at most times of the day.
    nodes: tuple[Resources, ...]
    #: Policies that decided on this day.
    policies: frozenset[str] = frozenset()
    #: Times, as ``DayJob.at``, of the jobs that are left out since they do not fit these nodes.
    too_large: tuple[float, ...] = ()

    def includes(self, at: float) -> bool:
        """Whether a time, in seconds since 1970, is on this day."""
        return self.begin <= at < self.begin + DAY_SECONDS

    @property
    def submitted(self) -> int:
        """Number of jobs that were submitted on this day."""
        return sum(job.at > 0 for job in self.jobs)

    @property
    def has_ended_jobs(self) -> bool:
        """Whether any job that was submitted on this day has ended by now."""
        return any(job.at > 0 and job.length_known for job in self.jobs)

    @property
    def unreported(self) -> int:
        """Number of those of them whose speed nobody reported."""
        return sum(job.at > 0 and job.unreported for job in self.jobs)


def day_name(at: float) -> str:
    """The day (UTC) of a time in seconds since 1970, as YYYY-MM-DD."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def days_of(history: History, progress: Count = uncounted) -> tuple[Day, ...]:
    """The whole days (UTC) of a history on which jobs came, oldest first.

    Left out are days of which half or less was recorded, those of which jobs or decisions were deleted, jobs of kinds
    that never showed a speed, those that ended before they trained, and those that would not fit the nodes of their
    day, which may leave a day without jobs. ``progress`` is told how many of how many days were looked at.
    """
    begin = max(history.begin, math.ceil(history.complete_from / DAY_SECONDS) * DAY_SECONDS)
    numbers = range(int(begin // DAY_SECONDS), int(history.end // DAY_SECONDS))
    days, recorded = [], _recorded_seconds(history)
    for done, number in enumerate(numbers):
        progress(done, len(numbers))
        begin = number * DAY_SECONDS
        name = day_name(begin)
        day = _between(history, begin, begin + DAY_SECONDS, name)
        if day is not None and (day.submitted or day.too_large) and recorded.get(number, 0.0) > DAY_SECONDS / 2:
            days.append(day)
    return tuple(days)


def deleted_days(history: History, since: float) -> int:
    """Number of days (UTC) from a time on with slots, of which jobs or decisions were deleted."""
    times = (state.at for state in history.cluster_states if state.at >= since)
    days = {int(at // DAY_SECONDS) for at in times}
    return sum(day * DAY_SECONDS < history.complete_from for day in days)


def _recorded_seconds(history: History) -> Mapping[int, float]:
    """For how long each day (days since 1970) was recorded; the daemon may have started or stopped on it.

    That is from the first slot of the day to the last, and as long after it as slots usually are apart.
    """
    times = sorted(state.at for state in history.cluster_states)
    usual = statistics.median([later - earlier for earlier, later in itertools.pairwise(times)] or [0.0])
    days = ((day, list(seen)) for day, seen in itertools.groupby(times, lambda at: int(at // DAY_SECONDS)))
    return {day: min(seen[-1] + usual, (day + 1) * DAY_SECONDS) - seen[0] for day, seen in days}


def period_of(history: History, begin: float, end: float) -> Day | None:
    """All that came from the beginning of a day up to the end of that or a later one, as one long day.

    Its nodes are those of the first day. Left out is what ``days_of`` leaves out, and each job that was recorded with a
    size that does not fit these nodes: the site's scheduler could not be replayed. None where nobody saw the nodes.
    """
    return _between(history, begin, end, "the recorded days", as_recorded=True)


def _between(history: History, begin: float, end: float, name: str, *, as_recorded: bool = False) -> Day | None:
    """What came between two times; None where nobody saw the nodes on the first day."""
    cluster_states = [state for state in history.cluster_states if begin <= state.at < begin + DAY_SECONDS]
    if not cluster_states:
        return None
    known = {speeds.kind for speeds in history.speeds if any(each.samples_per_second > 0 for each in speeds.points)}
    nodes = _offered(cluster_states)
    jobs, too_large = [], []
    for job in history.jobs:
        found = _day_job(job, begin, end, history) if TrainingKind.of(job.request) in known else None
        if found is not None:
            sizes = {size for _, size in history.sizes.get(job.key, ())} if as_recorded else set()
            if _fits(job.request, nodes) and all(_size_fits(job.request, size, nodes) for size in sizes):
                jobs.append(found)
            elif found.at > 0:
                too_large.append(found.at)
    policies = frozenset(each.policy for each in cluster_states)
    return Day(
        name=name, begin=begin, jobs=tuple(jobs), nodes=nodes, policies=policies, too_large=tuple(too_large)
    )  # fmt: skip


def _offered(cluster_states: Sequence[ClusterState]) -> tuple[Resources, ...]:
    """What each node offered: the median over the states of each resource, without nodes that then offered nothing.

    One state may be of an hour in which nodes are drained, or held by others, as every night.
    """
    seen: dict[str, list[Resources]] = defaultdict(list)
    for state in cluster_states:
        for node in state.nodes:
            if node.is_open:
                seen[node.name].append(node.capacity.minus(node.used))
    missing = {name: [Resources()] * (len(cluster_states) - len(each)) for name, each in seen.items()}
    medians = (_median([*each, *missing[name]]) for name, each in seen.items())
    return tuple(node for node in medians if node.thousandths)


def _median(amounts: Sequence[Resources]) -> Resources:
    if len(set(amounts)) == 1:
        return amounts[0]
    by_resource = [dict(each.thousandths) for each in amounts]
    names = sorted({name for each in by_resource for name in each})
    medians = ((name, statistics.median_high([each.get(name, 0) for each in by_resource])) for name in names)
    return Resources(tuple((name, amount) for name, amount in medians if amount))


def resampled(days: Sequence[Day], rng: np.random.Generator) -> Day:
    """A day put together from several: each of its 24 hours is that hour of one of them, drawn evenly.

    The nodes, and the jobs that are there when it begins, are those of its first hour's day.
    """
    drawn = rng.integers(len(days), size=24).tolist()
    jobs: list[DayJob] = [job for job in days[drawn[0]].jobs if job.at == 0]
    for hour, which in enumerate(drawn):
        begin = hour * _HOUR_SECONDS
        jobs += [job for job in days[which].jobs if job.at > 0 and begin <= job.at < begin + _HOUR_SECONDS]
    nodes = days[drawn[0]].nodes
    fitting = tuple(job for job in jobs if _fits(job.request, nodes))
    return Day(name="drawn", begin=0.0, jobs=fitting, nodes=nodes)


def thinned(day: Day, most: int, rng: np.random.Generator) -> Day:
    """A day of a smaller site: no more than about so many jobs, drawn evenly, and the same share of the nodes.

    How a policy sizes jobs does not depend on how many there are, but the time to play it does.
    """
    share = most / max(len(day.jobs), 1)
    if share >= 1.0:
        return day
    kept = rng.random(len(day.jobs)) < share
    count = max(1, round(share * len(day.nodes)))
    nodes = tuple(day.nodes[place] for place in sorted(rng.permutation(len(day.nodes))[:count].tolist()))
    jobs = tuple(job for job, stays in zip(day.jobs, kept.tolist(), strict=True) if stays and _fits(job.request, nodes))
    return replace(day, jobs=jobs, nodes=nodes)


def recorded_sizes(day: Day) -> dict[str, RecordedSizes]:
    """Sizes that the jobs of a day's workload were recorded with, by job id."""
    return {number: job.sizes for number, job in numbered(day)}


def numbered(day: Day) -> Iterable[tuple[str, DayJob]]:
    """The jobs of a day in submit order, and their ids in its workload."""
    return ((str(number), job) for number, job in enumerate(sorted(day.jobs, key=lambda job: job.at), start=1))


def learnt_from(history: History, days: Sequence[Day]) -> tuple[MeasuredSpeeds, ...]:
    """What was measured of the kinds that came on these days."""
    kinds = {TrainingKind.of(job.request) for day in days for job in day.jobs}
    return tuple(speeds for speeds in history.speeds if speeds.kind in kinds)


def _day_job(job: Job, begin: float, end: float, history: History) -> DayJob | None:
    """What a job meant to a day, from ``begin`` to ``end``; None if it was not there, or its length is unknown."""
    submitted, request = float(job.key.submitted), job.request
    real = _epochs_of(job)
    if real is None or submitted >= end or (job.ended_at is not None and job.ended_at <= begin):
        return None
    sizes = tuple((at - begin, size) for at, size in history.sizes.get(job.key, ()) if at < end)
    ended = job.ended_at is not None and job.ended_at < end
    if not ended:  # one that was paused or waiting then goes on
        sizes += ((end - begin, max((size for _, size in sizes), key=sum, default=request.min_size)),)
    if submitted >= begin:
        # At 0 stand those that were there before.
        at, left, declared = max(submitted - begin, 1e-3), real, request.epochs
    else:
        done = next(
            (each.epochs[job.key] for each in history.cluster_states if each.at >= begin and job.key in each.epochs),
            real,
        )
        if done >= real:
            return None
        at, left, declared = 0.0, max(real - done, _MIN_EPOCHS), max(request.epochs - done, _MIN_EPOCHS)
    if job.static:  # earlier versions of dl2d recorded no size in its request
        size = next((size for _, size in sizes if size != NOTHING), request.asked_size)
        request = replace(request, asked_size=size)
    return DayJob(request, at, left, declared, sizes, ended, job.owner, job.unreported, job.state.ended)


def _epochs_of(job: Job) -> float | None:
    """How many epochs a job really takes, whatever its user declared; None if it never trained, or nobody knows."""
    done, declared = job.progress.epoch, job.request.epochs
    if job.state is JobState.FINISHED and job.unreported and done <= 0:  # declared is its time limit
        return None if job.started_at is None else _MIN_EPOCHS
    if job.state is JobState.FINISHED:
        return max(done, _MIN_EPOCHS) if done > 0 else declared
    if job.state.ended:
        return max(done, _MIN_EPOCHS) if done > 0 else None
    if job.unreported and 0 < done * _STILL_RUNS < declared:
        return done * _STILL_RUNS
    return max(declared, done * _BEYOND_DECLARED)


def _fits(request: JobRequest, nodes: Sequence[Resources]) -> bool:
    """Whether a job's minimum size can run on empty nodes."""
    ps = max(request.min_ps, 1) if request.architecture is Architecture.PS else 0
    workers = request.min_size.workers
    return bool(workers) and _size_fits(request, Allocation(workers, ps), nodes)


def _size_fits(request: JobRequest, size: Allocation, nodes: Sequence[Resources]) -> bool:
    """Whether a job can run with a size on empty nodes; no replay has more than ``MAX_TASKS`` tasks of a role."""
    if max(size) > MAX_TASKS:
        return False
    for demand, count in ((request.worker, size.workers), (request.ps, size.ps)):
        if sum(_room(node, demand, count) for node in nodes) < count:
            return False
    return (request.worker * size.workers + request.ps * size.ps).fits_in(Resources.total(nodes))


def _room(node: Resources, demand: Resources, most: int) -> int:
    have = dict(node.thousandths)
    return min((have.get(name, 0) // amount for name, amount in demand.thousandths if amount), default=most)
