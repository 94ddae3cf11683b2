"""A resource manager that lives in memory and does what a test tells it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from dl2d.core.cluster import Node
from dl2d.core.errors import Denied, NotFound, Rejected, ResourceManagerError
from dl2d.core.resource_manager import Anchor, Capabilities, RmJob, RmJobState, RmSnapshot, StaticJob, TaskSpec
from dl2d.core.resources import Resources


@dataclass(frozen=True, slots=True)
class _Entry:
    job: RmJob
    #: What it holds on which node while it runs.
    held: tuple[tuple[str, Resources], ...]


class MemoryManager:
    """Runs nothing; keeps the books exactly.

    Tasks run as soon as they are submitted, unless ``pending`` is set; they end when a test says so (``end``), or when
    they are stopped. ``refuse`` makes every submission fail with an error.
    """

    def __init__(self, nodes: Sequence[Node], clock: Callable[[], float], *, cluster: str = "test") -> None:
        self._nodes = {node.name: node for node in nodes}
        self._clock = clock
        self._cluster = cluster
        self._entries: dict[str, _Entry] = {}
        self._number = 0
        self.anchors: dict[str, Anchor] = {}
        self.submitted: list[TaskSpec] = []
        self.stopped: list[str] = []
        self.pending = False
        self.refuse: ResourceManagerError | None = None
        self.snapshots = 0

    def capabilities(self) -> Capabilities:
        """Starts anchors, like the local manager."""
        return Capabilities("memory", self._cluster, "1", starts_anchors=True, other_users=True)

    def snapshot(self) -> RmSnapshot:
        """The books as they are."""
        self.snapshots += 1
        nodes = tuple(structs.replace(node, used=self._used(node.name)) for node in self._nodes.values())
        return RmSnapshot(self._clock(), nodes, tuple(entry.job for entry in self._entries.values()))

    def submit(self, task: TaskSpec) -> str:
        """Book a task."""
        if self.refuse is not None:
            raise self.refuse
        node = self._nodes.get(task.node)
        if task.node and node is None:
            raise NotFound(f"no node {task.node}")
        if node is not None and not (self._used(task.node) + task.demand).fits_in(node.capacity):
            raise Rejected(f"{task.tag}: no room on {task.node}")
        self._number += 1
        handle = f"m{self._number}"
        state = RmJobState.PENDING if self.pending else RmJobState.RUNNING
        job = RmJob(
            handle=handle, state=state, tag=task.tag, user=task.owner.user, node=task.node,
            reason="Resources" if self.pending else "", submitted=int(self._clock()),
        )  # fmt: skip
        self._entries[handle] = _Entry(job, ((task.node, task.demand),))
        self.submitted.append(task)
        return handle

    def stop(self, handles: Sequence[str], grace: float) -> None:
        """End tasks at once."""
        del grace
        for handle in handles:
            self.stopped.append(handle)
            if handle in self._entries and not self._entries[handle].job.state.ended:
                self.end(handle, RmJobState.CANCELLED, "stopped")

    def vouch(self, rm_id: str, proof: str) -> Anchor:
        """Anchors that a test put into ``anchors``; the proof is the owner's name."""
        if rm_id not in self.anchors:
            raise NotFound(f"no job {rm_id}")
        if proof != self.anchors[rm_id].owner.user:
            raise Denied(f"job {rm_id} is not yours")
        return self.anchors[rm_id]

    def close(self) -> None:
        """Nothing to let go of."""

    # What tests do to it

    def set_static(
        self, handle: str, static: StaticJob, state: RmJobState, *, submitted: int, reason: str = ""
    ) -> None:
        """A job of somebody else's comes or changes: the scheduler in charge gave it what ``static`` says."""
        first = static.nodes[0] if static.nodes else ""
        job = RmJob(
            handle=handle, state=state, user=static.owner.user, node=first, reason=reason, submitted=submitted,
            static=static,
        )  # fmt: skip
        self._entries[handle] = _Entry(job, tuple((node, static.task) for node in static.nodes))

    def end(self, handle: str, state: RmJobState = RmJobState.DONE, reason: str = "") -> None:
        """A task ends."""
        entry = self._entries[handle]
        self._entries[handle] = replace(entry, job=structs.replace(entry.job, state=state, reason=reason))

    def run_pending(self) -> None:
        """Tasks that wait are started."""
        for handle, entry in self._entries.items():
            if entry.job.state is RmJobState.PENDING:
                self._entries[handle] = replace(
                    entry, job=structs.replace(entry.job, state=RmJobState.RUNNING, reason="")
                )

    def forget(self, handle: str) -> None:
        """The manager does not list a job any more."""
        del self._entries[handle]

    def set_node(self, node: Node) -> None:
        """A node appears or changes."""
        self._nodes[node.name] = node

    def live(self) -> tuple[RmJob, ...]:
        """Jobs that have not ended."""
        return tuple(entry.job for entry in self._entries.values() if not entry.job.state.ended)

    def handle_of(self, tag: str) -> str:
        """Handle of the live job with a mark."""
        return next(job.handle for job in self.live() if job.tag == tag)

    def _used(self, node: str) -> Resources:
        return self._nodes[node].used + Resources.total(
            demand
            for entry in self._entries.values()
            if entry.job.state in (RmJobState.RUNNING, RmJobState.ENDING)
            for place, demand in entry.held
            if place == node
        )
