"""Nodes of the tasks of static jobs, where the resource manager does not say how many are on which of a job's nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from msgspec import structs

from dl2d.core.cluster import Node, Task
from dl2d.core.jobs import JobKey
from dl2d.core.resources import Resources


def as_nodes_are_used(tasks: Iterable[Task], static: Collection[JobKey], nodes: Iterable[Node]) -> tuple[Task, ...]:
    """The tasks; those of ``static`` jobs are moved among the nodes of their job, where a node has less in use.

    Stored tasks are spread evenly. Were more of them on a node than its use allows, and fewer on another, a packing
    would take the remainder there for what others hold, and would not have room for the sizes that jobs have. Where
    more than is in use is left on a node, its tasks are shown to hold less.
    """
    tasks, used = tuple(tasks), {node.name: node.used for node in nodes}
    rooms: dict[str, list[Resources]] = defaultdict(list)
    for task in tasks:
        rooms[task.node].append(task.room)
    held = {name: Resources.total(rooms[name]) for name in rooms.keys() | used.keys()}
    if all(held[name].fits_in(amount) for name, amount in used.items()):
        return tasks
    of_job: dict[JobKey, set[str]] = defaultdict(set)
    for task in tasks:
        if task.node in used and task.job in static:
            of_job[task.job].add(task.node)
    found = []
    for task in tasks:
        node, others = task.node, of_job.get(task.job, set()) - {task.node}
        if others and node in used and not held[node].fits_in(used[node]):
            room = task.room
            node = next((name for name in sorted(others) if (held[name] + room).fits_in(used[name])), node)
            held[task.node] = held[task.node].minus(room)
            held[node] += room
        found.append(task if node == task.node else structs.replace(task, node=node))
    return tuple(_within(task, held, used) if task.job in static else task for task in found)


def _within(task: Task, held: Mapping[str, Resources], used: Mapping[str, Resources]) -> Task:
    """The task, holding its share of what its node has in use where the tasks there would hold more."""
    if task.node not in used or held[task.node].fits_in(used[task.node]):
        return task
    have, most = dict(held[task.node].thousandths), dict(used[task.node].thousandths)
    shares = (
        (name, amount * min(most.get(name, 0), have[name]) // have[name]) for name, amount in task.room.thousandths
    )
    return structs.replace(task, held=Resources(tuple(share for share in shares if share[1])))
