"""Reconcile: compares the store with the resource manager and corrects both.

The resource manager is right about what runs, the store about what should run. ``compare`` lists the changes and is
pure; ``reconcile`` carries them out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final

import structlog
from msgspec import structs

from dl2d.core.backoff_after_failed_starts import StartFailures
from dl2d.core.cluster import ANCHOR, Snapshot, Task, TaskState, task_tag
from dl2d.core.error_wording import counted
from dl2d.core.errors import DuplicateJob, ResourceManagerError
from dl2d.core.jobs import FailureCause, Job, JobKey, JobState, Owner
from dl2d.core.resize_guard_state import GuardState
from dl2d.core.resource_manager import FAILURE_CAUSES, JOB_ENDS, GrowthLimit, RmIdentity, RmJob, RmJobState, RmListing
from dl2d.core.store import JobChange, TaskChange, TickStore
from dl2d.tick.apply import start_anchors
from dl2d.tick.avoided_nodes import remember_failing_nodes
from dl2d.tick.count_failed_starts import NO_FAILURES, count_failures
from dl2d.tick.learned_growth_limits import growth_limits_in_force, remember_growth_limits
from dl2d.tick.missing_tasks import Missing
from dl2d.tick.observe import LiveJobs, Observed, live_jobs, take_snapshot
from dl2d.tick.silent_coordinators import has_called, update_calling_since
from dl2d.tick.static_jobs import follow_static_jobs, unlisted_static_jobs
from dl2d.tick.stop_tasks_and_anchors import ask_to_stop, ended_jobs_to_check, must_stop_anchor
from dl2d.tick.stray_tasks import compare_strays, strays_of_known_jobs
from dl2d.tick.task_matching import Matches, match_listing, may_stop
from dl2d.tick.tick_context import Context, Timeouts
from dl2d.tick.tick_state import TickState
from dl2d.tick.time_in_state import Elapsed, elapsed_times, update_state_since
from dl2d.tick.withdrawn_tasks import MAX_REFUSED_SECONDS, why_refused, withdrawn_tasks

log = structlog.get_logger()

#: Why a task or anchor that is not listed has ended.
NOT_LISTED: Final = "is not listed any more"
REPLACED: Final = "was requeued, or its id was reused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """The cluster after store and resource manager were reconciled."""

    snapshot: Snapshot
    #: Elastic jobs with their commands, which the snapshot leaves out.
    jobs: Mapping[JobKey, Job]
    #: Owners of the elastic jobs that are live or have live tasks.
    owners: Mapping[JobKey, Owner]
    #: Elastic jobs whose coordinator has not called for ``Timeouts.silent_seconds`` or was ended from outside, or whose
    #: anchor is ending.
    silent: frozenset[JobKey]
    #: Jobs whose last attempt to start tasks failed, and whose next attempt has to wait.
    backing_off: frozenset[JobKey]
    #: Limits that tasks were found to wait for a short while ago.
    growth_limits: tuple[GrowthLimit, ...]
    #: Whether a task failed in this tick, so that a decision is due.
    task_failed: bool
    #: Since when each job's coordinator has called without a gap; jobs whose coordinator is silent are left out.
    calling_since: Mapping[JobKey, float]
    #: The guard's state after this tick; it is in the store.
    memory: GuardState
    #: Jobs of the resource manager that are not stopped, since they may not be dl2d's; one sentence each.
    remarks: tuple[str, ...]
    #: Next values of the fields of ``TickState``.
    missing: Missing
    state_since: Mapping[str, tuple[TaskState, float]]
    ended_until: float | None
    last_anchor_tried: JobKey | None


def reconcile(context: Context, state: TickState, observed: Observed, now: float) -> Reconciled:
    """Update the store to match the listing; in modes live and canary start missing anchors and stop what must not run.

    ``now``: seconds on a monotonic clock.

    Raises
    ------
    ResourceManagerError, StoreError
        A change could not be made; the next tick makes it.
    """
    memory = state.memory
    store, listing, acts, timeouts = context.store, observed.listing, context.mode.acts, context.timeouts
    before, silent_seconds = observed.elastic, timeouts.silent_seconds
    ended_jobs = ended_jobs_to_check(store, before, listing.at)
    match = partial(
        match_listing, before, {job.key: job for job in (*ended_jobs, *before.jobs)},
        cluster=context.cluster, tasks_as_owner=context.tasks_as_owner,
    )  # fmt: skip
    matches = match(listing)
    unlisted = matches.unlisted - _calling_anchors(before.jobs, listing.at, timeouts.unseen_seconds)
    unlisted -= _tasks_of_unknown_containers(before, listing)
    missing = state.missing.after(unlisted | unlisted_static_jobs(context, observed), listing, now)
    gone = missing.gone(timeouts.unseen_listings, timeouts.unseen_seconds) if not listing.incomplete else frozenset()
    if ended := _final_states(context, before, gone):
        listing = replace(listing, jobs=(*listing.jobs, *ended))
        matches = match(listing)
    static, ended_until = follow_static_jobs(context, observed, gone, state.ended_until)
    calling_since = update_calling_since(
        state.calling_since, before.jobs, listing.at, now, silent_seconds, context.answered_since
    )
    state_since = update_state_since(state.state_since, before.tasks, now)
    for job in before.jobs:
        if job.key in state.calling_since and job.key not in calling_since:
            log.warning("coordinator is silent", job=job.key.id, seconds=silent_seconds)
    changes = compare(
        before,
        ended_jobs,
        listing,
        matches,
        gone,
        timeouts=timeouts,
        start_failures=memory.start_failures,
        elapsed=elapsed_times(before, state_since, calling_since, now),
        strays_asked_for=strays_of_known_jobs(store, matches),
        tasks_as_owner=context.tasks_as_owner,
    )
    # Where dl2d does not act, the next run of a requeued job registers as a static job, whose coordinator starts the
    # tasks by itself.
    if not acts:
        changes = replace(changes, new_jobs=())
    changes = _with_outputs(context, before.jobs, changes)
    elastic = _apply_changes(store, before, changes, listing.at)
    present = {job.key for job in elastic.jobs}
    failures = count_failures(before.tasks, changes.tasks, memory.start_failures, listing.at)
    for key, change in changes.jobs:
        if change.anchor:  # its start had been carried out, although it seemed to fail
            failures.pop(key, None)
    memory = replace(
        _resizes_seen(memory, before.tasks, present, listing.at, context),
        start_failures={key: count for key, count in failures.items() if key in present},
        stops_asked={},
    )
    withdrawn = withdrawn_tasks(elastic.jobs, before.tasks, changes.tasks, matches.listed)
    memory = remember_failing_nodes(memory, elastic.jobs, before.tasks, changes.tasks, withdrawn, listing.at)
    memory = remember_growth_limits(memory, elastic.jobs, before.tasks, withdrawn, listing.at)
    last_anchor_tried = None
    if acts:
        if context.starts_anchors:
            submitted = [job for job in elastic.jobs if job.state is JobState.SUBMITTED and not job.anchor]
            last_anchor_tried, failures = start_anchors(
                context, submitted, state.last_anchor_tried, memory.start_failures, listing.at
            )
            memory = replace(memory, start_failures=failures)
        stops_asked = ask_to_stop(context, changes.stops, state.memory.stops_asked, listing.at)
        memory = replace(memory, stops_asked=stops_asked)
    if memory != state.memory:
        store.keep_guard_state(memory)
    shown = elastic if acts else elastic + static
    snapshot = take_snapshot(shown, listing, state.slot + 1, memory.refused_nodes, context.deciders.placement)
    return Reconciled(
        snapshot=snapshot,
        jobs={job.key: job for job in elastic.jobs},
        owners={job.key: job.owner for job in (*ended_jobs, *before.jobs, *elastic.jobs)},
        silent=(frozenset(job.key for job in snapshot.jobs if not job.static) - calling_since.keys())
        | {job.key for job in elastic.jobs if job.coordinator_end or _is_ending(job, matches)},
        backing_off=_backing_off(memory, listing.at, context.guard_rules.backoff),
        growth_limits=growth_limits_in_force(memory, elastic.jobs, elastic.tasks, listing.at),
        task_failed=any(change.state is TaskState.FAILED for change in changes.tasks),
        calling_since=calling_since,
        memory=memory,
        remarks=changes.remarks,
        missing=missing,
        state_since=state_since,
        ended_until=ended_until,
        last_anchor_tried=last_anchor_tried,
    )


def _final_states(context: Context, live: LiveJobs, gone: Collection[str]) -> Sequence[RmJob]:
    """Final states of the tasks and anchors that count as gone, as far as the resource manager knows them."""
    handles = [task.handle for task in live.tasks if task.handle and task.tag in gone]
    handles += [job.anchor for job in live.jobs if job.anchor and task_tag(job.key, ANCHOR) in gone]
    if not handles:
        return ()
    try:
        return context.final_states(handles)
    except ResourceManagerError as error:
        log.warning("cannot ask the resource manager how jobs ended that it no longer lists", error=str(error))
        return ()


def _with_outputs(context: Context, jobs: Iterable[Job], changes: Changes) -> Changes:
    """The changes, with the place of the output in the reasons of tasks and started anchors that ended with an error.

    A task whose ``dl2-run`` runs has the last lines of its output in its coordinator's report; one in which even that
    cannot start has nothing else.
    """
    if not context.output:
        return changes
    known = {job.key: job for job in jobs}

    def add_output(reason: str, key: JobKey, name: str) -> str:
        place = context.output.format(cwd=known[key].launch.cwd, id=key.id, slug=key.slug, name=name)
        return f"{reason}; its output: {place}"

    return replace(
        changes,
        jobs=tuple(
            (key, replace(change, end_reason=add_output(change.end_reason or "", key, ANCHOR)))
            if change.cause is FailureCause.FAILED and context.starts_anchors and key in known
            else (key, change)
            for key, change in changes.jobs
        ),
        tasks=tuple(
            structs.replace(change, note=add_output(change.note or "", change.job, change.task))
            if change.cause is FailureCause.FAILED and change.job in known
            else change
            for change in changes.tasks
        ),
    )


def _apply_changes(store: TickStore, before: LiveJobs, changes: Changes, at: float) -> LiveJobs:
    """Write the changes to the store; returns the live elastic jobs after them."""
    # New jobs first. With the other order a crash in between would leave a requeued job without its next run: an ended
    # job is not requeued again, and the environment of its command, which the next run copies, has been deleted.
    for job in changes.new_jobs:  # one that has registered by itself is known already
        with contextlib.suppress(DuplicateJob):
            store.add_job(job)
    for key, change in changes.jobs:
        job = store.change_job(key, change, at)
        if change.state is not None:
            log.info("job", job=key.id, state=str(job.state), reason=job.end_reason)
    store.change_tasks(changes.tasks, at)
    return live_jobs(store)[0] if changes.jobs or changes.tasks else before


def _resizes_seen(
    memory: GuardState, tasks: Iterable[Task], jobs: Collection[JobKey], at: float, context: Context
) -> GuardState:
    """The memory with the resizes and starts that live tasks show, without those that were decided but did not happen.

    A time later than ``at`` means that the clock was set back. A remembered one becomes ``at``. That of a task is taken
    as ``at`` once only, where nothing is remembered of its job; otherwise each tick would restart the cool-down.
    """
    if not context.guard_rules.need_resizes:
        return replace(memory, resized_at={}, started_at={})
    resized = {key: min(resized_at, at) for key, resized_at in memory.resized_at.items() if key in jobs}
    started = {tag: min(asked_at, at) for tag, asked_at in memory.started_at.items()}
    for task in tasks:
        if task.job in jobs and task.since <= at:
            resized[task.job] = max(resized.get(task.job, 0.0), task.since)
        elif task.job in jobs:
            resized.setdefault(task.job, at)
        if task.tag not in started and at - context.slot_seconds < task.asked_at <= at:
            started[task.tag] = task.asked_at
    recent = {tag: asked_at for tag, asked_at in started.items() if asked_at > at - context.slot_seconds}
    return replace(memory, resized_at=resized, started_at=recent)


def _backing_off(memory: GuardState, at: float, backoff_seconds: float) -> frozenset[JobKey]:
    """Jobs whose next attempt to start tasks has to wait."""
    return frozenset(key for key, failed in memory.start_failures.items() if at < failed.retry_at(backoff_seconds))


def _is_ending(job: Job, matches: Matches) -> bool:
    """Whether the resource manager is ending the anchor of a job."""
    anchor = matches.listed.get(task_tag(job.key, ANCHOR))
    return anchor is not None and anchor.state is RmJobState.ENDING


def _calling_anchors(jobs: Iterable[Job], at: float, seconds: float) -> frozenset[str]:
    """Tags of the anchors whose coordinator has called within these seconds: they run, even if they are not listed."""
    return frozenset(task_tag(job.key, ANCHOR) for job in jobs if has_called(job, at, seconds))


def _tasks_of_unknown_containers(live: LiveJobs, listing: RmListing) -> frozenset[str]:
    """Tags of tasks that may run, of jobs whose containers have not all reported to the resource manager."""
    jobs = {job.key for job in live.jobs if job.anchor in listing.unreported}
    return frozenset(task.tag for task in live.tasks if task.job in jobs and task.state is not TaskState.ASKED)


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes after which store and resource manager agree."""

    #: Changes of jobs in the store.
    jobs: tuple[tuple[JobKey, JobChange], ...] = ()
    #: Jobs that the store does not have yet: what was requeued, under its new submit time.
    new_jobs: tuple[Job, ...] = ()
    #: Changes of tasks in the store.
    tasks: tuple[TaskChange, ...] = ()
    #: Listed jobs that the resource manager has to stop, with the reason.
    stops: tuple[tuple[RmJob, str], ...] = ()
    #: Listed jobs that are not stopped, since they may not be dl2d's; one sentence each.
    remarks: tuple[str, ...] = ()


def compare(
    live: LiveJobs,
    ended_jobs: Iterable[Job],
    listing: RmListing,
    matches: Matches,
    gone: Collection[str],
    *,
    timeouts: Timeouts,
    start_failures: Mapping[JobKey, StartFailures],
    elapsed: Mapping[str, Elapsed],
    strays_asked_for: Mapping[RmIdentity, Job | None] = MappingProxyType({}),
    tasks_as_owner: bool = True,
) -> Changes:
    """Find the changes after which store and resource manager agree.

    A task is not taken for ended because one listing lacks it. With an incomplete listing only tasks and anchors of
    cancelled jobs are stopped: that was ordered, and the resource manager's plug-in checks their identity again before
    it stops them. A listed job is stopped only if it has the tag of a job that the store knows, or is a task of it
    by handle and submit time, and belongs to the owner of that job.

    Parameters
    ----------
    live
        Elastic jobs and tasks of the store that have not ended.
    ended_jobs
        Elastic jobs that have ended: those that still have live tasks, and those that ended last.
    matches
        What the listing has of them.
    gone
        Tags of tasks and anchors that have ended, since enough complete listings lack them (``Missing.gone``).
    start_failures
        Failed attempts to start tasks, of jobs that have any.
    elapsed
        For how long each task has been in its state, by tag. A task's time to drain counts only while its coordinator
        calls, since it was not told to drain it before.
    strays_asked_for
        The job of each stray that the store has ever asked for, by identity.
    tasks_as_owner
        Whether tasks run as the user who owns their job.
    """
    if listing.incomplete:
        # A task that waits for long would be given up, and nothing can be stopped now.
        timeouts = replace(timeouts, start_seconds=math.inf)
    jobs = {job.key: job for job in (*ended_jobs, *live.jobs)}
    job_changes: list[tuple[JobKey, JobChange]] = []
    new_jobs: list[Job] = []
    stops: list[tuple[RmJob, Job | None, str]] = []
    #: States of the jobs that have ended, and of those that end in this tick.
    ended_states: dict[JobKey, JobState] = {}
    for job in jobs.values():
        tag = task_tag(job.key, ANCHOR)
        anchor = matches.listed.get(tag)
        if job.state.ended:
            ended_states[job.key] = job.state
            if anchor is not None and not anchor.state.ended and must_stop_anchor(job, anchor, listing.at, timeouts):
                stops.append((anchor, job, f"job {job.key.id} is {job.state}"))
            continue
        if (requeued := matches.requeued.get(job.key)) is not None:
            new_job, end = _requeued(job, requeued)
            new_jobs.append(new_job)
            job_changes.append((job.key, end))
            ended_states[job.key] = JobState.LOST
            continue
        failures = start_failures.get(job.key, NO_FAILURES)
        change = _job_change(job, anchor, _absence(tag, matches, gone), listing.at, timeouts, failures)
        if change is not None:
            job_changes.append((job.key, change))
            if change.state is not None and change.state.ended:
                ended_states[job.key] = change.state

    task_changes: list[TaskChange] = []
    for task in live.tasks:
        tag = task.tag
        listed = matches.listed.get(tag)
        task_change, stop_reason = _task_change(
            task, listed, elapsed[tag], timeouts,
            absence=_absence(tag, matches, gone),
            job_end=ended_states.get(task.job),
        )  # fmt: skip
        if task_change is not None:
            task_changes.append(task_change)
        if stop_reason and listed is not None:
            stops.append((listed, jobs.get(task.job), stop_reason))

    remarks: list[str] = []
    own_stops = tuple(stops)
    if matches.strays:
        live_tags = {task.tag for task in live.tasks} | {task_tag(job.key, ANCHOR) for job in live.jobs}
        stray_stops, remarks = compare_strays(matches, live_tags, strays_asked_for)
        stops += stray_stops
    if listing.incomplete:
        # What a user has ordered follows from the store, and not from what the listing may lack.
        ordered = {job.key for job in ended_jobs if job.state is JobState.CANCELLED}
        stops = [stop for stop in own_stops if stop[1] is not None and stop[1].key in ordered]
    allowed = []
    tasks = {(task.job, task.handle, task.submitted) for task in live.tasks} if stops else frozenset()
    for listed, owner, reason in stops:
        if owner is not None and may_stop(listed, owner, tasks, tasks_as_owner=tasks_as_owner):
            allowed.append((listed, reason))
        else:
            remarks.append(f"{listed.handle} of user {listed.user} is not stopped ({reason}): it has no tag of dl2d, "
                           "or belongs to somebody else")  # fmt: skip
    return Changes(
        jobs=tuple(job_changes),
        new_jobs=tuple(new_jobs),
        tasks=tuple(task_changes),
        stops=tuple(allowed),
        remarks=tuple(remarks),
    )


def _requeued(job: Job, listed: RmJob) -> tuple[Job, JobChange]:
    """The job that goes on where a requeued one was, and the change that ends the latter.

    They are two jobs, so that the tasks, the token and the coordinator of the first are not used by the second.
    """
    key = job.key._replace(submitted=listed.submitted)
    new = Job(key=key, request=job.request, owner=job.owner, launch=job.launch, anchor=job.anchor)
    reason = f"was requeued by the resource manager, and goes on from its checkpoint as {key.slug}"
    return new, JobChange(state=JobState.LOST, end_reason=reason, cause=FailureCause.REQUEUED)


def _absence(tag: str, matches: Matches, gone: Collection[str]) -> str:
    """Why a task or anchor that is not listed has ended; empty if it may be listed again."""
    return REPLACED if tag in matches.replaced else NOT_LISTED if tag in gone else ""


def _job_change(
    job: Job, anchor: RmJob | None, absence: str, at: float, timeouts: Timeouts, failures: StartFailures
) -> JobChange | None:
    """The change of a job that has not ended, by the state of its anchor; None for no change.

    ``absence`` says why the anchor has ended where it is not listed; empty if it may be listed again.
    """
    if anchor is None:
        if not job.anchor:  # it has not been started yet
            if job.state is not JobState.SUBMITTED or failures.counted < timeouts.start_failures:
                return None
            tried = counted(failures.in_a_row, "attempt")
            reason = f"{tried} in a row to start its coordinator failed; the last: {failures.last}"
            return JobChange(state=JobState.FAILED, end_reason=reason, cause=FailureCause.TASKS_FAILED)
        if not absence:
            return None
        return JobChange(state=JobState.LOST, end_reason=f"its anchor {absence}", cause=FailureCause.NOT_LISTED)
    if anchor.state.ended:
        end = anchor.reason or str(anchor.state)
        if anchor.state is RmJobState.DONE and job.state is JobState.SUBMITTED:
            reason = (
                f"its coordinator ended without an error ({end}), and had never reported to dl2d: it trained nothing, "
                "or did not reach the daemon; its output says more"
            )
            return JobChange(state=JobState.FAILED, end_reason=reason, cause=FailureCause.FAILED)
        if anchor.state is RmJobState.DONE and job.coordinator_end:
            # The batch script went on after its coordinator was ended.
            return JobChange(state=JobState.CANCELLED)
        reason, cause = f"its coordinator ended: {end}", FAILURE_CAUSES.get(anchor.state)
        return JobChange(state=JOB_ENDS[anchor.state], end_reason=reason, cause=cause)
    if job.coordinator_end and anchor.state is RmJobState.RUNNING and at - job.progress.at > timeouts.silent_seconds:
        reason = f"{job.coordinator_end}; its batch script goes on"
        return JobChange(state=JobState.FAILED, end_reason=reason, cause=FailureCause.CANCELLED)
    # The tasks of an anchor that is ending fail since its coordinator has ended; its own end says why.
    if failures.counted >= timeouts.start_failures and anchor.state is not RmJobState.ENDING and job.anchor:
        reason = (
            f"{counted(failures.in_a_row, 'attempt')} in a row to start its tasks failed; the last: {failures.last}"
        )
        return JobChange(state=JobState.FAILED, end_reason=reason, cause=FailureCause.TASKS_FAILED)
    # Until its coordinator calls, the job's end reason is what its anchor waits for: that is where the store keeps
    # ``waits_for`` (``JobChange.applied``).
    waits_for = anchor.reason if job.state is JobState.SUBMITTED and anchor.reason != job.end_reason else None
    if job.anchor and waits_for is None:
        return None
    return JobChange(anchor=None if job.anchor else anchor.handle, waits_for=waits_for)


def _task_change(
    task: Task,
    listed: RmJob | None,
    elapsed: Elapsed,
    timeouts: Timeouts,
    *,
    absence: str,
    job_end: JobState | None,
) -> tuple[TaskChange | None, str]:
    """The task's change of state (None for no change), and why it has to be stopped ("" if it does not).

    ``absence`` says why it has ended where it is not listed; empty if it may be listed again. ``job_end`` is the state
    in which its job has ended, or None. The cases are, in this order:

    1. The resource manager has not listed it for long enough: it has ended, or was never started.
    2. The resource manager says that it has ended.
    3. It is wanted, but its job has ended: it drains, and has ``end_seconds`` from now on to end by itself. A task of a
       cancelled job is stopped at once.
    4. It leaves: it is stopped if it has not begun to run, or takes too long.
    5. It waits for resources: it is given up when that takes too long, and sooner if the resource manager says that it
       will not start it there.
    6. It runs, perhaps on another node than the one it was asked for.
    """
    if listed is None:
        return _unlisted(task, absence, job_ended=job_end is not None), ""

    def change_to(state: TaskState, note: str) -> TaskChange:
        cause = FAILURE_CAUSES.get(listed.state) if state is TaskState.FAILED else None
        node = listed.node if listed.node not in ("", task.node) else None
        return TaskChange(
            job=task.job, task=task.id, state=state, handle=listed.handle, note=note, cause=cause, node=node,
            submitted=listed.submitted or None,
        )  # fmt: skip

    if listed.state.ended:
        failed = task.state.wanted and job_end is None and listed.state is not RmJobState.DONE
        return change_to(TaskState.FAILED if failed else TaskState.RELEASED, listed.reason), ""
    submit_time_known = listed.submitted in (0, task.submitted)
    if task.state.wanted and job_end is not None:
        stop_reason = "its job was cancelled" if job_end is JobState.CANCELLED else ""
        return change_to(TaskState.DRAINING, stop_reason or "its job has ended"), stop_reason
    if not task.state.wanted:
        return None, _stop_reason_of_leaving_task(task, listed, elapsed, timeouts, job_end=job_end)
    if listed.state is RmJobState.PENDING:
        # Only a task that has never run is given up: a late listing may show one that runs as waiting.
        refusal, max_wait = why_refused(listed), timeouts.start_seconds
        if refusal and math.isfinite(max_wait):
            max_wait = min(max_wait, MAX_REFUSED_SECONDS)
        if task.state is TaskState.ASKED and elapsed.in_state > max_wait:
            note = f"not started in {max_wait:g} s: {refusal or listed.reason}"
            return change_to(TaskState.DRAINING, note), "not started in time"
        unchanged = listed.reason == task.note and task.handle and submit_time_known
        return None if unchanged else change_to(task.state, listed.reason), ""
    if task.state is TaskState.ASKED:
        return change_to(TaskState.GRANTED, ""), ""
    # Its coordinator may have reported it before it was listed as running.
    unchanged = submit_time_known and listed.node in ("", task.node)
    return (None if unchanged else change_to(task.state, task.note)), ""


def _unlisted(task: Task, absence: str, *, job_ended: bool) -> TaskChange | None:
    """The change of state of a task that the resource manager does not list; None for no change."""
    if not absence:
        return None
    if task.handle:  # the resource manager had accepted it
        state = TaskState.FAILED if task.state.wanted and not job_ended else TaskState.RELEASED
        return TaskChange(task.job, task.id, state, note=absence, cause=FailureCause.NOT_LISTED)
    state = TaskState.FAILED if task.state.wanted else TaskState.RELEASED
    return TaskChange(task.job, task.id, state, note="was never started", cause=FailureCause.NOT_STARTED)


def _stop_reason_of_leaving_task(
    task: Task, listed: RmJob, elapsed: Elapsed, timeouts: Timeouts, *, job_end: JobState | None
) -> str:
    """Why a task that leaves has to be stopped; empty while it may take its time."""
    if listed.state is RmJobState.PENDING:
        return "is not wanted any more"
    if job_end is JobState.CANCELLED:
        return "its job was cancelled"
    if job_end is not None or task.state is TaskState.DRAINED:
        return f"did not end in {timeouts.end_seconds:g} s" if elapsed.in_state > timeouts.end_seconds else ""
    # It may still hold weights of the job, so its coordinator gets the whole time from when it was told to drain it.
    if elapsed.since_told is None or elapsed.since_told <= timeouts.drain_seconds:
        return ""
    return f"was not drained in {timeouts.drain_seconds:g} s"
