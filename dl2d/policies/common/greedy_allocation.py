"""Greedy allocation: jobs get tasks as long as nodes and limits have room, and each a reason why it gets no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import FOR_WANT_OF_ROOM, Alternative, Constraint, Decision, JobDecision, Reason
from dl2d.core.jobs import NOTHING, TASK_ROLES, Allocation, Job, JobKey, Role
from dl2d.core.packing.bin_packing import JobDemand, Packing, job_demand
from dl2d.core.packing.room_in_limits import Blocked
from dl2d.core.policy import Policy


def next_bundle(job: Job, size: Allocation, *, whole: bool = False) -> Allocation | None:
    """Tasks to add to a job of a given size: first its minimum size, then one worker and one PS, within its bounds.

    Where the job allows only some worker counts, as many workers are added as lead to the next of them, and as many
    PSs. Once the job has its maximum of one role, tasks of the other role alone are added, unless only ``whole``
    bundles are given.

    Returns
    -------
    None when nothing is left to add.
    """
    request = job.request
    if size.workers == 0:
        minimum = request.min_size
        return Allocation(minimum.workers, max(minimum.ps - size.ps, 0))
    if request.allowed_workers:
        larger = [count for count in request.allowed_workers if size.workers < count <= request.max_workers]
        more_workers = min(larger, default=size.workers) - size.workers
    else:
        more_workers = 1 if size.workers < request.max_workers else 0
    more_ps = min(more_workers or 1, request.max_ps - size.ps)
    step = Allocation(more_workers, max(more_ps, 0))
    incomplete = not more_workers or (request.max_ps > 0 and step.ps < more_workers)
    return None if step == NOTHING or (whole and incomplete) else step


class GreedyAllocation:
    """Allocations of the jobs of a snapshot while a policy enlarges them, from which the decision is made.

    Each job has its floor at first.

    Parameters
    ----------
    packing
        Packing for this decision; tasks are added to it.
    whole_bundles
        Whether a job gets only a worker and a PS together.
    """

    def __init__(self, snapshot: Snapshot, packing: Packing, *, whole_bundles: bool = False) -> None:
        self._packing = packing
        self._whole_bundles = whole_bundles
        #: The nodes with nothing on them, once that was asked for; and which sizes have room there, by demands.
        self._empty: Packing | None = None
        self._possible: dict[JobDemand, bool] = {}
        self._jobs = snapshot.jobs
        #: Nodes that jobs may use, without those that may use all.
        self.may_use = snapshot.may_use()
        #: Size of each job on the cluster.
        self.held = snapshot.held()
        #: Size of each job in the decision so far.
        self.allocations: dict[JobKey, Allocation] = dict.fromkeys((job.key for job in snapshot.jobs), NOTHING)
        #: Added tasks, in the order in which they were added.
        self.actions: list[tuple[JobKey, Allocation]] = []
        #: Reason why a job gets no more, for jobs that stopped.
        self.reasons: dict[JobKey, Reason] = {}
        floors = dict(snapshot.floors)
        # What jobs have of their floors is added first, so that what others lack of theirs does not take its room.
        for part in (Allocation.common, Allocation.beyond):
            for job in snapshot.jobs:
                tasks = part(floors.get(job.key, NOTHING), self.held[job.key])
                if tasks != NOTHING and packing.add(job, tasks, beyond_limits=True) is not None:
                    # They do not all fit again. Those that do keep other jobs out of their room.
                    for role in TASK_ROLES:
                        packing.place_all(job.request.demand(role), role, tasks.count(role), job.key, limited=False)
        for job in snapshot.jobs:
            # The job has its floor even if that does not fit into the packing again.
            if floors.get(job.key, NOTHING) != NOTHING:
                self.give(job, floors[job.key])

    def room_key(self, job: Job) -> tuple[frozenset[str] | None, tuple[int, ...]]:
        """The nodes that a job may use and its limits: jobs with equal ones have room for equal tasks alike."""
        return self.may_use.get(job.key), self._packing.limits.of(job.key)

    def waiting_helps(self, job: Job, step: Allocation) -> bool:
        """Whether the nodes that take tasks would have room for a job with more tasks if nothing else ran on them.

        Always with a placement that tries the first node only: the DL2 authors' simulator ends at the first refusal.
        """
        if self._packing.first_node_only:
            return True
        size = self.allocations[job.key].plus(step)
        asked = job_demand(job.request, size, self.may_use.get(job.key))
        if asked not in self._possible:
            self._empty = self._empty or self._packing.empty()
            self._possible[asked] = self._empty.fits(job, size)
        return self._possible[asked]

    def most(self, job: Job) -> tuple[tuple[str, int], ...]:
        """The most that its limits allow a job, in thousandths, of resources of which it could have more."""
        most = self._packing.limits.most(job.key)
        if not most:
            return ()
        largest = dict(job.request.demand_of(job.request.max_size).thousandths)
        return tuple((name, most[name]) for name in sorted(most) if name in largest and most[name] < largest[name])

    def limited(self, job: Job, step: Allocation) -> Blocked | None:
        """The limit that leaves too little for more tasks of a job; None if all leave enough."""
        return self._packing.limits.blocked(job, step)

    def next_bundle(self, job: Job) -> Allocation | None:
        """Tasks that ``grow`` would add, whether there is room for them or not."""
        return next_bundle(job, self.allocations[job.key], whole=self._whole_bundles)

    def grow(self, job: Job) -> Reason | None:
        """Give the job its next bundle; returns, and keeps, the reason if it gets none."""
        step = self.next_bundle(job)
        if step is None:
            text = f"has its maximum of {self.allocations[job.key]}"
            return self.refuse(job, Reason(Constraint.SATISFIED, text))
        blocked = self.add(job, step)
        return None if blocked is None else self.refuse(job, blocked.reason(f"next bundle of {step}: {blocked}"))

    def add(self, job: Job, step: Allocation) -> Blocked | None:
        """Give the job tasks, all or none; returns why there is no room for them, None if it got them."""
        blocked = self._packing.add(job, step)
        if blocked is None:
            self.give(job, step)
        return blocked

    def give(self, job: Job, step: Allocation) -> None:
        """Give the job tasks that are in the packing already."""
        self.allocations[job.key] = self.allocations[job.key].plus(step)
        self.actions.append((job.key, step))

    def keep(self, sizes: Sequence[tuple[Job, Allocation]]) -> None:
        """Give jobs tasks that they have already, on their nodes: of each job all, or none if one does not fit."""
        for (job, size), stays in zip(sizes, self._packing.stay(sizes), strict=True):
            if stays:
                self.give(job, size)

    def refuse(self, job: Job, reason: Reason) -> Reason:
        """Set the reason why a job gets no more, unless it has one already; returns the given reason."""
        self.reasons.setdefault(job.key, reason)
        return reason

    def decision(
        self,
        policy: Policy,
        *,
        measure: str = "",
        alternatives: dict[JobKey, tuple[Alternative, ...]] | None = None,
        nodes: Sequence[tuple[JobKey, Role, str]] = (),
    ) -> Decision:
        """Make the decision; every job must have a reason.

        Parameters
        ----------
        measure
            Meaning of the alternatives' scores.
        alternatives
            Sizes that were considered for each job.
        nodes
            Node of each task, if the policy chooses it.
        """
        return Decision(
            policy=policy.name,
            policy_version=policy.version,
            measure=measure,
            jobs=tuple(
                JobDecision(
                    job=job.key,
                    allocation=self.allocations[job.key],
                    previous=self.held.get(job.key, NOTHING),
                    reason=self.reasons[job.key],
                    alternatives=(alternatives or {}).get(job.key, ()),
                )
                for job in self._jobs
            ),
            actions=tuple(self.actions),
            nodes=tuple(nodes),
        )


def serve_in_order(allocation: GreedyAllocation, jobs: Iterable[Job], why_first: Callable[[Job], str]) -> None:
    """Give each job in turn its maximum; end at the first for whose next bundle nodes have no room.

    A job for whose next bundle nodes would have no room even if nothing else ran on them is passed over, since waiting
    would not help it; one that is stopped by a limit does not end it either. One that may use some of the nodes only
    keeps those jobs waiting that may use the same.

    Parameters
    ----------
    why_first
        Why the job at which the allocation ended comes before the others; completes "waits for X, which ..." in their
        reasons.
    """
    #: The first job without room of those that may use the same nodes.
    first_waiting: dict[frozenset[str] | None, Job] = {}
    for job in jobs:
        may_use = allocation.may_use.get(job.key)
        ahead = first_waiting.get(None) or first_waiting.get(may_use)
        if ahead is not None:
            text = f"waits for {ahead.key.id} ({ahead.request.name}), which {why_first(ahead)} and has no room to grow"
            allocation.refuse(job, Reason(Constraint.QUEUE, text))
            continue
        stopped = None
        while stopped is None:
            stopped = allocation.grow(job)
        step = allocation.next_bundle(job)
        if stopped.constraint in FOR_WANT_OF_ROOM and step is not None and allocation.waiting_helps(job, step):
            first_waiting[may_use] = job
