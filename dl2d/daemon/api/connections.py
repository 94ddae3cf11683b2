"""Limits of the job API: numbers of connections, time for a request to arrive, rates, and requests of users at once.

uvicorn limits only the time between two requests: a client that sends a byte now and then would keep its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

log = structlog.get_logger()

#: Heartbeats that a job may send. A coordinator sends one every few seconds, and one when something has changed.
HEARTBEATS_PER_SECOND = 50.0
#: Requests that each user may send with credentials of their own.
VIEWS_PER_SECOND = 2.0
_MAX_AUTHENTICATING, _MAX_VIEWING = 2, 1
#: Maximum number of connections that are accepted in one turn of the event loop. Connections that are closed to make
#: room are closed in the next turn, so up to this many more may be open; asyncio alone would accept 2048.
_MAX_ACCEPTED_IN_TURN = 64


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of the connections of one server."""

    #: Connections of one address at a time.
    per_address: int = 256
    #: Connections at a time; one more closes the oldest one on which no request is being answered.
    total: int = 2048
    #: Seconds for a request to arrive whole, from its first byte on, or on a new connection from its beginning on; and
    #: for a TLS handshake.
    request_seconds: float = 30.0

    def within(self, files: int) -> ConnectionLimits:
        """These limits for a process that may open ``files`` files, of which connections may take half."""
        return replace(self, total=min(self.total, max(files // 2, 1)))


DEFAULT_LIMITS = ConnectionLimits()


def client_group(host: str) -> str:
    """What counts as one address: an IPv4 address, or the /64 network of an IPv6 address, which one host may have."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host


class ConnectionTable:
    """The open connections of a server, counted from their acceptance on, before any TLS handshake."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._groups: Counter[str] = Counter()
        #: Open connections by file descriptor, in order of arrival.
        self._open: OrderedDict[int, _AcceptedSocket] = OrderedDict()
        #: Groups whose connections were refused and that still have as many as they may.
        self._refused: set[str] = set()

    def protocol(self, **arguments: Any) -> asyncio.Protocol:
        """Handler of a new connection; uvicorn calls this for each, after its TLS handshake."""
        return _Connection(self, **arguments)

    def add(self, accepted: _AcceptedSocket) -> bool:
        """Count a connection; false where it is to be closed."""
        group = accepted.group
        if self._groups[group] >= self.limits.per_address:
            if group not in self._refused:
                log.warning("too many connections of one address", address=group, limit=self.limits.per_address)
                self._refused.add(group)
            return False
        if len(self._open) >= self.limits.total:
            oldest = next((other for other in self._open.values() if not other.in_work), None)
            if oldest is None:
                return False
            oldest.abort()
        self._open[accepted.fileno()] = accepted
        self._groups[group] += 1
        return True

    def remove(self, accepted: _AcceptedSocket) -> None:
        """Forget a connection; doing it again changes nothing."""
        group, descriptor = accepted.group, accepted.fileno()
        if self._open.get(descriptor) is not accepted:
            return
        del self._open[descriptor]
        self._refused.discard(group)
        self._groups[group] -= 1
        if not self._groups[group]:
            del self._groups[group]

    def attach(self, connection: _Connection, descriptor: int) -> None:
        """Give the accepted connection with this file descriptor its handler, and end its time for a TLS handshake."""
        accepted = self._open.get(descriptor)
        if accepted is not None:
            accepted.connection = connection
            accepted.clear_deadline()


class ListeningSocket(socket.socket):
    """A listening socket that counts the connections it accepts in ``table``."""

    table: ConnectionTable
    _accepted_in_turn = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises
        ------
        ConnectionAbortedError
            The connection exceeded the limits and was closed.
        BlockingIOError
            No connection waits, or ``_MAX_ACCEPTED_IN_TURN`` were accepted in this turn of the event loop.
        """
        if self._accepted_in_turn >= _MAX_ACCEPTED_IN_TURN:
            raise BlockingIOError
        if not self._accepted_in_turn:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._accepted_in_turn += 1
        plain, address = super().accept()
        accepted = _AcceptedSocket(plain.family, plain.type, plain.proto, fileno=plain.detach())
        accepted.begin(self.table, client_group(str(address[0])))
        if not self.table.add(accepted):
            accepted.close()
            raise ConnectionAbortedError
        return accepted, address

    def _end_turn(self) -> None:
        self._accepted_in_turn = 0


class _AcceptedSocket(socket.socket):
    """Socket of an accepted connection. A TLS handshake has as long as a request, ``request_seconds``."""

    def begin(self, table: ConnectionTable, group: str) -> None:
        """Start the time for a TLS handshake. Must be called before all else."""
        self._table = table
        self.group = group
        #: uvicorn's handler; None before it is made.
        self.connection: _Connection | None = None
        seconds = table.limits.request_seconds
        self._deadline: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(seconds, self.abort)

    @property
    def in_work(self) -> bool:
        """Whether a request has arrived whole and is not answered yet."""
        return self.connection is not None and self.connection.in_work

    def abort(self) -> None:
        """End the connection at once."""
        self._table.remove(self)
        if self.connection is not None:
            self.connection.transport.abort()
        else:
            with contextlib.suppress(OSError):
                self.shutdown(socket.SHUT_RDWR)  # the TLS handshake ends

    def clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def close(self) -> None:
        self._table.remove(self)
        self.clear_deadline()
        super().close()


class _Connection(H11Protocol):
    """uvicorn's handler of a connection, with a deadline for each request."""

    def __init__(self, table: ConnectionTable, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._table = table
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def in_work(self) -> bool:
        """Whether a request has arrived whole and is not answered yet."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._table.attach(self, transport.get_extra_info("socket").fileno())
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        if self._deadline is None:
            self._set_deadline()
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._clear_deadline()
        super().on_response_complete()
        # The next request may have arrived together with this one: its handling has begun.
        if not self.cycle.response_complete:
            self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def _set_deadline(self) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(self._table.limits.request_seconds, self._expire)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if self.in_work and not self.flow.write_paused:
            self._set_deadline()  # the client waits for our answer
        else:
            self.transport.abort()


class RateLimiter:
    """A token bucket for each address; the bucket that was used longest ago is dropped when there are too many."""

    def __init__(
        self, per_second: float, burst: float, timer: Callable[[], float], *, max_addresses: int = 10_000
    ) -> None:
        self._per_second, self._burst, self._timer = per_second, burst, timer
        self._max_addresses = max_addresses
        #: By address, the tokens that were left and when, in seconds of the timer.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, host: str, tokens: float = 1.0) -> bool:
        """Take tokens of an address, no more than the burst; false where it has fewer."""
        group, now = client_group(host), self._timer()
        left, at = self._buckets.pop(group, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_second)
        allowed = left >= tokens
        self._buckets[group] = (left - tokens * allowed, now)
        if len(self._buckets) > self._max_addresses:
            self._buckets.popitem(last=False)
        return allowed


class UserTurns:
    """Bounds the requests of users that are served at once, so that they leave threads and time for heartbeats.

    Others wait in order of arrival, so that those of one user or address keep nobody else from a turn. For the thread
    of the event loop.

    Parameters
    ----------
    rate
        Limits the requests of each user.
    seconds
        How long a request waits for a turn.
    """

    def __init__(self, rate: RateLimiter, *, seconds: float = 10.0) -> None:
        self._rate = rate
        self._seconds = seconds
        self._authenticating = asyncio.Semaphore(_MAX_AUTHENTICATING)
        self._viewing = asyncio.Semaphore(_MAX_VIEWING)
        self._users: set[int] = set()

    @contextlib.asynccontextmanager
    async def authenticating(self) -> AsyncIterator[None]:
        """A turn to verify a credential; raises HTTPException, with the time after which to try again."""
        async with self._turn(self._authenticating):
            yield

    @contextlib.asynccontextmanager
    async def viewing(self, uid: int) -> AsyncIterator[None]:
        """A turn to read what a user sees, one at a time for each; raises as ``authenticating``."""
        if uid in self._users:
            raise _later(503, "another request of this user is being answered")
        if not self._rate.take(str(uid)):
            raise _later(429, "too many requests of this user")
        self._users.add(uid)
        try:
            async with self._turn(self._viewing):
                yield
        finally:
            self._users.remove(uid)

    @contextlib.asynccontextmanager
    async def _turn(self, turns: asyncio.Semaphore) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._seconds):
                await turns.acquire()
        except TimeoutError:
            raise _later(503, "the daemon answers many users now") from None
        try:
            yield
        finally:
            turns.release()


def _later(status: int, problem: str) -> HTTPException:
    return HTTPException(status, f"{problem}; try again in a few seconds", {"Retry-After": "1"})


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
