"""Splits a site's recorded days into workloads for training, validation and testing of a policy."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from dl2d.core.errors import WorkloadError, counted
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds
from dl2d.core.progress_callback import Tell, silent
from dl2d.core.store import History, RecordedSizes
from dl2d.learning.site_records.digital_twin import Speeds, costs_of, workload_of
from dl2d.learning.site_records.recorded_days import (
    DAY_SECONDS,
    Day,
    days_of,
    deleted_days,
    learnt_from,
    numbered,
    period_of,
    recorded_sizes,
    resampled,
    thinned,
)
from dl2d.learning.site_records.speeds_assumed_for_unmeasured_jobs import with_recorded_times
from dl2d.simulation.realism import Realism
from dl2d.simulation.replay import Replayed
from dl2d.simulation.speeds.speed_models import MAX_TASKS
from dl2d.simulation.workload.workload_file import Workload
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.training_data import by_kind

_T = TypeVar("_T")
#: Name of the case that has the speeds which the throughput model expects, among those of several consecutive days.
EXPECTED_SPEEDS = "expected speeds"
#: What follows the seed in the seeds of generators.
_TRAINING, _VALIDATION, _TEST, _PERIOD = range(4)
#: The newest quarter of the days with jobs is held out for testing.
_HELD_OUT = 1 / 4
#: Maximum number of recorded days among the workloads that the best weights are chosen by.
_MAX_VALIDATION_DAYS = 4
#: Maximum number of jobs of a day, about; where there are more, it is played as that of a smaller site.
_MAX_TRAINED, _MAX_COMPARED = 120, 300
#: At most 16 draws of the speeds of days that are compared as one workload, fewer if more than 20,000 jobs would be
#: replayed, at least 2. With few draws the interval over speeds is wide.
_MAX_DRAWS, _MAX_JOBS_REPLAYED = 16, 20_000


@dataclass(frozen=True, slots=True)
class Case:
    """A workload to compare policies on, made from one recorded day or from several consecutive ones."""

    name: str
    workload: Workload
    #: Number of jobs submitted on each day (YYYY-MM-DD) of which completion times are compared.
    jobs: Mapping[str, int]
    #: Ids of the jobs that are compared, by day; empty where all of them count for the only day.
    compared: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: Sizes that jobs were recorded with, by job id; times are in seconds of the workload.
    sizes: Mapping[str, RecordedSizes] = field(default_factory=dict)
    #: Number of the jobs compared, by day, whose speeds are assumed (``speeds_assumed_for_unmeasured_jobs``).
    assumed: Mapping[str, int] = field(default_factory=dict)
    #: Number of the draw of the speeds; 0: the expected speeds.
    draw: int = 0

    @property
    def awaited(self) -> frozenset[str]:
        """Ids of the jobs whose ends a replay waits for; empty for all."""
        return frozenset(itertools.chain.from_iterable(self.compared.values()))

    def times_by_day(self, replayed: Replayed) -> dict[str, float]:
        """Mean completion time in slots of the jobs of each day."""
        if not self.compared:
            return dict.fromkeys(self.jobs, replayed.avg_jct)
        times = {job.id: job.jct for job in replayed.jobs}
        return {day: statistics.fmean(times[job] for job in jobs) for day, jobs in self.compared.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Workloads to train on, to choose the best weights by, and to compare on; no day is among both last and others."""

    trained_on: tuple[Day, ...]
    held_out: tuple[Day, ...]
    training: tuple[Workload, ...]
    validation: tuple[Workload, ...]
    cases: tuple[Case, ...]
    #: The days to compare on as one workload, to compare with what was recorded.
    period_cases: tuple[Case, ...]
    costs: Realism
    #: What was measured of the kinds of jobs that came.
    measured: tuple[MeasuredSpeeds, ...]
    #: Number of jobs that were submitted on the days to compare on and are not in ``period_cases``, since a size that
    #: they were recorded with does not fit what the nodes offered at most times of the day.
    too_large: int
    #: Number of days that are left out since jobs or decisions of them were deleted.
    deleted: int

    @property
    def held_out_times(self) -> list[tuple[float, float]]:
        """Begin and end of each day to compare on, in seconds since 1970."""
        return [(day.begin, day.begin + DAY_SECONDS) for day in self.held_out]

    @property
    def jobs(self) -> int:
        """Number of jobs that were submitted on the days to compare on."""
        return sum(day.submitted for day in self.held_out)

    @property
    def unreported(self) -> int:
        """Number of those of them whose speeds are assumed (``speeds_assumed_for_unmeasured_jobs``)."""
        return sum(day.unreported for day in self.held_out)


def split_history(
    history: History, slot_seconds: float, *, seed: int, min_days: int = 3, draws: int = 24, tests: int = 20,
    learned: Container[str] = (), for_training: bool = True, expected_speeds: bool = False, since: float = -math.inf,
    tell: Tell = silent,
) -> Split:  # fmt: skip
    """Workloads made from a recorded history; the newest days are held out for testing.

    Days of which no job has ended yet have nothing to compare: they are held out only where there are too few others.

    Parameters
    ----------
    slot_seconds
        Length of an interval.
    min_days
        Number of days to keep back where a quarter of them would be fewer; at least one day is trained on.
    draws
        Workloads to train on; each has speeds of its own, and those beyond the recorded days' have a drawn day.
    tests
        Workloads to compare on, about: the days that are held out, with expected speeds and then with drawn ones.
    learned
        Days (YYYY-MM-DD) that are not held out: what is compared was trained on them.
    for_training
        Whether there are to be workloads to train on; otherwise all days that may be are held out.
    expected_speeds
        Whether workloads to train on and to choose the best weights by have the expected speeds instead of drawn ones:
        for a policy that sees no speeds the differences between draws are noise.
    since
        Seconds since 1970. Days that begin earlier are not compared or trained on; only their measured speeds are used,
        so that comparisons on the same days have the same speeds.
    tell
        Is told which days were looked at, and how many workloads were made.

    Raises
    ------
    WorkloadError
        Jobs came on less than two days, all of them were learned from, or no job has ended: there is nothing to train
        on and test with.
    """
    measured_on = days_of(history, partial(tell, "recorded days looked at"))
    recorded = [day for day in measured_on if day.begin >= since]
    deleted = deleted_days(history, since)
    days = [day for day in recorded if day.submitted]
    if len(days) < (2 if for_training else 1):
        assumed = any(job.unreported for job in history.jobs)
        left_out = "" if assumed else "; jobs of fixed size report no speeds and do not count"
        too_large = sum(len(day.too_large) for day in recorded)
        not_counted = [
            *([too_large_in_words(too_large)] if too_large else []),
            *([deleted_in_words(deleted)] if deleted else []),
        ]
        if not_counted:
            left_out += f"; not counted: {' and '.join(not_counted)}"
        raise WorkloadError(
            "", f"jobs with measured {'or assumed ' if assumed else ''}speeds{' that fit the nodes' * bool(too_large)} "
            f"were submitted on {len(days)} of the recorded days; at least {2 if for_training else 1} are needed (only "
            f"whole days in UTC count, recorded for more than half of them{left_out})",
            where="the twin",
        )  # fmt: skip
    unseen = [day for day in days if day.name not in learned]
    if not unseen:
        raise WorkloadError(
            "", f"the candidate was trained on all {len(days)} recorded days, so none is left to compare it on; record "
            "another day", where="the twin",
        )  # fmt: skip
    kept = min(max(min_days, int(len(days) * _HELD_OUT)), len(days) - 1) if for_training else len(days)
    chosen = sorted(unseen, key=lambda day: (day.has_ended_jobs, day.begin))[-kept:]
    held_out = tuple(sorted(chosen, key=lambda day: day.begin))
    trained_on = tuple(day for day in days if day not in held_out) if for_training else ()
    measured = learnt_from(history, measured_on)
    requests = [job.request for day in measured_on for job in day.jobs]
    speeds = Speeds(GaussianProcess(by_kind(measured)), requests, history.assumed)
    training, validation = [], []
    periods, tests_of_day = list(_periods(history, held_out)), max(2, tests // len(held_out))
    count = tests_of_day * len(held_out) + _draws(periods) * len(periods)
    count += (draws + 2 * _MAX_VALIDATION_DAYS) * for_training
    numbers = itertools.count(1)

    def told(made: Iterable[_T]) -> Iterator[_T]:
        for each in made:
            yield each
            tell("workloads made of recorded days", next(numbers), count)

    if for_training:
        played = partial(_played, speeds=speeds, slot_seconds=slot_seconds, expected=expected_speeds)
        training = list(told(played(trained_on, rng=np.random.default_rng([seed, _TRAINING]), count=draws)))
        rng = np.random.default_rng([seed, _VALIDATION])
        validation = list(told(played(trained_on[-_MAX_VALIDATION_DAYS:], rng=rng, count=2 * _MAX_VALIDATION_DAYS)))
    rng = np.random.default_rng([seed, _TEST])
    cases = []
    for number, day in told(itertools.product(range(tests_of_day), held_out)):
        small = thinned(day, _MAX_COMPARED, rng)
        workload = workload_of(small, speeds.draw(rng) if number else speeds.means(), slot_seconds)
        if workload is not None and (case := _day_case(day, small, workload, number)) is not None:
            cases.append(case)
    if not cases and not any(job.length_known for day in held_out for job in day.jobs):
        raise WorkloadError(
            "", "none of the jobs that were submitted on the recorded days has ended yet, so there are no completion "
            "times to compare; record until some have", where="the twin",
        )  # fmt: skip
    if not cases or (for_training and not (training and validation)):
        raise WorkloadError(
            "", "no recorded job has a size at which its speed is known or can be predicted", where="the twin"
        )
    return Split(
        trained_on=trained_on,
        held_out=held_out,
        training=tuple(training),
        validation=tuple(validation),
        cases=tuple(cases),
        period_cases=tuple(told(_period_cases(periods, speeds, slot_seconds, np.random.default_rng([seed, _PERIOD])))),
        costs=costs_of(history),
        measured=measured,
        too_large=sum(
            any(day.includes(whole.begin + at) for day in days) for whole, days in periods for at in whole.too_large
        ),
        deleted=deleted,
    )


def too_large_in_words(jobs: int) -> str:
    """Jobs that are left out since they do not fit, as messages name them."""
    return f"{counted(jobs, 'job')} larger than the nodes at most times of the day, or than {MAX_TASKS} tasks"


def deleted_in_words(days: int) -> str:
    """Days that are left out since rows were deleted, as messages name them."""
    keys = "store.keep_decisions_days, store.keep_jobs_days"
    return f"{counted(days, 'day')} of which decisions or jobs are no longer stored ({keys})"


def _day_case(day: Day, small: Day, workload: Workload, draw: int) -> Case | None:
    """A day as a case of its own: compared are its jobs that have ended by now; None if none has.

    How long the others are is unknown, and a replay would wait for them for ever. They take part until the compared
    ones have ended, under both policies, so that the latter get no nodes that they would not have.
    """
    present = {job.id for job in workload.jobs}
    compared = [number for number, job in numbered(small) if number in present and job.length_known]
    if not compared:
        return None
    counted = [job for job in day.jobs if job.at > 0 and job.length_known]
    return Case(
        f"{day.name}, draw {draw}" if draw else day.name, workload, {day.name: len(counted)}, {day.name: compared},
        assumed={day.name: sum(job.unreported for job in counted)}, draw=draw,
    )  # fmt: skip


def _periods(history: History, days: Sequence[Day]) -> Iterator[tuple[Day, Sequence[Day]]]:
    """All that came from the first of some days on as one long day, and these days.

    If each day were a workload of its own, the jobs of the following day would be missing in it: a policy would have
    all nodes for the last jobs of the day, while the recorded sizes are those that were left beside the next ones. For
    the same reason nothing is thinned. Days with other nodes than the day before begin a new one.
    """
    periods = [tuple(group) for _, group in itertools.groupby(days, key=lambda day: sorted(day.nodes, key=str))]
    ends = [*(period[0].begin for period in periods[1:]), history.end]
    for period, end in zip(periods, ends, strict=True):
        if (whole := period_of(history, period[0].begin, end)) is not None:
            yield whole, period


def _period_cases(
    periods: Sequence[tuple[Day, Sequence[Day]]], speeds: Speeds, slot_seconds: float, rng: np.random.Generator
) -> Iterator[Case]:
    """Each period as a workload, with expected speeds and then with drawn ones, and the sizes that jobs had.

    A draw is the same for all periods. Compared are the jobs that have recorded sizes and ended in the recorded time:
    how long others would have taken is unknown.
    """
    means = speeds.means()
    draws = [means, *(speeds.draw(rng) for _ in range(1, _draws(periods)))]
    for whole, period in periods:
        for draw, tables in enumerate(draws):
            workload = workload_of(with_recorded_times(whole, means, tables), tables, slot_seconds)
            compared = {} if workload is None else _compared_jobs(whole, period, {job.id for job in workload.jobs})
            if workload is None or not compared:
                break
            counts = {day: len(jobs) for day, jobs in compared.items()}
            unreported = {number for number, job in numbered(whole) if job.unreported}
            assumed = {day: len(unreported.intersection(jobs)) for day, jobs in compared.items()}
            name = f"draw {draw}" if draw else EXPECTED_SPEEDS
            yield Case(name, workload, counts, compared, recorded_sizes(whole), assumed, draw)


def _draws(periods: Sequence[tuple[Day, Sequence[Day]]]) -> int:
    """With how many different speeds periods are replayed."""
    jobs = sum(len(whole.jobs) for whole, _ in periods)
    return max(2, min(_MAX_DRAWS, _MAX_JOBS_REPLAYED // max(jobs, 1)))


def _compared_jobs(whole: Day, days: Sequence[Day], present: Container[str]) -> dict[str, list[str]]:
    """Ids of the jobs that were submitted on each of the days, have recorded sizes, and ended in the recorded time."""
    jobs = {
        day.name: [
            number
            for number, job in numbered(whole)
            if number in present
            and job.ended
            and job.sizes
            # At 0 stand those that were there before.
            and job.at > 0
            and day.includes(whole.begin + job.at)
        ]
        for day in days
    }
    return {name: ids for name, ids in jobs.items() if ids}


def _played(
    days: Sequence[Day], *, speeds: Speeds, slot_seconds: float, rng: np.random.Generator, count: int, expected: bool
) -> Iterator[Workload]:
    """The days as recorded, then drawn ones; each with the expected speeds, or with speeds of its own."""
    means = speeds.means() if expected else None
    for number in range(count):
        day = days[number] if number < len(days) else resampled(days, rng)
        workload = workload_of(thinned(day, _MAX_TRAINED, rng), means or speeds.draw(rng), slot_seconds)
        if workload is not None:
            yield workload
