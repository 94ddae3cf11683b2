"""Ending jobs in two steps, without waiting in between: SIGTERM now, scancel once the grace is over.

Deadlines are in memory only. After a restart the daemon finds what it meant to stop in its store and stops it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import structlog

from dl2d.core.errors import Denied, Unavailable
from dl2d_slurm.commands import Answer, Commands, failure

log = structlog.get_logger(__name__)

_HANDLE = re.compile(r"[0-9]{1,18}")
#: What scancel says of jobs that have ended or never were.
_OVER = re.compile(r"invalid job id|already complet|job/step already|job not found|no such process", re.IGNORECASE)
#: Ids in one call: well below the limit on the length of a command line.
_BATCH = 500


@dataclass(frozen=True, slots=True)
class Leaving:
    """A job that was asked to end: when it is to be cancelled, and whether Slurm took the request."""

    deadline: float
    asked: bool = False


class Stopper:
    """Ends jobs gracefully. ``clock`` gives seconds since 1970."""

    def __init__(self, commands: Commands, clock: Callable[[], float]) -> None:
        self._commands = commands
        self._clock = clock
        self._leaving: dict[str, Leaving] = {}

    def stop(self, handles: Iterable[str], grace: float) -> None:
        """Ask jobs to end; see ``ResourceManager.stop``. A repeat may bring a deadline forward, never put it off."""
        ids = []
        for handle in dict.fromkeys(handles):
            if _HANDLE.fullmatch(handle):
                ids.append(handle)
            else:
                log.warning("not a handle of this resource manager; passed over", handle=handle[:80])
        if grace <= 0:
            self._cancel(ids)
            for handle in ids:
                self._leaving.pop(handle, None)
            return
        deadline = self._clock() + grace
        for handle in ids:
            known = self._leaving.get(handle, Leaving(deadline))
            # Noted before Slurm is asked: whatever becomes of the request, the end comes in time.
            self._leaving[handle] = replace(known, deadline=min(known.deadline, deadline))
        fresh = [handle for handle in ids if not self._leaving[handle].asked]
        # Of a job that waits there is no process to signal; scancel would try for a minute. The filters make it look
        # at the states itself, once for all ids.
        self._scancel("--state=PENDING", ids=fresh)
        # Only the batch script, which is the task itself: what it started is its own to end.
        self._scancel("--state=RUNNING", "--signal=TERM", "--batch", ids=fresh)
        for handle in fresh:
            self._leaving[handle] = replace(self._leaving[handle], asked=True)

    def cancel_due(self) -> bool:
        """Cancel what has outlived its grace; whether there was any. Trouble is logged: the next call tries again."""
        now = self._clock()
        due = [handle for handle, leaving in self._leaving.items() if leaving.deadline <= now]
        if not due:
            return False
        try:
            self._cancel(due)
        except (Unavailable, Denied) as error:
            log.warning("cannot cancel what has outlived its grace", handles=due[:20], error=str(error))
            return False
        log.info("cancelled what had outlived its grace", handles=due[:20], count=len(due))
        for handle in due:
            del self._leaving[handle]
        return True

    def forget_all_but(self, alive: Collection[str]) -> None:
        """Forget the deadlines of jobs that have ended."""
        for handle in [handle for handle in self._leaving if handle not in alive]:
            del self._leaving[handle]

    def _cancel(self, ids: list[str]) -> None:
        self._scancel(ids=ids)

    def _scancel(self, *options: str, ids: list[str]) -> None:
        for first in range(0, len(ids), _BATCH):
            _judge(self._commands.run("scancel", *options, *ids[first : first + _BATCH]))


def _judge(answer: Answer) -> None:
    """Raise or log what scancel complains of, unless it is that a job has ended already."""
    complaints = [line for line in answer.stderr.splitlines() if line.strip() and not _OVER.search(line)]
    if answer.status == 0 or (not complaints and answer.stderr.strip()):
        return
    error = failure("scancel", replace(answer, stderr="\n".join(complaints)))
    if isinstance(error, Unavailable | Denied):
        raise error
    log.warning("scancel complains", error=str(error))
