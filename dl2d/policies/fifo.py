"""FIFO: jobs are served whole, in the order in which they came."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Decision
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy import NO_EVIDENCE, Evidence
from dl2d.policies.common.greedy_allocation import GreedyAllocation, serve_in_order


class Fifo:
    """Gives each job in submit order bundles up to its maximum, and ends at the first bundle that has no room.

    A job for which the nodes would have no room even if nothing else ran on them is passed over, for no waiting would
    help it. Running jobs keep their
    floors, so that nothing that trains is lost to a job that came earlier.

    Parameters
    ----------
    whole_bundles
        A job grows by a worker and a PS together, and stops when it has all it may have of either.
    """

    name: ClassVar[str] = "fifo"
    version: ClassVar[str] = "1"
    needs: ClassVar[frozenset[Evidence]] = NO_EVIDENCE

    def __init__(self, *, whole_bundles: bool = False) -> None:
        self._whole_bundles = whole_bundles

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``."""
        del rng
        allocation = GreedyAllocation(snapshot, packing, whole_bundles=self._whole_bundles)
        serve_in_order(allocation, snapshot.jobs, lambda _: "came first")
        return allocation.decision(self)
