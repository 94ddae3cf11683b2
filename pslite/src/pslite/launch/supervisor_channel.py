"""Channel between a coordinator and its supervisor, which has the membership source and forwards signals."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable

import msgspec

from pslite.errors import Cancelled, Fenced
from pslite.job.status import MembershipSource, Reply, Status
from pslite.net.framing import Channel, Inbox

#: the shortest time between two statuses that are not urgent, and between two heartbeats, in seconds
_STATUS_SECONDS = 0.1
_HEARTBEAT_SECONDS = 0.5
_CLOSE_SECONDS = 5.0
MAX_BYTES = 64 << 20


class Started(msgspec.Struct, frozen=True, tag=True):
    """From the coordinator: the address and token at which members join."""

    address: str
    token: bytes


class StatusMessage(msgspec.Struct, frozen=True, tag=True):
    """From the coordinator: the status of the job; `last` when the job is over."""

    status: Status
    urgent: bool
    last: bool = False


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """From the coordinator: it is alive; `closing` while the daemon has not yet taken the end of the job."""

    closing: bool = False


class Request(msgspec.Struct, frozen=True, tag=True):
    """From the supervisor: what the membership source asks for."""

    reply: Reply


class Terminate(msgspec.Struct, frozen=True, tag=True):
    """From the supervisor: it has received that signal, so the job is to end."""

    number: int


#: what a coordinator sends
FromCoordinator = Started | StatusMessage | Heartbeat


class SupervisorChannel:
    """The coordinator's end: a membership source that forwards to the one of the supervisor.

    Parameters
    ----------
    sock
        connected to the supervisor.
    followed
        whether a new supervisor may continue the job from the log; then the coordinator ends silently if this one dies.

    """

    def __init__(self, sock: socket.socket, *, followed: bool) -> None:
        self._channel: Channel[Request | Terminate] = Channel(sock, Inbox(Request | Terminate, MAX_BYTES))
        self._followed = followed
        self._reply: Reply | None = None
        self._sent_at = 0.0
        #: the signal that ends the job
        self.ending = 0
        #: whether the supervisor has died
        self.orphaned = False

    def receive(self) -> None:
        """Receive messages of the supervisor.

        Raises
        ------
        Cancelled
            the job is to end.
        Fenced
            the supervisor has died, and another coordinator may continue the job.

        """
        messages, still_open = self._channel.receive()
        for message in messages:
            if isinstance(message, Request):
                self._reply = message.reply
            elif not self.ending:
                self.ending = message.number
                raise Cancelled(signal.Signals(message.number).name)
        if not still_open and not self.ending:
            if self._followed:
                raise Fenced("dl2-run has died, and may be started again")
            self.ending, self.orphaned = signal.SIGKILL, True
            raise Cancelled("no word from dl2-run, which has died")

    def send_heartbeat(self, *, closing: bool = False) -> None:
        """Send a heartbeat if one is due."""
        now = time.monotonic()
        if closing or (not self._channel.unsent and now - self._sent_at >= _HEARTBEAT_SECONDS):
            self._sent_at = now
            self._channel.send(Heartbeat(closing))
        self._channel.flush()

    def start(self, address: str, token: bytes, wake: Callable[[], None]) -> None:  # noqa: ARG002
        """Have the source of the supervisor start."""
        self._channel.send(Started(address, token))

    def exchange(self, status: Status, *, urgent: bool) -> Reply | None:
        """Forward the status; return the newest request."""
        self.receive()
        now = time.monotonic()
        if not self._channel.unsent and (urgent or now - self._sent_at >= _STATUS_SECONDS):
            self._sent_at = now
            self._channel.send(StatusMessage(status, urgent))
        self._channel.flush()
        return self._reply

    def close(self, status: Status) -> None:
        """Forward how the job has ended."""
        self._channel.sock.settimeout(_CLOSE_SECONDS)
        self._channel.send(StatusMessage(status, urgent=True, last=True))


class SupervisedSource:
    """Membership source in the coordinator's own process, besides which it listens to the supervisor.

    Parameters
    ----------
    source
        decides who is a member.
    supervisor
        the channel to the supervisor.

    """

    def __init__(self, source: MembershipSource, supervisor: SupervisorChannel) -> None:
        self._source = source
        self._supervisor = supervisor

    def start(self, address: str, token: bytes, wake: Callable[[], None]) -> None:
        """Start the source."""
        self._source.start(address, token, wake)

    def exchange(self, status: Status, *, urgent: bool) -> Reply | None:
        """Report to the source; return its request."""
        self._supervisor.receive()
        self._supervisor.send_heartbeat()
        return self._source.exchange(status, urgent=urgent)

    def close(self, status: Status) -> None:
        """Report the end of the job, unless the supervisor has died, which the scheduler sees by itself."""
        if not self._supervisor.orphaned:
            self._supervisor.send_heartbeat(closing=True)
            self._source.close(status)
