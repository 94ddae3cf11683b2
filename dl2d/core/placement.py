"""The contract of placements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dl2d.core.jobs import JobRequest


class Placement(Protocol):
    """Says in which order nodes are tried for a task."""

    @property
    def name(self) -> str:
        """Name in the configuration."""
        ...

    @property
    def first_node_only(self) -> bool:
        """Whether only the first node in the order is tried, as in the DL2 authors' simulator; otherwise all are."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether the new tasks of a job are laid evenly on as few nodes as hold them, the smallest job first.

        Only where no number of nodes will do, they are placed one by one. Otherwise all are, in the decided order.
        """
        ...

    @property
    def keeps_bundles(self) -> bool:
        """Whether a worker and a PS that are given in one step go to the same node, as one demand."""
        ...

    def load(self, used: Sequence[int], capacity: Sequence[int]) -> float:
        """Place of a node in the order, lowest first; equal ones by node order.

        ``used`` and ``capacity`` are thousandths of each resource, in the same order. Called whenever something was
        added to or taken from the node, so it must depend on these two alone.
        """
        ...


def keeps_bundles(placement: Placement, request: JobRequest) -> bool:
    """Whether a placement keeps the bundles of such a job together: two tasks with nodes of their own share none."""
    return placement.keeps_bundles and not request.has_whole_nodes
