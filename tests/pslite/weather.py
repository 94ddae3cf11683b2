"""A bad network: few bytes at a time, late; gradients that come twice; connections that break."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

from rehearsal import Fault, Moment
from sudden_death import cut_off, lose_control

from pslite.fault_points import FaultPoint
from pslite.net.messages import Taken
from pslite.net.tensor_frames import PUSH, Link
from pslite.net.tls import EncryptedSocket

_PIECES = (1, 3, 17, 200, 5000)


class _Rough:
    """A socket that does less than it could."""

    def __init__(self, sock: socket.socket, rng: random.Random) -> None:
        self._sock = sock
        self._rng = rng

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)

    def _some(self, view: memoryview) -> memoryview:
        # what is closed says so, as it would in good weather
        if self._sock.fileno() >= 0 and self._rng.random() < 0.3:
            raise BlockingIOError
        return view[: self._rng.choice(_PIECES)]

    def sendmsg(self, views: Sequence[memoryview], *rest: object) -> int:
        return self._sock.sendmsg([self._some(views[0])], *rest)

    def recv_into(self, view: memoryview) -> int:
        # what TLS has deciphered is there: no selector would tell of it later
        if isinstance(self._sock, EncryptedSocket) and self._sock.pending():
            return self._sock.recv_into(view[: self._rng.choice(_PIECES)])
        return self._sock.recv_into(self._some(view))

    def recvmsg_into(self, views: Sequence[memoryview], *rest: object) -> object:
        return self._sock.recvmsg_into([self._some(views[0])], *rest)


def rough_weather(seed: int, *, twice: float = 0.1) -> list[Fault]:
    """Make every data connection a bad one; pushes come twice with probability `twice`."""
    rng = random.Random(seed)

    def spoil(moment: Moment) -> None:
        link: Link = moment.subject
        link.sock, send = _Rough(link.sock, rng), link.send

        def send_twice(header, *payload) -> None:
            send(header, *payload)
            if header.kind == PUSH and rng.random() < twice:
                send(header, *payload)

        link.send = send_twice

    return [Fault(FaultPoint.CONNECTION_OPENED, spoil, always=True)]


def cut_lines(seed: int, *, often: float) -> list[Fault]:
    """Break a control connection, as often as that of all times that the coordinator looks at what is due."""
    rng, let_in = random.Random(seed), set[str]()

    def cut(moment: Moment) -> None:
        if let_in and rng.random() < often:
            lose_control(moment.rehearsal.coordinator, rng.choice(sorted(let_in)))

    return [
        # who has only just come has not been let in yet
        Fault(
            FaultPoint.COORDINATOR_MESSAGE,
            lambda moment: let_in.add(moment.subject),
            when=lambda moment: isinstance(moment.about[1], Taken),
            always=True,
        ),
        Fault(FaultPoint.TICK, cut, always=True),
    ]


class CutData:
    """Breaks connections of workers to servers: soon once, then as often as that of all times that a server reads."""

    def __init__(self, seed: int, *, often: float) -> None:
        self.faults = [
            Fault(FaultPoint.CONNECTION_OPENED, self._watch, when=lambda m: m.subject.role == "worker", always=True)
        ]
        self.broken: list[Link] = []
        self._rng = random.Random(seed)
        self._often = often
        self._soon = iter([*[False] * self._rng.randint(0, 20), True])

    def _watch(self, moment: Moment) -> None:
        link: Link = moment.subject
        receive = link.receive

        def receive_or_break(receiver) -> bool:
            if next(self._soon, False) or self._rng.random() < self._often:
                self.broken.append(link)
                cut_off([link.sock])
            return receive(receiver)

        link.receive = receive_or_break
