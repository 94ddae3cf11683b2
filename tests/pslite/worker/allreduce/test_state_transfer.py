"""State on its way from one worker of an all-reduce job to another."""

from __future__ import annotations

import threading
import uuid
import zlib

import numpy as np
import pytest

from pslite.errors import ProtocolError
from pslite.job.membership_plan import Member
from pslite.net.authentication import Identity
from pslite.net.tcp_or_unix_socket import reach
from pslite.net.tensor_frames import STATE, Header, Link
from pslite.worker.allreduce.state_transfer import Giving, Taking

TOKEN = bytes(range(32))


def identity(task):
    return Identity("worker", task, uuid.uuid4().hex, TOKEN)


def states(value):
    return [np.full((2, 1000), value, dtype=np.float32), np.full((1, 3), value, dtype=np.float64)]


class Failed(Exception):
    pass


class Pair:
    """A worker that gets state, and the one that gives it."""

    def __init__(self, token=TOKEN):
        self.giver = Identity("worker", "worker-0", uuid.uuid4().hex, token)
        receiver = identity("worker-1")
        self.said = []
        self.taking = Taking(receiver, "job", "127.0.0.1", self.said.append)
        self.member = Member(
            task="worker-1", incarnation=receiver.incarnation, host="h", pid=1,
            address=f"127.0.0.1:{self.taking.port}", local=self.taking.local, machine=self.taking.machine,
        )  # fmt: skip
        self.from_ = Member(task="worker-0", incarnation=self.giver.incarnation, host="h", pid=2)
        self.found = states(0)
        self.woken = threading.Event()

    def take(self, plan=3, check=lambda: None):
        try:
            return self.taking.take(self.from_, plan, self.found, check)
        finally:
            self.taking.close()

    def give(self, plan, version, value):
        return Giving(self.member, self.giver, plan, version, states(value), self.woken.set)

    def send(self, plan, crc):
        """Send a first block by hand, beside the test's thread."""

        def run():
            link = Link(reach(self.member, self.giver), "worker-1", self.member.incarnation, "worker")
            whole = states(1)[0].reshape(-1).data.cast("B")
            link.send(Header(STATE, plan, 0, 0, whole.nbytes, 7, 7, crc_or_flag=crc(whole)), whole)
            link.flush()
            self.sent.set()
            self.done.wait(60)
            link.close()

        self.sent, self.done = threading.Event(), threading.Event()
        thread = threading.Thread(target=run)
        thread.start()
        return thread


def test_all_of_it_arrives_with_its_version():
    pair = Pair()
    giving = pair.give(3, 41, 5.0)
    assert pair.take() == 41
    assert all(np.array_equal(a, b) for a, b in zip(pair.found, states(5.0), strict=True))
    while not giving.spares(1):  # it is woken for every block
        assert pair.woken.wait(60)
        pair.woken.clear()
    assert not giving.failure


def test_a_damaged_block_is_refused():
    pair = Pair()
    thread = pair.send(3, lambda whole: zlib.crc32(whole) ^ 1)
    with pytest.raises(ProtocolError, match="the state of block 0 was damaged on its way from worker-0"):
        pair.take()
    pair.done.set()
    thread.join()


def test_what_is_left_of_a_plan_that_was_given_up_is_passed_over():
    pair = Pair()
    thread = pair.send(2, zlib.crc32)
    giving = []

    def check():  # what is wanted comes after it
        if pair.sent.is_set() and not giving:
            giving.append(pair.give(3, 9, 4.0))

    assert pair.take(check=check) == 9
    assert all(np.array_equal(a, b) for a, b in zip(pair.found, states(4.0), strict=True))
    pair.done.set()
    thread.join()


def test_who_does_not_know_the_token_gives_nothing():
    pair = Pair(token=bytes(32))
    giving = pair.give(3, 41, 5.0)

    def check():
        if giving.done:
            raise Failed

    with pytest.raises(Failed):
        pair.take(check=check)
    assert "wrong token" in giving.failure
    assert all(np.array_equal(a, b) for a, b in zip(pair.found, states(0), strict=True))


def test_who_stops_giving_may_change_its_state_at_once():
    pair = Pair()
    giving = pair.give(3, 41, 5.0)
    giving.stop()
    assert giving.spares(0)
    pair.taking.close()
