"""The contract of placements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Placement(Protocol):
    """Says in which order nodes are tried for a task."""

    @property
    def name(self) -> str:
        """Name in the configuration."""
        ...

    @property
    def head_only(self) -> bool:
        """Whether only the first node in the order is tried, as in the DL2 authors' simulator; otherwise all are."""
        ...

    def load(self, used: Sequence[int], capacity: Sequence[int]) -> float:
        """Place of a node in the order, lowest first; equal ones by node order.

        ``used`` and ``capacity`` are thousandths of each resource, in the same order. Called whenever something was
        added to or taken from the node, so it must depend on these two alone.
        """
        ...
