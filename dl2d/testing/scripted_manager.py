"""Resource manager in memory that a test controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from msgspec import structs

from dl2d.core.cluster import Node
from dl2d.core.errors import Denied, NotFound, ResourceManagerError
from dl2d.core.resource_manager import Anchor, RmIdentity, RmJob, RmJobState, RmListing, StaticJob, TaskSpec
from dl2d.simulation.in_memory_manager import MemoryManager


class ScriptedManager(MemoryManager):
    """Implements ``ResourceManager`` in memory, records what it is asked, and fails or delays where a test says so."""

    def __init__(self, nodes: Sequence[Node], clock: Callable[[], float], *, cluster: str = "test") -> None:
        super().__init__(nodes, clock, cluster=cluster)
        #: Jobs that may register, by id; the proof is the owner's name.
        self.anchors: dict[str, Anchor] = {}
        #: Tasks that were submitted, and handles that were stopped.
        self.submitted: list[TaskSpec] = []
        self.stopped: list[str] = []
        #: Submitted tasks wait until ``run_pending``.
        self.pending = False
        #: ``ended_until`` of the listing, and the ``ended_since`` that each listing was asked for.
        self.ended_until: float | None = None
        self.asked_since: list[float | None] = []
        #: Submissions fail with this error.
        self.refuse: ResourceManagerError | None = None
        #: Why listings are incomplete, and handles that they lack.
        self.incomplete: tuple[str, ...] = ()
        self.unlisted: set[str] = set()

    def listing(self, ended_since: float | None = None) -> RmListing:
        """Nodes and jobs as they are; all that ended are listed until ``forget``."""
        self.asked_since.append(ended_since)
        listing = super().listing(ended_since)
        jobs = tuple(job for job in listing.jobs if job.handle not in self.unlisted)
        return replace(listing, jobs=jobs, ended_until=self.ended_until, incomplete=self.incomplete)

    def submit(self, task: TaskSpec) -> str:
        """Start a task, or have it wait (``pending``), or refuse it (``refuse``)."""
        if self.refuse is not None:
            raise self.refuse
        handle = super().submit(task)
        if self.pending:
            self._change(handle, RmJobState.PENDING, "Resources")
        self.submitted.append(task)
        return handle

    def stop(self, jobs: Sequence[RmIdentity], grace: float) -> None:
        """End tasks at once."""
        self.stopped += [job.handle for job in jobs]
        super().stop(jobs, grace)

    def authenticate(self, rm_id: str, proof: str) -> Anchor:
        """See ``anchors``."""
        if rm_id not in self.anchors:
            raise NotFound(f"no job {rm_id}")
        if proof != self.anchors[rm_id].owner.user:
            raise Denied(f"job {rm_id} is not yours")
        return self.anchors[rm_id]

    def set_static(
        self,
        handle: str,
        static: StaticJob,
        state: RmJobState,
        *,
        submitted: int,
        reason: str = "",
        ended: float = 0.0,
        array_id: str = "",
    ) -> None:
        """Add or change a job that another scheduler runs as ``static`` says."""
        first = static.nodes[0] if static.nodes else ""
        job = RmJob(
            handle=handle, state=state, user=static.owner.user, node=first, reason=reason, submitted=submitted,
            static=static, ended=ended, array_id=array_id,
        )  # fmt: skip
        self.put(job, tuple((node, static.task) for node in static.nodes))

    def run_pending(self) -> None:
        """Start the tasks that wait."""
        for job in self.live():
            if job.state is RmJobState.PENDING:
                self._change(job.handle, RmJobState.RUNNING, "")

    def handle_of(self, tag: str) -> str:
        """Handle of the live job with a tag."""
        return next(job.handle for job in self.live() if job.tag == tag)

    def _change(self, handle: str, state: RmJobState, reason: str) -> None:
        entry = self._entries[handle]
        self.put(structs.replace(entry.job, state=state, reason=reason), entry.held)
