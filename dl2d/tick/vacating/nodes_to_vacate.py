"""Choice of the nodes that are vacated for a claim, and of the room that is kept on nodes planned for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import structs

from dl2d.core.cluster import NodeGrant, Task, TaskGroup
from dl2d.core.resource_manager import Claim
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.tick.vacating.elastic_jobs_that_yield import ElasticJobs
from dl2d.tick.vacating.moves_off_vacated_nodes import MovesOffNodes
from dl2d.tick.vacating.room_during_node_search import NodeRoom

#: When the tasks of so many planned nodes had nowhere to go, no further planned nodes are vacated in the tick.
MAX_FAILED_PLANNED_NODES = 256


class SearchResult(NamedTuple):
    """How a search for nodes for a claim ended."""

    #: None if there are not enough.
    nodes: NodeGrant | None
    #: See ``MovesOffNodes.failed_nodes``.
    failed_nodes: frozenset[str] = frozenset()
    #: Whether there were so many of these that the others were not tried.
    is_cut_short: bool = False


class NodeSearch:
    """Search for nodes for one claim after the other; each takes its room from those behind it."""

    def __init__(self, room: NodeRoom, jobs: ElasticJobs, without_replacement: Collection[TaskGroup]) -> None:
        self._room = room
        self._jobs = jobs
        self._without_replacement = without_replacement
        self._index = {name: index for index, name in enumerate(room.capacity)}
        #: Nodes of standing claims that may be any of their eligible ones.
        self._kept_free = set[str]()
        #: The state of the room before the last claim.
        self._undo_point = 0
        #: Number of planned nodes whose tasks yield and had nowhere to go.
        self._failed_planned = 0

    def _begin(self, claim: Claim, previous: Collection[str]) -> MovesOffNodes:
        self._undo_point = self._room.undo_point
        return MovesOffNodes(self._room, claim, self._without_replacement, previous)

    def undo_last(self) -> None:
        """Give back the room of the last claim."""
        self._room.undo(self._undo_point)

    def find(self, claim: Claim, previous: Collection[str], failed_nodes: Collection[str]) -> SearchResult:
        """As many nodes as a claim needs and the tasks that leave them; no room is taken where there are not enough.

        If the minimum number of nodes cannot be had, larger ones (``Claim.spreads``) are tried in their order.
        Nodes that it requires come first, then those that are planned for it, then those on which nothing is held for
        a claim that starts later, then those that no task has to leave.
        Among these, and among the others, the order is: nodes that it had in the last tick (``previous``); nodes
        that did not fail in the last ticks (``failed_nodes``); nodes that the fewest tasks have to leave.
        """
        found = self._find(claim, previous, failed_nodes)
        for nodes, demand in claim.spreads if found.nodes is None and not found.is_cut_short else ():
            spread = self._find(structs.replace(claim, nodes=nodes, demand=demand), previous, failed_nodes)
            if spread.nodes is not None:
                return spread
        return found

    def _find(self, claim: Claim, previous: Collection[str], failed_nodes: Collection[str]) -> SearchResult:
        moves = self._begin(claim, previous)
        eligible = [name for name in self._room.capacity if claim.eligible is None or name in claim.eligible]
        count = self._node_count(claim, eligible)
        if count is None or not claim.required <= set(eligible):
            return SearchResult(None)
        share = None if claim.whole else _share(claim, count)
        ranked = self._ranked(eligible, share, claim, previous, failed_nodes)
        if len(ranked) < count:
            return SearchResult(None)
        chosen, leaving = self._vacate_first(count, ranked, share, claim, moves)
        if len(chosen) < count or not claim.required <= chosen.keys():
            self.undo_last()
            return SearchResult(None, moves.failed_nodes, moves.is_cut_short)
        return SearchResult(_grant(claim, chosen, leaving), moves.failed_nodes, moves.is_cut_short)

    def keep_free(self, claim: Claim, previous: Collection[str], *, only_free: bool = False) -> NodeGrant:
        """As many whole nodes as can be had of those that a standing claim asks for, in the order of ``find``.

        Nodes that are kept free for another one count, unless one of the two requires its nodes. ``only_free``: only
        nodes that no task has to leave.
        """
        moves = self._begin(claim, previous)
        if claim.members is not None:
            return self._vacate_reserved(claim, claim.members, moves)
        eligible = [name for name in self._room.capacity if claim.eligible is None or name in claim.eligible]
        kept = 0 if claim.required else sum(name in self._kept_free for name in eligible)
        ranked = self._ranked(eligible, None, claim, previous) if kept < claim.nodes else []
        if only_free:
            ranked = [name for name in ranked if not self._room.tasks_on[name]]
        chosen, leaving = self._vacate_first(claim.nodes - kept, ranked, None, claim, moves)
        if not claim.required:
            self._kept_free |= chosen.keys()
        return _grant(claim, chosen, leaving)

    def vacate_planned(self, claim: Claim, previous: Collection[str]) -> NodeGrant:
        """Vacate the planned nodes of a claim as if foreign jobs had ended there, as far as floors allow."""
        share = None if claim.whole else _share(claim, len(claim.planned))
        chosen: dict[str, Resources] = {}
        leaving: list[Task] = []
        room, moves = self._room, self._begin(claim, previous)
        for name in claim.planned:
            if name in room.capacity and self._failed_planned < MAX_FAILED_PLANNED_NODES:
                others = room.ignore_foreign_jobs(name)
                own = self._share_of_node(name, share, claim)
                left = moves.vacate(name, own, claim.planned)
                if left is None:
                    self._failed_planned += room.leavers(name, own, claim) is not None
                else:
                    chosen[name] = room.capacity[name] if own is None else own
                    leaving += left
                room.use(name, others)
        return _grant(claim, chosen, leaving)

    def reserve_planned(self, claim: Claim, free_now: Mapping[str, Resources]) -> NodeGrant:
        """What is free on the planned nodes of a claim that cannot start yet, if all jobs yield that may use them.

        What waiting elastic jobs of higher priority take there is not held.
        """
        self._undo_point = self._room.undo_point
        share = _share(claim, len(claim.planned))
        found: dict[str, Resources] = {}
        for node in claim.planned if self._jobs.all_yield_on(claim.planned, claim) else ():
            if node not in self._room.capacity:
                continue
            free = free_now.get(node, NO_RESOURCES).minimum(self._room.free(node))
            own = None if claim.whole else self._share_of_node(node, share, claim)
            held = free if own is None else free.minimum(own)
            if held.thousandths:
                found[node] = held
                self._room.hold_for_later(node, held)
        return _grant(claim, found)

    def _ranked(
        self, names: Iterable[str], share: Resources | None, claim: Claim, previous: Collection[str],
        failed_nodes: Collection[str] = (),
    ) -> list[str]:  # fmt: skip
        """The nodes that can give a share (None: all of a node) to a claim, in the order of ``find``."""
        ranked = []
        for name in names:
            leavers = self._room.leavers(name, self._share_of_node(name, share, claim), claim)
            if leavers is not None:
                order = (
                    name not in claim.required, name not in claim.planned,
                    not claim.standing and self._room.is_held_for_later(name), bool(leavers), name not in previous,
                    name in failed_nodes, len(leavers), any(task in self._room.rank_0_workers for task in leavers),
                    self._index[name],
                )  # fmt: skip
                ranked.append((order, name))
        return [name for _, name in sorted(ranked)]

    def _vacate_first(
        self, count: int, names: Iterable[str], share: Resources | None, claim: Claim, moves: MovesOffNodes
    ) -> tuple[dict[str, Resources], list[Task]]:
        """Vacate the first nodes that can be, at most ``count``: the room on each, and the tasks that leave them."""
        chosen: dict[str, Resources] = {}
        leaving: list[Task] = []
        for name in names:
            if len(chosen) == count:
                break
            own = self._share_of_node(name, share, claim)
            left = moves.vacate(name, own, chosen)
            if left is not None:
                chosen[name] = self._room.capacity[name] if own is None else own
                leaving += left
        return chosen, leaving

    def _share_of_node(self, name: str, share: Resources | None, claim: Claim) -> Resources | None:
        """What of a node a claim takes whose share, besides memory that it gets all, is this; None for all of it."""
        if share is None or not claim.all_memory:
            return share
        return share.maximum(Resources.of(memory=self._room.capacity[name].get("memory")))

    def _vacate_reserved(self, claim: Claim, members: Collection[str], moves: MovesOffNodes) -> NodeGrant:
        """Let the tasks of jobs that are not ``members`` leave the nodes of a reservation, as far as floors allow."""
        tasks_on = self._room.tasks_on
        reserved = frozenset(tasks_on if claim.eligible is None else claim.eligible)
        leaving: list[Task] = []
        for node in (name for name in tasks_on if name in reserved):
            for task in tasks_on[node]:
                outside = self._jobs.yields(task.job, claim) and self._jobs.anchors[task.job].handle not in members
                if outside and moves.let_leave(task, node, reserved):
                    leaving.append(task)
        return _grant(claim, dict.fromkeys((task.node for task in leaving), NO_RESOURCES), leaving)

    def _node_count(self, claim: Claim, eligible: Sequence[str]) -> int | None:
        """How many nodes a claim gets: more than it asks for if its share fits on no node; None if none suffice."""
        capacities = {self._room.capacity[name] for name in eligible}
        count = max(claim.nodes, len(claim.required), 1)
        while count <= len(eligible):
            share = _share(claim, count)
            if any(share.fits_in(capacity) for capacity in capacities):
                return count
            count += 1
        return None


def _grant(claim: Claim, rooms: Mapping[str, Resources], leaving: Iterable[Task] = ()) -> NodeGrant:
    return NodeGrant(
        handle=claim.handle, user=claim.user, priority=claim.priority, nodes=tuple(rooms), room=tuple(rooms.values()),
        leaving=tuple(task.tag for task in leaving),
    )  # fmt: skip


def _share(claim: Claim, nodes: int) -> Resources:
    """What a claim demands on each of so many nodes."""
    return Resources(tuple((name, -(-amount // nodes)) for name, amount in claim.demand.thousandths))
