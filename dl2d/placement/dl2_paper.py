"""The placement of the DL2 authors' simulator, for comparisons with their figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class Dl2Paper:
    """The node with the least used resources, summed plainly over types; if that one is full, so is the cluster.

    A worker and a PS that are given together are placed as one.

    Source: the allocation of pengyanghua/DL2, as described with the measurements of its simulator.
    """

    name: ClassVar[str] = "dl2_paper"
    head_only: ClassVar[bool] = True
    gathers: ClassVar[bool] = False
    keeps_bundles: ClassVar[bool] = True

    def load(self, used: Sequence[int], capacity: Sequence[int]) -> float:
        """Plain sum of used amounts; see ``dl2d.core.placement.Placement``."""
        del capacity
        return float(sum(used))
