"""The site's own scheduler in a replay, from what was recorded of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
from recorded_site import Listening

from dl2d.core.jobs import NOTHING, Allocation
from dl2d.core.policy import Policy
from dl2d.core.site_history import RecordedSizes
from dl2d.learning.promotion_gate import GateSettings, compare
from dl2d.learning.recorded_scheduler import RecordedScheduler
from dl2d.learning.train_test_split import Case
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.policies.srtf import Srtf
from dl2d.simulation.replay import Replayed, replay
from dl2d.simulation.speeds.realism_options import Realism
from dl2d.simulation.workload.format import Workload
from dl2d.simulation.workload.sources import load_source
from dl2d.tick.tick_context import GuardRules

SITE = "generator:poisson?nodes=1&jobs=20&rate=0.5&median_seconds=9000&most_gpus=4"


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
        cases.append(Case(str(seed), workload, str(seed), 20, played(workload, Fifo())[1]))
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
