"""Control connections that outlive their sockets: every counted message is taken once, in order."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pslite.errors import ProtocolError
from pslite.net.message_framing import Channel, Inbox
from pslite.net.messages import MAX_CONTROL_BYTES, Alive, Exit, FromCoordinator
from pslite.net.reliable_channel import ReliableChannel


class Ends:
    """Two reliable channels, and connections between them that may be lost at any time."""

    def __init__(self):
        self.lines = [ReliableChannel(), ReliableChannel()]
        self.taken = [[], []]
        self.channels = []
        self.connect()

    def connect(self):
        self.cut()
        self.channels = [
            Channel(sock, Inbox(FromCoordinator, MAX_CONTROL_BYTES)) for sock in socket.socketpair(socket.AF_UNIX)
        ]
        counts = [line.taken for line in self.lines]
        for line, channel, other in zip(self.lines, self.channels, reversed(counts), strict=True):
            line.attach(channel, other)
            line.release()

    def cut(self):
        for line, channel in zip(self.lines, self.channels, strict=False):
            line.detach()
            channel.close()

    def read(self, side):
        """Take what has come; confirm it, or not."""
        messages, _ = self.channels[side].receive()
        for message in messages:
            if self.lines[side].take(message):
                self.taken[side].append(message.reason)


@given(steps=st.lists(st.tuples(st.sampled_from(["send", "chat", "read", "confirm", "cut"]), st.booleans())))
def test_each_counted_message_is_taken_once_in_order_whatever_becomes_of_connections(steps):
    ends = Ends()
    sent = [[], []]
    for what, side in steps:
        line = ends.lines[side]
        if what == "send":
            sent[side].append(str(len(sent[side])))
            line.send(Exit(reason=sent[side][-1]))
            line.release()
        elif what == "chat":
            line.send(Alive())
            line.release()
        elif what == "read":
            ends.read(side)
        elif what == "confirm":
            ends.lines[1 - side].confirm(line.taken)
        else:
            ends.connect()
    ends.connect()
    for side in (0, 1):
        ends.read(side)
    assert ends.taken == [sent[1], sent[0]]
    ends.cut()


@pytest.mark.parametrize("count", [-1, 1, 4])
def test_what_was_not_sent_cannot_be_confirmed(count):
    line = ReliableChannel(confirmed=2, unconfirmed=[Exit(reason="x")])
    with pytest.raises(ProtocolError, match=f"confirms {count} messages, but 2 were confirmed before and 3 were sent"):
        line.confirm(count)
