"""Which nodes elastic jobs vacate for claims: mostly foreign jobs that wait in the resource manager.

A foreign job that waits for whole nodes never starts while elastic jobs hold a part of each, and these have no end. So
elastic jobs give up tasks above their floors to a waiting job of higher priority (``Yields``), on as many nodes as it
needs. Its room counts as used on these nodes in the snapshot, so that policy, guard and placing all leave it free.

Claims get room in the order of their priority; nodes that the site keeps free for any job (standing claims) come last.
A claim is met if all nodes that it needs are found, free ones or such as can be vacated. No job shrinks for a claim
that cannot be met now even with all elastic jobs at their floors, with one exception: if the resource manager plans to
start the claim's job within ``lead_seconds``, the planned nodes are vacated in time. On nodes that are planned for
later, running tasks stay and no new ones start, if all elastic jobs that may use them yield to that claim.

If a claim's room has been free for ``MAX_UNUSED_SECONDS`` and its job has not started, it waits for something that the
resource manager does not show; if tasks have not left its nodes for ``MAX_VACATING_SECONDS`` more, they cannot. The
claim is set aside, with all like it of that user (elastic tasks and other jobs apart), and tried again after
``RETRY_SECONDS``. If other jobs waited before it when it was set aside, it is tried again as soon as none does. If
planned nodes were vacated before all that the job needs could be, and it has not started ``lead_seconds +
MAX_UNUSED_SECONDS`` later, they are released, and nothing is vacated for it until all its nodes can be.

A claim may lose nodes again before all tasks have left them. The search plans where moved tasks go, but ``place`` may
put them elsewhere. The room that the search counted on is then missing, the claim loses the node, the replacements end,
and the same search succeeds again. After ``MAX_LOST`` such rounds in ``RETRY_SECONDS``, counted over the claims of one
user with the same demand and nodes, these claims are set aside: no task leaves a node for them until the first of these
rounds is so long ago.

Cost: the time for standing claims grows with the number of nodes and with the number of tasks on the nodes that are
vacated.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import structs

from dl2d.core.cluster import NodeGrant, Snapshot, TaskGroup
from dl2d.core.jobs import Allocation, JobKey
from dl2d.core.resource_manager import Claim, GrowthLimit, RmListing
from dl2d.core.resources import Resources
from dl2d.tick.vacating.claim_history import (
    ClaimClass,
    ClaimHistory,
    ClaimKey,
    ClaimShape,
    SetAsideClaim,
    VacatedNode,
    nodes_of_grants,
)
from dl2d.tick.vacating.elastic_jobs_that_yield import ElasticJobs
from dl2d.tick.vacating.nodes_to_vacate import NodeSearch, SearchResult
from dl2d.tick.vacating.room_during_node_search import NodeRoom

#: Maximum number of claims that get room at once.
MAX_GRANTED = 64
#: Maximum number of kinds of claims whose planned nodes are looked at in one tick. Claims of the same user with the
#: same demand and the same nodes are of one kind.
MAX_EXAMINED = 256
#: For this many shapes (``ClaimShape``) of highest priority, of all users together, nodes are searched in each tick.
MAX_FIRST_SHAPES = 8
#: The other shapes take turns. In one tick, shapes times nodes of the cluster is at most this number.
MAX_SEARCHED_NODES = 20_000
#: How long a claim's room may be free without its job starting.
MAX_UNUSED_SECONDS = 300.0
#: How long tasks may take to leave a claim's nodes, before ``MAX_UNUSED_SECONDS`` begin: what has to replace them may
#: not start, for want of room or because the resource manager refuses it.
MAX_VACATING_SECONDS = 900.0
#: After how long a claim that is set aside is tried again.
RETRY_SECONDS = 3600.0
#: How often claims of a kind may lose nodes that tasks had to leave for them, in ``RETRY_SECONDS``, before
#: they are set aside.
MAX_LOST = 5
#: Behind claims of this many shapes of one user that are set aside, the user's further claims get no room; otherwise
#: jobs that never start could keep nodes empty one after the other.
MAX_SET_ASIDE_SHAPES = 4


def vacate_nodes(
    snapshot: Snapshot,
    listing: RmListing,
    history: ClaimHistory,
    *,
    now: float,
    lead_seconds: float,
    allocations: Mapping[JobKey, Allocation],
    backing_off: Collection[JobKey] = (),
    growth_limits: Iterable[GrowthLimit] = (),
    without_replacement: Collection[TaskGroup] = (),
    excluded_handles: Collection[str] = (),
) -> tuple[Snapshot, ClaimHistory]:
    """The snapshot with the claims that get room, and the next history. ``now``: seconds on a monotonic clock.

    ``allocations`` are those of the last decision. A job with more tasks than decided is in the middle of a move: the
    extra task is a replacement and does not count as spare.

    Silent jobs keep their tasks. Before claims of lower priority come elastic jobs that have nothing, with their
    minimum sizes, and those that lack tasks of their floors; except those that are silent or ``backing_off``, or to
    which ``growth_limits`` leave too little, since their tasks cannot start.
    Tasks of floors do not move if their job and role is in ``without_replacement``, as no new task of it would start.
    On an incomplete listing, which may lack nodes and jobs, no claim gets anything; those of the ``excluded_handles``
    never do.
    """
    if listing.incomplete:
        return snapshot, history
    # A sort is stable: standing claims come in the order of the listing.
    claims = sorted(
        (_once_first_always_first(claim, history) for claim in listing.claims if claim.handle not in excluded_handles),
        key=lambda claim: (claim.standing, -claim.priority),
    )
    first_to_wait = {_key(claim): _kind(claim) for claim in claims if not claim.behind_others}
    newly_first = {kind for key, kind in first_to_wait.items() if key not in history.was_first}
    lost_nodes = _LostNodes(history, claims, now)
    losing = lost_nodes.losing()
    set_aside = _SetAside(
        (
            each
            for each in history.set_aside
            if now - each.at < RETRY_SECONDS and not (each.behind_others and each.kind in newly_first)
        ),
        losing,
    )
    was_first = frozenset(first_to_wait)
    if not snapshot.jobs or not claims:
        return snapshot, ClaimHistory(set_aside=tuple(set_aside.claims), was_first=was_first, lost=lost_nodes.times)
    jobs = ElasticJobs(snapshot, listing)
    room = NodeRoom(snapshot, listing, jobs, allocations)
    search = NodeSearch(room, jobs, without_replacement)
    free_now = {node.name: node.capacity.minus(node.used) for node in snapshot.nodes}
    turns = _SearchTurns(history, max(MAX_SEARCHED_NODES // max(len(snapshot.nodes), 1), 1))
    waiting = jobs.waiting(growth_limits, backing_off)
    previous = history.nodes_by_handle()
    claimed = {node for _, node in history.nodes}
    granted: list[NodeGrant] = []
    unused_times = _UnusedTimes(history, now)
    for claim in turns.examined(claims, _SetAside(set_aside.claims, losing)):
        if len(granted) >= MAX_GRANTED and not claim.standing:
            continue
        first = next(
            (at for at, key in enumerate(waiting) if jobs.anchors[key].priority < claim.priority), len(waiting)
        )
        if first:
            room.take_lacked(waiting[:first], claimed, history.passed_over)
            del waiting[:first]
        shape, key = _shape(claim), _key(claim)
        found, unused, partial = None, 0.0, False
        may_get_all, may_vacate_planned = set_aside.allow_next(claim)
        if claim.standing:
            found = search.keep_free(claim, previous[claim.handle], only_free=_kind(claim) in losing)
        elif may_get_all and turns.include(claim):
            result = search.find(claim, previous[claim.handle], turns.failed_nodes_before(shape))
            turns.note(shape, result)
            found = result.nodes
            if found is not None:
                unused = unused_times.of_met_claim(key, is_free=_is_free(found, free_now))
        is_met = found is not None
        if found is None and claim.planned and may_vacate_planned:
            if claim.expected_start - snapshot.at > lead_seconds:
                found = search.reserve_planned(claim, free_now)
            else:
                found, partial = search.vacate_planned(claim, previous[claim.handle]), True
                unused = unused_times.of_planned_nodes(key) - lead_seconds
        if unused > MAX_UNUSED_SECONDS:
            search.undo_last()
            set_aside.claims.append(SetAsideClaim(_kind(claim), now, partial, claim.behind_others))
            continue
        if found is not None and found.nodes:
            granted.append(found)
            lost_nodes.note_granted(claim, found, free_now, room)
            if is_met:
                turns.met_count[claim.handle] += 1
            for node, share in zip(found.nodes, found.room, strict=True):
                free_now[node] = free_now[node].minus(share)
    lost_nodes.note_lost(room)
    losing = lost_nodes.losing()
    decided = history.decided if granted else frozenset[tuple[str, str]]()
    next_history = ClaimHistory(
        nodes_of_grants(granted), decided, unused_times.free, unused_times.vacated, tuple(set_aside.claims),
        turns.queue, turns.met_count, turns.failed_nodes, unused_times.vacating, frozenset(room.with_minimum),
        history.passed_over, was_first, lost_nodes.vacated, lost_nodes.times,
        tuple(dict.fromkeys(claim.handle for claim in claims if _kind(claim) in losing)),
    )  # fmt: skip
    return _with_grants(snapshot, granted), next_history


def _is_free(grant: NodeGrant, free_now: Mapping[str, Resources]) -> bool:
    return all(room.fits_in(free_now[node]) for node, room in zip(grant.nodes, grant.room, strict=True))


def _with_grants(snapshot: Snapshot, grants: Sequence[NodeGrant]) -> Snapshot:
    if not grants:
        return snapshot
    more: dict[str, list[Resources]] = defaultdict(list)
    for grant in grants:
        for node, room in zip(grant.nodes, grant.room, strict=True):
            more[node].append(room)
    nodes = tuple(
        structs.replace(node, used=Resources.total((node.used, *more[node.name]))) if node.name in more else node
        for node in snapshot.nodes
    )
    return structs.replace(snapshot, nodes=nodes, grants=tuple(grants))


def _once_first_always_first(claim: Claim, history: ClaimHistory) -> Claim:
    """The claim, which does not count as behind others once it was the first to wait (``was_first``)."""
    first = structs.replace(claim, behind_others=False)
    return first if _key(first) in history.was_first else claim


def _key(claim: Claim) -> ClaimKey:
    return ClaimKey(claim.handle, claim.waiting, claim.behind_others)


def _kind(claim: Claim) -> ClaimClass:
    return claim.set_aside_with, _shape(claim)


def _shape(claim: Claim) -> ClaimShape:
    return claim.nodes, claim.demand, claim.spreads, claim.whole, claim.all_memory, claim.eligible, claim.required


class _SearchTurns:
    """The claims for which nodes are searched in a tick, and how many of them are met.

    They are those that were met in the last tick, so that no others that cannot be met take their room from them; those
    of highest priority; and of the others those for which nodes were searched longest ago.
    """

    def __init__(self, history: ClaimHistory, in_turn: int) -> None:
        #: The next ``ClaimHistory.met_count``.
        self.met_count = Counter[str]()
        #: Shapes for which a search in this tick did not find enough nodes.
        self._failed_shapes: set[ClaimShape] = set()
        #: The next ``ClaimHistory.failed_nodes``.
        self.failed_nodes: dict[ClaimShape, frozenset[str]] = {}
        #: The next ``ClaimHistory.queue``.
        self.queue: tuple[ClaimShape, ...] = ()
        self._history = history
        #: For how many shapes nodes are searched because it is their turn.
        self._in_turn = in_turn
        self._due: set[ClaimShape] = set()

    def examined(self, claims: Sequence[Claim], set_aside: _SetAside) -> list[Claim]:
        """Standing claims, those under handles that had nodes in the last tick, those of the first ``MAX_EXAMINED``
        kinds, and those whose shape has its turn. Claims that are set aside have no turn.
        """
        allowed: dict[ClaimClass, bool] = {}
        for claim in claims:
            kind = _kind(claim)
            if not claim.standing and kind not in allowed:
                allowed[kind], _ = set_aside.allow_next(claim)
        shapes = dict.fromkeys(shape for (_, shape), may_get_all in allowed.items() if may_get_all)
        queue = [*(shape for shape in self._history.queue if shape in shapes), *shapes]
        first = set(list(shapes)[:MAX_FIRST_SHAPES])
        in_turn = [shape for shape in dict.fromkeys(queue) if shape not in first][: self._in_turn]
        self._due = first.union(in_turn)
        self.queue = tuple(dict.fromkeys([*(shape for shape in queue if shape not in self._due), *first, *in_turn]))
        looked_at = set(list(allowed)[:MAX_EXAMINED])
        had_nodes = {handle for handle, _ in self._history.nodes}
        examined = []
        for claim in claims:
            has_turn = _shape(claim) in self._due or _kind(claim) in looked_at
            if claim.standing or claim.handle in had_nodes or has_turn:
                examined.append(claim)
        return examined

    def failed_nodes_before(self, shape: ClaimShape) -> frozenset[str]:
        """Nodes that failed for a shape in the last ticks."""
        return self._history.failed_nodes.get(shape, frozenset())

    def note(self, shape: ClaimShape, result: SearchResult) -> None:
        """Note how a search ended, and which nodes failed."""
        before, failed = self.failed_nodes_before(shape), result.failed_nodes
        if result.nodes is None:
            self._failed_shapes.add(shape)
        if result.is_cut_short:
            self.failed_nodes[shape] = failed if failed <= before else failed | before
        elif result.nodes is not None and before:
            self.failed_nodes[shape] = before

    def include(self, claim: Claim) -> bool:
        """Whether nodes are searched for a claim."""
        shape = _shape(claim)
        if shape in self._failed_shapes:
            return False
        return shape in self._due or self.met_count[claim.handle] < self._history.met_count.get(claim.handle, 0)


class _UnusedTimes:
    """For how long, in seconds, claims have had room that their jobs do not use."""

    def __init__(self, history: ClaimHistory, now: float) -> None:
        self._history = history
        self._now = now
        #: The next ``free_since``, ``vacated_since`` and ``vacating_since`` of the history.
        self.free: dict[ClaimKey, float] = {}
        self.vacated: dict[ClaimKey, float] = {}
        self.vacating: dict[ClaimKey, float] = {}

    def of_met_claim(self, key: ClaimKey, *, is_free: bool) -> float:
        """Since its room was free; negative while tasks may still leave it."""
        if is_free:
            self.free[key] = self._history.free_since.get(key, self._now)
            return self._now - self.free[key]
        self.vacating[key] = self._history.vacating_since.get(key, self._now)
        return self._now - self.vacating[key] - MAX_VACATING_SECONDS

    def of_planned_nodes(self, key: ClaimKey) -> float:
        """Since planned nodes were first vacated for a claim that is not met."""
        self.vacated[key] = self._history.vacated_since.get(key, self._now)
        return self._now - self.vacated[key]


class _LostNodes:
    """When claims have lost nodes that tasks had to leave for them, although no foreign job has taken these."""

    def __init__(self, history: ClaimHistory, claims: Sequence[Claim], now: float) -> None:
        self._history = history
        self._claims = claims
        self._now = now
        #: The next ``vacated`` and ``lost`` of the history.
        self.vacated: dict[VacatedNode, Resources] = {}
        self.times = {
            kind: recent
            for kind, times in history.lost.items()
            if (recent := tuple(at for at in times if now - at < RETRY_SECONDS))
        }
        #: Place of each handle in the order in which claims get room, and the first place that has room on a node.
        self._place = {handle: place for place, handle in enumerate(dict.fromkeys(claim.handle for claim in claims))}
        self._first_on: dict[str, int] = {}
        #: Number of nodes that handles have got that are free or planned for them.
        self._gained = Counter[str]()

    def losing(self) -> frozenset[ClaimClass]:
        """Kinds of claims of claims that are set aside since they have lost nodes too often."""
        return frozenset(kind for kind, times in self.times.items() if len(times) >= MAX_LOST)

    def note_granted(self, claim: Claim, found: NodeGrant, free_now: Mapping[str, Resources], room: NodeRoom) -> None:
        """Note the nodes of a claim; ``free_now`` is what is free without them."""
        before = self._history.vacated
        for name, share in zip(found.nodes, found.room, strict=True):
            node, is_free = VacatedNode(claim.handle, claim.waiting, name), share.fits_in(free_now[name])
            if not is_free or node in before:
                self.vacated[node] = before.get(node, room.used_by_foreign_jobs[name])
            if (is_free or name in claim.planned) and (claim.handle, name) not in self._history.nodes:
                self._gained[claim.handle] += 1
            self._first_on.setdefault(name, self._place[claim.handle])

    def note_lost(self, room: NodeRoom) -> None:
        """Note which claims have lost nodes that neither foreign jobs nor claims before them have taken.

        They may exchange nodes for others that are free, or that are planned for them.
        """
        if not self._history.vacated:
            return
        kinds = {(claim.handle, claim.waiting): _kind(claim) for claim in self._claims}
        lost = Counter[tuple[str, int]]()
        for node, used in self._history.vacated.items():
            is_there = node[:2] in kinds and node.name in room.capacity
            if is_there and node not in self.vacated and room.used_by_foreign_jobs[node.name].fits_in(used):
                lost[node[:2]] += self._first_on.get(node.name, math.inf) >= self._place[node.handle]
        for kind in {kinds[key] for key, count in lost.items() if count > self._gained[key[0]]} - self.losing():
            self.times[kind] = (*self.times.get(kind, ()), self._now)


class _SetAside:
    """Claims that are set aside, and what that forbids to those that wait."""

    def __init__(self, claims: Iterable[SetAsideClaim], losing: Collection[ClaimClass]) -> None:
        self.claims = list(claims)
        self._losing = losing
        #: Shapes that are set aside, of the claims so far, by whose they are.
        self._set_aside_so_far: dict[tuple[str, bool], set[ClaimShape]] = defaultdict(set)

    def allow_next(self, claim: Claim) -> tuple[bool, bool]:
        """Whether a claim may get all its room now, and whether its planned nodes may be vacated before that.

        To be called for claims in the order in which they get room: one like a claim that is set aside counts for those
        of its user behind it.

        Neither is allowed to a claim that is set aside since it lost nodes, nor to one behind claims of
        ``MAX_SET_ASIDE_SHAPES`` shapes of its user that are set aside. A claim like one of its user that is set aside
        may not have planned nodes vacated, and gets all its room only if that one is ``partial``. One that was set
        aside behind others counts only for claims behind others.
        """
        kind, so_far = _kind(claim), self._set_aside_so_far[claim.set_aside_with]
        alike = [each for each in self.claims if each.kind == kind and (claim.behind_others or not each.behind_others)]
        is_held = len(so_far) >= MAX_SET_ASIDE_SHAPES or kind in self._losing
        if alike:
            so_far.add(_shape(claim))
        return not is_held and all(each.partial for each in alike), not is_held and not alike
