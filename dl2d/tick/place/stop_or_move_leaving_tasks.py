"""Tasks that have to leave their nodes, for a grant or as their time limit is near: which stop, and which move."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from dl2d.core.cluster import Snapshot, Task, TaskGroup
from dl2d.core.jobs import JobKey
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.packing.task_leaving_order import leaving_order
from dl2d.core.packing.tasks_that_make_room import WaitingTask
from dl2d.core.plan_of_starts_and_stops import Move
from dl2d.tick.place.nodes_chosen_by_policy import NamedNodes


class _Action(Enum):
    #: It stays where it is for now.
    STAY = auto()
    #: It stops at once, and the job starts another one as soon as there is room.
    STOP = auto()
    #: It moves if there is room for its replacement, else it stops.
    MOVE_OR_STOP = auto()
    #: It moves; where there is no room for its replacement it stays, and the replacement waits.
    MOVE_OR_WAIT = auto()
    #: The same, but it stays while another task of its job and role moves.
    MOVE_ONE_OR_WAIT = auto()


#: What becomes of a task that has to leave its node, of a job that does not shrink.
_ACTIONS = {
    # (beyond the floor of its job, reaches its time limit, no replacement would start now)
    (True, True, False): _Action.MOVE_OR_STOP,
    (True, True, True): _Action.STOP,
    (True, False, False): _Action.STOP,
    (True, False, True): _Action.STOP,
    (False, True, False): _Action.MOVE_OR_WAIT,
    (False, True, True): _Action.MOVE_OR_WAIT,  # at its time limit it would end all the same
    (False, False, False): _Action.MOVE_ONE_OR_WAIT,
    (False, False, True): _Action.STAY,
}


class Vacated(NamedTuple):
    """What becomes of the tasks that have to leave their nodes; those that are in none of these stay."""

    stopping: list[Task]
    #: Tasks whose replacement has room on a node.
    moves: list[tuple[Task, Move]]
    #: Replacements that wait for room.
    waiting: list[WaitingTask]
    #: How many more tasks of each group leave since their job shrinks.
    surplus: dict[TaskGroup, int]


def vacating_tasks(
    snapshot: Snapshot, groups: Mapping[TaskGroup, Sequence[Task]], keep: Collection[JobKey]
) -> frozenset[Task]:
    """The tasks that leave or move for the snapshot's claims, or since they reach their time limit soon.

    None of a job in ``keep`` does.
    """
    tags = {tag for grant in snapshot.grants for tag in grant.leaving} | snapshot.expiring
    if not tags:
        return frozenset()
    return frozenset(
        task for (key, _), tasks in groups.items() if key not in keep for task in tasks if task.tag in tags
    )


def replace_vacating(
    vacating: Collection[Task],
    snapshot: Snapshot,
    staying: Mapping[TaskGroup, int],
    surplus: Mapping[TaskGroup, int],
    targets: NamedNodes,
    packing: Packing,
    *,
    rank_0_workers: Collection[Task],
    without_replacement: Collection[TaskGroup],
) -> Vacated:
    """Decide which tasks of ``vacating`` stop, move or stay, and reserve the room of those that move.

    Parameters
    ----------
    staying
        How many tasks of each group there are beyond those that leave since their job shrinks.
    surplus
        How many tasks of each group leave since their job shrinks, and are not chosen yet; those of ``vacating`` come
        first.
    targets
        Named nodes; the tasks that it lets leave are no concern of this function.
    rank_0_workers
        Workers of rank 0.
    without_replacement
        Groups of which no new task would start at present.
    """
    if not vacating:
        return Vacated([], [], [], dict(surplus))
    floors = {job.key: job.request.min_size for job in snapshot.jobs} | dict(snapshot.floors)
    chosen = {task for tasks in targets.leaving.values() for task in tasks}
    left, found = dict(staying), Vacated([], [], [], dict(surplus))
    moving: set[TaskGroup] = set()
    displaced = []
    for task in sorted(vacating, key=lambda task: (task in rank_0_workers, *leaving_order(task), task.tag)):
        group = task.group
        if task in chosen:
            continue
        if found.surplus.get(group, 0) > 0:
            found.surplus[group] -= 1
            found.stopping.append(task)
        else:
            displaced.append(task)
    grants = {tag: index for index, grant in enumerate(snapshot.grants) for tag in grant.leaving}
    # Tasks that leave for claims of higher priority get room first, as when the claims' nodes were chosen.
    for task in sorted(displaced, key=lambda task: grants.get(task.tag, -1)):
        group = task.group
        is_spare = left[group] > floors[task.job].count(task.role)
        action = _ACTIONS[is_spare, task.tag in snapshot.expiring, group in without_replacement]
        if action is _Action.STAY or (action is _Action.MOVE_ONE_OR_WAIT and group in moving):
            continue
        node = packing.place(task.demand, task.role, task.job) if action is not _Action.STOP else None
        if isinstance(node, str):
            targets.reserve(node, task.demand)
            found.moves.append((task, Move(task.job, task.id, node)))
            moving.add(group)
        elif is_spare:
            found.stopping.append(task)
            left[group] -= 1
        else:
            found.waiting.append(WaitingTask(group, task.demand))
    return found
