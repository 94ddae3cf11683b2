"""Where strangers knock: accepts connections in a poll loop and lets in who proves to know the job's token."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from pslite.auth import Acceptor
from pslite.errors import ProtocolError
from pslite.messages import Hello

#: seconds for a stranger to prove that it knows the token
_HANDSHAKE_SECONDS = 10.0
#: strangers at a time
_MAX_STRANGERS = 64


@dataclass(eq=False)
class _Stranger:
    """A connection that has not proved anything yet."""

    sock: socket.socket
    acceptor: Acceptor
    since: float


class Doorway:
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
        self._strangers: set[_Stranger] = set()
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
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            sock.close()
            return
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stranger = _Stranger(sock, self._acceptor(), time.monotonic())
        self._strangers.add(stranger)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._greet(stranger))

    def _greet(self, stranger: _Stranger) -> None:
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
            self._say(f"dropped a connection from a stranger: {error}")
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

    def _drop(self, stranger: _Stranger) -> None:
        self._strangers.discard(stranger)
        self._selector.unregister(stranger.sock)
        stranger.sock.close()
