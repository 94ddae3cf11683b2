"""History of claims, kept from tick to tick: their nodes, since when their room is free, and which are set aside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dl2d.core.cluster import NodeGrant
from dl2d.core.jobs import NOTHING, Allocation, JobKey
from dl2d.core.resources import Resources

#: What claims that are met alike have in common: number of nodes, demand, and which nodes they may use.
ClaimShape = tuple[object, ...]
#: Whose they are (``Claim.set_aside_with``), and their shape.
ClaimClass = tuple[tuple[str, bool], ClaimShape]


class ClaimKey(NamedTuple):
    """A waiting claim. Pending tasks of a job array share one handle: when one of them starts, the number changes."""

    handle: str
    #: Number of jobs that wait under the handle.
    waiting: int
    #: Whether other jobs have waited before it in each tick so far. When it becomes the first to wait, its key changes,
    #: so that the time for which its room is not used starts again from 0. That happens once (``was_first``).
    behind_others: bool


class VacatedNode(NamedTuple):
    """A node that tasks had to leave for the claims under a handle, and how many jobs wait under that."""

    handle: str
    waiting: int
    name: str


class SetAsideClaim(NamedTuple):
    """A claim that is set aside: no nodes are vacated for it, since its job did not start although it had room."""

    kind: ClaimClass
    #: When it was set aside, seconds on a monotonic clock.
    at: float
    #: Whether it was set aside after some of its planned nodes were vacated. It is met again as soon as all nodes that
    #: it needs can be vacated.
    partial: bool = False
    #: Whether others had always waited before its job. It is tried again as soon as none do.
    behind_others: bool = False


@dataclass(frozen=True, slots=True)
class ClaimHistory:
    """History of claims, kept from tick to tick. Times are seconds on a monotonic clock."""

    #: Handles and nodes of the grants in the last tick, and at the last decision. None if the decision was made on an
    #: incomplete listing: it is then not known which there were, while an empty set says that there was none.
    nodes: frozenset[tuple[str, str]] = frozenset()
    decided: frozenset[tuple[str, str]] | None = frozenset()
    #: Since when the room of a claim has been free.
    free_since: Mapping[ClaimKey, float] = field(default_factory=dict)
    #: Since when planned nodes have been vacated for a claim that is not met.
    vacated_since: Mapping[ClaimKey, float] = field(default_factory=dict)
    set_aside: tuple[SetAsideClaim, ...] = ()
    #: Shapes of the waiting claims, those first for which nodes were searched longest ago.
    queue: tuple[ClaimShape, ...] = ()
    #: How many claims were met in the last tick, by handle: all nodes that they need were found.
    met_count: Mapping[str, int] = field(default_factory=dict)
    #: Nodes that could not be vacated in the last ticks, for shapes of claims for which not all nodes were tried
    #: (``MovesOffNodes.failed_nodes``).
    failed_nodes: Mapping[ClaimShape, frozenset[str]] = field(default_factory=dict)
    #: Since when tasks have been about to leave the nodes of a claim that is met.
    vacating_since: Mapping[ClaimKey, float] = field(default_factory=dict)
    #: Waiting elastic jobs of which the last tick has kept the minimum size from claims of lower priority.
    with_minimum: frozenset[JobKey] = frozenset()
    #: Those to which decisions have given nothing although their minimum size was kept: the policy has left them out.
    passed_over: frozenset[JobKey] = frozenset()
    #: Claims that still wait and were the first to wait in some tick. They do not count as behind others again, though
    #: the resource manager may say so now and then: the room of a job that never starts would be kept anew each time.
    was_first: frozenset[ClaimKey] = frozenset()
    #: Nodes that tasks had to leave for a claim, which still has them, each with what foreign jobs used on it then.
    vacated: Mapping[VacatedNode, Resources] = field(default_factory=dict)
    #: When claims of a kind have lost such nodes in the last ``RETRY_SECONDS``, and the
    #: handles of claims that are set aside for that.
    lost: Mapping[ClaimClass, tuple[float, ...]] = field(default_factory=dict)
    losing: tuple[str, ...] = ()

    def nodes_by_handle(self) -> defaultdict[str, set[str]]:
        """The nodes of each claim in the last tick, by its handle; none for a claim that had none."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for handle, node in self.nodes:
            found[handle].add(node)
        return found

    def needs_decision(self, grants: Collection[NodeGrant]) -> bool:
        """Whether tasks have to leave a node for a claim that was not there at the last decision.

        If that was made on an incomplete listing, any claim counts: resources that it has may be decided for a job.
        """
        if self.decided is None:
            return len(grants) > 0
        return any(grant.leaving and not nodes_of_grants((grant,)) <= self.decided for grant in grants)

    def after_decision(self, allocations: Mapping[JobKey, Allocation], *, incomplete: bool) -> ClaimHistory:
        """The history after a decision, made with the claims of the last tick unless the listing was incomplete.

        ``allocations`` are those that the policy has proposed.
        """
        passed_over = frozenset(key for key in self.with_minimum | self.passed_over if allocations.get(key) == NOTHING)
        return replace(self, decided=None if incomplete else self.nodes, passed_over=passed_over)


def nodes_of_grants(grants: Iterable[NodeGrant]) -> frozenset[tuple[str, str]]:
    """The handle and each node of each grant."""
    return frozenset((grant.handle, node) for grant in grants for node in grant.nodes)
