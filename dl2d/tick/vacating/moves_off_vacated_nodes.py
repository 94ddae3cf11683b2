"""How tasks leave the nodes that are vacated for a claim: their jobs can spare them, or they move elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dl2d.core.cluster import Task, TaskGroup
from dl2d.core.resource_manager import Claim
from dl2d.core.resources import Resources
from dl2d.tick.vacating.room_during_node_search import NodeRoom

#: When so many nodes have failed (``MovesOffNodes.failed_nodes``), no further tasks are moved for a claim in a tick.
#: The next tick begins with the nodes behind them.
MAX_FAILED_NODES = 64

#: What tasks have in common that find the same room: their demand, and the nodes that their job may use.
_Alike = tuple[Resources, frozenset[str] | None]


@dataclass(frozen=True, slots=True)
class _CannotMove:
    """A task of a floor whose replacement would not start, so that it neither leaves nor moves."""

    group: TaskGroup


class MovesOffNodes:
    """How tasks leave the nodes that are vacated for one claim.

    One object serves one claim. While its nodes are searched, room on nodes only becomes less, so what has failed once
    fails again. Remembered until the next claim is:

    - where the next search for room of tasks that are alike starts (``_first_destination``): nodes before that have
      none. It goes back when a move is undone;
    - which tasks cannot move (``_immovable``): one like them had no room anywhere, except perhaps on the node that it
      was to leave, which its own search left out;
    - which tasks cannot leave a node together (``_cannot_leave_together``), nor can tasks like them leave another node;
    - which nodes failed for a reason of their own (``failed_nodes``), which says nothing of other nodes.

    Replacements of tasks that move for another claim may make room. Those that have started for this claim, which had
    the nodes ``previous`` in the last tick, may not: they would be started again in the next tick, in the same place.
    """

    def __init__(
        self, room: NodeRoom, claim: Claim, without_replacement: Collection[TaskGroup], previous: Collection[str]
    ) -> None:
        self._room = room
        self._claim = claim
        self._without_replacement = without_replacement
        #: Jobs and roles with tasks on the claim's nodes of the last tick, which may move off them.
        self._moving = {task.group for name in previous for task in room.tasks_on.get(name, ())}
        #: Nodes whose tasks could each leave but not all of them, for a reason that holds for that node only.
        self.failed_nodes = frozenset[str]()
        #: Nodes to which tasks may move: first those that the claim cannot use, then those where other tasks run, and
        #: last those that are planned for it.
        self._destinations: list[str] = []
        #: By tasks that are alike: an index in ``_destinations``, changed through ``NodeRoom.change``.
        self._first_destination: dict[_Alike, int] = {}
        #: By tasks that are alike: the only node where another one may still have room, that of the task that failed
        #: last. Set by searches before which no other task of the node had moved, and by those of this node alone.
        self._immovable: dict[_Alike, list[str]] = {}
        #: The ``_way_of_leaving`` of each, in the order in which they leave.
        self._cannot_leave_together: set[tuple[object, ...]] = set()
        #: The state of the room when the tasks that leave a node were taken off it, before the first has moved.
        self._before_moves = 0

    @property
    def is_cut_short(self) -> bool:
        """Whether so many nodes have failed that no more tasks move for the claim."""
        return len(self.failed_nodes) >= MAX_FAILED_NODES

    def vacate(self, node: str, share: Resources | None, chosen: Collection[str]) -> list[Task] | None:
        """Take a share of a node, or (None) all of it; returns the tasks that leave, None where it cannot be had.

        ``chosen`` are nodes to which no task moves from there.
        """
        room = self._room
        undo_point = room.undo_point
        leavers = room.leavers(node, share, self._claim)
        if leavers is None:
            return None
        for task in leavers:
            room.remove(node, task)
        self._before_moves = room.undo_point
        ways: tuple[object, ...] = ()
        for task in leavers:
            ways = (*ways, self._way_of_leaving(task))
            if ways in self._cannot_leave_together:
                room.undo(undo_point)
                return None
            if not self._leave(task, node, chosen):
                can_leave_first = self._try_as_first(task, node, chosen)
                room.undo(undo_point)
                if can_leave_first:
                    self._note_cannot_leave_together(ways, leavers, node)
                return None
        room.use(node, room.capacity[node] if share is None else share)
        return leavers

    def let_leave(self, task: Task, node: str, chosen: Collection[str]) -> bool:
        """Let one task leave a node, whose room is not taken; returns whether it can."""
        undo_point = self._room.undo_point
        self._room.remove(node, task)
        self._before_moves = self._room.undo_point
        if self._leave(task, node, chosen):
            return True
        self._room.undo(undo_point)
        return False

    def _way_of_leaving(self, task: Task) -> object:
        """How a task would leave: its group, which can spare it; ``_Alike``, if it moves; or ``_CannotMove``."""
        group = task.group
        if self._room.can_spare(task):
            return group
        return _CannotMove(group) if group in self._without_replacement else self._alike(task)

    def _try_as_first(self, task: Task, node: str, chosen: Collection[str]) -> bool:
        """Whether a task that could not leave a node after others of it can do so as the first one.

        The others' moves are undone; that of this task as well.
        """
        if self._room.undo_point == self._before_moves:
            return False
        self._room.undo(self._before_moves)
        can_leave = self._leave(task, node, chosen)
        self._room.undo(self._before_moves)
        return can_leave

    def _note_cannot_leave_together(self, ways: tuple[object, ...], leavers: Iterable[Task], node: str) -> None:
        """Note that tasks cannot leave a node together, nor tasks that would leave in the same ways another node.

        The latter is not known if one of them has room on the node itself, which was left out of the search, or if
        tasks that can be spared make room there: then only the node is noted.
        """
        room = self._room
        if any(map(room.can_spare, room.tasks_on[node])) or any(room.fits(task.demand, node) for task in leavers):
            self.failed_nodes |= {node}
        else:
            self._cannot_leave_together.add(ways)

    def _leave(self, task: Task, node: str, chosen: Collection[str]) -> bool:
        """Let a task leave that its job can spare, or move to another node; returns whether it can."""
        if self._room.can_spare(task):
            self._room.spare(task)
            return True
        if task.group in self._without_replacement:
            return False
        if not self._destinations:
            room, eligible, planned = self._room, self._claim.eligible, frozenset(self._claim.planned)
            self._destinations = sorted(
                room.capacity,
                key=lambda name: (name in planned, eligible is None or name in eligible, not room.tasks_on[name]),
            )
        return self._move(task, node, chosen)

    def _move(self, task: Task, node: str, chosen: Collection[str]) -> bool:
        """Move a task off a node that is vacated; returns whether it can.

        The search begins where the last one for a task that is alike has found room (``_first_destination``). If that
        found none, only the node that it left out is tried (``_immovable``).
        """
        room, alike = self._room, self._alike(task)
        untried = self._immovable.get(alike)
        if untried is None and self.is_cut_short:
            return False
        allowed, destinations = alike[1], self._destinations if untried is None else untried
        first, own = self._first_destination.setdefault(alike, 0) if untried is None else 0, -1
        for place in range(first, len(destinations)):
            name = destinations[place]
            if name == node:
                own = place
            elif name not in chosen and (allowed is None or name in allowed) and room.fits(task.demand, name):
                if untried is None:
                    room.change(self._first_destination, alike, place if own < 0 else own)
                room.use(name, task.demand)
                return True
        others = [name for name in destinations if name != node and name not in chosen]
        if room.take(task.job, task.demand, others, self._may_make_room):
            return True
        if untried is not None or room.undo_point == self._before_moves:
            self._immovable[alike] = [node] if node in room.capacity else []
        return False

    def _may_make_room(self, task: Task) -> bool:
        if task.group in self._moving:
            return self._room.can_spare_for_good(task)
        return self._room.can_spare(task)

    def _alike(self, task: Task) -> _Alike:
        return task.demand, self._room.may_use.get(task.job)
