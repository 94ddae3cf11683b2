"""Giving tasks where each goes to the least used node or nowhere, as in the DL2 authors' simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey, Role
from dl2d.core.packing import Blocked, Packing
from dl2d.policies.common.greedy import Filling, next_bundle
from dl2d.policies.dl2.size_steps import Floats, Ints

_ROLES = (Role.WORKER, Role.PS)


class _Turn(NamedTuple):
    """So many tasks of one role for the job in this place."""

    number: int
    role: Role
    many: int


class Heads:
    """Gives tasks in an order that leaves little unused, and says where they are to go.

    The smallest tasks of all jobs go first: they even the nodes out, and what comes after them finds room on any. A
    node that is full too early would block all others. (Of tasks with 2 CPUs, some with half a node's GPUs, whatever
    fits in the totals then fits on the nodes.) So jobs cannot be served one by one, and where a job would end up with
    less than its least size all is taken back: then the least sizes go first, the largest of them first, and the rest,
    smallest first, after them.
    """

    def __init__(self, filling: Filling, packing: Packing) -> None:
        self._filling = filling
        self._packing = packing
        #: Where each task is to go, as ``Decision.nodes`` has it.
        self.nodes: list[tuple[JobKey, Role, str]] = []

    def give(self, jobs: Sequence[Job], sizes: Ints, weight: Floats) -> dict[int, Blocked]:
        """Add tasks up to these sizes, and return what stopped which job. Jobs must not have tasks of before.

        Parameters
        ----------
        jobs, sizes
            Workers and PSs, shape (jobs, 2).
        weight
            Of one worker and one PS, by which tasks are larger or smaller; shape (jobs, 2).
        """
        order = [divmod(place, len(jobs)) for place in np.argsort(weight.T.reshape(-1), kind="stable").tolist()]
        blocked: dict[int, Blocked] = {}
        laid = self._lay(jobs, self._turns(jobs, sizes, order), blocked)
        if any(self._misses(jobs[number], tasks) for number, tasks in laid.items()):
            self._take_back(jobs, laid)
            blocked = self._start(jobs, sizes, weight)
            waiting = {number for number in blocked if self._allocated(jobs[number]) == NOTHING}
            turns = [turn for turn in self._turns(jobs, sizes, order) if turn.number not in waiting]
            laid = self._lay(jobs, turns, blocked)
        self._keep(jobs, laid)
        return blocked

    def _start(self, jobs: Sequence[Job], sizes: Ints, weight: Floats) -> dict[int, Blocked]:
        """Give least sizes, each as a whole or not at all; the largest first."""
        blocked: dict[int, Blocked] = {}
        starts = []
        for number, job in enumerate(jobs):
            step = next_bundle(job, NOTHING)
            if step is not None and self._allocated(job) == NOTHING and sizes[number].any():
                starts.append((-float((weight[number] * np.array(step)).sum()), number, step))
        for _, number, step in sorted(starts):
            turns = [_Turn(number, role, step.count(role)) for role in _ROLES]
            laid = self._lay(jobs, turns, blocked)
            if number in blocked:
                self._take_back(jobs, laid)
            else:
                self._keep(jobs, laid)
        return blocked

    def _turns(self, jobs: Sequence[Job], sizes: Ints, order: Iterable[tuple[int, int]]) -> list[_Turn]:
        turns = []
        for place, number in order:
            count = int(sizes[number, place]) - self._allocated(jobs[number]).count(_ROLES[place])
            if count > 0:
                turns.append(_Turn(number, _ROLES[place], count))
        return turns

    def _lay(
        self, jobs: Sequence[Job], turns: Iterable[_Turn], blocked: dict[int, Blocked]
    ) -> dict[int, list[tuple[Role, str]]]:
        """Place tasks, of each turn as many as there is room for; returns where, by job."""
        laid: dict[int, list[tuple[Role, str]]] = {}
        for number, role, many in turns:
            demand, tasks = jobs[number].request.demand(role), laid.setdefault(number, [])
            nodes, stopped = self._packing.place_all(demand, role, many)
            tasks += [(role, node) for node in nodes]
            if stopped is not None:
                blocked.setdefault(number, stopped)
        return laid

    def _misses(self, job: Job, tasks: Sequence[tuple[Role, str]]) -> bool:
        """Whether the job would have something, but less than its least size."""
        least = next_bundle(job, NOTHING)
        if least is None or self._allocated(job) != NOTHING:
            return False
        roles = Counter(role for role, _ in tasks)
        return any(roles[role] < least.count(role) for role in _ROLES)

    def _take_back(self, jobs: Sequence[Job], laid: dict[int, list[tuple[Role, str]]]) -> None:
        for number, tasks in laid.items():
            for role, node in tasks:
                self._packing.remove(node, jobs[number].request.demand(role))

    def _keep(self, jobs: Sequence[Job], laid: dict[int, list[tuple[Role, str]]]) -> None:
        """Give the jobs what was placed; workers beyond a count that a job may have are taken back."""
        for number, tasks in laid.items():
            job, roles = jobs[number], Counter(role for role, _ in tasks)
            now = self._allocated(job)
            workers = roles[Role.WORKER]
            while workers and not job.request.allows(now.workers + workers):
                workers -= 1
            over = roles[Role.WORKER] - workers
            extra = [task for task in tasks if task[0] is Role.WORKER][-over:] if over else []
            self._take_back(jobs, {number: extra})
            for task in extra:
                tasks.remove(task)
            if tasks:
                step = Allocation(workers, roles[Role.PS])
                self._filling.allocations[job.key] = Allocation(now.workers + step.workers, now.ps + step.ps)
                self._filling.actions.append((job.key, step))
                self.nodes += [(job.key, role, node) for role, node in tasks]

    def _allocated(self, job: Job) -> Allocation:
        return self._filling.allocations[job.key]
