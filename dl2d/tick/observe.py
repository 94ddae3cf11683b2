"""Observe: reads the resource manager's listing and the store's live jobs, and joins them into a snapshot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from msgspec import structs

from dl2d.core.cluster import Snapshot, Task, in_submit_order
from dl2d.core.jobs import Allocation, Job, JobKey, JobState, Launch, Progress
from dl2d.core.measured_speeds import TrainingKind
from dl2d.core.policy import Evidence
from dl2d.core.resource_manager import ResourceManager, RmJobState, RmSnapshot
from dl2d.core.resources import Resources
from dl2d.core.store import TickStore

#: Kinds of jobs without a live job whose speeds are read as well, for policies that judge jobs one by one.
_OTHER_KINDS = 8
_NO_LAUNCH = Launch((), "")


@dataclass(frozen=True, slots=True)
class LiveJobs:
    """Jobs and tasks of the store that have not ended. A task's job may have ended before it."""

    jobs: tuple[Job, ...] = ()
    tasks: tuple[Task, ...] = ()

    def __add__(self, other: LiveJobs) -> LiveJobs:
        return LiveJobs((*self.jobs, *other.jobs), (*self.tasks, *other.tasks))


@dataclass(frozen=True, slots=True)
class Observed:
    """The manager's listing, and what the store has of elastic jobs and of those that run at fixed sizes."""

    listing: RmSnapshot
    elastic: LiveJobs
    static: LiveJobs


def observe(store: TickStore, manager: ResourceManager) -> Observed:
    """Ask the resource manager once, then read the store.

    Raises
    ------
    ResourceManagerError, StoreError
        One of them does not answer.
    """
    listing = manager.snapshot()
    return Observed(listing, *live_jobs(store))


def live_jobs(store: TickStore) -> tuple[LiveJobs, LiveJobs]:
    """Elastic jobs, and jobs that run at fixed sizes."""
    jobs, tasks = store.jobs(live=True), store.tasks(live=True)
    static = {job.key for job in jobs if job.static}
    if not static:
        return LiveJobs(jobs, tasks), LiveJobs()
    return (
        LiveJobs(tuple(job for job in jobs if not job.static), tuple(task for task in tasks if task.job not in static)),
        LiveJobs(tuple(job for job in jobs if job.static), tuple(task for task in tasks if task.job in static)),
    )


def take_snapshot(live: LiveJobs, seen: RmSnapshot, slot: int) -> Snapshot:
    """Join the manager's listing with the store's jobs and tasks, after they were reconciled.

    Tasks that were asked for but do not run yet count as used, so that no resources are given twice.
    Commands and environments are left out: no policy may look at them and they do not belong into recorded slots.
    """
    jobs, tasks = live.jobs, live.tasks
    holding = {job.handle for job in seen.jobs if job.state in (RmJobState.RUNNING, RmJobState.ENDING)}
    promised: dict[str, list[Resources]] = defaultdict(list)
    for task in tasks:
        if task.handle not in holding:
            promised[task.node].append(task.demand)
    nodes = tuple(
        structs.replace(node, used=Resources.total((node.used, *promised[node.name])))
        if node.name in promised
        else node
        for node in seen.nodes
    )
    found = tuple(job for job in jobs if job.state in (JobState.READY, JobState.RUNNING))
    fresh = _fresh(found, tasks, seen.at)
    present = in_submit_order([_shown(job, seen.at, fresh=job.key in fresh) for job in found])
    floors = tuple(_floors(job for job in present if job.key not in fresh))
    return Snapshot(at=seen.at, slot=slot, nodes=nodes, jobs=present, tasks=tasks, floors=floors)


def _fresh(jobs: Iterable[Job], tasks: Iterable[Task], at: float) -> frozenset[JobKey]:
    """Static jobs that the scheduler in charge has just started: when it decided so, they had nothing yet."""
    static = frozenset(job.key for job in jobs if job.static)
    return static - {task.job for task in tasks if task.asked_at < at} if static else static


def _shown(job: Job, at: float, *, fresh: bool) -> Job:
    if not job.unreported:
        return replace(job, launch=_NO_LAUNCH)
    return replace(job, launch=_NO_LAUNCH, progress=Progress(at=at) if fresh else job.progress_at(at))


def with_evidence(snapshot: Snapshot, needs: Collection[Evidence], store: TickStore) -> Snapshot:
    """The snapshot with the measurements that a policy needs."""
    if Evidence.SPEEDS in needs:
        kinds = {TrainingKind.of(job.request) for job in snapshot.jobs}
        others = _OTHER_KINDS if Evidence.JOB_SPEEDS in needs else 0
        snapshot = replace(snapshot, speeds=store.speeds(kinds, others=others))
    if Evidence.JOB_SPEEDS in needs:
        snapshot = replace(snapshot, job_speeds=store.job_speeds([job.key for job in snapshot.jobs]))
    if Evidence.LOSSES in needs:
        snapshot = replace(snapshot, losses=store.losses([job.key for job in snapshot.jobs]))
    return snapshot


def _floors(jobs: Iterable[Job]) -> Iterable[tuple[JobKey, Allocation]]:
    """A running job keeps its least size: its state lives in its servers, so it is never shrunk to nothing."""
    for job in jobs:
        if job.state is JobState.RUNNING:
            yield job.key, job.request.least
