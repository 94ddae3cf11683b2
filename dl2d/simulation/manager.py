"""The simulated resource manager: a cluster in virtual time, behind the same contract as the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dl2d.core.cluster import Node
from dl2d.core.errors import Denied, NotFound, Rejected
from dl2d.core.resource_manager import Anchor, Capabilities, RmJob, RmJobState, RmSnapshot, TaskSpec
from dl2d.core.resources import Resources


@dataclass(frozen=True, slots=True)
class _Running:
    job: RmJob
    demand: Resources


class SimulatedManager:
    """Starts and stops tasks at once, and keeps the books. Time stands still until ``now`` is set.

    Ended tasks are listed once more, in the next snapshot, and then forgotten.
    """

    def __init__(self, nodes: Sequence[Node], *, cluster: str = "simulated") -> None:
        self._nodes = {node.name: node for node in nodes}
        self._cluster = cluster
        self._running: dict[str, _Running] = {}
        self._ended: list[RmJob] = []
        self._number = 0
        #: Virtual time, seconds.
        self.now = 0.0

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes as they are."""
        return tuple(self._nodes.values())

    def capabilities(self) -> Capabilities:
        """Jobs come from the workload, not through the manager."""
        return Capabilities("simulated", self._cluster, "1", starts_anchors=False, other_users=True)

    def snapshot(self) -> RmSnapshot:
        """The books as they are."""
        ended, self._ended = self._ended, []
        jobs = (*(running.job for running in self._running.values()), *ended)
        return RmSnapshot(self.now, tuple(self._nodes.values()), jobs)

    def submit(self, task: TaskSpec) -> str:
        """Start a task; it runs from this moment."""
        node = self._nodes.get(task.node)
        if node is None:
            raise NotFound(f"there is no node {task.node!r}")
        used = node.used + task.demand
        if not used.fits_in(node.capacity):
            missing = "; ".join(map(str, task.demand.shortfalls(node.capacity.minus(node.used))))
            raise Rejected(f"{task.tag}: no room on {task.node} ({missing})")
        self._nodes[task.node] = Node(node.name, node.capacity, used, node.state, node.remark)
        self._number += 1
        handle = str(self._number)
        job = RmJob(
            handle=handle, state=RmJobState.RUNNING, tag=task.tag, user=task.owner.user, node=task.node,
            submitted=int(self.now),
        )  # fmt: skip
        self._running[handle] = _Running(job, task.demand)
        return handle

    def stop(self, handles: Sequence[str], grace: float) -> None:
        """End tasks at once."""
        del grace
        for handle in handles:
            running = self._running.pop(handle, None)
            if running is None:
                continue
            node = self._nodes[running.job.node]
            used = node.used.minus(running.demand)
            self._nodes[node.name] = Node(node.name, node.capacity, used, node.state, node.remark)
            self._ended.append(replace(running.job, state=RmJobState.CANCELLED, reason="stopped"))

    def vouch(self, rm_id: str, proof: str) -> Anchor:
        """Nobody registers with a simulation."""
        raise Denied(f"job {rm_id} cannot register: this cluster is simulated", said=proof[:0])

    def close(self) -> None:
        """Nothing to let go of."""
