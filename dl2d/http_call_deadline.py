"""HTTP transport with a deadline for a whole call: name lookup, connecting, TLS, request, and the whole answer.

The time-outs of httpx2 hold for each read and write alone, so a server that sends a byte now and then could hold a call
for ever. The lookup of a host's name has none at all.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpcore2
import httpx2

#: Connections of one client at a time, and for how long an idle one is kept.
_MAX_CONNECTIONS = 100
_KEEPALIVE_SECONDS = 5.0


class _Call(threading.local):
    """Deadline of the call that a thread makes, in the timer's seconds, and its maximum duration."""

    deadline: float | None = None
    seconds = 0.0


class Deadline:
    """Deadline of the call that each thread makes.

    Parameters
    ----------
    timer
        Seconds on a monotonic clock.
    """

    def __init__(self, timer: Callable[[], float]) -> None:
        self._timer = timer
        self._call = _Call()

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Context in which the calls of this thread end after this time together, in seconds."""
        self._call.deadline, self._call.seconds = self._timer() + seconds, seconds
        try:
            yield
        finally:
            self._call.deadline = None

    def remaining(self, error: type[httpcore2.TimeoutException]) -> float | None:
        """Seconds that are left; None without a deadline. Raises ``error`` when none are left."""
        if self._call.deadline is None:
            return None
        left = self._call.deadline - self._timer()
        if left <= 0:
            raise error(f"it took longer than {self._call.seconds:g} s")
        return left


class _Stream(httpcore2.NetworkStream):
    """A connection, each read and write of which ends with the deadline at the latest."""

    def __init__(self, inner: httpcore2.NetworkStream, deadline: Deadline) -> None:
        self._inner = inner
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        del timeout
        return self._inner.read(max_bytes, self._deadline.remaining(httpcore2.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        del timeout
        # The stream's own write would begin its time-out again with each part.
        _send(self._inner.get_extra_info("socket"), buffer, self._deadline)

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        del timeout
        left = self._deadline.remaining(httpcore2.ConnectTimeout)
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, left), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _UnixStream(httpcore2.NetworkStream):
    """A connection to a Unix socket, each read and write of which ends with the deadline at the latest."""

    def __init__(self, path: str, deadline: Deadline) -> None:
        left = deadline.remaining(httpcore2.ConnectTimeout)
        self._deadline = deadline
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(left)
        try:
            self._connection.connect(path)
        except OSError as error:
            self._connection.close()  # which httpcore2 leaves open
            kind = httpcore2.ConnectTimeout if isinstance(error, TimeoutError) else httpcore2.ConnectError
            raise kind(str(error)) from error

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        del timeout
        self._connection.settimeout(self._deadline.remaining(httpcore2.ReadTimeout))
        try:
            return self._connection.recv(max_bytes)
        except TimeoutError as error:
            raise httpcore2.ReadTimeout(str(error)) from None
        except OSError as error:
            raise httpcore2.ReadError(str(error)) from None

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        del timeout
        _send(self._connection, buffer, self._deadline)

    def close(self) -> None:
        self._connection.close()

    def get_extra_info(self, info: str) -> Any:
        return self._connection if info == "socket" else None


def _send(connection: socket.socket, buffer: bytes, deadline: Deadline) -> None:
    left = memoryview(buffer)
    while left:
        connection.settimeout(deadline.remaining(httpcore2.WriteTimeout))
        try:
            left = left[connection.send(left) :]
        except TimeoutError as error:
            raise httpcore2.WriteTimeout(str(error)) from None
        except OSError as error:
            raise httpcore2.WriteError(str(error)) from None


class _Resolver:
    """Looks up the addresses of hosts in threads, since a lookup cannot be ended: one that hangs is left behind.

    While a host is being looked up, no second lookup of it begins; all calls wait for the same one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lookups: dict[str, Future[list[str]]] = {}

    def addresses(self, host: str, deadline: Deadline) -> Sequence[str]:
        """Addresses of a host, in the order in which they are to be tried."""
        try:
            return [str(ipaddress.ip_address(host))]
        except ValueError:
            pass  # a name
        with self._lock:
            lookup = self._lookups.get(host)
            if lookup is None:
                lookup = Future()
                # A daemon thread: the end of this process does not wait for it.
                thread = threading.Thread(target=self._look_up, args=(host, lookup), name="name lookup", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise httpcore2.ConnectError(f"cannot look up the addresses of {host}: {error}") from error
                # It removes the entry under the lock, after this.
                self._lookups[host] = lookup
        try:
            return lookup.result(deadline.remaining(httpcore2.ConnectTimeout))
        except TimeoutError:
            raise httpcore2.ConnectTimeout(f"the addresses of {host} were not found in time: check DNS") from None
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error

    def _look_up(self, host: str, lookup: Future[list[str]]) -> None:
        try:
            found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError) as error:
            outcome = partial(lookup.set_exception, OSError(f"cannot find the addresses of {host}: {error}"))
        else:
            outcome = partial(lookup.set_result, found)
        with self._lock:
            del self._lookups[host]
        outcome()


class _Backend(httpcore2.SyncBackend):
    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._resolver = _Resolver()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        del timeout
        addresses = [*self._resolver.addresses(host, self._deadline)]
        while True:
            address = addresses.pop(0)
            left = self._deadline.remaining(httpcore2.ConnectTimeout)
            # One that does not answer leaves time for the others.
            share = None if left is None else left / (1 + len(addresses))
            try:
                made = super().connect_tcp(address, port, share, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                if not addresses:
                    raise
            else:
                return _Stream(made, self._deadline)

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        del timeout, socket_options
        return _UnixStream(path, self._deadline)


class DeadlineTransport(httpx2.HTTPTransport):
    """httpx2's transport over connections that keep to a deadline.

    httpx2 has no parameter for the network below it, so its pool of connections is replaced: ``_pool``, which is
    private to it; a version that renames it fails the tests of this module.

    Parameters
    ----------
    deadline
        Deadline of each thread's call.
    verify
        What certificates are verified with, as httpx2 takes it.
    uds
        Path of the Unix socket to connect to in place of the URL's host; None for none.
    keep_alive
        Whether a connection may be used again by another call. Without, bytes that a server sends after an answer are
        never taken for the answer to the next call.
    """

    def __init__(
        self, deadline: Deadline, *, verify: ssl.SSLContext | bool, uds: str | None = None, keep_alive: bool = True
    ) -> None:
        super().__init__(verify=verify, trust_env=False)
        self._pool = httpcore2.ConnectionPool(
            ssl_context=httpx2.create_ssl_context(verify, trust_env=False),
            max_connections=_MAX_CONNECTIONS,
            max_keepalive_connections=None if keep_alive else 0,
            keepalive_expiry=_KEEPALIVE_SECONDS,
            network_backend=_Backend(deadline),
            uds=uds,
        )
