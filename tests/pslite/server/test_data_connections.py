"""Data connections of a server: which are accepted, and what is reported of those that break."""

from __future__ import annotations

import selectors
import socket
from types import SimpleNamespace

import pytest

from pslite.errors import ProtocolError
from pslite.fault_points import FaultPoints
from pslite.net.authentication import TOKEN_BYTES, Identity
from pslite.net.messages import PROTOCOL, Hello, Severed
from pslite.net.tensor_frames import Link
from pslite.server.data_connections import Connections
from pslite.server.server_state import ServerState


class Server:
    """The connections of ps-0; every broken connection has been broken long enough to be reported."""

    def __init__(self, *, needed=True) -> None:
        self.messages, self.lines = [], []
        self.selector = selectors.DefaultSelector()
        self.ends = []
        state = ServerState("ps-0", self.messages.append, self.lines.append, FaultPoints(None, "ps-0"))
        identity = Identity(role="ps", task="ps-0", incarnation="x", token=bytes(TOKEN_BYTES), encrypt="none")
        self.connections = Connections(
            state,
            self.selector,
            identity,
            "job",
            "127.0.0.1",
            is_needed=lambda link: needed,
            on_opened=lambda link: None,
        )
        self.control = SimpleNamespace(late=lambda since, seconds: True, send=self.messages.append)

    def peer(self, task="ps-1"):
        """Return a connection to another server, and the socket at its other end."""
        ours, theirs = socket.socketpair()
        self.ends.append(theirs)
        link = Link(ours, task, task, "ps")
        self.connections.add_opened(link)
        return link, theirs

    def serve(self, link, receiver=None):
        self.connections.serve(link, selectors.EVENT_READ, receiver)

    def close(self):
        self.connections.close()
        self.selector.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def test_a_connection_that_stays_broken_is_reported_once(server):
    link, theirs = server.peer()
    theirs.close()
    server.serve(link)
    assert not link.open
    assert server.connections.opened == {}
    server.connections.check_timeouts(server.control)
    server.connections.check_timeouts(server.control)
    assert server.messages == [Severed(task="ps-1", reason="ps-0: ps-1 closed its connection")]


def test_a_broken_connection_that_is_not_needed_is_not_reported():
    server = Server(needed=False)
    link, theirs = server.peer()
    theirs.close()
    server.serve(link)
    server.connections.check_timeouts(server.control)
    assert server.messages == []
    server.close()


def test_a_connection_to_a_dead_member_is_not_reported_and_the_member_not_accepted_again(server):
    link, _ = server.peer()
    server.connections.drop_dead(["ps-1"])
    assert not link.open
    server.connections.note_missing("ps-1")
    server.connections.check_timeouts(server.control)
    assert server.messages == []
    hello = {"protocol": PROTOCOL, "role": "ps", "incarnation": "y", "nonce": b""}
    refusal = server.connections._refusal
    assert refusal(Hello(channel="data", task="ps-1", **hello)) == "the coordinator has reported ps-1 dead"
    assert refusal(Hello(channel="data", task="ps-2", **hello)) == ""
    assert "it accepts data connections only" in refusal(Hello(channel="control", task="ps-2", **hello))


def test_the_connection_of_a_member_that_violates_the_protocol_is_closed(server):
    link, theirs = server.peer()

    def payload(link, header):
        raise ProtocolError("a frame of kind 3 is not accepted")

    theirs.sendall(b"no header" * 20)
    server.serve(link, SimpleNamespace(payload=payload))
    assert not link.open
    assert server.lines == [
        "closed the connection of ps-1, which violated the protocol: a data frame does not begin with a valid header"
    ]


def test_a_second_connection_takes_the_place_of_the_first(server):
    first, _ = server.peer()
    second, _ = server.peer()
    assert not first.open
    assert server.connections.opened == {"ps-1": second}


def test_bytes_that_a_full_socket_does_not_take_are_sent_when_it_is_writable(server):
    link, theirs = server.peer()
    data = memoryview(bytes(8 << 20))
    header = SimpleNamespace(pack=lambda: b"")
    link.send(header, data)
    server.connections.flush()
    assert link.unsent
    (key,) = [key for key in server.selector.get_map().values() if key.data is link]
    assert key.events == selectors.EVENT_READ | selectors.EVENT_WRITE
    got = 0
    while got < len(data):
        server.connections.serve(link, selectors.EVENT_WRITE, None)
        got += len(theirs.recv(1 << 20))
    server.connections.flush()
    (key,) = [key for key in server.selector.get_map().values() if key.data is link]
    assert key.events == selectors.EVENT_READ
