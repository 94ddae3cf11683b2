"""How fast jobs train, as far as any have trained."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable

from dl2d.core.cluster import Snapshot
from dl2d.core.jobs import Job, JobKey


def pace(snapshot: Snapshot, measured: Callable[[Job], float | None]) -> dict[JobKey, float]:
    """What was measured of each job; of a job that has not trained yet, the mean of its type.

    Where none of its type has trained it is the mean of all jobs, and 1 where none has at all, which orders jobs by
    their work alone.
    """
    own: dict[JobKey, float] = {}
    by_type: dict[str, list[float]] = defaultdict(list)
    for job in snapshot.jobs:
        value = measured(job)
        if value is not None and 0.0 < value < math.inf:
            own[job.key] = value
            by_type[job.request.model].append(value)
    means = {model: statistics.fmean(values) for model, values in by_type.items()}
    overall = statistics.fmean(own.values()) if own else 1.0
    return {job.key: own.get(job.key) or means.get(job.request.model, overall) for job in snapshot.jobs}
