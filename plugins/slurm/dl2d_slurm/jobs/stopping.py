"""Ending jobs in two steps, without waiting in between: SIGTERM now, scancel once the grace is over.

Ids are given again, so the identity of a job is read anew before each scancel. Deadlines are in memory only; a thread
keeps them, since the next tick may be many minutes away. After a restart the daemon finds what it meant to stop in its
store and stops it again.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import structlog

from dl2d.core.errors import Denied, ResourceManagerError, Unavailable
from dl2d.core.resource_manager import RmIdentity
from dl2d_slurm.commands.commands import MAX_IDS, Answer, Commands, failure
from dl2d_slurm.commands.squeue_and_sinfo_records import query_jobs
from dl2d_slurm.jobs.squeue_jobs import IDENTITY_FIELDS, identities
from dl2d_slurm.submission.sbatch_backend import JobControl

log = structlog.get_logger(__name__)

_HANDLE = re.compile(r"[0-9]{1,18}")
#: What scancel says of jobs that have ended or never were.
_OVER = re.compile(r"invalid job id|already complet|job/step already|job not found|no such process", re.IGNORECASE)
#: Exit statuses of scancel, the low byte of Slurm's error, which it may leave without a message: invalid job id (2017),
#: and already completing or completed (2021).
_OVER_STATUSES = frozenset({2017 & 255, 2021 & 255})
#: Pause of the thread after Slurm would not cancel.
_RETRY_SECONDS = 5.0


class Stopper:
    """Ends jobs gracefully: asks them to end, and cancels those that have not ended at their deadlines.

    ``timer`` gives seconds on a monotonic clock. A thread of this waits for the deadlines; with a timer that the thread
    cannot wait for, as in tests, ``cancel_due`` has to be called.
    """

    def __init__(self, commands: Commands, control: JobControl, timer: Callable[[], float]) -> None:
        self._commands = commands
        self._control = control
        self._timer = timer
        #: When each job is to be cancelled, and those of which Slurm took the request to end, by their identities
        #: without tags, which their users may change.
        self._deadlines: dict[RmIdentity, float] = {}
        self._asked: set[RmIdentity] = set()
        self._changed = threading.Condition()
        self._cancelling = threading.Lock()
        self._watcher: threading.Thread | None = None
        self._closed = False

    def stop(self, jobs: Iterable[RmIdentity], grace: float) -> None:
        """Ask jobs to end; see ``ResourceManager.stop``. A repeat may bring a deadline forward, never put it off."""
        asked = []
        for job in dict.fromkeys(job._replace(tag="") for job in jobs):
            if _HANDLE.fullmatch(job.handle):
                asked.append(job)
            else:
                log.warning("cannot stop: not the id of a Slurm job", handle=job.handle[:80])
        if grace <= 0:
            self._cancel(asked)
            self._forget(asked)
            return
        fresh = self._note(asked, self._timer() + grace)
        self._terminate(fresh)
        with self._changed:
            self._asked.update(self._deadlines.keys() & fresh)

    def cancel_due(self) -> bool:
        """Cancel what has outlived its grace; whether there was any. Trouble is logged: the next call tries again."""
        # One at a time: the thread and a listing may come upon the same deadline.
        with self._cancelling:
            now = self._timer()
            with self._changed:
                due = [job for job, deadline in self._deadlines.items() if deadline <= now]
            if not due:
                return False
            try:
                cancelled = self._cancel(due)
            except ResourceManagerError as error:
                log.warning("cannot cancel tasks that may still be running after their grace period",
                            handles=[job.handle for job in due[:20]], error=str(error))  # fmt: skip
                return False
            if cancelled:
                log.info("cancelled tasks that were still running after their grace period",
                         handles=cancelled[:20], count=len(cancelled))  # fmt: skip
            self._forget(due)
            return True

    def forget_all_but(self, alive: Iterable[RmIdentity]) -> None:
        """Forget the deadlines of jobs that have ended."""
        alive = {job._replace(tag="") for job in alive}
        with self._changed:
            ended = self._deadlines.keys() - alive
        self._forget(ended)

    def close(self) -> None:
        """End the thread; deadlines that are still to come are not kept any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            watcher = self._watcher
        if watcher is not None:
            watcher.join()

    def _note(self, jobs: Collection[RmIdentity], deadline: float) -> list[RmIdentity]:
        """Note a deadline, before Slurm is asked: whatever becomes of the request, the end comes in time.

        Returns the jobs that have not been asked to end yet.
        """
        with self._changed:
            self._deadlines |= {job: min(self._deadlines.get(job, deadline), deadline) for job in jobs}
            if self._deadlines and self._watcher is None and not self._closed:
                self._watcher = threading.Thread(target=self._watch, name="dl2d-slurm-stopper", daemon=True)
                self._watcher.start()
            self._changed.notify_all()
            return [job for job in jobs if job not in self._asked]

    def _forget(self, jobs: Collection[RmIdentity]) -> None:
        with self._changed:
            for job in jobs:
                self._deadlines.pop(job, None)
            self._asked.difference_update(jobs)

    def _watch(self) -> None:
        """Wait for the next deadline and cancel what it is over for, until closed."""
        while True:
            with self._changed:
                if self._closed:
                    return
                next_deadline = min(self._deadlines.values(), default=None)
                wait = None if next_deadline is None else next_deadline - self._timer()
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
            if not self.cancel_due():
                with self._changed:
                    self._changed.wait(_RETRY_SECONDS)

    def _cancel(self, jobs: Sequence[RmIdentity]) -> list[str]:
        """Cancel those jobs that still have their identity; returns their ids."""
        cancelled = []
        for ids in self._ids_still_valid(jobs):
            _raise_if_unavailable(self._control.cancel(ids))
            cancelled += ids
        return cancelled

    def _terminate(self, jobs: Sequence[RmIdentity]) -> None:
        """Cancel those jobs that wait and send SIGTERM to the batch scripts of those that run.

        A job that waits has no process to signal; scancel would try for a minute. With a state it looks at the states
        itself, once for all ids. The batch script is the task itself: what it started is its own to end.
        """
        for ids in self._ids_still_valid(jobs):
            _raise_if_unavailable(self._control.cancel(ids, state="PENDING"))
            _raise_if_unavailable(self._control.cancel(ids, state="RUNNING", signal="TERM"))

    def _ids_still_valid(self, jobs: Sequence[RmIdentity]) -> Iterator[list[str]]:
        """For up to ``MAX_IDS`` jobs at a time, the ids of those that still have their identity, if there are any."""
        for first in range(0, len(jobs), MAX_IDS):
            if ids := self._ask_ids(jobs[first : first + MAX_IDS]):
                yield ids

    def _ask_ids(self, jobs: Sequence[RmIdentity]) -> list[str]:
        """Ids for scancel of jobs that are still the same: Slurm gives ids again, and requeues jobs under theirs."""
        answer, found = query_jobs(self._commands, IDENTITY_FIELDS, [job.handle for job in jobs])
        if answer.status != 0 and not _OVER.search(answer.stderr):
            error = failure("cannot check the identity of jobs before they are stopped", answer)
            raise error if isinstance(error, Denied) else Unavailable(str(error))
        ids = identities(found, jobs)
        changed = [job.handle for job in jobs if job not in ids]
        if changed:
            log.info("not stopped: ended, or another job has the id now", handles=changed[:20], count=len(changed))
        return [ids[job] for job in jobs if job in ids]


def _raise_if_unavailable(answer: Answer) -> None:
    """Raise ``Unavailable`` if Slurm did not answer; log other errors, but not that a job has ended already.

    They are only logged so that a job which the daemon's account may not end does not prevent others from being ended.
    Later ticks ask again.
    """
    complaints = [line for line in answer.stderr.splitlines() if line.strip() and not _OVER.search(line)]
    if answer.status == 0 or (not complaints and (answer.stderr.strip() or answer.status in _OVER_STATUSES)):
        return
    error = failure("cancelling jobs", replace(answer, stderr="\n".join(complaints)))
    if isinstance(error, Unavailable):
        raise error
    log.warning("Slurm did not cancel a job", error=str(error))
