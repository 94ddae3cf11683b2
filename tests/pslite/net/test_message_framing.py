"""Bytes from strangers: handshake, control messages and data frames refuse what they must and never grow."""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))
from encrypted import sealed_pair

from pslite.errors import AuthenticationError, ConnectError, PeerLost, ProtocolError
from pslite.net.authentication import Acceptor, Identity, connect, parse_token
from pslite.net.handshake_listener import HandshakeListener
from pslite.net.message_framing import Inbox, frame
from pslite.net.messages import MAX_HANDSHAKE_BYTES, PROTOCOL, Accepted, Beat, FromMember, Hello, Proof
from pslite.net.tcp_sockets import listen, split_address
from pslite.net.tensor_frames import HEADER_BYTES, PARAM, PUSH, STATE, Header, Link, unpack

TOKEN = b"t" * 32


def acceptor(**changes):
    return Acceptor(**{"job": "j", "task": "coordinator", "incarnation": "i", "token": TOKEN, **changes})


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_random_bytes_never_pass_the_handshake_nor_pile_up(chunks):
    side = acceptor()
    try:
        for chunk in chunks:
            side.feed(chunk)
            assert len(side._inbox._data) <= MAX_HANDSHAKE_BYTES + 4
    except ProtocolError:
        pass
    assert not side.accepted


@given(st.binary(max_size=400))
def test_random_control_messages_are_protocol_errors(body):
    inbox = Inbox(FromMember, 1000)
    try:
        found = inbox.feed(struct.pack("<I", len(body)) + body)
    except ProtocolError:
        return
    assert all(isinstance(message, FromMember) for message in found)


def test_a_length_beyond_the_limit_is_refused_before_anything_comes():
    with pytest.raises(ProtocolError, match="announces 4294967295 bytes, but at most 100 are allowed"):
        Inbox(FromMember, 100).feed(b"\xff\xff\xff\xff")


def test_messages_survive_any_cut():
    data = frame(Beat(version=3)) + frame(Beat(version=4, loss=0.5, samples=2))
    for at in range(len(data)):
        inbox = Inbox(FromMember, 1000)
        assert inbox.feed(data[:at]) + inbox.feed(data[at:]) == [
            Beat(version=3),
            Beat(version=4, loss=0.5, samples=2),
        ]


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_headers_are_protocol_errors(data):
    with pytest.raises(ProtocolError):
        unpack(bytearray(data))


def test_a_proof_without_a_hello_and_a_second_hello():
    with pytest.raises(ProtocolError, match="Proof is not the next message"):
        acceptor().feed(frame(Proof(mac=b"")))
    hello = Hello(protocol=PROTOCOL, channel="data", role="ps", task="t", incarnation="x", nonce=b"n" * 32)
    side = acceptor()
    side.feed(frame(hello))
    with pytest.raises(ProtocolError, match="Hello is not the next message"):
        side.feed(frame(hello))


def test_another_protocol_is_told_so():
    side = acceptor()
    side.feed(frame(Hello(protocol=99, channel="data", role="ps", task="t", incarnation="x", nonce=b"n" * 32)))
    assert "protocol 99" in side.refusal


class Listening:
    """Accepts one connection at a time in a thread of its own, with a given token."""

    def __init__(self, **changes):
        self.socket = listen("127.0.0.1")
        self.socket.setblocking(True)
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.side = acceptor(**changes)
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self):
        sock, _ = self.socket.accept()
        with sock:
            while not self.side.accepted and not self.side.refusal:
                data = sock.recv(self.side.wanted)
                if not data:
                    return
                sock.sendall(self.side.feed(data))

    def close(self):
        self.thread.join(60)
        self.socket.close()


@pytest.mark.parametrize(
    ("changes", "expected", "error"),
    [
        ({}, "", None),
        ({}, "another", "is incarnation i of .*, not another"),
        ({"token": b"u" * 32}, "", "wrong token"),
        ({"verdict": lambda hello: f"no {hello.task} here"}, "", "no ps-0 here"),
    ],
)
def test_both_sides_must_know_the_token(changes, expected, error):
    there = Listening(**changes)
    try:
        me = Identity("ps", "ps-0", "x", TOKEN)
        if error is None:
            sock, challenge = connect(there.address, me, "data", timeout=60)
            sock.close()
            assert challenge.task == "coordinator"
        else:
            with pytest.raises(AuthenticationError, match=error):
                connect(there.address, me, "data", timeout=60, incarnation=expected)
    finally:
        there.close()
    # who is not whom we look for has not taken us in: it may have another connection of ours
    assert there.side.accepted == (error is None)


def test_an_impostor_that_accepts_without_knowing_the_token_is_found_out():
    there = Listening()
    there.side._judge = lambda hello, proof: _forged(there.side)
    try:
        with pytest.raises(AuthenticationError, match="could not prove"):
            connect(there.address, Identity("ps", "ps-0", "x", TOKEN), "data", timeout=60)
    finally:
        there.close()


def _forged(side):
    side.accepted = True
    return frame(Accepted(mac=secrets.token_bytes(32)))


def test_nobody_there():
    with listen("127.0.0.1") as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    with pytest.raises(ConnectError, match="cannot connect"):
        connect(address, Identity("ps", "ps-0", "x", TOKEN), "data", timeout=0.3)


def test_a_token_is_in_no_representation():
    assert TOKEN.decode() not in repr(Identity("ps", "ps-0", "x", TOKEN))
    for text in ("", "zz", "00" * 31):
        with pytest.raises(AuthenticationError, match="32 bytes"):
            parse_token(text)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:70000", "host:x"])
def test_addresses(text):
    with pytest.raises(ValueError, match="not an address"):
        split_address(text)


class Sink:
    def __init__(self, sizes):
        self.memory = {n: bytearray(size) for n, size in sizes.items()}
        self.frames = []

    def payload(self, link, header):
        return memoryview(self.memory[header.block])

    def arrived(self, link, header):
        self.frames.append(header)


@pytest.mark.parametrize("pair", [socket.socketpair, sealed_pair], ids=["plain", "encrypted"])
@pytest.mark.parametrize("sizes", [[3 << 20] * 2, [64] * 3000, [0, 5, 16384, 0, 16320, 70000, 1] * 40])
def test_frames_both_ways_at_once(sizes, pair):
    """Both sides have more to send than the sockets hold, and neither waits; what does not go is given again."""
    links = [Link(sock, task, "", "ps") for sock, task in zip(pair(), "ab", strict=True)]
    sinks = [Sink(dict(enumerate(sizes))) for _ in links]
    data = secrets.token_bytes(max(sizes))
    for at, size in enumerate(sizes):
        for link, sink in zip(links, sinks, strict=True):
            link.send(Header(PUSH, 1, at, 1, size, 5, 0), memoryview(data)[:size])
            link.flush()
            if at % 3 == 2:
                link.receive(sink)
    while any(len(sink.frames) < len(sizes) for sink in sinks):
        for link, sink in zip(links, sinks, strict=True):
            link.flush()
            link.receive(sink)
    assert all(sink.memory[at] == data[:size] for sink in sinks for at, size in enumerate(sizes))
    links[0].close()
    with pytest.raises(PeerLost, match="closed its connection"):
        links[1].receive(sinks[1])
    links[1].close()


def connected(family):
    if family == "unix":
        return socket.socketpair()
    with listen("127.0.0.1") as there:
        here = socket.create_connection(there.getsockname())
        there.setblocking(True)
        other, _ = there.accept()
        return here, other


SIZES = (0, 5000, 1 << 16, 3_000_001, 1 << 21)


@pytest.mark.parametrize("family", ["tcp", "unix"])
@settings(max_examples=15)
@given(blocks=st.lists(st.sampled_from(range(len(SIZES))), max_size=8))
def test_payloads_of_any_size_arrive_in_their_place(family, blocks):
    a, b = connected(family)
    here, there = Link(a, "b", "", "ps"), Link(b, "a", "", "ps")
    data = [secrets.token_bytes(size) for size in SIZES]
    sink = Sink(dict(enumerate(SIZES)))
    for block in blocks:
        here.send(Header(PUSH, 1, block, 1, SIZES[block], 5, 0), memoryview(data[block]))
    while len(sink.frames) < len(blocks):
        assert here.flush() != here.unsent
        there.receive(sink)
    for link in (here, there):
        link.close()
    assert [header.block for header in sink.frames] == blocks
    assert all(bytes(sink.memory[block]) == data[block] for block in blocks)


def test_a_header_on_the_wire():
    """Its bytes, which members of other versions read, and what its two shared fields are read as."""
    header = Header(PARAM, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert header.pack().hex(" ", 4) == (
        "504c5331 02000a00 01000000 02000000 03000000 04000000 09000000 07000000 "
        "05000000 00000000 06000000 00000000 08000000 00000000"
    )
    assert unpack(bytearray(header.pack())) == header
    assert header.node == header.factor_count == header.page_offset == 3
    assert header.uncounted_steps == header.gradients_applied == 3
    assert (header.crc, header.first_worker_had_gradient, header.region) == (9, True, 10)
    there = header.in_shared_memory(11, 12)
    assert (there.region, there.page_offset, there.length) == (11, 12, 4)
    state = Header.with_checksum(STATE, memoryview(b"12345"), plan=1, block=2, version=3, first=4, steps=6)
    assert state == Header(STATE, 1, 2, 6, 5, 3, 4, crc_or_flag=zlib.crc32(b"12345"))


@pytest.mark.parametrize("length", [0, 7, 9, 2**32 - 1])
def test_a_frame_of_the_wrong_length_is_refused_at_its_header(length):
    a, b = socket.socketpair()
    with b:
        link = Link(a, "ps-0", "", "ps")
        b.sendall(Header(PARAM, 1, 0, 0, length, 0, 0).pack())
        with pytest.raises(ProtocolError, match=f"announced {length} bytes, but the frame must have 8"):
            link.receive(Sink({0: 8}))
        link.close()


def test_servers_and_coordinators_do_not_import_torch_nor_dl2_run_beside_a_task_what_it_does_not_need():
    code = (
        "import sys; from pslite import run; assert not {'numpy', 'pslite.coordinator'} & set(sys.modules); "
        "import pslite.launch.server_process; "
        "from pslite.launch.coordinator_process import coordinator_launcher; assert 'torch' not in sys.modules; "
        "assert 'pickle' not in vars(run)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_connection_ends_whose_peer_takes_nothing(monkeypatch):
    """Such as one that is stopped, or whose packets are dropped on their way; on both sides of a connection."""
    monkeypatch.setattr("pslite.net.tcp_sockets._SILENCE", 1)
    acceptor = Acceptor(job="j", task="ps-0", incarnation="i", token=b"t" * 32)
    welcomed = []
    with selectors.DefaultSelector() as selector:
        listener = listen("127.0.0.1")
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        door = HandshakeListener(
            selector, listener, acceptor=lambda: acceptor, welcome=lambda sock, _: welcomed.append(sock), say=print
        )
        identity = Identity("worker", "worker-0", "i", b"t" * 32, "none")
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(connect, address, identity, "data", timeout=60)
            while not welcomed:
                for key, _ in selector.select(1.0):
                    key.data()
            ours, _ = connecting.result()
        door.close()
    with ours, welcomed[0] as theirs:
        options = (socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert [[sock.getsockopt(*option) for option in options] for sock in (ours, theirs)] == [[1, 1000]] * 2
        ours.setblocking(True)
        with pytest.raises(TimeoutError):
            ours.sendall(bytes(64 << 20))
