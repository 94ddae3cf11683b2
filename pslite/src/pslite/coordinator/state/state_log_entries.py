"""Coordinator log: what is written when, and its format (JSON of the job's state)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pslite.coordinator.state.coordinator_context import Job, StepRecord
from pslite.coordinator.state.job_state import JobState
from pslite.errors import LogError
from pslite.net.messages import FromCoordinator, Message
from pslite.net.reliable_channel import ReliableChannel
from pslite.storage.coordinator_log import CoordinatorLog
from pslite.storage.disk_thread import CLOSE_SECONDS, DiskThread


@dataclass(eq=False)
class LogWriter:
    """Writes the job's state to the log, in a thread of its own.

    Messages that follow from a state are sent when that state is written: `write` holds them back until then.  Without
    a log, or once it cannot be written, they are sent at once and nothing is recorded.
    """

    #: the log, closed with this; None for none
    log: CoordinatorLog | None
    #: takes lines for the user
    say: Callable[[str], None]
    #: the thread, which wakes the loop after each write, so that it calls `write` again
    disk: DiskThread = field(default_factory=DiskThread)
    #: whether the state has changed in a way that no counted message shows
    changed: bool = False
    #: what to do when the present state is written
    _then: list[Callable[[], None]] = field(default_factory=list)
    #: what to do when the state that is being written is written
    _held: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        #: of the log, counted from 1; 0 without one
        self.term = self.log.term if self.log is not None else 0

    @property
    def lasting(self) -> bool:
        """Whether another coordinator could continue the job."""
        return self.log is not None

    def last_state(self) -> JobState | None:
        """Return the state that a coordinator before this one has written; None if there was none."""
        if self.log is None or self.log.state is None:
            return None
        return decode(self.log.state)

    def last_step_record(self) -> StepRecord:
        """Return the step record that that coordinator has written; an empty one if it has written none."""
        if self.log is not None and self.log.state is not None and self.log.step_record:
            with contextlib.suppress(msgspec.MsgspecError):
                return msgspec.msgpack.decode(self.log.step_record, type=StepRecord)
        return StepRecord()

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` when the present state is written."""
        self._then.append(action)

    def write(self, job: Job, channels: Collection[ReliableChannel]) -> None:
        """Send the messages that follow from the state written last, and begin to write the state if it has changed.

        While a write goes on, no other one is begun; the first call after its end begins the next.

        Parameters
        ----------
        job
            the job.
        channels
            hold the messages that follow from its state.

        Raises
        ------
        Fenced
            another coordinator has opened the log since.

        """
        self.disk.take()
        if self.disk.busy:
            return
        self._send_held(channels)
        for channel in channels:
            channel.hold()
        self._held, self._then = self._then, []
        if not self._begin(job):
            self._send_held(channels)

    def _send_held(self, channels: Iterable[ReliableChannel]) -> None:
        for channel in channels:
            channel.release_held()
        held, self._held = self._held, []
        for action in held:
            action()

    def _begin(self, job: Job) -> bool:
        """Begin to write the state if it has changed; return whether it has."""
        step_record = msgspec.msgpack.encode(job.step_record) if job.step_record_changed else None
        job.step_record_changed = False
        channels = [member.channel for member in job.state.members.values()]
        changed = self.changed or any(channel.changed for channel in channels)
        log = self.log
        if log is None or not (changed or step_record is not None):
            return False
        state = None
        if changed:
            job.state.clock = time.monotonic()
            state = encode(job.state)
            self.changed = False
            for channel in channels:
                channel.changed = False

        def put_down() -> None:
            if step_record is not None:
                log.write_step_record(step_record)
            if state is not None:
                log.write(state)

        self.disk.submit(put_down, self._written)
        return True

    def _written(self, result: object) -> None:
        """Take the result of a write; if it failed, go on without a log."""
        if isinstance(result, LogError):
            if self.log is not None:
                self.say(f"the coordinator's log cannot be written ({result}): the job ends if its coordinator dies")
            self.forget()
            self.log = None
        elif isinstance(result, Exception):
            raise result

    def check(self) -> None:
        """Check, in the thread, that no other coordinator has opened the log; if one has, `write` raises Fenced."""
        if self.log is not None:
            self.disk.submit(self.log.check, self._written)

    def forget(self) -> None:
        """Delete the log, since no coordinator may continue the job."""
        if self.log is not None:
            self.disk.submit(self.log.remove, lambda _: None)

    def close(self) -> None:
        """Release the log for another coordinator when all is written, or after `CLOSE_SECONDS`."""
        if self.log is not None:
            self.disk.submit(self.log.close, lambda _: None)
        self.disk.close(CLOSE_SECONDS)


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
