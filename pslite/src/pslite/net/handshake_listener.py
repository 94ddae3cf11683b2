"""Listener that authenticates incoming connections by the job's token before it hands them to the poll loop's owner.

Where connections are to be encrypted, the TLS handshake comes first.  OpenSSL bounds its messages (128 KiB and less);
the duration of a handshake and the number of pending connections are bounded here.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pslite.errors import ProtocolError
from pslite.net.authentication import Acceptor
from pslite.net.messages import Hello
from pslite.net.tcp_sockets import set_up_tcp
from pslite.net.tls import VARIABLE, EncryptedSocket, begins_tls, why

#: seconds for a connection to prove that it knows the token
_HANDSHAKE_SECONDS = 10.0
#: pending connections at a time, of one address and of all
_MAX_PENDING_OF_ADDRESS, _MAX_PENDING = 64, 256


@dataclass(eq=False)
class _PendingConnection:
    """A connection that has not been authenticated yet."""

    sock: socket.socket
    acceptor: Acceptor
    since: float
    #: address from which it comes
    address: str
    #: the same with the port, for messages
    origin: str
    #: whether nothing has come yet that tells whether it speaks TLS
    undetected: bool
    #: whether its TLS handshake goes on
    in_tls_handshake: bool = False


class HandshakeListener:
    """Listening socket and its pending connections, each registered in a selector with the callable to call when ready.

    Parameters
    ----------
    selector
        the poll loop's.
    listener
        non-blocking, listening; closed with the listener.
    acceptor
        makes this side of a handshake.
    welcome
        takes the socket of an authenticated peer, no longer registered, and the peer's introduction.
    say
        takes lines for the user.

    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        *,
        acceptor: Callable[[], Acceptor],
        welcome: Callable[[socket.socket, Hello], None],
        say: Callable[[str], None],
    ) -> None:
        self._selector = selector
        self._listener = listener
        self._acceptor = acceptor
        self._welcome = welcome
        self._say = say
        #: in order of arrival
        self._pending: dict[_PendingConnection, None] = {}
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def expire(self, now: float) -> None:
        """Drop pending connections that take too long; `now` is monotonic, in seconds."""
        for pending in list(self._pending):
            if now - pending.since > _HANDSHAKE_SECONDS:
                self._drop(pending)

    def close(self) -> None:
        """Drop all pending connections and stop listening."""
        for pending in list(self._pending):
            self._drop(pending)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        local = sock.family == socket.AF_UNIX
        if not local:
            set_up_tcp(sock)
        host = "this machine" if local else str(address[0])
        origin = host if local else f"{host}:{address[1]}"
        self._make_room(host)
        # what does not leave the machine is not encrypted
        pending = _PendingConnection(sock, self._acceptor(), time.monotonic(), host, origin, undetected=not local)
        self._pending[pending] = None
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._on_readable(pending))

    def _make_room(self, host: str) -> None:
        """Drop a pending connection if there are too many: the oldest of this address, or of the one with the most.

        Members authenticate at once, so connections that stay pending are not members', and must not keep members out.
        """
        count = Counter(pending.address for pending in self._pending)
        if count[host] >= _MAX_PENDING_OF_ADDRESS:
            crowded = host
        elif len(self._pending) >= _MAX_PENDING:
            ((crowded, _),) = count.most_common(1)
        else:
            return
        self._drop(next(pending for pending in self._pending if pending.address == crowded))

    def _on_readable(self, pending: _PendingConnection) -> None:
        try:
            if pending.undetected:
                self._detect_tls(pending)
            if pending.in_tls_handshake:
                self._continue_tls(pending)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except (OSError, ProtocolError) as error:
            reason = why(error) if isinstance(error, OSError) else error
            self._say(f"refused a connection from {pending.origin}: {reason}")
            self._drop(pending)
            return
        self._authenticate(pending)

    def _detect_tls(self, pending: _PendingConnection) -> None:
        """Find out from its first bytes whether it speaks TLS, and leave them to be received.

        Raises
        ------
        OSError
            nothing has come (BlockingIOError), or the connection has ended.
        ProtocolError
            it speaks TLS although connections are not encrypted here.

        """
        acceptor, sock = pending.acceptor, pending.sock
        first = sock.recv(3, socket.MSG_PEEK)
        pending.undetected = False
        if acceptor.sealed and first[:1] == b"\x16":
            self._selector.unregister(sock)
            pending.sock = acceptor.seal(sock)
            self._selector.register(pending.sock, selectors.EVENT_READ, lambda: self._on_readable(pending))
            pending.in_tls_handshake = True
        elif acceptor.sealed:
            acceptor.turn_away(f"connections are encrypted here; {VARIABLE} must be the same in all tasks")
        elif begins_tls(first):
            raise ProtocolError(f"it uses TLS, but this process does not: {VARIABLE} must be the same in all tasks")

    def _continue_tls(self, pending: _PendingConnection) -> None:
        """Go on with the TLS handshake; its answers are far smaller than a socket buffer, so it never waits to send.

        Raises `OSError` if it is not over (SSLWantReadError), or the peer cannot do it.
        """
        sock = pending.sock
        assert isinstance(sock, EncryptedSocket)
        sock.do_handshake()
        pending.acceptor.bind(sock.binding())
        pending.in_tls_handshake = False

    def _authenticate(self, pending: _PendingConnection) -> None:
        acceptor, sock = pending.acceptor, pending.sock
        try:
            # a handshake message is far smaller than a socket buffer, so sendall cannot block
            while not acceptor.accepted and not acceptor.refusal:
                data = sock.recv(acceptor.wanted)
                if not data:
                    self._drop(pending)
                    return
                answer = acceptor.feed(data)
                if answer:
                    sock.sendall(answer)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            self._say(f"dropped a connection from {pending.origin} that was not authenticated: {error}")
            self._drop(pending)
            return
        hello = acceptor.hello
        if acceptor.refusal or hello is None:
            self._say(f"refused a connection that claims to be {hello.task if hello else '?'}: {acceptor.refusal}")
            self._drop(pending)
            return
        self._pending.pop(pending, None)
        self._selector.unregister(sock)
        self._welcome(sock, hello)

    def _drop(self, pending: _PendingConnection) -> None:
        self._pending.pop(pending, None)
        with contextlib.suppress(KeyError):  # it may have ended while it changed to TLS
            self._selector.unregister(pending.sock)
        pending.sock.close()
