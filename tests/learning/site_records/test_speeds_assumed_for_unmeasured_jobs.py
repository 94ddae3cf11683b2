"""Jobs of fixed size that report no speeds, compared with assumed ones."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recorded_site import MONDAY, QUIET_DAYS, record

from dl2d.core.errors import WorkloadError
from dl2d.core.jobs import NO_LAUNCH, Allocation, Architecture, Job, JobKey, JobState, Owner, Progress
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.core.store import ClusterState, History
from dl2d.learning.promotion_gate import GateSettings, compare
from dl2d.learning.site_records.digital_twin import Speeds
from dl2d.learning.site_records.policy_that_repeats_recorded_sizes import RecordedScheduler
from dl2d.learning.site_records.recorded_days import DAY_SECONDS, Day, DayJob
from dl2d.learning.site_records.speeds_assumed_for_unmeasured_jobs import with_assumed_speeds, with_recorded_times
from dl2d.learning.site_records.split_of_recorded_days import split_history
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.fifo import Fifo
from dl2d.simulation.realism import Realism
from dl2d.simulation.replay import Rules, replay
from dl2d.simulation.workload.workload_source_by_name import load_source
from dl2d.store.sql_store import SqlStore
from dl2d.testing import make_request
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.training_data import by_kind
from dl2d.tick.tick_context import GuardRules

SLOT = 1200.0
LIMIT, RAN = 24.0, 3.0


def silent(number: int, model: str = "bert") -> Job:
    """A job of fixed size that ran three hours of its 24."""
    request = make_request(
        name="j", model=model, architecture=Architecture.ALLREDUCE, epochs=LIMIT, samples_per_epoch=None,
        steps_per_epoch=3600.0, batch=None, max_ps=0, min_ps=0,
    )  # fmt: skip
    return Job(
        key=JobKey("site", str(number), number), request=request, owner=Owner("ann", 1, 1), launch=NO_LAUNCH,
        state=JobState.FINISHED, progress=Progress(at=1.0, epoch=RAN), static=True,
    )  # fmt: skip


def a_history(sizes: dict[Job, int], *speeds: MeasuredSpeeds) -> History:
    return History(
        begin=0.0, end=DAY_SECONDS, jobs=tuple(sizes), speeds=speeds, plans=(), starts=(),
        cluster_states=(ClusterState(60.0, (), {job.key: 1.0 for job in sizes}),),
        sizes={job.key: ((9.0, Allocation(workers, 0)),) for job, workers in sizes.items()},
    )  # fmt: skip


def test_what_a_job_does_is_what_it_took_its_time_for() -> None:
    usual, other, larger = silent(1), silent(2), silent(3)
    found = with_assumed_speeds(a_history({usual: 2, other: 2, larger: 4}))
    (speeds,) = found.speeds
    assert speeds.kind == TrainingKind.of(usual.request)
    assert speeds.points == (SpeedPoint(Allocation(2, 0), 1.0, 1, 1),)
    first, second, third = found.jobs
    assert first.progress.epoch == second.progress.epoch == pytest.approx(RAN, rel=0.01)
    assert first.request.epochs == pytest.approx(LIMIT, rel=0.01)
    # In the same time, twice the workers are taken to do more, but less than twice as much.
    assert 1.1 * RAN < third.progress.epoch < 2 * RAN
    assert third.request.epochs / LIMIT == pytest.approx(third.progress.epoch / RAN)
    assert found.cluster_states[0].epochs[third.key] == pytest.approx(third.progress.epoch / RAN)


def test_what_was_measured_stays() -> None:
    job = silent(1)
    measured = MeasuredSpeeds(TrainingKind.of(job.request), (SpeedPoint(Allocation(2, 0), 50.0, 16, 4),))
    reporting = replace(silent(2), static=False)
    found = with_assumed_speeds(a_history({job: 2, reporting: 2}, measured))
    assert found.speeds == (measured,)
    assert found.jobs[0].progress.epoch == pytest.approx(50.0 * RAN, rel=0.02)
    assert found.jobs[1] == reporting


def test_a_job_needs_its_recorded_time_at_drawn_speeds_too() -> None:
    """The speed at a size that is not its kind's most frequent one is uncertain, its run time there is not."""
    history = with_assumed_speeds(a_history({silent(1): 2, silent(2): 2, silent(3): 4}))
    kind = TrainingKind.of(history.jobs[0].request)
    assert history.assumed == {kind}
    jobs = [
        DayJob(job.request, 1.0, job.progress.epoch, job.request.epochs, history.sizes[job.key], unreported=True)
        for job in history.jobs
    ]
    day = Day(name="a day", begin=0.0, jobs=(*jobs, replace(jobs[0], unreported=False)), nodes=())
    speeds = Speeds(GaussianProcess(by_kind(history.speeds)), [job.request for job in jobs], history.assumed)
    drawn = speeds.draw(np.random.default_rng(1))
    found = with_recorded_times(day, speeds.means(), drawn).jobs
    for job in found[:3]:
        ((_, size),) = job.sizes
        speed = drawn[kind].samples_per_second(*size)
        assert job.epochs / speed == pytest.approx(RAN, rel=0.01)
        assert job.declared / speed == pytest.approx(LIMIT, rel=0.01)
    assert found[2].epochs != pytest.approx(jobs[2].epochs, rel=0.05)
    assert found[3] == day.jobs[3]


def test_other_model_types_that_were_measured_narrow_what_is_drawn() -> None:
    job = silent(1)
    kind = TrainingKind.of(job.request)
    points = tuple(SpeedPoint(Allocation(workers, 0), 10.0 * workers**0.9, 8, 4) for workers in (1, 2, 4, 8))
    deviations = []
    for speeds in ((), (MeasuredSpeeds(kind._replace(model="measured"), points),)):
        history = with_assumed_speeds(a_history({job: 2}, *speeds))
        assert history.assumed == {kind}
        made = Speeds(GaussianProcess(by_kind(history.speeds)), [job.request], history.assumed)
        rng = np.random.default_rng(0)
        speed_ups = [table.samples_per_second(8, 0) for _ in range(300) for table in made.draw(rng).values()]
        deviations.append(np.std(np.log(speed_ups)))
    assert deviations[1] < 0.8 * deviations[0]


def test_a_job_that_never_started_keeps_its_limit() -> None:
    waits = replace(silent(1), state=JobState.READY, progress=Progress())
    found = with_assumed_speeds(replace(a_history({waits: 2}), sizes={}))
    assert (found.jobs, found.speeds) == ((waits,), ())


def test_with_them_a_scheduler_is_as_good_as_its_record(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.sqlite"
    record(url, load_source(QUIET_DAYS, seed=1).workload, Fifo(), decided_by="observed", reports=False)
    end = MONDAY + 5 * DAY_SECONDS
    with closing(SqlStore(url)) as store:
        with pytest.raises(WorkloadError, match="jobs of fixed size report no speeds"):
            split_history(store.history(MONDAY, end), SLOT, seed=0)
        history = with_assumed_speeds(store.history(MONDAY, end, unreported=True))
    split = split_history(history, SLOT, seed=0, for_training=False)
    assert split.unreported == split.jobs > 40
    assert len(split.period_cases) == 16
    expected, drawn, *_ = split.period_cases
    again = replay(
        expected.workload, RecordedScheduler(expected.sizes), LoadBalance(), rules=Rules(realism=Realism()),
        timer=time.process_time,
    )  # fmt: skip
    recorded = [(job.ended_at - job.key.submitted) / SLOT for job in history.jobs if job.ended_at is not None]
    compared = {job for jobs in expected.compared.values() for job in jobs}
    times = [job.jct for job in again.jobs if job.id in compared]
    assert sum(times) / len(times) == pytest.approx(sum(recorded) / len(recorded), rel=0.1)
    found = compare(
        [expected, drawn], Fifo(), None, LoadBalance(), costs=Realism(), rules=GuardRules(),
        settings=GateSettings(timeout=60.0, margin=0.02, shared_draws=True, whatever_speeds=True),
        timer=time.process_time,
    )  # fmt: skip
    assert found.verdict.passed, found.verdict.reason
    assert found.verdict.change == pytest.approx(0.0, abs=0.01)
    assert found.assumed == found.jobs == len(compared)
    # Jobs that had not ended in the recorded time are not compared, so their assumed speeds do not count.
    running = tuple(replace(job, ended_at=None, state=JobState.RUNNING) for job in history.jobs[-5:])
    fewer = split_history(replace(history, jobs=(*history.jobs[:-5], *running)), SLOT, seed=0, for_training=False)
    assert sum(fewer.period_cases[0].assumed.values()) == fewer.unreported - 5 == len(compared) - 5
