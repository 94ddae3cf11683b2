"""Remaining work of jobs, in samples, and estimates of their speed, from which policies compute remaining times."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple

from dl2d.core.cluster import Snapshot
from dl2d.core.jobs import Job, JobKey
from dl2d.throughput.optimus_loss_curve import LossFit

#: Least fraction of its declared work that a job counts as having left.
MIN_WORK_LEFT: Final = 0.01
#: Least number of samples left, so that their logarithm is finite.
_MIN_SAMPLES: Final = 1e-9


class Remaining(NamedTuple):
    """Remaining work of a job."""

    #: Samples that are left.
    samples: float
    #: How they were estimated, to follow "work left" in a reason; empty for the declared epochs alone.
    note: str = ""


def samples_left(job: Job) -> float:
    """Samples that are left of the declared epochs, or of those that its coordinator says its script trains in all."""
    declared = max(job.request.epochs, job.script_epochs or 0.0)
    return max(epochs_left(declared, job.progress.epoch) * job.request.epoch_samples, _MIN_SAMPLES)


def epochs_left(declared: float, done: float) -> float:
    """Epochs that are left, at least a fraction (``MIN_WORK_LEFT``) of the declared ones.

    A job that has done more than the declared ones, by more than this fraction, counts as having as many left as it has
    done. Declaring less work than there is helps a job only until the declared work is done.
    """
    beyond = done - declared
    return done if beyond > MIN_WORK_LEFT * declared else max(-beyond, MIN_WORK_LEFT * declared)


def until_settled(job: Job, fit: LossFit | None, threshold: float) -> Remaining:
    """Work that is left until an epoch lowers the loss by less than ``threshold``, a fraction of the largest loss.

    The declared epochs count instead where the loss does not settle before them, where there is no fit (too few losses,
    or none that falls), and where the job trains on although its loss should have settled.
    """
    declared = samples_left(job)
    if fit is None:
        return Remaining(declared, "estimated from its declared epochs, because its losses fit no falling curve yet")
    epoch = fit.settling_epoch(threshold)
    if epoch <= job.progress.epoch:
        reason = f"it still trains although its loss was predicted to settle at epoch {epoch}"
        return Remaining(declared, f"estimated from its declared epochs, because {reason}")
    if epoch >= job.request.epochs:
        reason = f"its loss is not predicted to settle before epoch {epoch}"
        return Remaining(declared, f"estimated from its declared epochs, because {reason}")
    samples = (epoch - job.progress.epoch) * job.request.epoch_samples
    return Remaining(samples, f"estimated until epoch {epoch}, when its loss is predicted to settle")


def measured_or_mean_speeds(snapshot: Snapshot, measured_speed: Callable[[Job], float | None]) -> dict[JobKey, float]:
    """Measured speed of each job, or an estimate where the job was not measured.

    The estimate is the mean over the jobs of its model type; if none of them was measured, the mean over all jobs; if
    none at all, 1.

    Parameters
    ----------
    measured_speed
        Speed of a job, in any unit; None, or one that is not a positive number, where it was not measured.
    """
    measured: dict[JobKey, float] = {}
    by_type: dict[str, list[float]] = defaultdict(list)
    for job in snapshot.jobs:
        speed = measured_speed(job)
        if speed is not None and 0.0 < speed < math.inf:
            measured[job.key] = speed
            by_type[job.request.model].append(speed)
    means = {model: statistics.fmean(speeds) for model, speeds in by_type.items()}
    overall = statistics.fmean(measured.values()) if measured else 1.0
    return {job.key: measured.get(job.key) or means.get(job.request.model, overall) for job in snapshot.jobs}
