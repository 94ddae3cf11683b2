"""Locality: how much faster a job is where the placement lays it on as few nodes as hold it.

A step takes some seconds for computing and some for communication, and tasks on one node save a part of the latter:

    seconds per sample = computing / workers + communication * (1 - saved * share inside)

``computing`` is the least number of worker-seconds per sample at any known size; with servers half of that, for there
even a single worker communicates. ``share inside`` is the share of its communication that a job has within nodes when
it lies evenly on the fewest nodes (``share_inside``). ``saved`` is one number for the whole cluster, learned in tenths
from kinds whose speeds on different nodes are known.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dl2d.core.cluster import Node, NodeState, Snapshot
from dl2d.core.jobs import Architecture, JobRequest
from dl2d.core.measured_speeds import JobSpeeds, MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.core.resources import NO_RESOURCES, Resources

_Floats = NDArray[np.float64]

#: Prior mean and standard deviation of the part of communication that is saved. Synchronising takes 0.08 to 0.42 of the
#: time on one node as across nodes (medians of six models; Qiao et al., "Pollux", OSDI 2021, placement profiles).
_PRIOR: Final = (0.7, 0.3)
#: Values that are compared.
_CANDIDATES: Final = np.arange(10) / 10
#: Part of the least worker-seconds per sample that is computing, with servers.
_COMPUTING_WITH_PS: Final = 0.5
# Standard deviations of the logarithm of a measured speed from the known one: of all sizes of a kind alike, and of one
# size; and the largest difference that counts.
_KIND_DEVIATION: Final = 0.3
_SIZE_DEVIATION: Final = 0.1
_MAX_DIFFERENCE: Final = 0.5


class Locality:
    """Converts speeds between tasks on different nodes and on as few nodes as hold the job; see the module.

    Parameters
    ----------
    known
        Least worker-seconds per sample of kinds that ``apart`` knows; of others it is that of their measurements.
    apart
        Samples per second with all tasks on different nodes, as ``KnownSpeeds.grid`` has them.
    """

    def __init__(
        self, snapshot: Snapshot, known: Mapping[TrainingKind, float], apart: Callable[[JobRequest], _Floats]
    ) -> None:
        self._snapshot = snapshot
        self._node = _usual_capacity(snapshot.nodes)
        self._requests = largest_requests(snapshot)
        least = {speeds.kind: min_worker_seconds(speeds.points) for speeds in snapshot.speeds} | dict(known)
        self._computing = {
            kind: seconds * (_COMPUTING_WITH_PS if kind.architecture is Architecture.PS else 1.0)
            for kind, seconds in least.items()
        }
        self._saved = self._most_likely_saved(
            {kind: apart(request) for kind, request in self._requests.items() if kind in known}
        )

    def apart(self) -> Snapshot:
        """The snapshot with measured speeds converted to those with all tasks on different nodes."""
        kinds, jobs = self._requests, {job.key: job.request for job in self._snapshot.jobs}
        return replace(
            self._snapshot,
            speeds=tuple(
                MeasuredSpeeds(speeds.kind, self._points_apart(kinds[speeds.kind], speeds.points))
                if speeds.kind in kinds
                else speeds
                for speeds in self._snapshot.speeds
            ),
            job_speeds=tuple(
                JobSpeeds(speeds.job, self._points_apart(jobs[speeds.job], speeds.points))
                if speeds.job in jobs
                else speeds
                for speeds in self._snapshot.job_speeds
            ),
        )

    def together(self, request: JobRequest, rates: _Floats) -> _Floats:
        """Samples per second on as few nodes as hold the job, from those on different nodes; shape of ``rates``."""
        trains = rates > 0
        seconds = np.divide(1.0, rates, where=trains, out=np.ones_like(rates))
        workers = np.maximum(np.arange(rates.shape[1]), 1)
        computing = np.minimum(self._computing.get(TrainingKind.of(request), 0.0) / workers, seconds)
        communication = (seconds - computing) * (1.0 - self._saved * self._inside(request))
        return np.where(trains, 1.0 / (computing + communication), 0.0)

    def _points_apart(self, request: JobRequest, points: Sequence[SpeedPoint]) -> tuple[SpeedPoint, ...]:
        """The inverse of ``together``."""
        inside, computing = self._inside(request), self._computing.get(TrainingKind.of(request), 0.0)
        return tuple(
            _apart(point, computing / point.allocation.workers, self._saved * float(inside[point.allocation[::-1]]))
            if point.samples_per_second > 0 and _within(point, inside)
            else point
            for point in points
        )

    def _most_likely_saved(self, apart: Mapping[TrainingKind, _Floats]) -> float:
        """The most likely part of communication that is saved, by kinds whose speeds on different nodes are known.

        A kind may be faster or slower here altogether than where those were measured.
        """
        mean, deviation = _PRIOR
        unlikely = ((_CANDIDATES - mean) / deviation) ** 2
        for speeds in self._snapshot.speeds:
            known = apart.get(speeds.kind)
            points = () if known is None else [point for point in speeds.points if _is_known(point, known)]
            if known is None or not points:
                continue
            workers, ps = np.array([point.allocation for point in points]).T
            seconds = 1 / known[ps, workers]
            computing = np.minimum(self._computing[speeds.kind] / workers, seconds)
            inside = self._inside(self._requests[speeds.kind])[ps, workers]
            seconds = computing + (seconds - computing) * (1 - _CANDIDATES[:, None] * inside)
            off = np.log(np.array([point.samples_per_second for point in points]) * seconds)
            level = np.median(off, axis=1)
            of_sizes = np.minimum(np.abs(off - level[:, None]), _MAX_DIFFERENCE) / _SIZE_DEVIATION
            unlikely += of_sizes.sum(axis=1) + (level / _KIND_DEVIATION) ** 2
        return float(_CANDIDATES[unlikely.argmin()])

    def _inside(self, request: JobRequest) -> _Floats:
        return share_inside(
            request.architecture, request.worker, request.ps, self._node, request.max_workers, request.max_ps
        )


def min_worker_seconds(points: Iterable[SpeedPoint]) -> float:
    """Least worker-seconds per sample at any size; 0 where nothing was measured."""
    taken = [point.allocation.workers / point.samples_per_second for point in points if point.samples_per_second > 0]
    return min(taken, default=0.0)


@functools.lru_cache(maxsize=256)
def share_inside(
    architecture: Architecture, worker: Resources, ps: Resources, node: Resources, max_workers: int, max_ps: int
) -> _Floats:
    """Share of a job's communication within nodes when it lies evenly on as few such nodes as hold it.

    With servers that is the share of its worker-server pairs, without the share of neighbours in its ring.

    Returns
    -------
    Shape (max_ps + 1, max_workers + 1); 0 where no number of nodes holds the job. Not to be written to.
    """
    workers, servers = np.arange(max_workers + 1)[None], np.arange(max_ps + 1)[:, None]
    nodes = np.zeros((max_ps + 1, max_workers + 1), dtype=np.int64)
    one, other, whole = (dict(amounts.thousandths) for amounts in (worker, ps, node))
    for count in range(1, max(max_workers, max_ps) + 1):
        fits = nodes == 0
        for name in {*one, *other}:
            taken = -(-workers // count) * one.get(name, 0) + -(-servers // count) * other.get(name, 0)
            fits &= taken <= whole.get(name, 0)
        nodes[fits] = count
        if nodes.all():
            break
    some = np.maximum(nodes, 1)
    share = 1 / some if architecture is Architecture.PS else np.where(some > 1, 1 - some / np.maximum(workers, 1), 1.0)
    share = np.where(nodes > 0, share, 0.0)
    share.flags.writeable = False
    return share


def _usual_capacity(nodes: Sequence[Node]) -> Resources:
    """The most frequent capacity of a node."""
    capacities = Counter(node.capacity for node in nodes if node.state is NodeState.UP)
    return capacities.most_common(1)[0][0] if capacities else NO_RESOURCES


def largest_requests(snapshot: Snapshot) -> dict[TrainingKind, JobRequest]:
    """Of each kind the request with the largest bounds, the first of equals."""
    found: dict[TrainingKind, JobRequest] = {}
    for request in {id(job.request): job.request for job in snapshot.jobs}.values():
        kind = TrainingKind.of(request)
        if kind not in found or _bounds(request) > _bounds(found[kind]):
            found[kind] = request
    return found


def _bounds(request: JobRequest) -> tuple[int, int, int]:
    return request.max_workers + request.max_ps, request.max_workers, request.max_ps


def _apart(point: SpeedPoint, computing: float, saved: float) -> SpeedPoint:
    """A point as if no communication were saved, of which a part ``saved`` was; computing in seconds per sample."""
    speed = point.samples_per_second
    seconds = 1 / speed
    computing = min(computing, seconds)
    slower = 1 / (computing + (seconds - computing) / (1 - saved))
    return point._replace(samples_per_second=slower, previous_speed=point.previous_speed * slower / speed)


def _is_known(point: SpeedPoint, known: _Floats) -> bool:
    return point.samples_per_second > 0 and _within(point, known) and bool(known[point.allocation[::-1]] > 0)


def _within(point: SpeedPoint, grid: _Floats) -> bool:
    return bool(point.allocation.ps < grid.shape[0] and point.allocation.workers < grid.shape[1])
