"""Strangers at a listener: they keep nobody out, and it listens where it is told to."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import msgspec
import pytest
from encrypted import TOKEN, Door

from pslite.job.membership_plan import Member
from pslite.launch.coordinator_supervisor import LogLocation
from pslite.launch.launcher import _listen_as
from pslite.net.authentication import Identity, connect
from pslite.net.data_transport import open_listeners
from pslite.net.framing import split_address
from pslite.net.messages import MAX_CONTROL_BYTES, Promote

ME = Identity("worker", "worker-0", "i", TOKEN)


@pytest.mark.parametrize(
    "sources", [["127.0.0.1"], ["127.0.0.2"], ["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"]]
)
def test_strangers_that_say_nothing_keep_no_member_out(sources):
    with Door() as door, ExitStack() as stack:
        target = split_address(door.address)
        strangers = [
            stack.enter_context(socket.create_connection(target, timeout=60, source_address=(source, 0)))
            for _ in range(70)
            for source in sources
        ]
        for _ in range(3):
            sock, _ = connect(door.address, ME, "control", timeout=60)
            sock.close()
        assert strangers[0].recv(1) == b""  # the oldest has made room
        strangers[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[-1].recv(1)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.3", "localhost"])
def test_listeners_take_the_address_that_they_are_given(host):
    said: list[str] = []
    with _listen_as(host, LogLocation(), said.append) as listener:
        assert listener.getsockname()[0] in (host, "127.0.0.1")
    listeners, _ = open_listeners("127.0.0.3")
    assert listeners[0].getsockname()[0] == "127.0.0.3"
    for each in listeners:
        each.close()
    assert said == []


def test_a_name_that_is_not_this_hosts_is_told():
    said: list[str] = []
    with _listen_as("192.0.2.7", LogLocation(), said.append) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    assert "192.0.2.7 is no address of this host" in said[0]


def test_new_owners_of_very_many_blocks_fit_into_a_message():
    members = [
        Member(f"ps-{number}", "i" * 32, "h" * 60, 4_000_000, f"{'h' * 60}:50000", "pslite-" + "0" * 32, "m" * 40)
        for number in range(16)
    ]
    owners = {block: members[block % 16] for block in range(100_000)}
    message = Promote.by_block(3, ("ps-99",), owners)
    assert len(msgspec.msgpack.encode(message)) < MAX_CONTROL_BYTES / 10
    assert message.owners == owners
