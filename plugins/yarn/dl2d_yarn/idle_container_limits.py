"""What jobs may be given where queues, or other jobs' containers, leave less than the nodes have free. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dl2d.core.cluster import Node, NodeState
from dl2d.core.jobs import JobKey
from dl2d.core.resource_manager import GrowthLimit
from dl2d.core.resources import Resources
from dl2d_yarn.queue_limits import QueueLimits, Queues, sum_of, within_limits
from dl2d_yarn.services import JobService
from dl2d_yarn.task_assignment import IdleContainer


class QueueShare(NamedTuple):
    """Headroom of a user in a queue, and the user's live services in it."""

    queue: str
    user: str
    headroom: Mapping[str, float]
    services: Sequence[JobService]


def queue_shares(
    queues: Queues | None, services: Iterable[JobService], *, queue: str, user: str, warn: Callable[[str], None]
) -> list[QueueShare]:
    """Share of each user with live services in a queue; where there are none, of ``user`` in ``queue``.

    Empty if the queues are unknown (None).
    """
    if queues is None:
        return []
    live: dict[tuple[str, str], list[JobService]] = defaultdict(list)
    for service in services:
        if service.is_live and service.application_id:
            live[service.queue, service.user].append(service)
    shares = []
    for (name, of_user), members in (live or {(queue, user): []}).items():
        headroom = queues.headroom(name, of_user)
        if headroom is not None:
            shares.append(QueueShare(name, of_user, headroom, members))
        else:
            warn(f"queue {name} is not among the scheduler's queues: its limits are not known")
    return shares


def within_shares(
    nodes: tuple[Node, ...], queues: Queues | None, shares: Sequence[QueueShare], *, leave_pending: bool
) -> tuple[Node, ...]:
    """The nodes, with their free resources reduced to the headroom of all shares together; see ``within_limits``."""
    if queues is None or not shares:
        return nodes
    headroom = sum_of([share.headroom for share in shares])
    limits = QueueLimits(headroom, queues.pending_outside({share.queue for share in shares}))
    return within_limits(nodes, limits, leave_pending=leave_pending)


def queue_limits(shares: Sequence[QueueShare], idle: Collection[IdleContainer]) -> Iterator[GrowthLimit]:
    """Limit of each share where there are several: the free resources of the nodes show only the sum of all shares."""
    for share in shares if len(shares) > 1 else ():
        jobs = {service.job for service in share.services}
        own_idle = Resources.total(demand for job, _, demand in idle if job in jobs)
        left = {resource: amount + own_idle.get(resource) for resource, amount in share.headroom.items()}
        applications = frozenset(service.application_id for service in share.services)
        yield GrowthLimit(applications, left, f"queue {share.queue} leaves no more to {share.user}")


def idle_limits(
    services: Iterable[JobService], idle: Iterable[IdleContainer], nodes: Iterable[Node]
) -> Iterator[GrowthLimit]:
    """Limits that keep jobs from the idle containers (without a task) of other jobs, which count as free on ``nodes``.

    One limit holds for all jobs without such containers, and one for each job that has some. Two of the latter may
    still be given the same free resources; then one waits for them.
    """
    up = {node.name: node for node in nodes if node.state is NodeState.UP}
    demands: dict[JobKey, list[Resources]] = defaultdict(list)
    for job, node, demand in idle:
        if node in up:
            demands[job].append(demand)
    idle_by_job = {job: Resources.total(each) for job, each in demands.items()}
    idle_total = Resources.total(idle_by_job.values())
    if not idle_total.thousandths:
        return
    free = Resources.total(node.capacity.minus(node.used) for node in up.values()).minus(idle_total)

    def limit(applications: Iterable[str], own_idle: Resources) -> GrowthLimit:
        left = {name: free.get(name) + own_idle.get(name) for name, _ in idle_total.thousandths}
        reason = "the containers without a task of other jobs are room for those jobs only"
        return GrowthLimit(frozenset(applications), left, reason)

    live = {service.job: service.application_id for service in services if service.is_live and service.application_id}
    yield limit((application for job, application in live.items() if job not in idle_by_job), Resources())
    for job, own_idle in idle_by_job.items():
        if job in live:
            yield limit((live[job],), own_idle)
