"""Data connections of a server: what becomes of one that breaks, and who is let in."""

from __future__ import annotations

import selectors
import socket
from types import SimpleNamespace

import pytest

from pslite.errors import ProtocolError
from pslite.fault_points import FaultPoints
from pslite.net.authentication import TOKEN_BYTES, Identity
from pslite.net.data_frames import Link
from pslite.net.messages import PROTOCOL, Hello, Severed
from pslite.server.connections import Connections
from pslite.server.server_state import ServerState


class Place:
    """Connections of ps-0; the coordinator has always had time enough to say something."""

    def __init__(self, *, needed=True) -> None:
        self.told, self.said = [], []
        self.selector = selectors.DefaultSelector()
        self.ends = []
        state = ServerState("ps-0", self.told.append, self.said.append, FaultPoints(None, "ps-0"))
        identity = Identity(role="ps", task="ps-0", incarnation="x", token=bytes(TOKEN_BYTES), encrypt="none")
        self.connections = Connections(
            state, self.selector, identity, "job", needed=lambda link: needed, opened=lambda link: None
        )
        self.control = SimpleNamespace(late=lambda since, seconds: True, send=self.told.append)

    def peer(self, task="ps-1"):
        """Have a connection to another server; its other end can be cut."""
        ours, theirs = socket.socketpair()
        self.ends.append(theirs)
        link = Link(ours, task, task, "ps")
        self.connections.add_peer(link)
        return link, theirs

    def serve(self, link, receiver=None):
        self.connections.serve(link, selectors.EVENT_READ, receiver)

    def close(self):
        self.connections.close()
        self.selector.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def place():
    made = Place()
    yield made
    made.close()


def test_a_connection_that_stays_broken_is_reported_once(place):
    link, theirs = place.peer()
    theirs.close()
    place.serve(link)
    assert not link.open
    assert place.connections.peers == {}
    place.connections.report_broken(place.control)
    place.connections.report_broken(place.control)
    assert place.told == [Severed(task="ps-1", reason="ps-0: ps-1 closed its connection")]


def test_one_over_which_nothing_comes_or_goes_is_not_reported():
    place = Place(needed=False)
    link, theirs = place.peer()
    theirs.close()
    place.serve(link)
    place.connections.report_broken(place.control)
    assert place.told == []
    place.close()


def test_one_of_a_member_that_is_gone_is_not_reported_and_it_is_let_in_no_more(place):
    link, _ = place.peer()
    place.connections.give_up(["ps-1"])
    assert not link.open
    place.connections.note_missing("ps-1")
    place.connections.report_broken(place.control)
    assert place.told == []
    hello = {"protocol": PROTOCOL, "role": "ps", "incarnation": "y", "nonce": b""}
    verdict = place.connections._verdict
    assert verdict(Hello(channel="data", task="ps-1", **hello)) == "ps-1 was given up"
    assert verdict(Hello(channel="data", task="ps-2", **hello)) == ""
    assert "data connections only" in verdict(Hello(channel="control", task="ps-2", **hello))


def test_who_violates_the_protocol_is_cut_off(place):
    link, theirs = place.peer()

    def payload(link, header):
        raise ProtocolError("a frame of kind 3 does not belong here")

    theirs.sendall(b"no header" * 20)
    place.serve(link, SimpleNamespace(payload=payload))
    assert not link.open
    assert place.said == ["closed the connection of ps-1: a data frame does not begin with a valid header"]


def test_a_second_connection_takes_the_place_of_the_first(place):
    first, _ = place.peer()
    second, _ = place.peer()
    assert not first.open
    assert place.connections.peers == {"ps-1": second}


def test_what_a_full_socket_does_not_take_is_sent_when_it_can_take_more(place):
    link, theirs = place.peer()
    data = memoryview(bytes(8 << 20))
    header = SimpleNamespace(pack=lambda: b"")
    link.send(header, data)
    place.connections.flush()
    assert link.unsent
    (key,) = [key for key in place.selector.get_map().values() if key.data is link]
    assert key.events == selectors.EVENT_READ | selectors.EVENT_WRITE
    got = 0
    while got < len(data):
        place.connections.serve(link, selectors.EVENT_WRITE, None)
        got += len(theirs.recv(1 << 20))
    place.connections.flush()
    (key,) = [key for key in place.selector.get_map().values() if key.data is link]
    assert key.events == selectors.EVENT_READ
