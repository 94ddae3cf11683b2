"""Limits of the job API's connections: numbers of them, how fast they begin, and the time for a request to arrive.

uvicorn limits only the time between two requests: a client that sends a byte now and then would keep its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from dataclasses import dataclass, replace
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

log = structlog.get_logger()

#: Seconds after which a connection is closed on which no further request begins.
IDLE_SECONDS = 5
#: Time from the beginning of one connection to the next, seconds.
CONNECTION_SECONDS = 0.002


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


class AcceptedSocket(socket.socket):
    """Socket of an accepted connection. A TLS handshake has as long as a request, ``request_seconds``."""

    def begin(self, table: ConnectionTable, group: str) -> None:
        """Start the time for a TLS handshake. Must be called before all else."""
        self._table = table
        self.group = group
        #: uvicorn's handler; None before it is made.
        self.connection: Connection | None = None
        #: The turn that its TLS handshake waits for: granted when it comes; fails where the client has gone.
        self.turn: asyncio.Future[None] | None = None
        seconds = table.limits.request_seconds
        self._deadline: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(seconds, self.abort)

    def abort(self) -> None:
        """End the connection at once."""
        self._table.remove(self)
        if self.connection is not None:
            self.connection.transport.abort()
        elif self.turn is not None and not self.turn.done():
            self.turn.set_exception(client_gone())
        else:
            with contextlib.suppress(OSError):
                self.shutdown(socket.SHUT_RDWR)  # the TLS handshake ends

    @property
    def closing(self) -> bool:
        """Whether it is closed or being closed."""
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
        #: The turn that the present request waits for, in the same way.
        self.turn: asyncio.Future[None] | None = None

    @property
    def closing(self) -> bool:
        """Whether it is closed or being closed."""
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
            self.turn.set_exception(client_gone())

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
            self._set_deadline()  # the client waits for the answer
        else:
            self.transport.abort()


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def client_gone() -> HTTPException:
    """The end of a request whose client has closed its connection; nobody reads it."""
    return HTTPException(503, "the client has closed its connection")
