"""How a coordinator speaks: to members, to the user, and to its director."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from pslite.coordinator.job_state import Record
from pslite.net.messages import JobEnded, Message


class Voice:
    """Speaks for a job's coordinator.

    Parameters
    ----------
    record
        the job's.
    say
        takes lines for the user.

    """

    def __init__(self, record: Record, say: Callable[[str], None]) -> None:
        self._record = record
        self.say = say
        #: whether something has changed that the director is to be told at once
        self.urgent = True

    def tell(self, tasks: Iterable[str], message: Message) -> None:
        """Send a message to those members that have not left, when all is written down that it follows from."""
        for task in tasks:
            member = self._record.members.get(task)
            if member is not None and member.state != "left":
                member.channel.send(message)

    def hurry(self) -> None:
        """Something has changed that the director is to be told at once."""
        self.urgent = True

    def fail(self, reason: str) -> None:
        """The job has failed."""
        self.end("failed", reason)

    def end(self, state: Literal["failed", "cancelled"], reason: str) -> None:
        """The job ends before it has reached its last version."""
        record = self._record
        record.state = state
        record.reason = reason
        self.say(f"job {state}: {reason}")
        self.tell(record.members, JobEnded(reason=reason))
        record.final = True
