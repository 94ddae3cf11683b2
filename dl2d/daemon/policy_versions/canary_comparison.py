"""Comparison of the two groups of a canary, and the rule by which it ends.

A job's time is from submission to end, by its work (samples or steps). A day (UTC) is one sample: the mean logarithm of
the times of its jobs in the policy's group less that of the others, with the mean of each kind of job taken away, so
that a day's load, which both groups share, and the kinds of its jobs cancel out. A day counts once all jobs that were
submitted on it have ended, or were submitted half of the canary's time ago: otherwise jobs that take long would be
missing. One that takes longer counts with that time, in either group (a restricted mean).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dl2d.config.settings import CanarySettings
from dl2d.core.confidence_interval import CONFIDENCE, estimate
from dl2d.core.daemon_mode_and_canary import Canary, CanaryJob, CanaryState
from dl2d.core.errors import counted

DAY_SECONDS = 86_400.0
_MIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryComparison:
    """The two groups of a canary. ``change`` is the policy's completion time divided by the fallback's, minus 1."""

    #: Jobs of each group that ended, of all that were submitted since it began; those that did not finish among them.
    ended: int
    ended_others: int
    failed: int
    failed_others: int
    #: Jobs of each group that are compared, on the days that count, and the number of these days.
    jobs: int
    others: int
    days: int
    #: None where no day counts, and without an interval where only one does.
    change: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def text(self) -> str:
        """The comparison in words."""
        compared = f"{counted(self.jobs, 'job')} and {counted(self.others, 'other')} on {counted(self.days, 'day')}"
        if self.change is None:
            return f"nothing can be compared yet: {self.ended} jobs of the policy and {self.ended_others} others ended"
        if self.low is None or self.high is None:
            return f"completion time {self.change:+.1%}, no interval yet, from {compared}"
        return f"completion time {self.change:+.1%} ({self.low:+.1%} to {self.high:+.1%}), from {compared}"


def compare_groups(jobs: Sequence[CanaryJob], now: float, max_days: float) -> CanaryComparison:
    """Compare the jobs of both groups that finished, or ran for ``max_days`` / 2.

    The interval is Student's over the days. A canary is judged again with each day that counts, so its level is
    95 % for all these times together: for each 1 - 0.05 / ``max_days`` (Bonferroni).
    """
    longest = max_days * DAY_SECONDS / 2
    by_day: dict[int, list[CanaryJob]] = defaultdict(list)
    for job in jobs:
        by_day[int(job.submitted // DAY_SECONDS)].append(job)
    complete = [
        [job for job in of_day if job.work > 0 and (job.finished or _seconds(job, now) >= longest)]
        for day, of_day in by_day.items()
        if (day + 1) * DAY_SECONDS <= now
        and all(job.ended_at is not None or _seconds(job, now) >= longest for job in of_day)
    ]
    times = _adjusted_times({id(job): (job, min(_seconds(job, now), longest)) for of_day in complete for job in of_day})
    days = [
        (ours, others)
        for of_day in complete
        if (ours := _of_group(of_day, times, in_group=True)) and (others := _of_group(of_day, times, in_group=False))
    ]
    change = low = high = None
    if days:
        differences = [statistics.fmean(ours) - statistics.fmean(others) for ours, others in days]
        found = estimate(differences, 1 - (1 - CONFIDENCE) / max(max_days, 1.0))
        change = math.expm1(found.mean)
        if found.interval is not None:
            low, high = (math.expm1(min(end, 700.0)) for end in found.interval)
    ended = [job for job in jobs if job.ended_at is not None]
    return CanaryComparison(
        ended=sum(job.in_group for job in ended),
        ended_others=sum(not job.in_group for job in ended),
        failed=sum(job.in_group and not job.finished for job in ended),
        failed_others=sum(not job.in_group and not job.finished for job in ended),
        jobs=sum(len(ours) for ours, _ in days), others=sum(len(others) for _, others in days), days=len(days),
        change=change, low=low, high=high,
    )  # fmt: skip


def _seconds(job: CanaryJob, now: float) -> float:
    """Seconds from submission to end, or until now."""
    return (now if job.ended_at is None else job.ended_at) - job.submitted


def _adjusted_times(jobs: Mapping[int, tuple[CanaryJob, float]]) -> dict[int, float]:
    """The logarithm of each job's time by its work, less the mean of its kind; of kinds that both groups have."""
    kinds: dict[Hashable, dict[int, tuple[CanaryJob, float]]] = defaultdict(dict)
    for which, (job, seconds) in jobs.items():
        kinds[job.kind][which] = job, seconds
    times: dict[int, float] = {}
    for of_kind in kinds.values():
        if len({job.in_group for job, _ in of_kind.values()}) < 2:
            continue
        logs = {which: math.log(max(seconds, _MIN_SECONDS) / job.work) for which, (job, seconds) in of_kind.items()}
        mean = statistics.fmean(logs.values())
        times |= {which: value - mean for which, value in logs.items()}
    return times


def _of_group(jobs: Iterable[CanaryJob], times: dict[int, float], *, in_group: bool) -> list[float]:
    return [times[id(job)] for job in jobs if job.in_group is in_group and id(job) in times]


def judge_canary(
    canary: Canary, found: CanaryComparison, rule: CanarySettings, now: float
) -> tuple[CanaryState, str] | None:
    """How a running canary ends, and why; None if it goes on."""
    if found.low is not None and found.low > 0:
        return CanaryState.WITHDRAWN, f"surely slower than {canary.fallback}: {found.text}"
    if found.high is not None and found.high < 0 and found.jobs >= rule.min_jobs:
        return CanaryState.PROMOTED, f"surely faster than {canary.fallback}: {found.text}"
    if now - canary.began_at >= rule.max_days * DAY_SECONDS:
        return CanaryState.WITHDRAWN, f"no result after {rule.max_days:g} days (canary.max_days): {found.text}"
    return None
