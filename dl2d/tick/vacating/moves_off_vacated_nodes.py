"""How tasks leave the nodes that are vacated for a claim: their jobs can spare them, or they move elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dl2d.core.cluster import Task
from dl2d.core.packing.tasks_that_make_room import TaskGroup
from dl2d.core.resource_manager import Claim
from dl2d.core.resources import Resources
from dl2d.tick.vacating.node_search_state import NodeRoom

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

    What a search has found is remembered for the others of the same claim, during which room on nodes only becomes
    less: what has failed fails again, except that a node that was left out of the search may have room. For the next
    claim a new object is made.

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
        self._moving = {(task.job, task.role) for name in previous for task in room.tasks_on.get(name, ())}
        #: Nodes whose tasks could each leave but not all of them, for a reason that holds for that node only.
        self.failed_nodes = frozenset[str]()
        #: Nodes to which tasks may move: first those that the claim cannot use, then those where other tasks run, and
        #: last those that are planned for it.
        self._targets: list[str] = []
        #: By tasks that are alike, the index in ``_targets`` from which ``_move`` searches: no room is before it. It is
        #: changed through ``NodeRoom.change``, so that it goes back when a move is undone.
        self._first_target: dict[_Alike, int] = {}
        #: For each class of tasks that are alike and of which one could not move: the only node where another may still
        #: have room. It is that of the task that failed last, which its own search leaves out. Set only by a search
        #: before which no other task of the node had moved, or that tried just these nodes.
        self._immovable: dict[_Alike, list[str]] = {}
        #: Tasks that could each leave a node but not together, in the order in which they leave, given by their
        #: ``_way_of_leaving``. Such tasks cannot leave any other node either.
        self._stuck: set[tuple[object, ...]] = set()
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
            if ways in self._stuck:
                room.undo(undo_point)
                return None
            if not self._leave(task, node, chosen):
                can_leave_first = self._try_as_first(task, node, chosen)
                room.undo(undo_point)
                if can_leave_first:
                    self._note_stuck(ways, leavers, node)
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
        group = task.job, task.role
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

    def _note_stuck(self, ways: tuple[object, ...], leavers: Iterable[Task], node: str) -> None:
        """Note that tasks cannot leave a node together, nor tasks that would leave in the same ways another node.

        The latter is not known if one of them has room on the node itself, which was left out of the search, or if
        tasks that can be spared make room there: then only the node is noted.
        """
        room = self._room
        if any(map(room.can_spare, room.tasks_on[node])) or any(room.fits(task.demand, node) for task in leavers):
            self.failed_nodes |= {node}
        else:
            self._stuck.add(ways)

    def _leave(self, task: Task, node: str, chosen: Collection[str]) -> bool:
        """Let a task leave that its job can spare, or move to another node; returns whether it can."""
        if self._room.can_spare(task):
            self._room.spare(task)
            return True
        if (task.job, task.role) in self._without_replacement:
            return False
        if not self._targets:
            room, eligible, planned = self._room, self._claim.eligible, frozenset(self._claim.planned)
            self._targets = sorted(
                room.capacity,
                key=lambda name: (name in planned, eligible is None or name in eligible, not room.tasks_on[name]),
            )
        return self._move(task, node, chosen)

    def _move(self, task: Task, node: str, chosen: Collection[str]) -> bool:
        """Move a task off a node that is vacated; returns whether it can.

        The search begins where the last one for a task that is alike has found room (``_first_target``). If that found
        none, only the node that it left out is tried (``_immovable``).
        """
        room, alike = self._room, self._alike(task)
        untried = self._immovable.get(alike)
        if untried is None and self.is_cut_short:
            return False
        allowed, targets = alike[1], self._targets if untried is None else untried
        first, own = self._first_target.setdefault(alike, 0) if untried is None else 0, -1
        for place in range(first, len(targets)):
            name = targets[place]
            if name == node:
                own = place
            elif name not in chosen and (allowed is None or name in allowed) and room.fits(task.demand, name):
                if untried is None:
                    room.change(self._first_target, alike, place if own < 0 else own)
                room.use(name, task.demand)
                return True
        others = [name for name in targets if name != node and name not in chosen]
        if room.take(task.job, task.demand, others, self._may_make_room):
            return True
        if untried is not None or room.undo_point == self._before_moves:
            self._immovable[alike] = [node] if node in room.capacity else []
        return False

    def _may_make_room(self, task: Task) -> bool:
        if (task.job, task.role) in self._moving:
            return self._room.can_spare_for_good(task)
        return self._room.can_spare(task)

    def _alike(self, task: Task) -> _Alike:
        return task.demand, self._room.may_use.get(task.job)
