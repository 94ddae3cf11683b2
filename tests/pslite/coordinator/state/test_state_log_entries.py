"""What a coordinator writes to its log: nothing is forgotten, and what earlier versions wrote still loads."""

from __future__ import annotations

import threading
from dataclasses import fields
from pathlib import Path

import msgspec
from coordinator.jobs import job, member

from pslite.coordinator import Coordinator
from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.job_state import JobState
from pslite.coordinator.state.state_log_entries import LogWriter, decode, encode
from pslite.job.sample_assignment import SampleAssigner, Seen
from pslite.launch.coordinator_process.mxnet_launcher import OpenMembership
from pslite.net.messages import Abort, Announced, AssignSamples, Exit, Factors, Reassign, Reassigned
from pslite.net.reliable_channel import ReliableChannel
from pslite.storage.coordinator_log import CoordinatorLog
from pslite.storage.disk_thread import DiskThread

#: attributes of a coordinator and its job, and why the next coordinator need not know them: the rest is in the state
FORGOTTEN = {
    "its own": {
        "name", "token", "director", "settings", "say", "encrypt", "selector", "listener", "log", "wakeup",
        "follows", "urgent", "ticked", "lenient_until", "lenient", "faults",
        "reconnected", "disk", "completing", "last_checkpoint_since",
        "then",
    },
    "connections": {"connections", "agents"},
    "said again, or written beside the state": {"squares", "step_record", "step_record_changed", "usage"},
    "measured": {"watch", "loss", "progress", "epoch_reported", "balance", "slow_reported", "awaited_steps"},
}  # fmt: skip
#: fields of the state that earlier versions did not have
LATER = {"losses", "returns", "broken_groups", "stalls", "begun", "dismissed"}
#: fields of specifications and plans that earlier versions had
GONE = {"update", "stop", "resumed"}


def test_every_attribute_of_a_coordinator_is_written_or_need_not_be():
    coordinator = Coordinator(
        job="j", token=b"x" * 32, director=OpenMembership(0, 0), say=lambda _: None, host="127.0.0.1"
    )
    coordinator._close()
    names = {name.removeprefix("_") for name in vars(coordinator)} | {field.name for field in fields(Job)}
    assert names == {"job", "state"}.union(*FORGOTTEN.values())


def in_order(value):
    """Sort lists of names, as sets have been written in some order, and leave out what there is no more."""
    if isinstance(value, dict):
        return {key: in_order(each) for key, each in value.items() if key not in GONE}
    return sorted(value) if isinstance(value, list) and all(isinstance(each, str) for each in value) else value


def kept(again, before):
    """What was written again of what had been written before, without fields that records did not have then."""
    if isinstance(again, dict) and isinstance(before, dict):
        return {key: kept(each, before[key]) for key, each in again.items() if key in before and key not in GONE}
    if isinstance(again, list) and isinstance(before, list) and any(isinstance(each, dict) for each in before):
        return [kept(*both) for both in zip(again, before, strict=True)]
    return in_order(again)


def test_a_log_of_november_2026_loads():
    """Each of its fields has another value than that of a new job."""
    written = Path(__file__).with_name("coordinator_log_2026_11.json").read_bytes()
    state, before = decode(written), msgspec.json.decode(written)["record"]
    fresh = msgspec.to_builtins(
        JobState(incarnation="", began=0.0, waiting_reported=0.0), enc_hook=lambda _: None, str_keys=True
    )
    # that follows from others; or had no times, without which it does not count
    assert before.keys() - fresh.keys() == {"complete", "final"} | {"breaks", "rollbacks"}
    again = msgspec.json.decode(encode(state))["record"]
    moved = {"clock", "began", "said_waiting", "retry_at", "target_changed", "members", "pending", "broken"}
    for name in fresh.keys() - moved - LATER:
        assert before[name] != fresh[name], name
        assert kept(again[name], before[name]) == in_order(before[name]), name
    assert again["members"].keys() == before["members"].keys()
    assert again["pending"]["plan"] == in_order(before["pending"]["plan"])
    assert state.failover.waits_for == {"ps-0"}
    assert (state.reassignments, state.failovers, state.checkpoint) == (3, 2, 7)


def test_messages_that_have_other_names_now_keep_their_tags():
    """A log may contain messages that wait for confirmation, and members may be older than their coordinator."""
    messages = Announced(plan=1, first=2), Reassign(number=1, gone=(), nodes={}), Reassigned(number=1)
    assert [msgspec.to_builtins(message)["type"] for message in messages] == ["Stamped", "TakeOver", "TakenOver"]


def test_messages_to_several_stand_in_a_log_once():
    abort = Abort(plan=7, reason="because")
    state = JobState(incarnation="i", began=0.0, waiting_reported=0.0)
    state.digests, state.reassigned = {3: b"\xff"}, {1: {2: "a"}}
    for task in ("a", "b", "c"):
        state.members[task] = member(task, channel=ReliableChannel(3, 4, [abort, Exit(reason=task)]), lost=5.0)
    data = encode(state)
    assert data.count(b"because") == 1
    assert b"\n" not in data
    found = decode(data)
    assert [list(m.channel.unconfirmed) for m in found.members.values()] == [
        [abort, Exit(reason=task)] for task in ("a", "b", "c")
    ]
    assert (found.members["a"].channel.taken, found.members["a"].channel.confirmed) == (3, 4)
    assert (found.digests, found.reassigned) == ({3: b"\xff"}, {1: {2: "a"}})
    # it has a lease to come back
    assert found.members["a"].lost == 0.0
    assert found.members["a"].heard == found.clock > 0


def test_what_members_were_told_of_a_step_is_written_with_the_state(tmp_path):
    a_job, lines = job(["worker-0", "ps-0"])
    writer = LogWriter(CoordinatorLog(tmp_path / "state"), lines.append)
    record = a_job.step_record
    record.factors["gradient"] = Factors(version=3, of="gradient", factors={0: 0.5})
    assigner = record.assigners["train", 90] = SampleAssigner(90)
    record.answers["worker-0"] = AssignSamples(number=4, samples=assigner.assign("worker-0", 3, Seen(), 8, 2))
    assigner.assign("worker-1", 3, Seen(), 8, 2)
    assigner.take_back("worker-1", 3)
    a_job.step_record_changed = True
    writer.changed = True
    writer.write(a_job, ())
    writer.close()
    after = LogWriter(CoordinatorLog(tmp_path / "state"), lines.append)
    found = after.last_step_record()
    assert (found.factors, found.answers) == (record.factors, record.answers)
    assert {key: vars(each) for key, each in found.assigners.items()} == {("train", 90): vars(assigner)}
    assert after.last_state().members.keys() == {"worker-0", "ps-0"}
    assert after.term == 2
    after.close()
    assert not lines


def test_a_log_that_cannot_be_written_is_given_up_with_words(tmp_path):
    folder = tmp_path / "state"
    a_job, lines = job([f"worker-{n}" for n in range(1000)])
    log = CoordinatorLog(folder)
    written = threading.Event()
    writer = LogWriter(log, lines.append, DiskThread(written.set))
    log._database.execute("PRAGMA max_page_count = 1")
    writer.changed = True
    writer.write(a_job, ())
    assert written.wait(60)
    writer.write(a_job, ())
    writer.close()
    assert lines == [
        "the coordinator's log cannot be written (database or disk is full): the job ends if its coordinator dies"
    ]
    assert not writer.lasting
    assert not folder.exists()
