"""Resources as vectors: amounts of every resource of a cluster in one order, followed by the set of nodes of a job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dl2d.core.cluster import NodeSet
from dl2d.core.jobs import JobKey
from dl2d.core.packing.node_classes import EVERY_NODE, Vector
from dl2d.core.resources import Resources


class ResourceVectors:
    """Turns resources into vectors and back; knows which set of nodes a job may use."""

    def __init__(self, listed: Iterable[Resources], node_sets: Sequence[NodeSet] = ()) -> None:
        """The resources of the cluster are those that are ``listed``."""
        self._names = sorted({name for resources in listed for name, _ in resources.thousandths})
        self._node_sets = tuple(node_sets)
        self._set_of = {job: number for number, nodes in enumerate(self._node_sets) for job in nodes.jobs}
        self._demands: dict[tuple[Resources, int], Vector | None] = {}

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of resources and of sets of nodes."""
        return len(self._names), len(self._node_sets)

    def demand(self, demand: Resources, job: JobKey | None = None) -> Vector | None:
        """Amounts in the order of the names, and the job's set; None where no node has any of what is asked for."""
        asked = demand, self.node_set(job)
        try:
            return self._demands[asked]
        except KeyError:
            known = {name for name, _ in demand.thousandths} <= set(self._names)
            self._demands[asked] = (*self.amounts(demand), asked[1]) if known else None
            return self._demands[asked]

    def node_set(self, job: JobKey | None) -> int:
        """The number of the set of nodes that a job may use."""
        return EVERY_NODE if job is None else self._set_of.get(job, EVERY_NODE)

    def may_use(self, node_set: int, nodes: int) -> str:
        """Which of so many nodes are in a set, in words; empty where it is all of them."""
        return "" if node_set == EVERY_NODE else self._node_sets[node_set].text(nodes)

    def member_of(self) -> dict[str, int]:
        """For each node that is in a set: the sets that it belongs to, as a bit mask."""
        masks: dict[str, int] = {}
        for number, nodes in enumerate(self._node_sets):
            for name in nodes.nodes:
                masks[name] = masks.get(name, 0) | 1 << number
        return masks

    @staticmethod
    def together(*demands: Vector) -> Vector:
        """What tasks of one job ask for together."""
        amounts = map(sum, zip(*(demand[:-1] for demand in demands), strict=True))
        return (*amounts, demands[0][-1] if demands else EVERY_NODE)

    def amounts(self, resources: Resources) -> Vector:
        """Amounts in the order of the names; of further resources there is no node."""
        return tuple(resources.in_order(self._names))

    def resources(self, amounts: Iterable[int]) -> Resources:
        """The resources that amounts in the order of the names stand for."""
        return Resources(tuple([entry for entry in zip(self._names, amounts, strict=False) if entry[1]]))
