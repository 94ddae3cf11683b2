"""What a job is, whatever its user says: jobs whose speeds are not those of their kind are taken as what they show."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from dl2d.core.cluster import Snapshot
from dl2d.core.jobs import Job, JobKey, JobRequest
from dl2d.core.measured import FAR, SpeedPoint, TrainingKind
from dl2d.policies.belief import Belief

#: Deviations from what is believed of a kind from which on a job is none of it, and within which it may be one.
_NONE: Final = 3.0
_ONE: Final = 2.0
#: Deviation of a job's speed from its kind's that is nothing special.
_USUAL: Final = 0.1
#: Well within what is far, rounded however it may be.
_NEAR: Final = 0.999 * FAR
#: Deviation of the logarithm of a kind's speed beyond which too little is known of it to recognise a job by.
_KNOWN: Final = 0.5


class Shown(NamedTuple):
    """What a job is taken as."""

    #: Its own, or with the model of the kind whose speeds it has.
    request: JobRequest
    #: What it showed itself, if it is of a kind of its own; and in any case sizes at which it stood still.
    own: tuple[SpeedPoint, ...] = ()


class _Misfit(NamedTuple):
    """How far what a job showed is off what is believed of a kind."""

    #: The most at any size, in deviations and as a logarithm.
    apart: float
    far: float
    #: The largest deviation at any size of what is believed.
    doubt: float
    #: Logarithm of the likelihood, but for a constant.
    likelihood: float


class Labels:
    """What the jobs of a snapshot are taken as, by a belief of the speeds of kinds.

    A job stays what its user says as long as its speeds, each at its size, are within three deviations (and 28 %) of
    what is believed there. Else it is taken as of the kind that is likeliest by its speeds, of those that are within
    two; else nothing but what it showed itself, and what all kinds share, is believed of it.
    """

    def __init__(self, snapshot: Snapshot, belief: Belief) -> None:
        self._belief = belief
        self._shown = {speeds.job: speeds.points for speeds in snapshot.job_speeds}
        self._taken: dict[JobKey, Shown] = {}

    def of(self, job: Job) -> Shown:
        """What a job is taken as."""
        if job.key not in self._taken:
            self._taken[job.key] = self._take(job.request, self._shown.get(job.key, ()))
        return self._taken[job.key]

    def _take(self, request: JobRequest, points: Iterable[SpeedPoint]) -> Shown:
        within = [point for point in points if _within(request, point)]
        still = tuple(_plain(point) for point in within if point.samples_per_second == 0)
        moved = tuple(_plain(point) for point in within if point.samples_per_second > 0)
        if self._is_near(request, moved):
            return Shown(request, still)
        said = self._misfit(request, moved)
        if said.apart <= _NONE or said.far <= FAR:
            return Shown(request, still)
        best, likeliest = None, -np.inf
        for kind in self._belief.kinds:
            if kind[1:] != TrainingKind.of(request)[1:]:
                continue
            other = replace(request, model=kind.model)
            fit = self._misfit(other, moved)
            if fit.apart <= _ONE and fit.doubt < _KNOWN and fit.likelihood > likeliest:
                best, likeliest = other, fit.likelihood
        return Shown(request, still + moved) if best is None else Shown(best, still)

    def _is_near(self, request: JobRequest, points: Iterable[SpeedPoint]) -> bool:
        """Whether all speeds are so near that nothing else matters; most are, and this is known faster."""
        mean, _ = self._belief.mean_sd(request)
        has_ps = mean.shape[0] > 1
        return all(
            abs(math.log(speed) - float(mean[size.ps if has_ps else 0, size.workers])) < _NEAR
            for size, speed, *_ in points
        )

    def _misfit(self, request: JobRequest, points: tuple[SpeedPoint, ...]) -> _Misfit:
        if not points:
            return _Misfit(0.0, 0.0, 0.0, 0.0)
        mean, deviation = self._belief.mean_sd(request)
        has_ps = mean.shape[0] > 1
        places = tuple(np.array([(size.ps if has_ps else 0, size.workers) for size, *_ in points]).T)
        far = np.abs(np.log([point.samples_per_second for point in points]) - mean[places])
        usual = np.hypot(deviation[places], _USUAL)
        apart = far / usual
        likelihood = -float((apart**2 / 2 + np.log(usual)).sum())
        return _Misfit(float(apart.max()), float(far.max()), float(deviation[places].max()), likelihood)


def _plain(point: SpeedPoint) -> SpeedPoint:
    return SpeedPoint(point.allocation, point.samples_per_second, point.measurements)


def _within(request: JobRequest, point: SpeedPoint) -> bool:
    return point.allocation.workers <= request.max_workers and point.allocation.ps <= request.max_ps
