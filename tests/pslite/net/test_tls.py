"""Encryption: jobs over TLS have the same bits, nobody without the token gets in or hears anything."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from encrypted import TOKEN, Door, Listener, listening, sealed_hello, sealed_pair, tcp_pair
from pslite_jobs import command, run_job, static_digest
from rehearsal import Event, Rehearsal, job
from rehearsal import static_digest as rehearsed_digest
from sudden_death import cut_off

from pslite.errors import AuthenticationError, UsageError
from pslite.launch.environment_parsing import encryption_of
from pslite.net.authentication import Identity, connect
from pslite.net.message_framing import Channel, Inbox, frame, receive_one
from pslite.net.messages import Accepted, Beat, Challenge, FromMember, Handshake
from pslite.net.tensor_frames import PUSH, Header, Link
from pslite.net.tls import VARIABLE, contexts

ENCRYPTED = {**os.environ, "DL2_TRANSPORT": "tcp", VARIABLE: "all"}
ME = Identity("worker", "worker-7", "x", TOKEN)


def identity(encrypt="", token=TOKEN):
    return Identity("worker", "worker-7", "x", token, encrypt)


# --- jobs ---------------------------------------------------------------------------------------------------------


def test_an_encrypted_job_of_processes_has_the_same_bits(tmp_path):
    command_line = [sys.executable, "-m", "pslite.run", "--workers", "2", "--servers", "2", "--encrypt", "all", "--"]
    environ = {**os.environ, "DL2_TRANSPORT": "tcp"}
    done = subprocess.run(
        [*command_line, *command()], env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"digest {static_digest()}" in done.stderr


def test_resizes_and_deaths_of_an_encrypted_job(monkeypatch):
    monkeypatch.setenv("DL2_TRANSPORT", "tcp")
    spec = job(durability="durable")
    events = [Event(10, kill="worker", choice=1), Event(20, workers=3, servers=3), Event(40, kill="ps", choice=1)]
    outcome = Rehearsal(spec, workers=2, servers=3, events=events, encrypt="all").run()
    assert [task.split("-")[0] for task in outcome.killed] == ["worker", "ps"]
    assert outcome.status.state == "finished", outcome.log
    assert outcome.status.result.digest == rehearsed_digest(spec)
    assert not outcome.surprises, outcome.surprises


def test_an_all_reduce_job_whose_gradients_cannot_be_encrypted_is_refused():
    pytest.importorskip("torch")
    result = run_job(command(), workers=1, servers=0, environ=ENCRYPTED, state="failed")
    assert any("DL2_ENCRYPT is all, which is not possible in an all-reduce job" in line for line in result.log)


@pytest.mark.parametrize(
    ("encrypt", "weights", "names"),
    [("none", True, True), ("control", True, True), ("all", False, False), ("", False, False)],
)
def test_who_listens_hears_neither_weights_nor_names(monkeypatch, encrypt, weights, names):
    monkeypatch.setenv("DL2_TRANSPORT", "tcp")
    spec = job(epochs=2)
    events = [Event(4, workers=3, servers=1)]
    with listening() as listener:
        rehearsal = Rehearsal(spec, workers=2, servers=2, events=events, encrypt=encrypt, step_seconds=0.005)
        outcome = rehearsal.run()
        listener.wait()
    assert outcome.status.state == "finished", outcome.log
    assert outcome.status.result.digest == rehearsed_digest(spec)
    assert not outcome.surprises
    heard = listener.everything()
    assert len(heard) > 50_000
    assert rehearsal.token not in heard
    assert rehearsal.token.hex().encode() not in heard
    first = np.linspace(-0.1, 0.1, spec.segments[0].size, dtype=np.float32)
    assert (first[:6].tobytes() in heard) == weights  # as many as there are in a block
    assert (b"worker-0" in heard) == names
    # names of messages to and from the coordinator
    assert (b"Beat" in heard) == (encrypt == "none")


# --- who gets in --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypt", ["none", "control", "all"])
@pytest.mark.parametrize("wish", ["told", "given"])
def test_members_are_told_what_is_encrypted(encrypt, wish):
    with Door(encrypt) as door:
        # who does not know begins with TLS
        me = identity(encrypt if wish == "given" or encrypt == "none" else "")
        sock, challenge = connect(door.address, me, "control", timeout=60)
        with sock:
            assert challenge.encrypt == encrypt
            assert isinstance(sock, ssl.SSLSocket) == (encrypt != "none")
            door.wait(lambda: door.welcome)
    assert not door.lines


@pytest.mark.parametrize(
    ("here", "there", "theirs", "ours"),
    [
        ("none", "", "ended the connection: no TLS handshake .* DL2_ENCRYPT the same in all", "it uses TLS"),
        ("none", "all", "ended the connection: no TLS handshake .* DL2_ENCRYPT the same", "it uses TLS"),
        ("control", "none", "refused by .*: connections are encrypted here; DL2_ENCRYPT must", "encrypted here"),
        ("control", "all", "refused by .*: DL2_ENCRYPT is control here, all there", "control here, all there"),
        ("all", "control", "refused by .*: DL2_ENCRYPT is all here, control there", "all here, control there"),
    ],
)  # fmt: skip
def test_tasks_that_disagree_are_told_so_on_both_sides(here, there, theirs, ours):
    with Door(here) as door:
        with pytest.raises(AuthenticationError, match=theirs):
            connect(door.address, identity(there), "control", timeout=60)
        door.wait(lambda: any(ours in line for line in door.lines))
        assert not door.welcome


def test_a_wrong_token_is_refused_on_both_sides():
    with Door() as door:
        with pytest.raises(AuthenticationError, match=r"wrong token .*; is DL2_TOKEN the one of this job\?"):
            connect(door.address, identity(token=b"u" * 32), "control", timeout=60)
        door.wait(lambda: any("refused a connection from 127.0.0.1:" in line for line in door.lines))
        assert "wrong token" in door.lines[-1]
        assert not door.welcome


def anybody(token=None):
    """A client that does not care whom it reaches, with the certificate of another job or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if token is None else contexts(token).client
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def talk_to_the_end(sock):
    """Say something to who will not have it; return what it answers."""
    answer = b""
    with contextlib.suppress(OSError):
        sock.sendall(b"x" * 100)
        while data := sock.recv(65536):
            answer += data
    return answer


@pytest.mark.parametrize("token", [None, secrets.token_bytes(32)], ids=["none", "of another job"])
def test_a_stranger_with_the_wrong_certificate_is_cut_off(token):
    with Door() as door:
        # it hears that only afterwards: a client's handshake is over before the server has seen its certificate
        with anybody(token).wrap_socket(door.knock()) as sock:
            assert talk_to_the_end(sock) == b""
        door.wait(lambda: any("refused a connection from 127.0.0.1:" in line for line in door.lines))
        assert "wrong token" in door.lines[-1]
        assert not door.welcome


def test_older_versions_of_tls_are_not_spoken():
    context = anybody()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with Door() as door:
        with pytest.raises(ssl.SSLError, match=r"(?i)version"), door.knock() as sock:
            context.wrap_socket(sock)
        door.wait(lambda: any("no TLS handshake" in line for line in door.lines))


@pytest.mark.parametrize("token", [b"u" * 32, None], ids=["of another job", "plain"])
def test_an_impostor_is_found_out(token):
    """It is told nothing but that we want to speak TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard = []

        def impersonate():
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                if token is None:
                    sock.sendall(frame(Challenge(job="j", task="coordinator", incarnation="i", nonce=b"n" * 32)))
                    while data := sock.recv(65536):
                        heard.append(data)
                else:
                    contexts(token).server.wrap_socket(sock, server_side=True)

        thread = threading.Thread(target=impersonate)
        thread.start()
        address = "{}:{}".format(*listener.getsockname())
        with pytest.raises(AuthenticationError, match="wrong token" if token else "no TLS handshake"):
            connect(address, ME, "control", timeout=60)
        thread.join()
    assert b"worker-7" not in b"".join(heard)


def test_a_handshake_that_was_recorded_opens_nothing():
    with Door() as door, listening() as listener:
        sock, _ = connect(door.address, ME, "control", timeout=60)
        sock.sendall(frame(Beat(version=3)))
        door.wait(lambda: door.welcome)
        sock.close()
        door.welcome[0][0].close()
        listener.wait()
        ((said, _),) = listener.heard
        assert len(said) > 500
        with door.knock() as replay, contextlib.suppress(OSError):
            replay.sendall(said)
            replay.shutdown(socket.SHUT_WR)
            while replay.recv(65536):
                pass
        door.wait(lambda: any("refused a connection from" in line for line in door.lines))
        assert len(door.welcome) == 1


def test_a_handshake_cannot_be_passed_on_to_another_connection():
    """Not even by a member: it would be somebody else then."""
    with Door() as door, socket.create_server(("127.0.0.1", 0)) as listener:
        made = contexts(TOKEN)

        def pass_on():
            sock, _ = listener.accept()
            sock.settimeout(60)
            with (
                made.server.wrap_socket(sock, server_side=True) as victim,
                made.client.wrap_socket(door.knock()) as real,
            ):
                for source, target in ((victim, real), (real, victim), (victim, real), (real, victim)):
                    target.sendall(source.recv(65536))

        thread = threading.Thread(target=pass_on)
        thread.start()
        with pytest.raises(AuthenticationError, match="wrong token"):
            connect("{}:{}".format(*listener.getsockname()), ME, "control", timeout=60)
        thread.join()
        door.wait(lambda: any("claims to be worker-7: wrong token" in line for line in door.lines))
        assert not door.welcome


def test_a_listener_goes_on_while_strangers_say_half_of_something():
    """Those that begin a TLS handshake and leave it, one byte at a time or none, hold nobody up."""
    greeting = sealed_hello()
    with Door() as door, contextlib.ExitStack() as stack:
        for size in (0, 1, 2, 3, 5, 100, len(greeting) - 1, len(greeting)):
            sock = stack.enter_context(door.knock())
            sock.sendall(greeting[:size])
        for number in range(3):
            sock, _ = connect(door.address, ME, "control", timeout=60)
            sock.close()
            door.wait(lambda number=number: len(door.welcome) > number)
        assert not door.lines


# --- what goes over it --------------------------------------------------------------------------------------------


class Sink:
    def __init__(self, size):
        self.memory = bytearray(size)
        self.count = 0

    def payload(self, link, header):
        return memoryview(self.memory)[: header.length]

    def arrived(self, link, header):
        self.count += 1


def test_large_payloads_are_encrypted():
    ends = tcp_pair()
    listener = Listener()
    near, far = sealed_pair(TOKEN, (listener.tap(ends[0]), ends[1]))
    here, there = Link(near, "b", "", "ps"), Link(far, "a", "", "ps")
    size = 1 << 20
    data, sink = secrets.token_bytes(size), Sink(size)
    for at in range(4):
        here.send(Header(PUSH, 1, at, 1, size, 5, 0), memoryview(data))
    while sink.count < 4:
        here.flush()
        there.receive(sink)
    assert sink.memory == data
    here.close()
    there.close()
    listener.wait()
    heard = listener.everything()
    assert len(heard) > 4 * size
    assert data[1000:1100] not in heard


def test_nothing_stays_in_the_dark_when_a_peer_has_had_its_turn():
    """What TLS has deciphered is not to be waited for: no selector would tell."""
    near, far = sealed_pair()
    here, there = Link(near, "b", "", "ps"), Link(far, "a", "", "ps")
    size, count = 100_001, 400
    for at in range(count):
        here.send(Header(PUSH, 1, at, 1, size, 5, 0), memoryview(bytes(size)))
    thread = threading.Thread(target=lambda: [select.select([], [near], [], 20) for _ in iter(here.flush, True)])
    thread.start()
    sink = Sink(size)
    while sink.count < count:
        assert select.select([far], [], [], 60)[0], sink.count
        there.receive(sink)
    thread.join()
    here.close()
    there.close()


def test_two_threads_use_one_control_connection():
    """A worker's loop sends while its control thread receives."""
    near, far = sealed_pair()
    channels = [Channel(sock, Inbox(FromMember, 1000)) for sock in (near, far)]
    count, found = 3000, ([], [])

    def send(channel):
        for version in range(count):
            channel.send(Beat(version=version))
        while channel.unsent:
            select.select([], [channel.sock], [], 20)
            channel.flush()

    def receive(channel, found):
        while len(found) < count:
            assert select.select([channel.sock], [], [], 60)[0]
            messages, still_open = channel.receive()
            assert still_open
            found += [message.version for message in messages]

    threads = [threading.Thread(target=send, args=(channel,)) for channel in channels]
    threads += [threading.Thread(target=receive, args=pair) for pair in zip(channels, found, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == (list(range(count)), list(range(count)))
    for channel in channels:
        channel.close()


@pytest.mark.parametrize("end", ["cut off", "closed"])
def test_nothing_goes_in_clear_after_the_end(end):
    near, far = sealed_pair()
    if end == "closed":
        near.close()
    else:
        cut_off([near])
    for attempt in (
        lambda: near.send(b"secret"),
        lambda: near.sendall(b"secret"),
        lambda: near.sendmsg([memoryview(b"s")]),
    ):
        with pytest.raises(OSError):
            attempt()
    assert far.recv(10) == b""
    near.close()
    far.close()


def test_what_is_altered_on_the_way_is_found_out():
    near, far = sealed_pair()
    raw = socket.socket(fileno=os.dup(near.fileno()))
    near.sendall(b"whole")
    assert far.recv(10) == b"whole"
    raw.sendall(b"\x17\x03\x03\x00\x20" + secrets.token_bytes(32))
    with pytest.raises(OSError, match=r"(?i)mac"):
        far.recv(10)
    for sock in (raw, near, far):
        sock.close()


def test_one_message_is_taken_and_not_a_byte_more():
    near, far = sealed_pair()
    near.sendall(frame(Accepted(mac=b"m" * 32)) + b"rest")
    assert receive_one(far, Inbox(Handshake, 4096), time.monotonic() + 60) == Accepted(mac=b"m" * 32)
    assert far.recv(10) == b"rest"
    near.close()
    far.close()


# --- settings -----------------------------------------------------------------------------------------------------


def test_what_is_encrypted_is_one_of_three():
    assert [encryption_of({VARIABLE: text}) for text in ("", "none", "control", "all")] == [
        "",
        "none",
        "control",
        "all",
    ]
    assert encryption_of({}) == ""
    with pytest.raises(UsageError, match="DL2_ENCRYPT is 'yes': it must be none, control or all"):
        encryption_of({VARIABLE: "yes"})


def test_without_the_library_a_job_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UsageError, match="set DL2_ENCRYPT=none in all tasks"):
        contexts(secrets.token_bytes(32))


def test_the_key_is_left_nowhere():
    before = {fd.name for fd in Path("/proc/self/fd").iterdir()}
    contexts(secrets.token_bytes(32))
    assert {fd.name for fd in Path("/proc/self/fd").iterdir()} <= before
