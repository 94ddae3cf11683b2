"""Static jobs: finds jobs that the scheduler in charge runs at fixed sizes, and records what becomes of them.

Some are jobs of users who do not use dl2d; what is known of them is what the resource manager says (``StaticJob``).
Others were registered by their coordinators while dl2d was not in charge. The store keeps both like other jobs; dl2d
never resizes or stops them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import structlog

from dl2d.core.cluster import Task, TaskState
from dl2d.core.job_request import RequestRules
from dl2d.core.jobs import (
    HOUR_SECONDS,
    NO_LAUNCH,
    Allocation,
    Architecture,
    FailureCause,
    Job,
    JobKey,
    JobRequest,
    JobState,
    Role,
)
from dl2d.core.resource_manager import FAILURE_CAUSES, JOB_ENDS, RmJob, RmListing, StaticJob
from dl2d.core.resources import NO_RESOURCES
from dl2d.core.store import JobChange, TaskChange
from dl2d.core.tick_plan import Start
from dl2d.tick.observe import LiveJobs, Observed, live_jobs
from dl2d.tick.tick_context import Context

log = structlog.get_logger()


def follow_static_jobs(context: Context, observed: Observed) -> LiveJobs:
    """Write to the store what became of static jobs, and new ones unless dl2d acts; returns the live static jobs.

    Raises
    ------
    StoreError
        The store could not be read or written; the next tick writes the remainder.
    """
    store, listing, jobs = context.store, observed.listing, observed.static.jobs
    if not context.mode.acts:
        known = (*jobs, *observed.elastic.jobs)
        unknown = new_static_jobs(listing, known, cluster=context.cluster, rules=context.request_rules)
        new = tuple(job for job in unknown if store.job(job.key) is None)
        for job in new:
            store.add_job(job)
            log.info("job watched", job=job.key.id, user=job.owner.user, name=job.request.name, model=job.request.model)
        jobs = (*jobs, *new)
    changes = compare_static(jobs, observed.static.tasks, listing, unseen_seconds=context.timeouts.unseen_seconds)
    if not changes:
        return LiveJobs(jobs, observed.static.tasks)
    # Tasks first: if the tick were interrupted after the job had ended but before its tasks had, ``live_jobs`` would
    # count these tasks as elastic.
    store.change_tasks([task_change for change in changes for task_change in change.ended_tasks], listing.at)
    # New tasks run already; they are confirmed below.
    store.ask_tasks([start for change in changes for start in change.new_tasks], listing.at)
    for change in changes:
        if change.job_change is not None:
            job = store.change_job(change.job, change.job_change, change.changed_at)
            log.info("job", job=change.job.id, state=str(job.state), reason=job.end_reason)
        if change.allocation is not None and (stored := store.job(change.job)) is not None:
            workers, ps = change.allocation
            store.report_progress(change.job, replace(stored.progress, at=listing.at, workers=workers, ps=ps))
    _, live = live_jobs(store)
    handles = {job.key: job.anchor for job in live.jobs}
    confirmed = [
        TaskChange(task.job, task.id, TaskState.CONFIRMED, handle=handles[task.job])
        for task in live.tasks
        if task.state is TaskState.ASKED
    ]
    if confirmed and store.change_tasks(confirmed, listing.at):
        _, live = live_jobs(store)
    return live


@dataclass(frozen=True, slots=True)
class StaticChange:
    """What the store has to change of a static job."""

    job: JobKey
    #: Tasks that started since the last tick.
    new_tasks: tuple[Start, ...] = ()
    #: Releases of the tasks that ended since then.
    ended_tasks: tuple[TaskChange, ...] = ()
    #: The job's new state, or None.
    job_change: JobChange | None = None
    #: When it entered that state, seconds since 1970.
    changed_at: float = 0.0
    #: The job's new allocation, if no coordinator reports it; else None.
    allocation: Allocation | None = None


def new_static_jobs(listing: RmListing, known: Iterable[Job], *, cluster: str, rules: RequestRules) -> tuple[Job, ...]:
    """Static jobs that the resource manager lists and that are not among the known ones."""
    keys = {job.key for job in known}
    new = []
    for listed in listing.jobs:
        if listed.static is None or listed.tag or listed.state.ended:
            continue
        key = JobKey(cluster, listed.handle, listed.submitted)
        if key not in keys:
            owner = listed.static.owner
            request = request_of(listed.static, rules)
            new.append(Job(key=key, request=request, owner=owner, launch=NO_LAUNCH, anchor=listed.handle, static=True))
    return tuple(new)


def request_of(static: StaticJob, rules: RequestRules) -> JobRequest:
    """A request for a job that declares nothing to dl2d.

    Its epochs are the hours of its time limit, a step is a second, and its bounds are the site's (or its own size, if
    that is larger).
    """
    has_ps = static.ps > 0
    return JobRequest(
        name=static.name,
        model=static.model,
        epochs=max(static.limit, 1.0) / HOUR_SECONDS,
        samples_per_epoch=None,
        steps_per_epoch=HOUR_SECONDS,
        batch=None,
        worker=static.task,
        ps=static.task if has_ps else NO_RESOURCES,
        max_workers=max(static.workers, rules.max_workers),
        min_ps=1 if has_ps else 0,
        max_ps=max(static.ps, rules.max_ps) if has_ps else 0,
        architecture=Architecture.PS if has_ps else Architecture.ALLREDUCE,
    )


def compare_static(
    jobs: Sequence[Job], tasks: Iterable[Task], listing: RmListing, *, unseen_seconds: float
) -> tuple[StaticChange, ...]:
    """Compare the store's live static jobs with the resource manager's listing.

    A job that is not listed ``unseen_seconds`` after it was last heard of is lost.
    """
    by_handle = {listed.handle: listed for listed in listing.jobs} if jobs else {}
    tasks_of: dict[JobKey, list[Task]] = {job.key: [] for job in jobs}
    for task in tasks:
        if task.job in tasks_of:
            tasks_of[task.job].append(task)
    changes = (
        _static_change(job, tasks_of[job.key], by_handle.get(job.anchor), listing.at, unseen_seconds) for job in jobs
    )
    return tuple(change for change in changes if change is not None)


def _static_change(
    job: Job, tasks: Sequence[Task], listed: RmJob | None, at: float, unseen_seconds: float
) -> StaticChange | None:
    job_change = _job_change(job, listed, at, unseen_seconds)
    ended = job_change is not None and job_change.state is not None and job_change.state.ended
    holds = listed is not None and listed.state.holds_resources and not ended
    running = Counter(_running_tasks(job, listed, tasks) if listed is not None and holds else ())
    stored = Counter((task.role, task.node) for task in tasks)
    new = tuple(Start(job.key, role, node, job.request.demand(role)) for role, node in (running - stored).elements())
    surplus = stored - running
    ended_tasks = []
    for task in sorted(tasks, key=lambda task: task.number, reverse=True):
        if surplus[task.role, task.node] > 0:
            surplus[task.role, task.node] -= 1
            ended_tasks.append(TaskChange(task.job, task.id, TaskState.RELEASED))
    count = Counter(role for role, _ in running.elements())
    allocation = Allocation(count[Role.WORKER], count[Role.PS])
    changed = job.unreported and not ended and allocation != (job.progress.workers, job.progress.ps)
    if job_change is None and not new and not ended_tasks and not changed:
        return None
    changed_at = at
    if job_change is not None and job_change.state is JobState.RUNNING and listed is not None and listed.static:
        changed_at = min(listed.static.started, at) or at  # 0: not known
    return StaticChange(job.key, new, tuple(ended_tasks), job_change, changed_at, allocation if changed else None)


def _running_tasks(job: Job, listed: RmJob, tasks: Sequence[Task]) -> tuple[tuple[Role, str], ...]:
    """Role and node of each task that a running job has."""
    if job.unreported:
        static = listed.static
        if static is None:  # the site's rules do not recognise it as a training job any more
            return tuple((task.role, task.node) for task in tasks)
        roles = (Role.WORKER,) * static.workers + (Role.PS,) * static.ps
        return tuple(zip(roles, static.nodes, strict=False))
    # Its coordinator started them on its own node.
    roles = (Role.WORKER,) * job.progress.workers + (Role.PS,) * job.progress.ps
    return tuple((role, listed.node) for role in roles)


def _job_change(job: Job, listed: RmJob | None, at: float, unseen_seconds: float) -> JobChange | None:
    """The change of the job's state that its state in the resource manager implies, or None."""
    if listed is None:
        last_heard = max(job.progress.at, float(job.key.submitted))
        if at - last_heard <= unseen_seconds:
            return None
        reason = "the resource manager does not list it any more"
        return JobChange(state=JobState.LOST, end_reason=reason, cause=FailureCause.NOT_LISTED)
    if listed.submitted and listed.submitted != job.key.submitted:
        # Slurm gives a requeued job a new submit time; dl2d takes that for another job.
        reason = "was requeued, or its number was given again"
        return JobChange(state=JobState.LOST, end_reason=reason, cause=FailureCause.NOT_LISTED)
    if listed.state.ended:
        reason, cause = listed.reason or str(listed.state), FAILURE_CAUSES.get(listed.state)
        return JobChange(state=JOB_ENDS[listed.state], end_reason=reason, cause=cause)
    if not job.unreported:
        return None  # its coordinator reports its state
    state = JobState.RUNNING if listed.state.holds_resources else JobState.READY
    forward = job.state is JobState.SUBMITTED or (job.state is JobState.READY and state is JobState.RUNNING)
    return JobChange(state=state) if forward and state is not job.state else None
