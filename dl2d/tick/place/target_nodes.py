"""Locality: compares the nodes that a decision names for its jobs' tasks with those where they run. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from dl2d.core.cluster import Task
from dl2d.core.decision import Constraint, Decision
from dl2d.core.jobs import JobKey, Role
from dl2d.core.packing import Blocked, Packing
from dl2d.core.resources import Resources
from dl2d.tick.place.make_room import Kind, free_after_leaving, leaving_order


class TargetNodes:
    """The nodes of a decision that are still open, and the tasks that leave because they run elsewhere."""

    def __init__(self, decision: Decision, by_kind: Mapping[Kind, Sequence[Task]], surplus: Mapping[Kind, int]) -> None:
        #: Nodes by kind that have no task of it yet.
        self._open: dict[Kind, list[str]] = defaultdict(list)
        for key, role, node in decision.nodes:
            self._open[key, role].append(node)
        #: Tasks that leave, of kinds for which that is settled: with named nodes, or of which none stays.
        self.leaving: dict[Kind, list[Task]] = {}
        #: What will be free on each node when all that leaves has left, less what goes there; None until needed.
        self._expected: dict[str, Resources] | None = None
        for kind, tasks in by_kind.items() if decision.nodes else ():
            count = surplus.get(kind, 0)
            if kind in self._open or count == len(tasks):
                elsewhere = self._take_up(kind, tasks)
                ordered = sorted(tasks, key=lambda task: (task.id not in elsewhere, *leaving_order(task)))
                self.leaving[kind] = ordered[:count]

    def names(self, job: JobKey) -> bool:
        """Whether the decision says where more tasks of a job should go."""
        return any(self._open.get((job, role)) for role in (Role.WORKER, Role.PS))

    def place(self, kind: Kind, demand: Resources, packing: Packing, tasks: Iterable[Task]) -> str | Blocked | None:
        """Add a task where the decision would have it: its node, or what it waits for there; None for anywhere else.

        ``tasks`` are all of the snapshot.
        """
        nodes = self._open.get(kind)
        while nodes:
            node = nodes.pop(0)
            expected = self.expected(packing, tasks)
            if node not in expected or not demand.fits_in(expected[node]):
                continue  # not even when all that leaves has left
            expected[node] = expected[node].minus(demand)
            if packing.place_on(node, demand):
                return node
            return Blocked(kind[1], Constraint.CAPACITY, node, demand.shortfalls(packing.room_on(node)))
        return None

    def took(self, node: str, demand: Resources) -> None:
        """A task was placed without these targets."""
        if self._expected is not None and node in self._expected:
            self._expected[node] = self._expected[node].minus(demand)

    def gave_back(self, node: str, demand: Resources) -> None:
        """A task that was placed, with or without these targets, is not started after all."""
        if self._expected is not None and node in self._expected:
            self._expected[node] += demand

    def expected(self, packing: Packing, tasks: Iterable[Task]) -> dict[str, Resources]:
        """What will be free on each node when all that leaves has left, less what was placed through these targets."""
        if self._expected is None:
            leavers = [task for leaving in self.leaving.values() for task in leaving]
            self._expected = free_after_leaving(packing.room(), tasks, leavers)
        return self._expected

    def _take_up(self, kind: Kind, tasks: Sequence[Task]) -> set[str]:
        """Remove nodes on which a task of the kind runs already; returns the ids of the tasks that run elsewhere."""
        nodes = Counter(self._open.get(kind, ()))
        elsewhere = set()
        for task in sorted(tasks, key=lambda task: task.number):
            if nodes[task.node] > 0:
                nodes[task.node] -= 1
                self._open[kind].remove(task.node)
            else:
                elsewhere.add(task.id)
        return elsewhere
