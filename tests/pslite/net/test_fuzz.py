"""Bytes, messages and frames by somebody who means no good, without the token and with it: no process ends, little is
allocated, and the job has the bits that it would have had.

At the ports of coordinator, servers and workers, in clear and over TLS.  tracemalloc sees what Python allocates, the
resident size of the process what OpenSSL does besides.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Self, get_args

import msgspec
import numpy as np
import psutil
import pytest
from encrypted import sealed_hello
from regression import Regression, segments
from rehearsal import Event, Rehearsal, job, static_digest
from variants import first, nightly

from pslite.errors import AuthenticationError, PsliteError
from pslite.job.job_spec import LAMB
from pslite.job.membership_plan import Member
from pslite.net.authentication import Identity, connect
from pslite.net.message_framing import Channel
from pslite.net.message_framing import frame as message_frame
from pslite.net.messages import PROTOCOL, FromMember, Hello, Join
from pslite.net.tensor_frames import RESEND, Header, Link
from pslite.worker.allreduce.state_transfer import Giving, Taking
from pslite.worker.elastic_job_base import Session

#: of everything in this process; what is announced has up to 4 GiB
MOST_BYTES = 32 << 20


def frame(rng: random.Random, blocks: int, version: int) -> bytes:
    """A header that is mostly plausible, and some bytes after it."""
    length = rng.choice((0, 24, 48, 64, 72, rng.randrange(2**16), rng.randrange(2**32)))
    header = Header(
        rng.randint(0, RESEND + 1),
        rng.choice((0, 1, 2, rng.randrange(2**32))),
        rng.choice((rng.randrange(blocks), rng.randrange(2**32))),
        rng.choice((rng.randrange(20), rng.randrange(2**32))),
        length,
        rng.choice((version, version + 1, rng.randrange(-(2**63), 2**63))),
        rng.choice((0, version, rng.randrange(-(2**63), 2**63))),
        rng.choice((0, 0, 0, 2, rng.randrange(2**32))),
        rng.choice((0, version + 1, rng.randrange(-(2**63), 2**63))),
        rng.randrange(2**32),
        rng.choice((0, 0, 1, 2, 3, rng.randrange(2**16))),
    )
    return header.pack() + rng.randbytes(min(length, 4096))


#: types of a message's fields, by a word in them, and what is put there
_VALUES: dict[str, tuple[object, ...]] = {
    "int": (-1, 0, 1, 2, 3, 7, 2**31, 2**62, 2**64 - 1, -(2**63)),
    "float": (0.0, -1.0, 1e308, float("inf"), float("nan"), 3),
    "str": ("", "worker-0", "ps-0", "worker-99", "coordinator", "x" * 5000, "\x00", "127.0.0.1:1"),
    "bytes": (b"", b"x" * 32, b"x" * 100_000),
    "bool": (True, False),
    "dict": ({}, {0: 1}, {2**40: -1}, {0: b"x" * 32}, {1: [1.0, 2.0]}, {"a": 1}),
    "list": ([], [1.0], [float("nan")] * 1000),
    "tuple": ([], [0, 1, 2], [2**40]),
    "None": (None,),
}


def message(rng: random.Random) -> bytes:
    """A message to the coordinator, mostly well-formed, of whatever type and with whatever in it; or one damaged."""
    kind = rng.choice(get_args(FromMember))
    fields: dict[str, object] = {"type": kind.__name__}
    for name, annotation in kind.__annotations__.items():
        fitting = [value for word, values in _VALUES.items() if word in str(annotation) for value in values]
        if rng.random() < 0.9:
            fields[name] = rng.choice(fitting or [{}])
    body = bytearray(msgspec.msgpack.encode(fields))
    if rng.random() < 0.2:
        body[rng.randrange(len(body))] = rng.randrange(256)
    if rng.random() < 0.1:
        body = bytearray(b"\x91" * 50_000)  # a list in a list in a list ...
    length = len(body) if rng.random() < 0.9 else rng.randrange(2**32)
    return struct.pack("<I", length) + body


def greeting(rng: random.Random) -> bytes:
    """How a connection may begin: a Hello, a TLS handshake, either of them damaged, or anything."""
    hello = message_frame(
        Hello(protocol=PROTOCOL, channel="data", role="ps", task="ps-99", incarnation="i", nonce=rng.randbytes(32))
    )
    begin = bytearray(rng.choice((hello, sealed_hello(), rng.randbytes(rng.randrange(300)), b"\xff" * 64, b"")))
    for _ in range(rng.choice((0, 0, 1, 3))):
        if begin:
            begin[rng.randrange(len(begin))] = rng.randrange(256)
    begin = begin[: rng.choice((len(begin), len(begin), rng.randrange(len(begin) + 1)))]
    # records of TLS, of any kind and length
    for _ in range(rng.choice((0, 1, 20))):
        size = rng.choice((0, 1, 2**14, 2**16 - 1))
        begin += struct.pack(">BHH", rng.choice((20, 21, 22, 23, 24)), rng.choice((0x0301, 0x0303)), size)
        begin += rng.randbytes(min(size, 20_000))
    return bytes(begin)


#: how an intruder comes to a port: an open connection and what to say there; None if there is nobody yet
Way = Callable[[Rehearsal, random.Random, int], "tuple[socket.socket, list[bytes]] | None"]


def as_stranger(rehearsal: Rehearsal, rng: random.Random, number: int) -> tuple[socket.socket, list[bytes]] | None:
    """Somebody who knows nothing."""
    host, port = rng.choice([rehearsal.address, *rehearsal.server_addresses()]).rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=2.0), [greeting(rng)]


def as_member(rehearsal: Rehearsal, rng: random.Random, number: int) -> tuple[socket.socket, list[bytes]] | None:
    """A worker or server that no plan knows, at a server's port."""
    addresses = rehearsal.server_addresses()
    if not addresses:
        return None
    role = rng.choice(("worker", "ps"))
    identity = Identity(role, f"{role}-99", f"intruder-{number}", rehearsal.token, rehearsal.encrypt)
    sock, _ = connect(rng.choice(addresses), identity, "data", timeout=2.0)
    return sock, [frame(rng, 9, rehearsal.version) for _ in range(rng.randint(1, 4))]


def as_guest(rehearsal: Rehearsal, rng: random.Random, number: int) -> tuple[socket.socket, list[bytes]] | None:
    """The same at the coordinator's port, also as dl2-run; half of the time it joins."""
    if not rehearsal.version:
        return None  # the first plan may take in whoever is there
    role = rng.choice(("worker", "ps"))
    identity = Identity(role, f"{role}-{99 + number}", f"intruder-{number}", rehearsal.token, rehearsal.encrypt)
    sock, _ = connect(rehearsal.address, identity, rng.choice(("control", "control", "agent")), timeout=2.0)
    said = [message(rng) for _ in range(rng.randint(1, 6))]
    if rng.random() < 0.5:
        spec = rehearsal.spec if role == "worker" else None
        said.insert(0, message_frame(Join(host="h", pid=1, address="127.0.0.1:9", spec=spec)))
    return sock, said


class Intruder:
    """Goes to a rehearsal's ports in one way, again and again."""

    def __init__(self, rehearsal: Rehearsal, seed: int, way: Way) -> None:
        self._rehearsal = rehearsal
        self._rng = random.Random(seed)
        self._way = way
        self.visits = 0
        self.cut_off = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="intruder")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._rehearsal.over:
                with contextlib.suppress(PsliteError, OSError):  # a server that has just left, or the end
                    found = self._way(self._rehearsal, self._rng, self.visits) if self._rehearsal.address else None
                    if found is None:
                        time.sleep(0.001)
                    else:
                        self._speak(*found)
        except BaseException as error:  # noqa: BLE001  (it is the test's)
            self.failure = error

    def _speak(self, sock: socket.socket, said: list[bytes]) -> None:
        self.visits += 1
        with sock:
            sock.settimeout(0.01)
            try:
                for data in said:
                    sock.sendall(data)
                while sock.recv(65536):
                    pass
                self.cut_off += 1
            except TimeoutError:
                pass
            except OSError:
                self.cut_off += 1


def until(enough: Callable[[], bool]) -> type[Regression]:
    """A job whose workers wait before the last versions until an intruder has been there often enough."""

    class Patient(Regression):
        def train(self, session: Session, *, before_step: Callable[[int], None], **hooks: Callable[..., None]) -> None:
            latest = time.monotonic() + 20.0

            def wait(version: int) -> None:
                before_step(version)
                while version >= 50 and not enough() and time.monotonic() < latest:
                    time.sleep(0.01)

            super().train(session, before_step=wait, **hooks)

    return Patient


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Nothing like what is announced is allocated, not even for a moment."""
    before = psutil.Process().memory_info().rss
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES
    # tracemalloc's own notes are part of it
    assert psutil.Process().memory_info().rss - before < 4 * MOST_BYTES


JOBS = ({}, {"segments": segments(40, LAMB(lr=0.01))}, {"durability": "durable"}, {"wire": "float16"})


@pytest.mark.parametrize(
    ("seed", "way", "encrypt"),
    [
        # CI runs each way and each encryption once
        ((number, way, encrypt) if number % 4 == 0 else nightly(number, way, encrypt))
        for number, (way, encrypt) in enumerate(
            itertools.product((as_stranger, as_member, as_guest), ("none", "control", "all"))
        )
    ],
)
def test_somebody_who_is_in_no_plan_does_no_harm(monkeypatch, seed, way, encrypt):
    monkeypatch.setenv("DL2_TRANSPORT", "tcp" if encrypt == "all" else "")
    spec = job(**JOBS[seed % len(JOBS)])
    expected = static_digest(spec)
    events = [Event(10, workers=3, servers=3), Event(25, workers=2, servers=2)]
    intruders: list[Intruder] = []

    def enough():
        return bool(intruders) and intruders[0].visits > 10 and intruders[0].cut_off > 5

    rehearsal = Rehearsal(
        spec, workers=2, servers=2, events=events, step_seconds=0.02, encrypt=encrypt, model=until(enough)
    )
    with little_memory(), Intruder(rehearsal, seed, way) as intruder:
        intruders.append(intruder)
        outcome = rehearsal.run()
    story = "\n".join([*outcome.log[-40:], *outcome.surprises])
    assert outcome.status.state == "finished", story
    assert outcome.status.result.digest == expected, story
    assert not outcome.surprises, story
    assert intruder.visits > 10
    assert intruder.cut_off > 5


def test_a_joiner_with_a_wrong_secret_is_refused_and_logged():
    """At every port, in clear and over TLS."""
    for encrypt in ("none", "all"):
        refused = []

        def way(rehearsal, rng, number, encrypt=encrypt, refused=refused):
            identity = Identity("worker", "worker-99", "i", bytes(32), encrypt)
            for address in [rehearsal.address, *rehearsal.server_addresses()]:
                channel = "control" if address == rehearsal.address else "data"
                try:
                    connect(address, identity, channel, timeout=2.0)
                except AuthenticationError as error:
                    refused.append(str(error))

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DL2_TRANSPORT", "tcp")
            told = until(lambda refused=refused: any("wrong token" in text for text in refused))
            rehearsal = Rehearsal(job(), workers=1, servers=2, step_seconds=0.01, encrypt=encrypt, model=told)
            with Intruder(rehearsal, 0, way):
                outcome = rehearsal.run()
        assert outcome.status.state == "finished", outcome.log
        assert outcome.status.result.digest == static_digest(job())
        assert any("wrong token" in text for text in refused), refused
        assert any("wrong token" in line for line in outcome.log), outcome.log


@pytest.mark.parametrize("encrypt", ["none", "all"])
def test_a_workers_port(monkeypatch, encrypt):
    """Where a worker of an all-reduce job gets its state: from the one it expects, whatever others send."""
    monkeypatch.setenv("DL2_TRANSPORT", "tcp")
    token, rng = bytes(range(32)), random.Random(5)
    giver = Identity("worker", "worker-0", "g", token, encrypt)
    taking = Taking(Identity("worker", "worker-1", "t", token, encrypt), "job", "127.0.0.1", lambda _: None)
    address = f"127.0.0.1:{taking.port}"
    giving, visits = [], []

    def visit():
        for number in range(60):
            with contextlib.suppress(PsliteError, OSError):
                if number % 2:
                    sock = socket.create_connection(("127.0.0.1", taking.port), timeout=2.0)
                    data = greeting(rng)
                else:
                    incarnation = rng.choice(("g", "x"))
                    identity = Identity("worker", "worker-0", incarnation, token, encrypt)
                    sock, _ = connect(address, identity, "data", timeout=2.0)
                    data = frame(rng, 9, 41)
                with sock:
                    sock.sendall(data)
            visits.append(number)

    def check():
        if len(visits) == 60 and not giving:
            to = Member(task="worker-1", incarnation="t", host="h", pid=1, address=address)
            giving.append(Giving(to, giver, 7, 41, [np.full((2, 1000), 5.0, dtype=np.float32)], lambda: None))

    found = [np.zeros((2, 1000), dtype=np.float32)]
    thread = threading.Thread(target=visit)
    with little_memory():
        thread.start()
        assert taking.take(Member(task="worker-0", incarnation="g", host="h", pid=2), 7, found, check) == 41
        thread.join()
    taking.close()
    assert (found[0] == 5.0).all()


def spoil_frames(monkeypatch, rng):
    """Servers send workers frames that make no sense."""
    send = Link.send

    def spoilt(link, header, *payload):
        send(link, header, *payload)
        from_server = threading.current_thread().name.startswith("ps-")
        if from_server and link.role == "worker" and header.version > 5 and rng.random() < 0.02:
            link._out.append(memoryview(frame(rng, 9, header.version)))

    monkeypatch.setattr(Link, "send", spoilt)


def spoil_messages(monkeypatch, rng):
    """The coordinator sends members messages that make no sense."""
    send = Channel.send

    def spoilt(channel, sent):
        send(channel, sent)
        if threading.current_thread() is threading.main_thread() and rng.random() < 0.02:
            channel._out += message(rng)
            channel.flush()

    monkeypatch.setattr(Channel, "send", spoilt)


@pytest.mark.parametrize("spoil", [spoil_frames, spoil_messages])
@pytest.mark.parametrize("seed", first(1, range(2)))
def test_members_of_a_job_that_is_not_sane_end_in_good_order(monkeypatch, spoil, seed):
    """It may fail, by errors of ours that say why, and soon."""
    spoil(monkeypatch, random.Random(seed))
    with little_memory():
        outcome = Rehearsal(job(), workers=2, servers=2, step_seconds=0.005).run()
    story = "\n".join([*outcome.log[-40:], *outcome.surprises])
    assert outcome.status.state in ("finished", "failed"), story
    assert not any("Traceback" in text or "does not end" in text for text in outcome.surprises), story
    result = outcome.status.result
    if result is not None:
        assert result.digest == static_digest(job()), story
