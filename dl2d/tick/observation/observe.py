"""Observe: reads the resource manager's listing and the store's live jobs, and joins them into a snapshot."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from dl2d.core.cluster import Node, NodeSet, NodeState, Snapshot, Task, in_submit_order
from dl2d.core.jobs import NO_LAUNCH, Job, JobKey, JobState, Progress
from dl2d.core.measured_speeds_and_losses import TrainingKind
from dl2d.core.placement import Placement
from dl2d.core.policy import Evidence
from dl2d.core.resize_guard_state import NodeTrouble
from dl2d.core.resource_manager import RmJobState, RmListing, TickManager
from dl2d.core.resources import Resources
from dl2d.core.store import TickStore
from dl2d.tick.avoided_nodes import node_sets
from dl2d.tick.observation.allocated_resources import with_given
from dl2d.tick.observation.nodes_of_static_tasks import fitted_to_node_use

#: Number of kinds without a live job whose speeds are read too, for policies that compare single jobs with their kind:
#: a job whose user named the wrong model type may be of a kind that has no live job.
_OTHER_KINDS = 8

#: Why a listing without nodes is incomplete.
NO_NODES = "it has no nodes"
#: How long before its time limit a task is replaced: long enough for the other one to start and join.
_REPLACE_SECONDS = 300.0
#: Tasks and anchors whose time limits differ by no more count as ending together. Largest difference that the Slurm
#: plug-in makes (``bf_resolution`` up to 300 s + 60 s + rounding to minutes).
SAME_END_SECONDS = 420.0


@dataclass(frozen=True, slots=True)
class LiveJobs:
    """Jobs and tasks of the store that have not ended. The job of a task may have ended already."""

    jobs: tuple[Job, ...] = ()
    tasks: tuple[Task, ...] = ()

    def __add__(self, other: LiveJobs) -> LiveJobs:
        return LiveJobs((*self.jobs, *other.jobs), (*self.tasks, *other.tasks))


@dataclass(frozen=True, slots=True)
class Observed:
    """What was read: the resource manager's listing, and the live jobs and tasks of the store."""

    listing: RmListing
    elastic: LiveJobs
    static: LiveJobs


def observe(store: TickStore, manager: TickManager, ended_since: float | None, *, acts: bool) -> Observed:
    """Ask the resource manager for its listing, with static jobs that ended after ``ended_since``; read the store.

    A listing without nodes is incomplete: tasks run on some. If dl2d does not act (``acts``), policies decide on static
    jobs, and the claims of those that wait are left out: otherwise the room that such a job needs would count as used,
    by its own claim.

    Raises ``ResourceManagerError``, ``StoreError`` if the resource manager or the store does not answer.
    """
    listing = manager.listing(ended_since, live_jobs(store)[0].tasks)
    if not listing.nodes:
        listing = replace(listing, incomplete=(*listing.incomplete, NO_NODES))
    if not acts:
        listing = _without_claims_of_static_jobs(listing)
    # Again: while the resource manager answered, jobs have registered, reported and been cancelled.
    elastic, static = live_jobs(store)
    return Observed(listing, elastic, static)


def _without_claims_of_static_jobs(listing: RmListing) -> RmListing:
    """The listing without claims whose handle is that of a static job, or its id for users."""
    static = {handle for job in listing.jobs if job.static is not None for handle in (job.handle, job.shown_id)}
    claims, limit_claims = (
        tuple(claim for claim in claims if claim.handle not in static)
        for claims in (listing.claims, listing.limit_claims)
    )
    return replace(listing, claims=claims, limit_claims=limit_claims)


def without_ending(static: LiveJobs, listing: RmListing) -> LiveJobs:
    """Static jobs without those that the resource manager is ending, on which nothing is decided.

    What these still hold counts as used by others.
    """
    ending = {job.handle for job in listing.jobs if job.state is RmJobState.ENDING}
    keys = {job.key for job in static.jobs if job.anchor in ending}
    if not keys:
        return static
    return LiveJobs(
        tuple(job for job in static.jobs if job.key not in keys),
        tuple(task for task in static.tasks if task.job not in keys),
    )


def live_jobs(store: TickStore) -> tuple[LiveJobs, LiveJobs]:
    """The live elastic jobs, and the live static jobs, each with their tasks."""
    jobs, tasks = store.jobs(live=True), store.tasks(live=True)
    static = {job.key for job in jobs if job.static}
    if not static:
        return LiveJobs(jobs, tasks), LiveJobs()
    return (
        LiveJobs(tuple(job for job in jobs if not job.static), tuple(task for task in tasks if task.job not in static)),
        LiveJobs(tuple(job for job in jobs if job.static), tuple(task for task in tasks if task.job in static)),
    )


def take_snapshot(
    live: LiveJobs,
    listing: RmListing,
    slot: int,
    avoided_nodes: Mapping[JobKey, Mapping[str, NodeTrouble]],
    placement: Placement,
) -> Snapshot:
    """Join the resource manager's listing with the store's jobs and tasks, after they were reconciled.

    ``avoided_nodes`` are, by job, nodes on which the resource manager refused a task of it, or on which one failed or
    did not start. They are not used for that job for a while. If its smallest size does not fit without nodes where its
    tasks failed, as many of these as it needs stay usable (tried with ``placement``). A node that none of the jobs may
    use takes no tasks.

    Demands are what tasks get (``with_given``). ``Task.held`` is what a task really holds, where that is something
    else: its node has so much more free when it has left.

    A node with tasks that is not listed is shown as draining, with the room of these tasks. They run until they are not
    listed themselves; without this room the policy would shrink jobs on other nodes.

    Resources of tasks that were asked for but do not run yet count as used, so that they are not given twice.
    Commands and environments are left out: no policy may look at them, and recorded slots must not show them.
    """
    holding = {job.handle for job in listing.jobs if job.state.holds_resources}
    jobs_given, tasks = with_given(live.jobs, live.tasks, listing)
    promised: dict[str, list[Resources]] = defaultdict(list)
    for task in tasks:
        if task.handle not in holding:
            promised[task.node].append(task.demand)
    nodes = tuple(
        structs.replace(node, used=Resources.total((node.used, *promised[node.name])))
        if node.name in promised
        else node
        for node in listing.nodes
    ) + _unlisted_nodes(listing, tasks)
    if static := {job.key for job in jobs_given if job.static}:
        tasks = fitted_to_node_use(tasks, static, nodes)
    schedulable = tuple(job for job in jobs_given if job.state in (JobState.READY, JobState.RUNNING))
    just_started = _static_jobs_started_now(schedulable, tasks, listing.at)
    jobs = in_submit_order([_as_shown(job, listing.at, just_started=job.key in just_started) for job in schedulable])
    # A running job keeps its minimum size: its weights are in its servers, so it is never shrunk to nothing. It keeps
    # all that it has where the listing may lack nodes.
    running = [job for job in jobs if job.state is JobState.RUNNING and job.key not in just_started]
    floors = {job.key: job.request.min_size for job in running}
    sets = node_sets(jobs, listing, avoided_nodes, placement, listing.at)
    snapshot = Snapshot(
        at=listing.at, slot=slot, nodes=_close_unusable_nodes(nodes, jobs, sets), jobs=jobs, tasks=tasks,
        floors=tuple(floors.items()), node_sets=sets,
        expiring=expiring_tasks(jobs, tasks, listing),
    )  # fmt: skip
    if listing.incomplete:
        sizes = snapshot.held()
        kept = ((job.key, job.request.largest_within(sizes[job.key]).larger(floors[job.key])) for job in running)
        return structs.replace(snapshot, floors=tuple(kept))
    return snapshot


def _unlisted_nodes(listing: RmListing, tasks: Iterable[Task]) -> tuple[Node, ...]:
    """The nodes of tasks that are not listed, each with what its tasks have."""
    listed = {node.name for node in listing.nodes}
    room: dict[str, list[Resources]] = defaultdict(list)
    for task in tasks:
        if task.node and task.node not in listed:
            room[task.node].append(task.room)
    totals = {name: Resources.total(held) for name, held in room.items()}
    return tuple(
        Node(name, held, used=held, state=NodeState.DRAINING, remark="not listed") for name, held in totals.items()
    )


def _close_unusable_nodes(nodes: tuple[Node, ...], jobs: Sequence[Job], sets: Sequence[NodeSet]) -> tuple[Node, ...]:
    """The nodes; those that no job may use are shown as draining, so that no policy plans with their room.

    Static jobs are shown where dl2d does not act: the nodes are recorded as they are.
    """
    if not sets or sum(len(each.jobs) for each in sets) < len(jobs) or any(job.static for job in jobs):
        return nodes
    useful = frozenset[str]().union(*(each.nodes for each in sets))
    return tuple(
        structs.replace(node, state=NodeState.DRAINING, remark="no job of dl2d may use it")
        if node.is_open and node.name not in useful
        else node
        for node in nodes
    )


def _static_jobs_started_now(jobs: Iterable[Job], tasks: Iterable[Task], at: float) -> frozenset[JobKey]:
    """Static jobs whose first tasks appeared in this tick: they had nothing when their size was decided."""
    static = frozenset(job.key for job in jobs if job.static)
    return static - {task.job for task in tasks if task.asked_at < at} if static else static


def _as_shown(job: Job, at: float, *, just_started: bool) -> Job:
    """The job as a policy sees it: without its command, and with its progress as far as it is known at this time."""
    if not job.unreported:
        return replace(job, launch=NO_LAUNCH)
    return replace(job, launch=NO_LAUNCH, progress=Progress(at=at) if just_started else job.progress_at(at))


def with_evidence(snapshot: Snapshot, needs: Collection[Evidence], store: TickStore) -> Snapshot:
    """The snapshot with the measurements that a policy needs, read from the store (raises ``StoreError``)."""
    if Evidence.SPEEDS in needs:
        kinds = {TrainingKind.of(job.request) for job in snapshot.jobs}
        others = _OTHER_KINDS if Evidence.JOB_SPEEDS in needs else 0
        snapshot = structs.replace(snapshot, speeds=store.speeds(kinds, others=others))
    if Evidence.JOB_SPEEDS in needs:
        snapshot = structs.replace(snapshot, job_speeds=store.job_speeds([job.key for job in snapshot.jobs]))
    if Evidence.LOSSES in needs:
        snapshot = structs.replace(snapshot, losses=store.losses([job.key for job in snapshot.jobs]))
    return snapshot


def expiring_tasks(jobs: Iterable[Job], tasks: Iterable[Task], listing: RmListing) -> frozenset[str]:
    """Tags of the tasks that reach their time limit soon, and well before the anchor of their job does."""
    limits = {job.handle: job.time_limit_at for job in listing.jobs if job.time_limit_at}
    if not limits:
        return frozenset()
    anchors = {job.key: limits.get(job.anchor, math.inf) for job in jobs}
    expiring = set[str]()
    for task in tasks:
        limit = limits.get(task.handle, math.inf)
        # The resource manager's clock may differ from this machine's, on which the task was asked for.
        end = limit + task.asked_at - (task.submitted or task.asked_at)
        # At most a quarter of the task's lifetime; else one with a short limit would be replaced as soon as it starts.
        lead = min(_REPLACE_SECONDS, (end - task.asked_at) / 4)
        if task.job in anchors and end - listing.at < lead and anchors[task.job] - limit > SAME_END_SECONDS:
            expiring.add(task.tag)
    return frozenset(expiring)
