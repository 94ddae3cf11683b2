"""Answered heartbeats: since when each coordinator was answered without a gap, and which were told that they ended."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from dl2d.core.jobs import JobKey

#: Jobs that are remembered.
_MAX_JOBS = 100_000


class AnsweredHeartbeats:
    """Since when the heartbeats of each job have been answered without a gap of ``silent_seconds``; safe for threads.

    Ticks see only a coordinator's last call. While the store is locked or this process stands still, no heartbeat is
    answered and no tick sees that. ``timer`` gives seconds on the monotonic clock of ticks.
    """

    def __init__(
        self, timer: Callable[[], float] = time.monotonic, silent_seconds: Callable[[], float] = lambda: 60.0
    ) -> None:
        self._timer, self._silent_seconds = timer, silent_seconds
        self._lock = threading.Lock()
        #: By job, since when, and the last answer.
        self._answered: OrderedDict[JobKey, tuple[float, float]] = OrderedDict()

    def note(self, job: JobKey) -> None:
        """Note an answer."""
        with self._lock:
            now = self._timer()
            since, last = self._answered.pop(job, (now, now))
            self._answered[job] = (since if now - last <= self._silent_seconds() else now, now)
            if len(self._answered) > _MAX_JOBS:
                self._answered.popitem(last=False)

    def since(self, job: JobKey) -> float | None:
        """Since when without a gap; None if none of its heartbeats was answered."""
        with self._lock:
            answered = self._answered.get(job)
        return None if answered is None else answered[0]


class EndedJobs:
    """Jobs that have ended and have sent a heartbeat since; in memory, and safe for threads.

    Their users still have their credentials, and an array of short jobs leaves hundreds of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The uids of their users, by job.
        self._ended: OrderedDict[str, int] = OrderedDict()

    def add(self, slug: str, uid: int) -> None:
        """Remember a job of a user."""
        with self._lock:
            self._ended[slug] = uid
            if len(self._ended) > _MAX_JOBS:
                self._ended.popitem(last=False)

    def owner(self, slug: str) -> int | None:
        """The uid of the user of a job that has ended; None of others, and where it is not remembered."""
        with self._lock:
            return self._ended.get(slug)
