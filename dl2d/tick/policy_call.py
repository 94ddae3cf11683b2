"""How a policy is called: within a time limit, and without pauses of Python's cyclic garbage collector.

A learned policy can hang in its library as well as fail, and a collection may stop all threads for milliseconds.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from dl2d.core.errors import PolicyError

T = TypeVar("T")


def at_once(work: Callable[[], T]) -> T:
    """No limit: for a simulator, whose answers must not depend on the machine."""
    return work()


class Deadline:
    """Runs one piece of work at a time, in a thread that is left behind where it does not end in time.

    A thread cannot be ended from outside, so while one is left behind nothing new is begun: a policy that hangs costs
    one thread and not one in every slot.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._running: Future[object] | None = None

    def __call__(self, work: Callable[[], T]) -> T:
        """The work's result, or what it raised.

        Raises
        ------
        PolicyError
            It did not end in time, or an earlier one has not ended yet.
        """
        if self._running is not None and not self._running.done():
            raise PolicyError("an earlier call has not come back yet")
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
                future.set_exception(error)

        self._running = future  # type: ignore[assignment]
        threading.Thread(target=run, name="policy", daemon=True).start()
        try:
            return future.result(timeout=self._seconds)
        except TimeoutError:
            if future.done():
                raise
            raise PolicyError(f"it did not come back within {self._seconds:g} s") from None


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector, which may stop all threads for milliseconds at any allocation.

    Objects without references are freed as ever; only cycles wait.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze_startup_objects() -> None:
    """Exclude all objects that exist now from collections: they live as long as the daemon; a scan takes 70 ms."""
    gc.collect()
    gc.freeze()
