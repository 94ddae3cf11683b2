"""What tasks are given beyond their demands: whole cores, memory that they did not demand.

Policies and placing count with what each task gets. Tasks are stored and submitted with the demands of their jobs'
requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from msgspec import structs

from dl2d.core.cluster import Task
from dl2d.core.jobs import Job, JobKey
from dl2d.core.resource_manager import RmListing
from dl2d.core.resources import NO_RESOURCES, Resources


def with_given(
    jobs: Iterable[Job], tasks: Iterable[Task], listing: RmListing
) -> tuple[tuple[Job, ...], tuple[Task, ...]]:
    """The jobs and tasks with demands of what tasks get (``RmListing.given``); tasks that run with what they hold.

    Static jobs, whose tasks another scheduler starts, keep their demands, and so do tasks of jobs that have ended.
    """
    jobs = tuple(jobs)
    rules = {job.key: listing.given[job.anchor] for job in jobs if job.anchor in listing.given and not job.static}

    @cache
    def given(job: JobKey, demand: Resources) -> Resources:
        return demand.maximum(rules[job](demand)) if job in rules and demand.thousandths else demand

    held = held_by_handle(jobs, listing)
    return (
        tuple(_with_demands(job, given(job.key, job.request.worker), given(job.key, job.request.ps)) for job in jobs),
        tuple(_as_held(task, given(task.job, task.demand), held.get(task.handle, NO_RESOURCES)) for task in tasks),
    )


def held_by_handle(jobs: Iterable[Job], listing: RmListing) -> dict[str, Resources]:
    """What tasks that run hold, empty where it is not listed.

    All tasks of a static job have its handle, for which what the whole job holds is listed: that is left out.
    """
    static = {job.anchor for job in jobs if job.static}
    return {
        job.handle: NO_RESOURCES if job.handle in static else job.held
        for job in listing.jobs
        if job.state.holds_resources
    }


def _with_demands(job: Job, worker: Resources, ps: Resources) -> Job:
    request = job.request
    if (worker, ps) == (request.worker, request.ps):
        return job
    return replace(job, request=replace(request, worker=worker, ps=ps))


def _as_held(task: Task, demand: Resources, listed: Resources) -> Task:
    """The task with this demand, and with what it holds if that is listed and is not its demand."""
    held = task.demand.maximum(listed) if listed.thousandths else demand
    if held == demand == task.demand:
        return task
    return structs.replace(task, demand=demand, held=held if held != demand else NO_RESOURCES)
