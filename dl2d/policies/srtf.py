"""SRTF: the job with the shortest remaining time is served first."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Alternative, Decision
from dl2d.core.jobs import JobKey
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy import NO_EVIDENCE, Evidence
from dl2d.policies.common.greedy_allocation import GreedyAllocation, serve_in_order
from dl2d.throughput.remaining_time import remaining_seconds


class Srtf:
    """Serves jobs whole in the order of their remaining time, and ends at the first bundle that has no room.

    Remaining time is the declared work that is left over the speed at which the job last trained; a job that has not
    trained yet counts with the mean speed of jobs of its type, or of all jobs, or (where nothing was measured at all)
    with one sample a second, which orders jobs by their work. Equal times are broken by submit order. Preemptive as the
    textbook's: a running job that is not among the shortest falls back to its floor.

    Parameters
    ----------
    by_fraction
        Order by the remaining fraction of the epochs instead, as the DL2 authors' simulator does.
    whole_bundles
        A job grows by a worker and a PS together, and stops when it has all it may have of either.
    """

    name: ClassVar[str] = "srtf"
    version: ClassVar[str] = "1"
    needs: ClassVar[frozenset[Evidence]] = NO_EVIDENCE

    def __init__(self, *, by_fraction: bool = False, whole_bundles: bool = False) -> None:
        self._by_fraction = by_fraction
        self._whole_bundles = whole_bundles

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``. Cost: jobs x log jobs, and the bundles."""
        del rng
        allocation = GreedyAllocation(snapshot, packing, whole_bundles=self._whole_bundles)
        left = _fractions(snapshot) if self._by_fraction else remaining_seconds(snapshot)
        order = sorted(snapshot.jobs, key=lambda job: left[job.key])  # stable: equal ones stay in submit order
        unit = "of its epochs" if self._by_fraction else "s"
        serve_in_order(allocation, order, lambda ahead: f"has less left ({left[ahead.key]:.3g} {unit})")
        return allocation.decision(
            self,
            measure="remaining fraction" if self._by_fraction else "remaining seconds",
            alternatives={key: (Alternative(has, left[key]),) for key, has in allocation.allocations.items()},
        )


def _fractions(snapshot: Snapshot) -> dict[JobKey, float]:
    return {job.key: max(1.0 - job.progress.epoch / job.request.epochs, 0.0) for job in snapshot.jobs}
