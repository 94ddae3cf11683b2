"""Room in limits: what the limits on jobs leave them while tasks are added, and what stood in the way of a task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from dl2d.core.cluster import SharedLimit
from dl2d.core.decision import Constraint, Reason
from dl2d.core.jobs import Allocation, Job, JobKey, JobRequest, Role
from dl2d.core.resource_manager import TASKS
from dl2d.core.resources import Resources, Shortfall


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why a task has no room: in a limit, or on the node that comes nearest; what is wanted and what there is."""

    role: Role
    constraint: Constraint
    nearest: str
    shortfalls: tuple[Shortfall, ...]
    #: Which nodes its job may use, where these are not all.
    may_use: str = ""
    #: The limit in words, where it is one.
    limit: str = ""

    def reason(self, text: str) -> Reason:
        """Reason why a job gets no more tasks."""
        return Reason(self.constraint, text, self.shortfalls)

    def __str__(self) -> str:
        missing = "; ".join(map(str, self.shortfalls)) or "no node takes tasks"
        only = f"; its job may use {self.may_use}" if self.may_use else ""
        match self.constraint:
            case Constraint.LIMIT:
                return f"{self.limit} ({missing})"
            case Constraint.INFEASIBLE:
                return f"a {self.role} is larger than any node ({missing} on {self.nearest or 'every node'}){only}"
            case Constraint.FRAGMENTED:
                return f"no single node has room for a {self.role} ({missing} on {self.nearest}){only}"
            case _:
                return f"no room for a {self.role} ({missing} on {self.nearest or 'every node'}){only}"


def amounts_with_tasks(demand: Resources, tasks: int) -> tuple[tuple[str, int], ...]:
    """What tasks take of limits: their demand in thousandths, and a thousand times their number under ``TASKS``."""
    return (*demand.thousandths, (TASKS, 1000 * tasks))


def amounts_of_size(request: JobRequest, size: Allocation) -> tuple[tuple[str, int], ...]:
    """What so many tasks of a job take of limits."""
    return amounts_with_tasks(request.demand_of(size), size.tasks)


class LimitRoom:
    """What each limit still leaves while tasks are added, in thousandths.

    Floors count even beyond a limit, so it may be less than 0. A job in no limit is never blocked.
    """

    def __init__(self, limits: Iterable[SharedLimit]) -> None:
        #: Limits with what they leave.
        self._left: list[tuple[SharedLimit, dict[str, int]]] = [(limit, dict(limit.most)) for limit in limits]
        self._of: dict[JobKey, list[int]] = defaultdict(list)
        for number, (limit, _) in enumerate(self._left):
            for job in limit.jobs:
                self._of[job].append(number)

    def of(self, job: JobKey) -> tuple[int, ...]:
        """Numbers of the limits that a job is in."""
        return tuple(self._of.get(job, ())) if self._of else ()

    def left(self, number: int) -> dict[str, int]:
        """What a limit leaves its jobs, in thousandths."""
        return self._left[number][1]

    def most(self, job: JobKey) -> dict[str, int]:
        """The most that a job may hold if the other jobs in its limits hold nothing, in thousandths."""
        least: dict[str, int] = {}
        for number in self.of(job):
            for name, amount in self._left[number][0].most:
                least[name] = min(amount, least.get(name, amount))
        return least

    def blocked(self, job: Job, delta: Allocation) -> Blocked | None:
        """The limit that leaves too little for more tasks of a job; None if all leave enough."""
        if not self._of or job.key not in self._of:
            return None
        found = self._lacking(job.key, amounts_of_size(job.request, delta))
        if found is None:
            return None
        lacking = {shortfall.resource for shortfall in found[1]}
        of_worker = {TASKS, *(name for name, _ in job.request.worker.thousandths)}
        of_workers = delta.workers and not lacking.isdisjoint(of_worker)
        return self._as_blocked(Role.WORKER if of_workers else Role.PS, *found)

    def blocked_task(self, job: JobKey, demand: Resources, role: Role) -> Blocked | None:
        """The limit that leaves too little for one more task."""
        found = self._lacking(job, amounts_with_tasks(demand, 1))
        return None if found is None else self._as_blocked(role, *found)

    def allowed(self, job: JobKey, demand: Resources, count: int) -> int:
        """How many of so many equal tasks the limits allow a job."""
        amounts = dict(amounts_with_tasks(demand, 1))
        for number in self.of(job):
            for name, left in self._left[number][1].items():
                if name in amounts:
                    count = min(count, max(left, 0) // amounts[name])
        return count

    def take(self, job: Job, delta: Allocation) -> None:
        """Count more tasks of a job."""
        if self._of and job.key in self._of:
            self._take(job.key, amounts_of_size(job.request, delta), 1)

    def take_tasks(self, job: JobKey, demand: Resources, count: int) -> None:
        """Count so many more equal tasks of a job; fewer, where it is negative."""
        self._take(job, amounts_with_tasks(demand, 1), count)

    def _take(self, job: JobKey, amounts: Iterable[tuple[str, int]], times: int) -> None:
        for number in self.of(job):
            left = self._left[number][1]
            for name, amount in amounts:
                if name in left:
                    left[name] -= amount * times

    def _lacking(self, job: JobKey, amounts: Iterable[tuple[str, int]]) -> tuple[str, tuple[Shortfall, ...]] | None:
        """The first limit that leaves too little, in words, and what is missing."""
        for number in self.of(job):
            limit, left = self._left[number]
            missing = tuple(
                Shortfall(name, amount / 1000, max(left[name], 0) / 1000)
                for name, amount in amounts
                if amount > left.get(name, amount)
            )
            if missing:
                return limit.text, missing
        return None

    def _as_blocked(self, role: Role, limit: str, missing: tuple[Shortfall, ...]) -> Blocked:
        return Blocked(role, Constraint.LIMIT, "", missing, limit=limit)
