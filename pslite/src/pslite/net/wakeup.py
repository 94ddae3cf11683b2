"""Ends the wait of a poll loop's selector, from any thread."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable


class Wakeup:
    """A pair of sockets; one is registered in the selector, with a function to call: `woken`, or `clear`."""

    def __init__(self, selector: selectors.BaseSelector, woken: Callable[[], None] | None = None) -> None:
        self._out, self._in = socket.socketpair()
        self._out.setblocking(False)
        self._in.setblocking(False)
        selector.register(self._out, selectors.EVENT_READ, woken or self.clear)

    def wake(self) -> None:
        """Have the selector return at once, now or at its next call; nothing after `close`."""
        with contextlib.suppress(OSError):
            self._in.send(b"x")

    def clear(self) -> None:
        """Wait again: what the loop was woken for has been seen."""
        with contextlib.suppress(BlockingIOError):
            self._out.recv(256)

    def close(self) -> None:
        """Close both sockets."""
        self._in.close()
        self._out.close()
