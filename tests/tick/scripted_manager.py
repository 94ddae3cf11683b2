"""Resource manager in memory that a test controls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from msgspec import structs

from dl2d.core.cluster import Node, Task
from dl2d.core.errors import Denied, NotFound, ResourceManagerError
from dl2d.core.jobs import Role
from dl2d.core.resource_manager import (
    Anchor,
    Claim,
    EligibleNodes,
    GrowthLimit,
    RmIdentity,
    RmJob,
    RmJobState,
    RmListing,
    StaticJob,
    TaskSpec,
    Yields,
)
from dl2d.core.resources import Resources
from dl2d.simulation.in_memory_resource_manager import MemoryManager


class ScriptedManager(MemoryManager):
    """Implements ``ResourceManager`` in memory, records what it is asked, and fails or delays where a test says so."""

    def __init__(self, nodes: Sequence[Node], clock: Callable[[], float], *, cluster: str = "test") -> None:
        super().__init__(nodes, clock, cluster=cluster)
        #: Jobs that may register, by id; the proof is the owner's name.
        self.anchors: dict[str, Anchor] = {}
        #: Credentials of users: user id and payload of each; it serves once.
        self.credentials: dict[str, tuple[int, str]] = {}
        #: Tasks that were submitted, and handles that were stopped.
        self.submitted: list[TaskSpec] = []
        self.stopped: list[str] = []
        #: Submitted tasks wait until ``run_pending``.
        self.pending = False
        #: ``ended_until`` of the listing, and the ``ended_since`` that each listing was asked for.
        self.ended_until: float | None = None
        self.asked_since: list[float | None] = []
        #: Tasks that were submitted without a node, by handle; they wait until ``start_queued``.
        self.queued: dict[str, TaskSpec] = {}
        #: Submissions fail with this error.
        self.refuse: ResourceManagerError | None = None
        #: Why listings are incomplete, and handles that they lack.
        self.incomplete: tuple[str, ...] = ()
        self.unlisted: set[str] = set()
        #: Jobs of others that wait; ``start_claims`` starts them. Priority of anchors, by handle or else
        #: ``anchor_priority``, and to whom they yield.
        self.claims: list[Claim] = []
        self.may_preempt: frozenset[str] = frozenset()
        self.anchor_priority = 100
        self.priorities: dict[str, int] = {}
        self.yields = Yields.HIGHER_PRIORITY
        #: Limits of the listing.
        self.growth_limits: tuple[GrowthLimit, ...] = ()
        #: Nodes that tasks may use, by the handle of their anchor.
        self.eligible: dict[str, EligibleNodes] = {}

    def listing(self, ended_since: float | None = None, tasks: Collection[Task] | None = None) -> RmListing:
        """Nodes and jobs as they are; all that ended are listed until ``forget``."""
        self.asked_since.append(ended_since)
        listing = super().listing(ended_since, tasks)
        jobs = tuple(
            structs.replace(job, priority=self.priorities.get(job.handle, self.anchor_priority), yields=self.yields)
            for job in listing.jobs
            if job.handle not in self.unlisted
        )
        return replace(
            listing,
            jobs=jobs,
            ended_until=self.ended_until,
            incomplete=self.incomplete,
            growth_limits=self.growth_limits,
            claims=(*self.claims, *self._claims_of_queued()),
            may_preempt=self.may_preempt,
            eligible_nodes=self.eligible,
        )

    def start_claims(self) -> list[str]:
        """Start the waiting jobs of others that have room, those of the highest priority first; returns which."""
        started = []
        jobs = [claim for claim in self.claims if not claim.standing]
        for claim in sorted(jobs, key=lambda claim: -claim.priority):
            free = {
                node.name: node.capacity.minus(node.used)
                for node in self.nodes
                if (claim.eligible is None or node.name in claim.eligible)
                and not (claim.whole and node.used.thousandths)
            }
            for count, demand in ((claim.nodes, claim.demand), *claim.spreads):
                nodes = max(count, 1)
                share = Resources(tuple((name, amount // nodes) for name, amount in demand.thousandths))
                room = [name for name in free if share.fits_in(free[name])]
                room.sort(key=lambda name: name not in claim.required)
                if len(room) >= nodes and claim.required <= set(room):
                    held = tuple((name, free[name] if claim.whole else share) for name in room[:nodes])
                    self.put(RmJob(handle=claim.handle, state=RmJobState.RUNNING, user=claim.user, node=room[0]), held)
                    self.claims.remove(claim)
                    started.append(claim.handle)
                    break
        return started

    def submit(self, task: TaskSpec) -> str:
        """Start a task, or have it wait (``pending``), or refuse it (``refuse``)."""
        if self.refuse is not None:
            raise self.refuse
        handle = super().submit(task)
        if not task.node and task.role is not Role.COORDINATOR:
            self.queued[handle] = task
            self._change(handle, RmJobState.PENDING, "Priority")
        elif self.pending:
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

    def authenticate_user(self, credential: str, payload: str) -> int:
        """See ``credentials``."""
        uid, made_for = self.credentials.pop(credential, (-1, ""))
        if made_for != payload:
            raise Denied("the credential was not made for this request, or used before")
        return uid

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
            static=static, ended=ended, array_id=array_id, held=static.task * len(static.nodes),
        )  # fmt: skip
        self.put(job, tuple((node, static.task) for node in static.nodes))

    def start_queued(self, most: int = 1000) -> list[str]:
        """Start tasks that wait without a node, in the order of their submission; returns the nodes."""
        started = []
        for job, task in self._waiting_in_queue():
            free = {node.name: node.capacity.minus(node.used) for node in self.nodes}
            room = [name for name in free if task.demand.fits_in(free[name])]
            if room and len(started) < most:
                started_job = structs.replace(job, state=RmJobState.RUNNING, node=room[0], reason="")
                self.put(started_job, ((room[0], task.demand),))
                started.append(room[0])
        return started

    def _claims_of_queued(self) -> list[Claim]:
        priority = self.anchor_priority + 1
        return [
            Claim(handle=job.handle, user=job.user, priority=priority, nodes=1, demand=task.demand, is_task=True)
            for job, task in self._waiting_in_queue()
        ]

    def _waiting_in_queue(self) -> list[tuple[RmJob, TaskSpec]]:
        tasks = {task.tag: task for task in self.queued.values()}
        return [(job, tasks[job.tag]) for job in self.live() if job.state is RmJobState.PENDING and job.tag in tasks]

    def run_pending(self) -> None:
        """Start the tasks that wait, as far as their nodes have room."""
        for job in self.live():
            room = {node.name: node.capacity.minus(node.used) for node in self.nodes}
            held = self._entries[job.handle].held
            if job.state is RmJobState.PENDING and held and all(demand.fits_in(room[node]) for node, demand in held):
                self._change(job.handle, RmJobState.RUNNING, "")

    def handle_of(self, tag: str) -> str:
        """Handle of the live job with a tag."""
        return next(job.handle for job in self.live() if job.tag == tag)

    def _change(self, handle: str, state: RmJobState, reason: str) -> None:
        entry = self._entries[handle]
        self.put(structs.replace(entry.job, state=state, reason=reason), entry.held)
