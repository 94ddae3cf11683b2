"""Making room: which tasks have to go, or to move, so that waiting ones fit. Pure.

A decision counts tasks, but room has a place: four free GPUs on four nodes are no room for a task of two. Which of a
shrinking job's tasks leave is therefore chosen by who waits, and a task may be moved to let a larger one in.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dl2d.core.cluster import Task, TaskState
from dl2d.core.jobs import JobKey, Role
from dl2d.core.resources import NO_RESOURCES, Resources

#: A task's kind: tasks of one job and role are alike, so it does not matter which of them leaves.
Kind = tuple[JobKey, Role]

#: Most waiting tasks that are looked at in one tick; the rest is looked at in the next.
_MOST_WANTS = 64


@dataclass(frozen=True, slots=True)
class Want:
    """A task that was decided on and has no room."""

    kind: Kind
    demand: Resources


@dataclass(frozen=True, slots=True)
class Clearing:
    """What makes room."""

    #: Tasks of shrinking jobs that should be the ones to leave.
    leaving: tuple[Task, ...]
    #: Tasks that another of their kind, started elsewhere, should replace.
    moving: tuple[Task, ...]


def clear(
    wants: Sequence[Want],
    room: Mapping[str, Resources],
    tasks: Iterable[Task],
    surplus: Mapping[Kind, int],
) -> Clearing:
    """Choose what leaves or moves, one waiting task after the other, with the fewest and newest tasks disturbed.

    Parameters
    ----------
    wants
        Waiting tasks, in the order in which they should be served.
    room
        What is free on each node that takes tasks, or will be once tasks that are leaving already have left.
    tasks
        Tasks that are meant to stay members, by node.
    surplus
        How many tasks of a kind have to leave anyway.
    """
    free = dict(room)
    left = Counter({kind: count for kind, count in surplus.items() if count > 0})
    on_node: dict[str, list[Task]] = defaultdict(list)
    for task in sorted(tasks, key=lambda task: (task.state.rank >= TaskState.JOINED.rank, -task.number)):
        if task.node in free:
            on_node[task.node].append(task)
    wanting = {want.kind for want in wants}
    leaving: list[Task] = []
    moving: list[Task] = []
    for want in wants[:_MOST_WANTS]:
        node = next((name for name, here in free.items() if want.demand.fits_in(here)), None)
        if node is None:
            options = ((name, _victims(want.demand, free[name], on_node[name], left)) for name in free)
            found = [(name, victims) for name, victims in options if victims is not None]
            if found:
                # The fewest, then the newest: those that have trained for long stay.
                node, victims = min(found, key=lambda option: (len(option[1]), -min(task.number for task in option[1])))
                for task in victims:
                    left[task.job, task.role] -= 1
                    on_node[node].remove(task)
                    free[node] += task.demand
                leaving += victims
        if node is not None:
            free[node] = free[node].minus(want.demand)
            continue
        mover = _mover(want.demand, free, on_node, wanting | set(left.elements()))
        if mover is not None:
            task, target = mover
            on_node[task.node].remove(task)
            free[target] = free[target].minus(task.demand)
            free[task.node] = (free[task.node] + task.demand).minus(want.demand)
            moving.append(task)
    return Clearing(tuple(leaving), tuple(moving))


def _victims(demand: Resources, free: Resources, tasks: Sequence[Task], left: Counter[Kind]) -> list[Task] | None:
    """Fewest surplus tasks of one node whose leaving lets the demand in (greedily, those that help most first)."""
    may_go = Counter(left)
    victims: list[Task] = []
    while not demand.fits_in(free):
        short = [missing.resource for missing in demand.shortfalls(free)]
        useful = [
            task
            for task in tasks
            if task not in victims and may_go[task.job, task.role] > 0 and any(task.demand.get(name) for name in short)
        ]
        if not useful:
            return None
        task = max(useful, key=lambda task: sum(task.demand.get(name) > 0 for name in short))
        may_go[task.job, task.role] -= 1
        victims.append(task)
        free += task.demand
    return victims


def _mover(
    demand: Resources, free: Mapping[str, Resources], on_node: Mapping[str, Sequence[Task]], settled: set[Kind]
) -> tuple[Task, str] | None:
    """A task whose place the demand could have, and a node with room for it now."""
    for node, tasks in on_node.items():
        for task in tasks:
            if (task.job, task.role) in settled or task.state is not TaskState.CONFIRMED:
                continue
            if not demand.fits_in(free[node] + task.demand):
                continue
            target = next((name for name, here in free.items() if name != node and task.demand.fits_in(here)), None)
            if target is not None:
                return task, target
    return None


def room_with_leavers(room: Mapping[str, Resources], tasks: Iterable[Task]) -> dict[str, Resources]:
    """What is free on each node, and what will be when the tasks that are on their way out have left."""
    gone: dict[str, list[Resources]] = defaultdict(list)
    for task in tasks:
        if not task.state.wanted:
            gone[task.node].append(task.demand)
    return {name: Resources.total((here, *gone.get(name, (NO_RESOURCES,)))) for name, here in room.items()}
