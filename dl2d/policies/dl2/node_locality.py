"""Locality: the speed-up of a job if the placement places it on as few nodes as possible.

A training step takes time for computing and time for communication, and tasks on one node save a fraction of the
latter:

    seconds per sample = computing / workers + communication * (1 - saved * share inside)

``computing`` is the least number of worker-seconds per sample at any measured size; half of that with parameter
servers, since with these even a single worker communicates. ``share inside`` is the fraction of a job's communication
that stays within nodes if its tasks are spread evenly over the fewest nodes (``share_inside``). ``saved`` is one number
for the whole cluster, estimated in tenths from kinds whose speeds on different nodes the checkpoint predicts.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from msgspec import structs

from dl2d.core.array_types import Floats
from dl2d.core.cluster import Node, NodeState, Snapshot
from dl2d.core.jobs import Architecture, JobRequest
from dl2d.core.measured_speeds_and_losses import JobSpeeds, MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.core.resources import NO_RESOURCES, Resources

#: Prior mean and standard deviation of ``saved``. Synchronising on one node takes 0.08 to 0.42 of the time across nodes
#: (medians of six models; Qiao et al., "Pollux", OSDI 2021, placement profiles).
_PRIOR = (0.7, 0.3)
#: Values of ``saved`` that are compared.
_CANDIDATES = np.arange(10) / 10
# The following four are heuristic.
#: Fraction of the least worker-seconds per sample that is computing, with parameter servers.
_COMPUTING_WITH_PS = 0.5
#: Usual difference between kinds in the logarithm of (measured speed / checkpoint's speed), a standard deviation.
_KIND_DEVIATION = 0.3
#: Usual difference in this logarithm between one size and the median of its kind, an absolute value.
_SIZE_SCALE = 0.1
#: Limit on the difference of one size, so that outliers count little.
_MAX_DIFFERENCE = 0.5


class Locality:
    """Converts speeds between tasks on different nodes and tasks on as few nodes as possible; see the module.

    Parameters
    ----------
    checkpoint_worker_seconds
        Least worker-seconds per sample of the kinds with checkpoint speeds; those of other kinds come from the
        measurements in the snapshot.
    checkpoint_speeds
        Predicts samples per second with all tasks on different nodes, in the shape of ``KnownSpeeds.grid``, for a job
        of one of these kinds.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        checkpoint_worker_seconds: Mapping[TrainingKind, float],
        checkpoint_speeds: Callable[[JobRequest], Floats],
    ) -> None:
        self._snapshot = snapshot
        self._node = _usual_capacity(snapshot.nodes)
        self._requests = largest_requests(snapshot)
        worker_seconds = {speeds.kind: min_worker_seconds(speeds.points) for speeds in snapshot.speeds}
        worker_seconds |= checkpoint_worker_seconds
        self._computing = {
            kind: seconds * (_COMPUTING_WITH_PS if kind.architecture is Architecture.PS else 1.0)
            for kind, seconds in worker_seconds.items()
        }
        self._saved = self._most_likely_saved(
            {
                kind: checkpoint_speeds(request)
                for kind, request in self._requests.items()
                if kind in checkpoint_worker_seconds
            }
        )

    def to_different_nodes(self) -> Snapshot:
        """Return the snapshot with measured speeds converted to those with all tasks on different nodes."""
        kinds, jobs = self._requests, {job.key: job.request for job in self._snapshot.jobs}
        return structs.replace(
            self._snapshot,
            speeds=tuple(
                MeasuredSpeeds(speeds.kind, self._convert_points(kinds[speeds.kind], speeds.points))
                if speeds.kind in kinds
                else speeds
                for speeds in self._snapshot.speeds
            ),
            job_speeds=tuple(
                JobSpeeds(speeds.job, self._convert_points(jobs[speeds.job], speeds.points))
                if speeds.job in jobs
                else speeds
                for speeds in self._snapshot.job_speeds
            ),
        )

    def to_few_nodes(self, request: JobRequest, speeds: Floats) -> Floats:
        """Convert samples/s on different nodes to samples/s on as few nodes as possible.

        Parameters
        ----------
        speeds
            ``speeds[ps, workers]``, shape (max_ps + 1, max_workers + 1), or (1, max_workers + 1); as is the result.
        """
        trains = speeds > 0
        seconds = np.divide(1.0, speeds, where=trains, out=np.ones_like(speeds))
        workers = np.maximum(np.arange(speeds.shape[1]), 1)
        computing = np.minimum(self._computing.get(TrainingKind.of(request), 0.0) / workers, seconds)
        communication = (seconds - computing) * (1.0 - self._saved * self._inside(request))
        return np.where(trains, 1.0 / (computing + communication), 0.0)

    def _convert_points(self, request: JobRequest, points: Sequence[SpeedPoint]) -> tuple[SpeedPoint, ...]:
        """Convert points on as few nodes as possible to those on different nodes: the inverse of ``to_few_nodes``."""
        inside, computing = self._inside(request), self._computing.get(TrainingKind.of(request), 0.0)
        return tuple(
            _convert_point(
                point, computing / point.allocation.workers, self._saved * float(inside[point.allocation[::-1]])
            )
            if point.samples_per_second > 0 and _within(point, inside)
            else point
            for point in points
        )

    def _most_likely_saved(self, predicted: Mapping[TrainingKind, Floats]) -> float:
        """Return the most likely value of ``saved``: that with which measurements differ least from predictions.

        A kind may be faster or slower on this cluster, at all sizes alike, than where the checkpoint's speeds were
        measured.

        Parameters
        ----------
        predicted
            Samples per second with all tasks on different nodes, of kinds with checkpoint speeds.
        """
        mean, deviation = _PRIOR
        # A robust criterion, lowest for the best candidate: it has squares of the differences from the prior and of the
        # difference common to a kind, and absolute values of the differences of single sizes.
        criterion = ((_CANDIDATES - mean) / deviation) ** 2
        for speeds in self._snapshot.speeds:
            grid = predicted.get(speeds.kind)
            points = () if grid is None else [point for point in speeds.points if _is_comparable(point, grid)]
            if grid is None or not points:
                continue
            workers, ps = np.array([point.allocation for point in points]).T
            seconds = 1 / grid[ps, workers]
            computing = np.minimum(self._computing[speeds.kind] / workers, seconds)
            inside = self._inside(self._requests[speeds.kind])[ps, workers]
            seconds = computing + (seconds - computing) * (1 - _CANDIDATES[:, None] * inside)
            differences = np.log(np.array([point.samples_per_second for point in points]) * seconds)
            common = np.median(differences, axis=1)
            of_sizes = np.minimum(np.abs(differences - common[:, None]), _MAX_DIFFERENCE) / _SIZE_SCALE
            criterion += of_sizes.sum(axis=1) + (common / _KIND_DEVIATION) ** 2
        return float(_CANDIDATES[criterion.argmin()])

    def _inside(self, request: JobRequest) -> Floats:
        return share_inside(
            request.architecture, request.worker, request.ps, self._node, request.max_workers, request.max_ps
        )


def min_worker_seconds(points: Iterable[SpeedPoint]) -> float:
    """Least worker-seconds per sample at any size; 0 where nothing was measured."""
    measured = [point for point in points if point.samples_per_second > 0]
    return min((point.allocation.workers / point.samples_per_second for point in measured), default=0.0)


@functools.lru_cache(maxsize=256)
def share_inside(
    architecture: Architecture, worker: Resources, ps: Resources, node: Resources, max_workers: int, max_ps: int
) -> Floats:
    """Fraction of a job's communication that stays within nodes if its tasks are spread evenly over the fewest nodes.

    With parameter servers it is the fraction of worker-server pairs; for all-reduce jobs, of neighbours in the ring.

    Parameters
    ----------
    worker, ps, node
        Demands of a worker and of a PS, and capacity of a node.

    Returns
    -------
    Shape (max_ps + 1, max_workers + 1), read-only; 0 where no number of nodes holds the job.
    """
    workers, servers = np.arange(max_workers + 1)[None], np.arange(max_ps + 1)[:, None]
    nodes = np.zeros((max_ps + 1, max_workers + 1), dtype=np.int64)
    worker_amounts, ps_amounts, capacity = (dict(amounts.thousandths) for amounts in (worker, ps, node))
    for count in range(1, max(max_workers, max_ps) + 1):
        fits = nodes == 0
        for name in {*worker_amounts, *ps_amounts}:
            taken_by_workers = -(-workers // count) * worker_amounts.get(name, 0)
            taken_by_ps = -(-servers // count) * ps_amounts.get(name, 0)
            fits &= taken_by_workers + taken_by_ps <= capacity.get(name, 0)
        nodes[fits] = count
        if nodes.all():
            break
    # On n nodes, 1/n of the servers is on the node of each worker. Of the w links of a ring, n lead to another node.
    fewest = np.maximum(nodes, 1)
    if architecture is Architecture.PS:
        share = 1 / fewest
    else:
        share = np.where(fewest > 1, 1 - fewest / np.maximum(workers, 1), 1.0)
    share = np.where(nodes > 0, share, 0.0)
    share.flags.writeable = False
    return share


def _usual_capacity(nodes: Sequence[Node]) -> Resources:
    """Most frequent capacity of the nodes that are not down."""
    capacities = Counter(node.capacity for node in nodes if node.state is not NodeState.DOWN)
    return capacities.most_common(1)[0][0] if capacities else NO_RESOURCES


def largest_requests(snapshot: Snapshot) -> dict[TrainingKind, JobRequest]:
    """Of each kind the request with the largest bounds, the first of equals."""
    largest: dict[TrainingKind, JobRequest] = {}
    for request in {id(job.request): job.request for job in snapshot.jobs}.values():
        kind = TrainingKind.of(request)
        if kind not in largest or _bounds(request) > _bounds(largest[kind]):
            largest[kind] = request
    return largest


def _bounds(request: JobRequest) -> tuple[int, int, int]:
    return request.max_workers + request.max_ps, request.max_workers, request.max_ps


def _convert_point(point: SpeedPoint, computing: float, saved: float) -> SpeedPoint:
    """Convert a point on as few nodes as possible to one on different nodes.

    Parameters
    ----------
    computing
        Seconds per sample of computing at this size.
    saved
        Fraction of the communication that is saved at this size.
    """
    speed = point.samples_per_second
    seconds = 1 / speed
    computing = min(computing, seconds)
    new_speed = 1 / (computing + (seconds - computing) / (1 - saved))
    return point._replace(samples_per_second=new_speed, previous_speed=point.previous_speed * new_speed / speed)


def _is_comparable(point: SpeedPoint, grid: Floats) -> bool:
    return point.samples_per_second > 0 and _within(point, grid) and bool(grid[point.allocation[::-1]] > 0)


def _within(point: SpeedPoint, grid: Floats) -> bool:
    return bool(point.allocation.ps < grid.shape[0] and point.allocation.workers < grid.shape[1])
