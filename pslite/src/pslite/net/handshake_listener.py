"""Where strangers knock: accepts connections in a poll loop and lets in who proves to know the job's token.

Where connections are to be encrypted, the TLS handshake comes first.  OpenSSL bounds its messages (128 KiB and less),
time and number of strangers are bounded here.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

from pslite.errors import ProtocolError
from pslite.net.authentication import Acceptor
from pslite.net.messages import Hello
from pslite.net.tls import VARIABLE, Sealed, begins_tls, why

#: seconds for a stranger to prove that it knows the token
_HANDSHAKE_SECONDS = 10.0
#: strangers at a time
_MAX_STRANGERS = 64


@dataclass(eq=False)
class _PendingConnection:
    """A connection that has not proved anything yet."""

    sock: socket.socket
    acceptor: Acceptor
    since: float
    #: where it comes from
    origin: str
    #: whether nothing has come, so that it is not known whether it speaks TLS
    silent: bool
    #: whether its TLS handshake goes on
    sealing: bool = False


class HandshakeListener:
    """Strangers of one listening socket. Its sockets are registered with a callable, to be called when they are ready.

    Parameters
    ----------
    selector
        the poll loop's.
    listener
        non-blocking, listening; closed with the doorway.
    acceptor
        makes our side of a handshake.
    welcome
        takes the socket of a peer that is let in, no longer registered, and who it is.
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
        self._strangers: set[_PendingConnection] = set()
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def expire(self, now: float) -> None:
        """Drop strangers that take too long; `now` is monotonic, in seconds."""
        for stranger in list(self._strangers):
            if now - stranger.since > _HANDSHAKE_SECONDS:
                self._drop(stranger)

    def close(self) -> None:
        """Drop all strangers and stop listening."""
        for stranger in list(self._strangers):
            self._drop(stranger)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            sock.close()
            return
        sock.setblocking(False)
        local = sock.family == socket.AF_UNIX
        if not local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        origin = "this machine" if local else f"{address[0]}:{address[1]}"
        # what does not leave the machine is not encrypted
        stranger = _PendingConnection(sock, self._acceptor(), time.monotonic(), origin, silent=not local)
        self._strangers.add(stranger)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._hear(stranger))

    def _hear(self, stranger: _PendingConnection) -> None:
        try:
            if stranger.silent:
                self._begin(stranger)
            if stranger.sealing:
                self._seal(stranger)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except (OSError, ProtocolError) as error:
            reason = why(error) if isinstance(error, OSError) else error
            self._say(f"refused a connection from {stranger.origin}: {reason}")
            self._drop(stranger)
            return
        self._greet(stranger)

    def _begin(self, stranger: _PendingConnection) -> None:
        """Look at how it begins, without taking it.

        Raises
        ------
        OSError
            nothing has come (BlockingIOError), or the connection has ended.
        ProtocolError
            it must not begin so.

        """
        acceptor, sock = stranger.acceptor, stranger.sock
        first = sock.recv(3, socket.MSG_PEEK)
        stranger.silent = False
        if acceptor.sealed and first[:1] == b"\x16":
            self._selector.unregister(sock)
            stranger.sock = acceptor.seal(sock)
            self._selector.register(stranger.sock, selectors.EVENT_READ, lambda: self._hear(stranger))
            stranger.sealing = True
        elif acceptor.sealed:
            acceptor.turn_away(f"connections are encrypted here; {VARIABLE} must be the same in all tasks")
        elif begins_tls(first):
            raise ProtocolError(f"it speaks TLS, which is not done here; {VARIABLE} must be the same in all tasks")

    def _seal(self, stranger: _PendingConnection) -> None:
        """Go on with the TLS handshake; its answers are far smaller than a socket buffer, so it never waits to send.

        Raises
        ------
        OSError
            it is not over (SSLWantReadError), or the peer cannot do it.

        """
        sock = stranger.sock
        assert isinstance(sock, Sealed)
        sock.do_handshake()
        stranger.acceptor.bind(sock.binding())
        stranger.sealing = False

    def _greet(self, stranger: _PendingConnection) -> None:
        acceptor, sock = stranger.acceptor, stranger.sock
        try:
            # a handshake message is far smaller than a socket buffer, so sendall cannot block
            while not acceptor.accepted and not acceptor.refusal:
                data = sock.recv(acceptor.wanted)
                if not data:
                    self._drop(stranger)
                    return
                answer = acceptor.feed(data)
                if answer:
                    sock.sendall(answer)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            self._say(f"dropped a connection from {stranger.origin}, a stranger: {error}")
            self._drop(stranger)
            return
        hello = acceptor.hello
        if acceptor.refusal or hello is None:
            self._say(f"refused a connection that claims to be {hello.task if hello else '?'}: {acceptor.refusal}")
            self._drop(stranger)
            return
        self._strangers.discard(stranger)
        self._selector.unregister(sock)
        self._welcome(sock, hello)

    def _drop(self, stranger: _PendingConnection) -> None:
        self._strangers.discard(stranger)
        with contextlib.suppress(KeyError):  # it may have ended while it changed to TLS
            self._selector.unregister(stranger.sock)
        stranger.sock.close()
