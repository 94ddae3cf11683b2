"""Who goes first: of the jobs of a kind, one at a time tries sizes of which the others do not expect enough."""

from __future__ import annotations

from typing import Final

from dl2d.core.cluster import Snapshot
from dl2d.core.jobs import Job, JobKey
from dl2d.core.measured import TrainingKind
from dl2d.throughput.relabelling import Labels
from dl2d.throughput.remaining_work import samples_left

#: How many times as much as the others a scout hopes for.
BOLDER: Final = 2.0
#: Jobs of a kind at least, for one to be its scout: two are left at sizes that are known, and tell when speeds change.
_LEAST: Final = 3


def scouts(snapshot: Snapshot, labels: Labels) -> frozenset[JobKey]:
    """One job of each kind, of at least three that showed to be of it: the one with the most samples left.

    What one job measures, all of its kind know; if all tried a size at once, they would know no more and pay more. So
    one may look further. It is one that showed to be what its user says: another's word on a size where nobody has
    been could not be judged. Cost: one look at each job.
    """
    moved = {
        speeds.job for speeds in snapshot.job_speeds if any(point.samples_per_second > 0 for point in speeds.points)
    }
    proven: dict[TrainingKind, list[Job]] = {}
    for job in snapshot.jobs:
        if job.key not in moved:
            continue
        shown = labels.of(job)
        of_its_own = any(point.samples_per_second > 0 for point in shown.own)
        if shown.request.model == job.request.model and not of_its_own:
            proven.setdefault(TrainingKind.of(job.request), []).append(job)
    return frozenset(max(jobs, key=samples_left).key for jobs in proven.values() if len(jobs) >= _LEAST)
