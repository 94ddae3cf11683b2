"""Reconcile: compares the store with the resource manager and corrects both.

``compare_store_with_listing`` finds the changes; ``reconcile`` carries them out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import structlog
from msgspec import structs

from dl2d.core.cluster import ANCHOR, Snapshot, Task, TaskState, task_tag
from dl2d.core.errors import DuplicateJob, ResourceManagerError
from dl2d.core.jobs import Job, JobKey, JobState, Owner
from dl2d.core.resize_guard_state import GuardState, Requeue
from dl2d.core.resource_manager import GrowthLimit, RmJob, RmJobState, RmListing
from dl2d.core.store import TickStore
from dl2d.tick.apply_plan import start_anchors
from dl2d.tick.avoided_nodes import remember_failing_nodes
from dl2d.tick.count_failed_starts import count_failures
from dl2d.tick.observation.allocated_resources import with_given
from dl2d.tick.observation.exclusive_nodes import with_whole_nodes
from dl2d.tick.observation.observe import LiveJobs, Observed, live_jobs, take_snapshot, without_ending
from dl2d.tick.observation.task_time_in_state import elapsed_times, update_state_since
from dl2d.tick.reconciliation.compare_store_with_listing import Changes, find_changes, withdrawn_tasks
from dl2d.tick.reconciliation.learned_growth_limits import growth_limits_in_force, remember_growth_limits
from dl2d.tick.reconciliation.queued_tasks import is_queued, starting_jobs
from dl2d.tick.reconciliation.static_jobs import follow_static_jobs, unlisted_static_jobs
from dl2d.tick.reconciliation.stop_tasks_and_anchors import ask_to_stop, ended_jobs_to_check
from dl2d.tick.reconciliation.stray_tasks import strays_of_known_jobs, tasks_of_another_database
from dl2d.tick.reconciliation.task_matching import match_listing
from dl2d.tick.reconciliation.unlisted_tasks_and_silent_coordinators import (
    KeptSize,
    Unlisted,
    has_called,
    update_calling_since,
)
from dl2d.tick.tick_context import Context
from dl2d.tick.tick_state import ReconcileHistory, TickState

log = structlog.get_logger()

#: How long an anchor is missing before its job counts as lost, where accounting cannot say yet how it ended: accounting
#: may come back later than the resource manager. And how often it is asked.
_ACCOUNTING_SECONDS = 600.0
_ASK_AGAIN_SECONDS = 60.0
#: The time of a task that does not execute counts only after so many times ``start_seconds``: its node may be booting.
_BOOT_ALLOWANCE_FACTOR = 2
#: How long an anchor that is not listed counts as running while its coordinator reports: coordinators can be started
#: outside of their batch jobs. After that, accounting is asked how the anchor ended.
_CALLING_SECONDS = 600.0
#: A job whose anchor reaches its time limit sooner gets no more tasks: one takes up to a minute to start, and needs
#: time to join and to train.
_MIN_USEFUL_SECONDS = 120.0

#: Why a job gets no tasks if its coordinator is requeued in the resource manager's queue (``idle_coordinators``).
REQUEUED_FOR_ANOTHER_JOB = KeptSize("its coordinator is being requeued so that another job has room")
#: Why a ``starting`` job gets no other tasks.
_STARTS_FROM_QUEUE = KeptSize("others of its first tasks wait in the resource manager's queue")
#: How long the resource manager may take to list a requested requeue.
_LEAVING_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """The cluster after store and resource manager were reconciled."""

    snapshot: Snapshot
    #: The listing of which the snapshot was made.
    listing: RmListing
    #: Elastic jobs with their commands, which the snapshot leaves out.
    jobs: Mapping[JobKey, Job]
    #: The anchors of those that are listed.
    anchors: Mapping[JobKey, RmJob]
    #: Owners of the elastic jobs that are live or have live tasks.
    owners: Mapping[JobKey, Owner]
    #: Elastic jobs that keep what they have, and why:
    #:
    #: - their coordinator has sent no heartbeat for ``Timeouts.silent_seconds``, or only one since such a gap;
    #: - it was ended from outside, says that its training is done, or is put back into the queue;
    #: - their anchor is ending, suspended, close to its time limit, or not listed any more;
    #: - they are in ``starting_from_queue``.
    kept_sizes: Mapping[JobKey, KeptSize]
    #: Jobs with a coordinator that calls, whose first tasks are started from the resource manager's queue.
    starting_from_queue: frozenset[JobKey]
    #: Tasks that wait for any node, which the snapshot does not have.
    queued: tuple[Task, ...]
    #: Jobs whose last attempt to start tasks failed, and whose next attempt has to wait.
    backing_off: frozenset[JobKey]
    #: Limits that tasks were found to wait for a short while ago.
    growth_limits: tuple[GrowthLimit, ...]
    #: Whether a task failed in this tick, so that a decision is due.
    task_failed: bool
    #: The guard's state after this tick; it is in the store.
    guard_state: GuardState
    #: Jobs of the resource manager that are not stopped (``Changes``).
    remarks: tuple[str, ...]
    stray_remarks: tuple[str, ...]
    #: See ``tasks_of_another_database``.
    unknown_tasks: Mapping[str, int]
    #: Next ``TickState.reconcile_history``.
    history: ReconcileHistory

    @property
    def start_nothing(self) -> frozenset[JobKey]:
        """Jobs that keep their size, of which no task would start, not even from the resource manager's queue."""
        return frozenset(self.kept_sizes.keys() - self.starting_from_queue)

    @property
    def unable(self) -> frozenset[JobKey]:
        """Jobs of which no task would start: they keep their size, or wait after failed attempts."""
        return self.backing_off | self.start_nothing


def reconcile(context: Context, state: TickState, observed: Observed, now: float) -> Reconciled:
    """Update the store to match the listing; in modes live and canary start missing anchors and stop what must not run.

    ``now``: seconds on a monotonic clock.

    Raises
    ------
    ResourceManagerError, StoreError
        A change could not be made; the next tick makes it.
    """
    store, listing, acts, timeouts = context.store, observed.listing, context.mode.acts, context.timeouts
    before, history, silent_seconds = observed.elastic, state.reconcile_history, timeouts.silent_seconds
    stored_guard_state = store.guard_state()
    ended_jobs = ended_jobs_to_check(store, before, listing.at)
    match = partial(
        match_listing, before, {job.key: job for job in (*ended_jobs, *before.jobs)},
        cluster=context.cluster, tasks_as_owner=context.tasks_as_owner,
    )  # fmt: skip
    matches = match(listing)
    unlisted_tags = matches.unlisted - _tasks_that_may_run_unreported(before, listing)
    unlisted = history.unlisted.after(unlisted_tags | unlisted_static_jobs(context, observed), listing, now)
    gone = unlisted.gone(timeouts.unseen_listings, timeouts.unseen_seconds) if not listing.incomplete else frozenset()
    # A tag counts as gone after ``unseen_seconds``; that of an anchor whose coordinator calls, and which may run, after
    # ``_CALLING_SECONDS``; and while accounting cannot say how it ended, after ``_ACCOUNTING_SECONDS`` more.
    calling_unlisted = gone & _calling_anchors(before.jobs, listing.at, timeouts.unseen_seconds)
    gone -= {tag for tag in calling_unlisted if unlisted.seconds(tag) < _CALLING_SECONDS}
    ended, unaccounted = _final_states(context, before, gone, unlisted, history.unaccounted, calling_unlisted, now)
    gone -= _tags_with_tasks(before, unaccounted)
    if ended:
        listing = replace(listing, jobs=(*listing.jobs, *ended))
        matches = match(listing)
    static, ended_until = follow_static_jobs(context, observed, gone, history.ended_until)
    calling_since = update_calling_since(
        history.calling_since, before.jobs, listing.at, now, silent_seconds, context.last_heartbeat
    )
    connected = {
        job.key: found for job in before.jobs if (found := context.last_heartbeat(job.key).connected_tasks) is not None
    }
    running_by = listing.at - _BOOT_ALLOWANCE_FACTOR * timeouts.start_seconds
    not_executing = {tag for tag, listed in matches.listed.items() if listed.not_executing}
    state_since = update_state_since(
        history.state_since, before.tasks, now, matches.listed,
        lambda task: task.id in connected.get(task.job, ()) or (task.tag in not_executing and task.since > running_by),
    )  # fmt: skip
    for job in before.jobs:
        if job.key in history.calling_since and job.key not in calling_since:
            log.warning("coordinator is silent", job=job.key.id, seconds=silent_seconds)
    strays_asked_for = strays_of_known_jobs(store, matches)
    changes = find_changes(
        before,
        ended_jobs,
        listing,
        matches,
        gone,
        timeouts=timeouts,
        start_failures=stored_guard_state.start_failures,
        requeued=stored_guard_state.requeued,
        elapsed=elapsed_times(before, state_since, calling_since, now, connected.keys()),
        strays_asked_for=strays_asked_for,
        tasks_as_owner=context.tasks_as_owner,
        listed_again=listing.at == history.unlisted.listed_at,
    )
    # Where dl2d does not act, the next run of a requeued job registers as a static job, whose coordinator starts the
    # tasks by itself.
    if not acts:
        changes = replace(changes, new_jobs=())
    changes = _with_outputs(context, before.jobs, changes)
    elastic = _apply_changes(store, before, changes, listing.at)
    guard_state = _next_guard_state(context, stored_guard_state, before, elastic, changes, matches.listed, listing)
    last_anchor_tried = None
    if acts and context.starts_anchors:
        guard_state, last_anchor_tried = _start_anchors(
            context, guard_state, elastic.jobs, history.last_anchor_tried, listing.at
        )
    # Before anything is stopped: if the resource manager does not answer, the tick ends, and the next one does not see
    # these changes again.
    if guard_state != stored_guard_state:
        store.keep_guard_state(guard_state)
    if acts:
        stops_asked = ask_to_stop(context, changes.stops, guard_state.stops_asked, listing.at)
        if stops_asked != guard_state.stops_asked:
            guard_state = replace(guard_state, stops_asked=stops_asked)
            store.keep_guard_state(guard_state)
    queued = tuple(filter(is_queued, elastic.tasks))
    placed = (
        elastic if not queued else replace(elastic, tasks=tuple(task for task in elastic.tasks if not is_queued(task)))
    )
    shown = placed if acts else placed + without_ending(static, listing)
    shown, listing = with_whole_nodes(shown, listing)
    snapshot = take_snapshot(shown, listing, state.slot + 1, guard_state.avoided_nodes, context.deciders.placement)
    kept_sizes = {
        job.key: kept
        for job in elastic.jobs
        if (kept := _kept_size_of(context, job, matches.listed, calling_unlisted, calling_since.keys(), listing.at))
        or (job.key in guard_state.requeued and (kept := REQUEUED_FOR_ANOTHER_JOB))
    }
    from_queue = starting_jobs(elastic.jobs, elastic.tasks, state.queue_history) - kept_sizes.keys()
    return Reconciled(
        snapshot=snapshot,
        listing=listing,
        jobs={job.key: job for job in elastic.jobs},
        anchors={job.key: anchor for job in elastic.jobs if (anchor := matches.listed.get(task_tag(job.key, ANCHOR)))},
        owners={job.key: job.owner for job in (*ended_jobs, *before.jobs, *elastic.jobs)},
        kept_sizes=kept_sizes | dict.fromkeys(from_queue, _STARTS_FROM_QUEUE),
        starting_from_queue=from_queue,
        queued=queued,
        backing_off=_backing_off(guard_state, listing.at, context.guard_rules.backoff),
        growth_limits=growth_limits_in_force(guard_state, elastic.jobs, snapshot.tasks, listing.at),
        task_failed=any(change.state is TaskState.FAILED for change in changes.tasks),
        guard_state=guard_state,
        remarks=changes.remarks,
        stray_remarks=changes.stray_remarks,
        unknown_tasks=tasks_of_another_database(matches, listing, strays_asked_for),
        history=ReconcileHistory(
            ended_until=ended_until,
            last_anchor_tried=last_anchor_tried,
            unlisted=unlisted,
            unaccounted=unaccounted,
            state_since=state_since,
            calling_since=calling_since,
        ),
    )


def _final_states(
    context: Context,
    live: LiveJobs,
    gone: frozenset[str],
    unlisted: Unlisted,
    asked_before: Mapping[str, float],
    calling: Collection[str],
    now: float,
) -> tuple[Sequence[RmJob], Mapping[str, float]]:
    """How tasks and anchors ended that count as gone, as far as accounting says, and the next ``unaccounted``.

    An anchor of which it cannot say yet how it ended is missing for longer, together with the tasks of its job, and is
    asked for again; for so much longer if its coordinator is among those that are ``calling``.
    """

    def may_be_told(tag: str) -> bool:
        return unlisted.seconds(tag) < _ACCOUNTING_SECONDS + (_CALLING_SECONDS if tag in calling else 0.0)

    anchors = {tag: job.anchor for job in live.jobs if job.anchor and (tag := task_tag(job.key, ANCHOR)) in gone}
    waiting = {
        tag: asked_at
        for tag, asked_at in asked_before.items()
        if tag in anchors and now - asked_at < _ASK_AGAIN_SECONDS and may_be_told(tag)
    }
    tags = gone - _tags_with_tasks(live, waiting)
    handles = [task.handle for task in live.tasks if task.handle and task.tag in tags]
    handles += [handle for tag, handle in anchors.items() if tag in tags]
    if not handles:
        return (), waiting
    try:
        found = context.final_states(handles)
        not_ended = {job.handle for job in found if not job.state.ended}
    except ResourceManagerError as error:
        log.warning("cannot ask the resource manager how jobs ended that it no longer lists", error=str(error))
        found, not_ended = (), set(handles)
    waiting |= {tag: now for tag, handle in anchors.items() if tag in tags and handle in not_ended and may_be_told(tag)}
    return [job for job in found if job.state.ended], waiting


def _tags_with_tasks(live: LiveJobs, anchors: Collection[str]) -> frozenset[str]:
    """Tags of anchors and of all tasks of their jobs."""
    jobs = {job.key for job in live.jobs if task_tag(job.key, ANCHOR) in anchors} if anchors else ()
    return frozenset(anchors).union(task.tag for task in live.tasks if task.job in jobs)


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
            if change.cause is not None and change.cause.is_own and context.starts_anchors and key in known
            else (key, change)
            for key, change in changes.jobs
        ),
        tasks=tuple(
            structs.replace(change, note=add_output(change.note or "", change.job, change.task))
            if change.cause is not None and change.cause.is_own and change.job in known
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


def _next_guard_state(
    context: Context,
    guard_state: GuardState,
    before: LiveJobs,
    elastic: LiveJobs,
    changes: Changes,
    listed: Mapping[str, RmJob],
    listing: RmListing,
) -> GuardState:
    """Guard state after these changes, which lead from the live jobs ``before`` to ``elastic``.

    ``listed`` has the resource manager's job of each task, by tag.
    """
    present, at = {job.key for job in elastic.jobs}, listing.at
    failures = count_failures(before.tasks, changes.tasks, guard_state.start_failures, at)
    for key, change in changes.jobs:
        if change.anchor:  # its start had been carried out, although it seemed to fail
            failures.pop(key, None)
    withdrawn = withdrawn_tasks(elastic.jobs, before.tasks, changes.tasks, listed)
    found = _resizes_seen(guard_state, before.tasks, present, at, context)
    # Tasks of suspended jobs fail since they do not hear of their coordinator, and not because of their nodes.
    anchors = {job.key: listed.get(task_tag(job.key, ANCHOR)) for job in before.jobs}
    suspended = {key for key, anchor in anchors.items() if anchor is not None and anchor.not_executing}
    of_nodes = [change for change in changes.tasks if change.job not in suspended]
    found = remember_failing_nodes(found, elastic.jobs, before.tasks, of_nodes, withdrawn, at)
    _, tasks = with_given(before.jobs, before.tasks, listing) if withdrawn else ((), ())
    found = remember_growth_limits(found, elastic.jobs, tasks, withdrawn, at)
    start_failures = {key: count for key, count in failures.items() if key in present}
    requeued = guard_state.requeued and _still_requeued(guard_state, elastic.jobs, at)
    return replace(found, start_failures=start_failures, requeued=requeued)


def _still_requeued(guard_state: GuardState, jobs: Iterable[Job], at: float) -> dict[JobKey, Requeue]:
    """Next ``GuardState.requeued``.

    The new run of a requeued job takes over the entry and keeps it until its coordinator reports; an entry whose
    requeue is not listed within ``_LEAVING_SECONDS`` is dropped.
    """
    by_id = {(key.cluster, key.id): (key, found) for key, found in sorted(guard_state.requeued.items())}
    found = {}
    for job in jobs:
        key, entry = by_id.get((job.key.cluster, job.key.id), (None, None))
        if key is None or entry is None:
            continue
        if job.key == key and entry.at and at - entry.at < _LEAVING_SECONDS and job.state is JobState.READY:
            found[key] = entry
        elif job.state is JobState.SUBMITTED and (job.key != key or not entry.at):
            found[job.key] = entry._replace(at=0.0)
    return found


def _start_anchors(
    context: Context, guard_state: GuardState, jobs: Iterable[Job], last: JobKey | None, at: float
) -> tuple[GuardState, JobKey | None]:
    """Start missing anchors, the one after ``last`` first; the guard state and ``last_anchor_tried`` after that."""
    submitted = [job for job in jobs if job.state is JobState.SUBMITTED and not job.anchor]
    last_tried, failures = start_anchors(context, submitted, last, guard_state.start_failures, at)
    return replace(guard_state, start_failures=failures), last_tried


def _resizes_seen(
    guard_state: GuardState, tasks: Iterable[Task], jobs: Collection[JobKey], at: float, context: Context
) -> GuardState:
    """The guard state with the resizes and starts that live tasks show, not those that were only decided.

    A time later than ``at`` means that the clock was set back. A remembered one becomes ``at``. A task's counts as
    ``at`` only if nothing is remembered of its job; otherwise each tick would restart the cool-down.
    """
    if not context.guard_rules.need_resizes:
        return replace(guard_state, resized_at={}, started_at={})
    resized = {key: min(resized_at, at) for key, resized_at in guard_state.resized_at.items() if key in jobs}
    started = {tag: min(asked_at, at) for tag, asked_at in guard_state.started_at.items()}
    for task in tasks:
        if task.job in jobs and task.since <= at:
            resized[task.job] = max(resized.get(task.job, 0.0), task.since)
        elif task.job in jobs:
            resized.setdefault(task.job, at)
        if task.tag not in started and at - context.slot_seconds < task.asked_at <= at:
            started[task.tag] = task.asked_at
    recent = {tag: asked_at for tag, asked_at in started.items() if asked_at > at - context.slot_seconds}
    return replace(guard_state, resized_at=resized, started_at=recent)


def _backing_off(guard_state: GuardState, at: float, backoff_seconds: float) -> frozenset[JobKey]:
    """Jobs whose next attempt to start tasks has to wait."""
    return frozenset(key for key, failed in guard_state.start_failures.items() if at < failed.retry_at(backoff_seconds))


def _kept_size_of(
    context: Context,
    job: Job,
    listed: Mapping[str, RmJob],
    calling_unlisted: Collection[str],
    calling: Collection[JobKey],
    at: float,
) -> KeptSize | None:
    """Why a job keeps what it has: its coordinator is silent, or admits no tasks, or ends soon; None if none holds."""
    tag = task_tag(job.key, ANCHOR)
    anchor = listed.get(tag)
    if job.coordinator_end:
        return KeptSize(job.coordinator_end)
    heartbeat = context.last_heartbeat(job.key)
    if heartbeat.training_done:
        return KeptSize("its training is done, and its tasks end")
    if anchor is not None and anchor.state is RmJobState.ENDING:
        return KeptSize("the resource manager is ending its coordinator")
    if anchor is not None and anchor.not_executing:
        return KeptSize("its coordinator is suspended, or its nodes are being prepared", not_executing=True)
    if anchor is not None and anchor.time_limit_at and anchor.time_limit_at - at < _MIN_USEFUL_SECONDS:
        return KeptSize(f"its coordinator reaches its time limit in less than {_MIN_USEFUL_SECONDS / 60:g} minutes")
    if tag in calling_unlisted:
        return KeptSize("the resource manager does not list its coordinator, which still reports")
    if job.key in calling:
        # The one heartbeat may be from before the silence; if the training has ended since, the next one says so.
        once = "its coordinator has reported only once since it was silent"
        return KeptSize(once) if heartbeat.after_gap else None
    silent_for = at - job.progress.at
    if not job.progress.at or silent_for <= 0:  # it has never reported, or the clock was set back
        return KeptSize("its coordinator is silent")
    return KeptSize(f"its coordinator had not reported for {silent_for:.0f} s")


def _calling_anchors(jobs: Iterable[Job], at: float, seconds: float) -> frozenset[str]:
    """Tags of the anchors whose coordinator has called within these seconds: it runs, even if they are not listed."""
    return frozenset(task_tag(job.key, ANCHOR) for job in jobs if has_called(job, at, seconds))


def _tasks_that_may_run_unreported(live: LiveJobs, listing: RmListing) -> frozenset[str]:
    """Tags of tasks that may run, of jobs whose containers have not all reported to the resource manager."""
    jobs = {job.key for job in live.jobs if job.anchor in listing.unreported}
    return frozenset(task.tag for task in live.tasks if task.job in jobs and task.has_begun)
