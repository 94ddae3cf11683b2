"""How far a job is and how fast, as its members say with every heartbeat. Nobody need know it who follows us."""

from __future__ import annotations

import time

from pslite.coordinator.job import Voice
from pslite.coordinator.job_state import Record, Seated
from pslite.job.load_balancing import LoadBalancer
from pslite.net.messages import Alive, Beat

#: the window over which speed is measured
_SPEED_SECONDS = 10.0


class Progress:
    """Measures a job.

    Parameters
    ----------
    record, voice
        the job's.
    balance
        takes what is measured of each member.

    """

    def __init__(self, record: Record, voice: Voice, balance: LoadBalancer) -> None:
        self._record = record
        self._voice = voice
        self._balance = balance
        #: of the last steps; None if nobody has said
        self.loss: float | None = None
        #: times, monotonic, in seconds, and versions
        self._speed: list[tuple[float, int]] = []
        self._said_epoch = 0

    def rate(self) -> float | None:
        """Return steps per second; None if they are not known yet."""
        if len(self._speed) < 2 or self._speed[-1][0] <= self._speed[0][0]:
            return None
        return (self._speed[-1][1] - self._speed[0][1]) / (self._speed[-1][0] - self._speed[0][0])

    def resized(self) -> None:
        """What was measured so far belongs to another size."""
        del self._speed[:-1]

    def begin_again(self) -> None:
        """The job goes back to an earlier version."""
        self._speed.clear()
        record = self._record
        if record.spec is not None and not record.spec.open:
            self._said_epoch = record.version // record.spec.steps_per_epoch

    def beat(self, member: Seated, message: Beat) -> None:
        """Answer a heartbeat, and take what it says."""
        record = self._record
        member.channel.send(Alive())
        if not record.takes_part(member):
            return
        member.steps = message.steps or member.steps
        self._balance.note(member.task, message.pace, message.steps)
        if message.samples:
            self.loss = message.loss / message.samples
        if message.version > record.version:
            record.version = message.version
            now = time.monotonic()
            self._speed.append((now, record.version))
            while self._speed[0][0] < now - _SPEED_SECONDS:
                self._speed.pop(0)
            if record.spec is not None and not record.spec.open:
                epoch = record.version // record.spec.steps_per_epoch
                if epoch > self._said_epoch:
                    self._said_epoch = epoch
                    loss = "" if self.loss is None else f", loss {self.loss:.4f}"
                    self._voice.say(f"epoch {epoch} of {record.spec.epochs} done (version {record.version}{loss})")
