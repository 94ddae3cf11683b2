"""DRF: dominant resource fairness (Ghodsi et al., NSDI 2011, Algorithm 1)."""

from __future__ import annotations

import heapq
import math
from typing import ClassVar

import numpy as np

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Alternative, Decision
from dl2d.core.jobs import Allocation, Job
from dl2d.core.packing import Packing
from dl2d.policies.filling import Filling, next_bundle


class Drf:
    """Progressive filling: the job with the least dominant share gets its next bundle, one at a time.

    A job's dominant share is the largest fraction of the cluster's capacity that its tasks take of any one resource;
    equal shares are broken by submit order. The paper's algorithm ends when the chosen user's task does not fit; as its
    tasks differ between users, others may still fit, so a job without room is set aside and filling goes on.
    Alternatives are scored by the dominant share that the job has with them.
    """

    name: ClassVar[str] = "drf"
    version: ClassVar[str] = "1"

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``. Cost: bundles x (log jobs + one pass over the nodes)."""
        del rng
        capacity = snapshot.capacity
        filling = Filling(snapshot, packing)

        def share(job: Job, allocation: Allocation) -> float:
            return job.request.demand_of(allocation).dominant_share(capacity)[0]

        queue = [(share(job, filling.allocations[job.key]), order, job) for order, job in enumerate(snapshot.jobs)]
        heapq.heapify(queue)
        while queue:
            _, order, job = heapq.heappop(queue)
            if filling.grow(job) is None:
                heapq.heappush(queue, (share(job, filling.allocations[job.key]), order, job))
        alternatives = {}
        for job in snapshot.jobs:
            has = filling.allocations[job.key]
            step = next_bundle(job, has)
            options = (has,) if step is None else (has, Allocation(has.workers + step.workers, has.ps + step.ps))
            scored = [(option, share(job, option)) for option in options]
            # An infinite share means that the cluster has nothing of what is asked for: no alternative at all.
            alternatives[job.key] = tuple(
                Alternative(option, score) for option, score in scored if math.isfinite(score)
            )
        return filling.decision(self.name, self.version, measure="dominant share", alternatives=alternatives)
