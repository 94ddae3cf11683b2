"""Exploration: one job of each kind at a time gets more optimism, so that it runs at sizes with uncertain speed."""

from __future__ import annotations

from dl2d.core.cluster import Snapshot
from dl2d.core.jobs import Job, JobKey
from dl2d.core.measured_speeds_and_losses import TrainingKind
from dl2d.policies.dl2.checkpoint_contents import Parameters
from dl2d.throughput.mislabelled_jobs import Relabelling
from dl2d.throughput.remaining_time import samples_left

#: Optimism of an exploring job, as a multiple of that of other jobs.
EXPLORATION_FACTOR = 2.0
#: Least number of confirmed jobs of a kind for one of them to explore: at least two others run at sizes that were
#: measured before, so that a change of all speeds is noticed.
_MIN_JOBS = 3


def job_optimism(snapshot: Snapshot, relabelling: Relabelling, parameters: Parameters) -> list[float]:
    """Compute the standard deviations to add to the predicted speeds of each job, in the order of the snapshot."""
    checkpoint_kinds = {speeds.kind for speeds in parameters.checkpoint_speeds}
    exploring = exploring_jobs(snapshot, relabelling) if parameters.optimism_of_unknown > 0 else frozenset()
    return [
        (
            parameters.optimism
            if TrainingKind.of(relabelling.of(job).request) in checkpoint_kinds
            else parameters.optimism_of_unknown
        )
        * (EXPLORATION_FACTOR if job.key in exploring else 1.0)
        for job in snapshot.jobs
    ]


def exploring_jobs(snapshot: Snapshot, relabelling: Relabelling) -> frozenset[JobKey]:
    """Select, of each kind with at least three (``_MIN_JOBS``) confirmed jobs, the one with the most samples left.

    A job is confirmed if it was measured and its speeds are those of the kind that its user declares. Its measurements
    count for all jobs of the kind, so it is enough that one of them runs at sizes that may turn out to be slow.
    """
    measured = {
        speeds.job for speeds in snapshot.job_speeds if any(point.samples_per_second > 0 for point in speeds.points)
    }
    confirmed: dict[TrainingKind, list[Job]] = {}
    for job in snapshot.jobs:
        if job.key not in measured:
            continue
        relabelled = relabelling.of(job)
        if relabelled.of_known_kind and relabelled.request.model == job.request.model:
            confirmed.setdefault(TrainingKind.of(job.request), []).append(job)
    return frozenset(max(jobs, key=samples_left).key for jobs in confirmed.values() if len(jobs) >= _MIN_JOBS)
