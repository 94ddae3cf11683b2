"""What a job is, whatever its user says: jobs whose speeds are not those of their kind are taken as what they show."""

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
from dl2d.core.measured import FAR, SpeedPoint, TrainingKind
from dl2d.throughput.gaussian_process import GaussianProcess

_Floats = NDArray[np.float64]

#: Deviations from what is believed of a kind from which on a job is none of it, and within which it may be one.
_NONE: Final = 3.0
_ONE: Final = 2.0
#: Part of a job's measurements that may be none of its kind's: a node may have been slow for a moment.
_STRANGE: Final = 0.2
#: Deviation of a job's speed from its kind's that is nothing special.
_USUAL: Final = 0.1
#: Well within what is far, rounded however it may be.
_NEAR: Final = 0.999 * FAR
#: Deviation of the logarithm of a kind's speed beyond which too little is known of it to recognise a job by.
_KNOWN: Final = 0.5


class Relabelled(NamedTuple):
    """What a job is taken as."""

    #: Its own, or with the model of the kind whose speeds it has.
    request: JobRequest
    #: What it showed itself, if it is of a kind of its own; and in any case sizes at which it stood still.
    own: tuple[SpeedPoint, ...] = ()


class _Odd(NamedTuple):
    """A job that is not near what is believed of its kind."""

    job: Job
    #: Sizes at which it stood still, and what it showed at others, of which there are some.
    still: tuple[SpeedPoint, ...]
    moved: tuple[SpeedPoint, ...]


class _Misfits(NamedTuple):
    """How far what each of some jobs showed is off what is believed of each of some kinds; all shape (kinds, jobs)."""

    #: The most at any size, in deviations.
    apart: _Floats
    #: Part of the measurements that a job of the kind would not show.
    strange: _Floats
    #: The largest deviation at any size of what is believed.
    doubt: _Floats
    #: Logarithm of the likelihood, but for a constant.
    likelihood: _Floats


class Relabelling:
    """What the jobs of a snapshot are taken as, by a belief of the speeds of kinds.

    A job stays what its user says as long as four of five speeds that it showed are within three deviations, or 28 %,
    of what is believed at their sizes: a slow node, or a slow moment, says nothing of what it is. Else it is taken as
    of the kind that is likeliest by its speeds, of those that are within two; else nothing but what it showed itself,
    and what all kinds share, is believed of it.
    """

    def __init__(self, snapshot: Snapshot, belief: GaussianProcess) -> None:
        self._belief = belief
        self._taken: dict[JobKey, Relabelled] = {}
        shown = {speeds.job: speeds.points for speeds in snapshot.job_speeds}
        odd: dict[tuple[object, ...], list[_Odd]] = defaultdict(list)
        means: dict[tuple[TrainingKind, int, int], _Floats] = {}
        for job in snapshot.jobs:
            request = job.request
            most_workers, most_ps = request.max_workers, request.max_ps
            within = [
                point for point in shown.get(job.key, ()) if point[0][0] <= most_workers and point[0][1] <= most_ps
            ]
            still = tuple([_plain(point) for point in within if point[1] == 0])
            moved = [point for point in within if point[1] > 0]
            self._taken[job.key] = Relabelled(request, still)
            kind = TrainingKind.of(request)
            like = kind, most_workers, most_ps
            mean = means.get(like)
            if mean is None:
                mean = means[like] = belief.predict(request)[0]
            if not _is_near(mean, moved):
                odd[kind[1:], most_workers, most_ps].append(_Odd(job, still, tuple(map(_plain, moved))))
        for jobs in odd.values():
            self._recognise(jobs)

    def of(self, job: Job) -> Relabelled:
        """What a job is taken as."""
        return self._taken[job.key]

    def _recognise(self, odd: Sequence[_Odd]) -> None:
        """Take jobs of one architecture, consistency and bounds as what their speeds say they are."""
        said = [TrainingKind.of(each.job.request) for each in odd]
        rivals = [kind for kind in self._belief.kinds if kind[1:] == said[0][1:]]
        kinds = list(dict.fromkeys([*rivals, *said]))
        workers, ps = np.array([point.allocation for each in odd for point in each.moved]).T
        predicted = [self._belief.predict(replace(odd[0].job.request, model=kind.model)) for kind in kinds]
        means, deviations = (np.stack([each[ps, workers] for each in some]) for some in zip(*predicted, strict=True))
        fit = _misfits(odd, means, deviations)
        own = np.array([kinds.index(kind) for kind in said]), np.arange(len(odd))
        wrong = fit.strange[own] > _STRANGE
        one_of = (fit.apart <= _ONE) & (fit.doubt < _KNOWN)
        one_of[len(rivals) :] = False
        likeliest = np.where(one_of, fit.likelihood, -np.inf).argmax(axis=0)
        for number in np.flatnonzero(wrong).tolist():
            (job, still, moved), best = odd[number], likeliest[number]
            self._taken[job.key] = (
                Relabelled(replace(job.request, model=kinds[best].model), still)
                if one_of[best, number]
                else Relabelled(job.request, still + moved)
            )


def _misfits(odd: Sequence[_Odd], means: _Floats, deviations: _Floats) -> _Misfits:
    """By what is believed of each kind where jobs showed something, one after the other; both shape (kinds, sizes)."""
    points = [point for each in odd for point in each.moved]
    ends = np.cumsum([len(each.moved) for each in odd]).tolist()
    starts = [0, *ends[:-1]]
    far = np.abs(np.log([point.samples_per_second for point in points]) - means)
    usual = np.hypot(deviations, _USUAL)
    apart = far / usual
    unlikely = apart**2 / 2 + np.log(usual)
    likelihood = -np.stack(
        [unlikely[:, start:end].sum(axis=1) for start, end in zip(starts, ends, strict=True)], axis=1
    )
    most, doubt = (np.maximum.reduceat(each, starts, axis=1) for each in (apart, deviations))
    times = np.array([point.measurements for point in points], dtype=np.float64)
    strange = np.add.reduceat(np.where((apart > _NONE) & (far > FAR), times, 0.0), starts, axis=1)
    return _Misfits(most, strange / np.add.reduceat(times, starts), doubt, likelihood)


def _plain(point: SpeedPoint) -> SpeedPoint:
    return SpeedPoint(point.allocation, point.samples_per_second, point.measurements)


def _is_near(mean: _Floats, points: Iterable[SpeedPoint]) -> bool:
    """Whether all speeds are so near that nothing else matters; most are, and this is known faster."""
    return all(abs(math.log(speed) - mean.item(ps, workers)) < _NEAR for (workers, ps), speed, *_ in points)
