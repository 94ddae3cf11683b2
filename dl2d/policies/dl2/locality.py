"""What it does to a job's speed that some of its tasks are on one node.

Where jobs are laid on as few nodes as hold them, sizes that fit on one node are faster than what was measured of tasks
on different nodes leads to expect, and what they showed says too much of sizes that do not fit.
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
from dl2d.core.measured import JobSpeeds, MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.core.resources import NO_RESOURCES, Resources

_Floats = NDArray[np.float64]

#: Share of its talk that a pair of tasks on one node is spared, before anything is measured, and its deviation.
#: Synchronising takes 0.08 to 0.42 of the time on one node as across nodes (medians of six models; Qiao et al.,
#: "Pollux", OSDI 2021, the published placement profiles).
_SPARED: Final = (0.7, 0.3)
#: The shares that are weighed against each other.
_SHARES: Final = np.arange(10) / 10
#: Part of the least worker-seconds a sample that counts as computing with servers: a single worker talks to them, too.
_COMPUTING: Final = 0.5
#: Deviations of the logarithm of a speed from what is known of it: of all of a kind, and of a size. What is farther off
#: counts as this far.
_LEVEL: Final = 0.3
_OFF: Final = 0.1
_FAR: Final = 0.5


class Locality:
    """Speeds as if all tasks of a job were on different nodes, and as they are on as few nodes as hold the job.

    A step is computing, of which each of w workers does a part, and talk. Computing is what the least worker-seconds
    that a sample takes at any size say: with servers half of them, and without all, for a single worker has nobody to
    talk to. The rest is talk, of which a part is spared for the share of it that stays on a node: with servers, pairs
    of a worker and a server; without, neighbours in a ring. How large that part is, is learned.

    Parameters
    ----------
    known
        Least worker-seconds a sample of kinds that ``apart`` knows; others go by what was measured of them.
    apart
        Samples per second with all tasks on different nodes, as ``KnownSpeeds.grid`` has them.
    """

    def __init__(
        self, snapshot: Snapshot, known: Mapping[TrainingKind, float], apart: Callable[[JobRequest], _Floats]
    ) -> None:
        self._snapshot = snapshot
        self._node = _usual(snapshot.nodes)
        self._requests = largest_requests(snapshot)
        least = {speeds.kind: min_worker_seconds(speeds.points) for speeds in snapshot.speeds} | dict(known)
        self._computing = {
            kind: seconds * (_COMPUTING if kind.architecture is Architecture.PS else 1.0)
            for kind, seconds in least.items()
        }
        self._spared = self._likeliest(
            {kind: apart(request) for kind, request in self._requests.items() if kind in known}
        )

    def apart(self) -> Snapshot:
        """The snapshot with speeds as if all tasks of a job were on different nodes."""
        kinds, jobs = self._requests, {job.key: job.request for job in self._snapshot.jobs}
        return replace(
            self._snapshot,
            speeds=tuple(
                MeasuredSpeeds(speeds.kind, self._slower(kinds[speeds.kind], speeds.points))
                if speeds.kind in kinds
                else speeds
                for speeds in self._snapshot.speeds
            ),
            job_speeds=tuple(
                JobSpeeds(speeds.job, self._slower(jobs[speeds.job], speeds.points)) if speeds.job in jobs else speeds
                for speeds in self._snapshot.job_speeds
            ),
        )

    def together(self, request: JobRequest, rates: _Floats) -> _Floats:
        """Samples per second on as few nodes as hold the job, given those with all tasks apart; shape as ``rates``."""
        trains = rates > 0
        seconds = np.divide(1.0, rates, where=trains, out=np.ones_like(rates))
        workers = np.maximum(np.arange(rates.shape[1]), 1)
        computing = np.minimum(self._computing.get(TrainingKind.of(request), 0.0) / workers, seconds)
        talk = (seconds - computing) * (1.0 - self._spared * self._inside(request))
        return np.where(trains, 1.0 / (computing + talk), 0.0)

    def key(self, request: JobRequest) -> tuple[object, ...]:
        """What ``together`` depends on beside its arguments."""
        return self._node, self._spared, self._computing.get(TrainingKind.of(request), 0.0)

    def _slower(self, request: JobRequest, points: Sequence[SpeedPoint]) -> tuple[SpeedPoint, ...]:
        """The inverse of ``together``."""
        inside_, computing = self._inside(request), self._computing.get(TrainingKind.of(request), 0.0)
        return tuple(
            _slower(point, computing / point.allocation.workers, self._spared * float(inside_[point.allocation[::-1]]))
            if point.samples_per_second > 0 and _within(point, inside_)
            else point
            for point in points
        )

    def _likeliest(self, apart: Mapping[TrainingKind, _Floats]) -> float:
        """The part of talk that is spared, by sizes of which it is known how fast they are with all tasks apart.

        A kind may be faster or slower here than where that was measured; how its sizes differ tells.
        """
        usual, doubt = _SPARED
        unlikely = ((_SHARES - usual) / doubt) ** 2
        for speeds in self._snapshot.speeds:
            known = apart.get(speeds.kind)
            points = () if known is None else [point for point in speeds.points if _shows(point, known)]
            if known is None or not points:
                continue
            workers, ps = np.array([point.allocation for point in points]).T
            seconds = 1 / known[ps, workers]
            computing = np.minimum(self._computing[speeds.kind] / workers, seconds)
            inside_ = self._inside(self._requests[speeds.kind])[ps, workers]
            seconds = computing + (seconds - computing) * (1 - _SHARES[:, None] * inside_)
            off = np.log(np.array([point.samples_per_second for point in points]) * seconds)
            level = np.median(off, axis=1)
            unlikely += (np.minimum(np.abs(off - level[:, None]), _FAR) / _OFF).sum(axis=1) + (level / _LEVEL) ** 2
        return float(_SHARES[unlikely.argmin()])

    def _inside(self, request: JobRequest) -> _Floats:
        return share_inside(
            request.architecture, request.worker, request.ps, self._node, request.max_workers, request.max_ps
        )


def min_worker_seconds(points: Iterable[SpeedPoint]) -> float:
    """Least worker-seconds that a sample takes at any size; 0 where nothing was measured."""
    taken = [point.allocation.workers / point.samples_per_second for point in points if point.samples_per_second > 0]
    return min(taken, default=0.0)


@functools.lru_cache(maxsize=256)
def share_inside(
    architecture: Architecture, worker: Resources, ps: Resources, node: Resources, max_workers: int, max_ps: int
) -> _Floats:
    """Share of a job's talk that stays on a node when it lies evenly on as few such nodes as hold it.

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


def _usual(nodes: Sequence[Node]) -> Resources:
    """What most nodes have."""
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


def _slower(point: SpeedPoint, computing: float, spared: float) -> SpeedPoint:
    """A point as if nothing of the talk were spared, of which this share was; computing in seconds a sample."""
    speed = point.samples_per_second
    seconds = 1 / speed
    computing = min(computing, seconds)
    slower = 1 / (computing + (seconds - computing) / (1 - spared))
    return point._replace(samples_per_second=slower, before=point.before * slower / speed)


def _shows(point: SpeedPoint, known: _Floats) -> bool:
    return point.samples_per_second > 0 and _within(point, known) and bool(known[point.allocation[::-1]] > 0)


def _within(point: SpeedPoint, grid: _Floats) -> bool:
    return bool(point.allocation.ps < grid.shape[0] and point.allocation.workers < grid.shape[1])
