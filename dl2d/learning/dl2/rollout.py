"""Rollout of policy ``dl2`` on many simulated clusters at once, as ``dl2d.policies.dl2.policy`` decides on one.

Nothing here reads the workloads' speeds: what jobs can do is believed from what was measured, and measuring is what the
simulated clusters report of jobs that ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dl2d.core.array_types import Bools, Floats, Ints
from dl2d.core.jobs import Allocation, JobRequest
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.policies.dl2.pareto_frontier import (
    FrontierArrays,
    ParetoFrontier,
    SizeGrid,
    allowed_sizes,
    frontier_key,
    pareto_frontiers,
    summed_shares,
)
from dl2d.policies.dl2.scoring import ClusterJobs
from dl2d.policies.dl2.size_search import choose_sizes
from dl2d.simulation.vectorized.clusters import Clusters, SlotReport
from dl2d.simulation.vectorized.workload_arrays import Library
from dl2d.simulation.workload.workload_file import Workload, to_request
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.remaining_time import epochs_left_of_all


class Measurements:
    """Mean speeds by kind and size, over all measurements alike: what is trained on does not change as time goes by."""

    def __init__(self, measured: Iterable[MeasuredSpeeds] = ()) -> None:
        self._sums: dict[TrainingKind, dict[Allocation, tuple[float, int]]] = defaultdict(dict)
        for speeds in measured:
            for size, mean, times, *_ in speeds.points:
                self.add(speeds.kind, size, mean * times, times)

    def add(self, kind: TrainingKind, size: Allocation, total: float, times: int) -> None:
        """Count some measurements with their sum, samples/s."""
        before = self._sums[kind].get(size, (0.0, 0))
        self._sums[kind][size] = before[0] + total, before[1] + times

    def speeds(self) -> tuple[MeasuredSpeeds, ...]:
        """As a snapshot has them."""
        return tuple(
            MeasuredSpeeds(kind, tuple(SpeedPoint(size, total / times, times) for size, (total, times) in points))
            for kind, points in sorted((kind, sorted(sizes.items())) for kind, sizes in self._sums.items())
        )


@dataclass(frozen=True, slots=True)
class _Like:
    """Jobs that share a Pareto frontier."""

    request: JobRequest
    capacity: tuple[int, ...]


class RolloutWorkloads:
    """Workloads for rollouts: K of them, compiled, with the kinds and the groups of alike jobs.

    Parameters
    ----------
    workloads
        They may differ in everything.
    """

    def __init__(self, workloads: Sequence[Workload]) -> None:
        self.library = Library.of(workloads)
        count, jobs, _, _ = self.library.size
        names = self.library.resources
        #: Group of each job, shape (K, J), and its kind as a place in ``kinds``.
        self.group: Ints = np.zeros((count, jobs), int)
        self.kind: Ints = np.zeros((count, jobs), int)
        self.kinds: list[TrainingKind] = []
        self._groups: list[_Like] = []
        places: dict[tuple[object, ...], int] = {}
        for number, workload in enumerate(workloads):
            capacity = tuple(workload.capacity.in_order(names))
            for place, job in enumerate(workload.jobs):
                request = to_request(job, workload)
                kind = TrainingKind.of(request)
                if kind not in self.kinds:
                    self.kinds.append(kind)
                self.kind[number, place] = self.kinds.index(kind)
                key = (*frontier_key(request), capacity)
                if key not in places:
                    places[key] = len(self._groups)
                    self._groups.append(_Like(request, capacity))
                self.group[number, place] = places[key]

    def frontiers(self, model: GaussianProcess, optimism: float) -> FrontierArrays:
        """What is believed of all groups, in their order."""
        names = self.library.resources
        grids = [
            SizeGrid(
                model.predict_speeds(like.request, optimism),
                worker=like.request.worker.in_order(names),
                ps=like.request.ps.in_order(names),
                capacity=like.capacity,
                allowed=allowed_sizes(like.request),
            )
            for like in self._groups
        ]
        made: list[ParetoFrontier] = []
        for like, one in zip(self._groups, pareto_frontiers(grids), strict=True):
            if one is None:
                raise ValueError(f"a job of {like.request.model} is larger than the cluster")
            made.append(one)
        return FrontierArrays(made)


def rollout(
    compiled: RolloutWorkloads,
    frontiers: FrontierArrays,
    workloads: Ints,
    weights: Floats,
    *,
    most_slots: int = 2000,
    seen: Callable[[Clusters, SlotReport], None] | None = None,
) -> Floats:
    """Play N clusters to their ends.

    Parameters
    ----------
    workloads
        Which workload each cluster has, shape (N,).
    weights
        Of each cluster, shape (N, weights), or (1, weights) for all.
    seen
        Is told of each slot.

    Returns
    -------
    Mean completion time in slots of each cluster, shape (N,); jobs that had not ended when play was broken off count up
    to then.
    """
    count = len(workloads)
    clusters = Clusters(compiled.library, count)
    rows = np.arange(count)
    clusters.reset(rows, workloads, [np.random.default_rng(0)] * count)  # unused: these clusters have no noise
    weights = np.broadcast_to(weights, (count, weights.shape[1]))
    group = compiled.group[workloads]
    while True:
        (which,) = np.nonzero(~clusters.over & (clusters.played < most_slots))
        if not len(which):
            break
        fill(clusters, frontiers, group, which, weights[which])
        report = clusters.end_slot(which)
        if seen is not None:
            seen(clusters, report)
    waited = np.maximum(clusters.slot[:, None] - clusters.submit, 0.0)
    return clusters.mean_completion(waited)


def fill(clusters: Clusters, frontiers: FrontierArrays, group: Ints, which: Ints, weights: Floats) -> None:
    """Choose and give all sizes of a slot, in the clusters ``which``, shape (k,), with weights (k, weights)."""
    present = clusters.present[which]
    width = int(present.sum(axis=1).max())
    # The present ones first, in submit order.
    order = np.argsort(~present, axis=1, kind="stable")[:, :width]
    here = np.take_along_axis(present, order, axis=1)
    at = which[:, None], order
    library, workload = clusters.library, clusters.workload[which]
    declared = clusters.declared[at]
    epochs = epochs_left_of_all(declared, clusters.done[at])
    samples = epochs * library.samples[workload[:, None], order]
    cluster_jobs = ClusterJobs.of(frontiers, group[at], here, samples, library.slot_seconds[workload])
    states = np.zeros(here.shape, int)
    free = clusters.capacity[which]
    chosen = choose_sizes(frontiers, cluster_jobs, states, free, weights)
    short = _give(clusters, frontiers, cluster_jobs, which, order, chosen)
    (again,) = np.nonzero(short.any(axis=1))
    if len(again):
        # What had no room on a node is given to others.
        rest = ClusterJobs(
            cluster_jobs.frontier[again], here[again] & ~short[again], cluster_jobs.log_work[again],
            cluster_jobs.load[again], cluster_jobs.relative[again],
        )  # fmt: skip
        left = clusters.capacity[which[again]] - clusters.used.T[which[again]]
        more = choose_sizes(frontiers, rest, chosen[again], left, weights[again], only_larger=True)
        _give(clusters, frontiers, rest, which[again], order[again], more)


def _give(
    clusters: Clusters, frontiers: FrontierArrays, cluster_jobs: ClusterJobs, which: Ints, order: Ints, states: Ints
) -> Bools:
    """Place what was chosen beyond what is there, as the policy does where tasks go to the least used node or nowhere.

    Returns
    -------
    Which jobs got less, shape (k, J).
    """
    at = which[:, None], order
    wanted = np.where(cluster_jobs.takes_part[:, :, None], frontiers.sizes[cluster_jobs.frontier, states], 0)
    more = np.maximum(wanted - clusters.sizes[at], 0)
    weight = summed_shares(clusters.demand[at], clusters.capacity[which][:, None, None])  # (k, J, 2)
    # Workers, then PSs, of equal weight; then submit order.
    flat_weight = np.concatenate([weight[:, :, 0], weight[:, :, 1]], axis=1)
    flat_more = np.concatenate([more[:, :, 0], more[:, :, 1]], axis=1)
    turns = np.argsort(np.where(flat_more > 0, flat_weight, np.inf), axis=1, kind="stable")
    laid, short = _lay(clusters, which, order, turns, flat_more)
    (failed,) = np.nonzero(~laid)
    if len(failed):
        # Minimum sizes first, the largest first.
        here, jobs = which[failed], order[failed]
        least, sizes = clusters.least[here[:, None], jobs], clusters.sizes[here[:, None], jobs]
        starting = (wanted[failed].sum(axis=2) > 0) & (sizes.sum(axis=2) == 0)
        first = np.where(starting, (weight[failed] * least).sum(axis=2), -1.0)
        places = np.argsort(-first, axis=1, kind="stable")
        for number in range(int(starting.sum(axis=1).max(initial=0))):
            (some,) = np.nonzero(starting.sum(axis=1) > number)
            job = places[some, number]
            tasks = jobs[some, job][:, None] * 3 + np.arange(2)
            got = (clusters.lay(here[some], tasks, least[some, job]) >= 0).all(axis=1)
            short[failed[some[~got]], job[~got]] = True
        more = np.maximum(wanted[failed] - clusters.sizes[here[:, None], jobs], 0)
        more[short[failed]] = 0
        _, also = _lay(clusters, here, jobs, turns[failed], np.concatenate([more[:, :, 0], more[:, :, 1]], axis=1))
        short[failed] |= also
    return short


def _lay(clusters: Clusters, which: Ints, order: Ints, turns: Ints, more: Ints) -> tuple[Bools, Bools]:
    """Give tasks, all those of a turn and then the next; ``more`` are workers, then PSs, of each job, shape (k, 2 J).

    Returns
    -------
    Which clusters were given them, shape (k,), and which jobs got less, shape (k, J).
    """
    amounts = np.take_along_axis(more, turns, axis=1)
    width = order.shape[1]
    some = int(np.where(amounts > 0, np.arange(1, amounts.shape[1] + 1), 0).max(initial=0))
    turns, amounts = turns[:, :some], amounts[:, :some]
    role, place = np.divmod(turns, width)
    placed = clusters.lay(which, np.take_along_axis(order, place, axis=1) * 3 + role, amounts)
    laid = np.asarray((placed >= 0).all(axis=1))
    less = np.zeros((len(which), 2 * width), bool)
    np.put_along_axis(less, turns, (placed < amounts) & laid[:, None], axis=1)
    return laid, less[:, :width] | less[:, width:]


def measuring(compiled: RolloutWorkloads, measurements: Measurements) -> Callable[[Clusters, SlotReport], None]:
    """Counts what the jobs of each slot showed: share of the declared epochs in a whole slot, as samples a second."""
    library = compiled.library

    def seen(clusters: Clusters, report: SlotReport) -> None:
        rows, jobs = np.nonzero(report.present & ((report.workers > 0) | (report.ps > 0)))
        if not len(rows):
            return
        which = report.which[rows]
        workload = clusters.workload[which]
        samples = report.rate[rows, jobs] * clusters.declared[which, jobs] * library.samples[workload, jobs]
        speed = samples / library.slot_seconds[workload]
        kind, workers, ps = compiled.kind[workload, jobs], report.workers[rows, jobs], report.ps[rows, jobs]
        keys, where, times = np.unique(
            np.stack([kind, workers, ps], axis=1), axis=0, return_inverse=True, return_counts=True
        )
        totals = np.bincount(where.reshape(-1), speed)
        for key, total, number in zip(keys.tolist(), totals.tolist(), times.tolist(), strict=True):
            measurements.add(compiled.kinds[key[0]], Allocation(key[1], key[2]), total, number)

    return seen
