"""What the queue of dl2d's services lets them have, and why a service's containers wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from msgspec import structs

from dl2d.core.cluster import Node, NodeState
from dl2d.core.resources import Resources
from dl2d_yarn.listing import Vector, read_vector, resource_name
from dl2d_yarn.rest_client import RestClient

SCHEDULER_PATH: Final = "/ws/v1/cluster/scheduler"
ACTIVITIES_PATH: Final = "/ws/v1/cluster/scheduler/app-activities"
_MAX_REASON: Final = 300


class _Capacity(msgspec.Struct, rename="camel"):
    partition_name: str = ""
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


class _Queue(msgspec.Struct, rename="camel"):
    queue_name: str = ""
    queue_path: str = ""
    capacities: _Capacities = msgspec.field(default_factory=_Capacities)
    resources: _Usages = msgspec.field(default_factory=_Usages)
    queues: dict[Literal["queue"], list[_Queue]] | None = None
    users: dict[Literal["user"], list[_User]] | None = None

    def children(self) -> Sequence[_Queue]:
        return (self.queues or {}).get("queue", ())

    def usage(self, partition: str) -> _Usage:
        found = (usage for usage in self.resources.resource_usages_by_partition if usage.partition_name == partition)
        return next(found, _Usage())


class _Info(msgspec.Struct, rename="camel"):
    scheduler_info: _Queue


class _Scheduler(msgspec.Struct):
    scheduler: _Info


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What a queue still has room for, and what other queues' applications wait for."""

    #: By resource; resources without a limit are absent.
    headroom: Mapping[str, float]
    pending_elsewhere: Resources


def read_queue_limits(client: RestClient, queue: str, user: str, *, partition: str = "") -> QueueLimits | None:
    """Ask for the scheduler's queues; None where the scheduler is not the capacity scheduler or lacks the queue.

    The headroom is the least that the queue, the queues above it, and the limit of the user in it allow. Raises as
    ``RestClient.get``.
    """
    root = client.get(SCHEDULER_PATH, _Scheduler).scheduler.scheduler_info
    chain = _chain(root, queue)
    if not chain:
        return None
    headroom: dict[str, float] = {}
    for member in chain:
        for capacity in member.capacities.queue_capacities_by_partition:
            if capacity.partition_name == partition:
                _take_least(headroom, capacity.effective_max_resource, member.usage(partition).used)
    for entry in (chain[-1].users or {}).get("user", ()):
        if entry.username == user:
            _take_least(headroom, entry.user_resource_limit, entry.resources_used)
    others = [leaf for leaf in _leaves(root) if leaf is not chain[-1]]
    pending = Resources.total(read_vector(leaf.usage(partition).pending) for leaf in others)
    return QueueLimits(headroom, pending)


def _take_least(headroom: dict[str, float], limit: Vector | None, used: Vector | None) -> None:
    """Lower the headroom to what a limit leaves; a limit without memory is none."""
    most, has = read_vector(limit), read_vector(used)
    if limit is None or not most.get("memory"):
        return
    for name in map(resource_name, limit.resource_informations.resource_information):
        left = max(0.0, most.get(name) - has.get(name))
        headroom[name] = min(headroom.get(name, left), left)


def _chain(queue: _Queue, name: str) -> list[_Queue]:
    """The queue of this name or path, behind the queues above it."""
    if not queue.children():
        return [queue] if name in (queue.queue_name, queue.queue_path, queue.queue_path.removeprefix("root.")) else []
    for child in queue.children():
        below = _chain(child, name)
        if below:
            return [queue, *below]
    return []


def _leaves(queue: _Queue) -> Iterator[_Queue]:
    if not queue.children():
        yield queue
    for child in queue.children():
        yield from _leaves(child)


def within_limits(nodes: Sequence[Node], limits: QueueLimits, *, leave_pending: bool) -> tuple[Node, ...]:
    """The nodes with no more free than the queue may have: the remainder counts as used, on the fullest nodes first.

    With ``leave_pending``, what applications in other queues wait for is left to them.
    """
    up = [node for node in nodes if node.state is NodeState.UP]
    withheld: dict[str, dict[str, float]] = {node.name: {} for node in up}
    for resource in {name for node in up for name in node.capacity.as_dict()}:
        free = {node.name: max(0.0, node.capacity.get(resource) - node.used.get(resource)) for node in up}
        allowed = limits.headroom.get(resource, float("inf"))
        if leave_pending:
            allowed = min(allowed, max(0.0, sum(free.values()) - limits.pending_elsewhere.get(resource)))
        excess = sum(free.values()) - allowed
        for name in sorted(free, key=lambda name: (free[name], name)):
            part = min(free[name], excess)
            if part > 0:
                withheld[name][resource] = part
                excess -= part
    return tuple(
        structs.replace(node, used=node.used + Resources.of(withheld[node.name])) if withheld.get(node.name) else node
        for node in nodes
    )


def read_pending_reason(client: RestClient, application: str) -> str:
    """Why containers of an application wait, in the scheduler's words; "" while it has not noted any.

    The first call has the scheduler note them. Raises as ``RestClient.get``.
    """
    answer = client.get(f"{ACTIVITIES_PATH}/{application}", dict[str, Any])
    reasons = Counter(text for text in _diagnostics(answer) if "waiting for" not in text)
    return " ".join(reasons.most_common(1)[0][0].split())[:_MAX_REASON] if reasons else ""


def _diagnostics(answer: object) -> Iterator[str]:
    """All texts under the key ``diagnostic``, however deep."""
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
