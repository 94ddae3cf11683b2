"""Assumed training speeds of jobs that report none, so that the gate can replay them.

For a job of fixed size without a coordinator only the size and the run time are known. What it did is taken to be what
it takes this run time for: its recorded kinds train one sample a second at their most frequent size, and at other sizes
as the throughput model predicts from that one size. The replays draw from the deviations of this prediction, which are
large (``dl2d.throughput.gaussian_process``). So a policy that gives the recorded sizes is compared truly, and one that
gives others by what may be.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dl2d.core.jobs import NOTHING, Allocation, Job
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.core.store import History
from dl2d.learning.site_records.recorded_days import Day, DayJob
from dl2d.simulation.speeds.speed_models import Table
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.training_data import by_kind


def with_assumed_speeds(history: History) -> History:
    """A history in which jobs that report nothing have epochs instead of hours, and their kinds speeds.

    Kinds of which a speed was measured keep what was measured.
    """
    unreported = [job for job in history.jobs if job.unreported]
    measured = {each.kind for each in history.speeds if any(point.samples_per_second > 0 for point in each.points)}
    assumed = [
        MeasuredSpeeds(kind, (SpeedPoint(size, 1.0, 1, 1),))
        for kind, size in _usual_sizes(unreported, history).items()
        if kind not in measured
    ]
    speeds = (*(each for each in history.speeds if each.kind in measured), *assumed)
    model = GaussianProcess(by_kind(speeds))
    epochs_per_hour = {
        job.key: _speed(model, job, size) for job in unreported if (size := _recorded_size(job, history)) != NOTHING
    }
    return replace(
        history,
        jobs=tuple(_in_epochs(job, epochs_per_hour.get(job.key, 1.0)) for job in history.jobs),
        cluster_states=tuple(
            replace(each, epochs={key: done * epochs_per_hour.get(key, 1.0) for key, done in each.epochs.items()})
            for each in history.cluster_states
        ),
        speeds=speeds,
        assumed=frozenset(each.kind for each in assumed),
    )


def with_recorded_times(day: Day, assumed: Mapping[TrainingKind, Table], drawn: Mapping[TrainingKind, Table]) -> Day:
    """A day whose jobs that report nothing need their recorded run times at drawn speeds, as at assumed ones."""

    def in_time(job: DayJob) -> DayJob:
        kind, size = TrainingKind.of(job.request), next((size for _, size in job.sizes if size != NOTHING), NOTHING)
        if not job.unreported or size == NOTHING or kind not in drawn:
            return job
        before = assumed[kind].samples_per_second(*size)
        factor = drawn[kind].samples_per_second(*size) / before if before else 1.0
        return replace(job, epochs=job.epochs * factor, declared=job.declared * factor)

    return replace(day, jobs=tuple(map(in_time, day.jobs)))


def _usual_sizes(jobs: Sequence[Job], history: History) -> dict[TrainingKind, Allocation]:
    """Most frequent recorded size of each kind; of equally frequent ones the smallest."""
    sizes: dict[TrainingKind, Counter[Allocation]] = defaultdict(Counter)
    for job in jobs:
        if (size := _recorded_size(job, history)) != NOTHING:
            sizes[TrainingKind.of(job.request)][size] += 1
    return {kind: min(counted, key=lambda size: (-counted[size], size)) for kind, counted in sizes.items()}


def _recorded_size(job: Job, history: History) -> Allocation:
    """The size of a job of fixed size; ``NOTHING`` if it did not start in the recorded time."""
    return next((size for _, size in history.sizes.get(job.key, ()) if size != NOTHING), NOTHING)


def _speed(model: GaussianProcess, job: Job, size: Allocation) -> float:
    """Predicted samples/s at a recorded size. With a sample for each second of an epoch of an hour, epochs per hour."""
    speeds = model.predict_speeds(job.request)
    return float(speeds[min(size.ps, len(speeds) - 1), size.workers])


def _in_epochs(job: Job, epochs_per_hour: float) -> Job:
    if not job.unreported:
        return job
    declared, done = job.request.epochs * epochs_per_hour, job.progress.epoch * epochs_per_hour
    return replace(job, request=replace(job.request, epochs=declared), progress=replace(job.progress, epoch=done))
