"""Between a coordinator and the process that has started it, which keeps the director and says when to end."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable

import msgspec

from pslite.errors import Cancelled, Fenced
from pslite.job.status import MembershipSource, Reply, Status
from pslite.net.framing import Channel, Inbox

#: the least time between two statuses that tell no news, and between two signs of life, in seconds
_STATUS_SECONDS = 0.1
_LIVING_SECONDS = 0.5
_CLOSE_SECONDS = 5.0
MAX_BYTES = 64 << 20


class Started(msgspec.Struct, frozen=True, tag=True):
    """Coordinator: I listen there, for members that know that token."""

    address: str
    token: bytes


class Told(msgspec.Struct, frozen=True, tag=True):
    """Coordinator: how the job is; `last` where it is over."""

    status: Status
    urgent: bool
    last: bool = False


class Living(msgspec.Struct, frozen=True, tag=True):
    """Coordinator: I am at work; `closing` where a director takes its time with the end of the job."""

    closing: bool = False


class Wish(msgspec.Struct, frozen=True, tag=True):
    """Director: what it wants."""

    reply: Reply


class End(msgspec.Struct, frozen=True, tag=True):
    """The other process was sent that signal: the job is to end."""

    number: int


class SupervisorChannel:
    """The coordinator's end of it: a director that hands all on to the one in the other process.

    Parameters
    ----------
    sock
        connected to the other process.
    followed
        whether somebody else may start a coordinator on our log if the other process dies: then we end without a word.

    """

    def __init__(self, sock: socket.socket, *, followed: bool) -> None:
        self._channel: Channel[Wish | End] = Channel(sock, Inbox(Wish | End, MAX_BYTES))
        self._followed = followed
        self._reply: Reply | None = None
        self._told = 0.0
        #: the signal that ends the job
        self.ending = 0
        #: whether the other process has died
        self.orphaned = False

    def heed(self) -> None:
        """See what the other process says.

        Raises
        ------
        Cancelled
            the job is to end.
        Fenced
            another coordinator is to go on with it.

        """
        messages, still_open = self._channel.receive()
        for message in messages:
            if isinstance(message, Wish):
                self._reply = message.reply
            elif not self.ending:
                self.ending = message.number
                raise Cancelled(signal.Signals(message.number).name)
        if not still_open and not self.ending:
            if self._followed:
                raise Fenced("dl2-run has died, and may be started again")
            self.ending, self.orphaned = signal.SIGKILL, True
            raise Cancelled("no word from dl2-run, which has died")

    def live(self, *, closing: bool = False) -> None:
        """Show the other process, now and then, that we are at work."""
        now = time.monotonic()
        if closing or (not self._channel.unsent and now - self._told >= _LIVING_SECONDS):
            self._told = now
            self._channel.send(Living(closing))
        self._channel.flush()

    def start(self, address: str, token: bytes, wake: Callable[[], None]) -> None:  # noqa: ARG002
        """Have the real one start."""
        self._channel.send(Started(address, token))

    def exchange(self, status: Status, *, urgent: bool) -> Reply | None:
        """Hand the status on; return the newest wishes."""
        self.heed()
        now = time.monotonic()
        if not self._channel.unsent and (urgent or now - self._told >= _STATUS_SECONDS):
            self._told = now
            self._channel.send(Told(status, urgent))
        self._channel.flush()
        return self._reply

    def close(self, status: Status) -> None:
        """Hand on how the job has ended; the real one waits for its tasks after us."""
        self._channel.sock.settimeout(_CLOSE_SECONDS)
        self._channel.send(Told(status, urgent=True, last=True))


class SupervisedSource:
    """A director of our own, of a coordinator that heeds the other process besides.

    Parameters
    ----------
    director
        the director.
    leash
        the way to the other process.

    """

    def __init__(self, director: MembershipSource, leash: SupervisorChannel) -> None:
        self._director = director
        self._leash = leash

    def start(self, address: str, token: bytes, wake: Callable[[], None]) -> None:
        """Start it."""
        self._director.start(address, token, wake)

    def exchange(self, status: Status, *, urgent: bool) -> Reply | None:
        """Tell it; return its wishes."""
        self._leash.heed()
        self._leash.live()
        return self._director.exchange(status, urgent=urgent)

    def close(self, status: Status) -> None:
        """Tell it that the job is over; how dl2-run has died the scheduler knows best."""
        if not self._leash.orphaned:
            self._leash.live(closing=True)
            self._director.close(status)
