"""Tasks that reach their time limit soon, so that each is replaced before. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from dl2d.core.cluster import Task
from dl2d.core.jobs import Job
from dl2d.core.resource_manager import RmListing

#: How long before its time limit a task is replaced: long enough for the other one to start and join.
_REPLACE_SECONDS: Final = 300.0
#: Time limits are in whole minutes: tasks and anchors whose limits differ by less end together.
_SAME_END_SECONDS: Final = 120.0


def expiring_tasks(jobs: Iterable[Job], tasks: Iterable[Task], listing: RmListing) -> frozenset[str]:
    """Tags of the tasks that reach their time limit soon, and well before the anchor of their job does."""
    limits = {job.handle: job.time_limit_at for job in listing.jobs if job.time_limit_at}
    if not limits:
        return frozenset()
    anchors = {job.key: limits.get(job.anchor, math.inf) for job in jobs}
    expiring = set[str]()
    for task in tasks:
        limit = limits.get(task.handle, math.inf)
        # The resource manager's clock may differ from this machine's, on which the task was asked for.
        end = limit + task.asked_at - (task.submitted or task.asked_at)
        # At most a quarter of the task's lifetime; else one with a short limit would be replaced as soon as it starts.
        lead = min(_REPLACE_SECONDS, (end - task.asked_at) / 4)
        if task.job in anchors and end - listing.at < lead and anchors[task.job] - limit > _SAME_END_SECONDS:
            expiring.add(task.tag)
    return frozenset(expiring)
