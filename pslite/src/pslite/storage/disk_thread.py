"""Disk thread: work on a file system, done in order beside a coordinator's loop, which goes on while a disk stalls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class DiskThread:
    """A thread that does one piece of work after the other; it is started with the first.

    Parameters
    ----------
    wake
        called in the thread after each piece of work, to have the loop call `take`.
    before
        called in the thread before each.

    """

    def __init__(self, wake: Callable[[], None] = lambda: None, before: Callable[[], object] = lambda: None) -> None:
        self._wake = wake
        self._before = before
        self._queue: queue.SimpleQueue[Callable[[], Callable[[], None]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open = 0
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Have `work` done in the thread, and `take` call `done` with what it returns or raises."""

        def run() -> Callable[[], None]:
            result: T | Exception
            try:
                self._before()
                result = work()
            except Exception as error:  # noqa: BLE001  (whoever has submitted it knows which errors there are)
                result = error
            return lambda: done(result)

        self._open += 1
        self._queue.put(run)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="pslite-disk", daemon=True)
            self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether there is work whose result has not been taken."""
        return bool(self._open)

    def take(self) -> None:
        """Call `done` for each piece of work that has been finished; in the loop's thread."""
        while not self._done.empty():
            self._open -= 1
            self._done.get()()

    def close(self, seconds: float) -> bool:
        """Do what is left, but wait for no longer than this; return whether all is done.  Results are not taken."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (work := self._queue.get()) is not None:
            self._done.put(work())
            self._wake()
