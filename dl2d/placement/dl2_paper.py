"""The placement of the DL2 authors' simulator, for comparisons with their figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class Dl2Paper:
    """The node with the least used resources, summed plainly over types; if that one is full, so is the cluster.

    Source: the allocation of pengyanghua/DL2, as described with the measurements of its simulator.

    Parameters
    ----------
    keeps_bundles
        A worker and a PS that are given together are placed as one.
    """

    first_node_only: ClassVar[bool] = True
    gathers: ClassVar[bool] = False

    def __init__(self, *, keeps_bundles: bool = True) -> None:
        self._keeps_bundles = keeps_bundles

    @property
    def name(self) -> str:
        """``dl2_paper``, or ``dl2_paper_apart`` where bundles are not kept together."""
        return "dl2_paper" if self._keeps_bundles else "dl2_paper_apart"

    @property
    def keeps_bundles(self) -> bool:
        """See ``dl2d.core.placement.Placement``."""
        return self._keeps_bundles

    def load(self, used: Sequence[int], capacity: Sequence[int]) -> float:
        """Plain sum of used amounts; see ``dl2d.core.placement.Placement``."""
        del capacity
        return float(sum(used))
