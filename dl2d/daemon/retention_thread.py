"""Deletes rows that are older than the site keeps them, in a thread beside the ticks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from dl2d.core.errors import Dl2dError
from dl2d.core.store import RetentionTimes
from dl2d.store.sql_store import SqlStore

log = structlog.get_logger()

#: Seconds from one deletion of old rows to the next.
PRUNE_SECONDS = 3600.0


def prune(store: SqlStore, keep: RetentionTimes, clock: Callable[[], float], stop: threading.Event) -> None:
    """Delete all rows that are too old, in steps; after each step it pauses as long, so that others can write.

    ``clock`` gives seconds since 1970. An error is logged; the next call goes on from there.
    """
    deleted, now = 0, clock()
    try:
        while not stop.is_set():
            begin = time.monotonic()
            step = store.prune(keep, now)
            if not step:
                break
            deleted += step
            stop.wait(time.monotonic() - begin)
    except Dl2dError as error:
        log.warning("old rows were not deleted", error=str(error), kind=type(error).__name__)
    if deleted:
        log.info("old rows deleted", rows=deleted, store_bytes=store.size())
