"""A control connection that outlives its connections: every counted message is taken once, in order.

Both sides count what they send and what they take, so that nothing of it travels with a message.  What the other side
has not confirmed is kept.  On a new connection each tells the other how many it has taken, and gets the rest again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from pslite.errors import ProtocolError
from pslite.net.message_framing import Channel
from pslite.net.messages import UNCOUNTED, Message


def counts(message: Message) -> bool:
    """Whether a message has to arrive; others may get lost with a connection."""
    return not isinstance(message, UNCOUNTED)


class ReliableChannel:
    """One side of it.

    Parameters
    ----------
    taken
        counted messages of the other side that are taken.
    confirmed
        counted messages of this side of which the other one has said that it has taken them.
    unconfirmed
        those after them.

    """

    def __init__(self, taken: int = 0, confirmed: int = 0, unconfirmed: Iterable[Message] = ()) -> None:
        self.taken = taken
        self.confirmed = confirmed
        self.unconfirmed = deque(unconfirmed)
        #: whether messages were counted since it was last set to False, so that the log has to be written
        self.changed = False
        self._due: list[Message] = []
        #: what `release_held` sends
        self._held: list[Message] = []
        self._channel: Channel[Any] | None = None

    @property
    def channel(self) -> Channel[Any] | None:
        """The connection, if there is one."""
        return self._channel

    def send(self, message: Message) -> None:
        """Have a message sent by the next `release`, or again when there is a connection."""
        if counts(message):
            self.unconfirmed.append(message)
            self.changed = True
        if self._channel is not None:
            self._due.append(message)

    def send_now(self, message: Message) -> None:
        """Send a message at once, unnumbered: it does not depend on the recorded state and may be lost."""
        if self._channel is not None:
            self._channel.send(message)

    def hold(self) -> None:
        """Hold the messages that are due now for the next `release_held`; those that become due later are not in it."""
        self._held += self._due
        self._due = []

    def release(self) -> None:
        """Send what is due."""
        self.hold()
        self.release_held()

    def release_held(self) -> None:
        """Send the messages that are held."""
        held, self._held = self._held, []
        if self._channel is not None:
            for message in held:
                self._channel.send(message)

    def take(self, message: Message) -> bool:
        """Count a message that has come; returns whether it is one that counts."""
        counted = counts(message)
        if counted:
            self.taken += 1
            self.changed = True
        return counted

    def confirm(self, count: int) -> None:
        """Forget what the other side has taken.

        Raises
        ------
        ProtocolError
            it says that it has taken what was never sent, or less than before.

        """
        if not 0 <= count - self.confirmed <= len(self.unconfirmed):
            sent = self.confirmed + len(self.unconfirmed)
            raise ProtocolError(
                f"the other side confirms {count} messages, but {self.confirmed} were confirmed before and {sent} "
                "were sent"
            )
        while self.confirmed < count:
            self.unconfirmed.popleft()
            self.confirmed += 1

    def attach(self, channel: Channel[Any], taken: int, greeting: Iterable[Message] = ()) -> None:
        """Go on over a new connection, whose other side has taken so many; the `greeting` goes before all else."""
        self.confirm(taken)
        self._channel = channel
        self._due, self._held = [*greeting, *self.unconfirmed], []

    def detach(self) -> None:
        """The connection is lost."""
        self._channel = None
        self._due.clear()
        self._held.clear()
