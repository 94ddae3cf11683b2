"""Resource manager in memory: it accounts for nodes and tasks, and runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from dl2d.core.cluster import Node, NodeState, Task
from dl2d.core.errors import Denied, NotFound, Rejected
from dl2d.core.jobs import Role
from dl2d.core.resource_manager import Anchor, Capabilities, RmIdentity, RmJob, RmJobState, RmListing, TaskSpec
from dl2d.core.resources import Resources


class _Node:
    """A node, and the thousandths of each resource that are in use on it."""

    __slots__ = ("_capacity", "_changed", "_record", "_used")

    def __init__(self, node: Node) -> None:
        self._record = node
        self._capacity = dict(node.capacity.thousandths)
        self._used = dict(node.used.thousandths)
        #: Whether the record's use is older than ``_used``.
        self._changed = False

    @property
    def state(self) -> NodeState:
        """Whether it takes tasks."""
        return self._record.state

    def has_room(self, demand: Resources) -> bool:
        """Whether a task with this demand fits."""
        used, capacity = self._used, self._capacity
        for name, amount in demand.thousandths:  # noqa: SIM110 - a generator takes twice as long, and this is asked often
            if used.get(name, 0) + amount > capacity.get(name, 0):
                return False
        return True

    def add(self, demand: Resources, times: int) -> None:
        """Account for a task that came (``times`` 1) or went (-1)."""
        for name, amount in demand.thousandths:
            self._used[name] = self._used.get(name, 0) + times * amount
        self._changed = True

    def seen(self) -> Node:
        """The node as it is."""
        if self._changed:
            used = Resources(tuple(sorted((name, amount) for name, amount in self._used.items() if amount)))
            self._record = structs.replace(self._record, used=used)
            self._changed = False
        return self._record


@dataclass(slots=True)
class _Entry:
    job: RmJob
    #: What it holds on which node while it runs.
    held: tuple[tuple[str, Resources], ...]


class MemoryManager:
    """Implements ``ResourceManager`` for simulation and tests.

    Tasks run from the moment they are submitted. They end when they are stopped, when ``end`` says so, or when their
    node goes down.

    Parameters
    ----------
    nodes
        The cluster; ``used`` is what others hold.
    clock
        Seconds since 1970, or of virtual time.
    cluster
        Name of the cluster.
    keep_ended
        List ended tasks until ``forget``; otherwise they are listed once and then forgotten.
    """

    def __init__(
        self, nodes: Iterable[Node], clock: Callable[[], float], *, cluster: str = "memory", keep_ended: bool = True
    ) -> None:
        self._nodes = {node.name: _Node(node) for node in nodes}
        self._clock = clock
        self._cluster = cluster
        self._keep_ended = keep_ended
        self._entries: dict[str, _Entry] = {}
        self._ended: list[str] = []
        self._number = 0

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes as they are."""
        return tuple([node.seen() for node in self._nodes.values()])

    def capabilities(self) -> Capabilities:
        """It starts anchors, like the local manager."""
        return Capabilities("memory", self._cluster, "1", starts_anchors=True, other_users=True)

    def listing(self, ended_since: float | None = None, tasks: Collection[Task] | None = None) -> RmListing:
        """Nodes and tasks as they are."""
        del ended_since, tasks
        listing = RmListing(self._clock(), self.nodes, tuple([entry.job for entry in self._entries.values()]))
        if not self._keep_ended:
            self.forget(self._ended)
            self._ended = []
        return listing

    def submit(self, task: TaskSpec) -> str:
        """Start a task; an anchor that runs already is not started again."""
        if task.role is Role.COORDINATOR:
            running = next((job for job in self.live() if job.tag == task.tag), None)
            if running is not None:
                return running.handle
        node = self._nodes.get(task.node)
        if node is None:
            if task.node:
                raise NotFound(f"there is no node {task.node!r}")
        elif node.state is not NodeState.UP:
            raise Rejected(f"{task.tag}: node {task.node} is {node.state}")
        elif not node.has_room(task.demand):
            seen = node.seen()
            missing = task.demand.lacking(seen.capacity.minus(seen.used))
            raise Rejected(f"{task.tag}: no room on {task.node} ({missing})")
        self._number += 1
        handle = f"m{self._number}"
        job = RmJob(
            handle=handle, state=RmJobState.RUNNING, tag=task.tag, user=task.owner.user, node=task.node,
            submitted=int(self._clock()),
        )  # fmt: skip
        self.put(job, ((task.node, task.demand),) if task.node else ())
        return handle

    def stop(self, jobs: Sequence[RmIdentity], grace: float) -> None:
        """End tasks at once."""
        del grace
        for job in jobs:
            entry = self._entries.get(job.handle)
            if entry is not None and not entry.job.state.ended and entry.job.identity == job:
                self.end(job.handle, RmJobState.CANCELLED, "stopped")

    def authenticate(self, rm_id: str, proof: str) -> Anchor:
        """No job registers with it."""
        raise Denied(f"job {rm_id} cannot register: this cluster is in memory only", said=proof[:0])

    def close(self) -> None:
        """Nothing to release."""

    # What a simulator or a test does to it

    def put(self, job: RmJob, held: tuple[tuple[str, Resources], ...]) -> None:
        """Add a job, or replace the one with its handle; ``held`` is what it holds on which node while it runs."""
        self._release(job.handle)
        self._entries[job.handle] = _Entry(job, held)
        self._hold(self._entries[job.handle], 1)

    def end(self, handle: str, state: RmJobState = RmJobState.DONE, reason: str = "") -> None:
        """End a task."""
        entry = self._entries[handle]
        self._hold(entry, -1)
        entry.job = structs.replace(entry.job, state=state, reason=reason, ended=self._clock())
        self._ended.append(handle)

    def forget(self, handles: Iterable[str]) -> None:
        """Remove tasks from the list; those that still run end without a trace."""
        for handle in handles:
            self._release(handle)

    def set_node(self, node: Node) -> None:
        """Add or replace a node, ``used`` being what others hold; tasks on one that goes down are lost."""
        found = _Node(node)
        self._nodes[node.name] = found
        for handle, entry in self._entries.items():
            here = [demand for name, demand in entry.held if name == node.name]
            if _holds(entry.job):
                for demand in here:
                    found.add(demand, 1)
            if here and node.state is NodeState.DOWN and not entry.job.state.ended:
                self.end(handle, RmJobState.LOST, f"node {node.name}: {node.remark}")

    def live(self) -> tuple[RmJob, ...]:
        """Jobs that have not ended."""
        return tuple(entry.job for entry in self._entries.values() if not entry.job.state.ended)

    def _release(self, handle: str) -> None:
        entry = self._entries.pop(handle, None)
        if entry is not None:
            self._hold(entry, -1)

    def _hold(self, entry: _Entry, times: int) -> None:
        if _holds(entry.job):
            for name, demand in entry.held:
                self._nodes[name].add(demand, times)


def _holds(job: RmJob) -> bool:
    return job.state.holds_resources
