"""Relabelling: a job whose measured speeds contradict its declared model type is predicted as another kind.

Each job of a snapshot is compared with the throughput model's prediction for its kind. It keeps its kind as long as
four of five (``_MAX_CONTRADICTING``) of its measurements are within three standard deviations (``_CONTRADICTS``), or a
factor of 1.28 (``SAME_SPEED_LOG_RATIO``), of the prediction, since a node may have been slow for a while. Otherwise it
is predicted as the most likely other kind, among those for which all of its measurements are within two standard
deviations (``_AGREES``) and whose predictions are certain enough (``_MAX_UNCERTAINTY``); or, if there is none, from its
own measurements alone. Standard deviations are those of the prediction and of jobs of one kind (``_BETWEEN_JOBS``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dl2d.core.array_types import Floats
from dl2d.core.cluster import Snapshot
from dl2d.core.jobs import Job, JobKey, JobRequest
from dl2d.core.measured_speeds_and_losses import SAME_SPEED_LOG_RATIO, SpeedPoint, TrainingKind
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.gaussian_process_prior import Group

# Heuristic thresholds: a job keeps its kind unless it is most probably of another one.
#: Standard deviations from the prediction for a kind beyond which a measurement contradicts the kind.
_CONTRADICTS = 3.0
#: Standard deviations from the prediction for a kind within which a job that is declared otherwise may be of this kind.
_AGREES = 2.0
#: Fraction of a job's measurements that may contradict its kind.
_MAX_CONTRADICTING = 0.2
#: Standard deviation of the logarithm of speed between jobs of one kind, which is added to the prediction's.
_BETWEEN_JOBS = 0.1
#: Difference in logarithms within which a measurement agrees in any case: just below ``SAME_SPEED_LOG_RATIO`` (a factor
#: of 1.28), so that rounding errors do not matter.
_NEAR = 0.999 * SAME_SPEED_LOG_RATIO
#: Standard deviation of the prediction from which on a kind is too uncertain for jobs to be recognised as of it.
_MAX_UNCERTAINTY = 0.5


class PredictedAs(NamedTuple):
    """The request and the measurements by which a job's speeds are predicted."""

    #: The job's own request, or with the model type of the kind whose speeds the job has.
    request: JobRequest
    #: Measurements that hold for this job alone: failed sizes (speed 0), and all others if it is of no known kind.
    own_measurements: tuple[SpeedPoint, ...] = ()
    #: Whether the job has the speeds of the kind of ``request``; otherwise of no known kind.
    of_known_kind: bool = True


class _SuspectJob(NamedTuple):
    """A job that may be relabelled: one of its measurements is not near the prediction for its kind."""

    job: Job
    #: Measurements of failed sizes (speed 0).
    failed: tuple[SpeedPoint, ...]
    #: The other measurements, at least one.
    measured: tuple[SpeedPoint, ...]


class _Misfits(NamedTuple):
    """Distances of the measurements of jobs from the predictions for kinds; all of shape (kinds, jobs)."""

    #: Largest distance at any size, in standard deviations.
    distance: Floats
    #: Fraction of the measurements that contradict the kind.
    contradicting: Floats
    #: Largest standard deviation of the prediction at any size.
    uncertainty: Floats
    #: Logarithm of the likelihood, up to a constant.
    log_likelihood: Floats


class Relabelling:
    """Kinds as which the jobs of a snapshot are predicted; the rules are in the module's docstring."""

    def __init__(self, snapshot: Snapshot, model: GaussianProcess) -> None:
        self._model = model
        self._predicted_as: dict[JobKey, PredictedAs] = {}
        points_of_jobs = {speeds.job: speeds.points for speeds in snapshot.job_speeds}
        # By group and bounds.
        suspects: dict[tuple[Group, int, int], list[_SuspectJob]] = defaultdict(list)
        for job in snapshot.jobs:
            request = job.request
            max_workers, max_ps = request.max_workers, request.max_ps
            # Points are accessed by index, which is faster than by name: there may be many.
            points = [
                point
                for point in points_of_jobs.get(job.key, ())
                if point[0][0] <= max_workers and point[0][1] <= max_ps
            ]
            failed = tuple([_without_times(point) for point in points if point[1] == 0])
            measured = [point for point in points if point[1] > 0]
            self._predicted_as[job.key] = PredictedAs(request, failed)
            if measured and not _all_near(model.predict_log_speeds(request)[0], measured):
                suspect = _SuspectJob(job, failed, tuple(map(_without_times, measured)))
                suspects[Group.of(TrainingKind.of(request)), max_workers, max_ps].append(suspect)
        for comparable in suspects.values():
            self._relabel(comparable)

    def of(self, job: Job) -> PredictedAs:
        """Return the request and the measurements by which a job is predicted."""
        return self._predicted_as[job.key]

    def _relabel(self, suspects: Sequence[_SuspectJob]) -> None:
        """Relabel jobs of one group and equal bounds where their measurements contradict their kind."""
        declared = [TrainingKind.of(suspect.job.request) for suspect in suspects]
        measured_kinds = [kind for kind in self._model.kinds if Group.of(kind) == Group.of(declared[0])]
        kinds = list(dict.fromkeys([*measured_kinds, *declared]))
        workers, ps = np.array([point.allocation for suspect in suspects for point in suspect.measured]).T
        requests = [replace(suspects[0].job.request, model=kind.model) for kind in kinds]
        predicted = [self._model.predict_log_speeds(request) for request in requests]
        means, deviations = (np.stack([grid[ps, workers] for grid in grids]) for grids in zip(*predicted, strict=True))
        misfits = _misfits(suspects, means, deviations)
        declared_index = np.array([kinds.index(kind) for kind in declared]), np.arange(len(suspects))
        contradicted = misfits.contradicting[declared_index] > _MAX_CONTRADICTING
        agrees = (misfits.distance <= _AGREES) & (misfits.uncertainty < _MAX_UNCERTAINTY)
        agrees[len(measured_kinds) :] = False  # kinds that were never measured cannot be chosen
        likeliest = np.where(agrees, misfits.log_likelihood, -np.inf).argmax(axis=0)
        for index in np.flatnonzero(contradicted).tolist():
            (job, failed, measured), best = suspects[index], likeliest[index]
            self._predicted_as[job.key] = (
                PredictedAs(replace(job.request, model=kinds[best].model), failed)
                if agrees[best, index]
                else PredictedAs(job.request, failed + measured, of_known_kind=False)
            )


def _misfits(suspects: Sequence[_SuspectJob], means: Floats, deviations: Floats) -> _Misfits:
    """Compare measurements with predictions.

    Parameters
    ----------
    means, deviations
        Predictions of the logarithm of samples/s for each kind at the sizes of all measurements, those of one job after
        those of the other; shape (kinds, measurements).
    """
    points = [point for suspect in suspects for point in suspect.measured]
    ends = np.cumsum([len(suspect.measured) for suspect in suspects]).tolist()
    starts = [0, *ends[:-1]]
    difference = np.abs(np.log([point.samples_per_second for point in points]) - means)
    deviation = np.hypot(deviations, _BETWEEN_JOBS)
    distance = difference / deviation
    negative_log = distance**2 / 2 + np.log(deviation)
    log_likelihood = -np.stack(
        [negative_log[:, start:end].sum(axis=1) for start, end in zip(starts, ends, strict=True)], axis=1
    )
    largest_distance = np.maximum.reduceat(distance, starts, axis=1)
    uncertainty = np.maximum.reduceat(deviations, starts, axis=1)
    counts = np.array([point.measurements for point in points], dtype=np.float64)
    contradicts = (distance > _CONTRADICTS) & (difference > SAME_SPEED_LOG_RATIO)
    contradicting = np.add.reduceat(np.where(contradicts, counts, 0.0), starts, axis=1)
    return _Misfits(largest_distance, contradicting / np.add.reduceat(counts, starts), uncertainty, log_likelihood)


def _without_times(point: SpeedPoint) -> SpeedPoint:
    """Keep size, speed and count alone, so that jobs that were measured alike at different times are predicted once."""
    return SpeedPoint(point.allocation, point.samples_per_second, point.measurements)


def _all_near(mean: Floats, points: Iterable[SpeedPoint]) -> bool:
    """Whether all measurements are near the predicted mean: a quick check that most jobs pass."""
    return all(abs(math.log(speed) - mean.item(ps, workers)) < _NEAR for (workers, ps), speed, *_ in points)
