"""Greedy packing: the order in which tasks are placed up to the chosen sizes of jobs, to leave few resources unused.

``GreedyPacking`` is the usual one. ``FirstNodeOnlyPacking`` is for placements that place a task on the least used node
or not at all (``dl2d.core.placement.Placement.first_node_only``), on a cluster where nothing runs yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dl2d.core.array_types import Floats, Ints
from dl2d.core.jobs import NOTHING, TASK_ROLES, Allocation, Job, JobKey, Role
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.packing.room_in_limits import Blocked
from dl2d.policies.common.greedy_allocation import GreedyAllocation


class GreedyPacking:
    """Places tasks in three passes: those that jobs have and keep, the minimum sizes of jobs that start, all others.

    Tasks that stay come first, on their nodes, so that new tasks are placed on what these leave free. In the other
    passes the largest tasks go first. With ``smallest_first`` the third pass begins with the smallest: it is for
    placements that place a task on the least used node or not at all, where small tasks keep the nodes evenly used, and
    one node that is full too early blocks all tasks. With ``starts_first`` the second pass comes before the first:
    running tasks beyond floors may have to move, to make room for a task that needs a large part of a node.
    """

    def __init__(self, allocation: GreedyAllocation, *, smallest_first: bool, starts_first: bool) -> None:
        self._allocation = allocation
        self._sign = 1.0 if smallest_first else -1.0
        self._starts_first = starts_first

    def give(self, jobs: Sequence[Job], sizes: Ints, summed_shares: Floats) -> dict[int, Blocked]:
        """Add tasks up to the chosen sizes; returns the indices of jobs that do not reach theirs, with the reason.

        Parameters
        ----------
        sizes
            Workers and PSs of each job, shape (jobs, 2).
        summed_shares
            ``pareto_frontier.summed_shares`` of a worker and of a PS of each job, by which tasks are sorted, shape
            (jobs, 2).
        """
        wanted = sizes.tolist()
        if self._starts_first:
            blocked = self._start_jobs(jobs, sizes, summed_shares)
            self._keep_running(jobs, wanted)
        else:
            self._keep_running(jobs, wanted)
            blocked = self._start_jobs(jobs, sizes, summed_shares)
        for role_index, index in _in_order(self._sign * summed_shares):
            if index in blocked and self._allocation.allocations[jobs[index].key] == NOTHING:
                continue
            stopped = self._add_up_to(jobs[index], TASK_ROLES[role_index], wanted[index][role_index])
            if stopped is not None:
                blocked.setdefault(index, stopped)
        return blocked

    def _keep_running(self, jobs: Sequence[Job], sizes: Sequence[Sequence[int]]) -> None:
        """Give jobs those tasks of their sizes (workers, PSs) that run already, if the job may run with these alone."""
        kept = []
        for job, size in zip(jobs, sizes, strict=True):
            running = self._allocation.held[job.key].common(Allocation(*size))
            allocated = self._allocation.allocations[job.key]
            if allocated == NOTHING and not running.covers(job.request.min_size):
                continue
            more = running.beyond(allocated)
            if more != NOTHING:
                kept.append((job, more))
        self._allocation.keep(kept)

    def _start_jobs(self, jobs: Sequence[Job], sizes: Ints, summed_shares: Floats) -> dict[int, Blocked]:
        """Give minimum sizes, each as a whole or not at all."""
        blocked = {}
        for index, minimum in _minimum_sizes_to_start(self._allocation, jobs, sizes, summed_shares):
            stopped = self._allocation.add(jobs[index], minimum)
            if stopped is not None:
                blocked[index] = stopped
        return blocked

    def _add_up_to(self, job: Job, role: Role, wanted: int) -> Blocked | None:
        """Give tasks of one role up to a count: all at once, or one after the other as long as nodes have room."""
        allocated = self._allocation.allocations[job.key].count(role)
        if wanted <= allocated:
            return None
        stopped = self._add_tasks(job, role, wanted - allocated)
        if stopped is None:
            return None
        for count in range(allocated + 1, wanted):
            if role is Role.PS or job.request.allows(count):
                blocked = self._add_tasks(job, role, count - allocated)
                if blocked is not None:
                    return blocked
                allocated = count
        return stopped

    def _add_tasks(self, job: Job, role: Role, count: int) -> Blocked | None:
        return self._allocation.add(job, Allocation(count, 0) if role is Role.WORKER else Allocation(0, count))


def _in_order(summed_shares: Floats) -> list[tuple[int, int]]:
    """Indices of role and job in ascending order of summed shares, shape (jobs, 2); of equal ones workers first."""
    jobs = len(summed_shares)
    return [divmod(index, jobs) for index in np.argsort(summed_shares.T.reshape(-1), kind="stable").tolist()]


def _minimum_sizes_to_start(
    allocation: GreedyAllocation, jobs: Sequence[Job], sizes: Ints, summed_shares: Floats
) -> list[tuple[int, Allocation]]:
    """Indices and minimum sizes of jobs that have nothing and shall get tasks; the largest minimum size first."""
    starts = []
    for index, job in enumerate(jobs):
        minimum = job.request.min_size
        if allocation.allocations[job.key] == NOTHING and sizes[index].any():
            starts.append((-float((summed_shares[index] * np.array(minimum)).sum()), index, minimum))
    return [(index, minimum) for _, index, minimum in sorted(starts)]


class _Addition(NamedTuple):
    """Tasks of one role to place for a job."""

    job_index: int
    role: Role
    number: int


class FirstNodeOnlyPacking:
    """Places the smallest tasks of all jobs first, and names the node of each.

    Small tasks keep the nodes evenly used; one node that is full too early would block all tasks. A job cannot run with
    fewer tasks than its minimum size has. If that is all that a job would get, all tasks are removed; then minimum
    sizes are placed first, the largest first, and after them all other tasks, the smallest first.
    """

    def __init__(self, allocation: GreedyAllocation, packing: Packing) -> None:
        self._allocation = allocation
        self._packing = packing
        #: Node of each task, as in ``Decision.nodes``.
        self.nodes: list[tuple[JobKey, Role, str]] = []

    def give(self, jobs: Sequence[Job], sizes: Ints, summed_shares: Floats) -> dict[int, Blocked]:
        """Add tasks up to the chosen sizes; returns the indices of jobs that do not reach theirs, with the reason.

        Jobs must not have had tasks before this decision.

        Parameters
        ----------
        sizes
            Workers and PSs of each job, shape (jobs, 2).
        summed_shares
            ``pareto_frontier.summed_shares`` of a worker and of a PS of each job, by which tasks are sorted, shape
            (jobs, 2).
        """
        order = _in_order(summed_shares)
        blocked: dict[int, Blocked] = {}
        placed = self._place(jobs, self._additions(jobs, sizes, order), blocked)
        if any(self._is_below_minimum(jobs[index], tasks) for index, tasks in placed.items()):
            self._remove(jobs, placed)
            blocked = self._start_jobs(jobs, sizes, summed_shares)
            waiting = {index for index in blocked if self._allocated(jobs[index]) == NOTHING}
            additions = [added for added in self._additions(jobs, sizes, order) if added.job_index not in waiting]
            placed = self._place(jobs, additions, blocked)
        self._commit(jobs, placed)
        return blocked

    def _start_jobs(self, jobs: Sequence[Job], sizes: Ints, summed_shares: Floats) -> dict[int, Blocked]:
        """Give minimum sizes, each as a whole or not at all; the largest first."""
        blocked: dict[int, Blocked] = {}
        for index, minimum in _minimum_sizes_to_start(self._allocation, jobs, sizes, summed_shares):
            additions = [_Addition(index, role, minimum.count(role)) for role in TASK_ROLES]
            placed = self._place(jobs, additions, blocked)
            if index in blocked:
                self._remove(jobs, placed)
            else:
                self._commit(jobs, placed)
        return blocked

    def _additions(self, jobs: Sequence[Job], sizes: Ints, order: Iterable[tuple[int, int]]) -> list[_Addition]:
        """Tasks by which jobs are smaller than their sizes, in an order of (role, job) indices."""
        additions = []
        for role_index, index in order:
            role = TASK_ROLES[role_index]
            count = int(sizes[index, role_index]) - self._allocated(jobs[index]).count(role)
            if count > 0:
                additions.append(_Addition(index, role, count))
        return additions

    def _place(
        self, jobs: Sequence[Job], additions: Iterable[_Addition], blocked: dict[int, Blocked]
    ) -> dict[int, list[tuple[Role, str]]]:
        """Place tasks, of each addition as many as nodes have room for.

        Parameters
        ----------
        blocked
            Jobs of which tasks are not placed are added to it, with the reason, unless they are in it.

        Returns
        -------
        Role and node of each placed task, by the index of its job.
        """
        placed: dict[int, list[tuple[Role, str]]] = {}
        for index, role, count in additions:
            demand, tasks = jobs[index].request.demand(role), placed.setdefault(index, [])
            nodes, stopped = self._packing.place_all(demand, role, count, jobs[index].key)
            tasks += [(role, node) for node in nodes]
            if stopped is not None:
                blocked.setdefault(index, stopped)
        return placed

    def _is_below_minimum(self, job: Job, tasks: Sequence[tuple[Role, str]]) -> bool:
        """Whether the job would have no more than these tasks, and fewer than its minimum size has."""
        if self._allocated(job) != NOTHING:
            return False
        minimum = job.request.min_size
        roles = Counter(role for role, _ in tasks)
        return any(roles[role] < minimum.count(role) for role in TASK_ROLES)

    def _remove(self, jobs: Sequence[Job], placed: dict[int, list[tuple[Role, str]]]) -> None:
        for index, tasks in placed.items():
            for role, node in tasks:
                self._packing.remove(node, jobs[index].request.demand(role), jobs[index].key)

    def _commit(self, jobs: Sequence[Job], placed: dict[int, list[tuple[Role, str]]]) -> None:
        """Give the jobs the placed tasks; workers beyond a count that a job may have are removed from the packing."""
        for index, tasks in placed.items():
            job, roles = jobs[index], Counter(role for role, _ in tasks)
            allocated, workers = self._allocated(job).workers, roles[Role.WORKER]
            while workers and not job.request.allows(allocated + workers):
                workers -= 1
            excess = roles[Role.WORKER] - workers
            removed = [task for task in tasks if task[0] is Role.WORKER][-excess:] if excess else []
            self._remove(jobs, {index: removed})
            for task in removed:
                tasks.remove(task)
            if tasks:
                self._allocation.give(job, Allocation(workers, roles[Role.PS]))
                self.nodes += [(job.key, role, node) for role, node in tasks]

    def _allocated(self, job: Job) -> Allocation:
        return self._allocation.allocations[job.key]
