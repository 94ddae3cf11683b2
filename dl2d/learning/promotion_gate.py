"""The gate: whether a candidate may take the place of what decides, from how both do on the same workloads."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dl2d.core.cluster import Snapshot
from dl2d.core.confidence_interval import Estimate, estimate
from dl2d.core.decision import Decision
from dl2d.core.errors import Dl2dError, counted
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.core.policy_registry import TrialCase
from dl2d.core.progress_callback import Count, uncounted
from dl2d.learning.site_records.policy_that_repeats_recorded_sizes import RecordedScheduler
from dl2d.learning.site_records.split_of_recorded_days import Case
from dl2d.simulation.realism import Realism
from dl2d.simulation.replay import Rules, replay
from dl2d.simulation.workload.workload_file import to_request
from dl2d.tick.policy_check.policy_starts_jobs_check import start_check
from dl2d.tick.tick_context import GuardRules

#: Slots after which a replay is given up.
_MAX_SLOTS = 50_000
#: Least length of an interval in a replay of recorded days, in seconds.
MIN_SLOT_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """What a candidate needs to pass, beside shorter completion times."""

    #: Longest decision, in seconds of CPU time.
    timeout: float
    #: Minimum number of recorded days to compare on, at least 2; and of jobs submitted on these days together.
    min_days: int = 3
    min_jobs: int = 30
    #: Fraction by which completion times may be longer than the current policy's.
    margin: float = 0.0
    #: Whether all days were replayed with the same draws of the speeds.
    shared_draws: bool = False
    #: Whether completion times have to be short enough whatever the speeds are, and not on average over the draws: the
    #: true speeds count as one more of the shared draws.
    whatever_speeds: bool = False
    #: What is told beside too few days or jobs, in parentheses: which do not count; empty for nothing.
    not_counted: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBehaviour:
    """How a policy behaved while it was played."""

    decisions: int
    #: Decisions that the guard changed.
    guarded: int
    #: Longest decision, in seconds of CPU time: the machine may be busy.
    slowest: float
    #: What was wrong first; empty for nothing.
    problem: str

    @property
    def share(self) -> float:
        """Share of decisions that the guard changed."""
        return self.guarded / max(self.decisions, 1)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a comparison.

    ``change`` is the candidate's mean completion time divided by the current policy's, minus 1, and ``low`` and
    ``high`` are the ends of its 95 % interval (``judge``); None where there is too little to compare on.
    """

    passed: bool
    reason: str
    change: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """How two policies did on the same workloads, and what follows."""

    cases: tuple[TrialCase, ...]
    candidate: PolicyBehaviour
    current: PolicyBehaviour
    verdict: Verdict
    #: Number of jobs compared, and of those of them whose speeds are assumed.
    jobs: int
    assumed: int


def judge(
    cases: Sequence[TrialCase], jobs: int, candidate: PolicyBehaviour, current: PolicyBehaviour | None,
    settings: GateSettings, *, current_problem: str = "",
) -> Verdict:  # fmt: skip
    """Whether the candidate passes.

    Changes are compared as logarithms of candidate / current.

    1. The candidate made no error, took no longer than ``settings.timeout`` for a decision, and had no larger share of
       its decisions changed by the guard; and there are enough days and jobs to compare on.
    2. ``half_days`` is half the width of the 95 % interval of the mean over days (Student's t). The value of a day is
       the mean over its cases: these have the same jobs, so they are no separate samples.
    3. With ``settings.shared_draws``, ``half_speeds`` is that of the mean over draws of speeds, the value of a draw
       being the mean over days; with ``settings.whatever_speeds``, that of the 95 % prediction interval of one more
       draw. Without shared draws it is 0, and rules 5 and 6 look at days alone.
    4. The interval of the change is mean +- ``width``, with width = sqrt(half_days^2 + half_speeds^2) (Howe,
       "Approximate confidence limits on the mean of X + Y where X and Y are two tabled independent random variables",
       JASA 69, 1974). It holds the true change in at least 95 % of comparisons if the effects of days and of speeds are
       about normal.
    5. The candidate passes if mean + width < log(1 + ``settings.margin``). A single draw, of which no interval can be
       computed, passes nothing.
    6. With a margin, it also passes if both parts lie below log(1 + margin): mean + half_days, with days on which it is
       better counted as 0 (large gains on single days widen the interval), and the mean over draws + half_speeds.

    Parameters
    ----------
    jobs
        Number of jobs compared, of these days.
    current
        None for the site's own scheduler, which the guard does not limit.
    current_problem
        Why replays of what decides now failed; their cases are missing.
    """
    by_day: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        by_day[case.day].append(math.log(case.candidate / case.current))
    change = low = high = None
    days = [statistics.fmean(logs) for logs in by_day.values()]
    over_draws = _over_draws(cases) if settings.shared_draws and cases else None
    half_speeds = None
    if over_draws is not None:
        half_speeds = over_draws.prediction_half_width if settings.whatever_speeds else over_draws.half_width
    if len(days) > 1:
        half_days = _half_width(days)
        mean, width = statistics.fmean(days), math.hypot(half_days, half_speeds or 0.0)
        change, low, high = (math.expm1(value) for value in (mean, mean - width, mean + width))

    def verdict(reason: str, *, passed: bool = False) -> Verdict:
        return Verdict(passed, reason, change, low, high)

    if candidate.problem:
        return verdict(f"the candidate failed: {candidate.problem}")
    if candidate.slowest > settings.timeout:
        return verdict(f"a decision took {candidate.slowest:.2g} s of CPU time, more than {settings.timeout:g} s")
    if current is not None and candidate.share > current.share:
        return verdict(f"the guard changed {candidate.share:.1%} of its decisions, {current.share:.1%} of the others")
    compared_on = _days_with_jobs(len(by_day), jobs)
    if _too_few(len(by_day), jobs, settings) or change is None or low is None or high is None:
        return _too_little(len(by_day), jobs, settings, current_problem)
    over, high_over_speeds = "over days", -math.inf
    if over_draws is not None:
        over = "over days and speeds" if over_draws.count > 1 else "over days"
        compared_on += f" and {counted(over_draws.count, 'draw')} of speeds"
        high_over_speeds = math.inf if half_speeds is None else math.expm1(over_draws.mean + half_speeds)
    result = f"mean completion time {change:+.2%} (95 % interval {low:+.2%} to {high:+.2%} {over}) on {compared_on}"
    wanted = f"less than {100 * settings.margin:g} % worse" if settings.margin else "better"
    without_gains = settings.margin > 0 and _high([max(day, 0.0) for day in days]) < settings.margin
    if high_over_speeds < settings.margin:
        if high < 0:
            return verdict(result, passed=True)
        if high < settings.margin:
            return verdict(f"surely {wanted}: {result}", passed=True)
        if without_gains:
            even = "even if days on which it is better count as unchanged"
            return verdict(f"surely {wanted}, {even}: {result}", passed=True)
    if low > settings.margin:
        return verdict(f"surely worse: {result}")
    passes_on_days = without_gains or _high(days) < settings.margin
    return verdict(f"not surely {wanted}{' whatever the speeds' if passes_on_days else ''}: {result}")


def _high(logs: Sequence[float]) -> float:
    """Upper end of the 95 % interval of a change, from its logarithms on at least two days."""
    return math.expm1(statistics.fmean(logs) + _half_width(logs))


def _half_width(logs: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean of at least two values."""
    half_width = estimate(logs).half_width
    assert half_width is not None
    return half_width


def too_little_to_compare(cases: Sequence[Case], settings: GateSettings) -> Verdict | None:
    """The verdict on any candidate where the cases have too few days or jobs; None where they have enough."""
    days = _days_of(cases)
    jobs, _ = _jobs_on(days, cases)
    return _too_little(len(days), jobs, settings) if _too_few(len(days), jobs, settings) else None


def _days_with_jobs(days: int, jobs: int) -> str:
    return f"{counted(days, 'day')} with {counted(jobs, 'job')}"


def _too_few(days: int, jobs: int, settings: GateSettings) -> bool:
    return days < settings.min_days or jobs < settings.min_jobs


def _too_little(days: int, jobs: int, settings: GateSettings, current_problem: str = "") -> Verdict:
    failed = f"what it is compared with failed in replays ({current_problem}), so " if current_problem else ""
    return Verdict(
        passed=False,
        reason=f"{failed}there is too little to compare on: {_days_with_jobs(days, jobs)}; at least "
        f"{settings.min_days} days (learning.gate_min_days) with {settings.min_jobs} jobs (learning.gate_min_jobs) are "
        "needed" + (f" ({settings.not_counted})" if settings.not_counted else ""),
    )


def _over_draws(cases: Sequence[TrialCase]) -> Estimate:
    """Change (logarithm) of each draw that was replayed on the most days, as an estimate over draws.

    These are all days, unless replays with each of the draws failed.
    """
    by_draw: dict[int, list[float]] = defaultdict(list)
    for case in cases:
        by_draw[case.draw].append(math.log(case.candidate / case.current))
    most = max(map(len, by_draw.values()))
    return estimate([statistics.fmean(logs) for logs in by_draw.values() if len(logs) == most])


class _Timed:
    """A policy that measures how long it takes. Implements ``Policy``."""

    def __init__(self, policy: Policy, timer: Callable[[], float]) -> None:
        self._policy, self._timer = policy, timer
        self.name, self.version, self.needs = policy.name, policy.version, policy.needs
        #: Longest decision, in seconds of CPU time.
        self.slowest = 0.0

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``Policy``."""
        begin = self._timer()
        decision = self._policy.decide(snapshot, packing, rng)
        self.slowest = max(self.slowest, self._timer() - begin)
        return decision


def compare(
    cases: Sequence[Case],
    candidate: Policy,
    current: Policy | None,
    placement: Placement,
    *,
    costs: Realism,
    rules: GuardRules,
    settings: GateSettings,
    timer: Callable[[], float],
    progress: Count = uncounted,
) -> Compared:
    """Replay both policies under the daemon's guard, floors and time-outs with what resizes cost, and judge.

    A candidate that passes is tried on idle nodes. ``current`` is None for the site's own scheduler: each case's
    recorded sizes, in their order, without the guard; cases without any are left out. So is a case in which the current
    policy fails. Nothing is replayed where the cases have too few days or jobs. ``timer`` gives seconds of CPU time;
    the decisions do not depend on it, except that one that takes longer than ``settings.timeout`` fails the candidate.
    ``progress`` is told how many jobs of all replays have ended.
    """
    played: list[TrialCase] = []
    conducts: dict[str, list[PolicyBehaviour]] = {"candidate": [], "current": []}
    if current is None:
        cases = [case for case in cases if any(case.sizes.values())]
    if (too_little := too_little_to_compare(cases, settings)) is not None:
        return Compared((), _together(()), _together(()), too_little, *_jobs_on(_days_of(cases), cases))
    under_guard = Rules(realism=costs, most_slots=_MAX_SLOTS, guard=rules, floors=True)
    as_recorded = Rules(realism=costs, most_slots=_MAX_SLOTS)
    ended, total = 0, 2 * sum(len(case.workload.jobs) for case in cases)

    def show(done: int, _: int) -> None:
        progress(ended + done, total)

    for number, case in enumerate(cases):
        times = {}
        compared_with = (RecordedScheduler(case.sizes), as_recorded) if current is None else (current, under_guard)
        for which, (policy, play) in (("current", compared_with), ("candidate", (candidate, under_guard))):
            timed = _Timed(policy, timer)
            try:
                done = replay(
                    case.workload, timed, placement, rules=play, seed=number, timer=timer, progress=show,
                    awaited=case.awaited,
                )  # fmt: skip
            except Dl2dError as error:
                conduct = PolicyBehaviour(decisions=0, guarded=0, slowest=timed.slowest, problem=str(error))
            else:
                # A decision that failed counts, also where the policy was asked again and then had an answer.
                conduct = PolicyBehaviour(
                    decisions=len(done.decision_ms), guarded=done.guarded, slowest=timed.slowest, problem=done.failure
                )
                times[which] = case.times_by_day(done)
            conducts[which].append(conduct)
            ended += len(case.workload.jobs)
            if conduct.problem:
                times.clear()
                break
        if len(times) == len(conducts):
            for day, jct in times["candidate"].items():
                name = case.name if case.name.startswith(day) else f"{day}, {case.name}"
                played.append(TrialCase(name, jct, times["current"][day], day, case.draw))
        elif any(conduct.problem for conduct in conducts["candidate"]):
            break  # it cannot pass any more
    own, others = (_together(conducts[which]) for which in ("candidate", "current"))
    jobs, assumed = _jobs_on({case.day for case in played}, cases)
    verdict = judge(
        played, jobs, own, None if current is None else others, settings, current_problem=others.problem
    )  # fmt: skip
    if verdict.passed and (started := _started(cases, candidate, placement)):
        verdict = replace(verdict, passed=False, reason=f"the candidate {started}")
    return Compared(tuple(played), own, others, verdict, jobs, assumed)


def _days_of(cases: Sequence[Case]) -> set[str]:
    return {day for case in cases for day in case.jobs}


def _jobs_on(days: Container[str], cases: Sequence[Case]) -> tuple[int, int]:
    """Number of jobs of the cases on these days, and of those of them whose speeds are assumed."""

    def total(counts: Iterable[Mapping[str, int]]) -> int:
        return sum({day: number for each in counts for day, number in each.items() if day in days}.values())

    return total(case.jobs for case in cases), total(case.assumed for case in cases)


def _started(cases: Sequence[Case], candidate: Policy, placement: Placement) -> str:
    """How many jobs of the cases the candidate leaves waiting on an idle cluster; empty for none.

    What it raises is found by the replays.
    """
    if not cases:
        return ""
    largest = max(cases, key=lambda case: len(case.workload.jobs)).workload
    requests = [to_request(job, largest) for job in largest.jobs]
    started = start_check(candidate, placement, largest.nodes(), requests)
    return started.problem if started.waiting else ""


def _together(conducts: Sequence[PolicyBehaviour]) -> PolicyBehaviour:
    return PolicyBehaviour(
        decisions=sum(each.decisions for each in conducts),
        guarded=sum(each.guarded for each in conducts),
        slowest=max((each.slowest for each in conducts), default=0.0),
        problem=next((each.problem for each in conducts if each.problem), ""),
    )
