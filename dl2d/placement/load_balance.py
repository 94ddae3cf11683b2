"""Load balance: the node with the least in use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class LoadBalance:
    """Puts a task on the node with the least used resources, summed over types.

    Each type counts as its fraction of the node, since memory in MiB would drown everything else in a plain sum. On
    nodes with equal amounts of each type this is the order of DL2's placement, which sums plainly.
    """

    name: ClassVar[str] = "load_balance"
    first_node_only: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    keeps_bundles: ClassVar[bool] = False

    def load(self, used: Sequence[int], capacity: Sequence[int]) -> float:
        """Sum of used fractions; see ``dl2d.core.placement.Placement``."""
        return sum(taken / whole for taken, whole in zip(used, capacity, strict=True) if whole)
