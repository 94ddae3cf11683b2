"""A network in memory for threads of `virtual_threads`: stand-ins for `socket` and `selectors`.

Bytes travel in pieces, in order, each with a delay.  Between two processes the network can be cut in one direction or
in both: as with TCP, what was sent is delivered once it is whole again, and a connection ends on both sides when it was
cut for longer than `tcp_sockets.set_up_tcp` sets.  A connection can break in the middle of what is on its way.
"""

from __future__ import annotations

import errno
import itertools
import os
import selectors
import socket
import types
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from virtual_threads import Kernel, Process, VirtualThread

from pslite.net import tcp_sockets

#: what a connection holds in each direction before its sender has to wait
_CAPACITY = 64 << 10
#: after how many seconds a connection attempt that was lost is repeated
_SYN_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
_PIECES = (1, 7, 60, 500, 4000, 1 << 16)


class Network:
    """Processes' sockets, and what is between them."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        #: of what is sent, in seconds: at least, and on average beyond that
        self.latency, self.jitter = 0.0002, 0.0005
        self.listeners: dict[int, Listener] = {}
        self.sockets: list[VirtualSocket] = []
        #: (from, to) -> how many cuts there are
        self._cuts: dict[tuple[str, str], int] = {}
        #: (from, to) -> additional delay
        self.slow: dict[tuple[str, str], float] = {}
        self.ports = itertools.count(20000)

    def is_cut(self, a: Process, b: Process) -> bool:
        """Whether nothing comes from the one to the other."""
        names = a.name, b.name
        return a.name != b.name and any(self._cuts.get(each) for each in (names, (a.name, ""), ("", b.name)))

    def cut(self, a: str, b: str) -> None:
        """Let nothing through from one process to another ("": to any); once for each `mend`."""
        self._cuts[a, b] = self._cuts.get((a, b), 0) + 1
        for sock in self.open_sockets():
            if sock.is_cut and not sock.silent_since:
                sock.silent_since = since = self.kernel.now
                self.kernel.after(self._silence(), lambda s=sock, t=since: s.time_out(t))

    def mend(self, a: str, b: str) -> None:
        """Undo a `cut`; what was sent meanwhile is sent again within a second."""
        self._cuts[a, b] -= 1
        for sock in self.open_sockets():
            if not sock.is_cut:
                sock.silent_since = 0.0
            if sock.peer is not None and not self.is_cut(sock.process, sock.peer.process) and sock.held:
                self.kernel.after(self.kernel.rng.uniform(0.0, 1.0), sock.send_held)

    def _silence(self) -> float:
        return tcp_sockets._SILENCE * self.kernel.rng.uniform(1.0, 1.2)

    def delay(self, a: Process, b: Process) -> float:
        """How long the next piece takes."""
        seconds = self.latency + self.kernel.rng.expovariate(1 / self.jitter)
        return seconds + self.slow.get((a.name, b.name), 0.0) + self.slow.get((a.name, ""), 0.0)

    def open_sockets(self) -> list[VirtualSocket]:
        """Connections that have not ended."""
        self.sockets = [each for each in self.sockets if not each.closed or each.held]
        return list(self.sockets)

    def kill(self, process: Process) -> None:
        """End a process at once, with its connections."""
        process.dead = True
        for sock in [each for each in self.open_sockets() if each.process is process]:
            sock.close()
        for listener in list(self.listeners.values()):
            if listener.process is process:
                listener.close()

    def break_connection(self, a: str, b: str) -> bool:
        """Break a connection between two processes in the middle of what is on its way; whether there was one."""
        for sock in self.open_sockets() if a != b else ():
            if sock.peer is not None and (sock.process.name, sock.peer.process.name) == (a, b) and not sock.closed:
                sock.fail(errno.ECONNRESET)
                sock.peer.fail(errno.ECONNRESET)
                return True
        return False

    # --- stand-ins ------------------------------------------------------------------------------------------------

    def stand_ins(self) -> dict[str, types.SimpleNamespace]:
        """What modules get in the place of others."""
        return {
            "socket": types.SimpleNamespace(**{
                **vars(socket), "socket": lambda *_: Listener(self), "socketpair": self._pair,
                "create_connection": self._connect, "gethostname": lambda: self.kernel.current.process.name,
            }),
            "selectors": types.SimpleNamespace(**{**vars(selectors), "DefaultSelector": lambda: Selector(self.kernel)}),
        }  # fmt: skip

    def _pair(self) -> tuple[VirtualSocket, VirtualSocket]:
        process = self.kernel.current.process
        a, b = VirtualSocket(self, process), VirtualSocket(self, process)
        a.peer, b.peer = b, a
        return a, b

    def _connect(self, address: tuple[str, int], timeout: float | None = None) -> VirtualSocket:
        kernel = self.kernel
        process, deadline = kernel.current.process, None if timeout is None else kernel.now + timeout
        for pause in _SYN_SECONDS:
            listener = self.listeners.get(address[1])
            other = listener.process if listener is not None else process
            kernel.sleep(self.delay(process, other) + self.delay(other, process))
            if not self.is_cut(process, other) and not self.is_cut(other, process):
                if self.listeners.get(address[1]) is not listener or listener is None:
                    raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
                return listener.connected(process)
            left = kernel.left(deadline)
            kernel.sleep(pause if left is None else min(pause, left))
            if kernel.late(deadline):
                break
        raise TimeoutError("timed out")


@dataclass(eq=False)
class _Watched:
    """What selectors and threads wait for."""

    network: Network
    process: Process
    selectors: dict[Selector, None] = field(default_factory=dict)
    waiting: list[VirtualThread] = field(default_factory=list)
    closed: bool = False
    timeout: float | None = None

    family = socket.AF_INET

    def changed(self) -> None:
        for each in [*self.waiting, *(s.waiting for s in self.selectors if s.waiting is not None)]:
            self.network.kernel.wake(each)
        self.waiting.clear()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait as a blocking socket does."""
        kernel = self.network.kernel
        deadline = None if self.timeout is None else kernel.now + self.timeout
        while not ready():
            if self.timeout == 0.0:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            if kernel.late(deadline):
                raise TimeoutError("timed out")
            self.waiting.append(kernel.current)
            kernel.park(kernel.left(deadline))

    def setblocking(self, blocking: bool) -> None:
        self.timeout = None if blocking else 0.0

    def settimeout(self, seconds: float | None) -> None:
        self.timeout = seconds

    def setsockopt(self, *_: object) -> None:
        """Nothing: `tcp_sockets.set_up_tcp` is taken as given."""

    def fileno(self) -> int:
        return -1 if self.closed else 1

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

    @property
    def readable(self) -> bool:
        raise NotImplementedError

    writable = False


class Listener(_Watched):
    """A socket that will listen; copies of it share connections that wait."""

    def __init__(self, network: Network) -> None:
        super().__init__(network, network.kernel.current.process)
        self.port = 0
        self.backlog = deque[VirtualSocket]()
        #: how often it has to be closed
        self._uses = 1

    def dup(self) -> Listener:
        self._uses += 1
        return self

    def bind(self, address: tuple[str, int]) -> None:
        self.port = address[1] or next(self.network.ports)
        self.network.listeners[self.port] = self

    def listen(self, _: int) -> None:
        """It does already."""

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def connected(self, process: Process) -> VirtualSocket:
        near, far = VirtualSocket(self.network, process), VirtualSocket(self.network, self.process)
        near.peer, far.peer = far, near
        self.backlog.append(far)
        self.changed()
        return near

    @property
    def readable(self) -> bool:
        return bool(self.backlog)

    def accept(self) -> tuple[VirtualSocket, tuple[str, int]]:
        self.wait(lambda: bool(self.backlog))
        sock = self.backlog.popleft()
        sock.process = self.network.kernel.current.process  # it may be another one than that which began to listen
        assert sock.peer is not None
        return sock, (sock.peer.process.name, sock.port)

    def close(self) -> None:
        self._uses -= 1
        if not self._uses or self.process.dead:
            self.network.listeners.pop(self.port, None)
            for sock in self.backlog:
                sock.close()
            self.backlog.clear()


_EOF = b""


class VirtualSocket(_Watched):
    """One end of a connection."""

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__(network, process)
        self.peer: VirtualSocket | None = None
        self.port = next(network.ports)
        self._received = bytearray()
        self._ended = self._shut = False
        self._error = 0
        #: what the network has lost and this end will send again; bytes on their way, and when the last of them come
        self.held: list[bytes] = []
        self._on_its_way = 0
        self._arrival = 0.0
        #: since when nothing comes through, in one direction at least; 0: all is well
        self.silent_since = 0.0
        network.sockets.append(self)

    @property
    def is_cut(self) -> bool:
        """Whether the network is cut here, in one direction at least."""
        net, peer = self.network, self.peer
        return peer is not None and (net.is_cut(self.process, peer.process) or net.is_cut(peer.process, self.process))

    @property
    def readable(self) -> bool:
        return bool(self._received) or self._ended or bool(self._error)

    @property
    def writable(self) -> bool:
        return self._room() > 0 or bool(self._error)

    def _room(self) -> int:
        peer = self.peer
        return _CAPACITY - self._on_its_way - (len(peer._received) if peer is not None else 0)

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    # --- sending --------------------------------------------------------------------------------------------------

    def send(self, data: Any, _: int = 0) -> int:
        kernel = self.network.kernel
        kernel.interrupt()
        self._check(writing=True)
        self.wait(lambda: self._room() > 0 or bool(self._error))
        self._check(writing=True)
        piece = bytes(memoryview(data).cast("B")[: self._room()])
        self._dispatch(piece)
        return len(piece)

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self.send(left) :]

    def sendmsg(self, views: Sequence[memoryview], *_: object) -> int:
        return self.send(b"".join(views))

    def _check(self, *, writing: bool = False) -> None:
        if self.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self._error:
            raise OSError(self._error, os.strerror(self._error))
        if writing and self._shut:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def _dispatch(self, piece: bytes) -> None:
        """Send a piece on its way; it is delivered after what was sent before."""
        assert self.peer is not None
        net = self.network
        self._on_its_way += len(piece)
        if self.process is self.peer.process:
            self._deliver(piece)
            return
        if self.held:
            self.held.append(piece)
            return
        self._arrival = max(self._arrival, net.kernel.now + net.delay(self.process, self.peer.process))
        net.kernel.at(self._arrival, lambda: self._arrive(piece))

    def _arrive(self, piece: bytes) -> None:
        peer = self.peer
        assert peer is not None
        if self.held or self.network.is_cut(self.process, peer.process):
            self.held.append(piece)
        else:
            self._deliver(piece)

    def send_held(self) -> None:
        """Deliver what the network has lost, unless it is cut again."""
        assert self.peer is not None
        if not self.network.is_cut(self.process, self.peer.process):
            held, self.held = self.held, []
            for piece in held:
                self._deliver(piece)

    def _deliver(self, piece: bytes) -> None:
        peer = self.peer
        assert peer is not None
        self._on_its_way -= len(piece)
        if piece == _EOF:
            peer._ended = True
        elif peer.closed:
            if not self.network.is_cut(peer.process, self.process):
                self.fail(errno.ECONNRESET)
        elif not peer._error:
            peer._received += piece
        peer.changed()

    # --- receiving ------------------------------------------------------------------------------------------------

    def recv(self, count: int, flags: int = 0) -> bytes:
        kernel = self.network.kernel
        kernel.interrupt()
        if self.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self.wait(lambda: self.readable)
        if not self._received:
            if self._ended or self._shut:
                return b""
            self._check()
        data = bytes(self._received[: min(count, kernel.rng.choice(_PIECES))])
        if not flags & socket.MSG_PEEK:
            del self._received[: len(data)]
            if self.peer is not None:
                self.peer.changed()
        return data

    def recv_into(self, view: memoryview) -> int:
        data = self.recv(view.nbytes)
        view.cast("B")[: len(data)] = data
        return len(data)

    # --- the end --------------------------------------------------------------------------------------------------

    def fail(self, error: int) -> None:
        """End with an error; what is on its way is lost."""
        if not self.closed and not self._error:
            self._error = error
            self.held.clear()
            self.changed()

    def time_out(self, since: float) -> None:
        """Nothing has come through for too long."""
        if self.silent_since == since and not self.closed:
            self.fail(errno.ETIMEDOUT)

    def shutdown(self, _: int) -> None:
        self._check()
        if not self._shut:
            self._shut = self._ended = True
            self._dispatch(_EOF)
            self.changed()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for each in list(self.selectors):
            each.forget(self)
        if self.peer is not None and not self._shut and not self._error:
            self._dispatch(_EOF)
        self.changed()


@dataclass(eq=False)
class Selector:
    """`selectors.DefaultSelector`."""

    kernel: Kernel
    keys: dict[_Watched, selectors.SelectorKey] = field(default_factory=dict)
    waiting: VirtualThread | None = None

    def register(self, sock: _Watched, events: int, data: object = None) -> None:
        if sock in self.keys:
            raise KeyError(f"{sock} is registered already")
        if sock.closed:
            raise ValueError("it is closed")
        self.keys[sock] = selectors.SelectorKey(sock, 1, events, data)  # type: ignore[arg-type]
        sock.selectors[self] = None
        if self.waiting is not None:
            self.kernel.wake(self.waiting)

    def unregister(self, sock: _Watched) -> None:
        del self.keys[sock]
        sock.selectors.pop(self, None)

    def modify(self, sock: _Watched, events: int, data: object = None) -> None:
        if self.keys[sock].events != events:
            self.unregister(sock)
            self.register(sock, events, data)

    def forget(self, sock: _Watched) -> None:
        """It is closed: nothing is said of it any more."""
        sock.selectors.pop(self, None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        kernel = self.kernel
        found = self._ready()
        if found or timeout == 0:
            kernel.interrupt(1.0)
            return self._ready()
        deadline = None if timeout is None else kernel.now + timeout
        while not found and not kernel.late(deadline):
            self.waiting = kernel.current
            kernel.park(kernel.left(deadline))
            self.waiting = None
            found = self._ready()
        return found

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        found = []
        for sock, key in list(self.keys.items()):
            mask = (
                0
                if sock.closed
                else key.events & (selectors.EVENT_READ * sock.readable | selectors.EVENT_WRITE * sock.writable)
            )
            if mask:
                found.append((key, mask))
        return found

    def close(self) -> None:
        for sock in self.keys:
            sock.selectors.pop(self, None)
        self.keys.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
