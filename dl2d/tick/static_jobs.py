"""Static jobs, which the scheduler in charge runs at fixed sizes: finds new ones and follows what becomes of them.

Some are of users who know nothing of dl2d: the resource manager says what it can of them (``StaticJob``). Others were
registered by their coordinators while dl2d was not in charge. Both have rows like any job; neither is ever changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from dl2d.core.cluster import Task, TaskState
from dl2d.core.job_request import RequestRules
from dl2d.core.jobs import (
    HOUR_SECONDS,
    Allocation,
    Architecture,
    FailureCause,
    Job,
    JobKey,
    JobRequest,
    JobState,
    Launch,
    Role,
)
from dl2d.core.resource_manager import FAILURE_CAUSES, JOB_ENDS, RmJob, RmJobState, RmSnapshot, StaticJob
from dl2d.core.resources import NO_RESOURCES
from dl2d.core.store import JobChange, TaskChange
from dl2d.core.tick_plan import Start
from dl2d.tick.context import Context
from dl2d.tick.observe import LiveJobs, Observed, live_jobs

log = structlog.get_logger()

_HOLDS: Final = frozenset({RmJobState.RUNNING, RmJobState.ENDING})
_NO_LAUNCH: Final = Launch((), "")


def follow_static_jobs(context: Context, observed: Observed) -> LiveJobs:
    """Write to the store what became of static jobs, and new ones where dl2d does not act; returns the live ones.

    Raises
    ------
    StoreError
        They cannot be written.
    """
    store, listing, jobs = context.store, observed.listing, observed.static.jobs
    if not context.mode.acts:
        known = (*jobs, *observed.elastic.jobs)
        found = new_static_jobs(listing, known, cluster=context.cluster, rules=context.limits)
        new = tuple(job for job in found if store.job(job.key) is None)
        for job in new:
            store.add_job(job)
            log.info("job watched", job=job.key.id, user=job.owner.user, name=job.request.name, model=job.request.model)
        jobs = (*jobs, *new)
    changes = compare_static(jobs, observed.static.tasks, listing, unseen=context.timeouts.unseen)
    if not changes:
        return LiveJobs(jobs, observed.static.tasks)
    # Tasks first: those of a job that has ended belong to nobody.
    store.change_tasks([gone for each in changes for gone in each.gone], listing.at)
    store.ask_tasks([start for each in changes for start in each.came], listing.at)
    for each in changes:
        if each.change is not None:
            job = store.change_job(each.job, each.change, each.at)
            log.info("job", job=each.job.id, state=str(job.state), reason=job.end_reason)
        if each.size is not None and (kept := store.job(each.job)) is not None:
            workers, ps = each.size
            store.report_progress(each.job, replace(kept.progress, at=listing.at, workers=workers, ps=ps))
    _, live = live_jobs(store)
    handles = {job.key: job.anchor for job in live.jobs}
    came = [
        TaskChange(task.job, task.id, TaskState.CONFIRMED, handle=handles[task.job])
        for task in live.tasks
        if task.state is TaskState.ASKED
    ]
    return live if not came or not store.change_tasks(came, listing.at) else live_jobs(store)[1]


@dataclass(frozen=True, slots=True)
class StaticChange:
    """What has changed with a static job."""

    job: JobKey
    #: Tasks that it has now and did not have; those of ``gone`` it has no more.
    came: tuple[Start, ...] = ()
    gone: tuple[TaskChange, ...] = ()
    #: What has become of it, and when that was, seconds since 1970.
    change: JobChange | None = None
    at: float = 0.0
    #: What it trains with from now on, where its coordinator does not say so itself.
    size: Allocation | None = None


def new_static_jobs(seen: RmSnapshot, known: Iterable[Job], *, cluster: str, rules: RequestRules) -> tuple[Job, ...]:
    """Jobs that the manager lists and that are not among those known."""
    keys = {job.key for job in known}
    found = []
    for listed in seen.jobs:
        if listed.static is None or listed.tag or listed.state.ended:
            continue
        key = JobKey(cluster, listed.handle, listed.submitted)
        if key not in keys:
            owner = listed.static.owner
            request = request_of(listed.static, rules)
            found.append(
                Job(key=key, request=request, owner=owner, launch=_NO_LAUNCH, anchor=listed.handle, static=True)
            )
    return tuple(found)


def request_of(static: StaticJob, rules: RequestRules) -> JobRequest:
    """The request of a job that declares nothing to dl2d.

    Its length is its time limit, with epochs of an hour and steps of a second; its bounds are the site's.
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
    jobs: Sequence[Job], tasks: Iterable[Task], seen: RmSnapshot, *, unseen: float
) -> tuple[StaticChange, ...]:
    """Compare what the store has of live static jobs with the manager's listing.

    A job that is not listed for ``unseen`` seconds after it came has ended.
    """
    by_handle = {listed.handle: listed for listed in seen.jobs} if jobs else {}
    of_job: dict[JobKey, list[Task]] = {job.key: [] for job in jobs}
    for task in tasks:
        if task.job in of_job:
            of_job[task.job].append(task)
    found = (_static_change(job, of_job[job.key], by_handle.get(job.anchor), seen.at, unseen) for job in jobs)
    return tuple(change for change in found if change is not None)


def _static_change(
    job: Job, tasks: Sequence[Task], listed: RmJob | None, at: float, unseen: float
) -> StaticChange | None:
    change = _change(job, listed, at, unseen)
    ended = change is not None and change.state is not None and change.state.ended
    places = () if listed is None or listed.state not in _HOLDS or ended else _places(job, listed, tasks)
    have = Counter((task.role, task.node) for task in tasks)
    want = Counter(places)
    came = tuple(Start(job.key, role, node, job.request.demand(role)) for role, node in (want - have).elements())
    surplus = have - want
    gone = []
    for task in sorted(tasks, key=lambda task: task.number, reverse=True):
        if surplus[task.role, task.node] > 0:
            surplus[task.role, task.node] -= 1
            gone.append(TaskChange(task.job, task.id, TaskState.RELEASED))
    size = Allocation(*(sum(role is each for each, _ in places) for role in (Role.WORKER, Role.PS)))
    has = Allocation(job.progress.workers, job.progress.ps)
    told = size if job.unreported and size != has and not ended else None
    if change is None and not came and not gone and told is None:
        return None
    when = at
    if change is not None and change.state is JobState.RUNNING and listed is not None and listed.static is not None:
        when = min(listed.static.started, at) or at
    return StaticChange(job.key, came, tuple(gone), change, when, told)


def _places(job: Job, listed: RmJob, tasks: Sequence[Task]) -> tuple[tuple[Role, str], ...]:
    """Role and node of each task that a running job has."""
    if job.unreported:
        static = listed.static
        if static is None:  # the manager's rules were changed
            return tuple((task.role, task.node) for task in tasks)
        roles = (Role.WORKER,) * static.workers + (Role.PS,) * static.ps
        return tuple(zip(roles, static.nodes, strict=False))
    # Its coordinator started them beside itself.
    roles = (Role.WORKER,) * job.progress.workers + (Role.PS,) * job.progress.ps
    return tuple((role, listed.node) for role in roles)


def _change(job: Job, listed: RmJob | None, at: float, unseen: float) -> JobChange | None:
    if listed is None:
        heard = max(job.progress.at, float(job.key.submitted))
        if at - heard <= unseen:
            return None
        reason = "the resource manager does not list it any more"
        return JobChange(state=JobState.LOST, end_reason=reason, cause=FailureCause.NOT_LISTED)
    if listed.submitted and listed.submitted != job.key.submitted:
        # Slurm gives a job another submit time when it requeues it: that is another job to dl2d.
        reason = "was requeued, or its number was given again"
        return JobChange(state=JobState.LOST, end_reason=reason, cause=FailureCause.NOT_LISTED)
    if listed.state.ended:
        reason, cause = listed.reason or str(listed.state), FAILURE_CAUSES.get(listed.state)
        return JobChange(state=JOB_ENDS[listed.state], end_reason=reason, cause=cause)
    if not job.unreported:
        return None  # its coordinator says what it does
    state = JobState.RUNNING if listed.state in _HOLDS else JobState.READY
    forward = job.state is JobState.SUBMITTED or (job.state is JobState.READY and state is JobState.RUNNING)
    return JobChange(state=state) if forward and state is not job.state else None
