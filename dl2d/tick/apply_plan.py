"""Apply: carries out a plan. Each request is stored before it is sent, so that the next tick can complete it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import structlog
from msgspec import structs

from dl2d.core.backoff_after_failed_starts import AttemptKind, StartFailures
from dl2d.core.cluster import ANCHOR, TaskState, task_tag
from dl2d.core.errors import (
    MachineFault,
    NeverStarts,
    NodeRefused,
    NotFound,
    ResourceManagerError,
    StartFailed,
    Unavailable,
)
from dl2d.core.jobs import FailureCause, Job, JobKey, JobState
from dl2d.core.plan_of_starts_and_stops import Failure, Outcome, Plan, Start
from dl2d.core.store import JobChange, TaskChange
from dl2d.tick.count_failed_starts import NO_FAILURES
from dl2d.tick.task_submitter import SequentialTaskSubmitter, TaskSubmitter, handle_or_error
from dl2d.tick.tick_context import Context

log = structlog.get_logger()

#: Maximum number of starts in a tick of a user whose last one was not answered: each may take up a thread until it is
#: given up.
_STARTS_OF_UNANSWERED = 2


def apply(
    context: Context,
    plan: Plan,
    jobs: Mapping[JobKey, Job],
    at: float,
    avoided: Mapping[JobKey, tuple[str, ...]] = MappingProxyType({}),
) -> Outcome:
    """Drain the tasks that leave and start the new ones.

    ``jobs`` are those of the plan, with their commands; ``avoided`` the nodes that the resource manager is not to
    choose for their tasks. A task drains when the answer to its coordinator's next heartbeat does not name it among the
    members. When the resource manager does not answer to a start, which may have been carried out or not, the task
    stays in state ``asked``: the next ticks find it by its tag or give it up. Tasks of the same batch that have not
    been submitted by then fail. Starts of later batches, and those that are left when ``Context.submit_seconds`` is
    over or no more are allowed, are not asked for. Nor are more than ``_STARTS_OF_UNANSWERED`` of a user whose last
    start was not answered. The next tick plans them all again.
    """
    store = context.store
    drained = store.change_tasks(
        [TaskChange(stop.job, stop.task, TaskState.DRAINING, note="decided") for stop in plan.stops], at
    )
    submitter = context.submitter or SequentialTaskSubmitter(context.manager, store.check_lease)
    begin = context.timer()
    started: list[str] = []
    failures: list[Failure] = []
    starts = _with_few_of_unanswered(plan.starts, jobs, submitter.unanswered)
    for first in range(0, len(starts), submitter.batch):
        if first and not may_submit_more(context, begin):
            break
        tags, failed = _start(context, submitter, starts[first : first + submitter.batch], jobs, at, avoided)
        started += tags
        failures += [failure for failure, _ in failed]
        if any(isinstance(error, Unavailable) for _, error in failed):
            break
    for failure in failures:
        log.error("start failed", job=failure.job.id, what=failure.what, error=failure.error)
    return Outcome(tuple(started), tuple(task.tag for task in drained), tuple(failures))


def _with_few_of_unanswered(
    starts: Sequence[Start], jobs: Mapping[JobKey, Job], unanswered: Iterable[int]
) -> list[Start]:
    """The starts; those of users in ``unanswered`` come last, and are few.

    A resource manager may not answer for one user alone, as while the name service does not know them.
    """
    place = {user: number for number, user in enumerate(unanswered, 1)}
    kept, count = list[Start](), Counter[int]()
    for start in sorted(starts, key=lambda start: place.get(jobs[start.job].owner.uid, 0)):
        user = jobs[start.job].owner.uid
        count[user] += 1
        if user not in place or count[user] <= _STARTS_OF_UNANSWERED:
            kept.append(start)
    return kept


def may_submit_more(context: Context, begin: float) -> bool:
    """Whether a tick that has submitted since ``begin`` has time left, and the resource manager takes more now."""
    in_time = context.timer() - begin < context.submit_seconds
    return in_time and (context.start_allowance is None or context.start_allowance().tasks > 0)


def _start(
    context: Context,
    submitter: TaskSubmitter,
    starts: Sequence[Start],
    jobs: Mapping[JobKey, Job],
    at: float,
    avoided: Mapping[JobKey, tuple[str, ...]],
) -> tuple[list[str], list[tuple[Failure, ResourceManagerError]]]:
    """Persist tasks, submit them, and persist what came of it; returns the tags of those that started, and failures."""
    # The plan's demands are what tasks get, which may be more, and whole nodes, which no resource manager knows.
    starts = [structs.replace(start, demand=jobs[start.job].request.demand(start.role)) for start in starts]
    tasks = context.store.ask_tasks(starts, at)
    specs_of = {key: context.task_specs.of_job(jobs[key]) for key in {task.job: None for task in tasks}}
    specs = [specs_of[task.job].task_spec(task) for task in tasks]
    specs = [
        structs.replace(spec, avoid=avoided[spec.job]) if not spec.node and spec.job in avoided else spec
        for spec in specs
    ]
    started: list[str] = []
    failures: list[tuple[Failure, ResourceManagerError]] = []
    changes: list[TaskChange] = []
    for task, spec, answer in zip(tasks, specs, submitter.submit(specs), strict=True):
        if isinstance(answer, str):
            started.append(spec.tag)
            changes.append(TaskChange(task.job, task.id, TaskState.ASKED, handle=answer))
        elif answer is None:
            note = "not submitted: the resource manager did not answer for another task"
            cause = FailureCause.NOT_STARTED
            changes.append(TaskChange(task.job, task.id, TaskState.FAILED, note=note, cause=cause))
        else:
            refused = not isinstance(answer, Unavailable)
            node = task.node if isinstance(answer, NodeRefused | NotFound) else ""
            what = f"start {task.id} on {task.node}" if task.node else f"start {task.id} on any node"
            failures.append(
                (Failure(task.job, what, str(answer), refused, isinstance(answer, NeverStarts), node), answer)
            )
            if refused:
                note, cause = str(answer), FailureCause.REFUSED
                changes.append(TaskChange(task.job, task.id, TaskState.FAILED, note=note, cause=cause))
    context.store.change_tasks(changes, at)
    return started, failures


def start_anchors(
    context: Context, jobs: Sequence[Job], last: JobKey | None, failures: Mapping[JobKey, StartFailures], at: float
) -> tuple[JobKey | None, dict[JobKey, StartFailures]]:
    """Start the anchors of jobs that were submitted to the daemon; a job that the resource manager refuses ends.

    A start that ends with an unexpected error is a failed attempt to start the job, and is tried again after the same
    delay as its tasks are. One that ends with an error of this machine only delays the next.
    Returns the failed attempts of all jobs, given those before (``failures``).

    Returns as well the last job that was tried, if the resource manager did not answer for it or
    ``Context.submit_seconds`` was over; None if all were tried. The next tick passes that job as ``last`` and begins
    with the one after it, so that a job whose start is never answered does not keep the others waiting.
    """
    begin, counted = context.timer(), dict(failures)
    first = next((place + 1 for place, job in enumerate(jobs) if job.key == last), 0)
    for job in (*jobs[first:], *jobs[:first]):
        known = counted.get(job.key, NO_FAILURES)
        if known.in_a_row and at < known.retry_at(context.guard_rules.backoff):
            continue
        answer = _start_anchor(context, job, at)
        if isinstance(answer, StartFailed):
            kind: AttemptKind = "only_delaying" if isinstance(answer, MachineFault) else "own"
            counted[job.key] = known.after(kind, str(answer), at)
        elif not isinstance(answer, Unavailable):
            counted.pop(job.key, None)
        if isinstance(answer, Unavailable) or context.timer() - begin >= context.submit_seconds:
            return job.key, counted
    return None, counted


def _start_anchor(context: Context, job: Job, at: float) -> str | ResourceManagerError:
    """Start one anchor and write to the store what came of it."""
    context.store.check_lease()
    answer = handle_or_error(
        lambda: context.manager.submit(context.task_specs.anchor_spec(job)), lambda: task_tag(job.key, ANCHOR)
    )
    if isinstance(answer, Unavailable):
        log.warning("job not started, will be tried again", job=job.key.id, error=str(answer))
        return answer
    if isinstance(answer, StartFailed):
        log.error("job not started, will be tried again", job=job.key.id, error=str(answer))
        change = JobChange(waits_for=f"its coordinator was not started, and will be tried again: {answer}")
    elif isinstance(answer, ResourceManagerError):
        log.error("job refused", job=job.key.id, error=str(answer))
        change = JobChange(state=JobState.FAILED, end_reason=str(answer), cause=FailureCause.REFUSED)
    else:
        change = JobChange(anchor=answer, waits_for="")
    context.store.change_job(job.key, change, at)
    return answer
