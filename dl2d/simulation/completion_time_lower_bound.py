"""A bound on average completion time that no policy can beat, so that a result can be read as distance to the limit."""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dl2d.policies.dl2.pareto_frontier import allowed_sizes
from dl2d.simulation.workload.workload_file import SimulatedJob, Workload, to_request


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bounds on the average completion time, in slots."""

    #: Each job at its best size from its first slot on, as if it were alone.
    best_size: float
    #: The jobs share the cluster's total of the scarcest resource, and each needs the least of it that it can.
    capacity: float
    #: The resource of ``capacity``; "" where none is scarce.
    resource: str

    @property
    def avg_jct(self) -> float:
        """The larger of the two."""
        return max(self.best_size, self.capacity)


def lower_bound(workload: Workload) -> Bound:
    """Bound the average completion time of a workload (``Replayed.avg_jct``), whatever the policy.

    ``best_size``: a job cannot go faster than at its best size.

    ``capacity``: a job's progress costs at least the least resource-time per epoch of any of its sizes. With placement,
    slots and sizes relaxed away, the cluster is one machine that works off these costs at the rate of its capacity. On
    one machine, preemptive shortest-remaining-processing-time minimises the total of completion times of jobs that come
    over time (Schrage, Operations Research 16, 1968), so no policy does better. The largest over resources counts.
    Where the capacity changes, the cluster is taken to be whole all the time.
    """
    bests = [_best(job, workload) for job in workload.jobs]
    best, resource = 0.0, ""
    for name, amount in workload.capacity.as_dict().items():
        lengths = [
            (job.submit_slot, cost.get(name, 0.0) / amount) for job, (_, cost) in zip(workload.jobs, bests, strict=True)
        ]
        best, resource = max((best, resource), (_shared_machine(lengths), name))
    mean = statistics.fmean(slots for slots, _ in bests)
    return Bound(best_size=mean, capacity=best, resource=resource if best > 0 else "")


def _best(job: SimulatedJob, workload: Workload) -> tuple[float, dict[str, float]]:
    """Slots at the best size, and for each resource the least amount x slots that the job takes at any size."""
    request = to_request(job, workload)
    per_slot = workload.speeds[job.model].grid(*request.max_size) * workload.slot_seconds / job.samples_per_epoch
    ps, workers = np.nonzero(allowed_sizes(request) & (per_slot > 0))
    if not len(workers):
        return math.inf, {}
    slots = job.epochs / per_slot[ps, workers]
    cost = {
        name: float((slots * (workers * job.worker.get(name) + ps * job.ps.get(name))).min())
        for name in {name for demand in (job.worker, job.ps) for name, _ in demand.thousandths}
    }
    return float(slots.min()), cost


def _shared_machine(jobs: Sequence[tuple[float, float]]) -> float:
    """Average completion time of (release, length) on one machine under preemptive SRPT; O(n log n)."""
    coming = sorted(jobs)
    waiting: list[tuple[float, float]] = []
    now = total = 0.0
    place = 0
    while place < len(coming) or waiting:
        if not waiting:
            now = max(now, coming[place][0])
        while place < len(coming) and coming[place][0] <= now:
            release, length = coming[place]
            heapq.heappush(waiting, (length, release))
            place += 1
        left, release = heapq.heappop(waiting)
        until = coming[place][0] if place < len(coming) else math.inf
        if now + left <= until:
            now += left
            total += now - release
        else:
            heapq.heappush(waiting, (left - (until - now), release))
            now = until
    return total / len(jobs) if jobs else 0.0
