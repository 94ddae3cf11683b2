"""Standby: waits for the lease on the store, and takes it when the holder ends or stops renewing it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from dl2d.core.errors import AlreadyRunning, Dl2dError, SchemaOutdated
from dl2d.core.store import LeaseSign
from dl2d.daemon.systemd import ServiceManager
from dl2d.store.sql_store import SqlStore

log = structlog.get_logger()

#: How often in a poll interval the holder renews the lease, and a standby looks at it.
_RENEWALS_PER_INTERVAL = 4
#: Maximum seconds between two renewals: a standby whose poll interval is shorter must not take the lease meanwhile.
_MAX_RENEWAL_SECONDS = 1.0
#: Poll intervals without a renewal after which a standby takes the lease: less than two, its next look included.
_SILENT_INTERVALS = 1.5
#: A holder has at least so many seconds to renew the lease, since its machine may be busy.
_MIN_SILENT_SECONDS = 3.0


def renewal_seconds(poll_seconds: float) -> float:
    """Seconds between two renewals of the lease."""
    return min(max(poll_seconds / _RENEWALS_PER_INTERVAL, 0.1), _MAX_RENEWAL_SECONDS)


def lease_seconds(poll_seconds: float) -> float:
    """Seconds from a sign of life of the holder to the time at which a standby may take the lease."""
    return max(_SILENT_INTERVALS * poll_seconds, _MIN_SILENT_SECONDS)


def wait_for_lease(
    store: SqlStore, holder: str, poll_seconds: float, service: ServiceManager, stop: threading.Event
) -> bool:
    """Wait until this process holds the lease; false if ``stop`` came first.

    The holder's signs of life are counted in the store and timed on this process's clock, so the clocks of two machines
    need not agree. A holder that is silent for one and a half poll intervals, at least 3 s, loses the lease: its term
    ends, and whatever it still writes is refused.

    Raises
    ------
    SchemaOutdated
        The store was upgraded meanwhile for another version of dl2d, which has to be started instead of this one.
    """
    silent_after = lease_seconds(poll_seconds)
    # systemd's watchdog must hear of this process in time, too.
    pause = min(renewal_seconds(poll_seconds), (service.watchdog_seconds or 60.0) / 3)
    unreachable = f"standby cannot reach the store; it tries again in {pause:g} s"
    seen: LeaseSign | None = None
    since, status = time.monotonic(), ""
    while not stop.is_set():
        try:
            with suppress(AlreadyRunning):
                store.acquire(holder)
                log.info("standby takes over", reason="the lease was free")
                return True
            sign = store.lease_sign()
            if sign is None or sign != seen:
                seen, since = sign, time.monotonic()
            elif time.monotonic() - since >= silent_after:
                store.acquire(holder, silent=sign)
                log.error(
                    "standby takes over",
                    reason=f"its holder has not renewed the lease for {silent_after:g} s",
                    silent=sign.holder,
                )
                return True
        except AlreadyRunning:
            seen = None  # the holder lives, or another standby was first
        except SchemaOutdated:
            raise
        except Dl2dError as error:
            log.warning(unreachable, error=str(error))
            seen = None
        held_by = f" held by {seen.holder}" if seen is not None else ""
        if not status:
            service.ready(f"standby: waits for the lease{held_by}")
            log.info("standby", holder=seen.holder if seen is not None else "")
        status = f"standby: waits for the lease{held_by}"
        service.alive(status)
        stop.wait(pause)
    return False


class LeaseKeeper:
    """Renews the lease in a thread of its own, whatever the tick is doing, until ``close``."""

    def __init__(self, store: SqlStore, seconds: float, lost: Callable[[AlreadyRunning], None]) -> None:
        """``lost`` is called once when another daemon has taken the lease."""
        self._store, self._seconds, self._lost = store, seconds, lost
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop renewing."""
        self._closed.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        problem = ""
        while not self._closed.wait(self._seconds):
            try:
                self._store.renew_lease()
            except AlreadyRunning as error:
                self._lost(error)
                return
            except Dl2dError as error:
                if str(error) != problem:  # once: a disk may be full for days
                    log.warning("the lease was not renewed", error=str(error))
                problem = str(error)
            else:
                if problem:
                    log.info("the lease is renewed again")
                problem = ""
