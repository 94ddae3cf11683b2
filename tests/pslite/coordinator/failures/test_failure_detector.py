"""When a member is gone, and how that is said."""

from __future__ import annotations

import socket

import pytest
from coordinator.jobs import JOINED, job

from pslite.coordinator.failures import failover
from pslite.coordinator.failures.failure_detector import Verdict, be_lenient, examine, heard, take_back
from pslite.job.job_status import Cause
from pslite.net.message_framing import Channel, Inbox
from pslite.net.messages import MAX_CONTROL_BYTES, AgentExit, FromMember, Leave

KILLED = AgentExit(pid=7, status=0, signal=9, cause=Cause.KILLED, text="")
DONE = AgentExit(pid=7, status=0, signal=0, cause=Cause.DONE, text="")
FAILED = AgentExit(pid=7, status=3, signal=0, cause=Cause.FAILED, text="see above")
UNSEEN = Verdict("died: its connection ended, and no dl2-run reported how its process ended")
#: settings.lease 10, settings.verdict 2
LATER = JOINED + 5.0


@pytest.mark.parametrize(
    ("lost", "ended", "agents", "now", "verdict"),
    [
        (0.0, None, (), JOINED + 10.0, None),
        (0.0, None, (), JOINED + 10.1, Verdict("died or hangs: silent for 10 s")),
        # its connection has ended: an agent has 2 s to say how its process did, without one it is a tenth of that
        (LATER, None, ("worker-0",), LATER + 1.9, None),
        (LATER, None, ("worker-0",), LATER + 2.0, UNSEEN),
        (LATER, None, (), LATER + 0.1, None),
        (LATER, None, (), LATER + 0.2, UNSEEN),
        (LATER, KILLED, ("worker-0",), LATER, Verdict("died: killed by signal 9 (SIGKILL)")),
        (LATER, FAILED, (), LATER, Verdict("died: its process ended with status 3: see above", fatal=True)),
        # as it should: it has finished, below
        (LATER, DONE, (), LATER, Verdict("died: its process ended with status 0", fatal=True)),
    ],
)
def test_when_a_member_is_gone(lost, ended, agents, now, verdict):
    a_job, _ = job(["worker-0", "ps-0"], plan=("worker-0", "ps-0"))
    a_job.agents = agents
    member = a_job.state.members["worker-0"]
    member.lost = lost
    if ended is not None:
        a_job.state.exits["worker-0"] = ended
    assert examine(a_job, member, now) == verdict


def test_a_process_may_end_once_its_member_has_finished():
    a_job, _ = job(["worker-0", "ps-0"], plan=("worker-0", "ps-0"))
    member = a_job.state.members["worker-0"]
    member.lost, member.finished, a_job.state.exits["worker-0"] = LATER, True, DONE
    failover.check_members(a_job, LATER)
    assert member.state == "left"
    assert not a_job.state.over


@pytest.mark.parametrize(
    ("ended", "seconds", "state"),
    [
        (None, 9.9, "running"),
        (None, 10.0, "left"),  # something goes on after its script
        (DONE, 0.0, "left"),
        (FAILED, 0.0, "failed"),
        (KILLED, 0.0, "left"),  # its script was done
    ],
)
def test_a_worker_that_has_left_is_gone_once_its_process_has_ended(ended, seconds, state):
    a_job, _ = job(["worker-0", "ps-0"], plan=("worker-0", "ps-0"))
    a_job.agents = ("worker-0", "ps-0")
    member = a_job.state.members["worker-0"]
    member.finished = True
    a_job.state.members["ps-0"].heard = LATER
    failover.leave(a_job, member, Leave())
    member.lost = LATER
    if ended is not None:
        a_job.state.exits["worker-0"] = ended
    failover.check_members(a_job, LATER + seconds)
    assert (member.state if member.state == "left" and not a_job.state.over else a_job.state.state) == state


def test_a_process_that_is_reported_as_ended_is_examined_when_its_connection_ends():
    a_job, _ = job(["worker-0", "ps-0"], plan=("worker-0", "ps-0"))
    member = a_job.state.members["worker-0"]
    a_job.state.exits["worker-0"] = KILLED
    ours, theirs = socket.socketpair()
    with ours, theirs:
        member.channel.attach(Channel(ours, Inbox(FromMember, MAX_CONTROL_BYTES)), 0)
        assert examine(a_job, member, LATER) is None
    member.channel.detach()
    assert examine(a_job, member, LATER) is not None


def test_members_have_a_lease_to_come_back_after_a_pause_of_the_coordinator():
    a_job, _ = job(["worker-0", "ps-0"], plan=("worker-0", "ps-0"))
    member = a_job.state.members["worker-0"]
    be_lenient(a_job, LATER)
    member.lost = LATER
    assert examine(a_job, member, LATER + 9.9) is None
    take_back(a_job, member)
    heard(a_job, member)  # it knows that it is back: when it is lost now, it is gone
    member.lost = LATER
    assert examine(a_job, member, LATER + 9.9) == UNSEEN


def test_a_member_whose_connection_has_lasted_through_a_pause_is_judged_as_before_when_the_lease_is_over(monkeypatch):
    a_job, _ = job(["worker-0", "ps-0"], plan=("worker-0", "ps-0"))
    member = a_job.state.members["worker-0"]
    be_lenient(a_job, LATER)
    for seconds, lenient in ((9.9, True), (10.1, False)):
        monkeypatch.setattr("time.monotonic", lambda now=LATER + seconds: now)
        heard(a_job, member)
        assert (member.task in a_job.lenient) is lenient


def test_only_the_first_silence_of_a_plan_member_changes_the_job_and_others_do_its_work():
    a_job, lines = job(["worker-0", "worker-1", "ps-0"], plan=("worker-0", "worker-1", "ps-0"))
    state = a_job.state
    state.members["worker-0"].lost = LATER
    state.exits["worker-0"] = KILLED
    for now in (LATER, LATER + 1):
        failover.check_members(a_job, now)
    assert lines == [
        "worker-0 on n (pid 7) died: killed by signal 9 (SIGKILL); worker-1 does its part, nothing is lost"
    ]
    assert state.dead == {"worker-0": 0}
    assert set(state.reassigned[1].values()) == {"worker-1"}
