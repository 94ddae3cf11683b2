"""Numbers of consecutive failed attempts to start the tasks of each job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dl2d.core.backoff_after_failed_starts import AttemptKind, StartFailures
from dl2d.core.cluster import Task, TaskState
from dl2d.core.jobs import FailureCause, JobKey
from dl2d.core.plan_of_starts_and_stops import Outcome
from dl2d.core.store import TaskChange

NO_FAILURES = StartFailures()
#: Ten attempts that ended from these causes count as one. They are not ignored, since a job may itself make nodes fail.
_FROM_OUTSIDE = (FailureCause.CANCELLED, FailureCause.REQUEUED, FailureCause.NODE_LOST)


def count_failures(
    tasks: Iterable[Task], changes: Iterable[TaskChange], failures: Mapping[JobKey, StartFailures], at: float
) -> dict[JobKey, StartFailures]:
    """Failed attempts of each job after a tick that makes these changes to these tasks.

    An attempt of a job fails when one of its tasks ends before it has joined. It counts

    - in ``only_delaying`` if the job trains, that is, has confirmed tasks: it must not end for a failed growth;
    - in ``own`` if a task ended by itself;
    - else in ``from_outside`` if a task was cancelled or requeued, its node was lost, its coordinator heard nothing of
      it, or it waited and is no longer listed (YARN's manager keeps waiting tasks in memory only);
    - else in ``only_delaying``: a task was preempted.

    Tasks that were asked for before the last failure belong to the attempt that failed then, and do not count again. A
    task that never reached the resource manager does not count, since the job did not cause that.
    """
    before = {(task.job, task.id): task for task in tasks}
    confirmed = _last_confirmed(before.values())
    counted = _without_successes(failures, confirmed, at)
    ended: dict[JobKey, str] = {}
    from_outside: dict[JobKey, str] = {}
    only_delaying: dict[JobKey, str] = {}
    for change in changes:
        task = before[change.job, change.task]
        if task.asked_at < counted.get(change.job, NO_FAILURES).at:
            continue
        if gave_up_unconnected(task, change):
            from_outside[change.job] = f"{change.task}: {change.note}"
        if change.state is TaskState.FAILED and task.state.rank < TaskState.JOINED.rank and task.handle:
            may_have_waited = task.state is TaskState.ASKED and change.cause is FailureCause.NOT_LISTED
            is_from_outside = may_have_waited or change.cause in _FROM_OUTSIDE
            is_preempted = change.cause is FailureCause.PREEMPTED
            found = only_delaying if is_preempted else from_outside if is_from_outside else ended
            found[change.job] = f"{change.task}: {change.note or 'no reason given'}"
    for key, reason in (only_delaying | from_outside | ended).items():
        kind: AttemptKind = "only_delaying"
        if key not in confirmed and key in (ended.keys() | from_outside.keys()):
            kind = "own" if key in ended else "from_outside"
        counted[key] = counted.get(key, NO_FAILURES).after(kind, reason, at)
    return counted


def gave_up_unconnected(task: Task, change: TaskChange) -> bool:
    """Whether a change gives up a task of a live job of which its coordinator has heard nothing.

    Other granted tasks begin to drain with the end of their job.
    """
    return task.state is TaskState.GRANTED and change.state is TaskState.DRAINING


def _last_confirmed(tasks: Iterable[Task]) -> dict[JobKey, float]:
    """When the newest confirmed task of each job was asked for; jobs without confirmed tasks are left out."""
    asked_at: dict[JobKey, float] = {}
    for task in tasks:
        if task.state is TaskState.CONFIRMED:
            asked_at[task.job] = max(asked_at.get(task.job, 0.0), task.asked_at)
    return asked_at


def _without_successes(
    failures: Mapping[JobKey, StartFailures], confirmed: Mapping[JobKey, float], at: float
) -> dict[JobKey, StartFailures]:
    """The failures without those before a success: a task that was asked for after the last failure is confirmed.

    Of a job that trains, failures from before it trained only delay the next attempt.
    """
    counted: dict[JobKey, StartFailures] = {}
    for key, count in failures.items():
        # A failure in the future means that the clock was set back.
        known = count._replace(at=min(count.at, at))
        if key not in confirmed:
            counted[key] = known
        elif confirmed[key] < known.at:
            counted[key] = StartFailures(last=known.last, at=known.at, only_delaying=known.in_a_row)
    return counted


def count_refused(failures: Mapping[JobKey, StartFailures], outcome: Outcome, at: float) -> dict[JobKey, StartFailures]:
    """Failed attempts of each job after the starts of a tick, of which the resource manager has refused some.

    However many starts of a job were refused, they are one attempt, and one that already failed in this tick is not
    counted again. It only delays the next one, unless the resource manager never starts such tasks.
    """
    counted = dict(failures)
    for failure in outcome.failures:
        known = counted.get(failure.job, NO_FAILURES)
        is_new = known.at < at or not known.in_a_row
        if failure.refused and is_new:
            kind: AttemptKind = "own" if failure.never_starts else "only_delaying"
            counted[failure.job] = known.after(kind, f"{failure.what}: {failure.error}", at)
    return counted
