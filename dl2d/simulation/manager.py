"""The simulated resource manager: a cluster in virtual time, behind the same contract as the real ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from dl2d.core.cluster import Node, NodeState
from dl2d.core.errors import Denied, NotFound, Rejected
from dl2d.core.resource_manager import Anchor, Capabilities, RmJob, RmJobState, RmSnapshot, TaskSpec
from dl2d.core.resources import Resources


class _Running(msgspec.Struct, gc=False):
    spec: TaskSpec
    submitted: int
    #: As it is listed; made when it is first asked for.
    listed: RmJob | None = None


class SimulatedManager:
    """Starts and stops tasks at once, and keeps the books. Time stands still until ``now`` is set.

    Ended tasks are listed once more, in the next snapshot, and then forgotten.
    """

    def __init__(self, nodes: Sequence[Node], *, cluster: str = "simulated") -> None:
        self._nodes = {node.name: node for node in nodes}
        #: Thousandths in use, by node and resource, and the nodes whose records say something older.
        self._used = {node.name: dict(node.used.thousandths) for node in nodes}
        self._room = {node.name: dict(node.capacity.thousandths) for node in nodes}
        self._changed: set[str] = set()
        self._cluster = cluster
        self._running: dict[str, _Running] = {}
        self._ended: list[RmJob] = []
        self._number = 0
        #: Virtual time, seconds.
        self.now = 0.0

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes as they are."""
        for name in self._changed:
            node = self._nodes[name]
            used = Resources(tuple(sorted((key, amount) for key, amount in self._used[name].items() if amount)))
            self._nodes[name] = Node(name, node.capacity, used, node.state, node.remark)
        self._changed.clear()
        return tuple(self._nodes.values())

    def capabilities(self) -> Capabilities:
        """Jobs come from the workload, not through the manager."""
        return Capabilities("simulated", self._cluster, "1", starts_anchors=False, other_users=True)

    def snapshot(self) -> RmSnapshot:
        """The books as they are."""
        ended, self._ended = self._ended, []
        running = [self._listed(handle, task) for handle, task in self._running.items()]
        return RmSnapshot(self.now, self.nodes, (*running, *ended))

    def submit(self, task: TaskSpec) -> str:
        """Start a task; it runs from this moment."""
        room = self._room.get(task.node)
        if room is None:
            raise NotFound(f"there is no node {task.node!r}")
        if self._nodes[task.node].state is not NodeState.UP:
            raise Rejected(f"{task.tag}: node {task.node} is {self._nodes[task.node].state}")
        used = self._used[task.node]
        for name, amount in task.demand.thousandths:
            if used.get(name, 0) + amount > room.get(name, 0):
                raise self._rejected(task)
        for name, amount in task.demand.thousandths:
            used[name] = used.get(name, 0) + amount
        self._changed.add(task.node)
        self._number += 1
        handle = str(self._number)
        self._running[handle] = _Running(task, int(self.now))
        return handle

    def stop(self, handles: Sequence[str], grace: float) -> None:
        """End tasks at once."""
        del grace
        for handle in handles:
            running = self._running.pop(handle, None)
            if running is not None:
                self._end(handle, running, RmJobState.CANCELLED, "stopped")

    def forget(self, handles: Iterable[str]) -> None:
        """End tasks of which nobody knows any more, so that there is nothing to list."""
        for handle in handles:
            running = self._running.pop(handle, None)
            if running is not None:
                self._give_back(running.spec)

    def set_node(self, name: str, state: NodeState, remark: str = "") -> None:
        """Put a node into a state; tasks on one that goes down are lost."""
        node = self._nodes[name]
        self._nodes[name] = Node(name, node.capacity, node.used, state, remark)
        if state is NodeState.DOWN:
            for handle in [handle for handle, task in self._running.items() if task.spec.node == name]:
                self._end(handle, self._running.pop(handle), RmJobState.LOST, f"node {name}: {remark}")

    def _end(self, handle: str, task: _Running, state: RmJobState, reason: str) -> None:
        """Give back what a task held, and list it once more."""
        self._give_back(task.spec)
        self._ended.append(_listing(handle, task, state, reason))

    def _give_back(self, spec: TaskSpec) -> None:
        used = self._used[spec.node]
        for name, amount in spec.demand.thousandths:
            used[name] -= amount
        self._changed.add(spec.node)

    def _listed(self, handle: str, task: _Running) -> RmJob:
        if task.listed is None:
            task.listed = _listing(handle, task, RmJobState.RUNNING)
        return task.listed

    def _rejected(self, task: TaskSpec) -> Rejected:
        node = next(node for node in self.nodes if node.name == task.node)
        missing = "; ".join(map(str, task.demand.shortfalls(node.capacity.minus(node.used))))
        return Rejected(f"{task.tag}: no room on {task.node} ({missing})")

    def vouch(self, rm_id: str, proof: str) -> Anchor:
        """Nobody registers with a simulation."""
        raise Denied(f"job {rm_id} cannot register: this cluster is simulated", said=proof[:0])

    def close(self) -> None:
        """Nothing to let go of."""


def _listing(handle: str, task: _Running, state: RmJobState, reason: str = "") -> RmJob:
    spec = task.spec
    return RmJob(
        handle=handle, state=state, tag=spec.tag, user=spec.owner.user, node=spec.node, reason=reason,
        submitted=task.submitted,
    )  # fmt: skip
