"""Remaining work of a job, in samples, and the speed of jobs that have not trained yet, for remaining times."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from dl2d.core.cluster import Snapshot
from dl2d.core.jobs import Job, JobKey
from dl2d.throughput.loss_curve import LossFit


class Remaining(NamedTuple):
    """Work that is left, and how that was found if not by the declared epochs alone."""

    samples: float
    note: str = ""


def samples_left(job: Job, epochs: float | None = None) -> float:
    """Work that is left until ``epochs``, by default those declared, in samples.

    Updates count as samples where neither batch nor samples were declared.
    """
    request = job.request
    per_epoch = request.samples_per_epoch or (request.steps_per_epoch or 1.0) * (request.batch or 1)
    return max((request.epochs if epochs is None else epochs) - job.progress.epoch, 0.0) * per_epoch


def until_settled(job: Job, fit: LossFit | None, threshold: float) -> Remaining:
    """Work that is left until an epoch lowers the loss by less than ``threshold`` of the largest loss.

    A job trains no longer than it declared. The declared epochs count as well where the fit says nothing: too few
    losses, none that falls, or the job trains on although its loss should have settled.
    """
    declared = samples_left(job)
    if fit is None:
        return Remaining(declared, "by its declared epochs, for its losses say nothing yet")
    epoch = fit.settles(threshold)
    if epoch <= job.progress.epoch:
        return Remaining(declared, f"by its declared epochs, for its loss should have settled at epoch {epoch}")
    if epoch >= job.request.epochs:
        return Remaining(declared, f"by its declared epochs, for its loss should not settle before epoch {epoch}")
    return Remaining(samples_left(job, epoch), f"until its loss should settle at epoch {epoch}")


def measured_or_mean(snapshot: Snapshot, measured: Callable[[Job], float | None]) -> dict[JobKey, float]:
    """A measured value of each job, such as its speed; for one that was not measured, the mean over its model type.

    Where none of its type was measured it is the mean over all jobs, and 1 where none was at all.
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
