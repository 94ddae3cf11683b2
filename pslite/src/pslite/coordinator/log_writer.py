"""Writer of the coordinator log: decides when the job's state and the gradient norms are written, if there is a log."""

from __future__ import annotations

import time
from collections.abc import Callable

from pslite.coordinator.job_state import Record, decode, encode
from pslite.errors import LogError
from pslite.storage.coordinator_log import CoordinatorLog


class LogWriter:
    """Writes to the log; without one, and once it can no longer be written, nothing is recorded.

    Parameters
    ----------
    log
        the log, closed with this; None for none.
    say
        takes lines for the user.

    """

    def __init__(self, log: CoordinatorLog | None, say: Callable[[str], None]) -> None:
        self._log = log
        self._say = say
        #: of the log, counted from 1; 0 without one
        self.term = log.term if log is not None else 0
        #: whether the state has changed in a way that no counted message shows
        self.changed = False

    @property
    def lasting(self) -> bool:
        """Whether another coordinator could continue the job."""
        return self._log is not None

    def last(self) -> Record | None:
        """Return the state that a coordinator before this one has written; None if there was none."""
        if self._log is None or self._log.state is None:
            return None
        return decode(self._log.state)

    def last_scales(self) -> bytes:
        """Return the gradient norms that it has written; empty if there are none."""
        if self._log is None or self._log.state is None:
            return b""
        return self._log.scales

    def write(self, record: Record) -> None:
        """Write the state if it has changed.

        Raises
        ------
        Fenced
            another coordinator has opened the log since.

        """
        lines = [member.channel for member in record.members.values()]
        if self._log is None or not (self.changed or any(line.changed for line in lines)):
            return
        record.clock = time.monotonic()
        self._attempt(self._log.write, encode(record))
        self.changed = False
        for line in lines:
            line.changed = False

    def write_scales(self, scales: bytes) -> None:
        """Write what servers are told of gradient norms; raises as `write`."""
        if self._log is not None:
            self._attempt(self._log.write_scales, scales)

    def _attempt(self, write: Callable[[bytes], None], data: bytes) -> None:
        """Write; if that fails, go on without a log."""
        try:
            write(data)
        except LogError as error:
            self._say(f"the coordinator's log cannot be written ({error}): the job ends if its coordinator dies")
            self.forget()
            self._log = None

    def check(self) -> None:
        """Check that no other coordinator has opened the log since; raises Fenced if one has."""
        if self._log is not None:
            self._log.check()

    def forget(self) -> None:
        """Delete the log, since no coordinator may continue the job."""
        if self._log is not None:
            self._log.remove()

    def close(self) -> None:
        """Release the log for another coordinator."""
        if self._log is not None:
            self._log.close()
