"""How long steps took around a resize, as workers report it when the plan is done: what a script feels of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import msgspec

from pslite.coordinator.coordinator_context import AwaitedSteps, Job
from pslite.job.job_status import PlanReport
from pslite.job.member_measurements import ResizeSteps


def expect(job: Job, plan: int, workers: Iterable[str]) -> None:
    """Await reports of these workers on a plan that is done now."""
    awaited = AwaitedSteps(plan, set(workers), time.monotonic() + job.settings.lease)
    job.awaited_steps = awaited if awaited.workers else None


def take(job: Job, task: str, steps: ResizeSteps) -> None:
    """Take a worker's report; the last one completes the report of the plan."""
    awaited = job.awaited_steps
    if awaited is None or awaited.plan != steps.plan or task not in awaited.workers:
        return
    awaited.workers.remove(task)
    awaited.reported.append(steps)
    reports = job.state.reports
    longest = round(max(each.longest_ms for each in awaited.reported), 3)
    median = round(statistics.median(each.median_ms for each in awaited.reported), 3)
    reports[-1] = msgspec.structs.replace(reports[-1], longest_step_ms=longest, median_step_ms=median)
    if not awaited.workers:
        job.awaited_steps = None
        job.urgent = True
        job.say(f"plan {steps.plan}: the longest step around it took {longest:.1f} ms, the median one {median:.1f} ms")


def reports(job: Job, now: float) -> list[PlanReport]:
    """Return the reports of plans that are complete."""
    awaited, all_reports = job.awaited_steps, job.state.reports
    wait = awaited is not None and not job.state.over and now < awaited.until
    return all_reports[:-1] if wait else list(all_reports)
