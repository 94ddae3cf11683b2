"""Claims: which nodes elastic jobs vacate for jobs of others that wait in the resource manager. Pure.

A rigid job that waits for whole nodes never starts while elastic jobs hold a part of each, and these have no end. So
elastic jobs give up tasks above their floors to a waiting job of higher priority (``Yields``), on as many nodes as it
needs. Its room counts as used on these nodes in the snapshot, so that policy, guard and placing all leave it free.

Claims get room in the order of their priority; nodes that the site keeps free for any job (standing claims) come last.
The running time for standing claims grows with the number of nodes and with the number of tasks on the nodes that are
vacated. No job shrinks for a claim that cannot get room now even with all elastic jobs at their floors, with one
exception: if the resource manager plans to start the claim's job within ``lead_seconds``, the planned nodes are vacated
in time. On nodes that are planned for later, running tasks stay and no new ones start, if all elastic jobs that may use
them yield to that claim.

If a claim's room has been free for ``MAX_UNUSED_SECONDS`` and its job has not started, it waits for something that the
resource manager does not show; if tasks have not left its nodes for ``MAX_VACATING_SECONDS`` more, they cannot. The
claim is given up, with all like it of that user, and tried again after ``RETRY_SECONDS``. If the job has not started
``MAX_UNUSED_SECONDS`` after its planned start, its planned nodes are released, and nothing is vacated for it until all
its nodes can be.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from msgspec import structs

from dl2d.core.cluster import ClaimedNodes, Node, NodeState, Snapshot, Task
from dl2d.core.jobs import NOTHING, TASK_ROLES, JobKey, Role
from dl2d.core.resource_manager import Claim, GrowthLimit, RmJob, RmListing, Yields
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.tick.place.make_room import TaskGroup
from dl2d.tick.place.task_leaving_order import first_member, leaving_order
from dl2d.tick.vacating_history import ClaimHistory, ClaimKey, ClaimShape, GivenUpClaim, nodes_of_claims

#: Maximum number of claims that get room at once.
MAX_GRANTED: Final = 64
#: Maximum number of kinds of claims whose planned nodes are looked at in one tick. Claims of the same user with the
#: same demand and the same nodes are of one kind.
MAX_EXAMINED: Final = 256
#: For this many kinds of highest priority, nodes are searched in each tick.
MAX_FIRST_KINDS: Final = 8
#: For the others in turn: for as many in a tick as make this number together with the nodes of the cluster.
MAX_SEARCHED_NODES: Final = 20_000
#: When the tasks of so many planned nodes had nowhere to go, no further planned nodes are vacated in the tick.
MAX_VAIN_PLANNED: Final = 256
#: When the tasks of so many nodes could each move but not all of them, no further ones are moved for a claim in a tick.
#: The next tick begins with the nodes behind them.
MAX_VAIN_MOVES: Final = 64
#: How long a claim's room may be free without its job starting.
MAX_UNUSED_SECONDS: Final = 300.0
#: How long tasks may take to leave a claim's nodes, before ``MAX_UNUSED_SECONDS`` begin: what has to replace them may
#: not start, for want of room or because the resource manager refuses it.
MAX_VACATING_SECONDS: Final = 900.0
#: After how long a claim that was given up is tried again.
RETRY_SECONDS: Final = 3600.0
#: When this many claims of one user are given up, the user's claims of lower priority are given up as well; otherwise
#: jobs that never start could keep nodes empty one after the other.
MAX_GIVEN_UP: Final = 4


def claim_nodes(
    snapshot: Snapshot,
    listing: RmListing,
    history: ClaimHistory,
    *,
    silent: Collection[JobKey],
    now: float,
    lead_seconds: float,
    held_back: Collection[JobKey] = (),
    growth_limits: Iterable[GrowthLimit] = (),
    without_replacement: Collection[TaskGroup] = (),
) -> tuple[Snapshot, ClaimHistory]:
    """The snapshot with the claims that get room, and the next history. ``now``: seconds on a monotonic clock.

    Jobs whose coordinator is ``silent`` keep their tasks. Waiting elastic jobs that are silent or ``held_back``, or for
    whose minimum size ``growth_limits`` leave too little, cannot start and take nothing from claims of lower priority.
    Tasks of floors do not move if their job and role is in ``without_replacement``, as no new task of it would start.
    An incomplete listing may lack nodes and jobs, so that nothing is claimed.
    """
    if listing.incomplete:
        return snapshot, history
    given_up = _GivenUp(each for each in history.given_up if now - each.at < RETRY_SECONDS)
    if not snapshot.jobs or not listing.claims:
        return snapshot, ClaimHistory(given_up=tuple(given_up.claims))
    rooms = _NodeRoom(snapshot, listing, silent, without_replacement)
    free_now = {node.name: node.capacity.minus(node.used) for node in snapshot.nodes}
    # A sort is stable: standing claims come in the order of the listing.
    claims = sorted(listing.claims, key=lambda claim: (claim.standing, -claim.priority))
    searched = _SearchedClaims(history, max(MAX_SEARCHED_NODES // max(len(snapshot.nodes), 1), 1))
    waiting = rooms.waiting_jobs(growth_limits, held_back)
    previous = history.nodes_by_handle()
    granted: list[ClaimedNodes] = []
    since = _Since(history, now)
    for claim in searched.examined(claims, _GivenUp(given_up.claims)):
        if len(granted) >= MAX_GRANTED and not claim.standing:
            continue
        while waiting and rooms.priority(waiting[0]) >= claim.priority:
            rooms.reserve_minimum(waiting.pop(0))
        shape, key = _shape(claim), ClaimKey(claim.handle, claim.waiting)
        found, unused, partial = None, 0.0, False
        may_meet, may_vacate_planned = given_up.allows(claim)
        if claim.standing:
            found = rooms.keep_free(claim, previous[claim.handle])
        elif may_meet and searched.include(claim):
            found = rooms.meet(claim, previous[claim.handle], searched.passed_over_before(shape))
            searched.note(shape, rooms.vain, is_met=found is not None, is_cut_short=rooms.is_cut_short)
            if found is not None:
                unused = since.met(key, is_free=_is_free(found, free_now))
        is_met = found is not None
        if found is None and claim.planned and may_vacate_planned:
            if claim.expected_start - snapshot.at > lead_seconds:
                found = rooms.hold_planned(claim, free_now)
            else:
                found, partial = rooms.vacate_planned(claim), True
                unused = since.planned_vacated(key) - lead_seconds
        if unused > MAX_UNUSED_SECONDS:
            rooms.undo_last()
            given_up.claims.append(GivenUpClaim(claim.user, shape, now, partial))
            continue
        if found is not None and found.nodes:
            granted.append(found)
            if is_met:
                searched.met[claim.handle] += 1
            for node, room in zip(found.nodes, found.room, strict=True):
                free_now[node] = free_now[node].minus(room)
    decided = history.decided if granted else frozenset[tuple[str, str]]()
    claimed = ClaimHistory(
        nodes_of_claims(granted), decided, since.free, since.vacated, tuple(given_up.claims),
        searched.queue, searched.met, searched.passed_over, since.vacating,
    )  # fmt: skip
    return _with_claims(snapshot, granted), claimed


def _is_free(claim: ClaimedNodes, free_now: Mapping[str, Resources]) -> bool:
    return all(room.fits_in(free_now[node]) for node, room in zip(claim.nodes, claim.room, strict=True))


def _with_claims(snapshot: Snapshot, claims: Sequence[ClaimedNodes]) -> Snapshot:
    if not claims:
        return snapshot
    more: dict[str, list[Resources]] = defaultdict(list)
    for claim in claims:
        for node, room in zip(claim.nodes, claim.room, strict=True):
            more[node].append(room)
    nodes = tuple(
        structs.replace(node, used=Resources.total((node.used, *more[node.name]))) if node.name in more else node
        for node in snapshot.nodes
    )
    return replace(snapshot, nodes=nodes, claims=tuple(claims))


def _shape(claim: Claim) -> ClaimShape:
    return claim.nodes, claim.demand, claim.whole, claim.eligible, claim.required


class _SearchedClaims:
    """The claims for which nodes are searched in a tick, and which of them are met.

    They are those that were met in the last tick, so that no others that cannot be met take their room from them; those
    of highest priority; and of the others those for which nodes were searched longest ago.
    """

    def __init__(self, history: ClaimHistory, in_turn: int) -> None:
        #: How many claims are met, by handle.
        self.met = Counter[str]()
        #: Shapes for which nodes were searched in vain in this tick.
        self.failed: set[ClaimShape] = set()
        #: The next ``ClaimHistory.passed_over``.
        self.passed_over: dict[ClaimShape, frozenset[str]] = {}
        #: The next ``ClaimHistory.queue``.
        self.queue: tuple[ClaimShape, ...] = ()
        self._history = history
        #: For how many shapes nodes are searched because it is their turn.
        self._in_turn = in_turn
        self._due: set[ClaimShape] = set()

    def examined(self, claims: Sequence[Claim], given_up: _GivenUp) -> list[Claim]:
        """Standing claims, those under handles that had nodes in the last tick, those of the first kinds, and those
        whose turn it is. Claims that were given up have no turn.
        """
        allowed: dict[tuple[str, ClaimShape], bool] = {}
        for claim in claims:
            kind = claim.user, _shape(claim)
            if not claim.standing and kind not in allowed:
                allowed[kind], _ = given_up.allows(claim)
        shapes = dict.fromkeys(shape for (_, shape), may_meet in allowed.items() if may_meet)
        queue = [*(shape for shape in self._history.queue if shape in shapes), *shapes]
        first = set(list(shapes)[:MAX_FIRST_KINDS])
        in_turn = [shape for shape in dict.fromkeys(queue) if shape not in first][: self._in_turn]
        self._due = first.union(in_turn)
        self.queue = tuple(dict.fromkeys([*(shape for shape in queue if shape not in self._due), *first, *in_turn]))
        looked_at = set(list(allowed)[:MAX_EXAMINED])
        had_nodes = {handle for handle, _ in self._history.nodes}
        examined = []
        for claim in claims:
            shape = _shape(claim)
            has_turn = shape in self._due or (claim.user, shape) in looked_at
            if claim.standing or claim.handle in had_nodes or has_turn:
                examined.append(claim)
        return examined

    def passed_over_before(self, shape: ClaimShape) -> frozenset[str]:
        """Nodes that were tried in vain for a shape in the last ticks."""
        return self._history.passed_over.get(shape, frozenset())

    def note(self, shape: ClaimShape, vain: frozenset[str], *, is_met: bool, is_cut_short: bool) -> None:
        """Note how a search ended, and which nodes were tried in vain."""
        before = self.passed_over_before(shape)
        if not is_met:
            self.failed.add(shape)
        if is_cut_short:
            self.passed_over[shape] = vain if vain <= before else vain | before
        elif is_met and before:
            self.passed_over[shape] = before

    def include(self, claim: Claim) -> bool:
        """Whether nodes are searched for a claim."""
        shape = _shape(claim)
        if shape in self.failed:
            return False
        return shape in self._due or self.met[claim.handle] < self._history.met.get(claim.handle, 0)


class _Since:
    """Since when claims have room, or are about to get it; in seconds on a monotonic clock."""

    def __init__(self, history: ClaimHistory, now: float) -> None:
        self._history = history
        self._now = now
        #: The next fields of the history.
        self.free: dict[ClaimKey, float] = {}
        self.vacated: dict[ClaimKey, float] = {}
        self.vacating: dict[ClaimKey, float] = {}

    def met(self, key: ClaimKey, *, is_free: bool) -> float:
        """For how long a claim that is met has not used its room, beyond the time that its tasks have to leave."""
        if is_free:
            self.free[key] = self._history.free_since.get(key, self._now)
            return self._now - self.free[key]
        self.vacating[key] = self._history.vacating_since.get(key, self._now)
        return self._now - self.vacating[key] - MAX_VACATING_SECONDS

    def planned_vacated(self, key: ClaimKey) -> float:
        """For how long planned nodes have been vacated for a claim that cannot be met yet."""
        self.vacated[key] = self._history.vacated_since.get(key, self._now)
        return self._now - self.vacated[key]


class _GivenUp:
    """Claims that were given up a short while ago, while claims are met by priority."""

    def __init__(self, claims: Iterable[GivenUpClaim]) -> None:
        self.claims = list(claims)
        #: Shapes of those that were looked for, by user.
        self._found: dict[str, set[ClaimShape]] = defaultdict(set)

    def allows(self, claim: Claim) -> tuple[bool, bool]:
        """Whether a claim may get all its room now, and whether its planned nodes may be vacated before that.

        Neither is allowed to a claim behind ``MAX_GIVEN_UP`` claims of its user that were given up. A claim like one of
        its user that was given up may not have planned nodes vacated, and gets all its room only if that one was
        ``partial``.
        """
        shape, found = _shape(claim), self._found[claim.user]
        alike = [each for each in self.claims if (each.user, each.shape) == (claim.user, shape)]
        is_behind = len(found) >= MAX_GIVEN_UP
        if alike:
            found.add(shape)
        return not is_behind and all(each.partial for each in alike), not is_behind and not alike


def _claimed(claim: Claim, rooms: Mapping[str, Resources], leaving: Iterable[Task] = ()) -> ClaimedNodes:
    return ClaimedNodes(
        handle=claim.handle, user=claim.user, priority=claim.priority, nodes=tuple(rooms), room=tuple(rooms.values()),
        leaving=tuple(task.tag for task in leaving),
    )  # fmt: skip


def _yields(anchor: RmJob, claim: Claim) -> bool:
    """Whether the job of an anchor gives up tasks to a claim."""
    if anchor.yields is Yields.HIGHER_PRIORITY and not claim.standing:
        return claim.priority > anchor.priority
    return anchor.yields is not Yields.NEVER


def _share(claim: Claim, nodes: int) -> Resources:
    """What a claim demands on each of so many nodes."""
    return Resources(tuple((name, -(-amount // nodes)) for name, amount in claim.demand.thousandths))


@dataclass(frozen=True, slots=True)
class _CannotMove:
    """A task of a floor whose replacement would not start, so that it neither leaves nor moves."""

    group: TaskGroup


class _NodeRoom:
    """Room on each node when all draining tasks have left, while claims are met one after the other."""

    def __init__(
        self,
        snapshot: Snapshot,
        listing: RmListing,
        silent: Collection[JobKey],
        without_replacement: Collection[TaskGroup],
    ) -> None:
        anchors = {job.anchor: job.key for job in snapshot.jobs if job.anchor and not job.static}
        self._anchors = {anchors[each.handle]: each for each in listing.jobs if each.handle in anchors}
        self._jobs = {job.key: job for job in snapshot.jobs}
        self._silent = silent
        self._without_replacement = without_replacement
        self._held = snapshot.held()
        # Nodes that no elastic job may use take no tasks in the snapshot.
        self._capacity = {node.name: node.capacity for node in listing.nodes if node.state is NodeState.UP}
        self._everywhere = frozenset(self._capacity)
        self._may_use = snapshot.may_use()
        self._index = {name: index for index, name in enumerate(self._capacity)}
        ours: dict[str, list[Resources]] = defaultdict(list)
        here: dict[str, list[Task]] = defaultdict(list)
        groups: dict[TaskGroup, list[Task]] = defaultdict(list)
        for task in snapshot.tasks:
            ours[task.node].append(task.room)
            if task.state.wanted:
                here[task.node].append(task)
                groups[task.job, task.role].append(task)
        #: The worker of rank 0 of each job; it leaves last.
        self._rank0_workers = {first_member(tasks) for (_, role), tasks in groups.items() if role is Role.WORKER}
        #: Tasks on each node that are meant to run.
        self._tasks_on = {
            node.name: tuple(sorted(here.get(node.name, ()), key=self._leaving_order)) for node in listing.nodes
        }
        #: What jobs of others use.
        self._jobs_of_others_on = {node.name: self._used_by_others(node, ours[node.name]) for node in snapshot.nodes}
        #: The same with the room of claims and of the tasks that move there.
        self._used_by_others_on = dict(self._jobs_of_others_on)
        floors = dict(snapshot.floors)
        #: How many tasks of a group may leave.
        self._above_floor: dict[TaskGroup, int] = {}
        for key, held in self._held.items():
            floor = floors.get(key, self._jobs[key].request.min_size)
            for role in TASK_ROLES:
                self._above_floor[key, role] = max(held.count(role) - floor.count(role), 0)
        #: Changes that can be undone: mapping, key and former value. ``_undo_point``: its length before the last claim.
        self._undo_log: list[tuple[dict[Any, Any], Any, Any]] = []
        self._undo_point = 0
        #: What is free on nodes, in thousandths, where it was asked for since it changed last.
        self._free_on: dict[str, dict[str, int]] = {}
        #: Tasks that could not move while nodes are vacated for a claim, by demand and nodes that their job may use,
        #: with the nodes that were not tried: that of the last such task itself.
        self._immovable: dict[tuple[Resources, frozenset[str] | None], list[str]] = {}
        #: By demand and nodes that their job may use, where in ``_move_targets`` tasks found room last.
        self._first_target: dict[tuple[Resources, frozenset[str] | None], int] = {}
        #: Tasks that could not leave a node together, in the order in which they leave. Each entry says how the task
        #: would leave: its group, which can spare it; ``_alike`` of it, if it moves; or ``_CannotMove``.
        self._stuck: set[tuple[object, ...]] = set()
        #: Nodes whose tasks could not move together for the present claim, of which nothing follows for others.
        self.vain = frozenset[str]()
        #: Number of planned nodes whose tasks yield and had nowhere to go.
        self._vain_planned = 0
        #: Length of the undo log when the tasks of a node that leave were taken off it, before the first has moved.
        self._node_point = 0
        #: Nodes to which tasks may move for the claim that is met: first those that it cannot use, then those where
        #: other tasks run.
        self._move_targets: list[str] = []

    @staticmethod
    def _used_by_others(node: Node, ours: Sequence[Resources]) -> Resources:
        return node.used.minus(Resources.total(ours)) if ours else node.used

    def _leaving_order(self, task: Task) -> tuple[bool, bool, int]:
        return task in self._rank0_workers, *leaving_order(task)

    def priority(self, key: JobKey) -> int:
        """Priority of a job's anchor."""
        return self._anchors[key].priority

    def waiting_jobs(self, growth_limits: Iterable[GrowthLimit], held_back: Collection[JobKey]) -> list[JobKey]:
        """Elastic jobs that have nothing, by priority: those that come before a claim of lower priority.

        Without those that cannot start: they are silent or ``held_back``, or a limit leaves too little for their
        minimum size.
        """
        waiting = {
            anchor.handle: key
            for key, anchor in self._anchors.items()
            if self._held[key] == NOTHING and anchor.yields is not Yields.ALWAYS
            if key not in held_back and key not in self._silent
        }
        for limit in growth_limits if waiting else ():
            for handle in limit.anchors & waiting.keys():
                request = self._jobs[waiting[handle]].request
                least = Resources.total(request.demand(role) * request.min_size.count(role) for role in TASK_ROLES)
                if not limit.allows(least):
                    del waiting[handle]
        return sorted(waiting.values(), key=lambda key: -self.priority(key))

    def reserve_minimum(self, key: JobKey) -> None:
        """Take the room of a waiting job's minimum size where it is free or others can spare it, all or nothing."""
        request, undo_point = self._jobs[key].request, len(self._undo_log)
        for role in TASK_ROLES:
            for _ in range(request.min_size.count(role)):
                if not self._take(key, request.demand(role), self._capacity):
                    self._undo(undo_point)
                    return

    @property
    def is_cut_short(self) -> bool:
        """Whether so many nodes were tried in vain for the present claim that no more tasks move for it."""
        return len(self.vain) >= MAX_VAIN_MOVES

    def meet(self, claim: Claim, previous: Collection[str], passed_over: Collection[str]) -> ClaimedNodes | None:
        """Nodes for a claim and the tasks that leave them; None where it cannot be met now.

        Nodes that it requires come first, then those that are planned for it, those that no task has to leave (before
        all those that it had in the last tick), and those that the fewest tasks have to leave; ``passed_over``, which
        were tried in vain in the last ticks, behind others that tasks have to leave.
        """
        self._begin()
        eligible = [name for name in self._capacity if claim.eligible is None or name in claim.eligible]
        count = self._node_count(claim, eligible)
        if count is None or not claim.required <= set(eligible):
            return None
        share = None if claim.whole else _share(claim, count)
        ranked = self._ranked(eligible, share, claim, previous, passed_over)
        if len(ranked) < count:
            return None
        chosen, leaving = self._vacate_first(count, ranked, share, claim)
        if len(chosen) < count or not claim.required <= chosen.keys():
            self._undo(self._undo_point)
            return None
        return _claimed(claim, chosen, leaving)

    def keep_free(self, claim: Claim, previous: Collection[str]) -> ClaimedNodes:
        """As many whole nodes as can be had of those that a standing claim asks for, in the order of ``meet``."""
        if claim.members is not None:
            return self._vacate_reserved(claim, claim.members)
        self._begin()
        eligible = (name for name in self._capacity if claim.eligible is None or name in claim.eligible)
        ranked = self._ranked(eligible, None, claim, previous)
        return _claimed(claim, *self._vacate_first(claim.nodes, ranked, None, claim))

    def _ranked(
        self, names: Iterable[str], share: Resources | None, claim: Claim, previous: Collection[str],
        passed_over: Collection[str] = (),
    ) -> list[str]:  # fmt: skip
        """The nodes that can give a share (None: all of a node) to a claim, in the order of ``meet``."""
        ranked = []
        for name in names:
            leavers = self._leavers(name, share, claim)
            if leavers is not None:
                order = (
                    name not in claim.required, name not in claim.planned, bool(leavers), name not in previous,
                    name in passed_over, len(leavers), any(task in self._rank0_workers for task in leavers),
                    self._index[name],
                )  # fmt: skip
                ranked.append((order, name))
        return [name for _, name in sorted(ranked)]

    def _vacate_first(
        self, count: int, names: Iterable[str], share: Resources | None, claim: Claim
    ) -> tuple[dict[str, Resources], list[Task]]:
        """Vacate the first nodes that can be, at most ``count``: the room on each, and the tasks that leave them."""
        chosen: dict[str, Resources] = {}
        leaving: list[Task] = []
        for name in names:
            if len(chosen) == count:
                break
            left = self._vacate(name, share, claim, chosen)
            if left is not None:
                chosen[name] = self._capacity[name] if share is None else share
                leaving += left
        return chosen, leaving

    def _vacate_reserved(self, claim: Claim, members: Collection[str]) -> ClaimedNodes:
        """Let the tasks of jobs that are not ``members`` leave the nodes of a reservation, as far as floors allow."""
        self._begin()
        reserved = frozenset(self._tasks_on if claim.eligible is None else claim.eligible)
        leaving: list[Task] = []
        for node in (name for name in self._tasks_on if name in reserved):
            for task in self._tasks_on[node]:
                if self._yields(task.job, claim) and self._anchors[task.job].handle not in members:
                    undo_point = len(self._undo_log)
                    self._remove(node, task)
                    self._node_point = len(self._undo_log)
                    if self._leave(task, node, claim, reserved):
                        leaving.append(task)
                    else:
                        self._undo(undo_point)
        return _claimed(claim, dict.fromkeys((task.node for task in leaving), NO_RESOURCES), leaving)

    def _begin(self) -> None:
        """Begin with the next claim."""
        self._undo_point, self._move_targets = len(self._undo_log), []
        self.vain = frozenset()
        self._immovable.clear()
        self._stuck.clear()
        self._first_target.clear()

    def undo_last(self) -> None:
        """Take back the claim that was met last, or for which nodes were vacated last."""
        self._undo(self._undo_point)

    def vacate_planned(self, claim: Claim) -> ClaimedNodes:
        """Vacate the planned nodes of a claim as if the jobs of others had ended there, as far as floors allow."""
        share = None if claim.whole else _share(claim, len(claim.planned))
        chosen: dict[str, Resources] = {}
        leaving: list[Task] = []
        self._begin()
        for name in claim.planned:
            if name in self._capacity and self._vain_planned < MAX_VAIN_PLANNED:
                others = self._jobs_of_others_on[name]
                self._set(self._used_by_others_on, name, self._used_by_others_on[name].minus(others))
                left = self._vacate(name, share, claim, claim.planned)
                if left is None:
                    self._vain_planned += self._leavers(name, share, claim) is not None
                else:
                    chosen[name] = self._capacity[name] if share is None else share
                    leaving += left
                self._use(name, others)
        return _claimed(claim, chosen, leaving)

    def hold_planned(self, claim: Claim, free_now: Mapping[str, Resources]) -> ClaimedNodes:
        """What is free on the planned nodes of a claim that cannot start yet, if all jobs yield that may use them."""
        self._begin()
        share = _share(claim, len(claim.planned))
        found: dict[str, Resources] = {}
        planned = frozenset(claim.planned)
        if all(
            _yields(anchor, claim) or planned.isdisjoint(self._may_use.get(key, self._everywhere))
            for key, anchor in self._anchors.items()
        ):
            for node in claim.planned:
                free = free_now.get(node, NO_RESOURCES)
                held = free if claim.whole else free.minimum(share)
                if held.thousandths:
                    found[node] = held
                    self._use(node, held)
        return _claimed(claim, found)

    def _node_count(self, claim: Claim, eligible: Sequence[str]) -> int | None:
        """On how many nodes a claim is met: more than it asks for if its share fits on no node; None if not at all."""
        capacities = {self._capacity[name] for name in eligible}
        count = max(claim.nodes, len(claim.required), 1)
        while count <= len(eligible):
            share = _share(claim, count)
            if any(share.fits_in(capacity) for capacity in capacities):
                return count
            count += 1
        return None

    def _yields(self, key: JobKey, claim: Claim) -> bool:
        """Whether a job gives up tasks to a claim."""
        anchor = self._anchors.get(key)
        return anchor is not None and key not in self._silent and _yields(anchor, claim)

    def _free(self, node: str) -> Mapping[str, int]:
        """What is free on a node, in thousandths; negative where more is used than it has."""
        free = self._free_on.get(node)
        if free is None:
            free = dict(self._capacity[node].thousandths)
            for used in (self._used_by_others_on[node], *(task.room for task in self._tasks_on[node])):
                for name, amount in used.thousandths:
                    free[name] = free.get(name, 0) - amount
            self._free_on[node] = free
        return free

    def _fits(self, demand: Resources, node: str) -> bool:
        """Whether a demand is free on a node."""
        free = self._free(node)
        for name, amount in demand.thousandths:  # noqa: SIM110 - a generator takes longer, and this is asked often
            if free.get(name, 0) < amount:
                return False
        return True

    def _leavers(self, node: str, share: Resources | None, claim: Claim | None) -> list[Task] | None:
        """Tasks whose leaving makes room for a share, or (None) for the whole node; None where nothing makes it.

        They are of jobs that yield to a claim, or without one of those that may lose tasks anyway.
        """
        here = self._tasks_on[node]
        if share is None:
            if self._used_by_others_on[node].thousandths or not all(
                claim and self._yields(task.job, claim) for task in here
            ):
                return None
            return list(here)
        free = self._free(node)
        short = {name: amount - free.get(name, 0) for name, amount in share.thousandths if amount > free.get(name, 0)}
        leavers: list[Task] = []
        for task in here if short else ():
            may_leave = self._yields(task.job, claim) if claim else self._above_floor.get((task.job, task.role), 0) > 0
            if may_leave and any(name in short for name, _ in task.room.thousandths):
                leavers.append(task)
                for name, amount in task.room.thousandths:
                    if name in short:
                        short[name] -= amount
                short = {name: amount for name, amount in short.items() if amount > 0}
            if not short:
                break
        return None if short else leavers

    def _vacate(self, node: str, share: Resources | None, claim: Claim, chosen: Collection[str]) -> list[Task] | None:
        """Take a share of a node, or (None) all of it; returns the tasks that leave, None where it cannot be had.

        ``chosen`` are nodes to which no task moves from there.
        """
        undo_point = len(self._undo_log)
        leavers = self._leavers(node, share, claim)
        if leavers is None:
            return None
        for task in leavers:
            self._remove(node, task)
        self._node_point = len(self._undo_log)
        ways: tuple[object, ...] = ()
        for task in leavers:
            group = task.job, task.role
            if self._above_floor.get(group, 0) > 0:
                ways = (*ways, group)
            else:
                ways = (*ways, _CannotMove(group) if group in self._without_replacement else self._alike(task))
            if ways in self._stuck:
                self._undo(undo_point)
                return None
            if not self._leave(task, node, claim, chosen):
                leaves_alone = self._leaves_alone(task, node, claim, chosen)
                self._undo(undo_point)
                if leaves_alone:
                    self._note_stuck(ways, leavers, node)
                return None
        self._use(node, self._capacity[node] if share is None else share)
        return leavers

    def _leaves_alone(self, task: Task, node: str, claim: Claim, chosen: Collection[str]) -> bool:
        """Whether a task that could not leave a node after others of it can do so as the first one."""
        if len(self._undo_log) == self._node_point:
            return False
        self._undo(self._node_point)
        return self._leave(task, node, claim, chosen)

    def _note_stuck(self, ways: tuple[object, ...], leavers: Iterable[Task], node: str) -> None:
        """Note that tasks cannot leave a node together, and that the like of them cannot leave another one.

        This does not follow if there is room for one of them on the node itself, which was left out of the search, or
        if others can make room there.
        """
        can_spare = any(self._above_floor.get((task.job, task.role), 0) > 0 for task in self._tasks_on[node])
        if can_spare or any(self._fits(task.demand, node) for task in leavers):
            self.vain |= {node}
        else:
            self._stuck.add(ways)

    def _leave(self, task: Task, node: str, claim: Claim, chosen: Collection[str]) -> bool:
        """Let a task leave that its job can do without, or move to another node; returns whether it can."""
        group = task.job, task.role
        if self._above_floor.get(group, 0) > 0:
            self._set(self._above_floor, group, self._above_floor[group] - 1)
            return True
        if group in self._without_replacement:
            return False
        if not self._move_targets:
            eligible = claim.eligible
            self._move_targets = sorted(
                (name for name in self._capacity if name not in claim.planned),
                key=lambda name: (eligible is None or name in eligible, not self._tasks_on[name], self._index[name]),
            )
        return self._move(task, node, chosen)

    def _move(self, task: Task, node: str, chosen: Collection[str]) -> bool:
        """Move a task off a node that is vacated; returns whether it can.

        Room on nodes becomes less and less meanwhile: the search goes on where one for the like of the task had found
        room, and where that had found none it is not repeated. The task's own node was left out of that search.
        """
        alike = self._alike(task)
        untried = self._immovable.get(alike)
        if untried is None and self.is_cut_short:
            return False
        allowed, targets = alike[1], self._move_targets if untried is None else untried
        first, own = self._first_target.setdefault(alike, 0) if untried is None else 0, -1
        for place in range(first, len(targets)):
            name = targets[place]
            if name == node:
                own = place
            elif name not in chosen and (allowed is None or name in allowed) and self._fits(task.demand, name):
                if untried is None:
                    self._set(self._first_target, alike, place if own < 0 else own)
                self._use(name, task.demand)
                return True
        if self._take(task.job, task.demand, [name for name in targets if name != node and name not in chosen]):
            return True
        if untried is not None or len(self._undo_log) == self._node_point:
            self._immovable[alike] = [node] if node in self._capacity else []
        return False

    def _alike(self, task: Task) -> tuple[Resources, frozenset[str] | None]:
        """What tasks have in common that find the same room: their demand, and the nodes that their job may use."""
        return task.demand, self._may_use.get(task.job)

    def _take(self, key: JobKey, demand: Resources, nodes: Collection[str]) -> bool:
        """Take a demand of a job on the first node where it is free, or else where jobs can spare tasks for it."""
        allowed = self._may_use.get(key)
        if allowed is not None:
            nodes = [name for name in nodes if name in allowed]
        found = next((name for name in nodes if self._fits(demand, name)), None)
        if found is None and any(self._above_floor.values()):
            found = next((name for name in nodes if self._tasks_on[name] and self._make_room(name, demand)), None)
        if found is not None:
            self._use(found, demand)
        return found is not None

    def _make_room(self, node: str, demand: Resources) -> bool:
        """Let tasks leave a node that their jobs can do without, so that a demand fits there."""
        undo_point = len(self._undo_log)
        leavers = self._leavers(node, demand, None)
        for task in leavers or ():
            group = task.job, task.role
            if self._above_floor[group] <= 0:
                self._undo(undo_point)
                return False
            self._set(self._above_floor, group, self._above_floor[group] - 1)
            self._remove(node, task)
        return leavers is not None

    def _remove(self, node: str, task: Task) -> None:
        self._set(self._tasks_on, node, tuple(other for other in self._tasks_on[node] if other is not task))

    def _use(self, node: str, room: Resources) -> None:
        self._set(self._used_by_others_on, node, self._used_by_others_on[node] + room)

    def _set(self, mapping: dict[Any, Any], key: Any, value: object) -> None:
        self._undo_log.append((mapping, key, mapping[key]))
        mapping[key] = value
        self._free_on.pop(key, None)

    def _undo(self, undo_point: int) -> None:
        while len(self._undo_log) > undo_point:
            mapping, key, value = self._undo_log.pop()
            mapping[key] = value
            self._free_on.pop(key, None)
