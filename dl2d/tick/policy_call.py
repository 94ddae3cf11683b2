"""A time limit on a policy, which may never come back: a learned one can hang in its library as well as fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
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
