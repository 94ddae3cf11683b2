"""The interpreter's search for cycles of garbage, kept out of what has to be fast."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def waiting() -> Iterator[None]:
    """Have it wait until what has to be fast is over: it stops everything, for milliseconds, at any allocation.

    Meanwhile what nothing refers to is freed as ever, but for cycles.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def leave_out_what_is_there() -> None:
    """Have what there is now, which stays, not gone through again: that would stop a tick for 70 ms now and then."""
    gc.collect()
    gc.freeze()
