"""Calls of a policy: with a time limit, and without pauses by Python's cyclic garbage collector.

A learned policy may not only fail but hang in its library, and a garbage collection may stop all threads for
milliseconds.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

from dl2d.core.errors import PolicyError

T = TypeVar("T")


def call_directly(work: Callable[[], T]) -> T:
    """Call ``work`` without a time limit, in a simulator, where results must not depend on the machine's speed."""
    return work()


class Deadline:
    """Calls functions with a time limit, one at a time, each in a thread of its own.

    A thread cannot be stopped from outside. One that exceeds the limit is abandoned, and no further call is begun until
    it has ended: a policy that hangs takes up one thread, not one more in every slot.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._running: Future[object] | None = None

    def __call__(self, work: Callable[[], T]) -> T:
        """Call ``work``; returns what it returns and raises what it raises.

        Raises
        ------
        PolicyError
            The call did not return in time, or an earlier one has not returned yet.
        """
        if self._running is not None and not self._running.done():
            raise PolicyError("an earlier call has not returned yet")
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised again by future.result()
                future.set_exception(error)

        self._running = future  # type: ignore[assignment]
        deadline = time.monotonic() + self._seconds
        threading.Thread(target=run, name="policy", daemon=True).start()
        wait([future], timeout=self._seconds)
        # A policy that does not release Python's global lock also keeps the wait from ending in time.
        if not future.done() or time.monotonic() > deadline:
            raise PolicyError(f"the call did not return within {self._seconds:g} s")
        return future.result()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector, which may stop all threads for milliseconds at any allocation.

    Objects that lose their last reference are still freed; only reference cycles stay until later.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze_startup_objects() -> None:
    """Exclude all objects that exist now from garbage collection: they live as long as the daemon, and a scan of them
    takes 70 ms.
    """
    gc.collect()
    gc.freeze()
