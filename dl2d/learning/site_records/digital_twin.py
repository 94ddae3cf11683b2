"""The twin: workloads for the simulator, made from what a site recorded. Pure: recorded days in, workloads out.

A site has one cluster, and no table of speeds. What is known of its speeds is what it measured, and how uncertain the
rest is: each workload has speeds of its own, drawn from the throughput model (``dl2d.throughput.gaussian_process``),
so that what is learned holds for whatever the truth may be. Arrivals are those of recorded days (``recorded_days``), or
of days put together from several.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from dl2d.core.array_types import Floats
from dl2d.core.jobs import Architecture, JobRequest
from dl2d.core.measured_speeds_and_losses import TrainingKind
from dl2d.core.store import History
from dl2d.learning.site_records.recorded_days import Day, numbered
from dl2d.simulation.realism import Realism
from dl2d.simulation.speeds.speed_models import MAX_TASKS, Table
from dl2d.simulation.workload.workload_file import NodeGroup, SimulatedJob, Workload
from dl2d.throughput.gaussian_process import GaussianProcess

#: Share of a draw's deviation that all kinds have in common, as squares; and how far it reaches, in doublings.
_COMMON, _REACH = 0.5, 1.5
#: Largest count of one role that a draw is made for itself; those between are interpolated.
_MAX_COUNTS = 24
_JITTER = 1e-9
#: A site's cluster is what it is; fewer nodes stand for busier days.
NODE_PARTS = (1.0, 1 / 2, 1 / 4)


class Speeds:
    """Predicted speeds of a site's kinds of jobs: means, and draws from what is uncertain.

    A draw has at each size the model's mean and deviation; how far sizes go up and down together is a Matern-3/2
    field over the doublings of workers and PSs, half of it common to all kinds. (The model's joint distribution is not
    drawn from: its correlations near what was measured differ a little.)

    Parameters
    ----------
    model
        From what was measured.
    requests
        Of all jobs; kinds are drawn up to the largest bounds among them.
    assumed
        Kinds of which nothing was measured: drawn speeds are lowered where more tasks would do more than in proportion.
    """

    def __init__(
        self, model: GaussianProcess, requests: Iterable[JobRequest], assumed: Container[TrainingKind] = ()
    ) -> None:
        largest: dict[TrainingKind, JobRequest] = {}
        for request in requests:
            kind = TrainingKind.of(request)
            before = largest.get(kind, request)
            largest[kind] = replace(
                request,
                max_workers=min(max(before.max_workers, request.max_workers), MAX_TASKS),
                max_ps=min(max(before.max_ps, request.max_ps), MAX_TASKS),
            )
        self._known = {kind: model.predict_log_speeds(largest[kind]) for kind in sorted(largest)}
        self._assumed = assumed
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
            speeds = np.exp(mean + deviation * noise)
            tables[kind] = _table(kind, _at_most_in_proportion(speeds) if kind in self._assumed else speeds)
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
    fail. Models are called as the site calls them. Where one model trains in several ways, those that are rarer go by
    another name, under which a policy knows nothing of them.
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
                asked_size=request.asked_size,
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


def _at_most_in_proportion(speeds: Floats) -> Floats:
    """Speeds, by PSs and workers, lowered where twice the workers, or twice the PSs, would do more than twice as much.

    Counts of 0 stay as they are.
    """
    for axis in range(speeds.ndim):
        some = np.moveaxis(speeds, axis, -1)[..., 1:]
        counts = np.arange(1, some.shape[-1] + 1)
        some[...] = np.minimum.accumulate(some / counts, axis=-1) * counts
    return speeds


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
    if most <= _MAX_COUNTS:
        return np.arange(1.0, most + 1.0)
    return np.unique(np.round(np.geomspace(1.0, most, _MAX_COUNTS)))
