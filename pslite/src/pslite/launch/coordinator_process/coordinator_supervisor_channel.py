"""Channel between a coordinator and its supervisor, which has the membership source and forwards signals."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from pslite.errors import Cancelled, Fenced
from pslite.job.job_status import Status
from pslite.job.membership_source import MembershipSource, Reply
from pslite.job.message_base_class import WireRecord
from pslite.net.message_framing import Channel, Inbox

#: the shortest time between two statuses that are not urgent, in seconds
_STATUS_SECONDS = 0.1
_CLOSE_SECONDS = 5.0
MAX_BYTES = 64 << 20


class Started(WireRecord, tag=True):
    """From the coordinator: the address and token at which members join."""

    address: str
    token: bytes


class StatusMessage(WireRecord, tag=True):
    """From the coordinator, several times a second: it is alive, and the status of the job if the supervisor has tasks.

    `last` when the job is over, while members and the daemon have not yet taken that.
    """

    status: Status | None
    urgent: bool
    last: bool = False


class Request(WireRecord, tag=True):
    """From the supervisor: what its membership source asks for."""

    reply: Reply


class Terminate(WireRecord, tag=True):
    """From the supervisor: it has received that signal, so the job is to end."""

    number: int


#: what a coordinator sends
FromCoordinator = Started | StatusMessage


@dataclass(eq=False)
class SupervisorChannel:
    """The coordinator's end: the membership source of the job, which forwards to those that decide."""

    #: connected to the supervisor
    sock: socket.socket
    #: whether a new supervisor may continue the job from the log; then the coordinator ends silently if this one dies
    followed: bool
    #: whether the supervisor starts the tasks: then its requests count, and it is sent every status
    has_tasks: bool
    #: a membership source in the coordinator's own process; its requests count if the supervisor has no tasks
    source: MembershipSource | None
    #: the signal that ends the job
    ending: int = 0
    _reply: Reply | None = None
    _sent_at: float = 0.0
    _orphaned: bool = False

    def __post_init__(self) -> None:
        self._channel: Channel[Request | Terminate] = Channel(self.sock, Inbox(Request | Terminate, MAX_BYTES))

    def start(self, address: str, token: bytes, wake: Callable[[], None]) -> None:
        """Have the supervisor start its tasks, and the source."""
        self._channel.send(Started(address, token))
        if self.source is not None:
            self.source.start(address, token, wake)

    def exchange(self, status: Status, *, urgent: bool) -> Reply | None:
        """Forward the status; return the newest request.

        Raises
        ------
        Cancelled
            the job is to end.
        Fenced
            the supervisor has died, and another coordinator may continue the job.

        """
        self._receive()
        now = time.monotonic()
        if not self._channel.unsent and (urgent or now - self._sent_at >= _STATUS_SECONDS):
            self._sent_at = now
            self._channel.send(StatusMessage(status if self.has_tasks else None, urgent))
        self._channel.flush()
        reply = self.source.exchange(status, urgent=urgent) if self.source is not None else None
        return self._reply if self.has_tasks else reply

    def _receive(self) -> None:
        messages, still_open = self._channel.receive()
        for message in messages:
            if isinstance(message, Request):
                self._reply = message.reply
            elif not self.ending:
                self.ending = message.number
                raise Cancelled(signal.Signals(message.number).name)
        if not still_open and not self.ending:
            if self.followed:
                raise Fenced("dl2-run has died, and may be started again")
            self.ending, self._orphaned = signal.SIGKILL, True
            raise Cancelled("dl2-run has died")

    def close(self, status: Status) -> None:
        """Report how the job has ended, unless the supervisor has died, which the daemon sees by itself."""
        if self._orphaned:
            return
        self.sock.settimeout(_CLOSE_SECONDS)
        self._channel.send(StatusMessage(status if self.has_tasks else None, urgent=True, last=True))
        if self.source is not None:
            self.source.close(status)
