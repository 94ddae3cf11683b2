"""Failed attempts to start the tasks of jobs: what counts as one, and when a job begins anew. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dl2d.core.cluster import Task, TaskState
from dl2d.core.guard_memory import StartFailures
from dl2d.core.jobs import FailureCause, JobKey
from dl2d.core.store import TaskChange
from dl2d.core.tick_plan import Outcome

NO_FAILURES = StartFailures()


def count_failures(
    tasks: Iterable[Task], changes: Iterable[TaskChange], failures: Mapping[JobKey, StartFailures], at: float
) -> dict[JobKey, StartFailures]:
    """Update the numbers of failed attempts to start tasks by the changes of a tick.

    Tasks that were asked for before the job's last failure are of the attempt that failed then, which counts once, in
    whatever ticks they end. A start that never reached the resource manager does not count, since the job did not cause
    it. What the job may not have caused counts apart, so that the next attempt is delayed, and a tenth counts: a
    task was ended from outside (preempted) or its node was lost, or it waited and is not listed any more (YARN's
    manager keeps waiting tasks in memory only). A job with confirmed tasks is not to end for failures: they only delay
    the next attempt. It begins anew once a task that was asked for after the last one is confirmed.
    """
    before = {(task.job, task.id): task for task in tasks}
    #: When the newest confirmed task of each job that has any was asked for.
    confirmed: dict[JobKey, float] = {}
    for task in before.values():
        if task.state is TaskState.CONFIRMED:
            confirmed[task.job] = max(confirmed.get(task.job, 0.0), task.asked_at)
    counted: dict[JobKey, StartFailures] = {}
    for key, count in failures.items():
        # A failure in the future means that the clock was set back.
        known = count._replace(at=min(count.at, at))
        if key not in confirmed:
            counted[key] = known
        elif confirmed[key] < known.at:
            counted[key] = StartFailures(0, known.last, known.at, 0, known.in_a_row)
    ended: dict[JobKey, str] = {}
    from_outside: dict[JobKey, str] = {}
    for change in changes:
        task = before[change.job, change.task]
        if task.asked_at < counted.get(change.job, NO_FAILURES).at:
            continue
        if change.state is TaskState.FAILED and task.state.rank < TaskState.JOINED.rank and task.handle:
            may_have_waited = task.state is TaskState.ASKED and change.cause is FailureCause.NOT_LISTED
            is_from_outside = may_have_waited or change.cause in (FailureCause.CANCELLED, FailureCause.NODE_LOST)
            found = from_outside if is_from_outside else ended
            found[change.job] = f"{change.task}: {change.note or 'no reason given'}"
    for key, failure in (from_outside | ended).items():
        attempts, _, _, lost, others = counted.get(key, NO_FAILURES)
        if key in confirmed:
            counted[key] = StartFailures(attempts, failure, at, lost, others + 1)
        else:
            counted[key] = StartFailures(attempts + (key in ended), failure, at, lost + (key not in ended), others)
    return counted


def count_refused(failures: Mapping[JobKey, StartFailures], outcome: Outcome, at: float) -> dict[JobKey, StartFailures]:
    """Add the starts that the resource manager has refused: one attempt of each job, which delays the next one only."""
    counted = dict(failures)
    for failure in outcome.failures:
        known = counted.get(failure.job, NO_FAILURES)
        if failure.refused and (known.at < at or not known.in_a_row):
            words = f"{failure.what}: {failure.error}"
            counted[failure.job] = known._replace(last=words, at=at, not_counted=known.not_counted + 1)
    return counted
