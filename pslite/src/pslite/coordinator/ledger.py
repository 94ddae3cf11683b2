"""What a coordinator writes down, if it has a log: the job's record, and what servers were told last of norms."""

from __future__ import annotations

import time
from collections.abc import Callable

from pslite.coordinator.record import Record, decode, encode
from pslite.journal import Journal


class Ledger:
    """Keeps the log; without one, or where it cannot be written any more, nothing is.

    Parameters
    ----------
    journal
        the log, closed with this; None for none.
    say
        takes lines for the user.

    """

    def __init__(self, journal: Journal | None, say: Callable[[str], None]) -> None:
        self._journal = journal
        self._say = say
        #: of the log, counted from 1; 0 without one
        self.term = journal.term if journal is not None else 0
        #: whether something is to be written down that no message shows
        self.changed = False

    @property
    def lasting(self) -> bool:
        """Whether another coordinator can go on with the job."""
        return self._journal is not None

    def last(self) -> Record | None:
        """Return what another coordinator has written down before us; None if there was none."""
        if self._journal is None or self._journal.state is None:
            return None
        return decode(self._journal.state)

    def last_scales(self) -> bytes:
        """Return what that one has noted last; empty if it has noted nothing."""
        if self._journal is None or self._journal.state is None:
            return b""
        return self._journal.scales

    def write(self, record: Record) -> None:
        """Write down what has changed; where that fails, nobody can follow us any more.

        Raises
        ------
        Fenced
            another coordinator has followed us.

        """
        lines = [member.channel for member in record.members.values()]
        if self._journal is None or not (self.changed or any(line.changed for line in lines)):
            return
        record.clock = time.monotonic()
        try:
            self._journal.write(encode(record))
        except OSError as error:
            self._say(
                f"the coordinator's log cannot be written ({error.strerror}): the job ends if its coordinator dies"
            )
            self.forget()
            self._journal = None
        self.changed = False
        for line in lines:
            line.changed = False

    def note(self, scales: bytes) -> None:
        """Write down what servers are told of norms, in the place of what they were told before."""
        if self._journal is not None:
            self._journal.note(scales)

    def check(self) -> None:
        """See whether the log is still ours alone.

        Raises
        ------
        Fenced
            another coordinator has followed us.

        """
        if self._journal is not None:
            self._journal.check()

    def forget(self) -> None:
        """The job is over: nobody may go on with it."""
        if self._journal is not None:
            self._journal.remove()

    def close(self) -> None:
        """Let another one have the log."""
        if self._journal is not None:
            self._journal.close()
