"""Helpers of the tests of encryption: a door to knock at, encrypted pairs, and somebody who listens on the wire."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

from pslite.net import authentication
from pslite.net.authentication import Acceptor
from pslite.net.handshake_listener import HandshakeListener
from pslite.net.messages import Hello
from pslite.net.tcp_sockets import listen
from pslite.net.tls import Encryption, contexts

TOKEN = b"t" * 32


class Door:
    """A doorway in a poll loop of its own."""

    def __init__(self, encrypt: Encryption = "control", token: bytes = TOKEN) -> None:
        self.lines: list[str] = []
        self.welcome: list[tuple[socket.socket, Hello]] = []
        self._over = False
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        listener = listen("127.0.0.1")
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self._doorway = HandshakeListener(
            self._selector, listener, welcome=self._let_in, say=self._say,
            acceptor=lambda: Acceptor(job="j", task="coordinator", incarnation="i", token=token, encrypt=encrypt),
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._thread.join()
        self._doorway.close()
        self._selector.close()
        for sock, _ in self.welcome:
            sock.close()

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(0.02):
                key.data()
            self._doorway.expire(time.monotonic())

    def _let_in(self, sock: socket.socket, hello: Hello) -> None:
        with self._changed:
            self.welcome.append((sock, hello))
            self._changed.notify_all()

    def _say(self, text: str) -> None:
        with self._changed:
            self.lines.append(text)
            self._changed.notify_all()

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until something that the doorway does makes it true."""
        with self._changed:
            assert self._changed.wait_for(condition, 60), self.lines

    def knock(self) -> socket.socket:
        """Open a bare connection."""
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)), timeout=60)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), timeout=60)
        far, _ = listener.accept()
        far.settimeout(60)
        return near, far


def sealed_hello() -> bytes:
    """Return what a TLS client says first."""
    near, far = tcp_pair()
    with near, far:
        client = contexts(TOKEN).client.wrap_socket(near, do_handshake_on_connect=False)
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
            client.do_handshake()
        greeting = far.recv(65536)
        client.close()
    return greeting


def sealed_pair(
    token: bytes = TOKEN, ends: tuple[socket.socket, socket.socket] | None = None
) -> tuple[socket.socket, socket.socket]:
    """The same, encrypted."""
    near, far = ends or tcp_pair()
    made = contexts(token)
    found = []
    thread = threading.Thread(target=lambda: found.append(made.server.wrap_socket(far, server_side=True)))
    thread.start()
    near = made.client.wrap_socket(near)
    thread.join()
    return near, found[0]


class Listener:
    """Hears all that goes over the connections that are opened while it is there."""

    def __init__(self) -> None:
        #: by connection, what the one that opened it said, and the other
        self.heard: list[tuple[bytearray, bytearray]] = []
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def tap(self, near: socket.socket) -> socket.socket:
        """Put itself into a connection; return the end for who has opened it."""
        ours, mine = tcp_pair()
        mine.settimeout(None)
        near.settimeout(None)
        said: tuple[bytearray, bytearray] = bytearray(), bytearray()
        self.heard.append(said)
        self._sockets += [mine, near]
        for source, target, record in ((mine, near, said[0]), (near, mine, said[1])):
            self._threads.append(threading.Thread(target=_pump, args=(source, target, record), daemon=True))
            self._threads[-1].start()
        return ours

    def everything(self) -> bytes:
        """Return what was heard so far."""
        return b"\0".join(bytes(each) for pair in self.heard for each in pair)

    def wait(self) -> None:
        """Wait until all connections have ended."""
        for thread in self._threads:
            thread.join(60)
        for sock in self._sockets:
            sock.close()


def _pump(source: socket.socket, target: socket.socket, record: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            record += data
            target.sendall(data)
    for sock, how in ((source, socket.SHUT_RD), (target, socket.SHUT_WR)):
        with contextlib.suppress(OSError):
            sock.shutdown(how)


@contextlib.contextmanager
def listening() -> Iterator[Listener]:
    """Listen on all TCP connections that members open meanwhile."""
    listener = Listener()
    before = authentication._open

    def opened(address: str, deadline: float) -> socket.socket:
        sock = before(address, deadline)
        return sock if address.startswith("\0") else listener.tap(sock)

    authentication._open = opened
    try:
        yield listener
    finally:
        authentication._open = before
        listener.wait()
