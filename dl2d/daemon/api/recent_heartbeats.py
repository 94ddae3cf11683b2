"""Memory of recent heartbeats: which were taken, what ticks need of the last ones, and whose jobs sent some.

One that is repeated, or overtaken by a later one of the same process, is ignored: a heartbeat that somebody has
recorded must neither be counted again nor set a job's address back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from dl2d.core.jobs import JobKey
from dl2d.daemon.api.limited_size_dict import NewestEntries

#: Jobs that are remembered, and processes of a job: it has one coordinator, and a new one after each death.
_MAX_JOBS, _MAX_SENDERS = 100_000, 64


class _Answered(NamedTuple):
    """The last heartbeat of a job that was answered."""

    #: Since when its heartbeats have been answered without a gap, and when this one was.
    since: float
    last: float
    #: Which of the job's tasks were starting, and whether all were ending, as it said.
    starting: frozenset[str] | None
    ending: bool
    #: Whether it was the first after a gap.
    after_gap: bool


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
        self._answered = NewestEntries[JobKey, _Answered](_MAX_JOBS)

    def note(self, job: JobKey, starting: Collection[str] | None = None, *, ending: bool = False) -> None:
        """Note an answer, to a heartbeat with these tasks that are starting; ``ending``: its training is done."""
        with self._lock:
            now = self._timer()
            before = self._answered.get(job)
            after_gap = before is not None and now - before.last > self._silent_seconds()
            since = now if before is None or after_gap else before.since
            starts = None if starting is None else frozenset(starting)
            self._answered[job] = _Answered(since, now, starts, ending, after_gap)

    def since(self, job: JobKey) -> float | None:
        """Since when without a gap; None if none of its heartbeats was answered."""
        answered = self._last(job)
        return None if answered is None else answered.since

    def starting(self, job: JobKey) -> frozenset[str] | None:
        """Ids of the tasks whose dl2-run had reached the coordinator at its last heartbeat, and that had not joined.

        None if it did not say, or none of its heartbeats was answered.
        """
        answered = self._last(job)
        return None if answered is None else answered.starting

    def ending(self, job: JobKey) -> bool:
        """Whether the job's training was done at its last heartbeat, so that its tasks end."""
        answered = self._last(job)
        return answered is not None and answered.ending

    def after_gap(self, job: JobKey) -> bool:
        """Whether its last heartbeat was the first after a gap: it may have been sent before the gap."""
        answered = self._last(job)
        return answered is not None and answered.after_gap

    def _last(self, job: JobKey) -> _Answered | None:
        with self._lock:
            return self._answered.get(job)


class JobOwners:
    """Whose jobs have sent a heartbeat, and which of them had ended by then; in memory, and safe for threads.

    Users still have the credentials of jobs that have ended, and an array of short jobs leaves hundreds of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By job, the uid of its user and whether it has ended.
        self._jobs = NewestEntries[str, tuple[int, bool]](_MAX_JOBS)

    def note(self, slug: str, uid: int, *, ended: bool) -> None:
        """Remember a job of a user."""
        with self._lock:
            self._jobs[slug] = uid, ended

    def uid(self, slug: str) -> int | None:
        """The uid of a job's user; None where it is not remembered."""
        with self._lock:
            return self._jobs.get(slug, (None, False))[0]

    def has_ended(self, slug: str) -> bool:
        """Whether a job is known to have ended."""
        with self._lock:
            return self._jobs.get(slug, (None, False))[1]


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
