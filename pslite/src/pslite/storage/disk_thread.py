"""Thread in which a coordinator does its work on a file system, in order, so that its loop never waits for a disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: how long the end of a coordinator waits for a disk that stalls, in seconds
CLOSE_SECONDS = 5.0


class DiskThread:
    """A thread that does pieces of work one after the other; it is started with the first one.

    Parameters
    ----------
    wake
        called in the thread after each piece of work, so that the loop calls `take`.
    before
        called in the thread before each piece of work.

    """

    def __init__(self, wake: Callable[[], None] = lambda: None, before: Callable[[], object] = lambda: None) -> None:
        self._wake = wake
        self._before = before
        self._queue: queue.SimpleQueue[Callable[[], Callable[[], None]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open = 0
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Do `work` in the thread; `take` then calls `done` with what it returned or raised."""

        def run() -> Callable[[], None]:
            result: T | Exception
            try:
                self._before()
                result = work()
            except Exception as error:  # noqa: BLE001  (the caller knows which errors there are)
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
        """Call `done` for each piece of work that is finished, in the calling thread (the loop's)."""
        while not self._done.empty():
            self._open -= 1
            self._done.get()()

    def close(self, seconds: float) -> bool:
        """Do the work that is left, waiting at most so long; return whether all is done.  Results are not taken."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (work := self._queue.get()) is not None:
            self._done.put(work())
            self._wake()
