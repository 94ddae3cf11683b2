"""Strangers at a listener: they keep nobody out, and it listens where it is told to."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from contextlib import ExitStack

import msgspec
import pytest
from encrypted import TOKEN, Door, sealed_hello
from hypothesis import given, settings
from hypothesis import strategies as st

from pslite.job.membership_plan import Member
from pslite.launch.coordinator_process.coordinator_launcher import _listen_as
from pslite.launch.coordinator_process.coordinator_supervisor import LogLocation
from pslite.net.authentication import Identity, connect
from pslite.net.message_framing import frame
from pslite.net.messages import MAX_CONTROL_BYTES, PROTOCOL, Accepted, Hello, Promote, Proof
from pslite.net.tcp_or_unix_socket import open_listeners
from pslite.net.tcp_sockets import split_address

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


def test_a_name_that_other_nodes_resolve_otherwise_is_told(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 0))])
    with _listen_as("head", LogLocation(), said.append) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    assert "head resolves to 127.0.1.1 here, which other nodes cannot reach" in said[0]


def test_new_owners_of_very_many_blocks_fit_into_a_message():
    members = [
        Member(f"ps-{number}", "i" * 32, "h" * 60, 4_000_000, f"{'h' * 60}:50000", "pslite-" + "0" * 32, "m" * 40)
        for number in range(16)
    ]
    owners = {block: members[block % 16] for block in range(100_000)}
    message = Promote.by_block(3, ("ps-99",), owners)
    assert len(msgspec.msgpack.encode(message)) < MAX_CONTROL_BYTES / 10
    assert message.owners == owners


#: Handshake messages of every kind, with what a stranger can put into them.
_words = st.text(max_size=40) | st.sampled_from(["worker-0", "coordinator", "ps-0"])
_SAYINGS = st.one_of(
    st.binary(max_size=200),
    st.just(sealed_hello()),
    st.builds(lambda head, body: struct.pack("<I", head) + body, st.integers(0, 2**32 - 1), st.binary(max_size=100)),
    st.builds(
        lambda **said: frame(Hello(**said)), protocol=st.sampled_from([PROTOCOL, 0, 2**40]), task=_words,
        channel=st.sampled_from(["control", "agent", "data"]), role=st.sampled_from(["worker", "ps"]),
        incarnation=_words, nonce=st.binary(min_size=32, max_size=32) | st.binary(max_size=40),
        encrypt=st.sampled_from(["", "none", "control", "all"]),
    ),
    st.builds(lambda mac: frame(Proof(mac=mac)), st.binary(max_size=64)),
    st.builds(lambda mac: frame(Accepted(mac=mac)), st.binary(max_size=64)),
)  # fmt: skip


@pytest.mark.parametrize("encrypt", ["none", "control", "all"])
def test_whatever_strangers_say_only_members_are_let_in(encrypt):
    """At a listener that lives on through all of it, in clear and over TLS."""
    with Door(encrypt) as door:

        @settings(max_examples=60, deadline=None)
        @given(said=st.lists(_SAYINGS, max_size=4), sealed=st.booleans(), ends=st.booleans())
        def attack(said: list[bytes], sealed: bool, ends: bool) -> None:
            with door.knock() as sock, contextlib.suppress(OSError):
                if sealed:  # and what follows is no handshake
                    sock.sendall(sealed_hello())
                for each in said:
                    sock.sendall(each)
                if ends:
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65536):
                        pass

        attack()
        assert door.welcome == []
        sock, _ = connect(door.address, Identity("worker", "worker-0", "i", TOKEN, encrypt), "control", timeout=60)
        sock.close()
        door.wait(lambda: len(door.welcome) == 1)


def test_a_flood_of_connections_keeps_no_member_out():
    with Door() as door:
        over = threading.Event()

        def flood() -> None:
            while not over.is_set():
                with contextlib.suppress(OSError), door.knock() as sock:
                    sock.sendall(b"\x16")

        threads = [threading.Thread(target=flood) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                sock, _ = connect(door.address, ME, "control", timeout=60)
                sock.close()
        finally:
            over.set()
            for thread in threads:
                thread.join()
        door.wait(lambda: len(door.welcome) == 10)
