"""Static jobs: finds jobs that the scheduler in charge runs at fixed sizes, and records what becomes of them.

Some are jobs of users who do not use dl2d; what is known of them is what the resource manager says (``StaticJob``).
Others were registered by their coordinators while dl2d was not in charge. The store keeps both like other jobs; dl2d
never resizes or stops them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from dl2d.core.cluster import ANCHOR, Task, TaskState, task_tag
from dl2d.core.job_request_parser import RequestRules
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
    Progress,
    Role,
)
from dl2d.core.plan_of_starts_and_stops import Start
from dl2d.core.resource_manager import FAILURE_CAUSES, JOB_ENDS, RmJob, RmJobState, RmListing, StaticJob
from dl2d.core.resources import NO_RESOURCES
from dl2d.core.store import JobChange, TaskChange, TickStore
from dl2d.tick.observation.observe import LiveJobs, Observed, live_jobs
from dl2d.tick.reconciliation.unlisted_tasks_and_silent_coordinators import has_called
from dl2d.tick.tick_context import Context

log = structlog.get_logger()


#: Maximum number of jobs recorded in one tick that started and ended between two ticks.
MAX_NEW_ENDED = 500
#: A daemon that starts looks for static jobs that ended so long before the last slot, in case their ends were late.
LOOK_BACK_SECONDS = 3600.0


def unlisted_static_jobs(context: Context, observed: Observed) -> frozenset[str]:
    """Tags of the live static jobs that the listing lacks, where it would list them if they had not ended."""
    listing, unseen_seconds = observed.listing, context.timeouts.unseen_seconds
    if listing.ended_until is not None and listing.ended_until < listing.at:
        return frozenset()  # they may still be listed as ended
    listed_jobs = find_listed(observed.static.jobs, listing)
    return frozenset(
        task_tag(job.key, ANCHOR)
        for job in observed.static.jobs
        if job.key not in listed_jobs and not has_called(job, listing.at, unseen_seconds)
    )


def follow_static_jobs(
    context: Context, observed: Observed, gone: Collection[str], ended_until: float | None
) -> tuple[LiveJobs, float | None]:
    """Write to the store what became of static jobs, and new ones unless dl2d acts.

    ``gone`` are tags of jobs that have not been listed for so long that they have ended. Returns the live static jobs,
    and the time before which all ends of static jobs are in the store, which was ``ended_until`` so far.

    Raises
    ------
    StoreError
        The store could not be read or written; the next tick writes the remainder.
    """
    store, listing = context.store, observed.listing
    new, known_until = ((), _ended_until(listing)) if context.mode.acts else _add_new_jobs(context, observed)
    if not listing.incomplete:
        ended_until = known_until
    jobs = (*observed.static.jobs, *new)
    listed_jobs = find_listed(jobs, listing)
    # Jobs whose tasks were recorded and released by a tick that was interrupted before it recorded the job's end.
    had_tasks = {
        job.key
        for job in observed.static.jobs
        if (found := listed_jobs.get(job.key)) is not None
        and found.state.ended
        and store.tasks(live=False, job=job.key)
    }
    changes = compare_static(jobs, observed.static.tasks, listing, listed_jobs, had_tasks, gone)
    for change in changes:
        if change.allocation is not None and (stored := store.job(change.job)) is not None:
            workers, ps = change.allocation
            store.report_progress(change.job, replace(stored.progress, at=listing.at, workers=workers, ps=ps))
    asked = store.ask_tasks([start for change in changes for start in change.new_tasks], listing.at)
    unconfirmed = [task for task in (*observed.static.tasks, *asked) if task.state is TaskState.ASKED]
    if not changes and not unconfirmed:
        return LiveJobs(jobs, observed.static.tasks), ended_until
    granted_before = {task.job for task in observed.static.tasks if task.has_begun}
    reported = {job.key for job in jobs if not job.unreported}
    confirmed = []
    for task in unconfirmed:
        if (found := listed_jobs.get(task.job)) is not None:
            began = listing.at if task.job in granted_before | reported else _started_at(found, listing.at)
            confirmed.append(TaskChange(task.job, task.id, TaskState.CONFIRMED, handle=found.handle, at=began))
    store.change_tasks(confirmed, listing.at)
    # Tasks first: if the tick were interrupted after the job had ended but before its tasks had, ``live_jobs`` would
    # count these tasks as elastic.
    ends = {change.job: change.ended_at for change in changes if change.ended_at is not None}
    released = [task_change for change in changes for task_change in change.ended_tasks]
    released += [
        TaskChange(task.job, task.id, TaskState.RELEASED, at=ends[task.job]) for task in asked if task.job in ends
    ]
    store.change_tasks(released, listing.at)
    for change in changes:
        for job_change, changed_at in change.job_changes:
            job = store.change_job(change.job, job_change, changed_at)
            log.info("job", job=change.job.id, state=str(job.state), reason=job.end_reason)
    return live_jobs(store)[1], ended_until


def _ended_until(listing: RmListing) -> float:
    return listing.at if listing.ended_until is None else listing.ended_until


def _add_new_jobs(context: Context, observed: Observed) -> tuple[tuple[Job, ...], float]:
    """Add static jobs that the store does not have, and return them; of ended ones the first ``MAX_NEW_ENDED``.

    The second value is the time such that all jobs that ended before it are then in the store.
    """
    store, listing = context.store, observed.listing
    unknown = _unknown_jobs(store, listing, (*observed.static.jobs, *observed.elastic.jobs), context.cluster)
    live = [(key, listed) for key, listed in unknown if not listed.state.ended]
    ended = sorted(((key, listed) for key, listed in unknown if listed.state.ended), key=lambda item: item[1].ended)
    ended_until = _ended_until(listing)
    if len(ended) > MAX_NEW_ENDED:
        ended_until = min(ended_until, ended[MAX_NEW_ENDED][1].ended)
    new = [
        new_static_job(key, listed, listing.at, context.request_rules)
        for key, listed in (*live, *ended[:MAX_NEW_ENDED])
    ]
    for job in new:
        store.add_job(job)
        log.info("job watched", job=job.key.id, user=job.owner.user, name=job.request.name, model=job.request.model)
    return tuple(new), ended_until


@dataclass(frozen=True, slots=True)
class StaticChange:
    """What the store has to change of a static job. Times are seconds since 1970."""

    job: JobKey
    #: Tasks that started since the last tick.
    new_tasks: tuple[Start, ...] = ()
    #: Releases of the tasks that ended since then.
    ended_tasks: tuple[TaskChange, ...] = ()
    #: Changes of the job, oldest first, each with its time.
    job_changes: tuple[tuple[JobChange, float], ...] = ()
    #: The job's new allocation, if no coordinator reports it; else None.
    allocation: Allocation | None = None
    #: When the job ended, or None.
    ended_at: float | None = None


def _unknown_jobs(
    store: TickStore, listing: RmListing, live: Iterable[Job], cluster: str
) -> tuple[tuple[JobKey, RmJob], ...]:
    """Static jobs that the resource manager lists and the store does not have, ended ones too, with their keys."""
    live_keys = {job.key for job in live}
    # Earlier versions kept the tasks of a job array under their handles.
    found = []
    for listed in listing.jobs:
        if listed.static is not None and not listed.tag:
            key = JobKey(cluster, listed.shown_id, listed.submitted)
            handle_key = JobKey(cluster, listed.handle, listed.submitted)
            if key not in live_keys and handle_key not in live_keys:
                found.append((key, handle_key, listed))
    if not found:
        return ()
    known = store.known_jobs({key for keys in found for key in keys[:2]})
    # The manager may list a job twice, as running and by its accounting.
    return tuple({key: (key, listed) for key, handle_key, listed in found if not known & {key, handle_key}}.values())


def new_static_job(key: JobKey, listed: RmJob, at: float, rules: RequestRules) -> Job:
    """A job that the store does not have yet; one that has ended is kept as running first, with its size."""
    static = listed.static
    assert static is not None
    job = Job(
        key=key,
        request=request_of(static, rules),
        owner=static.owner,
        launch=NO_LAUNCH,
        anchor=listed.handle,
        static=True,
    )
    if not listed.state.ended or not static.nodes:
        return job
    progress = Progress(at=at, workers=static.workers, ps=static.ps)
    return replace(job, state=JobState.RUNNING, started_at=_started_at(listed, at), progress=progress)


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
        asked_size=Allocation(static.workers, static.ps),
    )


def find_listed(jobs: Iterable[Job], listing: RmListing) -> dict[JobKey, RmJob]:
    """What the listing has of each job, by its id, or else by its anchor; of several records one that has not ended."""
    # Of records of one job the last one counts.
    ordered = sorted(listing.jobs, key=lambda listed: not listed.state.ended)
    by_id = {(listed.shown_id, listed.submitted): listed for listed in ordered}
    by_handle = {listed.handle: listed for listed in ordered}
    listed_jobs = {}
    for job in jobs:
        listed = by_id.get((job.key.id, job.key.submitted)) or by_handle.get(job.anchor)
        if listed is not None and _is_same_or_requeued(listed, job):
            listed_jobs[job.key] = listed
    return listed_jobs


def _is_same_or_requeued(listed: RmJob, job: Job) -> bool:
    """Whether a listed job is the static job, or the same job after it was requeued."""
    if listed.array_id and job.key.id not in (listed.array_id, listed.handle):
        return False  # pending tasks of a job array share one handle
    if listed.submitted == job.key.submitted:
        return True
    # The id may have been given to somebody else, or the listing may be older than the job.
    return listed.user in ("", job.owner.user) and (not listed.submitted or listed.submitted > job.key.submitted)


def compare_static(
    jobs: Sequence[Job],
    tasks: Iterable[Task],
    listing: RmListing,
    listed_jobs: Mapping[JobKey, RmJob],
    had_tasks: Collection[JobKey],
    gone: Collection[str] = (),
) -> tuple[StaticChange, ...]:
    """Compare the store's live static jobs with what the resource manager lists of them (``listed_jobs``).

    A job that is not listed is lost once its tag is in ``gone``. Jobs in ``had_tasks`` get no new tasks if they have
    ended.
    """
    tasks_of: dict[JobKey, list[Task]] = {job.key: [] for job in jobs}
    for task in tasks:
        if task.job in tasks_of:
            tasks_of[task.job].append(task)
    changes = (
        _static_change(job, tasks_of[job.key], listed_jobs.get(job.key), listing, had_tasks=job.key in had_tasks)
        for job in jobs
        if job.key in listed_jobs or task_tag(job.key, ANCHOR) in gone
    )
    return tuple(change for change in changes if change is not None)


def _static_change(
    job: Job, tasks: Sequence[Task], listed: RmJob | None, listing: RmListing, *, had_tasks: bool
) -> StaticChange | None:
    job_changes = _job_changes(job, listed, listing.at)
    ended_at = next((at for change, at in job_changes if change.state is not None and change.state.ended), None)
    running = Counter[tuple[Role, str]]()
    stored = Counter((task.role, task.node) for task in tasks)
    if listed is not None and listed.state.holds_resources and ended_at is None:
        # A listing that is incomplete may lack some of the job's nodes, and of a job that is ending those where it has
        # ended: its size stays.
        stays = bool(listing.incomplete) or listed.state is RmJobState.ENDING
        running.update(stored if stored and stays else _running_tasks(job, listed, tasks))
    new = running - stored
    allocation = _allocation(running)
    if (
        job.unreported
        and ended_at is not None
        and listed is not None
        and listed.state.ended
        and not (tasks or had_tasks)
    ):
        # It started and ended since the last tick.
        new = Counter(_running_tasks(job, listed, tasks))
        allocation = _allocation(new)
    surplus = stored - running
    ended_tasks = []
    for task in sorted(tasks, key=lambda task: task.number, reverse=True):
        if surplus[task.role, task.node] > 0:
            surplus[task.role, task.node] -= 1
            ended_tasks.append(TaskChange(task.job, task.id, TaskState.RELEASED, at=ended_at))
    changed = (
        job.unreported and (ended_at is None or bool(new)) and allocation != (job.progress.workers, job.progress.ps)
    )
    if not job_changes and not new and not ended_tasks and not changed:
        return None
    return StaticChange(
        job.key,
        tuple(Start(job.key, role, node, job.request.demand(role)) for role, node in new.elements()),
        tuple(ended_tasks),
        job_changes,
        allocation if changed else None,
        ended_at,
    )


def _allocation(tasks: Counter[tuple[Role, str]]) -> Allocation:
    count = Counter(role for role, _ in tasks.elements())
    return Allocation(count[Role.WORKER], count[Role.PS])


def _started_at(listed: RmJob, at: float) -> float:
    """When a listed job began to run, as far as the resource manager says; ``at`` otherwise."""
    return (min(listed.static.started, at) if listed.static is not None else 0.0) or at


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


def _job_changes(job: Job, listed: RmJob | None, at: float) -> tuple[tuple[JobChange, float], ...]:
    """Changes of the job's state that its state in the resource manager implies, oldest first, each with its time."""
    if listed is None:
        reason = "the resource manager does not list it any more"
        return ((JobChange(state=JobState.LOST, end_reason=reason, cause=FailureCause.NOT_LISTED), at),)
    if listed.submitted and listed.submitted != job.key.submitted:
        # Slurm gives a requeued job a new submit time; dl2d takes that for another job.
        requeued = listed.requeues and listed.user == job.owner.user
        change = JobChange(
            state=JobState.LOST,
            end_reason="was requeued" if requeued else "its id was given to another job",
            cause=FailureCause.REQUEUED if requeued else FailureCause.NOT_LISTED,
        )
        return ((change, at),)
    changes = []
    ended = listed.state.ended
    if job.unreported:  # otherwise its coordinator reports its state
        ran = listed.state.holds_resources or (ended and listed.static is not None and bool(listed.static.nodes))
        state = JobState.RUNNING if ran else JobState.READY
        if state.rank > job.state.rank and (ran or not ended):
            changes.append((JobChange(state=state, anchor=listed.handle), _started_at(listed, at) if ran else at))
    if ended:
        reason, cause = listed.reason or str(listed.state), FAILURE_CAUSES.get(listed.state)
        ended_at = max(min(listed.ended, at) or at, *(began for _, began in changes), job.started_at or 0.0)
        changes.append((JobChange(state=JOB_ENDS[listed.state], end_reason=reason, cause=cause), ended_at))
    return tuple(changes)
