"""Memory of recent heartbeats: which were taken, what ticks need of the last ones, and whose jobs sent some.

One that is repeated, or overtaken by a later one of the same process, is ignored: a heartbeat that somebody has
recorded must neither be counted again nor set a job's address back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from dl2d.core.jobs import JobKey
from dl2d.daemon.api.limited_size_dict import NewestEntries
from dl2d.tick.tick_context import LastHeartbeat

#: Jobs that are remembered, and processes of a job: it has one coordinator, and a new one after each death.
_MAX_JOBS, _MAX_SENDERS = 100_000, 64
_NONE = LastHeartbeat()


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
        self._answered = NewestEntries[JobKey, LastHeartbeat](_MAX_JOBS)

    def note(self, job: JobKey, starting: Collection[str] | None = None, *, ending: bool = False) -> None:
        """Note an answer, to a heartbeat with these tasks that are starting; ``ending``: its training is done."""
        with self._lock:
            now = self._timer()
            before = self._answered.get(job, _NONE)
            after_gap = before.since is not None and now - before.at > self._silent_seconds()
            since = now if before.since is None or after_gap else before.since
            starts = None if starting is None else frozenset(starting)
            self._answered[job] = LastHeartbeat(since, now, starts, ending, after_gap)

    def last(self, job: JobKey) -> LastHeartbeat:
        """The last heartbeat of a job."""
        with self._lock:
            return self._answered.get(job, _NONE)


class JobOwners:
    """Whose jobs have sent a heartbeat, and which of them had ended by then; in memory, and safe for threads.

    Users still have the credentials of jobs that have ended, and an array of short jobs leaves hundreds of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By job, the uid of its user and whether it has ended.
        self._jobs = NewestEntries[str, tuple[int | None, bool]](_MAX_JOBS)

    def note(self, slug: str, uid: int, *, ended: bool) -> None:
        """Remember a job of a user."""
        with self._lock:
            self._jobs[slug] = uid, ended

    def of(self, slug: str) -> tuple[int | None, bool]:
        """The uid of a job's user, None where it is not remembered, and whether the job is known to have ended."""
        with self._lock:
            return self._jobs.get(slug, (None, False))


class TakenHeartbeats:
    """The number of the last heartbeat of each process that sends some; safe for threads.

    It is kept in memory: of a daemon that has just started, a heartbeat is taken that the daemon before took already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = NewestEntries[JobKey, NewestEntries[str, int]](_MAX_JOBS)

    def take(self, job: JobKey, sender: str, number: int) -> bool:
        """Note a heartbeat; false if it, or a later one of this process, was noted before."""
        if not sender:
            return True
        with self._lock:
            self._last[job] = senders = self._last.get(job) or NewestEntries(_MAX_SENDERS)
            if number <= senders.get(sender, -1):
                return False
            senders[sender] = number
        return True
