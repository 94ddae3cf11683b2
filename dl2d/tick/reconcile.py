"""Reconcile: brings the store into line with the resource manager.

The resource manager is right about what runs, the store about what was meant. ``compare`` says what has to change and
is pure; ``reconcile`` carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog

from dl2d.core.cluster import Snapshot, Task, TaskState, parse_tag, task_tag
from dl2d.core.jobs import FailureCause, Job, JobKey, JobState
from dl2d.core.resource_manager import FAILURE_CAUSES, JOB_ENDS, RmJob, RmJobState, RmSnapshot
from dl2d.core.store import JobChange, TaskChange, TickStore
from dl2d.tick.apply import start_anchor
from dl2d.tick.context import Context, Timeouts
from dl2d.tick.observe import LiveJobs, Observed, live_jobs, take_snapshot
from dl2d.tick.state import StartFailures, TickState
from dl2d.tick.static_jobs import follow_static_jobs
from dl2d.tick.task_specs import ANCHOR

log = structlog.get_logger()

#: Newest jobs among which ended ones are looked for that left an anchor or tasks running.
_RECENT_JOBS = 200
_NO_FAILURES = StartFailures()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """The cluster as store and resource manager agree on it."""

    snapshot: Snapshot
    #: Elastic jobs with their commands, which the snapshot leaves out.
    jobs: Mapping[JobKey, Job]
    #: Elastic jobs whose coordinator has not called for a while.
    silent: frozenset[JobKey]
    #: For the next tick.
    failures: Mapping[JobKey, StartFailures]
    heard: Mapping[JobKey, float]
    stopping: Mapping[str, float]


def reconcile(context: Context, state: TickState, observed: Observed) -> Reconciled:
    """Bring the store into line with the listing; in mode live, start missing anchors and stop what must not run.

    Raises
    ------
    ResourceManagerError, StoreError
        Something could not be changed; the next tick finds it again.
    """
    store, listing, acts = context.store, observed.listing, context.mode.acts
    static = follow_static_jobs(context, observed)
    before = observed.elastic
    heard = heard_since(before.jobs, state.heard, listing.at, context.timeouts.silent)
    for job in before.jobs:
        if job.key in state.heard and job.key not in heard:
            log.warning("coordinator is silent", job=job.key.id, seconds=context.timeouts.silent)
    changes = compare(
        before,
        _ended_jobs(store, before),
        listing,
        cluster=context.cluster,
        timeouts=context.timeouts,
        failures=state.failures,
        heard=heard,
    )
    elastic = _apply_changes(store, before, changes, listing.at)
    failures = _count_failures(before.tasks, changes.tasks, state.failures)
    present = {job.key for job in elastic.jobs}
    stopping: Mapping[str, float] = {}
    if acts:
        if context.starts_anchors:
            for job in elastic.jobs:
                if job.state is JobState.SUBMITTED and not job.anchor:
                    start_anchor(context, job, listing.at)
        stopping = _stop(context, changes.stops, state.stopping, listing.at)
    snapshot = take_snapshot(elastic if acts else elastic + static, listing, state.slot + 1)
    return Reconciled(
        snapshot=snapshot,
        jobs={job.key: job for job in elastic.jobs},
        silent=frozenset(job.key for job in snapshot.jobs if not job.static) - heard.keys(),
        failures={key: count for key, count in failures.items() if key in present},
        heard=heard,
        stopping=stopping,
    )


def _apply_changes(store: TickStore, before: LiveJobs, changes: Changes, at: float) -> LiveJobs:
    """Write the changes; returns the elastic jobs as they are then."""
    for remark in changes.remarks:
        log.warning("reconcile", remark=remark)
    for key, change in changes.jobs:
        job = store.change_job(key, change, at)
        if change.state is not None:
            log.info("job", job=key.id, state=str(job.state), reason=job.end_reason)
    store.change_tasks(changes.tasks, at)
    return live_jobs(store)[0] if changes.jobs or changes.tasks else before


def _stop(
    context: Context, stops: Iterable[tuple[str, str]], asked: Mapping[str, float], at: float
) -> Mapping[str, float]:
    """Stop handles; one that was asked before is asked again only after twice its grace."""
    again_after = 2 * context.grace + context.timeouts.end
    stops = tuple(stops)
    stopping = {handle: asked[handle] for handle, _ in stops if 0 <= at - asked.get(handle, -math.inf) < again_after}
    due = [(handle, reason) for handle, reason in stops if handle not in stopping]
    for handle, reason in due:
        log.info("stop", handle=handle, reason=reason)
    if due:
        context.manager.stop([handle for handle, _ in due], context.grace)
    return stopping | {handle: at for handle, _ in due}


def _ended_jobs(store: TickStore, live: LiveJobs) -> tuple[Job, ...]:
    """Elastic jobs that have ended but may have left an anchor or tasks running."""
    alive = {job.key for job in live.jobs}
    newest = store.jobs(live=False, limit=_RECENT_JOBS)
    recent = {job.key: job for job in newest if job.state.ended and not job.static}
    for task in live.tasks:
        if task.job not in alive and task.job not in recent:
            job = store.job(task.job)
            if job is not None and not job.static:
                recent[job.key] = job
    return tuple(job for job in recent.values() if job.key not in alive)


def _count_failures(
    tasks: Iterable[Task], changes: Iterable[TaskChange], failures: Mapping[JobKey, StartFailures]
) -> dict[JobKey, StartFailures]:
    """Count attempts that failed: tasks that were started together and failed together are one.

    A start that never reached the manager is not the job's fault and does not count.
    """
    before = {(task.job, task.id): task for task in tasks}
    confirmed = {task.job for task in before.values() if task.state is TaskState.CONFIRMED}
    counted = {key: count for key, count in failures.items() if key not in confirmed}
    failed: dict[JobKey, str] = {}
    for change in changes:
        task = before[change.job, change.task]
        if change.state is TaskState.FAILED and task.state.rank < TaskState.JOINED.rank and task.handle:
            failed[change.job] = f"{change.task}: {change.note or 'no reason given'}"
    for key, last in failed.items():
        counted[key] = StartFailures(counted.get(key, _NO_FAILURES).attempts + 1, last)
    return counted


def heard_since(jobs: Iterable[Job], before: Mapping[JobKey, float], at: float, silent: float) -> dict[JobKey, float]:
    """Since when each job's coordinator has called without a gap of ``silent`` seconds; silent ones are left out.

    ``before`` is the answer of the tick before, empty after a restart: it is not known what the coordinator was told by
    a daemon that is gone.
    """
    calling = (job.key for job in jobs if job.address and at - job.progress.at <= silent)
    return {key: before.get(key, at) for key in calling}


@dataclass(frozen=True, slots=True)
class Changes:
    """What has to change: in the store, and in the resource manager."""

    jobs: tuple[tuple[JobKey, JobChange], ...] = ()
    tasks: tuple[TaskChange, ...] = ()
    #: Handles to be stopped, with the reason.
    stops: tuple[tuple[str, str], ...] = ()
    #: For the log.
    remarks: tuple[str, ...] = ()


def compare(
    live: LiveJobs,
    ended_jobs: Iterable[Job],
    listing: RmSnapshot,
    *,
    cluster: str,
    timeouts: Timeouts,
    failures: Mapping[JobKey, StartFailures],
    heard: Mapping[JobKey, float],
) -> Changes:
    """What has to change so that store and resource manager agree.

    Parameters
    ----------
    live
        Elastic jobs and tasks that have not ended, as the store has them.
    ended_jobs
        Jobs that have ended and still have live tasks, or ended a short while ago.
    cluster
        Name of this cluster; tags of other clusters are not ours.
    heard
        For each job whose coordinator calls, since when without a gap (see ``heard_since``). The time that a task has
        to be drained in counts from there: a coordinator that has not been told cannot be late.
    """
    by_handle = {job.handle: job for job in listing.jobs}
    known = {job.key: job for job in (*ended_jobs, *live.jobs)}
    expected = {task.handle for task in live.tasks} | {job.anchor for job in known.values()}
    others = [job for job in listing.jobs if job.handle not in expected and job.tag]
    by_tag = _by_tag(others)

    job_changes: list[tuple[JobKey, JobChange]] = []
    stops: dict[str, str] = {}
    ending: set[JobKey] = set()
    for job in known.values():
        anchor = by_handle.get(job.anchor) if job.anchor else by_tag.get(task_tag(job.key, ANCHOR))
        if job.state.ended:
            ending.add(job.key)
            if anchor is not None and not anchor.state.ended and _must_end_now(job, listing.at, timeouts):
                stops[anchor.handle] = f"job {job.key.id} is {job.state}"
            continue
        change = _job_change(job, anchor, listing.at, timeouts, failures.get(job.key, _NO_FAILURES))
        if change is not None:
            job_changes.append((job.key, change))
            if change.state is not None and change.state.ended:
                ending.add(job.key)

    task_changes: list[TaskChange] = []
    matched: set[str] = set()
    for task in live.tasks:
        found = (by_handle.get(task.handle) if task.handle else None) or by_tag.get(task.tag)
        if found is not None:
            matched.add(found.handle)
        step, stop = _task_change(
            task, found, listing.at, timeouts, job_ends=task.job in ending, told=heard.get(task.job)
        )
        if step is not None:
            task_changes.append(step)
        if stop and found is not None:
            stops[found.handle] = stop

    unmatched = [job for job in others if job.handle not in matched and not job.state.ended]
    remarks = _unknown_tasks(unmatched, live.tasks, known, by_handle, cluster, stops)
    return Changes(tuple(job_changes), tuple(task_changes), tuple(stops.items()), remarks)


def _by_tag(jobs: Iterable[RmJob]) -> dict[str, RmJob]:
    """The manager's jobs by tag; of two with the same tag, one that has not ended."""
    found: dict[str, RmJob] = {}
    for job in jobs:
        first = found.setdefault(job.tag, job)
        if first.state.ended and not job.state.ended:
            found[job.tag] = job
    return found


def _unknown_tasks(
    unmatched: Iterable[RmJob],
    tasks: Iterable[Task],
    known: Mapping[JobKey, Job],
    by_handle: Mapping[str, RmJob],
    cluster: str,
    stops: dict[str, str],
) -> tuple[str, ...]:
    """Add to ``stops`` what has a tag of this cluster but is unknown to the store; returns remarks for the log."""
    ids = {(task.job, task.id) for task in tasks}
    remarks = []
    for rm_job in unmatched:
        parsed = parse_tag(rm_job.tag)
        if parsed is None or parsed[0].cluster != cluster:
            continue
        key, name = parsed
        owner = known.get(key)
        if name == ANCHOR:
            if owner is None:
                stops[rm_job.handle] = f"anchor of {key.slug}, which the store does not know"
            continue
        if parsed in ids:
            stops[rm_job.handle] = f"{name} of {key.slug} runs twice"
            continue
        anchor = by_handle.get(owner.anchor if owner else key.id)
        if owner is None and anchor is not None and not anchor.state.ended:
            remarks.append(f"{rm_job.handle} is a task of {key.slug}, which this store does not know; left alone")
        else:
            stops[rm_job.handle] = f"{name} of {key.slug} is not wanted"
    return tuple(remarks)


def _must_end_now(job: Job, at: float, timeouts: Timeouts) -> bool:
    """Whether the anchor of an ended job is stopped: at once when it was cancelled, else after its time to end."""
    return job.state is JobState.CANCELLED or (job.ended_at is not None and at - job.ended_at > timeouts.end)


def _job_change(
    job: Job, anchor: RmJob | None, at: float, timeouts: Timeouts, failures: StartFailures
) -> JobChange | None:
    """What becomes of a job that has not ended, by its anchor in the manager."""
    if anchor is None:
        # Not started by us yet, or not listed yet: only a job whose anchor was seen can be missed.
        unseen = at - max(job.progress.at, float(job.key.submitted)) > timeouts.unseen
        if not job.anchor or not unseen:
            return None
        reason = "the resource manager does not know its anchor any more"
        return JobChange(state=JobState.LOST, end_reason=reason, cause=FailureCause.NOT_LISTED)
    if anchor.state.ended:
        how = anchor.reason or str(anchor.state)
        if anchor.state is RmJobState.DONE and job.state is JobState.SUBMITTED:
            reason = f"its coordinator ended before it called: {how}"
            return JobChange(state=JobState.FAILED, end_reason=reason, cause=FailureCause.FAILED)
        reason, cause = f"its coordinator ended: {how}", FAILURE_CAUSES.get(anchor.state)
        return JobChange(state=JOB_ENDS[anchor.state], end_reason=reason, cause=cause)
    if failures.attempts >= timeouts.start_failures:
        reason = f"{failures.attempts} attempts in a row to start its tasks failed; the last: {failures.last}"
        return JobChange(state=JobState.FAILED, end_reason=reason, cause=FailureCause.TASKS_FAILED)
    return JobChange(anchor=anchor.handle) if not job.anchor else None


def _task_change(
    task: Task, found: RmJob | None, at: float, timeouts: Timeouts, *, job_ends: bool, told: float | None
) -> tuple[TaskChange | None, str]:
    """The task's next step, and why it has to be stopped (or "").

    1. The manager does not list it: it has ended, or was never started.
    2. The manager says that it has ended.
    3. It is wanted, but its job ends: it drains, and is stopped when that takes long.
    4. It leaves: it is stopped where it has not begun, or takes long.
    5. It waits for resources: it is given up when that takes long.
    6. It runs.
    """
    waited = at - task.since

    def to(state: TaskState, note: str | None = None) -> TaskChange:
        handle = found.handle if found is not None else None
        cause = FAILURE_CAUSES.get(found.state) if found is not None and state is TaskState.FAILED else None
        return TaskChange(job=task.job, task=task.id, state=state, handle=handle, note=note, cause=cause)

    if found is None:
        return _unlisted(task, waited, timeouts, job_ends=job_ends), ""
    if found.state.ended:
        by_itself = task.state.wanted and not job_ends and found.state is not RmJobState.DONE
        return to(TaskState.FAILED if by_itself else TaskState.RELEASED, found.reason), ""
    if task.state.wanted and job_ends:
        return to(TaskState.DRAINING, "its job has ended"), "its job has ended" if waited > timeouts.end else ""
    if not task.state.wanted:
        return None, _why_stop_leaving(task, found, at, timeouts, job_ends=job_ends, told=told)
    if found.state is RmJobState.PENDING:
        if waited > timeouts.start:
            return to(TaskState.DRAINING, f"not started in {timeouts.start:g} s: {found.reason}"), "not started in time"
        return (to(task.state, found.reason) if found.reason != task.note or not task.handle else None), ""
    return (to(TaskState.GRANTED, "") if task.state is TaskState.ASKED else None), ""


def _unlisted(task: Task, waited: float, timeouts: Timeouts, *, job_ends: bool) -> TaskChange | None:
    """The step of a task that the manager does not list."""
    if task.handle:  # it was listed once
        state = TaskState.FAILED if task.state.wanted and not job_ends else TaskState.RELEASED
        note = "the resource manager does not know it any more"
        return TaskChange(task.job, task.id, state, note=note, cause=FailureCause.NOT_LISTED)
    if waited <= timeouts.unseen:
        return None
    state = TaskState.FAILED if task.state.wanted else TaskState.RELEASED
    return TaskChange(task.job, task.id, state, note="was never started", cause=FailureCause.NOT_STARTED)


def _why_stop_leaving(
    task: Task, found: RmJob, at: float, timeouts: Timeouts, *, job_ends: bool, told: float | None
) -> str:
    """Why a task that leaves has to be stopped; empty while it may take its time."""
    if found.state is RmJobState.PENDING:
        return "is not wanted any more"
    if job_ends or task.state is TaskState.DRAINED:
        return f"did not end in {timeouts.end:g} s" if at - task.since > timeouts.end else ""
    # It may still hold parameters: only a coordinator that was told to let it go can be late.
    late = told is not None and at - max(task.since, told) > timeouts.drain
    return f"was not drained in {timeouts.drain:g} s" if late else ""
