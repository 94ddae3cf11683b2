"""Remaining work of jobs, in samples, and estimates of their speed, from which policies compute remaining times."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dl2d.core.array_types import Floats, Ints
from dl2d.core.cluster import Snapshot
from dl2d.core.jobs import Job, JobKey
from dl2d.throughput.optimus_loss_curve import LossFit

#: Least fraction of its declared work that a job counts as having left.
MIN_WORK_LEFT = 0.01
#: Least number of samples left, so that their logarithm is finite even where next to no work is declared.
_MIN_SAMPLES = 1e-9


class Remaining(NamedTuple):
    """Remaining work of a job."""

    #: Samples that are left.
    samples: float
    #: How they were estimated, to follow "work left" in a reason; empty for the declared epochs alone.
    note: str = ""


def samples_left(job: Job) -> float:
    """Samples that are left of the declared epochs, or of those that the coordinator reports if these are more."""
    declared = max(job.request.epochs, job.script_epochs or 0.0)
    return max(epochs_left(declared, job.progress.epoch) * job.request.epoch_samples, _MIN_SAMPLES)


def epochs_left(declared: float, done: float) -> float:
    """Epochs that are left, at least a fraction (``MIN_WORK_LEFT``) of the declared ones.

    A job that has done more than the declared ones, by more than this fraction, counts as having as many left as it has
    done: nothing else is known of its end, and declaring less work than there is helps a job only until the declared
    work is done.
    """
    beyond = done - declared
    return done if beyond > MIN_WORK_LEFT * declared else max(-beyond, MIN_WORK_LEFT * declared)


def epochs_left_of_all(declared: Floats, done: Floats) -> Floats:
    """``epochs_left`` of many jobs."""
    beyond, least = done - declared, MIN_WORK_LEFT * declared
    return np.where(beyond > least, done, np.maximum(-beyond, least))


def remaining_seconds(snapshot: Snapshot) -> dict[JobKey, float]:
    """Remaining time of each job at the speed at which it last trained, or else at that of others like it.

    See ``measured_or_mean_speeds``. For a job without a coordinator that reports, it is the rest of its time limit.
    """
    speeds = measured_or_mean_speeds(snapshot, lambda job: job.progress.samples_per_second)
    # An unreported job counts its work in seconds, so its speed is 1.
    return {job.key: samples_left(job) / (1.0 if job.unreported else speeds[job.key]) for job in snapshot.jobs}


def ranks_by_remaining_time(seconds: Floats, clusters: Ints) -> Ints:
    """Rank, from 0, of each of M jobs of several simulated clusters by remaining time in its cluster.

    Equal ones stay in their order. ``clusters`` are the numbers of the jobs' clusters, in ascending order.
    """
    places = np.empty(len(seconds), dtype=np.int64)
    places[np.lexsort((seconds, clusters))] = np.arange(len(seconds)) - np.searchsorted(clusters, clusters)
    return places


def until_settled(job: Job, fit: LossFit | None, threshold: float) -> Remaining:
    """Work that is left until an epoch lowers the loss by less than ``threshold``, a fraction of the largest loss.

    What ``samples_left`` says counts instead where the loss does not settle before the epochs of the request, where
    there is no fit (too few losses, or none that falls), and where the job trains on although its loss should have
    settled.
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
    models = {model: number for number, model in enumerate({job.request.model: None for job in snapshot.jobs})}
    speeds = np.array([measured_speed(job) or 0.0 for job in snapshot.jobs])
    types = np.array([models[job.request.model] for job in snapshot.jobs], dtype=np.int64)
    found = speeds_or_means(speeds, types, np.zeros_like(types)).tolist()
    return {job.key: speed for job, speed in zip(snapshot.jobs, found, strict=True)}


def speeds_or_means(speeds: Floats, types: Ints, clusters: Ints) -> Floats:
    """``measured_or_mean_speeds`` of M jobs of several simulated clusters, with the number of each one's model type."""
    measured = (speeds > 0.0) & (speeds < np.inf)

    def means(of: Ints, otherwise: Floats) -> Floats:
        """Mean measured speed of jobs with the same number; ``otherwise`` where none was measured."""
        size = int(of.max(initial=-1)) + 1
        counts = np.bincount(of[measured], minlength=size)[of]
        sums = np.bincount(of[measured], speeds[measured], minlength=size)[of]
        return np.where(counts > 0, sums / np.maximum(counts, 1), otherwise)

    by_type = clusters * (int(types.max(initial=0)) + 1) + types
    return np.where(measured, speeds, means(by_type, means(clusters, np.ones_like(speeds))))
