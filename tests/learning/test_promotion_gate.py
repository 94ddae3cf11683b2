"""Whether a candidate passes: by its completion times, and by how it behaves."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tick.world import GivesNothing, IgnoresLimits

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Alternative, Decision
from dl2d.core.jobs import Allocation, Owner
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy_registry import TrialCase
from dl2d.core.resources import Resources
from dl2d.learning.promotion_gate import Compared, GateSettings, PolicyBehaviour, Verdict, compare, judge
from dl2d.learning.site_records.split_of_recorded_days import Case
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.simulation.realism import Realism
from dl2d.simulation.workload.workload_source_by_name import load_source
from dl2d.tick.tick_context import GuardRules

GOOD = PolicyBehaviour(decisions=100, guarded=10, slowest=0.1, problem="")


SETTINGS = GateSettings(timeout=5.0)


def cases(*ratios: float) -> list[TrialCase]:
    """One workload for each of so many days."""
    return [TrialCase(str(number), 4.0 * ratio, 4.0, day=str(number)) for number, ratio in enumerate(ratios)]


def by_draw(*logs: float) -> list[TrialCase]:
    """Three days with so many draws of speeds, that change the logarithm of the completion time so much."""
    return [
        TrialCase(f"{day}, draw {number}", 4.0 * math.exp(log), 4.0, day=str(day), draw=number)
        for day in range(3)
        for number, log in enumerate(logs)
    ]


def judged(found: list[TrialCase], conduct: PolicyBehaviour = GOOD, jobs: int = 100) -> Verdict:
    return judge(found, jobs, conduct, GOOD, SETTINGS)


class TestJudge:
    def test_surely_better_passes(self) -> None:
        verdict = judged(cases(0.9, 0.88, 0.92, 0.9))
        assert verdict.passed
        assert verdict.change == pytest.approx(math.exp(np.log([0.9, 0.88, 0.92, 0.9]).mean()) - 1)
        assert verdict.low is not None
        assert verdict.high is not None
        assert verdict.low < verdict.change < verdict.high < 0
        assert verdict.reason.startswith("mean completion time -10.0")
        assert verdict.reason.endswith(" over days) on 4 days with 100 jobs")

    def test_by_hand(self) -> None:
        """Three logarithms, -0.3, -0.1 and -0.2: mean -0.2, standard error 0.057735, t(2) of 0.975 is 4.30265."""
        verdict = judged(cases(math.exp(-0.3), math.exp(-0.1), math.exp(-0.2)))
        assert not verdict.passed
        assert verdict.low == pytest.approx(math.expm1(-0.2 - 0.248414), rel=1e-4)
        assert verdict.high == pytest.approx(math.expm1(-0.2 + 0.248414), rel=1e-4)
        assert verdict.reason.startswith("not surely better: mean completion time -18.13%")

    @pytest.mark.parametrize(
        ("ratios", "words"),
        [
            ((1.0, 1.0, 1.0), "not surely better: mean completion time +0.00%"),
            ((1.1, 1.11, 1.1), "surely worse: mean completion time +10.33%"),
            ((0.5, 1.5, 0.9), "not surely better: mean completion time -12.2"),
        ],
    )
    def test_the_same_worse_or_unsure_does_not(self, ratios: tuple[float, ...], words: str) -> None:
        verdict = judged(cases(*ratios))
        assert not verdict.passed
        assert verdict.reason.startswith(words)

    @pytest.mark.parametrize(
        ("ratios", "words"),
        [
            ((0.9, 0.9, 0.9), "mean completion time -10.00%"),
            ((1.0, 1.0, 1.0), "surely less than 2 % worse: mean completion time +0.00%"),
            ((1.011, 1.01, 1.009), "surely less than 2 % worse: mean completion time +1.00%"),
            ((0.95, 1.05, 1.0), "not surely less than 2 % worse: mean completion time -0.08%"),
            (
                (0.6, 0.9, 1.0),
                (
                    "surely less than 2 % worse, even if days on which it is better count as unchanged: "
                    "mean completion time -18.57%"
                ),
            ),
            (
                (0.6, 0.9, 1.01),
                (
                    "surely less than 2 % worse, even if days on which it is better count as unchanged: "
                    "mean completion time -18.30%"
                ),
            ),
            ((0.6, 0.9, 1.03), "not surely less than 2 % worse: mean completion time"),
            ((1.031, 1.03, 1.029), "surely worse: mean completion time +3.00%"),
        ],
    )
    def test_with_a_margin_what_is_surely_not_worse_than_that_passes(
        self, ratios: tuple[float, ...], words: str
    ) -> None:
        verdict = judge(cases(*ratios), 100, GOOD, None, replace(SETTINGS, margin=0.02))
        assert verdict.passed is not words.startswith(("not", "surely worse"))
        assert verdict.reason.startswith(words)

    @pytest.mark.parametrize("whatever_speeds", [False, True])
    def test_the_true_speeds_may_be_others_than_those_that_were_drawn(self, whatever_speeds: bool) -> None:
        """With each of three draws it is better, but so differently that with a fourth it may be worse.

        Logarithms -0.2, -0.12 and -0.04: mean -0.12, deviation 0.08, t(2) of 0.975 is 4.30265.
        """
        found = by_draw(-0.2, -0.12, -0.04)
        settings = replace(SETTINGS, margin=0.1, shared_draws=True, whatever_speeds=whatever_speeds)
        verdict = judge(found, 100, GOOD, None, settings)
        assert verdict.passed is not whatever_speeds
        assert verdict.reason.startswith("not surely less than 10 % worse whatever the speeds") is whatever_speeds
        assert verdict.reason.endswith("over days and speeds) on 3 days with 100 jobs and 3 draws of speeds")
        upper = math.expm1(-0.12 + 4.30265 * 0.08 * math.sqrt(1 / 3 + whatever_speeds))
        assert verdict.high == pytest.approx(upper, abs=1e-6)

    def test_the_interval_has_days_and_speeds(self) -> None:
        """Days differ by -0.1, 0 and 0.1 from a mean of -0.5, draws by -0.2, 0 and 0.2."""
        found = [
            TrialCase(f"{day}, draw {number}", math.exp(-0.5 + day / 10 + number / 5), 1.0, day=str(day), draw=number)
            for day in (-1, 0, 1)
            for number in (-1, 0, 1)
        ]
        verdict = judge(found, 100, GOOD, None, replace(SETTINGS, shared_draws=True, whatever_speeds=True))
        half_width = 4.30265 * math.sqrt(0.1**2 / 3 + 0.2**2 * (1 + 1 / 3))
        assert verdict.low == pytest.approx(math.expm1(-0.5 - half_width), rel=1e-4)
        assert verdict.high == pytest.approx(math.expm1(-0.5 + half_width), rel=1e-4)

    @pytest.mark.parametrize(
        ("logs", "passed", "words"),
        [((0.001, 0.0, -0.001), True, "surely less"), ((-0.2,), False, "not surely"), ((-0.2, -0.2), True, "mean")],
    )
    def test_one_that_does_not_depend_on_the_speeds_passes(
        self, logs: tuple[float, ...], passed: bool, words: str
    ) -> None:
        """One draw does not tell whether it depends on them."""
        verdict = judge(
            by_draw(*logs), 100, GOOD, None, replace(SETTINGS, margin=0.02, shared_draws=True, whatever_speeds=True)
        )
        assert verdict.passed is passed
        assert verdict.reason.startswith(words)
        assert verdict.reason.endswith(" over days) on 3 days with 100 jobs and 1 draw of speeds") is (len(logs) == 1)

    @pytest.mark.parametrize(
        ("days", "draws", "of_days", "of_draws", "noise"),
        [
            (3, 16, 0.1, 0.0, 0.02),
            (3, 16, 0.0, 0.3, 0.02),
            (3, 16, 0.1, 0.3, 0.1),
            (7, 4, 0.02, 0.3, 0.1),
            (7, 2, 0.1, 0.1, 0.02),
            (10, 8, 0.2, 0.05, 0.05),
        ],
    )
    def test_surely_is_said_without_cause_at_most_as_often_as_the_interval_says(
        self, days: int, draws: int, of_days: float, of_draws: float, noise: float
    ) -> None:
        """The candidate is as good as what it is compared with, with the true speeds, which are one more draw.

        The first case has the expected speeds. "Surely better" and "surely worse" may each come in 2.5 % of tables, of
        which 1,500 are made; three standard deviations of that share are 1.2 %.
        """
        rng = np.random.default_rng(days * draws)
        said: Counter[str] = Counter()
        for _ in range(1500):
            by_day, by_speeds = of_days * rng.normal(size=(days, 1)), of_draws * rng.normal(size=(1, draws))
            by_speeds[0, 0] = 0.0
            table = by_day + by_speeds + noise * rng.normal(size=(days, draws)) - of_draws * rng.normal()
            found = [
                TrialCase(f"{day}, draw {number}", math.exp(table[day, number]), 1.0, day=str(day), draw=number)
                for day in range(days)
                for number in range(draws)
            ]
            verdict = judge(found, 100, GOOD, None, replace(SETTINGS, shared_draws=True, whatever_speeds=True))
            said["better"] += verdict.passed
            said["worse"] += verdict.reason.startswith("surely worse")
        assert said["better"] <= 0.037 * 1500
        assert said["worse"] <= 0.037 * 1500

    @pytest.mark.parametrize(
        ("days", "jobs", "words"),
        [(0, 0, "0 days with 0 jobs"), (1, 1, "1 day with 1 job"), (2, 90, "2 days with 90 jobs"), (9, 29, "29 jobs")],
    )
    def test_too_few_days_or_jobs_pass_nothing(self, days: int, jobs: int, words: str) -> None:
        verdict = judged(cases(*[0.1] * days), jobs=jobs)
        assert not verdict.passed
        assert verdict.change is verdict.low is verdict.high is None
        assert words in verdict.reason
        assert "at least 3 days (learning.gate_min_days) with 30 jobs (learning.gate_min_jobs)" in verdict.reason

    def test_twenty_workloads_of_one_day_are_one_sample(self) -> None:
        one_day = [replace(case, day="2026-03-02") for case in cases(*[0.78] * 20)]
        assert judged(one_day).change is None
        three_days = [replace(case, day=f"2026-03-0{number % 3}") for number, case in enumerate(cases(*[0.78] * 20))]
        assert judged(three_days).passed

    @pytest.mark.parametrize(
        ("conduct", "words"),
        [
            ({"problem": "ValueError: x"}, "the candidate failed: ValueError: x"),
            ({"slowest": 5.1}, "a decision took 5.1 s of CPU time, more than 5 s"),
            ({"guarded": 11}, "the guard changed 11.0% of its decisions, 10.0% of the others"),
        ],
    )
    def test_bad_conduct_fails_however_fast_it_is(self, conduct: dict[str, Any], words: str) -> None:
        verdict = judged(cases(0.5, 0.5, 0.5), replace(GOOD, **conduct))
        assert (verdict.passed, verdict.reason) == (False, words)

    @given(st.lists(st.floats(0.01, 100.0), min_size=3, max_size=30))
    def test_two_policies_never_both_beat_one_another(self, ratios: list[float]) -> None:
        there = judged(cases(*ratios))
        back = judged(cases(*(1 / ratio for ratio in ratios)))
        assert not (there.passed and back.passed)
        assert there.low is not None
        assert there.change is not None
        assert there.high is not None
        assert there.low <= there.change <= there.high


class Odd:
    """A policy that does something in its third decision."""

    name, version, needs = "odd", "1", frozenset[Any]()

    def __init__(self, odd: Callable[[Decision], Decision]) -> None:
        self._odd, self._count, self._policy = odd, 0, Drf()

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        self._count += 1
        decision = self._policy.decide(snapshot, packing, rng)
        return self._odd(decision) if self._count == 3 else decision


def fails(decision: Decision) -> Decision:
    raise ZeroDivisionError(f"in a decision of {decision.policy}")


def no_number(decision: Decision) -> Decision:
    score = (Alternative(Allocation(1, 1), math.nan),)
    return replace(decision, jobs=tuple(replace(entry, alternatives=score) for entry in decision.jobs))


def forgets(decision: Decision) -> Decision:
    return replace(decision, jobs=decision.jobs[1:])


WORKLOADS = [
    Case(str(seed), load_source("generator:dl2?nodes=2&jobs=8&longest_slots=6", seed=seed).workload, {str(seed): 8})
    for seed in range(4)
]


def compared(
    candidate: Any, current: Any, *, rules: GuardRules | None = None, costs: Realism | None = None
) -> Compared:
    told: list[tuple[int, int]] = []
    done = compare(
        WORKLOADS, candidate, current, LoadBalance(), costs=costs or Realism(), rules=rules or GuardRules(),
        settings=SETTINGS, timer=time.process_time, progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert all(total == 2 * 8 * len(WORKLOADS) for _, total in told)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    return done


class TestCompare:
    def test_a_policy_against_itself_is_not_better(self) -> None:
        done = compared(Drf(), Drf())
        assert [case.candidate for case in done.cases] == [case.current for case in done.cases]
        assert len(done.cases) == 4
        assert done.verdict.change == 0.0
        assert not done.verdict.passed
        assert done.candidate.decisions == done.current.decisions > 20

    def test_one_direction_passes_at_most(self) -> None:
        there, back = compared(Drf(), Fifo()), compared(Fifo(), Drf())
        assert there.verdict.change is not None
        assert there.verdict.change < 0
        assert not back.verdict.passed
        assert [(case.candidate, case.current) for case in there.cases] == [
            (case.current, case.candidate) for case in back.cases
        ]

    @pytest.mark.parametrize(
        ("odd", "words"),
        [
            (fails, "ZeroDivisionError: in a decision of drf"),
            (no_number, "which is not a finite number"),
            (forgets, "did not decide for every job exactly once"),
        ],
    )
    def test_a_candidate_that_errs_fails_with_the_reason(self, odd: Any, words: str) -> None:
        done = compared(Odd(odd), Fifo())
        assert not done.verdict.passed
        assert words in done.verdict.reason
        assert done.cases == ()

    def test_workloads_that_the_current_one_does_not_get_through_do_not_count(self) -> None:
        done = compared(Drf(), Odd(fails))  # in the first
        assert [case.name for case in done.cases] == ["1", "2", "3"]
        assert done.candidate.problem == ""

    def test_where_the_current_one_fails_the_reason_says_so(self) -> None:
        done = compared(Drf(), GivesNothing())
        assert done.cases == ()
        assert done.verdict.reason.startswith("what it is compared with failed in replays (no job can start: ")
        assert "), so there is too little to compare on: 0 days with 0 jobs; at least 3 days" in done.verdict.reason

    @pytest.mark.parametrize("few", [{"min_days": 5}, {"min_jobs": 33}])
    def test_nothing_is_replayed_where_there_are_too_few_days_or_jobs(self, few: dict[str, int]) -> None:
        told: list[int] = []
        done = compare(
            WORKLOADS, Drf(), Fifo(), LoadBalance(), costs=Realism(), rules=GuardRules(),
            settings=replace(SETTINGS, **few), timer=time.process_time, progress=lambda done, _: told.append(done),
        )  # fmt: skip
        assert (told, done.candidate.decisions, done.jobs) == ([], 0, 32)
        assert "there is too little to compare on: 4 days with 32 jobs; at least " in done.verdict.reason

    def test_a_job_that_is_not_compared_is_not_waited_for(self) -> None:
        """It trains for longer than a replay may last."""
        cases = []
        for case in WORKLOADS:
            *others, long = case.workload.jobs
            jobs = (*others, replace(long, epochs=long.epochs * 1e6, declared_epochs=long.epochs * 1e6))
            (day,) = case.jobs
            cases.append(
                replace(
                    case, workload=replace(case.workload, jobs=jobs), compared={day: [job.id for job in others]},
                    jobs={day: len(others)},
                )
            )  # fmt: skip
        done = compare(
            cases, Drf(), Fifo(), LoadBalance(), costs=Realism(), rules=GuardRules(),
            settings=replace(SETTINGS, min_jobs=28), timer=time.process_time,
        )  # fmt: skip
        assert [case.day for case in done.cases] == ["0", "1", "2", "3"]
        assert done.verdict.change is not None

    def test_the_guard_holds_both_to_its_rules_and_is_counted(self) -> None:
        rules = GuardRules(per_user=Resources.of(gpu=1))
        done = compared(IgnoresLimits(), IgnoresLimits(), rules=rules)
        free = compared(IgnoresLimits(), IgnoresLimits())
        assert done.candidate.guarded == done.current.guarded > 0
        assert free.candidate.guarded == 0
        assert all(held.candidate > loose.candidate for held, loose in zip(done.cases, free.cases, strict=True))

    def test_a_limit_for_users_counts_the_jobs_of_each_user_as_in_the_daemon(self) -> None:
        case = WORKLOADS[0]
        jobs = [replace(job, owner=Owner(f"user-{job.id}", 1, 1)) for job in case.workload.jobs]
        each_their_own = replace(case, workload=replace(case.workload, jobs=tuple(jobs)))
        one, many = (
            compare(
                [played], Drf(), Drf(), LoadBalance(), costs=Realism(), rules=GuardRules(per_user=Resources.of(gpu=4)),
                settings=replace(SETTINGS, min_days=1, min_jobs=8), timer=time.process_time,
            ).cases[0].candidate
            for played in (case, each_their_own)
        )  # fmt: skip
        assert many < one

    def test_a_running_job_keeps_its_minimum_size_as_in_the_daemon(self) -> None:
        done = compared(Odd(lambda decision: replace(decision, jobs=tuple(
            replace(entry, allocation=Allocation(0, 0)) for entry in decision.jobs))), Fifo())  # fmt: skip
        assert not done.verdict.passed
        assert "and not less than" in done.verdict.reason

    def test_what_resizes_cost_is_counted(self) -> None:
        costly = compared(Drf(), Drf(), costs=Realism(start_seconds=300.0, join_seconds=60.0))
        free = compared(Drf(), Drf())
        assert all(dear.candidate > loose.candidate for dear, loose in zip(costly.cases, free.cases, strict=True))

    def test_the_slowest_decision_is_in_the_timers_seconds(self) -> None:
        ticks = iter(range(1_000_000))
        done = compare(
            WORKLOADS[:2], Drf(), Fifo(), LoadBalance(), costs=Realism(), rules=GuardRules(),
            settings=GateSettings(timeout=0.5, min_days=2, min_jobs=16), timer=lambda: float(next(ticks)),
        )  # fmt: skip
        assert done.candidate.slowest == 1.0
        assert "a decision took 1 s of CPU time" in done.verdict.reason
