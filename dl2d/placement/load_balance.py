"""Load balance: the node with the least in use."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray


class LoadBalance:
    """Puts a task on the node with the least used resources, summed over types.

    Each type counts as its fraction of the node, since memory in MiB would drown everything else in a plain sum. On
    nodes with equal amounts of each type this is the order of DL2's placement, which sums plainly.
    """

    name: ClassVar[str] = "load_balance"

    def scores(
        self, used: NDArray[np.int64], capacity: NDArray[np.int64], demand: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Sum of used fractions by node; see ``dl2d.core.policy.Placement``."""
        del demand
        return np.asarray((used / np.maximum(capacity, 1)).sum(axis=1), dtype=np.float64)
