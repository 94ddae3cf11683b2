"""Best fit: the fullest node that still has room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class BestFit:
    """Puts a task on the node with the least room left, so that whole nodes stay free for large tasks.

    Room is summed over types, each as its fraction of the node; what a node has none of does not count.
    """

    name: ClassVar[str] = "best_fit"
    first_node_only: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    keeps_bundles: ClassVar[bool] = False

    def load(self, used: Sequence[int], capacity: Sequence[int]) -> float:
        """Sum of free fractions; see ``dl2d.core.placement.Placement``."""
        return sum((whole - taken) / whole for taken, whole in zip(used, capacity, strict=True) if whole)
