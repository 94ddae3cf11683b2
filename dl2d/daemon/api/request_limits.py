"""Limits of the job API: numbers of connections, time for a request to arrive, rates, and turns of clients.

uvicorn limits only the time between two requests: a client that sends a byte now and then would keep its connection.
Heartbeats come first: requests without a job's credential begin one after the other, and their connections make way.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import structlog
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

log = structlog.get_logger()

#: Heartbeats that a job may send. A coordinator sends one every few seconds, and one when something has changed.
HEARTBEATS_PER_SECOND = 50.0
#: Requests that each user may send with credentials of their own.
VIEWS_PER_SECOND = 2.0
_MAX_AUTHENTICATING, _MAX_VIEWING = 2, 1
#: Time from the answer to one user to the beginning of the next one, seconds.
_VIEW_PAUSE_SECONDS = 0.02
#: Requests of users of one address that may wait to be authenticated.
_MAX_WAITING = 64
#: Time from the beginning of one request without a job's credential, or one refusal, to the next, seconds. Each takes
#: the event loop one to three milliseconds, in which no heartbeat is read.
PUBLIC_SECONDS = 0.01
#: Heartbeats that are served at once, each of another job. The server has 40 threads.
MAX_HEARTBEATS = 16


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of the connections of one server."""

    #: Connections of one address at a time; one more closes another one of that address (``ConnectionTable.add``).
    per_address: int = 256
    #: Connections at a time; one more closes one of the address that has the most.
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
        #: Open connections by group and file descriptor, in order of arrival.
        self._groups: dict[str, dict[int, AcceptedSocket]] = {}
        self._open: dict[int, AcceptedSocket] = {}
        #: Groups that had as many as they may, and have not had less than half of it since.
        self._crowded: set[str] = set()

    def protocol(self, **arguments: Any) -> asyncio.Protocol:
        """Handler of a new connection; uvicorn calls this for each, after its TLS handshake."""
        return Connection(self, **arguments)

    def add(self, accepted: AcceptedSocket) -> bool:
        """Count a connection; false where it is to be closed, since nothing makes way for it.

        The oldest connection is closed on which no request that has shown a valid credential is being served. So
        clients without a credential cannot keep the coordinators of their address from the daemon.
        """
        group = accepted.group
        own = self._groups.get(group, {})
        if len(own) >= self.limits.per_address:
            if group not in self._crowded:
                log.warning("too many connections of one address", address=group, limit=self.limits.per_address)
                self._crowded.add(group)
            if not _make_way(own):
                return False
        elif len(self._open) >= self.limits.total and not _make_way(max(self._groups.values(), key=len)):
            return False
        self._open[accepted.fileno()] = accepted
        self._groups.setdefault(group, {})[accepted.fileno()] = accepted
        return True

    def remove(self, accepted: AcceptedSocket) -> None:
        """Forget a connection; doing it again changes nothing."""
        group, descriptor = accepted.group, accepted.fileno()
        if self._open.get(descriptor) is not accepted:
            return
        del self._open[descriptor], self._groups[group][descriptor]
        if len(self._groups[group]) <= self.limits.per_address // 2:
            self._crowded.discard(group)
        if not self._groups[group]:
            del self._groups[group]

    def attach(self, connection: Connection, descriptor: int) -> None:
        """Give the accepted connection with this file descriptor its handler, and end its time for a TLS handshake."""
        accepted = self._open.get(descriptor)
        if accepted is not None:
            accepted.connection = connection
            accepted.clear_deadline()


def _make_way(connections: dict[int, AcceptedSocket]) -> bool:
    """Close the first of some connections that may be closed."""
    # By age alone: if those came first on which nothing is served yet, clients whose requests wait could have the
    # connection of a coordinator closed that has just been opened.
    for accepted in connections.values():
        connection = accepted.connection
        if connection is None or not (connection.in_work and connection.authenticated):
            accepted.abort()
            return True
    return False


class Waiting(Protocol):
    """What waits for a turn."""

    #: Granted when the turn comes; fails where the client has gone.
    turn: asyncio.Future[None] | None

    @property
    def closing(self) -> bool:
        """Whether the connection is closed or being closed."""
        ...


class AcceptedSocket(socket.socket):
    """Socket of an accepted connection. A TLS handshake has as long as a request, ``request_seconds``."""

    def begin(self, table: ConnectionTable, group: str) -> None:
        """Start the time for a TLS handshake. Must be called before all else."""
        self._table = table
        self.group = group
        #: uvicorn's handler; None before it is made.
        self.connection: Connection | None = None
        #: The turn that its TLS handshake waits for.
        self.turn: asyncio.Future[None] | None = None
        seconds = table.limits.request_seconds
        self._deadline: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(seconds, self.abort)

    def abort(self) -> None:
        """End the connection at once."""
        self._table.remove(self)
        if self.connection is not None:
            self.connection.transport.abort()
        elif self.turn is not None and not self.turn.done():
            self.turn.set_exception(_client_gone())
        else:
            with contextlib.suppress(OSError):
                self.shutdown(socket.SHUT_RDWR)  # the TLS handshake ends

    @property
    def closing(self) -> bool:
        """See ``Waiting``."""
        return self.fileno() < 0

    def clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def close(self) -> None:
        self._table.remove(self)
        self.clear_deadline()
        super().close()


class Connection(H11Protocol):
    """uvicorn's handler of a connection, with a deadline for each request; requests find it as ``state.connection``."""

    def __init__(self, table: ConnectionTable, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._table = table
        self._deadline: asyncio.TimerHandle | None = None
        self.app_state = {**self.app_state, "connection": self}
        #: Whether the present request has shown the credential that its route asks for.
        self.authenticated = False
        #: The turn that the present request waits for.
        self.turn: asyncio.Future[None] | None = None

    @property
    def closing(self) -> bool:
        """See ``Waiting``."""
        return self.transport.is_closing()

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
        self.authenticated = False
        super().on_response_complete()
        # The next request may have arrived together with this one: its handling has begun.
        if not self.cycle.response_complete:
            self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)
        if self.turn is not None and not self.turn.done():
            self.turn.set_exception(_client_gone())

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


class FairTurns:
    """Limit on the number of requests or connections that are served at a time, which is fair between clients.

    Clients that wait are served in turn, one request each, however many requests each of them has.

    For the thread of the event loop.

    Parameters
    ----------
    at_once
        Turns at a time.
    each
        Turns of one client at a time.
    pause
        Seconds from the end of a turn to the one that takes its place.
    newest_first
        Whether of the requests of one client the newest is served first: one whose client sends more than can be
        served then still serves some soon, where otherwise each would wait for all before it.
    """

    def __init__(self, at_once: int, *, each: int = 1, pause: float = 0.0, newest_first: bool = False) -> None:
        self._free = at_once
        self._each = each
        self._pause = pause
        self._newest_first = newest_first
        self._held: Counter[str] = Counter()
        #: Those who wait, by client, in order of their turns.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def waiting(self, client: str) -> int:
        """How many requests of a client wait."""
        return len(self._waiting.get(client, ()))

    @contextlib.asynccontextmanager
    async def turn(self, client: str, connection: Waiting) -> AsyncIterator[None]:
        """A turn; raises HTTPException where the connection of the request is closed while it waits."""
        await self.take(client, connection)
        try:
            yield
        finally:
            self.give_back(client)

    async def take(self, client: str, connection: Waiting) -> None:
        """Wait for a turn, which is to be given back; raises as ``turn``."""
        if connection.closing:
            raise _client_gone()
        if self._free and self._held[client] < self._each:
            self._hold(client)
            return
        granted = connection.turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(granted)
        try:
            await granted
        except BaseException:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.give_back(client)  # granted, and cancelled before it was noticed
            else:
                self._forget(client, granted)
            raise

    def give_back(self, client: str) -> None:
        """End a turn of a client."""
        if self._pause:
            asyncio.get_running_loop().call_later(self._pause, self._end, client)
        else:
            self._end(client)

    def _hold(self, client: str) -> None:
        self._free -= 1
        self._held[client] += 1

    def _end(self, client: str) -> None:
        self._free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        while self._free:
            following = next((each for each in self._waiting if self._held[each] < self._each), None)
            if following is None:
                return
            requests = self._waiting.pop(following)
            granted = requests.pop() if self._newest_first else requests.popleft()
            if not granted.done():  # it waits still
                self._hold(following)
                granted.set_result(None)
            if requests:
                self._waiting[following] = requests  # behind the others

    def _forget(self, client: str, granted: asyncio.Future[None]) -> None:
        requests = self._waiting.get(client)
        if requests is None or granted not in requests:
            return
        requests.remove(granted)
        if not requests:
            del self._waiting[client]


class UserTurns:
    """Bounds the requests of users that are served at once, so that they leave threads and time for heartbeats.

    Others wait, those of each address in order of arrival and the addresses in turn. For the thread of the event loop.

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
        self._authenticating = FairTurns(_MAX_AUTHENTICATING, each=_MAX_AUTHENTICATING)
        self._viewing = FairTurns(_MAX_VIEWING, pause=_VIEW_PAUSE_SECONDS)
        self._users: set[int] = set()

    @contextlib.asynccontextmanager
    async def authenticating(self, address: str, connection: Connection) -> AsyncIterator[None]:
        """A turn to verify a credential; raises HTTPException, with the time after which to try again."""
        if self._authenticating.waiting(address) >= _MAX_WAITING:
            raise too_many("requests of users of this address")
        async with self._turn(self._authenticating, address, connection):
            yield

    @contextlib.asynccontextmanager
    async def viewing(self, uid: int, connection: Connection) -> AsyncIterator[None]:
        """A turn to read what a user sees, one at a time for each; raises as ``authenticating``."""
        if uid in self._users:
            raise _later(503, "another request of this user is being answered")
        if not self._rate.take(str(uid)):
            raise too_many("requests of this user")
        self._users.add(uid)
        try:
            async with self._turn(self._viewing, str(uid), connection):
                yield
        finally:
            self._users.remove(uid)

    @contextlib.asynccontextmanager
    async def _turn(self, turns: FairTurns, client: str, connection: Connection) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._seconds):
                await turns.take(client, connection)
        except TimeoutError:
            raise _later(503, "the daemon answers many users now") from None
        try:
            yield
        finally:
            turns.give_back(client)


def too_many(what: str) -> HTTPException:
    """The refusal of a request that exceeds a rate or a number."""
    return _later(429, f"too many {what}")


def _client_gone() -> HTTPException:
    return HTTPException(503, "the client has closed its connection")  # nobody reads it


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
