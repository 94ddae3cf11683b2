"""Relabelling: a job whose measured speeds contradict its declared model type is predicted as another kind.

Each job of a snapshot is compared with what the throughput model predicts for its kind. It keeps its kind as long as
four of five of its measurements are within three standard deviations, or 28 %, of the prediction, since a node may have
been slow for a while. Otherwise it is predicted as the most likely other kind, among those of which all of its
measurements are within two standard deviations; or, if there is none, from its own measurements alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dl2d.core.cluster import Snapshot
from dl2d.core.jobs import Job, JobKey, JobRequest
from dl2d.core.measured_speeds import FAR, SpeedPoint, TrainingKind
from dl2d.throughput.gaussian_process import GaussianProcess

_Floats = NDArray[np.float64]

# Standard deviations between a measurement and the prediction for a kind: beyond the first it contradicts the kind,
# within the second a job that is declared to be of another kind may be of this one.
_CONTRADICTS: Final = 3.0
_AGREES: Final = 2.0
#: Part of a job's measurements that may contradict its kind.
_MAX_CONTRADICTING: Final = 0.2
#: Standard deviation of the logarithm of speed between jobs of one kind, which is added to the prediction's.
_BETWEEN_JOBS: Final = 0.1
#: Difference in logarithms within which a measurement agrees in any case: ``FAR``, less what rounding may do.
_NEAR: Final = 0.999 * FAR
#: Standard deviation of the prediction from which on a kind is too little known to be recognised.
_MAX_UNCERTAINTY: Final = 0.5


class Relabelled(NamedTuple):
    """What a job is predicted as."""

    #: Its own request, or with the model type of the kind whose speeds it has.
    request: JobRequest
    #: Measurements that hold for this job alone: failed sizes (speed 0), and all others if it is of no known kind.
    own: tuple[SpeedPoint, ...] = ()


class _Suspect(NamedTuple):
    """A job with a measurement that is not near the prediction for its kind."""

    job: Job
    #: Measurements of failed sizes (speed 0), and of others, of which there is at least one.
    failed: tuple[SpeedPoint, ...]
    measured: tuple[SpeedPoint, ...]


class _Misfits(NamedTuple):
    """Distance of the measurements of jobs from the predictions for kinds; all of shape (kinds, jobs)."""

    #: Largest distance at any size, in standard deviations.
    distance: _Floats
    #: Part of the measurements that contradict the kind.
    contradicting: _Floats
    #: Largest standard deviation of the prediction at any size.
    uncertainty: _Floats
    #: Logarithm of the likelihood, up to a constant.
    likelihood: _Floats


class Relabelling:
    """What each job of a snapshot is predicted as, see the module; by the throughput model of their kinds."""

    def __init__(self, snapshot: Snapshot, model: GaussianProcess) -> None:
        self._model = model
        self._predicted_as: dict[JobKey, Relabelled] = {}
        shown = {speeds.job: speeds.points for speeds in snapshot.job_speeds}
        suspects: dict[tuple[object, ...], list[_Suspect]] = defaultdict(list)
        means: dict[tuple[TrainingKind, int, int], _Floats] = {}
        for job in snapshot.jobs:
            request = job.request
            most_workers, most_ps = request.max_workers, request.max_ps
            within = [
                point for point in shown.get(job.key, ()) if point[0][0] <= most_workers and point[0][1] <= most_ps
            ]
            failed = tuple([_plain(point) for point in within if point[1] == 0])
            measured = [point for point in within if point[1] > 0]
            self._predicted_as[job.key] = Relabelled(request, failed)
            kind = TrainingKind.of(request)
            like = kind, most_workers, most_ps
            mean = means.get(like)
            if mean is None:
                mean = means[like] = model.predict(request)[0]
            if not _is_near(mean, measured):
                suspects[kind[1:], most_workers, most_ps].append(_Suspect(job, failed, tuple(map(_plain, measured))))
        for jobs in suspects.values():
            self._relabel(jobs)

    def of(self, job: Job) -> Relabelled:
        """What a job is predicted as."""
        return self._predicted_as[job.key]

    def _relabel(self, suspects: Sequence[_Suspect]) -> None:
        """Decide what jobs of one architecture, consistency and bounds are predicted as."""
        said = [TrainingKind.of(each.job.request) for each in suspects]
        rivals = [kind for kind in self._model.kinds if kind[1:] == said[0][1:]]
        kinds = list(dict.fromkeys([*rivals, *said]))
        workers, ps = np.array([point.allocation for each in suspects for point in each.measured]).T
        predicted = [self._model.predict(replace(suspects[0].job.request, model=kind.model)) for kind in kinds]
        means, deviations = (np.stack([each[ps, workers] for each in some]) for some in zip(*predicted, strict=True))
        fit = _misfits(suspects, means, deviations)
        own = np.array([kinds.index(kind) for kind in said]), np.arange(len(suspects))
        wrong = fit.contradicting[own] > _MAX_CONTRADICTING
        one_of = (fit.distance <= _AGREES) & (fit.uncertainty < _MAX_UNCERTAINTY)
        one_of[len(rivals) :] = False
        likeliest = np.where(one_of, fit.likelihood, -np.inf).argmax(axis=0)
        for number in np.flatnonzero(wrong).tolist():
            (job, failed, measured), best = suspects[number], likeliest[number]
            self._predicted_as[job.key] = (
                Relabelled(replace(job.request, model=kinds[best].model), failed)
                if one_of[best, number]
                else Relabelled(job.request, failed + measured)
            )


def _misfits(suspects: Sequence[_Suspect], means: _Floats, deviations: _Floats) -> _Misfits:
    """From predictions for kinds at the sizes of all measurements, job after job; both of shape (kinds, sizes)."""
    points = [point for each in suspects for point in each.measured]
    ends = np.cumsum([len(each.measured) for each in suspects]).tolist()
    starts = [0, *ends[:-1]]
    far = np.abs(np.log([point.samples_per_second for point in points]) - means)
    spread = np.hypot(deviations, _BETWEEN_JOBS)
    distance = far / spread
    unlikely = distance**2 / 2 + np.log(spread)
    likelihood = -np.stack(
        [unlikely[:, start:end].sum(axis=1) for start, end in zip(starts, ends, strict=True)], axis=1
    )
    largest, uncertainty = (np.maximum.reduceat(each, starts, axis=1) for each in (distance, deviations))
    times = np.array([point.measurements for point in points], dtype=np.float64)
    contradicting = np.add.reduceat(np.where((distance > _CONTRADICTS) & (far > FAR), times, 0.0), starts, axis=1)
    return _Misfits(largest, contradicting / np.add.reduceat(times, starts), uncertainty, likelihood)


def _plain(point: SpeedPoint) -> SpeedPoint:
    return SpeedPoint(point.allocation, point.samples_per_second, point.measurements)


def _is_near(mean: _Floats, points: Iterable[SpeedPoint]) -> bool:
    """Whether all measurements are near the prediction: a quick check that most jobs pass."""
    return all(abs(math.log(speed) - mean.item(ps, workers)) < _NEAR for (workers, ps), speed, *_ in points)
