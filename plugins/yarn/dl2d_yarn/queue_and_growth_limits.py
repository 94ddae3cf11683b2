"""What queues leave to jobs: headroom of queues and users, and why a service's containers wait; limits of growth.

Growth is limited by headroom, and by the idle containers of other jobs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import structs

from dl2d.core.cluster import Node, NodeState
from dl2d.core.jobs import JobKey
from dl2d.core.resource_manager import GrowthLimit
from dl2d.core.resources import Resources
from dl2d_yarn.cluster_listing import Vector, read_vector, resource_name
from dl2d_yarn.component_containers import IdleContainer
from dl2d_yarn.listed_services import JobService
from dl2d_yarn.rest_client import RestClient

SCHEDULER_PATH = "/ws/v1/cluster/scheduler"
ACTIVITIES_PATH = "/ws/v1/cluster/scheduler/app-activities"
_MAX_REASON = 300


class _Capacity(msgspec.Struct, rename="camel"):
    partition_name: str = ""
    #: What the queue is guaranteed, and the most that it may have.
    effective_min_resource: Vector | None = None
    effective_max_resource: Vector | None = None


class _Capacities(msgspec.Struct, rename="camel"):
    queue_capacities_by_partition: list[_Capacity] = []


class _Usage(msgspec.Struct, rename="camel"):
    partition_name: str = ""
    used: Vector | None = None
    pending: Vector | None = None


class _Usages(msgspec.Struct, rename="camel"):
    resource_usages_by_partition: list[_Usage] = []


class _User(msgspec.Struct, rename="camel"):
    username: str = ""
    resources_used: Vector | None = None
    user_resource_limit: Vector | None = None
    #: Whether applications of the user wait for containers.
    is_active: bool = False


class _Queue(msgspec.Struct, rename="camel"):
    queue_name: str = ""
    #: Most that one user may have, as a multiple of what the queue is guaranteed; negative for no limit.
    user_limit_factor: float = 1.0
    capacities: _Capacities = msgspec.field(default_factory=_Capacities)
    resources: _Usages = msgspec.field(default_factory=_Usages)
    queues: dict[Literal["queue"], list[_Queue]] | None = None
    users: dict[Literal["user"], list[_User]] | None = None

    def children(self) -> Sequence[_Queue]:
        return (self.queues or {}).get("queue", ())

    def capacity(self, partition: str) -> _Capacity:
        capacities = self.capacities.queue_capacities_by_partition
        return next((capacity for capacity in capacities if capacity.partition_name == partition), _Capacity())

    def usage(self, partition: str) -> _Usage:
        found = (usage for usage in self.resources.resource_usages_by_partition if usage.partition_name == partition)
        return next(found, _Usage())


class _Info(msgspec.Struct, rename="camel"):
    scheduler_info: _Queue


class _Scheduler(msgspec.Struct):
    scheduler: _Info


@dataclass(frozen=True, slots=True)
class Queues:
    """The capacity scheduler's queues, as it reported them; ``partition`` is the node label that counts."""

    root: _Queue
    partition: str = ""

    def headroom(self, queue: str, user: str) -> Mapping[str, float] | None:
        """Headroom of a user in a queue; None if there is no such queue.

        Amounts by dl2d's name of the resource (memory in MiB): the smallest remainder of the queue, of the queues above
        it, and of the user's limit in it. Resources without a limit are absent.
        """
        path = _find_path(self.root, queue)
        if not path:
            return None
        headroom: dict[str, float] = {}
        for member in path:
            used, capacity = member.usage(self.partition).used, member.capacity(self.partition)
            _lower_to(headroom, _amounts(capacity.effective_max_resource), used)
        users = (path[-1].users or {}).get("user", [])
        for entry in users:
            if entry.username == user:
                others_wait = any(other.is_active for other in users if other is not entry)
                _lower_to(headroom, self._user_limit(path[-1], entry, others_wait=others_wait), entry.resources_used)
        return headroom

    def _user_limit(self, queue: _Queue, user: _User, *, others_wait: bool) -> Mapping[str, float]:
        """Amounts that a user may have in a queue; empty for no limit.

        Where the queue has more than it is guaranteed, YARN reports what it has now and one container more, and raises
        that as it grows, as long as no other user waits.
        """
        reported = _amounts(user.user_resource_limit)
        if others_wait or not reported:
            return reported
        if queue.user_limit_factor < 0:
            return {}
        guaranteed = _amounts(queue.capacity(self.partition).effective_min_resource)
        return {name: max(most, guaranteed.get(name, 0) * queue.user_limit_factor) for name, most in reported.items()}

    def paths(self) -> list[str]:
        """Paths of the queues that take applications, such as ``root.gpu``."""
        return [path for path, _ in _leaves(self.root)]

    def pending_outside(self, queues: Collection[str]) -> Resources:
        """What applications in all other queues wait for."""
        inside = [path[-1] for queue in queues if (path := _find_path(self.root, queue))]
        others = [leaf for _, leaf in _leaves(self.root) if not any(leaf is each for each in inside)]
        return Resources.total(read_vector(leaf.usage(self.partition).pending) for leaf in others)


def read_queues(client: RestClient, partition: str = "") -> Queues | None:
    """Ask for the scheduler's queues; None where it is not the capacity scheduler. Raises as ``RestClient.get``."""
    root = client.get(SCHEDULER_PATH, _Scheduler).scheduler.scheduler_info
    return Queues(root, partition) if root.children() else None


def _amounts(limit: Vector | None) -> Mapping[str, float]:
    """Amounts of a limit by dl2d's names, zeros too; a limit without memory is none."""
    most = read_vector(limit)
    if limit is None or not most.get("memory"):
        return {}
    return {name: most.get(name) for name in map(resource_name, limit.resource_informations.resource_information)}


def _lower_to(headroom: dict[str, float], limit: Mapping[str, float], used: Vector | None) -> None:
    """Lower the headroom to what a limit leaves."""
    has = read_vector(used)
    for name, most in limit.items():
        left = max(0.0, most - has.get(name))
        headroom[name] = min(headroom.get(name, left), left)


def _find_path(queue: _Queue, name: str, above: str = "") -> list[_Queue]:
    """Queues from the root to the one of this name or path (``root.gpu``); empty if there is none."""
    path = f"{above}{queue.queue_name}"
    if not queue.children():
        return [queue] if name in (queue.queue_name, path, path.removeprefix("root.")) else []
    for child in queue.children():
        below = _find_path(child, name, f"{path}.")
        if below:
            return [queue, *below]
    return []


def _leaves(queue: _Queue, above: str = "") -> Iterator[tuple[str, _Queue]]:
    """Yield the queues that take applications, with their paths."""
    path = f"{above}{queue.queue_name}"
    if not queue.children():
        yield path, queue
    for child in queue.children():
        yield from _leaves(child, f"{path}.")


def within_headroom(nodes: Sequence[Node], headroom: Mapping[str, float], kept_free: Resources) -> tuple[Node, ...]:
    """Nodes whose free resources are reduced to the headroom: the rest counts as used, on the fullest nodes first.

    ``kept_free`` of all nodes counts as used too.
    """
    up = [node for node in nodes if node.state is NodeState.UP]
    withheld: dict[str, dict[str, float]] = {node.name: {} for node in up}
    for resource in {name for node in up for name in node.capacity.as_dict()}:
        free = {node.name: max(0.0, node.capacity.get(resource) - node.used.get(resource)) for node in up}
        all_free = sum(free.values())
        excess = all_free - min(headroom.get(resource, math.inf), max(0.0, all_free - kept_free.get(resource)))
        for name in sorted(free, key=lambda name: (free[name], name)):
            part = min(free[name], excess)
            if part > 0:
                withheld[name][resource] = part
                excess -= part
    return tuple(
        structs.replace(node, used=node.used + Resources.of(withheld[node.name])) if withheld.get(node.name) else node
        for node in nodes
    )


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
    """The nodes, with their free resources reduced to the headroom of all shares together.

    With ``leave_pending``, what applications in other queues wait for is kept free.
    """
    if queues is None or not shares:
        return nodes
    limited = set.intersection(*(set(share.headroom) for share in shares))
    headroom = {name: sum(share.headroom[name] for share in shares) for name in limited}
    pending = queues.pending_outside({share.queue for share in shares}) if leave_pending else Resources()
    return within_headroom(nodes, headroom, pending)


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
    """Limits from idle containers (without a task) of other jobs, which count as free on ``nodes``.

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
        reason = "idle containers of other jobs (they run no task) are room for those jobs only"
        return GrowthLimit(frozenset(applications), left, reason)

    live = {service.job: service.application_id for service in services if service.is_live and service.application_id}
    yield limit((application for job, application in live.items() if job not in idle_by_job), Resources())
    for job, own_idle in idle_by_job.items():
        if job in live:
            yield limit((live[job],), own_idle)


def read_pending_reason(client: RestClient, application: str) -> str:
    """Why containers of an application wait, as the scheduler says; "" while it has recorded no reason.

    It begins to record reasons with the first call. Raises as ``RestClient.get``.
    """
    answer = client.get(f"{ACTIVITIES_PATH}/{application}", dict[str, Any])
    reasons = Counter(text for text in _diagnostics(answer) if "waiting for" not in text)
    return " ".join(reasons.most_common(1)[0][0].split())[:_MAX_REASON] if reasons else ""


def _diagnostics(answer: object) -> Iterator[str]:
    """All texts under the key ``diagnostic``, at any depth."""
    stack: list[object] = [answer]
    while stack:
        found = stack.pop()
        if isinstance(found, dict):
            text = found.get("diagnostic")
            if isinstance(text, str) and text:
                yield text
            stack.extend(found.values())
        elif isinstance(found, list):
            stack.extend(found)
