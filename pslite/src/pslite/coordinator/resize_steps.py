"""Step times around a resize: workers report them once the plan is done, and they are added to the plan's report."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import msgspec

from pslite.coordinator.coordinator_context import AwaitedSteps, Job
from pslite.job.job_status import PlanReport
from pslite.job.member_measurements import ResizeSteps


def await_steps(job: Job, plan: int, workers: Iterable[str]) -> None:
    """Await the step times of these workers around a plan that is done now."""
    awaited = AwaitedSteps(plan, set(workers), time.monotonic() + job.settings.lease)
    job.awaited_steps = awaited if awaited.workers else None


def add_steps(job: Job, task: str, steps: ResizeSteps) -> None:
    """Add a worker's step times to the report of the plan, which is complete with those of the last worker."""
    awaited = job.awaited_steps
    if awaited is None or awaited.plan != steps.plan or task not in awaited.workers:
        return
    awaited.workers.remove(task)
    awaited.reported.append(steps)
    longest = round(max(each.longest_ms for each in awaited.reported), 3)
    median = round(statistics.median(each.median_ms for each in awaited.reported), 3)
    plan_reports = job.state.reports
    plan_reports[-1] = msgspec.structs.replace(plan_reports[-1], longest_step_ms=longest, median_step_ms=median)
    if not awaited.workers:
        job.awaited_steps = None
        job.urgent = True
        job.say(
            f"plan {steps.plan}: the longest step around the resize took {longest:.1f} ms, "
            f"the median step before it {median:.1f} ms"
        )


def complete_reports(job: Job, now: float) -> list[PlanReport]:
    """Return the plans' reports without that of the last plan as long as its step times are awaited."""
    awaited, plan_reports = job.awaited_steps, job.state.reports
    wait = awaited is not None and not job.state.over and now < awaited.until
    return plan_reports[:-1] if wait else list(plan_reports)
