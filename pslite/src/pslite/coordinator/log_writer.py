"""Coordinator log: what is written when, and its format (JSON of the job's state)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from pslite.coordinator.coordinator_context import Job
from pslite.coordinator.job_state import JobState
from pslite.errors import LogError
from pslite.net.messages import Clip, FromCoordinator, Message, Trust
from pslite.net.reliable_channel import ReliableChannel
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

    def last_state(self) -> JobState | None:
        """Return the state that a coordinator before this one has written; None if there was none."""
        if self._log is None or self._log.state is None:
            return None
        return decode(self._log.state)

    def last_factors(self) -> dict[str, Clip | Trust]:
        """Return what that coordinator has told servers to scale a step by; empty if it has told them nothing."""
        if self._log is not None and self._log.state is not None and self._log.scales:
            with contextlib.suppress(msgspec.MsgspecError):
                return msgspec.msgpack.decode(self._log.scales, type=dict[str, Clip | Trust])
        return {}

    def write(self, job: Job) -> None:
        """Write what has changed.

        Raises
        ------
        Fenced
            another coordinator has opened the log since.

        """
        if self._log is not None and job.factors_changed:
            self._attempt(self._log.write_scales, msgspec.msgpack.encode(job.factors))
        job.factors_changed = False
        lines = [member.channel for member in job.state.members.values()]
        if self._log is None or not (self.changed or any(line.changed for line in lines)):
            return
        job.state.clock = time.monotonic()
        self._attempt(self._log.write, encode(job.state))
        self.changed = False
        for line in lines:
            line.changed = False

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


class _Entry(msgspec.Struct):
    """A state as it is written: unconfirmed messages, each once although several members have to be sent it."""

    letters: list[msgspec.Raw]
    record: msgspec.Raw


#: of a reliable channel: messages taken, messages confirmed, places of the unconfirmed ones in `_Entry.letters`
_Counts = tuple[int, int, list[int]]


def encode(state: JobState) -> bytes:
    """Return a state as JSON, without line breaks."""
    places: dict[int, int] = {}
    letters: list[msgspec.Raw] = []

    def counts(line: object) -> _Counts:
        assert isinstance(line, ReliableChannel)
        return line.taken, line.confirmed, [places[id(message)] for message in line.unconfirmed]

    encoder = msgspec.json.Encoder(enc_hook=counts)
    for member in state.members.values():
        for message in member.channel.unconfirmed:
            if id(message) not in places:
                places[id(message)] = len(letters)
                letters.append(msgspec.Raw(encoder.encode(message)))
    return encoder.encode(_Entry(letters, msgspec.Raw(encoder.encode(state))))


def decode(data: bytes) -> JobState:
    """Return the state that was written as `data`; its times are moved to now.

    Raises
    ------
    msgspec.MsgspecError
        it is not one.

    """
    entry = msgspec.json.decode(data, type=_Entry)
    letters: list[Message] = [msgspec.json.decode(letter, type=FromCoordinator) for letter in entry.letters]

    def line(kind: type, counts: Any) -> Any:
        assert kind is ReliableChannel
        taken, confirmed, unconfirmed = msgspec.convert(counts, _Counts)
        return ReliableChannel(taken, confirmed, [letters[place] for place in unconfirmed])

    state = msgspec.json.decode(entry.record, type=JobState, dec_hook=line)
    state.shift_times(time.monotonic() - state.clock)
    for member in state.members.values():
        # it has the time of a lease to come back
        member.heard, member.lost, member.lost_how = state.clock, 0.0, ""
    return state
