"""Exploration: one job of each kind at a time is predicted with more optimism, so that it runs at uncertain sizes."""

from __future__ import annotations

from typing import Final

from dl2d.core.cluster import Snapshot
from dl2d.core.jobs import Job, JobKey
from dl2d.core.measured_speeds import TrainingKind
from dl2d.policies.dl2.checkpoint_contents import Parameters
from dl2d.throughput.kind_relabelling import Relabelling
from dl2d.throughput.remaining_work import samples_left

#: Optimism of an exploring job, as a multiple of the others'.
EXPLORATION_FACTOR: Final = 2.0
#: Least number of confirmed jobs of a kind for one of them to explore. The other two stay at sizes that are known, so
#: that a change of all speeds shows.
_MIN_JOBS: Final = 3


def job_optimism(snapshot: Snapshot, relabelling: Relabelling, parameters: Parameters) -> list[float]:
    """Standard deviations to add to the predicted speeds of each job, in the order of the snapshot."""
    known = {speeds.kind for speeds in parameters.known}
    exploring = exploring_jobs(snapshot, relabelling) if parameters.optimism_of_unknown > 0 else frozenset()
    return [
        (
            parameters.optimism
            if TrainingKind.of(relabelling.of(job).request) in known
            else parameters.optimism_of_unknown
        )
        * (EXPLORATION_FACTOR if job.key in exploring else 1.0)
        for job in snapshot.jobs
    ]


def exploring_jobs(snapshot: Snapshot, relabelling: Relabelling) -> frozenset[JobKey]:
    """Of each kind with at least three jobs that are confirmed to be of it, the one with the most samples left.

    A job is confirmed if it was measured and its speeds are those of the kind that its user declared. What one job
    measures holds for all of its kind, so no more than one has to pay for it.
    """
    measured = {
        speeds.job for speeds in snapshot.job_speeds if any(point.samples_per_second > 0 for point in speeds.points)
    }
    confirmed: dict[TrainingKind, list[Job]] = {}
    for job in snapshot.jobs:
        if job.key not in measured:
            continue
        taken_as = relabelling.of(job)
        of_its_own = any(point.samples_per_second > 0 for point in taken_as.own_measurements)
        if taken_as.request.model == job.request.model and not of_its_own:
            confirmed.setdefault(TrainingKind.of(job.request), []).append(job)
    return frozenset(max(jobs, key=samples_left).key for jobs in confirmed.values() if len(jobs) >= _MIN_JOBS)
