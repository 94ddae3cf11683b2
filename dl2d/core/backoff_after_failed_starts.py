"""Failed attempts to start the tasks of a job, and how long the next attempt waits after them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

#: Maximum seconds between two attempts to start a job's tasks.
MAX_BACKOFF_SECONDS = 600.0


def doubled(seconds: float, failures: int, most: float) -> float:
    """A delay that is ``seconds`` after the first failure in a row, and twice as long after each further one."""
    return min(seconds * 2.0 ** min(max(failures - 1, 0), 30), most)


#: Which field of ``StartFailures`` counts an attempt.
AttemptKind = Literal["own", "from_outside", "only_delaying"]


class StartFailures(NamedTuple):
    """Consecutive attempts to start tasks of a job that were refused, or whose tasks ended before they joined it."""

    #: Attempts in which tasks ended, or that the resource manager refused since it never starts such tasks, or in which
    #: the start of the job's anchor ended with an unexpected error; so many (``Timeouts.start_failures``) end the job.
    own: int = 0
    #: How the last attempt ended.
    last: str = ""
    #: When the last attempt ended, seconds since 1970.
    at: float = 0.0
    #: Attempts in which tasks were ended from outside, or the resource manager lost tasks that waited. They delay the
    #: next one, and count less, since the job may not have caused them.
    from_outside: int = 0
    #: Attempts that only delay the next one: the resource manager refused the starts, tasks were preempted, the job was
    #: training, or the start of its anchor ended with an error of the daemon's machine.
    only_delaying: int = 0

    def after(self, kind: AttemptKind, last: str, at: float) -> StartFailures:
        """These failures and one more attempt, which ended as ``last`` says."""
        count: dict[str, Any] = {kind: getattr(self, kind) + 1}
        return self._replace(last=last, at=at, **count)

    @property
    def counted(self) -> int:
        """Number of attempts that count towards the end of the job: all of the first kind, a tenth of the second."""
        return self.own + self.from_outside // 10

    @property
    def in_a_row(self) -> int:
        """Number of attempts of all kinds."""
        return self.own + self.from_outside + self.only_delaying

    def retry_at(self, backoff_seconds: float) -> float:
        """When the next attempt may begin: after ``backoff_seconds``, doubled with each further failure.

        Never later than ``MAX_BACKOFF_SECONDS`` after the failure.
        """
        return self.at + doubled(backoff_seconds, self.in_a_row, MAX_BACKOFF_SECONDS)
