"""Splits a site's recorded days into workloads for training, validation and testing of a policy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dl2d.core.errors import WorkloadError
from dl2d.core.measured_speeds import MeasuredSpeeds
from dl2d.core.site_history import History, RecordedSizes
from dl2d.learning.digital_twin import (
    Day,
    Speeds,
    costs_of,
    days_of,
    learnt_from,
    recorded_sizes,
    resampled,
    thinned,
    workload_of,
)
from dl2d.simulation.speeds.realism_options import Realism
from dl2d.simulation.workload.format import Workload
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.observations import by_kind

#: What follows the seed in the seeds of generators.
_TRAINING, _VALIDATION, _TEST = range(3)
#: Of the days with jobs, the newest quarter is kept back for testing.
_HELD_OUT: Final = 1 / 4
#: Most recorded days among the workloads that the best weights are chosen by.
_MOST_LOOKED_AT: Final = 4
#: Most jobs of a day, about; where there are more, it is played as that of a smaller site.
_MOST_TRAINED, _MOST_COMPARED = 120, 300


@dataclass(frozen=True, slots=True)
class Case:
    """A workload to compare policies on, made from a recorded day."""

    name: str
    workload: Workload
    day: str
    #: Number of jobs that were submitted on that day.
    jobs: int
    #: Sizes that jobs were recorded with, by job id; times are in seconds of the workload.
    sizes: Mapping[str, RecordedSizes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Workloads to train on, to choose the best weights by, and to compare on; no day is among both last and others."""

    trained_on: tuple[Day, ...]
    held_out: tuple[Day, ...]
    training: tuple[Workload, ...]
    validation: tuple[Workload, ...]
    cases: tuple[Case, ...]
    costs: Realism
    #: What was measured of the kinds of jobs that came.
    measured: tuple[MeasuredSpeeds, ...]


def split_history(
    history: History, slot_seconds: float, *, seed: int, min_days: int = 3, draws: int = 24, tests: int = 20
) -> Split:
    """Workloads made from a recorded history; the newest days are kept back for testing.

    Parameters
    ----------
    slot_seconds
        Length of an interval.
    min_days
        Number of days to keep back where a quarter of them would be fewer; at least one day is trained on.
    draws
        Workloads to train on; each has speeds of its own, and those beyond the recorded days' have a drawn day.
    tests
        Workloads to compare on, about: the days that are kept back, with expected speeds and then with drawn ones.

    Raises
    ------
    WorkloadError
        Jobs came on less than two days: there is nothing to train on and to test with.
    """
    days = days_of(history)
    if len(days) < 2:
        raise WorkloadError(
            "", f"jobs with measured speeds were submitted on {len(days)} of the recorded days; at least 2 are "
            "needed (only whole days in UTC count; jobs of fixed size report no speeds and do not count)",
            where="the twin",
        )  # fmt: skip
    kept = min(max(min_days, int(len(days) * _HELD_OUT)), len(days) - 1)
    trained_on, held_out = days[:-kept], days[-kept:]
    measured = learnt_from(history, days)
    speeds = Speeds(GaussianProcess(by_kind(measured)), [job.request for day in days for job in day.jobs])
    training = list(_played(trained_on, speeds, slot_seconds, np.random.default_rng([seed, _TRAINING]), draws))
    rng = np.random.default_rng([seed, _VALIDATION])
    validation = list(_played(trained_on[-_MOST_LOOKED_AT:], speeds, slot_seconds, rng, 2 * _MOST_LOOKED_AT))
    rng = np.random.default_rng([seed, _TEST])
    cases = []
    for number in range(max(2, tests // len(held_out))):
        for day in held_out:
            small = thinned(day, _MOST_COMPARED, rng)
            workload = workload_of(small, speeds.draw(rng) if number else speeds.means(), slot_seconds)
            if workload is not None:
                name = f"{day.name}, draw {number}" if number else day.name
                cases.append(Case(name, workload, day.name, day.submitted, recorded_sizes(small)))
    if not training or not validation or not cases:
        raise WorkloadError(
            "", "no recorded job has a size at which its speed is known or can be predicted", where="the twin"
        )
    return Split(
        trained_on=trained_on,
        held_out=held_out,
        training=tuple(training),
        validation=tuple(validation),
        cases=tuple(cases),
        costs=costs_of(history),
        measured=measured,
    )


def _played(
    days: Sequence[Day], speeds: Speeds, slot_seconds: float, rng: np.random.Generator, count: int
) -> Iterator[Workload]:
    """The days as recorded, then drawn ones; each with speeds of its own."""
    for number in range(count):
        day = days[number] if number < len(days) else resampled(days, rng)
        workload = workload_of(thinned(day, _MOST_TRAINED, rng), speeds.draw(rng), slot_seconds)
        if workload is not None:
            yield workload
