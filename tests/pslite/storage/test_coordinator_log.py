"""A coordinator's log, the record that stands in it, and lines that outlive their connections."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pslite.coordinator import Coordinator, Settings
from pslite.coordinator.job_state import Record, Seated, decode, encode
from pslite.coordinator.log_writer import LogWriter
from pslite.errors import Fenced, ProtocolError, UsageError
from pslite.launch.mxnet_launcher import OpenMembership
from pslite.net.framing import Channel, Inbox
from pslite.net.messages import MAX_CONTROL_BYTES, Abort, Alive, Exit, FromCoordinator
from pslite.net.reliable_channel import ReliableChannel
from pslite.storage.coordinator_log import CoordinatorLog, read_state

#: attributes of a coordinator and its parts, and why nobody has to know them who follows it: the rest is in its record
FORGOTTEN = {
    "its own": {
        "job", "token", "director", "settings", "say", "encrypt", "selector", "doorway", "log", "term", "wake_out",
        "wake_in", "changed", "follows", "severed", "urgent", "cutting", "ticked", "faults", "lenient_until",
        "lenient", "back",
    },
    "connections": {"connections", "agents"},
    "said again": {"squares", "told", "usage"},
    "measured": {"loss", "speed", "said_epoch", "balance", "told_slow"},
}  # fmt: skip


def test_every_attribute_of_a_coordinator_is_written_down_or_need_not_be():
    coordinator = Coordinator(
        job="j", token=b"x" * 32, director=OpenMembership(0, 0), say=lambda _: None, host="127.0.0.1"
    )
    coordinator._close()
    ours, names = [coordinator], set()
    for one in ours:
        for name, value in vars(one).items():
            part = type(value).__module__.startswith("pslite.coordinator.") and not isinstance(value, Record | Settings)
            if part and not any(value is other for other in ours):
                ours.append(value)
            names |= {name.removeprefix("_")} if not part else set()
    assert names == {"record"}.union(*FORGOTTEN.values())


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state"


def test_a_log_gives_back_the_last_state_under_the_next_term(folder):
    with closing(CoordinatorLog(folder)) as log:
        assert (log.term, log.state, log.scales) == (1, None, b"")
        log.write(b'{"n":1}')
        log.write(b'{"n":2}')
        log.write_scales(b"long factors")
        log.write_scales(b"short")
    assert read_state(folder) == b'{"n":2}'
    with closing(CoordinatorLog(folder)) as log:
        assert (log.term, log.state, log.scales) == (2, b'{"n":2}', b"short")
    assert folder.stat().st_mode & 0o077 == 0


WRITER = """
import sys
from pathlib import Path
from pslite.storage.coordinator_log import CoordinatorLog
log, n = CoordinatorLog(Path(sys.argv[1])), 0
while True:
    n += 1
    log.write(b"%d:" % n + b"%d" % (n % 10) * 100_000)
    print(n, flush=True)
"""


@pytest.mark.parametrize("writes", [1, 7, 40])
def test_what_was_written_is_there_after_a_kill(folder, writes):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if int(line) == writes:
                process.kill()
                break
        last = max([writes, *map(int, process.stdout)])
    with closing(CoordinatorLog(folder)) as log:
        assert log.term == 2
        number, _, text = log.state.partition(b":")
        assert int(number) in (last, last + 1)  # it may have been killed before it could say so
        assert text == b"%d" % (int(number) % 10) * 100_000


def damage(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("spoil", [damage, lambda path: path.write_bytes(b"nonsense" * 1000)])
def test_a_damaged_log_is_refused(folder, spoil):
    with closing(CoordinatorLog(folder)) as log:
        log.write(b'{"x":"%s"}' % (b"x" * 100_000))
    spoil(folder / "log.sqlite")
    for use in (CoordinatorLog, read_state):
        with pytest.raises(UsageError, match=r"cannot be used \(.+\): repair or remove the folder"):
            use(folder)


def test_a_log_of_an_earlier_version_is_refused(folder):
    folder.mkdir()
    (folder / "log").write_text('{"term":1,"state":{}}\n')
    with pytest.raises(UsageError, match=r"of an earlier version.*start the script again, from its checkpoint"):
        read_state(folder)


def test_a_log_does_not_grow(folder):
    with closing(CoordinatorLog(folder)) as log:
        for n in range(100):
            log.write(b'{"n":%d,"x":"%s"}' % (n, b"%d" % (n % 10) * 100_000))
        assert sum(path.stat().st_size for path in folder.iterdir()) < 6 << 20
    assert read_state(folder)[:8] == b'{"n":99,'


def test_a_second_coordinator_on_a_log_is_refused(folder):
    refusal = f"in use by process {os.getpid()}: there is one"
    with closing(CoordinatorLog(folder)), pytest.raises(UsageError, match=refusal):
        CoordinatorLog(folder)
    with closing(CoordinatorLog(folder)):
        pass


def test_who_was_followed_without_knowing_it_writes_nothing_more(folder):
    with closing(CoordinatorLog(folder)) as old:
        old.write(b'{"n":1}')
        old.check()
        (folder / "lock").unlink()  # as on a file system without locks
        with closing(CoordinatorLog(folder)) as new:
            assert new.term == 2
            with pytest.raises(Fenced, match="another coordinator has taken over"):
                old.check()
            for write in (old.write, old.write_scales):
                with pytest.raises(Fenced):
                    write(b'{"n":"old"}')
            new.write(b'{"n":2}')
            with pytest.raises(Fenced):
                old.write(b'{"n":"old"}')
            assert (new.state, new.scales) == (b'{"n":1}', b"")
    assert read_state(folder) == b'{"n":2}'


def test_a_log_that_cannot_be_written_is_given_up_with_words(folder):
    log, lines = CoordinatorLog(folder), []
    writer = LogWriter(log, lines.append)
    log._database.execute("PRAGMA max_page_count = 1")
    writer.write_scales(b"x" * 100_000)
    assert lines == [
        "the coordinator's log cannot be written (database or disk is full): the job ends if its coordinator dies"
    ]
    assert not writer.lasting
    assert not folder.exists()


def test_a_log_of_a_job_that_is_over_is_gone(folder):
    log = CoordinatorLog(folder)
    log.write(b"{}")
    log.remove()
    assert not folder.exists()
    assert read_state(folder) is None


def test_messages_to_several_stand_in_a_record_once():
    abort = Abort(plan=7, reason="because")
    members = {
        task: Seated(
            task=task, role="worker", incarnation="i", host="h", pid=1, address="", local="", machine="",
            channel=ReliableChannel(3, 4, [abort, Exit(reason=task)]), lost=5.0,
        )
        for task in ("a", "b", "c")
    }  # fmt: skip
    record = Record(
        clock=0.0, incarnation="i", address="h:1", members=members, exits={}, reply=None, spec=None, plan=None,
        pending=None, plan_number=0, reports=[], state="running", reason=None, result=None, digests={3: b"\xff"},
        digest_asked=False, version=0, began=0.0, said_waiting=0.0, suspensions=[], given_up=0, retry_at=0.0,
        target_changed=0.0, once_wanted=frozenset(), held_back=set(), doubted=set(), dead={}, substitutes={1: {2: "a"}},
        taking_over=None, take_overs=0, succession=None, successions=0, lost_servers={}, heirs={},
        rollbacks=[7], lost_with="", returning={"b": "ps"}, snapshot=-1, saves={}, broken=None, breaks=[],
        complete=False, final=False,
    )  # fmt: skip
    data = encode(record)
    assert data.count(b"because") == 1
    assert b"\n" not in data
    found = decode(data)
    assert [list(m.channel.unconfirmed) for m in found.members.values()] == [
        [abort, Exit(reason=task)] for task in ("a", "b", "c")
    ]
    assert (found.members["a"].channel.taken, found.members["a"].channel.confirmed) == (3, 4)
    assert (found.digests, found.substitutes) == ({3: b"\xff"}, {1: {2: "a"}})
    # it has a lease to come back
    assert found.members["a"].lost == 0.0
    assert found.members["a"].heard == found.clock > 0


class Ends:
    """Two lines, and connections between them that may be lost at any time."""

    def __init__(self):
        self.lines = [ReliableChannel(), ReliableChannel()]
        self.taken = [[], []]
        self.channels = []
        self.connect()

    def connect(self):
        self.cut()
        self.channels = [
            Channel(sock, Inbox(FromCoordinator, MAX_CONTROL_BYTES)) for sock in socket.socketpair(socket.AF_UNIX)
        ]
        counts = [line.taken for line in self.lines]
        for line, channel, other in zip(self.lines, self.channels, reversed(counts), strict=True):
            line.attach(channel, other)
            line.release()

    def cut(self):
        for line, channel in zip(self.lines, self.channels, strict=False):
            line.detach()
            channel.close()

    def read(self, side):
        """Take what has come; confirm it, or not."""
        messages, _ = self.channels[side].receive()
        for message in messages:
            if self.lines[side].take(message):
                self.taken[side].append(message.reason)


@given(steps=st.lists(st.tuples(st.sampled_from(["send", "chat", "read", "confirm", "cut"]), st.booleans())))
def test_each_counted_message_is_taken_once_in_order_whatever_becomes_of_connections(steps):
    ends = Ends()
    sent = [[], []]
    for what, side in steps:
        line = ends.lines[side]
        if what == "send":
            sent[side].append(str(len(sent[side])))
            line.send(Exit(reason=sent[side][-1]))
            line.release()
        elif what == "chat":
            line.send(Alive())
            line.release()
        elif what == "read":
            ends.read(side)
        elif what == "confirm":
            ends.lines[1 - side].confirm(line.taken)
        else:
            ends.connect()
    ends.connect()
    for side in (0, 1):
        ends.read(side)
    assert ends.taken == [sent[1], sent[0]]
    ends.cut()


@pytest.mark.parametrize("count", [-1, 1, 4])
def test_what_was_not_sent_cannot_be_confirmed(count):
    line = ReliableChannel(confirmed=2, unconfirmed=[Exit(reason="x")])
    with pytest.raises(ProtocolError, match=f"{count} messages are said to be taken, of 2 confirmed and 3 sent"):
        line.confirm(count)
