"""Which losses of workers end a job: not those of one host at one time, nor those of long ago, nor a first one."""

from __future__ import annotations

import math

import pytest
from coordinator.jobs import JOINED, job, member, spec

from pslite.coordinator.checkpoints_and_rollback import check_return, go_back
from pslite.coordinator.failures import failover
from pslite.coordinator.failures.failover import check_members, count_loss, failed, lose, process_ended
from pslite.coordinator.failures.failure_detector import be_lenient
from pslite.coordinator.state.status_report import report
from pslite.failure_rate_limits import Incident
from pslite.job.job_status import Cause
from pslite.net.messages import AgentExit, Failed

KILLED = AgentExit(pid=7, status=0, signal=9, cause=Cause.KILLED, text="")
#: seconds within which losses on one host are one
WINDOW = 12.0


@pytest.mark.parametrize(
    ("losses", "fatal"),
    [
        pytest.param([(0, 5, "a")] * 8, False, id="a host with eight workers dies"),
        pytest.param([(0, 5, "a"), (2, 5, "a"), (11, 5, "a")], False, id="one host, noticed one after the other"),
        pytest.param([(0, 5, "a"), (1, 5, "b"), (2, 5, "c")], True, id="three hosts, one after the other"),
        pytest.param([(0, 5, "a"), (0, 5, "b"), (0, 5, "c")], False, id="three hosts at one time"),
        pytest.param([(0, 5, "a"), (20, 5, "a"), (40, 5, "a")], True, id="one host, again and again"),
        pytest.param([(0, 5, "a"), (20, 6, "a"), (40, 7, "a")], False, id="the job goes on between them"),
        pytest.param([(0, 5, "a"), (1, 5, "b"), (3600, 5, "c")], False, id="the first ones are an hour ago"),
    ],
)
def test_which_losses_are_too_many(losses, fatal):
    counted, too_many = [], False
    for at, version, host in losses:
        assert not too_many
        # each was heard of half a second before
        loss = Incident(1000.0 + at, version, host)
        counted, too_many = count_loss(counted, loss, loss.at - 0.5, WINDOW)
    assert too_many is fatal


@pytest.mark.parametrize(
    ("status", "signal", "start", "state"),
    [
        pytest.param(0, 9, None, "waiting", id="killed from outside: the resource manager starts another process"),
        pytest.param(0, 9, 60.0, "failed", id="killed from outside, and nobody starts another process"),
        pytest.param(0, 11, None, "failed", id="the script crashed"),
        pytest.param(3, 0, None, "failed", id="the script failed"),
    ],
)
def test_a_process_that_ends_before_it_joins(status, signal, start, state):
    a_job, _ = job([], wanted=None, start=start)
    a_job.state.describe(None)
    process_ended(a_job, "worker-0", AgentExit(pid=7, status=status, signal=signal, cause=Cause.KILLED, text=""))
    assert a_job.state.state == state


def test_the_task_whose_script_cannot_go_on_is_reported_with_the_reason_until_it_is_known_how_its_process_ended():
    a_job, _ = job(["worker-0", "ps-0"], plan=["worker-0", "ps-0"])
    state = a_job.state
    failed(a_job, state.members["worker-0"], Failed(reason="the loss of step 0 is nan"))
    assert (state.state, state.reason) == ("failed", "worker-0 on n (pid 7): the loss of step 0 is nan")
    assert _ends(a_job) == {"worker-0": (Cause.FAILED, "the loss of step 0 is nan"), "ps-0": (None, "")}
    state.exits["worker-0"] = AgentExit(pid=7, status=1, signal=0, cause=Cause.FAILED, text="ValueError: nan")
    assert _ends(a_job)["worker-0"] == (Cause.FAILED, "died: its process ended with status 1: ValueError: nan")


def _ends(a_job):
    return {member.task: (member.cause, member.how) for member in report(a_job).members}


def test_a_script_that_fails_before_it_has_said_what_to_train_fails_the_job():
    """As scripts with the KVStore may, which have joined by then: another process would fail just as well."""
    a_job, lines = job(["worker-0", "worker-1"], wanted=None, start=None)
    a_job.state.describe(None)
    for worker in a_job.state.members.values():
        worker.state, worker.described = "joined", False
    lose(a_job, a_job.state.members["worker-1"], "its script raised FileNotFoundError", fatal=True)
    assert a_job.state.state == "failed"
    assert lines[-1].endswith("its script raised FileNotFoundError")


def test_a_job_whose_workers_are_killed_again_and_again_before_they_have_said_what_to_train_fails():
    a_job, _ = job([], wanted=None, start=None)
    a_job.state.describe(None)
    for number in range(3):
        assert a_job.state.state == "waiting"
        # on other hosts, and each was heard of after the one before had died
        worker = member(f"worker-{number}", host=f"n-{number}", heard=math.inf, described=False)
        a_job.state.members[worker.task] = worker
        lose(a_job, worker, "died: killed by signal 9 (SIGKILL)")
    assert a_job.state.state == "failed"


@pytest.mark.parametrize(
    ("status", "signal", "start", "state"),
    [
        pytest.param(0, 15, None, "waiting", id="preempted or cancelled, and replaced by the daemon"),
        pytest.param(143, 0, None, "waiting", id="its script ends by itself at SIGTERM"),
        pytest.param(0, 9, None, "failed", id="killed: the script may be the cause"),
        pytest.param(0, 15, 60.0, "failed", id="nobody starts another one"),
    ],
)
def test_a_job_whose_workers_are_ended_again_and_again_before_it_trains(status, signal, start, state):
    a_job, _ = job([], wanted=None, start=start)
    a_job.state.describe(None)
    for number in range(5):
        worker = member(f"worker-{number}", host=f"n-{number}", heard=math.inf, described=False)
        a_job.state.members[worker.task] = worker
        ended = AgentExit(pid=7, status=status, signal=signal, cause=Cause.KILLED, text="")
        a_job.state.exits[worker.task] = ended
        lose(a_job, worker, "died")
    assert a_job.state.state == state


@pytest.fixture
def clock(monkeypatch):
    """Set the seconds since the members joined."""

    def set_to(seconds):
        monkeypatch.setattr(failover.time, "monotonic", lambda: JOINED + seconds)

    set_to(0.0)
    return set_to


def test_a_job_whose_processes_are_killed_again_and_again_before_they_join_leaves_its_end_to_the_daemon(clock):
    a_job, lines = job([], wanted=None, start=None)
    a_job.state.describe(None)
    for number in range(5):
        clock(60.0 * number)
        process_ended(a_job, f"worker-{number}", KILLED)
    assert a_job.state.state == "waiting"
    assert lines[-1] == "worker-4 (pid 7) died: killed by signal 9 (SIGKILL) before it joined"


@pytest.mark.parametrize("durability", ["none", "durable"])
def test_a_job_whose_members_have_ended_by_themselves_while_its_coordinator_was_stopped_waits_for_others(durability):
    tasks = ["worker-0", "worker-1", "ps-0", "ps-1"]
    a_job, lines = job(tasks, plan=tasks, described=spec(durability=durability), start=None)
    for each in a_job.state.members.values():
        each.lost = JOINED
    be_lenient(a_job, JOINED + 20)
    gave_up = AgentExit(pid=7, status=1, signal=0, cause=Cause.FAILED, text="")
    for task in tasks:
        # as they arrive: what becomes of the job when the first is known is not over when the last one comes
        a_job.state.exits[task] = gave_up
        process_ended(a_job, task, gave_up)
        check_members(a_job, JOINED + 20)
    assert a_job.state.state == "waiting", lines
    # with another task, whose script cannot go on, it fails as ever
    process_ended(a_job, "worker-2", gave_up)
    assert a_job.state.state == "failed"


@pytest.mark.parametrize(
    ("returning", "ended", "state"),
    [
        pytest.param({"ps-0": "ps"}, [], "waiting", id="another one of its role joins again"),
        pytest.param({"ps-0": "ps"}, ["ps-0"], "failed", id="another one was to join again, and its process has ended"),
        pytest.param({"worker-1": "worker"}, [], "failed", id="it was the last of its role"),
    ],
)
def test_a_server_in_no_plan_dies_when_the_job_has_gone_back(returning, ended, state):
    """Nobody starts another one, and members that are told to join again have not done so."""
    a_job, lines = job(["ps-1", "worker-0"], start=60.0)
    a_job.state.begin_again(JOINED, 0, returning, "ps-2 died")
    a_job.state.describe(spec())
    for task in ended:
        a_job.state.exits[task] = KILLED
    lose(a_job, a_job.state.members["ps-1"], "silent for 3 s")
    assert a_job.state.state == state, lines


def test_a_worker_that_was_to_leave_fails_when_the_job_has_gone_back():
    """It says nothing of the workers that come."""
    a_job, lines = job(["worker-0", "worker-1", "ps-0"], plan=("worker-0", "worker-1", "ps-0"))
    members = dict(a_job.state.members)
    for each in members.values():
        each.prepared = True
    members["worker-1"].state = "draining"
    go_back(a_job, "ps-0 died")
    lose(a_job, members["worker-1"], "its script failed", fatal=True)
    assert a_job.state.state == "waiting", lines


def test_a_job_that_has_gone_back_waits_for_members_for_a_time():
    a_job, lines = job(["worker-0"], start=60.0)
    a_job.state.begin_again(JOINED, 0, {}, "ps-0 died")
    check_return(a_job, JOINED + 0.2)
    assert a_job.state.state == "waiting", lines
    check_return(a_job, JOINED + 1)
    assert a_job.state.reason == "ps-0 died; the job went back, and no server has joined within 0.3 s: submit it again"
