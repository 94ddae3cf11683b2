"""A bad network: few bytes at a time, late; gradients that come twice; connections that break."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

from pslite.net.coordinator_client import CoordinatorClient
from pslite.net.data_frames import PUSH, Link
from pslite.net.framing import cut_off
from pslite.net.messages import FromCoordinator
from pslite.net.tls import Sealed

_PIECES = (1, 3, 17, 200, 5000)


class _Rough:
    """A socket that does less than it could."""

    def __init__(self, sock: socket.socket, rng: random.Random) -> None:
        self._sock = sock
        self._rng = rng

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)

    def _some(self, view: memoryview) -> memoryview:
        if self._rng.random() < 0.3:
            raise BlockingIOError
        return view[: self._rng.choice(_PIECES)]

    def sendmsg(self, views: Sequence[memoryview], *rest: object) -> int:
        return self._sock.sendmsg([self._some(views[0])], *rest)

    def recv_into(self, view: memoryview) -> int:
        # what TLS has deciphered is there: no selector would tell of it later
        if isinstance(self._sock, Sealed) and self._sock.pending():
            return self._sock.recv_into(view[: self._rng.choice(_PIECES)])
        return self._sock.recv_into(self._some(view))

    def recvmsg_into(self, views: Sequence[memoryview], *rest: object) -> object:
        return self._sock.recvmsg_into([self._some(views[0])], *rest)


def rough_weather(monkeypatch, seed: int, *, twice: float = 0.1) -> None:
    """Make every data connection a bad one; pushes come twice with probability `twice`."""
    rng = random.Random(seed)
    begin, send = Link.__init__, Link.send

    def rough_begin(link: Link, sock: socket.socket, *rest: str) -> None:
        begin(link, sock, *rest)
        link.sock = _Rough(sock, rng)  # type: ignore[assignment]

    def send_twice(link: Link, header, *payload) -> None:
        send(link, header, *payload)
        if header.kind == PUSH and rng.random() < twice:
            send(link, header, *payload)

    monkeypatch.setattr(Link, "__init__", rough_begin)
    monkeypatch.setattr(Link, "send", send_twice)


def cut_lines(monkeypatch, seed: int, *, often: float) -> None:
    """Break control connections, as often as that of all times that a member looks at its own; members come back."""
    rng = random.Random(seed)
    look = CoordinatorClient.look

    def look_or_break(line: CoordinatorClient) -> list[FromCoordinator]:
        heard = look(line)
        channel = line._line.channel
        # who has only just come has not been let in yet
        if channel is not None and line._term and rng.random() < often:
            cut_off([channel.sock])
        return heard

    monkeypatch.setattr(CoordinatorClient, "look", look_or_break)


def cut_data(monkeypatch, seed: int, *, often: float) -> list[Link]:
    """Break connections of workers to servers: soon once, then as often as that of all times that a server reads.

    Returns those that were broken, which grows.
    """
    rng = random.Random(seed)
    receive, broken = Link.receive, []
    soon = iter([*[False] * rng.randint(0, 20), True])

    def receive_or_break(link: Link, receiver) -> bool:
        if link.role == "worker" and (next(soon, False) or rng.random() < often):
            broken.append(link)
            cut_off([link.sock])
        return receive(link, receiver)

    monkeypatch.setattr(Link, "receive", receive_or_break)
    return broken
