"""Packing as it is specified: one task after the other, each on the first node of all that has room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat

from dl2d.core.cluster import Node, NodeSet, NodeState, SharedLimit, Task
from dl2d.core.decision import Constraint
from dl2d.core.jobs import Allocation, Job, JobKey, Role
from dl2d.core.packing.room_in_limits import Blocked
from dl2d.core.placement import Placement
from dl2d.core.resources import NO_RESOURCES, Resources

ROLES = (Role.WORKER, Role.PS)


class PlainPacking:
    def __init__(
        self,
        nodes: Sequence[Node],
        placement: Placement,
        incumbents: Sequence[Task],
        sets: Sequence[NodeSet] = (),
        limits: Sequence[SharedLimit] = (),
    ) -> None:
        self.limits = limits
        self.given: list[tuple[JobKey, Resources]] = []
        self.set_of = {job: nodes for nodes in sets for job in nodes.jobs}
        self.nodes = {node.name: node for node in nodes}
        self.up = [node.name for node in nodes if node.state is NodeState.UP]
        self.placement = placement
        self.used = {node.name: node.used for node in nodes}
        self.waiting = [task for task in incumbents if task.node in self.nodes]
        demands = [task.demand for task in incumbents]
        listed = [*(node.capacity for node in nodes), *demands]
        self.names = sorted({name for resources in listed for name, _ in resources.thousandths})

    def free(self, name: str) -> Resources:
        return self.nodes[name].capacity.minus(self.used[name])

    def unreserved(self, name: str) -> Resources:
        return self.free(name).minus(Resources.total(task.demand for task in self.waiting if task.node == name))

    def load(self, name: str) -> float:
        used, capacity = dict(self.used[name].thousandths), dict(self.nodes[name].capacity.thousandths)
        return self.placement.load(
            [used.get(each, 0) for each in self.names], [capacity.get(each, 0) for each in self.names]
        )

    def may_use(self, job: JobKey | None) -> list[str]:
        return [name for name in self.up if job not in self.set_of or name in self.set_of[job].nodes]

    def first(self, demand: Resources, job: JobKey | None) -> str | None:
        in_order = sorted(self.may_use(job), key=self.load)  # stable: equal ones in node order
        if self.placement.first_node_only:
            return next((name for name in in_order[:1] if demand.fits_in(self.free(name))), None)
        for room in (self.unreserved, self.free):
            for name in in_order:
                if demand.fits_in(room(name)):
                    return name
        return None

    def exceeded(self, job: JobKey, demand: Resources, role: Role) -> Blocked | None:
        for limit in self.limits:
            if job in limit.jobs:
                given = Resources.total(demand for key, demand in self.given if key in limit.jobs)
                room = Resources(limit.most).minus(given)
                missing = [short for short in demand.shortfalls(room) if short.resource in dict(limit.most)]
                if missing:
                    return Blocked(role, Constraint.LIMIT, "", tuple(missing), limit=limit.text)
        return None

    def place(self, demand: Resources, role: Role, job: JobKey | None = None) -> str | Blocked:
        if job is not None and (blocked := self.exceeded(job, demand, role)) is not None:
            return blocked
        where = self.place_somewhere(demand, role, job)
        if job is not None and isinstance(where, str):
            self.given.append((job, demand))
        return where

    def place_somewhere(self, demand: Resources, role: Role, job: JobKey | None) -> str | Blocked:
        name = self.first(demand, job)
        if name is None:
            only = self.set_of[job].text(len(self.nodes)) if job in self.set_of else ""
            return replace(self.why_not(demand, role, self.may_use(job)), may_use=only)
        self.used[name] += demand
        return name

    def place_on(self, name: str, demand: Resources, job: JobKey | None = None) -> bool:
        fits = name in self.may_use(job) and demand.fits_in(self.free(name))
        if fits:
            self.used[name] += demand
        return fits

    def remove(self, name: str, demand: Resources, job: JobKey | None) -> None:
        self.used[name] = self.used[name].minus(demand)
        if job is not None:
            self.given.remove((job, demand))

    def add(self, job: Job, delta: Allocation) -> Blocked | None:
        blocked = self.exceeded(job.key, job.request.demand_of(delta), Role.WORKER)
        if blocked is not None:
            of_workers = delta.workers and {name for name, _ in job.request.worker.thousandths}.intersection(
                short.resource for short in blocked.shortfalls
            )
            return blocked if of_workers else replace(blocked, role=Role.PS)
        used, waiting = dict(self.used), list(self.waiting)
        for role, demand in self.tasks(job, delta):
            if not self.take_up(job.key, role):
                where = self.place_somewhere(demand, role, job.key)
                if isinstance(where, Blocked):
                    self.used, self.waiting = used, waiting
                    return where
        self.given.append((job.key, job.request.demand_of(delta)))
        return None

    def stay(self, job: Job, size: Allocation) -> bool:
        if self.exceeded(job.key, job.request.demand_of(size), Role.WORKER) is not None:
            return False
        used, waiting = dict(self.used), list(self.waiting)
        stays = all(self.take_up(job.key, role) for role in ROLES for _ in range(size.count(role)))
        if stays:
            self.given.append((job.key, job.request.demand_of(size)))
        else:
            self.used, self.waiting = used, waiting
        return stays

    def take_up(self, job: JobKey, role: Role) -> bool:
        """Whether the job's first task of the role that waits has room where it is; then it is taken up."""
        task = min(self.of(job, role), key=lambda task: task.number, default=None)
        if task is None or not task.demand.fits_in(self.free(task.node)):
            return False
        self.waiting.remove(task)
        self.used[task.node] += task.demand
        return True

    def of(self, job: JobKey, role: Role) -> list[Task]:
        return [task for task in self.waiting if task.job == job and task.role == role]

    def tasks(self, job: Job, delta: Allocation) -> Iterator[tuple[Role, Resources]]:
        worker, ps = job.request.worker, job.request.ps
        for _ in range(min(delta)):
            if self.placement.keeps_bundles and not any(self.of(job.key, role) for role in ROLES):
                yield Role.WORKER, worker + ps
            else:
                yield from ((Role.WORKER, worker), (Role.PS, ps))
        yield from repeat((Role.WORKER, worker), delta.workers - min(delta))
        yield from repeat((Role.PS, ps), delta.ps - min(delta))

    def why_not(self, demand: Resources, role: Role, up: list[str]) -> Blocked:
        if not up:
            return Blocked(role, Constraint.CAPACITY, "", demand.shortfalls(NO_RESOURCES))
        largest = min(up, key=lambda name: lack(demand, self.nodes[name].capacity))
        if missing := demand.shortfalls(self.nodes[largest].capacity):
            return Blocked(role, Constraint.INFEASIBLE, largest, missing)
        first_node_only = self.placement.first_node_only
        nearest = min(up, key=self.load if first_node_only else lambda name: lack(demand, self.free(name)))
        in_total = demand.fits_in(Resources.total(self.free(name) for name in up))
        constraint = Constraint.FRAGMENTED if in_total else Constraint.CAPACITY
        return Blocked(role, constraint, nearest, demand.shortfalls(self.free(nearest)))

    def left(self) -> Resources:
        draining = {name for name, node in self.nodes.items() if node.state is NodeState.DRAINING}
        kept = [task.demand for task in self.waiting if task.node in draining]
        return Resources.total([*(self.free(name) for name in self.up), *kept])

    def room(self) -> dict[str, Resources]:
        return {name: self.free(name) for name in self.up}


def lack(demand: Resources, room: Resources) -> float:
    """What is missing, as fractions of the demand."""
    has = dict(room.thousandths)
    return sum(max(amount - has.get(name, 0), 0) / amount for name, amount in demand.thousandths)
