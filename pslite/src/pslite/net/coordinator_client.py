"""A member's connection to its coordinator, which it opens again when it is lost: another coordinator may take over.

The one that takes over listens at the same address and goes on from the log of the one before
(`pslite.storage.coordinator_log`).  Until then the member goes on with what it does.  It gives up when nobody has
spoken to it for the time of the lease.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from pslite.errors import AuthenticationError, ConnectError, JobFailed, ProtocolError, PsliteError, Rejected
from pslite.net.authentication import Identity, connect
from pslite.net.message_framing import Channel, Inbox, frame, receive_one
from pslite.net.messages import (
    MAX_CONTROL_BYTES,
    Alive,
    Beat,
    Challenge,
    Exit,
    FromCoordinator,
    JobEnded,
    Message,
    Refused,
    Rejoin,
    Resumed,
    RollBack,
    Taken,
    Welcome,
)
from pslite.net.reliable_channel import ReliableChannel

#: for how long a member that joins tries to reach its coordinator, in seconds
JOIN_SECONDS = 60.0
#: pauses between two tries to reach a coordinator, the first and the longest
_MIN_PAUSE, _MAX_PAUSE = 0.02, 0.5
#: for so many seconds a connection that ends in the handshake is tried again, the first time
_LET_IN_SECONDS = 3.0

#: the connection to a coordinator that takes the member back; or that the job went back to a checkpoint meanwhile; or
#: the reason why there is no coordinator
_Found = tuple[socket.socket, Resumed] | RollBack | str


class CoordinatorClient:
    """The connection; opened with the object.

    One thread calls `look` and `watch`; any thread may call the others.

    Parameters
    ----------
    identity
        of this process, with the job's token.
    address
        host:port of the coordinator.
    timeout
        seconds to reach it the first time.
    resumed
        called by `look` when there is a connection again.

    """

    def __init__(
        self, identity: Identity, address: str, *, timeout: float, resumed: Callable[[], None] = lambda: None
    ) -> None:
        self._address = address
        self._resumed = resumed
        sock, challenge = _reach(address, identity, timeout)
        self.job = challenge.job
        #: this member, with what the job encrypts
        self.identity = replace(identity, encrypt=challenge.encrypt)
        #: the local address of the connection to the coordinator
        self.own_host = str(sock.getsockname()[0])
        self.heartbeat = 1.0
        self.lease = 10.0
        self._lock = threading.RLock()
        self._line = ReliableChannel()
        self._line.attach(_channel(sock), 0)
        self._selector: selectors.BaseSelector | None = None
        self._data: object = None
        self._heard = time.monotonic()
        # until it says otherwise the coordinator may be one that another one follows
        self._lasting = True
        self._term = 0
        self._found: queue.SimpleQueue[_Found] = queue.SimpleQueue()
        self._resumed_at = 0.0
        #: whether the coordinator has said how the job ends for this member
        self._told = False
        self._over = False
        self._closed = threading.Event()

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._line.channel is not None

    @property
    def settled(self) -> bool:
        """Whether no message is left to deliver: the coordinator has confirmed all, or there is none any more."""
        return self._over or not self._line.unconfirmed

    def late(self, since: float, seconds: float) -> bool:
        """Whether the coordinator has had so many seconds to say something about what happened at `since`.

        One that has taken another's place may need its lease to notice.  `since` is monotonic, in seconds.
        """
        if self._resumed_at:
            since = max(since, self._resumed_at + self.lease)
        return self.connected and time.monotonic() - since > seconds

    def watch(self, selector: selectors.BaseSelector, data: object) -> None:
        """Keep the socket registered for reading; when it is ready, and several times a second, call `look`."""
        with self._lock:
            self._selector, self._data = selector, data
            self._register()

    def _register(self) -> None:
        channel = self._line.channel
        if self._selector is not None and channel is not None:
            self._selector.register(channel.sock, selectors.EVENT_READ, self._data)

    def send(self, message: Message) -> None:
        """Send a message, now or when there is a connection again."""
        with self._lock:
            if not self._closed.is_set():
                self._line.send(message)
                self._line.release()

    def flush(self) -> None:
        """Send as much of what is queued as the socket takes."""
        with self._lock:
            if self._line.channel is not None and self._line.channel.unsent:
                self._line.channel.flush()

    def look(self) -> list[FromCoordinator]:
        """Return what has come and is not about the connection itself.

        Raises
        ------
        JobFailed
            the coordinator is gone, and nobody takes its place.
        ProtocolError
            what came is not of this protocol.

        """
        with self._lock:
            if self._over:
                return []
            if self._closed.is_set() and not self.connected:
                self._end(f"the coordinator at {self._address} is gone")
            messages = [*self._take_found(), *self._receive()]
            self._watch_time()
            self.flush()
            return messages

    def _receive(self) -> list[FromCoordinator]:
        channel = self._line.channel
        if channel is None:
            return []
        messages, still_open = channel.receive()
        counted = False
        found = []
        for message in messages:
            self._heard = time.monotonic()
            counted |= self._line.take(message)
            if isinstance(message, Welcome):
                self.heartbeat, self.lease = message.heartbeat_seconds, message.lease_seconds
                self._lasting, self._term = message.lasting, message.term
            elif isinstance(message, Taken):
                self._line.confirm(message.count)
            elif not isinstance(message, Alive | Resumed):
                self._told |= isinstance(message, Exit | RollBack | JobEnded | Refused)
                found.append(message)
        if counted:
            self._line.send(Taken(count=self._line.taken))
            self._line.release()
        if not still_open:
            self._lose(time.monotonic(), f"the coordinator at {self._address} is gone")
        return found

    def _watch_time(self) -> None:
        silent = time.monotonic() - self._heard
        if self.connected and silent > self.lease:
            self._end(f"the coordinator at {self._address} has sent nothing for {self.lease:g} s")
        elif self.connected and self._lasting and silent > self.lease / 2:
            # it hangs, perhaps, and another one has taken its place
            self._lose(self._heard, f"the coordinator at {self._address} sends nothing")

    def _lose(self, since: float, reason: str) -> None:
        self._drop_connection()
        if self._closed.is_set() or not self._lasting or self._ended_for_us():
            self._end(reason)
            return
        thread = threading.Thread(
            target=self._reconnect,
            args=(since + self.lease, self._line.taken, self._term, reason),
            name="pslite-rejoin",
            daemon=True,
        )
        thread.start()

    def _ended_for_us(self) -> bool:
        return self._told and not self._line.unconfirmed

    def _end(self, reason: str) -> None:
        self._over = True
        if not self._told:
            raise JobFailed(reason)

    def _reconnect(self, deadline: float, taken: int, term: int, lost: str) -> None:
        """Try to connect again until a coordinator takes the member back or time is over; in a thread of its own."""
        pause = _MIN_PAUSE
        last = ""
        while not self._closed.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                why = f" ({last})" if last else ""
                self._found.put(f"{lost}, and no other one answered within {self.lease:g} s{why}")
                return
            try:
                found = self._try(min(left, max(0.5, self.lease / 4)), taken, term)
            except Rejected as error:
                self._found.put(str(error))
                return
            except (PsliteError, OSError) as error:
                last = str(error)
            else:
                self._found.put(found)
                if self._closed.is_set():
                    self._drop_found()
                return
            self._closed.wait(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, _MAX_PAUSE)

    def _try(self, seconds: float, taken: int, term: int) -> _Found:
        sock, _ = connect(self._address, self.identity, "control", timeout=seconds)
        try:
            sock.settimeout(seconds)
            sock.sendall(frame(Rejoin(taken=taken, term=term)))
            answer = self._answer(sock, seconds)
            if isinstance(answer, RollBack):
                sock.close()
                return answer
            if isinstance(answer, Refused):
                raise Rejected(f"the coordinator refused {self.identity.task}: {answer.reason}")
            if not isinstance(answer, Resumed):
                raise ProtocolError(f"the coordinator answered Rejoin with {type(answer).__name__}, not with Resumed")
            if answer.term < term:
                raise ProtocolError(
                    f"the coordinator that answered has term {answer.term}, but one of term {term} has replaced it"
                )
        except BaseException:
            sock.close()
            raise
        return sock, answer

    def _answer(self, sock: socket.socket, seconds: float) -> FromCoordinator:
        """Return the answer to `Rejoin`; while the coordinator waits for its disk, heartbeats show that both live."""
        inbox: Inbox[FromCoordinator] = Inbox(FromCoordinator, MAX_CONTROL_BYTES)
        deadline = time.monotonic() + seconds
        while True:
            try:
                answer = receive_one(sock, inbox, min(deadline, time.monotonic() + self.heartbeat))
            except ConnectError:
                if time.monotonic() >= deadline:
                    raise
                sock.sendall(frame(Beat()))
            else:
                if not isinstance(answer, Alive):
                    return answer
                deadline = time.monotonic() + seconds

    def _take_found(self) -> list[FromCoordinator]:
        if self.connected or self._over or self._found.empty():
            return []
        found = self._found.get()
        if isinstance(found, RollBack):
            self._told = self._over = True
            return [found]
        if isinstance(found, str):
            self._end(found)
            return []
        sock, resumed = found
        self._term = resumed.term
        self._heard = self._resumed_at = time.monotonic()
        self._line.attach(_channel(sock), resumed.taken)
        self._line.release()
        self._register()
        self._resumed()
        return []

    def close(self) -> None:
        """Close the connection, once and for all."""
        with self._lock:
            self._closed.set()
            self._over = True
            self._drop_connection()
            self._drop_found()

    def _drop_connection(self) -> None:
        channel = self._line.channel
        if channel is not None:
            self._line.detach()
            if self._selector is not None:
                with contextlib.suppress(KeyError, ValueError, RuntimeError):
                    self._selector.unregister(channel.sock)
            channel.close()

    def _drop_found(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                found = self._found.get_nowait()
                if isinstance(found, tuple):
                    found[0].close()


def _reach(address: str, identity: Identity, timeout: float) -> tuple[socket.socket, Challenge]:
    """Connect for the first time; a coordinator may die during the handshake, and another one take its place."""
    deadline = time.monotonic() + min(timeout, _LET_IN_SECONDS)
    while True:
        try:
            return connect(address, identity, "control", timeout=timeout)
        except Rejected:
            raise
        except AuthenticationError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_MIN_PAUSE)


def _channel(sock: socket.socket) -> Channel[FromCoordinator]:
    return Channel(sock, Inbox(FromCoordinator, MAX_CONTROL_BYTES))
