"""Greedy packing: the order in which tasks are placed up to the chosen sizes of jobs, to leave little room unused.

``GreedyPacking`` is the usual one. ``HeadOnlyPacking`` is for placements where a task goes to the least used node or
nowhere (``dl2d.core.placement.Placement.head_only``), on a cluster where nothing runs yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey, Role
from dl2d.core.packing import Blocked, Packing
from dl2d.policies.common.greedy import GreedyAllocation, next_bundle
from dl2d.policies.dl2.scoring import Floats, Ints

_ROLES = (Role.WORKER, Role.PS)


class GreedyPacking:
    """Places tasks in three passes: what jobs have and keep, then the least sizes of jobs that start, then the rest.

    What stays comes first, where it is, so that new tasks find the nodes as they will be. Of least sizes, and of the
    rest, the largest tasks go first; with ``smallest_first`` the rest goes smallest first, since where a task goes to
    the least used node or nowhere, small tasks keep the nodes even, and one node that is full too early blocks all.
    """

    def __init__(self, allocation: GreedyAllocation, *, smallest_first: bool) -> None:
        self._allocation = allocation
        self._sign = 1.0 if smallest_first else -1.0
        #: Where tasks are to go: left to the placement.
        self.nodes: Sequence[tuple[JobKey, Role, str]] = ()

    def give(self, jobs: Sequence[Job], sizes: Ints, weight: Floats) -> dict[int, Blocked]:
        """Add tasks up to these sizes, and return what stopped which job.

        Parameters
        ----------
        jobs, sizes
            Workers and PSs, shape (jobs, 2).
        weight
            Of one worker and one PS, by which tasks are larger or smaller; shape (jobs, 2).
        """
        wanted = sizes.tolist()
        self._keep(jobs, wanted)
        blocked = self._start(jobs, sizes, weight)
        for turn in np.argsort(self._sign * weight.T.reshape(-1), kind="stable").tolist():
            place, number = divmod(turn, len(jobs))
            if number in blocked and self._allocation.allocations[jobs[number].key] == NOTHING:
                continue
            stopped = self._add(jobs[number], _ROLES[place], wanted[number][place])
            if stopped is not None:
                blocked.setdefault(number, stopped)
        return blocked

    def _keep(self, jobs: Sequence[Job], wanted: Sequence[Sequence[int]]) -> None:
        """Give jobs what they have already of these sizes, workers and PSs, where that is a size that they may have."""
        kept = []
        for job, size in zip(jobs, wanted, strict=True):
            workers, ps = map(min, self._allocation.held[job.key], size)
            has = self._allocation.allocations[job.key]
            if has == NOTHING:
                least = next_bundle(job, NOTHING)
                if least is None or least.workers > workers or least.ps > ps:
                    continue
            more = Allocation(max(workers - has.workers, 0), max(ps - has.ps, 0))
            if more != NOTHING:
                kept.append((job, more))
        self._allocation.keep(kept)

    def _start(self, jobs: Sequence[Job], sizes: Ints, weight: Floats) -> dict[int, Blocked]:
        """Give least sizes, each as a whole or not at all."""
        blocked = {}
        for number, step in _starts(self._allocation, jobs, sizes, weight):
            stopped = self._allocation.add(jobs[number], step)
            if stopped is not None:
                blocked[number] = stopped
        return blocked

    def _add(self, job: Job, role: Role, most: int) -> Blocked | None:
        """Give tasks of one role up to a count: all, or one after the other for as long as there is room."""
        now = self._allocation.allocations[job.key].count(role)
        if most <= now:
            return None
        stopped = self._step(job, role, most - now)
        if stopped is None:
            return None
        for count in range(now + 1, most):
            if role is Role.PS or job.request.allows(count):
                blocked = self._step(job, role, count - now)
                if blocked is not None:
                    return blocked
                now = count
        return stopped

    def _step(self, job: Job, role: Role, count: int) -> Blocked | None:
        return self._allocation.add(job, Allocation(count, 0) if role is Role.WORKER else Allocation(0, count))


def _starts(
    allocation: GreedyAllocation, jobs: Sequence[Job], sizes: Ints, weight: Floats
) -> list[tuple[int, Allocation]]:
    """Jobs that have nothing and are to have something, with their least sizes; the largest first."""
    starts = []
    for number, job in enumerate(jobs):
        step = next_bundle(job, NOTHING)
        if step is not None and allocation.allocations[job.key] == NOTHING and sizes[number].any():
            starts.append((-float((weight[number] * np.array(step)).sum()), number, step))
    return [(number, step) for _, number, step in sorted(starts)]


class _Turn(NamedTuple):
    """Tasks of one role that the job of this number is to get."""

    number: int
    role: Role
    tasks: int


class HeadOnlyPacking:
    """Places the smallest tasks of all jobs first, and names the node of each.

    Small tasks keep the nodes even, and what comes after them finds room on any; one node that is full too early would
    block all tasks. A job that ends below its least size would keep tasks that it cannot run with; then everything is
    taken back, least sizes are placed first, the largest of them first, and the rest, smallest first, after them.
    """

    def __init__(self, allocation: GreedyAllocation, packing: Packing) -> None:
        self._allocation = allocation
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
        placed = self._place(jobs, self._turns(jobs, sizes, order), blocked)
        if any(self._is_below_least(jobs[number], tasks) for number, tasks in placed.items()):
            self._remove(jobs, placed)
            blocked = self._start(jobs, sizes, weight)
            waiting = {number for number in blocked if self._allocated(jobs[number]) == NOTHING}
            turns = [turn for turn in self._turns(jobs, sizes, order) if turn.number not in waiting]
            placed = self._place(jobs, turns, blocked)
        self._keep(jobs, placed)
        return blocked

    def _start(self, jobs: Sequence[Job], sizes: Ints, weight: Floats) -> dict[int, Blocked]:
        """Give least sizes, each as a whole or not at all; the largest first."""
        blocked: dict[int, Blocked] = {}
        for number, step in _starts(self._allocation, jobs, sizes, weight):
            turns = [_Turn(number, role, step.count(role)) for role in _ROLES]
            placed = self._place(jobs, turns, blocked)
            if number in blocked:
                self._remove(jobs, placed)
            else:
                self._keep(jobs, placed)
        return blocked

    def _turns(self, jobs: Sequence[Job], sizes: Ints, order: Iterable[tuple[int, int]]) -> list[_Turn]:
        turns = []
        for place, number in order:
            count = int(sizes[number, place]) - self._allocated(jobs[number]).count(_ROLES[place])
            if count > 0:
                turns.append(_Turn(number, _ROLES[place], count))
        return turns

    def _place(
        self, jobs: Sequence[Job], turns: Iterable[_Turn], blocked: dict[int, Blocked]
    ) -> dict[int, list[tuple[Role, str]]]:
        """Place tasks, of each turn as many as have room; returns where, by job."""
        placed: dict[int, list[tuple[Role, str]]] = {}
        for number, role, count in turns:
            demand, tasks = jobs[number].request.demand(role), placed.setdefault(number, [])
            nodes, stopped = self._packing.place_all(demand, role, count)
            tasks += [(role, node) for node in nodes]
            if stopped is not None:
                blocked.setdefault(number, stopped)
        return placed

    def _is_below_least(self, job: Job, tasks: Sequence[tuple[Role, str]]) -> bool:
        """Whether the job would have something, but less than its least size."""
        least = next_bundle(job, NOTHING)
        if least is None or self._allocated(job) != NOTHING:
            return False
        roles = Counter(role for role, _ in tasks)
        return any(roles[role] < least.count(role) for role in _ROLES)

    def _remove(self, jobs: Sequence[Job], placed: dict[int, list[tuple[Role, str]]]) -> None:
        for number, tasks in placed.items():
            for role, node in tasks:
                self._packing.remove(node, jobs[number].request.demand(role))

    def _keep(self, jobs: Sequence[Job], placed: dict[int, list[tuple[Role, str]]]) -> None:
        """Give the jobs what was placed; workers beyond a count that a job may have are taken back."""
        for number, tasks in placed.items():
            job, roles = jobs[number], Counter(role for role, _ in tasks)
            now = self._allocated(job)
            workers = roles[Role.WORKER]
            while workers and not job.request.allows(now.workers + workers):
                workers -= 1
            over = roles[Role.WORKER] - workers
            extra = [task for task in tasks if task[0] is Role.WORKER][-over:] if over else []
            self._remove(jobs, {number: extra})
            for task in extra:
                tasks.remove(task)
            if tasks:
                step = Allocation(workers, roles[Role.PS])
                self._allocation.allocations[job.key] = Allocation(now.workers + step.workers, now.ps + step.ps)
                self._allocation.actions.append((job.key, step))
                self.nodes += [(job.key, role, node) for role, node in tasks]

    def _allocated(self, job: Job) -> Allocation:
        return self._allocation.allocations[job.key]
