"""Reconcile: compares the store with the resource manager and corrects both.

The resource manager is right about what runs, the store about what should run. ``compare`` lists the changes and is
pure; ``reconcile`` carries them out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from dl2d.core.cluster import Snapshot, Task, TaskState, parse_tag, task_tag
from dl2d.core.guard_memory import GuardMemory, StartFailures
from dl2d.core.jobs import FailureCause, Job, JobKey, JobState
from dl2d.core.resource_manager import FAILURE_CAUSES, JOB_ENDS, RmJob, RmJobState, RmListing
from dl2d.core.store import JobChange, TaskChange, TickStore
from dl2d.tick.apply import start_anchor
from dl2d.tick.observe import LiveJobs, Observed, live_jobs, take_snapshot
from dl2d.tick.static_jobs import follow_static_jobs
from dl2d.tick.task_specs import ANCHOR
from dl2d.tick.tick_context import Context, Timeouts
from dl2d.tick.tick_state import TickState

log = structlog.get_logger()

#: Number of jobs, those that ended last, whose anchor is stopped if it still runs.
_MAX_ENDED_JOBS = 200
_NO_FAILURES = StartFailures()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """The cluster after store and resource manager were reconciled."""

    snapshot: Snapshot
    #: Elastic jobs with their commands, which the snapshot leaves out.
    jobs: Mapping[JobKey, Job]
    #: Elastic jobs whose coordinator has not called for ``Timeouts.silent_seconds``.
    silent: frozenset[JobKey]
    #: Jobs of which an attempt to start tasks failed and the next one may not begin yet.
    backing_off: frozenset[JobKey]
    #: Since when each job's coordinator has called without a gap; without silent ones.
    calling_since: Mapping[JobKey, float]
    #: What the guard remembers after this tick; it is in the store.
    memory: GuardMemory
    #: Next value of the field of ``TickState``.
    ended_until: float


def reconcile(context: Context, state: TickState, observed: Observed) -> Reconciled:
    """Update the store to match the listing; in mode live also start missing anchors and stop what must not run.

    Raises
    ------
    ResourceManagerError, StoreError
        A change could not be made; the next tick makes it.
    """
    store, listing, acts, memory = context.store, observed.listing, context.mode.acts, state.memory
    static, ended_until = follow_static_jobs(context, observed)
    before, silent_seconds = observed.elastic, context.timeouts.silent_seconds
    calling_since = update_calling_since(state.calling_since, before.jobs, listing.at, silent_seconds)
    for job in before.jobs:
        if job.key in state.calling_since and job.key not in calling_since:
            log.warning("coordinator is silent", job=job.key.id, seconds=silent_seconds)
    changes = compare(
        before,
        _ended_jobs(store, before),
        listing,
        cluster=context.cluster,
        timeouts=context.timeouts,
        start_failures=memory.start_failures,
        calling_since=calling_since,
    )
    elastic = _apply_changes(store, before, changes, listing.at)
    present = {job.key for job in elastic.jobs}
    failures = _count_failures(before.tasks, changes.tasks, memory.start_failures, listing.at)
    memory = replace(
        _resizes_seen(memory, before.tasks, present, listing.at, context),
        start_failures={key: count for key, count in failures.items() if key in present},
        stops_asked={},
    )
    if acts:
        if context.starts_anchors:
            for job in elastic.jobs:
                if job.state is JobState.SUBMITTED and not job.anchor:
                    start_anchor(context, job, listing.at)
        stops_asked = _stop(context, changes.stops, state.memory.stops_asked, listing.at)
        memory = replace(memory, stops_asked=stops_asked)
    if memory != state.memory:
        store.keep_guard_memory(memory)
    snapshot = take_snapshot(elastic if acts else elastic + static, listing, state.slot + 1)
    return Reconciled(
        snapshot=snapshot,
        jobs={job.key: job for job in elastic.jobs},
        silent=frozenset(job.key for job in snapshot.jobs if not job.static) - calling_since.keys(),
        backing_off=frozenset(
            key
            for key, failed in memory.start_failures.items()
            if listing.at < failed.retry_at(context.guard_rules.backoff)
        ),
        calling_since=calling_since,
        memory=memory,
        ended_until=ended_until,
    )


def _apply_changes(store: TickStore, before: LiveJobs, changes: Changes, at: float) -> LiveJobs:
    """Write the changes to the store; returns the live elastic jobs after them."""
    for remark in changes.remarks:
        log.warning("reconcile", remark=remark)
    for key, change in changes.jobs:
        job = store.change_job(key, change, at)
        if change.state is not None:
            log.info("job", job=key.id, state=str(job.state), reason=job.end_reason)
    store.change_tasks(changes.tasks, at)
    return live_jobs(store)[0] if changes.jobs or changes.tasks else before


def _stop(
    context: Context, stops: Sequence[tuple[str, str]], asked: Mapping[str, float], at: float
) -> Mapping[str, float]:
    """Have the resource manager stop handles, except those that it was asked to stop recently.

    ``stops`` are handles with the reason, ``asked`` says when each was last asked. Returns the next value of ``asked``.
    """
    # A handle that was asked is killed after the grace period. It is asked again only if it still runs long after that,
    # since the resource manager may have lost the request.
    again_after = 2 * context.grace_seconds + context.timeouts.end_seconds
    recent = {handle: asked[handle] for handle, _ in stops if 0 <= at - asked.get(handle, -math.inf) < again_after}
    due = [(handle, reason) for handle, reason in stops if handle not in recent]
    for handle, reason in due:
        log.info("stop", handle=handle, reason=reason)
    if due:
        context.manager.stop([handle for handle, _ in due], context.grace_seconds)
    return recent | {handle: at for handle, _ in due}


def _ended_jobs(store: TickStore, live: LiveJobs) -> tuple[Job, ...]:
    """Elastic jobs that have ended but may have left an anchor or tasks running."""
    live_keys = {job.key for job in live.jobs}
    ended = {job.key: job for job in store.last_ended(_MAX_ENDED_JOBS)}
    for task in live.tasks:
        if task.job not in live_keys and task.job not in ended:
            job = store.job(task.job)
            if job is not None and not job.static:
                ended[job.key] = job
    return tuple(job for job in ended.values() if job.key not in live_keys)


def _resizes_seen(
    memory: GuardMemory, tasks: Iterable[Task], jobs: Collection[JobKey], at: float, context: Context
) -> GuardMemory:
    """The memory with the resizes that live tasks show: what happened counts, whatever was decided.

    A time in the future, which means that the clock was set back, counts as now.
    """
    if not context.guard_rules.need_resizes:
        return replace(memory, resized_at={}, started_at={})
    resized = {key: min(resized_at, at) for key, resized_at in memory.resized_at.items() if key in jobs}
    started = {tag: min(asked_at, at) for tag, asked_at in memory.started_at.items()}
    for task in tasks:
        if task.job in jobs:
            resized[task.job] = max(resized.get(task.job, 0.0), min(task.since, at))
        if task.tag not in started and task.asked_at > at - context.slot_seconds:
            started[task.tag] = min(task.asked_at, at)
    recent = {tag: asked_at for tag, asked_at in started.items() if asked_at > at - context.slot_seconds}
    return replace(memory, resized_at=resized, started_at=recent)


def _backing_off(memory: GuardMemory, at: float, backoff_seconds: float) -> frozenset[JobKey]:
    return frozenset(key for key, failed in memory.start_failures.items() if at < failed.retry_at(backoff_seconds))


def _count_failures(
    tasks: Iterable[Task], changes: Iterable[TaskChange], failures: Mapping[JobKey, StartFailures], at: float
) -> dict[JobKey, StartFailures]:
    """Update the numbers of failed attempts to start tasks by the changes of this tick.

    Tasks of a job that fail in the same tick count as one attempt. A start that never reached the resource manager does
    not count, since the job did not cause it. A job that has a confirmed task begins anew.
    """
    before = {(task.job, task.id): task for task in tasks}
    confirmed = {task.job for task in before.values() if task.state is TaskState.CONFIRMED}
    # A failure in the future means that the clock was set back.
    counted = {key: count._replace(at=min(count.at, at)) for key, count in failures.items() if key not in confirmed}
    last_failure: dict[JobKey, str] = {}
    for change in changes:
        task = before[change.job, change.task]
        if change.state is TaskState.FAILED and task.state.rank < TaskState.JOINED.rank and task.handle:
            last_failure[change.job] = f"{change.task}: {change.note or 'no reason given'}"
    for key, failure in last_failure.items():
        counted[key] = StartFailures(counted.get(key, _NO_FAILURES).attempts + 1, failure, at)
    return counted


def update_calling_since(
    before: Mapping[JobKey, float], jobs: Iterable[Job], at: float, silent_seconds: float
) -> dict[JobKey, float]:
    """Since when each job's coordinator has called without a gap of ``silent_seconds``; silent ones are left out.

    ``before`` is the result of the last tick. It is empty after a restart of the daemon, so that all coordinators begin
    anew: which tasks they were told to drain before is not known.
    """
    calling = (job.key for job in jobs if job.address and at - job.progress.at <= silent_seconds)
    return {key: before.get(key, at) for key in calling}


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes after which store and resource manager agree."""

    #: Changes of jobs in the store.
    jobs: tuple[tuple[JobKey, JobChange], ...] = ()
    #: Changes of tasks in the store.
    tasks: tuple[TaskChange, ...] = ()
    #: Handles that the resource manager has to stop, with the reason.
    stops: tuple[tuple[str, str], ...] = ()
    #: Warnings for the log.
    remarks: tuple[str, ...] = ()


def compare(
    live: LiveJobs,
    ended_jobs: Iterable[Job],
    listing: RmListing,
    *,
    cluster: str,
    timeouts: Timeouts,
    start_failures: Mapping[JobKey, StartFailures],
    calling_since: Mapping[JobKey, float],
) -> Changes:
    """Find the changes after which store and resource manager agree.

    Parameters
    ----------
    live
        Elastic jobs and tasks of the store that have not ended.
    ended_jobs
        Elastic jobs that have ended: those that still have live tasks, and the last ``_MAX_ENDED_JOBS`` others.
    cluster
        Name of this cluster; tags of other clusters are ignored.
    start_failures
        Failed attempts to start tasks, of jobs that have any.
    calling_since
        Since when each coordinator has called without a gap (see ``update_calling_since``). A task's time to drain
        begins no earlier, since its coordinator was not told to drain it before.
    """
    by_handle = {listed.handle: listed for listed in listing.jobs}
    known = {job.key: job for job in (*ended_jobs, *live.jobs)}
    known_handles = {task.handle for task in live.tasks} | {job.anchor for job in known.values()}
    unknown = [listed for listed in listing.jobs if listed.handle not in known_handles and listed.tag]
    by_tag = _by_tag(unknown)

    job_changes: list[tuple[JobKey, JobChange]] = []
    stops: dict[str, str] = {}
    #: States of the jobs that have ended, and of those that end in this tick.
    ended_states: dict[JobKey, JobState] = {}
    for job in known.values():
        anchor = by_handle.get(job.anchor) if job.anchor else by_tag.get(task_tag(job.key, ANCHOR))
        if job.state.ended:
            ended_states[job.key] = job.state
            if anchor is not None and not anchor.state.ended and _must_stop_anchor(job, listing.at, timeouts):
                stops[anchor.handle] = f"job {job.key.id} is {job.state}"
            continue
        change = _job_change(job, anchor, listing.at, timeouts, start_failures.get(job.key, _NO_FAILURES))
        if change is not None:
            job_changes.append((job.key, change))
            if change.state is not None and change.state.ended:
                ended_states[job.key] = change.state

    task_changes: list[TaskChange] = []
    matched: set[str] = set()
    for task in live.tasks:
        listed = (by_handle.get(task.handle) if task.handle else None) or by_tag.get(task.tag)
        if listed is not None:
            matched.add(listed.handle)
        task_change, stop_reason = _task_change(
            task, listed, listing.at, timeouts,
            ended_as=ended_states.get(task.job), calling_since=calling_since.get(task.job),
        )  # fmt: skip
        if task_change is not None:
            task_changes.append(task_change)
        if stop_reason and listed is not None:
            stops[listed.handle] = stop_reason

    unmatched = [listed for listed in unknown if listed.handle not in matched and not listed.state.ended]
    remarks = _stop_unknown_tasks(unmatched, live.tasks, known, by_handle, cluster, stops)
    return Changes(tuple(job_changes), tuple(task_changes), tuple(stops.items()), remarks)


def _by_tag(rm_jobs: Iterable[RmJob]) -> dict[str, RmJob]:
    """The resource manager's jobs by tag; of several with the same tag, preferably one that has not ended."""
    by_tag: dict[str, RmJob] = {}
    for listed in rm_jobs:
        first = by_tag.setdefault(listed.tag, listed)
        if first.state.ended and not listed.state.ended:
            by_tag[listed.tag] = listed
    return by_tag


def _stop_unknown_tasks(
    unmatched: Iterable[RmJob],
    tasks: Iterable[Task],
    known: Mapping[JobKey, Job],
    by_handle: Mapping[str, RmJob],
    cluster: str,
    stops: dict[str, str],
) -> tuple[str, ...]:
    """Add to ``stops`` what has a tag of this cluster but is unknown to the store; returns warnings for the log.

    Tasks of a job that the store does not know but whose anchor runs may belong to another store, and are not stopped.
    """
    live_ids = {(task.job, task.id) for task in tasks}
    remarks = []
    for listed in unmatched:
        parsed = parse_tag(listed.tag)
        if parsed is None or parsed[0].cluster != cluster:
            continue
        key, name = parsed
        job = known.get(key)
        if name == ANCHOR:
            if job is None:
                stops[listed.handle] = f"anchor of {key.slug}, which the store does not know"
            continue
        if parsed in live_ids:
            stops[listed.handle] = f"{name} of {key.slug} runs twice"
            continue
        anchor = by_handle.get(job.anchor if job else key.id)
        if job is None and anchor is not None and not anchor.state.ended:
            remarks.append(f"{listed.handle} is a task of {key.slug}, which this store does not know; not stopped")
        else:
            stops[listed.handle] = f"{name} of {key.slug} is not wanted"
    return tuple(remarks)


def _must_stop_anchor(job: Job, at: float, timeouts: Timeouts) -> bool:
    """Whether the anchor of an ended job is to be stopped: at once if the job was cancelled, else after a while."""
    return job.state is JobState.CANCELLED or (job.ended_at is not None and at - job.ended_at > timeouts.end_seconds)


def _job_change(
    job: Job, anchor: RmJob | None, at: float, timeouts: Timeouts, failures: StartFailures
) -> JobChange | None:
    """The change of a job that has not ended, by the state of its anchor; None for no change."""
    if anchor is None:
        # An anchor without a handle has not been started yet, and a new one may not be listed yet.
        last_heard = max(job.progress.at, float(job.key.submitted))
        if not job.anchor or at - last_heard <= timeouts.unseen_seconds:
            return None
        reason = "the resource manager does not list its anchor any more"
        return JobChange(state=JobState.LOST, end_reason=reason, cause=FailureCause.NOT_LISTED)
    if anchor.state.ended:
        end = anchor.reason or str(anchor.state)
        if anchor.state is RmJobState.DONE and job.state is JobState.SUBMITTED:
            reason = f"its coordinator ended before it called: {end}"
            return JobChange(state=JobState.FAILED, end_reason=reason, cause=FailureCause.FAILED)
        reason, cause = f"its coordinator ended: {end}", FAILURE_CAUSES.get(anchor.state)
        return JobChange(state=JOB_ENDS[anchor.state], end_reason=reason, cause=cause)
    if failures.attempts >= timeouts.start_failures:
        reason = f"{failures.attempts} attempts in a row to start its tasks failed; the last: {failures.last}"
        return JobChange(state=JobState.FAILED, end_reason=reason, cause=FailureCause.TASKS_FAILED)
    return JobChange(anchor=anchor.handle) if not job.anchor else None


def _task_change(
    task: Task,
    listed: RmJob | None,
    at: float,
    timeouts: Timeouts,
    *,
    ended_as: JobState | None,
    calling_since: float | None,
) -> tuple[TaskChange | None, str]:
    """The task's change of state (None for no change), and why it has to be stopped ("" if it does not).

    ``ended_as`` is the state in which its job has ended, or None. The cases are, in this order:

    1. The resource manager does not list it: it has ended, or was never started.
    2. The resource manager says that it has ended.
    3. It is wanted, but its job has ended: it drains, and has ``end_seconds`` from now on to end by itself. A task of a
       cancelled job is stopped at once.
    4. It leaves: it is stopped if it has not begun, or takes long.
    5. It waits for resources: it is given up when that takes long.
    6. It runs, perhaps on another node than the one it was asked for.
    """
    elapsed = at - task.since
    if listed is None:
        return _unlisted(task, elapsed, timeouts, job_ended=ended_as is not None), ""

    def change_to(state: TaskState, note: str) -> TaskChange:
        cause = FAILURE_CAUSES.get(listed.state) if state is TaskState.FAILED else None
        node = listed.node if listed.node not in ("", task.node) else None
        return TaskChange(
            job=task.job, task=task.id, state=state, handle=listed.handle, note=note, cause=cause, node=node
        )

    if listed.state.ended:
        failed = task.state.wanted and ended_as is None and listed.state is not RmJobState.DONE
        return change_to(TaskState.FAILED if failed else TaskState.RELEASED, listed.reason), ""
    if task.state.wanted and ended_as is not None:
        stop_reason = "its job was cancelled" if ended_as is JobState.CANCELLED else ""
        return change_to(TaskState.DRAINING, stop_reason or "its job has ended"), stop_reason
    if not task.state.wanted:
        return None, _why_stop_leaving(task, listed, at, timeouts, ended_as=ended_as, calling_since=calling_since)
    if listed.state is RmJobState.PENDING:
        if elapsed > timeouts.start_seconds:
            note = f"not started in {timeouts.start_seconds:g} s: {listed.reason}"
            return change_to(TaskState.DRAINING, note), "not started in time"
        same = listed.reason == task.note and task.handle
        return None if same else change_to(task.state, listed.reason), ""
    if task.state is TaskState.ASKED:
        return change_to(TaskState.GRANTED, ""), ""
    # Its coordinator may have reported it before it was listed as running.
    return (change_to(task.state, task.note) if listed.node not in ("", task.node) else None), ""


def _unlisted(task: Task, elapsed: float, timeouts: Timeouts, *, job_ended: bool) -> TaskChange | None:
    """The change of state of a task that the resource manager does not list; None for no change.

    ``elapsed``: seconds since the task entered its state.
    """
    if task.handle:  # the resource manager had accepted it
        state = TaskState.FAILED if task.state.wanted and not job_ended else TaskState.RELEASED
        note = "the resource manager does not list it any more"
        return TaskChange(task.job, task.id, state, note=note, cause=FailureCause.NOT_LISTED)
    if elapsed <= timeouts.unseen_seconds:
        return None
    state = TaskState.FAILED if task.state.wanted else TaskState.RELEASED
    return TaskChange(task.job, task.id, state, note="was never started", cause=FailureCause.NOT_STARTED)


def _why_stop_leaving(
    task: Task, listed: RmJob, at: float, timeouts: Timeouts, *, ended_as: JobState | None, calling_since: float | None
) -> str:
    """Why a task that leaves has to be stopped; empty while it may take its time."""
    if listed.state is RmJobState.PENDING:
        return "is not wanted any more"
    if ended_as is JobState.CANCELLED:
        return "its job was cancelled"
    if ended_as is not None or task.state is TaskState.DRAINED:
        return f"did not end in {timeouts.end_seconds:g} s" if at - task.since > timeouts.end_seconds else ""
    # It may still hold weights of the job, so its coordinator gets the whole time from when it was told to drain it.
    if calling_since is None or at - max(task.since, calling_since) <= timeouts.drain_seconds:
        return ""
    return f"was not drained in {timeouts.drain_seconds:g} s"
