"""Compare: the changes of jobs and tasks after which the store and the resource manager's listing agree.

The resource manager is right about what runs, the store about what should run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import NamedTuple

from dl2d.core.backoff_after_failed_starts import StartFailures
from dl2d.core.cluster import ANCHOR, NOT_EXECUTING, Task, TaskState, task_tag
from dl2d.core.errors import counted
from dl2d.core.jobs import FailureCause, Job, JobKey, JobState
from dl2d.core.resize_guard_state import Requeue
from dl2d.core.resource_manager import FAILURE_CAUSES, JOB_ENDS, RmIdentity, RmJob, RmJobState, RmListing
from dl2d.core.store import JobChange, TaskChange
from dl2d.tick.count_failed_starts import NO_FAILURES
from dl2d.tick.observation.observe import LiveJobs
from dl2d.tick.observation.task_time_in_state import Elapsed
from dl2d.tick.reconciliation.queued_tasks import is_queued
from dl2d.tick.reconciliation.stop_tasks_and_anchors import must_stop_anchor
from dl2d.tick.reconciliation.stray_tasks import compare_strays
from dl2d.tick.reconciliation.task_matching import Matches, may_stop
from dl2d.tick.tick_context import Timeouts

#: Why a task or anchor that is not listed has ended.
NOT_LISTED = "is not listed any more"
REPLACED = "was requeued, or its id was reused"

#: A listed job that has to be stopped, its job as far as it is known, and the reason.
_Stop = tuple[RmJob, Job | None, str]
#: How long a task that the resource manager refuses to start may wait; shorter than for one that waits for room, and
#: long enough for tasks that leave to make room in a limit.
MAX_REFUSED_SECONDS = 30.0
#: How long a task that a running job lacks of its minimum size may wait for a limit. This is longer than for a task
#: that waits for room, since a task that is submitted again goes to the end of the queue.
MAX_FLOOR_IN_LIMIT_SECONDS = 3600.0


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
    #: Tasks and anchors that have to end and are not stopped, since they may not be dl2d's; one sentence each.
    remarks: tuple[str, ...] = ()
    #: The same of strays, whose tags users may have written.
    stray_remarks: tuple[str, ...] = ()


def find_changes(
    live: LiveJobs,
    ended_jobs: Iterable[Job],
    listing: RmListing,
    matches: Matches,
    gone: Collection[str],
    *,
    timeouts: Timeouts,
    start_failures: Mapping[JobKey, StartFailures],
    elapsed: Mapping[str, Elapsed],
    requeued: Mapping[JobKey, Requeue] = MappingProxyType({}),
    strays_asked_for: Mapping[RmIdentity, Job | None] = MappingProxyType({}),
    tasks_as_owner: bool = True,
    listed_again: bool = False,
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
        Tags of tasks and anchors that have ended, since enough complete listings lack them (``Unlisted.gone``).
    start_failures
        Failed attempts to start tasks, of jobs that have any.
    elapsed
        For how long each task has been in its state, by tag. A task's time to drain counts only while its coordinator
        calls, since it was not told to drain it before.
    requeued
        Jobs whose coordinators leave for others, or wait since they did (``GuardState.requeued``).
    strays_asked_for
        The job of each stray that the store has ever asked for, by identity.
    tasks_as_owner
        Whether tasks run as the user who owns their job.
    listed_again
        Whether the tick before had the same listing. A task that waits is not given up then: where it is refused, two
        listings have to say so.
    """
    jobs = {job.key: job for job in (*ended_jobs, *live.jobs)}
    inputs = _Inputs(
        matches, gone, timeouts, start_failures, elapsed, requeued, listing.at,
        may_give_up=not (listing.incomplete or listed_again),
    )  # fmt: skip
    of_jobs = _job_changes(jobs.values(), inputs, _jobs_that_never_start(live, inputs) if inputs.may_give_up else {})
    task_changes, task_stops = _task_changes(live.tasks, jobs, inputs, of_jobs.ended_states)
    stops = [*of_jobs.stops, *task_stops]
    stray_stops: list[_Stop] = []
    stray_remarks: list[str] = []
    if matches.strays:
        live_tags = {task.tag for task in live.tasks} | {task_tag(job.key, ANCHOR) for job in live.jobs}
        stray_stops, stray_remarks = compare_strays(matches, live_tags, strays_asked_for)
    if listing.incomplete:
        # What a user has ordered follows from the store, and not from what the listing may lack.
        ordered = {job.key for job in ended_jobs if job.state is JobState.CANCELLED}
        stops = [stop for stop in stops if stop[1] is not None and stop[1].key in ordered]
        stray_stops = []
    allowed, remarks = _allowed_stops(stops, live.tasks, tasks_as_owner=tasks_as_owner)
    strays_allowed, not_allowed = _allowed_stops(stray_stops, live.tasks, tasks_as_owner=tasks_as_owner)
    return Changes(
        jobs=tuple(of_jobs.changes),
        new_jobs=tuple(of_jobs.new_jobs),
        tasks=tuple(task_changes),
        stops=(*allowed, *strays_allowed),
        remarks=tuple(remarks),
        stray_remarks=(*stray_remarks, *not_allowed),
    )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What ``find_changes`` was given about jobs and tasks."""

    matches: Matches
    gone: Collection[str]
    timeouts: Timeouts
    start_failures: Mapping[JobKey, StartFailures]
    elapsed: Mapping[str, Elapsed]
    requeued: Mapping[JobKey, Requeue]
    #: When the resource manager was asked.
    at: float
    #: Whether tasks that wait for too long are given up; not with an incomplete listing, as nothing can be stopped
    #: then, and not with the listing of the tick before.
    may_give_up: bool

    def why_gone(self, tag: str) -> str:
        """Why a task or anchor that is not listed has ended; empty if it may be listed again."""
        return REPLACED if tag in self.matches.replaced else NOT_LISTED if tag in self.gone else ""


class _JobChanges(NamedTuple):
    changes: list[tuple[JobKey, JobChange]]
    new_jobs: list[Job]
    #: Anchors of ended jobs.
    stops: list[_Stop]
    #: States of the jobs that have ended, and of those that end in this tick.
    ended_states: dict[JobKey, JobState]


def _job_changes(jobs: Iterable[Job], inputs: _Inputs, never_start: Mapping[JobKey, str]) -> _JobChanges:
    """The changes of jobs by their anchors, the next runs of requeued ones, and the anchors that have to be stopped.

    ``never_start`` says why jobs that have not trained never will.
    """
    made = _JobChanges([], [], [], {})
    for job in jobs:
        anchor = inputs.matches.listed.get(task_tag(job.key, ANCHOR))
        if job.state.ended:
            made.ended_states[job.key] = job.state
            if anchor and not anchor.state.ended and must_stop_anchor(job, anchor, inputs.at, inputs.timeouts):
                made.stops.append((anchor, job, f"job {job.key.id} is {job.state}"))
            continue
        if (requeued := inputs.matches.requeued.get(job.key)) is not None:
            new_job, end = _requeued(job, requeued, inputs.requeued.get(job.key))
            made.new_jobs.append(new_job)
            made.changes.append((job.key, end))
            made.ended_states[job.key] = JobState.LOST
            continue
        change = _job_change(job, anchor, inputs)
        if (reason := never_start.get(job.key)) is not None and (change is None or change.state is None):
            change = JobChange(state=JobState.FAILED, end_reason=reason, cause=FailureCause.REFUSED)
        if change is not None:
            made.changes.append((job.key, change))
            if change.state is not None and change.state.ended:
                made.ended_states[job.key] = change.state
    return made


def _jobs_that_never_start(live: LiveJobs, inputs: _Inputs) -> dict[JobKey, str]:
    """Why jobs that have not trained never will: the resource manager says in two listings that it never starts a task
    that is of their minimum size.
    """
    ready = {job.key: job for job in live.jobs if job.state is JobState.READY}
    lacked = _lacked_tasks(live.tasks, ready)
    reasons: dict[JobKey, str] = {}
    for task in live.tasks:
        listed = inputs.matches.listed.get(task.tag)
        if (
            task.tag in lacked
            and listed is not None
            and listed.state is RmJobState.PENDING
            and listed.never_starts
            and listed.reason == task.note
            and inputs.elapsed[task.tag].in_state > MAX_REFUSED_SECONDS
        ):
            reasons.setdefault(task.job, f"{task.id} can never start: {listed.never_starts}")
    return reasons


def _task_changes(
    tasks: Sequence[Task], jobs: Mapping[JobKey, Job], inputs: _Inputs, ended_states: Mapping[JobKey, JobState]
) -> tuple[list[TaskChange], list[_Stop]]:
    """The changes of the live tasks, and which of them have to be stopped."""
    changes: list[TaskChange] = []
    stops: list[_Stop] = []
    running = {key: job for key, job in jobs.items() if job.state is JobState.RUNNING}
    of_floors = _lacked_tasks(tasks, running)
    for task in tasks:
        listed = inputs.matches.listed.get(task.tag)
        change, stop_reason = _task_change(
            task, listed, inputs, job_end=ended_states.get(task.job), is_lacked_of_floor=task.tag in of_floors
        )
        if change is not None:
            changes.append(change)
        if stop_reason and listed is not None:
            stops.append((listed, jobs.get(task.job), stop_reason))
    return changes, stops


def _lacked_tasks(tasks: Sequence[Task], jobs: Mapping[JobKey, Job]) -> set[str]:
    """Tags of the tasks that have not begun to run and that these jobs lack of their minimum sizes."""
    has = Counter(task.group for task in tasks if task.state.wanted and task.has_begun)
    found = set()
    for task in tasks:
        job = jobs.get(task.job)
        if task.state is TaskState.ASKED and job is not None:
            if has[task.group] < job.request.min_size.count(task.role):
                found.add(task.tag)
            has[task.group] += 1
    return found


def _allowed_stops(
    stops: Sequence[_Stop], tasks: Iterable[Task], *, tasks_as_owner: bool
) -> tuple[list[tuple[RmJob, str]], list[str]]:
    """The stops of what is dl2d's beyond doubt, and one sentence on each of the others."""
    allowed: list[tuple[RmJob, str]] = []
    remarks: list[str] = []
    known = {(task.job, task.handle, task.submitted) for task in tasks} if stops else frozenset()
    for listed, job, reason in stops:
        if job is not None and may_stop(listed, job, known, tasks_as_owner=tasks_as_owner):
            allowed.append((listed, reason))
        else:
            remarks.append(f"{listed.handle} of user {listed.user} is not stopped ({reason}): it has no tag of dl2d, "
                           "or belongs to somebody else")  # fmt: skip
    return allowed, remarks


def _requeued(job: Job, listed: RmJob, why: Requeue | None) -> tuple[Job, JobChange]:
    """The job that goes on where a requeued one was, and the change that ends the latter.

    They are two jobs, so that the tasks, the token and the coordinator of the first are not used by the second.
    """
    key = job.key._replace(submitted=listed.submitted)
    new = Job(key=key, request=job.request, owner=job.owner, launch=job.launch, anchor=job.anchor)
    reason = f"was requeued by the resource manager, and goes on from its checkpoint as {key.slug}"
    if why is not None:
        reason = f"was requeued as {key.slug}: {why.reason}"
    return new, JobChange(state=JobState.LOST, end_reason=reason, cause=FailureCause.REQUEUED)


def _job_change(job: Job, anchor: RmJob | None, inputs: _Inputs) -> JobChange | None:
    """The change of a job that has not ended, by the state of its anchor; None for no change."""
    timeouts, failures = inputs.timeouts, inputs.start_failures.get(job.key, NO_FAILURES)
    if anchor is None:
        if not job.anchor:  # it has not been started yet
            if job.state is not JobState.SUBMITTED or failures.counted < timeouts.start_failures:
                return None
            tried = counted(failures.in_a_row, "attempt")
            reason = f"{tried} in a row to start its coordinator failed; the last: {failures.last}"
            return JobChange(state=JobState.FAILED, end_reason=reason, cause=FailureCause.TASKS_FAILED)
        if not (why_gone := inputs.why_gone(task_tag(job.key, ANCHOR))):
            return None
        return JobChange(state=JobState.LOST, end_reason=f"its coordinator {why_gone}", cause=FailureCause.NOT_LISTED)
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
    if (
        job.coordinator_end
        and anchor.state is RmJobState.RUNNING
        and inputs.at - job.progress.at > timeouts.silent_seconds
    ):
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
    reason, why = anchor.reason, inputs.requeued.get(job.key)
    if why is not None and anchor.begins_later:
        reason = f"starts again later ({anchor.reason}): {why.reason}"
    waits_for = reason if job.state is JobState.SUBMITTED and reason != job.end_reason else None
    if job.anchor and waits_for is None:
        return None
    return JobChange(anchor=None if job.anchor else anchor.handle, waits_for=waits_for)


def _task_change(
    task: Task, listed: RmJob | None, inputs: _Inputs, *, job_end: JobState | None, is_lacked_of_floor: bool
) -> tuple[TaskChange | None, str]:
    """The task's change of state (None for no change), and why it has to be stopped ("" if it does not).

    ``job_end`` is the state in which its job has ended, or None. ``is_lacked_of_floor``: a running job lacks it of its
    minimum size. The cases are, in this order:

    1. The resource manager has not listed it for long enough: it has ended, or was never started.
    2. The resource manager says that it has ended.
    3. It is wanted, but its job has ended: it drains, and has ``end_seconds`` from now on to end by itself. A task of a
       cancelled job is stopped at once.
    4. It leaves: it is stopped if it has not begun to run, or takes too long.
    5. It had joined, and the resource manager has been ending it for longer than ``end_seconds``, by its epilog for
       example: it drains, so that it is replaced and no other task leaves in its place.
    6. It waits for resources. It is given up after

       =====================================================================  ===============================
       in the resource manager's queue, without a node (``queued_tasks``)     never
       of the floor, for a limit: a new one would be the last to get it       ``MAX_FLOOR_IN_LIMIT_SECONDS``
       refused, as two listings in a row say                                  ``MAX_REFUSED_SECONDS``
       else; from when a limit was listed last                                ``start_seconds``
       =====================================================================  ===============================

    7. It runs, perhaps on another node than the one it was asked for. It is given up if its coordinator calls and has
       heard nothing of it for ``start_seconds``: neither its dl2-run nor its process has connected. If it is suspended,
       or its node is being prepared, these seconds begin ``2 * start_seconds`` after it was granted; its note says so.
    """
    elapsed, timeouts, may_give_up = inputs.elapsed[task.tag], inputs.timeouts, inputs.may_give_up
    if listed is None:
        return _unlisted(task, inputs.why_gone(task.tag), job_ended=job_end is not None), ""

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
    if may_give_up and task.state.rank >= TaskState.JOINED.rank and (elapsed.stopping or 0.0) > timeouts.end_seconds:
        note = f"the resource manager has been ending it for more than {timeouts.end_seconds:g} s"
        return change_to(TaskState.DRAINING, note), ""
    if listed.state is RmJobState.PENDING:
        unchanged = listed.reason == task.note and task.handle and submit_time_known
        if is_queued(task):
            return None if unchanged else change_to(task.state, listed.reason), ""
        # Only a task that has never run is given up: a late listing may show one that runs as waiting.
        refusal, max_wait = why_refused(listed), timeouts.start_seconds
        waited = elapsed.in_state if elapsed.without_limit is None else elapsed.without_limit
        if is_lacked_of_floor and listed.limit is not None:
            max_wait = max(max_wait, MAX_FLOOR_IN_LIMIT_SECONDS)
        # Two listings have to say so: slurmctld may refuse a node once, for example just after its start.
        elif refusal and listed.reason == task.note:
            max_wait = min(max_wait, MAX_REFUSED_SECONDS)
        if may_give_up and task.state is TaskState.ASKED and waited > max_wait:
            note = f"not started in {max_wait:g} s: {refusal or listed.reason}"
            return change_to(TaskState.DRAINING, note), "not started in time"
        return None if unchanged else change_to(task.state, listed.reason), ""
    if task.state is TaskState.ASKED:
        return change_to(TaskState.GRANTED, ""), ""
    if may_give_up and elapsed.unconnected is not None and elapsed.unconnected > timeouts.start_seconds:
        why = "it has resources and does not execute" if listed.not_executing else "although it runs"
        note = f"did not reach its job's coordinator in {timeouts.start_seconds:g} s, {why}"
        return change_to(TaskState.DRAINING, note), "did not reach its coordinator"
    # Its coordinator may have reported it before it was listed as running.
    note = _note_of_running(task, listed, inputs.at)
    unchanged = submit_time_known and listed.node in ("", task.node) and note == task.note
    return (None if unchanged else change_to(task.state, note)), ""


def _note_of_running(task: Task, listed: RmJob, at: float) -> str:
    """The note of a task that holds its resources: why and since when it does not execute, if so."""
    if not listed.not_executing:
        return "" if task.why_not_executing else task.note
    why = f"{NOT_EXECUTING}{listed.reason or 'the resource manager does not say why'} since "
    return task.note if task.note.startswith(why) else f"{why}{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _unlisted(task: Task, why_gone: str, *, job_ended: bool) -> TaskChange | None:
    """The change of state of a task that the resource manager does not list; None for no change."""
    if not why_gone:
        return None
    if task.handle:  # the resource manager had accepted it
        state = TaskState.FAILED if task.state.wanted and not job_ended else TaskState.RELEASED
        cause = FailureCause.REQUEUED if why_gone == REPLACED else FailureCause.NOT_LISTED
        return TaskChange(task.job, task.id, state, note=why_gone, cause=cause)
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


def why_refused(listed: RmJob) -> str:
    """Why a task that waits will not be started where it waits; empty if it only waits for room."""
    if listed.state is not RmJobState.PENDING:
        return ""
    if listed.limit is not None:
        return listed.limit.reason
    return listed.reason or "the node is refused" if listed.node_refused else ""


def withdrawn_tasks(
    jobs: Iterable[Job], tasks: Iterable[Task], changes: Iterable[TaskChange], listed: Mapping[str, RmJob]
) -> dict[str, RmJob]:
    """The resource manager's job of each task that a tick withdraws since it was not started in time, by tag.

    ``changes`` are those that the tick makes to ``tasks``, and ``jobs`` the live ones after it. ``listed`` has the
    resource manager's job of each task, by tag.
    """
    live = {job.key for job in jobs}
    leaving = {
        (change.job, change.task) for change in changes if change.state is TaskState.DRAINING and change.job in live
    }
    asked = [task.tag for task in tasks if task.state is TaskState.ASKED and (task.job, task.id) in leaving]
    return {tag: listed[tag] for tag in asked if tag in listed and listed[tag].state is RmJobState.PENDING}
