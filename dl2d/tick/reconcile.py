"""Bring what the store believes into line with what the resource manager has. Pure: reads records, returns changes.

The resource manager is always right about what runs; the store is right about what was meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from dl2d.core.cluster import Task, TaskState, parse_tag, task_tag
from dl2d.core.jobs import Job, JobKey, JobState
from dl2d.core.resource_manager import RmJob, RmJobState, RmSnapshot
from dl2d.core.store import JobChange, TaskChange

ANCHOR = "anchor"

#: States in which a task that the manager runs is as it should be.
_AT_WORK = frozenset({TaskState.GRANTED, TaskState.JOINED, TaskState.CONFIRMED})
_JOB_ENDS = {
    RmJobState.DONE: JobState.FINISHED,
    RmJobState.FAILED: JobState.FAILED,
    RmJobState.CANCELLED: JobState.CANCELLED,
    RmJobState.LOST: JobState.LOST,
}


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait, in seconds, before something is done about it."""

    #: A task that was persisted as asked for, but of which the manager knows nothing, was never started.
    unseen: float = 15.0
    #: A task that the manager does not start in this time is given up.
    start: float = 600.0
    #: A leaving task that has not ended in this time is stopped through the manager.
    drain: float = 60.0
    #: An ended job's anchor and tasks have this long to end by themselves.
    end: float = 10.0
    #: A coordinator that has not called for this long is not counted on to carry out a resize.
    silent: float = 60.0
    #: This many tries in a row whose tasks end before they join end the job.
    start_failures: int = 3


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """What has to change: in the store, and in the resource manager."""

    jobs: tuple[tuple[JobKey, JobChange], ...] = ()
    tasks: tuple[TaskChange, ...] = ()
    #: Handles to be stopped, with the reason.
    stops: tuple[tuple[str, str], ...] = ()
    #: Remarks for the log.
    remarks: tuple[str, ...] = ()


def reconcile(
    jobs: Iterable[Job],
    tasks: Iterable[Task],
    ended_jobs: Iterable[Job],
    seen: RmSnapshot,
    *,
    cluster: str,
    patience: Patience,
    failures: Mapping[JobKey, tuple[int, str]] | None = None,
    heard: Mapping[JobKey, float] | None = None,
) -> Reconciliation:
    """Compare.

    Parameters
    ----------
    jobs, tasks
        Those that have not ended, as the store has them; ``tasks`` may belong to jobs that have.
    ended_jobs
        The jobs that have ended and still have live tasks, or ended a short while ago.
    seen
        The resource manager's answer.
    cluster
        Name of this cluster; marks of other clusters are not ours.
    failures
        For each job the number of tries in a row whose tasks ended before they joined, and how the last one ended.
    heard
        For each job whose coordinator calls, since when it has done so without a gap (see ``heard_since``). The time
        that a task has to be drained in counts from there: who has not been told cannot be late.
    """
    tasks = tuple(tasks)
    heard = heard or {}
    by_handle = {job.handle: job for job in seen.jobs}
    by_tag = _Marks(seen.jobs)
    known = {job.key: job for job in (*ended_jobs, *jobs)}
    changes: list[TaskChange] = []
    job_changes: list[tuple[JobKey, JobChange]] = []
    stops: dict[str, str] = {}
    remarks: list[str] = []

    ending: set[JobKey] = {job.key for job in known.values() if job.state.ended}
    for job in known.values():
        anchor = by_handle.get(job.anchor) if job.anchor else by_tag.get(task_tag(job.key, ANCHOR))
        if job.state.ended:
            if anchor is not None and not anchor.state.ended:
                late = job.ended_at is not None and seen.at - job.ended_at > patience.end
                if late or job.state is JobState.CANCELLED:
                    stops[anchor.handle] = f"job {job.key.id} is {job.state}"
            continue
        change = _job_change(job, anchor, seen.at, patience, (failures or {}).get(job.key, (0, "")))
        if change is not None:
            job_changes.append((job.key, change))
            if change.state is not None and change.state.ended:
                ending.add(job.key)

    #: Those of the manager's jobs that are tasks which the store knows.
    matched: set[str] = set()
    for task in tasks:
        found = (by_handle.get(task.handle) if task.handle else None) or by_tag.get(task.tag)
        if found is not None:
            matched.add(found.handle)
        step, stop = _task_change(task, found, seen.at, patience, job_ends=task.job in ending, told=heard.get(task.job))
        if step is not None:
            changes.append(step)
        if stop and found is not None:
            stops[found.handle] = stop

    tags = _Tags(tasks)
    for rm_job in seen.jobs:
        # Most are what the store knows: they are told at a glance, before their marks are read.
        if rm_job.handle in matched or rm_job.state.ended:
            continue
        mark = parse_tag(rm_job.tag)
        if mark is None or mark[0].cluster != cluster:
            continue
        key, name = mark
        owner = known.get(key)
        if name == ANCHOR:
            if owner is None:
                stops[rm_job.handle] = f"anchor of {key.slug}, which the store does not know"
        elif rm_job.tag in tags:
            stops[rm_job.handle] = f"{name} of {key.slug} runs twice"
        else:
            anchor = by_handle.get(owner.anchor if owner else key.id)
            if owner is None and anchor is not None and not anchor.state.ended:
                remarks.append(f"{rm_job.handle} is a task of {key.slug}, which this store does not know; left alone")
            else:
                stops[rm_job.handle] = f"{name} of {key.slug} is not wanted"
    return Reconciliation(tuple(job_changes), tuple(changes), tuple(stops.items()), tuple(remarks))


def heard_since(jobs: Iterable[Job], before: Mapping[JobKey, float], at: float, silent: float) -> dict[JobKey, float]:
    """Since when each job's coordinator has called without a gap of ``silent`` seconds; who is silent is left out.

    ``before`` is the answer of the tick before, empty after a restart: what a coordinator was told by a daemon that is
    gone counts for nothing.
    """
    calling = (job.key for job in jobs if job.address and at - job.progress.at <= silent)
    return {key: before.get(key, at) for key in calling}


class _Marks:
    """Manager's jobs by our mark, put in order when the first is asked for: most are found by their handles."""

    def __init__(self, jobs: Iterable[RmJob]) -> None:
        self._jobs = jobs

    def get(self, tag: str) -> RmJob | None:
        """The job with a mark; where the mark stands twice, one that has not ended comes first."""
        return self._by_tag.get(tag)

    @cached_property
    def _by_tag(self) -> dict[str, RmJob]:
        found: dict[str, RmJob] = {}
        for job in self._jobs:
            if job.tag:
                first = found.setdefault(job.tag, job)
                if first is not job and first.state.ended and not job.state.ended:
                    found[job.tag] = job
        return found


class _Tags:
    """Marks of tasks, made when the first is asked for."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks = tasks

    def __contains__(self, tag: str) -> bool:
        return tag in self._made

    @cached_property
    def _made(self) -> frozenset[str]:
        return frozenset(task.tag for task in self._tasks)


def _job_change(
    job: Job, anchor: RmJob | None, at: float, patience: Patience, failures: tuple[int, str]
) -> JobChange | None:
    if anchor is None:
        # Not started by us yet, or not listed yet: only a job whose anchor was seen can be missed.
        silent = at - max(job.progress.at, float(job.key.submitted)) > patience.unseen
        if not job.anchor or not silent:
            return None
        return JobChange(state=JobState.LOST, end_reason="the resource manager does not know its anchor any more")
    if anchor.state.ended:
        how = anchor.reason or str(anchor.state)
        if anchor.state is RmJobState.DONE and job.state is JobState.SUBMITTED:
            return JobChange(state=JobState.FAILED, end_reason=f"its coordinator ended before it called: {how}")
        return JobChange(state=_JOB_ENDS[anchor.state], end_reason=f"its coordinator ended: {how}")
    count, last = failures
    if count >= patience.start_failures:
        reason = f"{count} tries in a row to start its tasks failed; the last: {last}"
        return JobChange(state=JobState.FAILED, end_reason=reason)
    return JobChange(anchor=anchor.handle) if not job.anchor else None


def _task_change(
    task: Task, found: RmJob | None, at: float, patience: Patience, *, job_ends: bool, told: float | None
) -> tuple[TaskChange | None, str]:
    """The task's next step, and why it has to be stopped (or "")."""
    if found is not None and found.state is RmJobState.RUNNING and task.state in _AT_WORK and not job_ends:
        return None, ""

    def to(state: TaskState, note: str | None = None) -> TaskChange:
        handle = found.handle if found is not None else None
        return TaskChange(job=task.job, task=task.id, state=state, handle=handle, note=note)

    waited = at - task.since
    if found is None:
        if task.handle:
            # The manager listed it once and does not any more: it has ended and was forgotten.
            gone = TaskState.FAILED if task.state.wanted and not job_ends else TaskState.RELEASED
            return to(gone, "the resource manager does not know it any more"), ""
        if waited <= patience.unseen:
            return None, ""
        return to(TaskState.FAILED if task.state.wanted else TaskState.RELEASED, "was never started"), ""
    if found.state.ended:
        by_itself = task.state.wanted and not job_ends and found.state is not RmJobState.DONE
        return to(TaskState.FAILED if by_itself else TaskState.RELEASED, found.reason), ""
    if task.state.wanted and job_ends:
        return to(TaskState.DRAINING, "its job has ended"), "its job has ended" if waited > patience.end else ""
    if not task.state.wanted:
        if found.state is RmJobState.PENDING:
            return None, "is not wanted any more"
        if job_ends or task.state is TaskState.DRAINED:
            return None, f"did not end in {patience.end:g} s" if waited > patience.end else ""
        # It may still hold parameters: only a coordinator that knows and does nothing loses it.
        late = told is not None and at - max(task.since, told) > patience.drain
        return None, f"was not drained in {patience.drain:g} s" if late else ""
    if found.state is RmJobState.PENDING:
        if waited > patience.start:
            return to(TaskState.DRAINING, f"not started in {patience.start:g} s: {found.reason}"), "not started in time"
        return (to(task.state, found.reason) if found.reason != task.note or not task.handle else None), ""
    if task.state is TaskState.ASKED:
        return to(TaskState.GRANTED, ""), ""
    return None, ""
