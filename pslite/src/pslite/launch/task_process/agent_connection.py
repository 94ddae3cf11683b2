"""Connection of a task agent to the coordinator, reopened when it breaks, since another coordinator may take over."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from pslite.errors import PsliteError
from pslite.net.authentication import Identity, connect
from pslite.net.message_framing import Channel, Inbox
from pslite.net.messages import MAX_CONTROL_BYTES, AgentExit, FromCoordinator, JobEnded, Message, Noted

_PAUSE_SECONDS = 0.01


@dataclass(eq=False)
class AgentConnection:
    """Reports about one task to the coordinator; may be used from any thread."""

    #: the task's
    identity: Identity
    #: host:port of the coordinator
    address: str
    #: whether the coordinator has ever been reached
    reached: bool = False
    #: whether the job goes on without the task, whose process has to end
    given_up: bool = False
    #: whether the coordinator has ended since the job was cancelled; not if another one has taken its place
    cancelled: bool = False
    _channel: Channel[FromCoordinator] | None = None
    _noted: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, seconds: float) -> str:
        """Connect within `seconds`; return the reason of a failure, "" for success."""
        try:
            sock, _ = connect(self.address, self.identity, "agent", timeout=seconds)
        except PsliteError as error:
            return str(error)
        with self._lock:
            self.reached = True
            if self._channel is None:
                self._channel = Channel(sock, Inbox(FromCoordinator, MAX_CONTROL_BYTES))
                self.cancelled = False
            else:
                sock.close()  # another thread has connected first
        return ""

    def poll(self) -> bool:
        """Receive messages; return whether the connection is open."""
        with self._lock:
            channel = self._channel
            if channel is None:
                return False
            try:
                messages, still_open = channel.receive()
            except PsliteError:
                messages, still_open = [], False
            self._noted |= any(isinstance(message, Noted) for message in messages)
            ends = [message.cancelled for message in messages if isinstance(message, JobEnded)]
            self.cancelled |= any(ends)
            self.given_up |= not all(ends)
            if still_open:
                channel.flush()
            else:
                self._channel = None
                channel.close()
            return still_open

    def send(self, message: Message) -> None:
        """Send a message; drop it if an earlier one is still unsent, so that messages do not pile up."""
        with self._lock:
            if self._channel is not None and not self._channel.unsent:
                self._channel.send(message)

    def report(self, message: AgentExit, seconds: float, reach: float) -> bool:
        """Report how the task ended; return whether the coordinator acknowledged it within `seconds`.

        Without a connection, one must be established within `reach` seconds.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.poll():
                if self._noted:
                    break
                # a process that ends at once may be faster than this connection
                if self.open(min(reach, max(0.0, deadline - time.monotonic()))):
                    break
            with self._lock:
                if self._channel is not None:
                    self._channel.send(message)
            while not self._noted and time.monotonic() < deadline and self.poll():
                time.sleep(_PAUSE_SECONDS)
            if self._noted:
                break
        return self._noted

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None
