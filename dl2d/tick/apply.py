"""Apply: carries out a plan. Each request is stored before it is sent, so that the next tick can complete it."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from dl2d.core.cluster import TaskState
from dl2d.core.errors import ResourceManagerError, Unavailable
from dl2d.core.jobs import FailureCause, Job, JobKey, JobState
from dl2d.core.store import JobChange, TaskChange
from dl2d.core.tick_plan import Failure, Outcome, Plan
from dl2d.tick.task_specs import JobTaskSpecs
from dl2d.tick.tick_context import Context

log = structlog.get_logger()


def apply(context: Context, plan: Plan, jobs: Mapping[JobKey, Job], at: float) -> Outcome:
    """Drain the tasks that leave and start the new ones.

    ``jobs`` are those of the plan, with their commands. A task drains when the answer to its coordinator's next
    heartbeat does not name it among the members. When the resource manager does not answer to a start, which may have
    been carried out or not, the task stays in state ``asked``: the next ticks find it by its tag or give it up.
    """
    store = context.store
    drained = store.change_tasks(
        [TaskChange(stop.job, stop.task, TaskState.DRAINING, note="decided") for stop in plan.stops], at
    )
    started: list[str] = []
    failures: list[Failure] = []
    changes: list[TaskChange] = []
    manager_answers = True
    task_specs: dict[JobKey, JobTaskSpecs] = {}
    for task in store.ask_tasks(plan.starts, at):
        if not manager_answers:
            note, cause = "the resource manager does not answer", FailureCause.NOT_STARTED
            changes.append(TaskChange(task.job, task.id, TaskState.FAILED, note=note, cause=cause))
            continue
        if task.job not in task_specs:
            task_specs[task.job] = context.task_specs.of_job(jobs[task.job])
        spec = task_specs[task.job].task_spec(task)
        store.check_lease()
        try:
            handle = context.manager.submit(spec)
        except Unavailable as error:
            manager_answers = False
            failures.append(Failure(task.job, f"start {task.id} on {task.node}", str(error)))
        except ResourceManagerError as error:
            failures.append(Failure(task.job, f"start {task.id} on {task.node}", str(error)))
            note, cause = str(error), FailureCause.REFUSED
            changes.append(TaskChange(task.job, task.id, TaskState.FAILED, note=note, cause=cause))
        else:
            started.append(spec.tag)
            changes.append(TaskChange(task.job, task.id, TaskState.ASKED, handle=handle))
    store.change_tasks(changes, at)
    for failure in failures:
        log.error("start failed", job=failure.job.id, what=failure.what, error=failure.error)
    return Outcome(tuple(started), tuple(task.tag for task in drained), tuple(failures))


def start_anchor(context: Context, job: Job, at: float) -> None:
    """Start the anchor of a job that was submitted to the daemon; if the resource manager refuses it, the job ends."""
    context.store.check_lease()
    try:
        handle = context.manager.submit(context.task_specs.anchor_spec(job))
    except Unavailable as error:
        log.warning("anchor not started, will be tried again", job=job.key.id, error=str(error))
    except ResourceManagerError as error:
        log.error("anchor refused", job=job.key.id, error=str(error))
        failed = JobChange(state=JobState.FAILED, end_reason=str(error), cause=FailureCause.REFUSED)
        context.store.change_job(job.key, failed, at)
    else:
        context.store.change_job(job.key, JobChange(anchor=handle), at)
