"""Workloads made of what a site recorded."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learning.site_records.test_recorded_days import SEEN, a_history, a_job, a_request, cluster_states_of, measured
from recorded_site import MONDAY, a_site, record

from dl2d.core.cluster import Node
from dl2d.core.errors import WorkloadError
from dl2d.core.jobs import Allocation, Architecture, Consistency, JobState
from dl2d.core.measured_speeds_and_losses import TrainingKind
from dl2d.core.resources import Resources
from dl2d.core.store import History, RuntimePlan
from dl2d.learning.site_records.digital_twin import Speeds, costs_of, workload_of
from dl2d.learning.site_records.recorded_days import DAY_SECONDS, days_of, resampled
from dl2d.learning.site_records.speeds_assumed_for_unmeasured_jobs import with_assumed_speeds
from dl2d.learning.site_records.split_of_recorded_days import split_history
from dl2d.policies.drf import Drf
from dl2d.simulation.workload.workload_file import describe_workload, read_workload, to_request
from dl2d.store.sql_store import SqlStore
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.training_data import by_kind

SLOT = 1200.0

requests = st.builds(
    a_request,
    model=st.sampled_from(["resnet-50", "bert"]),
    max_workers=st.integers(1, 6),
    max_ps=st.integers(1, 6),
    architecture=st.sampled_from(list(Architecture)),
    epochs=st.floats(0.5, 50.0),
    steps_per_epoch=st.none() | st.floats(1.0, 100.0),
    samples_per_epoch=st.none() | st.floats(1.0, 1000.0),
    batch=st.none() | st.integers(1, 256),
)


@st.composite
def histories(draw: Any) -> History:
    jobs = []
    for number in range(draw(st.integers(1, 12))):
        request = draw(requests)
        if request.architecture is Architecture.ALLREDUCE:
            request = replace(request, ps=Resources(), min_ps=0, max_ps=0)
        at = draw(st.floats(0.0, 3 * DAY_SECONDS - 1))
        state = draw(st.sampled_from([JobState.FINISHED, JobState.RUNNING, JobState.FAILED]))
        job = a_job(number + 1, at, epoch=draw(st.floats(0.0, 60.0)), state=state)
        jobs.append(replace(job, request=request))
    speeds = tuple(
        measured((1, 0 if architecture is Architecture.ALLREDUCE else 1, draw(st.floats(0.1, 1e4))), model=model,
                 architecture=architecture)
        for model in ("resnet-50", "bert")
        for architecture in Architecture
    )  # fmt: skip
    return a_history(*jobs, speeds=speeds)


@settings(max_examples=60)
@given(histories(), st.integers(0, 2**32), st.floats(60.0, 4000.0))
def test_whatever_was_recorded_makes_workloads_that_can_be_run(history: History, seed: int, slot: float) -> None:
    """Every job comes once, fits, is known by its kind's name, and is as long as it was; the file format takes it."""
    days = days_of(history)
    if not days:
        return
    rng = np.random.default_rng(seed)
    speeds = Speeds(GaussianProcess(by_kind(history.speeds)), [job.request for day in days for job in day.jobs])
    for day in (*days, resampled(days, rng)):
        workload = workload_of(day, speeds.draw(rng), slot)
        if not day.jobs:  # hours without any were drawn
            assert workload is None
            continue
        assert workload is not None
        assert len(workload.jobs) == len(day.jobs)
        assert sorted(job.epochs for job in workload.jobs) == sorted(job.epochs for job in day.jobs)
        assert all(0 <= job.submit_slot <= DAY_SECONDS / slot for job in workload.jobs)
        kinds = Counter((job.model, job.architecture) for job in workload.jobs)
        assert kinds.total() == len(day.jobs)
        wanted = Counter(TrainingKind.of(job.request) for job in day.jobs)
        found = Counter(TrainingKind.of(to_request(job, workload)) for job in workload.jobs)
        by_model: dict[str, int] = {}
        for kind, count in wanted.items():
            by_model[kind.model] = max(by_model.get(kind.model, 0), count)
        for model, most in by_model.items():  # the most frequent kind of a model has the site's own name
            assert max(count for kind, count in found.items() if kind.model == model) == most
        again = read_workload(describe_workload(workload))
        assert [job.id for job in again.jobs] == [job.id for job in workload.jobs]


class TestDraws:
    def test_the_same_seed_draws_the_same_days_and_speeds(self) -> None:
        history = a_history(*(a_job(number, number * 9000.0) for number in range(1, 25)))
        days = days_of(history)
        speeds = Speeds(GaussianProcess(by_kind(history.speeds)), [a_request()])
        for seed in (1, 2):
            one, two = np.random.default_rng(seed), np.random.default_rng(seed)
            assert resampled(days, one) == resampled(days, two)
            assert speeds.draw(one) == speeds.draw(two)

    def test_a_drawn_day_has_each_hour_of_some_day(self) -> None:
        history = a_history(*(a_job(number, number * 7001.0) for number in range(1, 36)))
        days = days_of(history)
        assert len(days) == 3
        hours = [{job.at for job in day.jobs} for day in days]
        drawn = resampled(days, np.random.default_rng(5))
        for hour in range(24):
            own = {job.at for job in drawn.jobs if hour * 3600 <= job.at < (hour + 1) * 3600}
            assert any(own == {at for at in day if hour * 3600 <= at < (hour + 1) * 3600} for day in hours)

    def test_what_was_measured_is_near_what_is_drawn_and_what_was_not_is_uncertain(self) -> None:
        """Means and deviations are those of the belief."""
        belief = GaussianProcess(by_kind((SEEN,)))
        request = a_request()
        speeds = Speeds(belief, [request])
        (kind,) = speeds.means()
        rng = np.random.default_rng(0)
        logs = np.log([speeds.draw(rng)[kind].grid(4, 4)[1:, 1:] for _ in range(800)])
        mean, deviation = (each[1:, 1:] for each in belief.predict_log_speeds(request))
        assert logs.mean(axis=0) == pytest.approx(mean, abs=4.5 * deviation.max() / np.sqrt(800))
        assert logs.std(axis=0) == pytest.approx(deviation, rel=0.12)
        assert deviation[0, 0] < deviation[0, 3]
        assert np.log(speeds.means()[kind].grid(4, 4)[1:, 1:]) == pytest.approx(mean)

    def test_of_assumed_kinds_no_draw_does_more_than_in_proportion(self) -> None:
        """A worker was drawn to do a thirteenth of what four do, which were all that was recorded."""
        request = a_request(max_workers=8, max_ps=4)
        belief = GaussianProcess(by_kind((SEEN,)))
        (kind,) = Speeds(belief, [request]).means()
        for seed in range(30):
            free, bounded = (
                Speeds(belief, [request], assumed).draw(np.random.default_rng(seed))[kind].grid(8, 4)[1:, 1:]
                for assumed in ((), {kind})
            )
            assert (bounded <= free * (1 + 1e-9)).all()
            assert bounded[0, 0] == free[0, 0]
            per_worker, per_ps = bounded / np.arange(1, 9), bounded / np.arange(1, 5)[:, None]
            assert (np.diff(per_worker, axis=1) <= 1e-9).all()
            assert (np.diff(per_ps, axis=0) <= 1e-9).all()

    def test_a_size_that_failed_fails_in_every_draw(self) -> None:
        seen = measured((1, 1, 10.0), (2, 2, 0.0))
        drawn = Speeds(GaussianProcess(by_kind((seen,))), [a_request()]).draw(np.random.default_rng(0))[seen.kind]
        assert drawn.samples_per_second(2, 2) == 0.0
        assert drawn.samples_per_second(1, 1) > 0.0

    def test_a_job_that_would_never_get_on_is_left_out(self) -> None:
        seen = measured((1, 1, 0.0), (2, 2, 9.0))
        jobs = (a_job(1, 1.0), a_job(2, 2.0, max_workers=1, max_ps=1))
        (day,) = days_of(a_history(*jobs, speeds=(seen,)))
        workload = workload_of(
            day, Speeds(GaussianProcess(by_kind((seen,))), [job.request for job in day.jobs]).means(), SLOT
        )
        assert workload is not None
        assert [job.max_workers for job in workload.jobs] == [4]

    def test_large_jobs_are_drawn_too(self) -> None:
        request = a_request(max_workers=300, max_ps=60)
        table = Speeds(GaussianProcess(by_kind((SEEN,))), [request]).draw(np.random.default_rng(0))[SEEN.kind]
        assert table.fills(300, 60)
        assert np.isfinite(table.grid(300, 60)).all()

    def test_a_policy_sees_what_users_asked_for(self) -> None:
        (day,) = days_of(a_history(a_job(1, 1.0, asked_size=Allocation(3, 1)), a_job(2, 2.0)))
        speeds = Speeds(GaussianProcess(by_kind((SEEN,))), [job.request for job in day.jobs])
        workload = workload_of(day, speeds.means(), SLOT)
        assert workload is not None
        assert [to_request(job, workload).asked_size for job in workload.jobs] == [(3, 1), (0, 0)]

    def test_asynchronous_jobs_stay_so(self) -> None:
        seen = measured((1, 1, 10.0), consistency=Consistency.ASYNC)
        (day,) = days_of(a_history(a_job(1, 1.0, consistency=Consistency.ASYNC), speeds=(seen,)))
        workload = workload_of(day, Speeds(GaussianProcess(by_kind((seen,))), [day.jobs[0].request]).means(), SLOT)
        assert workload is not None
        assert TrainingKind.of(to_request(workload.jobs[0], workload)) == seen.kind


def test_costs_are_medians_of_what_coordinators_measured() -> None:
    def plan(seconds: float, *added: str) -> RuntimePlan:
        return RuntimePlan(
            number=1, at=1.0, first_version=1, workers=2, servers=1, added=added, suspension_max_ms=1000 * seconds
        )

    costs = costs_of(
        a_history(plans=(plan(4.0, "a", "b"), plan(1.0, "c"), plan(90.0, "d"), plan(7.0)), starts=(5, 9, 6))
    )
    assert (costs.start_seconds, costs.join_seconds) == (6.0, 2.0)
    nothing = costs_of(a_history())
    assert (nothing.start_seconds, nothing.join_seconds) == (0.0, 0.0)


class TestSplit:
    def test_the_newest_days_are_kept_back(self) -> None:
        history = a_history(*(a_job(number, number * 9000.0) for number in range(1, 28)))
        split = split_history(history, SLOT, seed=0, min_days=1, draws=5, tests=8)
        assert [day.name for day in split.trained_on] == ["2025-10-13", "2025-10-14"]
        assert [day.name for day in split.held_out] == ["2025-10-15"]
        assert len(split.training) == 5
        assert [case.name for case in split.cases][:2] == ["2025-10-15", "2025-10-15, draw 1"]
        assert len({case.name for case in split.cases}) == len(split.cases) == 8
        assert [case.jobs for case in split.cases] == [{"2025-10-15": 8}] * 8
        assert split_history(history, SLOT, seed=0, min_days=1, draws=5, tests=8).training == split.training
        # Each has speeds of its own.
        assert len({workload.speeds["resnet-50"] for workload in split.training}) == 5

    def test_a_job_that_still_runs_takes_part_in_its_day_and_is_not_compared(self) -> None:
        """How long it is nobody knows: a replay that waited for it might never end, and the day would not count."""
        jobs = [a_job(number, number * 9000.0) for number in range(1, 28)]
        running, over = JobState.RUNNING, a_history(*jobs)
        jobs[-2] = a_job(26, 26 * 9000.0, state=running, epochs=1e9)
        split = split_history(a_history(*jobs), SLOT, seed=0, min_days=1, draws=5, tests=8)
        for case, whole in zip(split.cases, split_history(over, SLOT, seed=0, min_days=1, tests=8).cases, strict=True):
            assert (case.jobs, whole.jobs) == ({"2025-10-15": 7}, {"2025-10-15": 8})
            assert len(case.workload.jobs) == len(whole.workload.jobs)
            (endless,) = (job.id for job in case.workload.jobs if job.epochs > 1e8)
            assert whole.awaited - case.awaited == {endless}

    def test_for_a_policy_that_sees_no_speeds_all_workloads_have_the_expected_ones(self) -> None:
        history = a_history(*(a_job(number, number * 9000.0) for number in range(1, 28)))
        split = split_history(history, SLOT, seed=0, min_days=1, draws=5, tests=8, expected_speeds=True)
        learned_on = {workload.speeds["resnet-50"] for workload in (*split.training, *split.validation)}
        assert learned_on == {split.cases[0].workload.speeds["resnet-50"]}
        # What is compared is drawn all the same.
        assert len({case.workload.speeds["resnet-50"] for case in split.cases}) > 1

    def test_what_is_compared_with_the_record_is_one_workload_of_all_jobs_that_ended(self) -> None:
        """Also where a day is replayed as one of a smaller site: recorded sizes would not fit its nodes."""
        jobs = [a_job(number, number * 120.0) for number in range(1, 1400)]
        sizes = {job.key: ((float(job.key.submitted), Allocation(1, 1)),) for job in jobs[:-1]}
        history = replace(a_history(*jobs), sizes=sizes)
        split = split_history(history, SLOT, seed=0, min_days=1, draws=5, tests=8)
        assert len(split.cases[0].workload.jobs) < 400
        (expected, *drawn) = split.period_cases
        assert len(drawn) == 15
        began = split.held_out[0].begin
        here = [job for job in jobs[:-1] if job.key.submitted >= began]
        assert expected.jobs == {"2025-10-14": len(here)}
        assert len(expected.workload.jobs) == len(here) + 1
        assert len(expected.compared["2025-10-14"]) == len(here)

    def test_the_same_days_are_compared_with_the_same_speeds_whatever_else_was_asked_for(self) -> None:
        """As by the gate, which looks back for four weeks, and by dl2d shadow. Days with other nodes have them, too."""
        jobs = [
            *(a_job(number, number * 9000.0) for number in range(1, 28)),
            a_job(28, 100.0, model="vgg-16"),
        ]
        sizes = {job.key: ((float(job.key.submitted), Allocation(1, 1)),) for job in jobs}
        other = cluster_states_of(3, (Node("n1", Resources.of(cpu=16, gpu=4)),))
        history = a_history(
            *jobs, speeds=(SEEN, measured((1, 1, 5.0), model="vgg-16")),
            cluster_states=(*cluster_states_of(2), *other[48:]),
        )  # fmt: skip
        history = replace(history, sizes=sizes)
        gate = split_history(history, SLOT, seed=0, min_days=2)
        shadow = split_history(history, SLOT, seed=0, for_training=False, since=MONDAY + DAY_SECONDS)
        assert (
            [day.name for day in gate.held_out] == [day.name for day in shadow.held_out] == ["2025-10-14", "2025-10-15"]
        )
        assert gate.period_cases == shadow.period_cases
        drawn = [case for case in gate.period_cases if case.name == "draw 3"]
        assert [list(case.jobs) for case in drawn] == [["2025-10-14"], ["2025-10-15"]]
        assert drawn[0].workload.speeds == drawn[1].workload.speeds

    def test_days_of_which_something_was_deleted_are_left_out_and_counted(self) -> None:
        jobs = [a_job(number, number * 9000.0) for number in range(1, 28)]
        history = replace(a_history(*jobs), complete_from=MONDAY + 0.5 * DAY_SECONDS)
        split = split_history(history, SLOT, seed=0, for_training=False)
        assert ([day.name for day in split.held_out], split.deleted) == (["2025-10-14", "2025-10-15"], 1)
        assert split_history(history, SLOT, seed=0, for_training=False, since=MONDAY + DAY_SECONDS).deleted == 0
        with pytest.raises(WorkloadError, match=r"not counted: 3 days of which decisions or jobs are no longer stored"):
            split_history(replace(history, complete_from=MONDAY + 2.5 * DAY_SECONDS), SLOT, seed=0)

    def test_one_day_at_least_is_trained_on(self) -> None:
        split = split_history(a_history(*(a_job(number, number * 9000.0) for number in range(1, 28))), SLOT, seed=0)
        assert ([day.name for day in split.trained_on], len(split.held_out)) == (["2025-10-13"], 2)

    def test_jobs_of_the_unfinished_day_take_part_and_are_not_compared(self) -> None:
        """Without those of a kind that came on no day before."""
        jobs = [*(a_job(number, number * 9000.0) for number in range(1, 28)),
                a_job(28, 28 * 9000.0, model="new", state=JobState.RUNNING)]  # fmt: skip
        history = a_history(*jobs, speeds=(SEEN, measured((1, 1, 5.0), model="new")))
        sizes = {job.key: ((float(job.key.submitted), Allocation(1, 1)),) for job in jobs}
        split = split_history(replace(history, end=MONDAY + 2.95 * DAY_SECONDS, sizes=sizes), SLOT, seed=0, min_days=1)
        for case in split.period_cases:
            assert {job.model for job in case.workload.jobs} == {"resnet-50"}
            assert len(case.workload.jobs) == 18
            assert case.jobs == {"2025-10-14": 10}

    def test_days_that_were_learned_from_are_not_kept_back(self) -> None:
        history = a_history(*(a_job(number, number * 9000.0) for number in range(1, 28)))
        split = split_history(history, SLOT, seed=0, learned=("2025-10-14",))
        assert [day.name for day in split.held_out] == ["2025-10-13", "2025-10-15"]
        assert [day.name for day in split.trained_on] == ["2025-10-14"]
        split = split_history(history, SLOT, seed=0, learned=("2025-10-14",), for_training=False)
        assert (len(split.held_out), split.trained_on, split.training) == (2, (), ())
        with pytest.raises(WorkloadError, match="the candidate was trained on all 3 recorded days, so none is left"):
            split_history(history, SLOT, seed=0, learned=("2025-10-13", "2025-10-14", "2025-10-15"))

    @pytest.mark.parametrize(
        ("min_days", "kept_back"), [(2, ["14", "15"]), (3, ["13", "14", "15"]), (4, ["13", "14", "15", "18"])]
    )
    def test_days_of_which_no_job_has_ended_are_kept_back_last(self, min_days: int, kept_back: list[str]) -> None:
        """As the newest are where jobs run for days."""
        over = 3 * DAY_SECONDS
        jobs = [
            a_job(number, number * 9000.0, state=JobState.FINISHED if number * 9000.0 < over else JobState.RUNNING)
            for number in range(1, 58)
        ]
        history = replace(a_history(*jobs, cluster_states=cluster_states_of(6)), end=MONDAY + 6 * DAY_SECONDS)
        split = split_history(history, SLOT, seed=0, min_days=min_days, draws=2, tests=2)
        assert [day.name for day in split.held_out] == [f"2025-10-{day}" for day in kept_back]
        assert len(split.trained_on) == 6 - len(kept_back)

    def test_jobs_that_the_site_scheduler_could_not_start_are_not_compared(self) -> None:
        """It would seem very slow: a job of a recorded size that does not fit gets its minimum size in a replay."""
        jobs = [a_job(number, number * 9000.0) for number in range(1, 28)]
        sizes = {job.key: ((MONDAY + 1.0, Allocation(8 if job.key.id == "12" else 2, 1)),) for job in jobs}
        split = split_history(replace(a_history(*jobs), sizes=sizes), SLOT, seed=0, min_days=2, draws=1, tests=2)
        for case in split.period_cases:
            assert (sum(case.jobs.values()), len(case.workload.jobs)) == (17, 17)
        assert split.too_large == 1
        assert split.jobs == 18

    def test_jobs_of_very_many_tasks_are_left_out(self) -> None:
        """A replay of them ended with a traceback."""
        jobs = [replace(a_job(number, number * 9000.0, max_workers=1001), static=True) for number in range(1, 28)]
        sizes = {job.key: ((MONDAY + 1.0, Allocation(1001 if job.key.id == "12" else 2, 1)),) for job in jobs}
        large = cluster_states_of(3, (Node("n1", Resources.of(cpu=9999, gpu=9999)),))
        history = with_assumed_speeds(replace(a_history(*jobs, cluster_states=large, speeds=()), sizes=sizes))
        split = split_history(history, SLOT, seed=0, min_days=2, draws=1, tests=2)
        assert sum(split.period_cases[0].jobs.values()) == 17
        assert split.too_large == 1

    def test_jobs_that_do_not_fit_are_told(self) -> None:
        jobs = [a_job(number, number * 9000.0, min_workers=5, max_workers=8) for number in range(1, 28)]
        with pytest.raises(WorkloadError, match="speeds that fit the nodes were submitted on 0 of the") as raised:
            split_history(a_history(*jobs), SLOT, seed=0)
        assert "do not count; not counted: 27 jobs larger than the nodes at most times of the day" in str(raised.value)

    def test_jobs_of_which_none_has_ended_have_no_completion_times(self) -> None:
        jobs = [a_job(number, number * 9000.0, state=JobState.RUNNING) for number in range(1, 28)]
        with pytest.raises(WorkloadError, match="none of the jobs that were submitted on the recorded days has ended"):
            split_history(a_history(*jobs), SLOT, seed=0)

    def test_a_day_alone_is_too_little(self) -> None:
        with pytest.raises(WorkloadError, match="were submitted on 1 of the recorded days; at least 2 are needed"):
            split_history(a_history(a_job(1, 1.0)), SLOT, seed=0)


def test_a_recorded_site_gives_its_own_days_back(tmp_path: Path) -> None:
    """What was replayed, kept in a store and read from it is the workload that it was, cut into days."""
    site = a_site()
    record(f"sqlite:///{tmp_path}/x.sqlite", site, Drf())
    with closing(SqlStore(f"sqlite:///{tmp_path}/x.sqlite")) as store:
        history = store.history(MONDAY, MONDAY + 30 * DAY_SECONDS)
    days = days_of(history)
    came = [job for day in days for job in day.jobs if job.at > 0]
    assert len(came) == len(site.jobs)
    for job, really in zip(came, site.jobs, strict=True):
        assert job.request.model == really.model
        assert job.epochs == pytest.approx(really.epochs)
        assert job.at == pytest.approx(really.submit_slot * site.slot_seconds % DAY_SECONDS, abs=1.1)
    left_over = [job for day in days for job in day.jobs if job.at == 0]
    assert left_over
    assert len(history.cluster_states) <= 24 * 8
    assert all(Counter(day.nodes) == {site.cluster[0].resources: site.cluster[0].count} for day in days)
    true = {model: speed.grid(8, 8) for model, speed in site.speeds.items()}
    for speeds in history.speeds:
        for point in speeds.points:
            workers, ps = point.allocation
            if max(workers, ps) <= 8:
                assert point.samples_per_second == pytest.approx(true[speeds.kind.model][ps, workers], rel=1e-6)
