"""Deduplication of heartbeats: one that is repeated, or overtaken by a later one of the same process, is ignored.

A heartbeat that somebody has recorded must neither be counted again nor set a job's address back.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from dl2d.core.jobs import JobKey

#: Processes of a job that are remembered (a job has one coordinator, and a new one after each death), and jobs.
_MAX_SENDERS, _MAX_JOBS = 64, 100_000


class TakenHeartbeats:
    """The number of the last heartbeat of each process that sends some; safe for threads.

    It is kept in memory: of a daemon that has just started, a heartbeat is taken that the daemon before took already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: OrderedDict[JobKey, OrderedDict[str, int]] = OrderedDict()

    def take(self, job: JobKey, sender: str, number: int) -> bool:
        """Note a heartbeat; false if it, or a later one of this process, was noted before."""
        if not sender:
            return True
        with self._lock:
            senders = self._last.setdefault(job, OrderedDict())
            self._last.move_to_end(job)
            if number <= senders.get(sender, -1):
                return False
            senders[sender] = number
            senders.move_to_end(sender)
            if len(senders) > _MAX_SENDERS:
                senders.popitem(last=False)
            if len(self._last) > _MAX_JOBS:
                self._last.popitem(last=False)
        return True
