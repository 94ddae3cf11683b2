"""DRF: dominant resource fairness (Ghodsi et al., NSDI 2011, Algorithm 1)."""

from __future__ import annotations

import heapq
import math
from typing import ClassVar

import numpy as np

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Alternative, Constraint, Decision, Reason
from dl2d.core.jobs import Allocation, Job
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy import NO_EVIDENCE, Evidence
from dl2d.core.resources import Resources
from dl2d.policies.common.greedy_allocation import GreedyAllocation


class Drf:
    """Progressive filling: the job with the least dominant share gets its next bundle, one at a time.

    A job's dominant share is the largest fraction of the cluster's capacity that its tasks take of any one resource;
    equal shares are broken by submit order. The paper's algorithm ends when the chosen user's task does not fit; as its
    tasks differ between users, others may still fit, so a job without room is left out and filling goes on.
    Alternatives are scored by the dominant share that the job has with them.

    Parameters
    ----------
    end_at_first_failure
        End for everybody at the first bundle that has no room, as in the paper's Algorithm 1 and in the DL2 authors'
        simulator.
    whole_bundles
        A job grows by a worker and a PS together, and stops when it has all it may have of either.
    """

    name: ClassVar[str] = "drf"
    version: ClassVar[str] = "1"
    needs: ClassVar[frozenset[Evidence]] = NO_EVIDENCE

    def __init__(self, *, end_at_first_failure: bool = False, whole_bundles: bool = False) -> None:
        self._end_at_first_failure = end_at_first_failure
        self._whole_bundles = whole_bundles

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``. Cost: bundles x (log jobs + one pass over the nodes)."""
        del rng
        capacity = snapshot.capacity
        allocation = GreedyAllocation(snapshot, packing, whole_bundles=self._whole_bundles)

        shares: dict[tuple[Resources, Resources, Allocation], float] = {}

        def share(job: Job, allocation: Allocation) -> float:
            kind = job.request.worker, job.request.ps, allocation
            if kind not in shares:
                shares[kind] = job.request.demand_of(allocation).dominant_share(capacity)[0]
            return shares[kind]

        queue = [(share(job, allocation.allocations[job.key]), order, job) for order, job in enumerate(snapshot.jobs)]
        heapq.heapify(queue)
        while queue:
            _, order, job = heapq.heappop(queue)
            stopped = allocation.grow(job)
            if stopped is None:
                heapq.heappush(queue, (share(job, allocation.allocations[job.key]), order, job))
            elif self._end_at_first_failure and stopped.constraint not in (Constraint.SATISFIED, Constraint.LIMIT):
                for _, _, other in sorted(queue):
                    text = (
                        f"no job is enlarged after {job.key.id} ({job.request.name}), for whose next bundle nodes "
                        "have no room"
                    )
                    allocation.refuse(other, Reason(Constraint.QUEUE, text))
                break
        alternatives = {}
        for job in snapshot.jobs:
            has = allocation.allocations[job.key]
            step = allocation.next_bundle(job)
            options = (has,) if step is None else (has, has.plus(step))
            scored = [(option, share(job, option)) for option in options]
            # An infinite share means that the cluster has nothing of what is asked for: no alternative at all.
            alternatives[job.key] = tuple(
                Alternative(option, score) for option, score in scored if math.isfinite(score)
            )
        return allocation.decision(self, measure="dominant share", alternatives=alternatives)
