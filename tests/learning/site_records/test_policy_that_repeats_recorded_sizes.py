"""The site's own scheduler in a replay, from what was recorded of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_site import MONDAY, Listening, record
from variants import nightly

from dl2d.core.jobs import NOTHING, Allocation
from dl2d.core.policy import Policy
from dl2d.core.store import RecordedSizes
from dl2d.learning.promotion_gate import GateSettings, compare
from dl2d.learning.site_records.policy_that_repeats_recorded_sizes import RecordedScheduler
from dl2d.learning.site_records.recorded_days import DAY_SECONDS
from dl2d.learning.site_records.split_of_recorded_days import Case, split_history
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.policies.srtf import Srtf
from dl2d.simulation.realism import Realism
from dl2d.simulation.replay import Replayed, Rules, replay
from dl2d.simulation.workload.workload_file import Workload
from dl2d.simulation.workload.workload_source_by_name import load_source
from dl2d.store.sql_store import SqlStore
from dl2d.tick.tick_context import GuardRules

SITE = "generator:poisson?nodes=1&jobs=20&rate=0.5&median_seconds=9000&most_gpus=4"
#: Some four days, also as recorded by a daemon in slots of 20 minutes.
SOME_DAYS = "generator:poisson?nodes=1&jobs=60&rate=0.2&median_seconds=9000&most_gpus=4&slot_seconds=1200"


def a_workload(seed: int) -> Workload:
    return load_source(SITE, seed=seed).workload


def played(workload: Workload, policy: Policy) -> tuple[Replayed, dict[str, RecordedSizes]]:
    """A replay, and the sizes that it gave."""
    listening = Listening(policy)
    done = replay(workload, listening, LoadBalance(), timer=time.perf_counter)
    sizes: dict[str, list[tuple[float, Allocation]]] = {job.id: [] for job in workload.jobs}
    for snapshot, decision in listening.heard:
        for entry in decision.jobs:
            if entry.allocation != NOTHING or sizes[entry.job.id]:  # it waits, or was paused
                sizes[entry.job.id].append((snapshot.at, entry.allocation))
    return done, {job: tuple(found) for job, found in sizes.items()}


def recorded(workload: Workload, sizes: Mapping[str, RecordedSizes]) -> Replayed:
    return replay(workload, RecordedScheduler(sizes), LoadBalance(), timer=time.perf_counter)


@pytest.mark.parametrize("policy", [Drf(), Fifo(), Srtf()], ids=lambda policy: policy.name)
def test_jobs_end_as_they_did_where_all_is_as_it_was(policy: Policy) -> None:
    ratios = []
    for seed in range(3):
        workload = a_workload(seed)
        real, sizes = played(workload, policy)
        again = recorded(workload, sizes)
        ratios.append(again.avg_jct / real.avg_jct)
        starts, again_starts = (
            {job: found[0][0] for job, found in each.items()}
            for each in (sizes, played(workload, RecordedScheduler(sizes))[1])
        )
        assert again_starts == pytest.approx(starts, abs=2 * workload.slot_seconds)
    assert statistics.fmean(ratios) == pytest.approx(1.0, abs=0.02)


def test_jobs_that_were_paused_are_paused_again() -> None:
    """Otherwise a scheduler that pauses jobs would seem slower by half than it was, and anything would beat it."""
    workload = a_workload(0)
    _, sizes = played(workload, Srtf())
    paused = {job for job, found in sizes.items() if NOTHING in dict(found).values()}
    assert paused
    _, again = played(workload, RecordedScheduler(sizes))
    assert {job for job, found in again.items() if NOTHING in dict(found).values()} >= paused


def test_a_job_starts_before_its_recorded_start_as_soon_as_there_is_room_and_not_before_earlier_ones() -> None:
    workload = a_workload(0)
    half = len(workload.jobs) // 2
    # All were held back for a day by something that the replay does not have.
    sizes = {job.id: ((86_400.0 + number, Allocation(job.least_workers, job.min_ps)),)
             for number, job in enumerate(reversed(workload.jobs[:half]))}  # fmt: skip
    few = replace(workload, jobs=tuple(replace(job, submit_slot=0) for job in workload.jobs[:half]))
    done, given = played(few, RecordedScheduler(sizes))
    assert max(job.last_slot for job in done.jobs) < 86_400 / workload.slot_seconds + 200
    starts = [given[job.id][0][0] for job in reversed(few.jobs)]
    assert starts == sorted(starts)
    assert starts[0] == 0.0
    assert all(set(found) == {(at, sizes[job][0][1]) for at, _ in found} for job, found in given.items())


def test_jobs_without_a_record_and_sizes_beyond_the_bounds_do_not_stop_it() -> None:
    workload = a_workload(1)
    done = recorded(workload, {workload.jobs[0].id: ((0.0, Allocation(1000, 1000)),), workload.jobs[1].id: ()})
    assert len(done.jobs) == len(workload.jobs)


def test_the_gate_compares_with_it_and_the_guard_does_not_limit_it() -> None:
    cases = []
    for seed in range(3):
        workload = a_workload(seed)
        cases.append(Case(str(seed), workload, {str(seed): 20}, sizes=played(workload, Fifo())[1]))
    found, real = (
        compare(
            cases, Drf(), current, LoadBalance(), costs=Realism(), rules=GuardRules(churn=2),
            settings=GateSettings(timeout=60.0), timer=time.process_time,
        )
        for current in (None, Fifo())
    )  # fmt: skip
    assert found.current.guarded == 0 < found.candidate.guarded
    assert "the guard changed" not in found.verdict.reason
    assert [case.candidate for case in found.cases] == [case.candidate for case in real.cases]


@pytest.mark.parametrize(("policy", "seed"), [(Srtf(), 0), nightly(Srtf(), 4), (Drf(), 1), nightly(Fifo(), 1)])
def test_a_scheduler_is_as_good_as_its_own_record_of_some_days(policy: Policy, seed: int, tmp_path: Path) -> None:
    """It seemed up to 19 % better: each day was replayed by itself, and jobs that waited at the end did not wait."""
    url = f"sqlite:///{tmp_path}/x.sqlite"
    record(url, load_source(SOME_DAYS, seed=seed).workload, policy, decided_by="observed")
    with closing(SqlStore(url)) as store:
        days = int((store.slots(limit=1)[0].at - MONDAY) // DAY_SECONDS)
        # The record ends at a time when jobs run and wait.
        history = store.history(MONDAY, MONDAY + (days - 0.9) * DAY_SECONDS)
    split = split_history(history, 1200.0, seed=0, min_days=4, draws=1)
    assert len(split.held_out) >= 3
    (expected, *drawn) = split.period_cases
    assert {each.name for each in drawn} == {f"draw {number}" for number in range(1, len(drawn) + 1)} != set()
    rules = Rules(realism=Realism())
    policies = (policy, RecordedScheduler(expected.sizes))
    own, again = (
        expected.times_by_day(replay(expected.workload, each, LoadBalance(), rules=rules, timer=time.perf_counter))
        for each in policies
    )
    assert list(own) == [day.name for day in split.held_out]
    assert again == pytest.approx(own)
    found = compare(
        [expected], policy, None, LoadBalance(), costs=Realism(), rules=GuardRules(),
        settings=GateSettings(timeout=60.0, margin=0.02, min_jobs=25), timer=time.process_time,
    )  # fmt: skip
    assert [case.day for case in found.cases] == list(own)
    if isinstance(policy, Srtf):
        return  # as a candidate it has to leave running jobs their minimum size, which as the site's it did not
    assert found.verdict.change == pytest.approx(0.0, abs=1e-6)
    assert found.verdict.passed
    assert found.verdict.reason.startswith("surely less than 2 % worse: mean completion time ")


def test_days_without_recorded_sizes_pass_nothing() -> None:
    verdict = compare(
        [Case(str(number), a_workload(number), {str(number): 20}) for number in range(3)], Drf(), None, LoadBalance(),
        costs=Realism(), rules=GuardRules(), settings=GateSettings(timeout=60.0), timer=time.process_time,
    ).verdict  # fmt: skip
    assert (verdict.passed, verdict.change) == (False, None)
    assert "there is too little to compare on: 0 days" in verdict.reason
