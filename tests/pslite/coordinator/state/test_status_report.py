"""What a coordinator reports of a job's speed, and of members that it has given up."""

from __future__ import annotations

import math

import pytest
from coordinator.jobs import JOINED, job, spec

from pslite.coordinator import checkpoints_and_rollback
from pslite.coordinator.state import status_report
from pslite.job.job_spec import Part, Segment, Sum
from pslite.job.job_status import Cause, PlanReport, Suspension
from pslite.job.sample_assignment import SampleAssigner
from pslite.job.step_time_and_usage_statistics import ResizeSteps
from pslite.net.messages import AgentExit, Beat


@pytest.fixture
def clock(monkeypatch):
    """A function that sets the time, seconds after the members have joined."""

    def at(seconds):
        monkeypatch.setattr(status_report.time, "monotonic", lambda: JOINED + seconds)

    return at


@pytest.mark.parametrize("described", [spec(mode="open", epochs=0), spec()], ids=["open", "closed"])
@pytest.mark.parametrize("step", [0.5, 40.0])
def test_the_speed_of_a_job_of_which_nothing_moves_is_zero(clock, step, described):
    a_job, _ = job(["worker-0", "ps-0"], plan=("worker-0", "ps-0"), described=described)
    speeds = []
    for version in range(1, 31):
        clock(version * step)
        status_report.heartbeat(a_job, a_job.state.members["worker-0"], Beat(version=version))
        speeds.append(status_report.report(a_job).steps_per_second)
    unknown = math.ceil(2 / step)  # two heartbeats
    assert speeds[:unknown] == [None] * unknown
    assert speeds[unknown:] == pytest.approx([1 / step] * (30 - unknown))
    for later, speed in ((9.0, 1 / step), (10 * step + 10.1, 0.0)):
        clock(30 * step + later)
        status_report.heartbeat(a_job, a_job.state.members["worker-0"], Beat(version=30))
        assert status_report.report(a_job).steps_per_second == pytest.approx(speed)
    assert status_report.report(a_job).samples_per_second is None  # which is no measurement of a speed


def test_the_speed_is_measured_anew_when_the_version_has_gone_back(clock):
    a_job, _ = job(["worker-0", "ps-0"], plan=("worker-0", "ps-0"))
    speeds = []
    for second, version in ((1, 7), (3, 6), (5, 8), (7, 12)):
        clock(second)
        a_job.state.version = version - 1
        status_report.heartbeat(a_job, a_job.state.members["worker-0"], Beat(version=version))
        speeds.append(status_report.report(a_job).steps_per_second)
    assert speeds == [None, None, pytest.approx(1.0), pytest.approx(1.5)]


def test_a_member_that_was_lost_before_the_job_went_back_reports_no_progress(clock):
    """Its heartbeats may be read late: where the coordinator was stopped for a while, or the member was."""
    clock(1.0)
    a_job, _ = job(["worker-0", "worker-1", "ps-0"], plan=("worker-0", "worker-1", "ps-0"))
    members = dict(a_job.state.members)
    for each in members.values():
        each.prepared = True
    a_job.give_up(members["worker-0"], "died")
    checkpoints_and_rollback.go_back(a_job, "ps-0 died")
    status_report.heartbeat(a_job, members["worker-0"], Beat(version=1539, samples=20, loss=1.0))
    told = status_report.report(a_job)
    assert (told.version, told.loss, told.epoch) == (0, None, 0.0)


def test_heartbeats_of_several_members_at_one_moment_give_no_speed(clock):
    """As when a coordinator has taken the place of another one."""
    a_job, _ = job(["worker-0", "worker-1", "ps-0"], plan=("worker-0", "worker-1", "ps-0"))
    speeds = []
    for second, task, version in ((1.0, "worker-0", 90), (1.0001, "worker-1", 91), (4.0, "worker-0", 99)):
        clock(second)
        status_report.heartbeat(a_job, a_job.state.members[task], Beat(version=version))
        speeds.append(status_report.report(a_job).steps_per_second)
    assert speeds == [None, None, pytest.approx(3.0)]


@pytest.mark.parametrize(
    ("given_up", "ended", "silent", "cause"),
    [
        (False, None, 100.0, None),  # its script has ended, and something goes on after it
        (True, None, 30.0, None),
        (True, None, 30.1, Cause.LOST),
        (True, Cause.KILLED, 30.1, Cause.KILLED),
    ],
)
def test_a_member_that_was_given_up_is_lost_when_nothing_is_heard_of_it(clock, given_up, ended, silent, cause):
    a_job, _ = job(["worker-0", "ps-0"], plan=("worker-0", "ps-0"), lease=10.0)
    member = a_job.state.members["worker-0"]
    member.state, member.given_up = "left", given_up
    if ended is not None:
        a_job.state.exits["worker-0"] = AgentExit(pid=7, status=0, signal=9, cause=ended, text="")
    clock(silent)
    reported = next(each for each in status_report.report(a_job).members if each.task == "worker-0")
    assert reported.cause is cause


def plan_done(number, first_version, workers, added=0):
    return PlanReport(
        number=number, first_version=first_version, workers=workers, servers=1, added=["member"] * added, removed=[],
        moved_bytes=0, prepare_ms=0.0, move_ms=0.0, suspension_ms=Suspension(),
    )  # fmt: skip


def test_a_version_counts_as_a_batch_of_each_worker_that_was_there_when_the_scripts_began():
    tasks = ["worker-0", "worker-1", "ps-0"]
    a_job, _ = job(tasks, plan=tasks, described=spec(mode="open", epochs=0))
    assert status_report.report(a_job).batches_per_version is None
    a_job.state.reports += [plan_done(1, 0, 1, added=2), plan_done(2, 0, 3, added=2), plan_done(3, 8, 1)]
    assert status_report.report(a_job).batches_per_version == 3
    a_job.state.reports.append(plan_done(4, 0, 2, added=3))  # it went back to its beginning
    assert status_report.report(a_job).batches_per_version == 2
    a_job.state.reports += [plan_done(5, 60, 1, added=2), plan_done(6, 70, 2)]  # which was version 60
    assert status_report.report(a_job).batches_per_version == 1
    a_job.step_record.assigners["", 100] = SampleAssigner(100)
    assert status_report.report(a_job).batches_per_version == 2  # those of now
    for described in (spec(mode="open", epochs=0, staleness=4), spec()):
        a_job, _ = job(tasks, plan=tasks, described=described)
        a_job.state.reports.append(plan_done(1, 0, 2, added=3))
        # asynchronous or not, each worker has taken that step
        assert status_report.report(a_job).batches_per_version == (2 if described.open else None)


def test_a_job_whose_scripts_update_the_weights_can_have_the_workers_that_it_has():
    tasks = ["worker-0", "worker-1", "worker-2", "ps-0"]
    part = (Part("weight", (1000,)),)
    sums = spec(mode="open", epochs=0, segments=(Segment(dtype="float32", optimizer=Sum(), parts=part),))
    for described, most in ((sums, 1), (spec(mode="open", epochs=0), None)):
        a_job, _ = job(tasks, plan=["worker-0", "worker-1", "ps-0"], described=described)
        a_job.state.dead["worker-1"] = 3
        assert status_report.report(a_job).most_workers == most


def test_tasks_whose_dl2_run_is_connected_are_starting_until_they_join():
    a_job, _ = job(["worker-0", "ps-0"], plan=["worker-0", "ps-0"], described=spec())
    assert status_report.report(a_job).starting == []
    a_job.agents = ["worker-0", "ps-0", "worker-3"]
    assert status_report.report(a_job).starting == ["worker-3"]


def steps(plan, longest, median):
    return ResizeSteps(plan=plan, longest_ms=longest, median_ms=median)


def test_a_plan_is_reported_with_the_steps_around_it_once_all_workers_have_told_them(clock):
    tasks = ["worker-0", "worker-1", "worker-2", "ps-0"]
    a_job, _ = job(tasks, plan=tasks)
    clock(0)
    a_job.state.reports += [plan_done(1, 0, 2), plan_done(2, 8, 3)]
    status_report.await_steps(a_job, 2, {"worker-0", "worker-1"})
    beats = [("worker-0", 2, 210.0, 20.0), ("worker-2", 2, 999.0, 9.0), ("worker-1", 1, 999.0, 9.0)]
    for task, plan, longest, median in beats:
        status_report.heartbeat(a_job, a_job.state.members[task], Beat(resize=steps(plan, longest, median)))
        assert [report.number for report in status_report.report(a_job).plans] == [1]
    a_job.urgent = False
    status_report.heartbeat(a_job, a_job.state.members["worker-1"], Beat(resize=steps(2, 200.0, 30.0)))
    report = status_report.report(a_job).plans[-1]
    assert (report.number, report.longest_step_ms, report.median_step_ms) == (2, 210.0, 25.0)
    assert a_job.urgent


@pytest.mark.parametrize("told", [True, False])
def test_a_plan_is_reported_without_steps_that_are_not_told_in_time(clock, told):
    tasks = ["worker-0", "worker-1", "ps-0"]
    a_job, _ = job(tasks, plan=tasks)
    clock(0)
    a_job.state.reports.append(plan_done(2, 8, 2))
    status_report.await_steps(a_job, 2, {"worker-0", "worker-1"})
    if told:
        status_report.heartbeat(a_job, a_job.state.members["worker-0"], Beat(resize=steps(2, 210.0, 20.0)))
    assert not status_report.report(a_job).plans
    clock(a_job.settings.lease)
    assert [report.longest_step_ms for report in status_report.report(a_job).plans] == [210.0 if told else None]
