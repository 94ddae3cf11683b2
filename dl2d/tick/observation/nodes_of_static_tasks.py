"""Nodes of the tasks of static jobs, where the resource manager does not say how many are on which of a job's nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from msgspec import structs

from dl2d.core.cluster import Node, Task
from dl2d.core.jobs import JobKey
from dl2d.core.resources import Resources


def fitted_to_node_use(tasks: Iterable[Task], static: Collection[JobKey], nodes: Iterable[Node]) -> tuple[Task, ...]:
    """The tasks, with those of ``static`` jobs changed so that the tasks on a node hold no more than it has in use.

    The store has them spread evenly over the nodes of their job. Where they hold more than a node has in use, they are
    moved to other nodes of the job that have more in use than their tasks hold. If none has, they hold less.

    Otherwise a packing would take the surplus of the other nodes for what others hold, and jobs would not fit with the
    sizes that they have.
    """
    tasks, used = tuple(tasks), {node.name: node.used for node in nodes}
    rooms: dict[str, list[Resources]] = defaultdict(list)
    for task in tasks:
        rooms[task.node].append(task.room)
    held = {name: Resources.total(rooms[name]) for name in rooms.keys() | used.keys()}
    if all(held[name].fits_in(amount) for name, amount in used.items()):
        return tasks
    moved = _moved(tasks, static, held, used)
    return tuple(_within(task, held, used) if task.job in static else task for task in moved)


def _moved(
    tasks: Iterable[Task], static: Collection[JobKey], held: dict[str, Resources], used: Mapping[str, Resources]
) -> list[Task]:
    """The tasks, those of static jobs on other nodes of their job where these have room for them; changes ``held``."""
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
    return found


def _within(task: Task, held: Mapping[str, Resources], used: Mapping[str, Resources]) -> Task:
    """The task; with its share of what its node has in use, if the tasks there hold more than that."""
    if task.node not in used or held[task.node].fits_in(used[task.node]):
        return task
    have, most = dict(held[task.node].thousandths), dict(used[task.node].thousandths)
    shares = (
        (name, amount * min(most.get(name, 0), have[name]) // have[name]) for name, amount in task.room.thousandths
    )
    return structs.replace(task, held=Resources(tuple(share for share in shares if share[1])))
