"""The twin: workloads for the simulator, made from what a site recorded. Pure: a history in, workloads out.

A site has one cluster, and no table of speeds. What is known of its speeds is what it measured, and how uncertain the
rest is: each workload has speeds of its own, drawn from the belief (``dl2d.throughput.gaussian_process``), so that
what is learned holds for whatever the truth may be. Arrivals are those of recorded days, or of days put together from
several.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final

import numpy as np

from dl2d.core.array_types import Floats
from dl2d.core.cluster import NodeState
from dl2d.core.jobs import Architecture, Job, JobRequest, JobState, Owner
from dl2d.core.measured_speeds import MeasuredSpeeds, TrainingKind
from dl2d.core.resources import Resources
from dl2d.core.site_history import History, RecordedSizes
from dl2d.simulation.speeds.realism_options import Realism
from dl2d.simulation.speeds.speed_models import MAX_TASKS, Table
from dl2d.simulation.workload.format import NodeGroup, SimulatedJob, Workload
from dl2d.throughput.gaussian_process import GaussianProcess

DAY_SECONDS: Final = 86_400.0
_HOUR_SECONDS: Final = 3600.0
#: A job that trains on beyond its declared epochs is taken to need this part more than it has done.
_BEYOND: Final = 1.1
#: Least part of an epoch that a job does.
_LEAST_EPOCHS: Final = 1e-6
#: Share of a draw's deviation that all kinds have in common, as squares; and how far it reaches, in doublings.
_COMMON, _REACH = 0.5, 1.5
#: Largest count of one role that a draw is made for itself; those between are interpolated.
_MOST_COUNTS: Final = 24
_JITTER: Final = 1e-9


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """What came on one day, on which nodes. Jobs that were there when it began come at 0, with what they had left."""

    name: str
    #: Seconds since 1970; 0 for a day that was put together.
    begin: float
    jobs: tuple[DayJob, ...]
    #: What each node offered dl2d.
    nodes: tuple[Resources, ...]
    #: Policies that decided on this day.
    policies: frozenset[str] = frozenset()

    def includes(self, at: float) -> bool:
        """Whether a time, in seconds since 1970, is on this day."""
        return self.begin <= at < self.begin + DAY_SECONDS

    @property
    def submitted(self) -> int:
        """Number of jobs that were submitted on this day."""
        return sum(job.at > 0 for job in self.jobs)

    @property
    def unreported(self) -> int:
        """Number of those of them whose speed nobody reported."""
        return sum(job.at > 0 and job.unreported for job in self.jobs)


def day_name(at: float) -> str:
    """The day (UTC) of a time in seconds since 1970, as YYYY-MM-DD."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def days_of(history: History) -> tuple[Day, ...]:
    """The whole days (UTC) of a history on which jobs came, oldest first.

    Left out are jobs of kinds that never showed a speed, those that ended before they trained, and those that would not
    fit the nodes of their day.
    """
    first = int(history.begin // DAY_SECONDS)
    days = []
    for number in range(first, int(history.end // DAY_SECONDS)):
        begin = number * DAY_SECONDS
        name = day_name(begin)
        day = _between(history, begin, begin + DAY_SECONDS, name)
        if day is not None and day.submitted:
            days.append(day)
    return tuple(days)


def period_of(history: History, begin: float, end: float) -> Day | None:
    """All that came from the beginning of a day up to the end of that or a later one, as one long day.

    Its nodes are those of the first day. Left out is what ``days_of`` leaves out; None where nobody saw the nodes.
    """
    return _between(history, begin, end, "the recorded days")


def _between(history: History, begin: float, end: float, name: str) -> Day | None:
    """What came between two times; None where nobody saw the nodes on the first day."""
    sights = [sight for sight in history.sights if begin <= sight.at < begin + DAY_SECONDS]
    if not sights:
        return None
    known = {speeds.kind for speeds in history.speeds if any(each.samples_per_second > 0 for each in speeds.points)}
    nodes = tuple(node.capacity.minus(node.used) for node in sights[0].nodes if node.state is NodeState.UP)
    found = (_day_job(job, begin, end, history) for job in history.jobs if TrainingKind.of(job.request) in known)
    jobs = tuple(job for job in found if job is not None and _fits(job.request, nodes))
    return Day(name=name, begin=begin, jobs=jobs, nodes=nodes, policies=frozenset(each.policy for each in sights))


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


class Speeds:
    """Speeds of a site's kinds of jobs, as they are believed: means, and draws from what is uncertain.

    A draw has at each size the belief's own mean and deviation; how far sizes go up and down together is a Matern-3/2
    field over the doublings of workers and PSs, half of it common to all kinds. (The belief's joint distribution is not
    drawn from: its correlations near what was measured differ a little.)

    Parameters
    ----------
    belief
        From what was measured.
    requests
        Of all jobs; kinds are drawn up to the largest bounds among them.
    """

    def __init__(self, belief: GaussianProcess, requests: Iterable[JobRequest]) -> None:
        largest: dict[TrainingKind, JobRequest] = {}
        for request in requests:
            kind = TrainingKind.of(request)
            before = largest.get(kind, request)
            largest[kind] = replace(
                request,
                max_workers=min(max(before.max_workers, request.max_workers), MAX_TASKS),
                max_ps=min(max(before.max_ps, request.max_ps), MAX_TASKS),
            )
        self._known = {kind: belief.predict_log_speeds(largest[kind]) for kind in sorted(largest)}
        self._factors: dict[tuple[int, int], _Field] = {}

    def means(self) -> dict[TrainingKind, Table]:
        """What is believed."""
        return {kind: _table(kind, np.exp(mean)) for kind, (mean, _) in self._known.items()}

    def draw(self, rng: np.random.Generator) -> dict[TrainingKind, Table]:
        """What may be true."""
        tables: dict[TrainingKind, Table] = {}
        if not self._known:
            return tables
        shapes = [mean.shape for mean, _ in self._known.values()]
        common = self._field(tuple(max(sizes) for sizes in zip(*shapes, strict=True)), rng)
        for kind, (mean, deviation) in self._known.items():
            own = self._field(mean.shape, rng)
            shared = common[: mean.shape[0], : mean.shape[1]]
            noise = np.sqrt(_COMMON) * shared + np.sqrt(1.0 - _COMMON) * own
            tables[kind] = _table(kind, np.exp(mean + deviation * noise))
        return tables

    def _field(self, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
        rows, columns = shape
        if (rows, columns) not in self._factors:
            self._factors[rows, columns] = _Field(rows, columns)
        return self._factors[rows, columns].draw(rng)


class _Field:
    """Standard normal numbers over PSs and workers, shape (rows, columns), that go together where sizes are near."""

    def __init__(self, rows: int, columns: int) -> None:
        self._ps, self._workers = _counts(rows), _counts(columns)
        at = np.stack(np.meshgrid(np.log2(self._ps), np.log2(self._workers), indexing="ij"), axis=-1).reshape(-1, 2)
        distances = np.hypot(at[:, None, 0] - at[None, :, 0], at[:, None, 1] - at[None, :, 1])
        scaled = distances * np.sqrt(3.0) / _REACH
        covariance = (1.0 + scaled) * np.exp(-scaled) + _JITTER * np.eye(len(at))
        self._factor = np.linalg.cholesky(covariance)
        self._shape = rows, columns

    def draw(self, rng: np.random.Generator) -> Floats:
        field = (self._factor @ rng.normal(size=len(self._factor))).reshape(len(self._ps), len(self._workers))
        rows, columns = self._shape
        wanted = np.log2(np.maximum(np.arange(float(columns)), 1.0))
        wide = np.stack([np.interp(wanted, np.log2(self._workers), row) for row in field])
        wanted = np.log2(np.maximum(np.arange(float(rows)), 1.0))
        return np.stack([np.interp(wanted, np.log2(self._ps), column) for column in wide.T], axis=1)


def workload_of(day: Day, speeds: Mapping[TrainingKind, Table], slot_seconds: float) -> Workload | None:
    """A day as the simulator takes it; None where nothing is left of it.

    Left out are jobs of unknown speed, and those that would never get on: all sizes that they may have were seen to
    fail. Models are called as the
    site calls them. Where one model trains in several ways, those that are rarer go by another name, under which a
    policy knows nothing of them.
    """
    jobs: list[SimulatedJob] = []
    trains: dict[tuple[TrainingKind, int, int, tuple[int, ...]], bool] = {}
    names = _names([kind for job in day.jobs if (kind := TrainingKind.of(job.request)) in speeds])
    for number, job in numbered(day):
        request, kind = job.request, TrainingKind.of(job.request)
        has_ps = request.architecture is Architecture.PS
        if kind not in names:
            continue
        bounds = (kind, request.max_workers, request.max_ps, request.allowed_workers)
        if bounds not in trains:
            trains[bounds] = any(
                speed > 0 and request.allows(workers) and (not has_ps or request.min_ps <= ps <= request.max_ps)
                for ps, workers, speed in speeds[kind].points
            )
        if not trains[bounds]:
            continue
        jobs.append(
            SimulatedJob(
                id=number,
                model=names[kind],
                submit_slot=int(job.at // slot_seconds),
                epochs=job.epochs,
                declared_epochs=job.declared,
                samples_per_epoch=request.epoch_samples,
                worker=request.worker,
                ps=request.ps,
                min_workers=request.min_workers,
                max_workers=min(request.max_workers, MAX_TASKS),
                min_ps=request.min_ps if has_ps else 0,
                max_ps=min(request.max_ps, MAX_TASKS) if has_ps else 0,
                allowed_workers=tuple(count for count in request.allowed_workers if count <= MAX_TASKS),
                architecture=request.architecture,
                owner=job.owner,
            )
        )
    if not jobs:
        return None
    groups = Counter(day.nodes)
    return Workload(
        slot_seconds=slot_seconds,
        cluster=tuple(
            NodeGroup(count, resources, f"node{number}") for number, (resources, count) in enumerate(groups.items())
        ),
        speeds=MappingProxyType({name: speeds[kind] for kind, name in names.items()}),
        jobs=tuple(jobs),
        description=f"twin of {day.name}",
    )


def recorded_sizes(day: Day) -> dict[str, RecordedSizes]:
    """Sizes that the jobs of a day's workload were recorded with, by job id."""
    return {number: job.sizes for number, job in numbered(day)}


def numbered(day: Day) -> Iterable[tuple[str, DayJob]]:
    """The jobs of a day in submit order, and their ids in its workload."""
    return ((str(number), job) for number, job in enumerate(sorted(day.jobs, key=lambda job: job.at), start=1))


def costs_of(history: History) -> Realism:
    """What starting and resizing costs here, as far as it was measured: medians, so that a slow day says little.

    Until a task takes part its job trains with what it had; each task that comes or goes holds the job up for as long
    as its workers stood still.
    """
    standstill = [
        plan.suspension_max_ms / 1000 / (len(plan.added) + len(plan.removed))
        for plan in history.plans
        if plan.added or plan.removed
    ]
    return Realism(
        start_seconds=statistics.median(history.starts) if history.starts else 0.0,
        join_seconds=statistics.median(standstill) if standstill else 0.0,
    )


def learnt_from(history: History, days: Sequence[Day]) -> tuple[MeasuredSpeeds, ...]:
    """What was measured of the kinds that came on these days."""
    kinds = {TrainingKind.of(job.request) for day in days for job in day.jobs}
    return tuple(speeds for speeds in history.speeds if speeds.kind in kinds)


def _day_job(job: Job, begin: float, end: float, history: History) -> DayJob | None:
    """What a job meant to a day, from ``begin`` to ``end``; None if it was not there, or its length is unknown."""
    submitted, request = float(job.key.submitted), job.request
    real = _epochs(job)
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
            (each.epochs[job.key] for each in history.sights if each.at >= begin and job.key in each.epochs), real
        )
        if done >= real:
            return None
        at, left, declared = 0.0, max(real - done, _LEAST_EPOCHS), max(request.epochs - done, _LEAST_EPOCHS)
    return DayJob(request, at, left, declared, sizes, ended, job.owner, job.unreported)


def _epochs(job: Job) -> float | None:
    """How many epochs a job really takes; None for one that ended before it trained."""
    done, declared = job.progress.epoch, job.request.epochs
    if job.state is JobState.FINISHED:
        return max(done, _LEAST_EPOCHS) if done > 0 else declared
    if job.state.ended:
        return max(done, _LEAST_EPOCHS) if done > 0 else None
    return max(declared, done * _BEYOND)


def _fits(request: JobRequest, nodes: Sequence[Resources]) -> bool:
    """Whether a job's minimum size can run on empty nodes."""
    workers = request.min_size.workers
    if not workers or request.min_workers > MAX_TASKS or request.min_ps > MAX_TASKS:
        return False
    ps = max(request.min_ps, 1) if request.architecture is Architecture.PS else 0
    for demand, count in ((request.worker, workers), (request.ps, ps)):
        if sum(_room(node, demand, count) for node in nodes) < count:
            return False
    return (request.worker * workers + request.ps * ps).fits_in(Resources.total(nodes))


def _room(node: Resources, demand: Resources, most: int) -> int:
    have = dict(node.thousandths)
    return min((have.get(name, 0) // amount for name, amount in demand.thousandths if amount), default=most)


def _names(kinds: Sequence[TrainingKind]) -> dict[TrainingKind, str]:
    """What each kind is called in a workload: its model, where no other kind of that model is more frequent."""
    counted = Counter(kinds)
    by_model: dict[str, list[TrainingKind]] = defaultdict(list)
    for kind in sorted(counted, key=lambda kind: (-counted[kind], kind)):
        by_model[kind.model].append(kind)
    return {
        kind: model if not place else f"{model}-{kind.architecture}-{kind.consistency}"
        for model, own in by_model.items()
        for place, kind in enumerate(own)
    }


def _table(kind: TrainingKind, speeds: Floats) -> Table:
    collective = kind.architecture is Architecture.ALLREDUCE
    grid = speeds[:1] if collective else speeds[1:]
    first = 0 if collective else 1
    points = tuple(
        (ps, workers, float(speed))
        for ps, row in enumerate(grid.tolist(), start=first)
        for workers, speed in enumerate(row)
        if workers
    )
    return Table(points, kind.architecture, None, kind.consistency)


def _counts(size: int) -> Floats:
    """Counts from 1 up to size - 1 that are drawn for themselves."""
    most = max(size - 1, 1)
    if most <= _MOST_COUNTS:
        return np.arange(1.0, most + 1.0)
    return np.unique(np.round(np.geomspace(1.0, most, _MOST_COUNTS)))
