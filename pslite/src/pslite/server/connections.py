"""Data connections of a server: those that workers and servers open to it, and those that it opens to other servers."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import InitVar, dataclass, field

from pslite.errors import PeerLost, ProtocolError
from pslite.fault_points import FaultPoint
from pslite.net.authentication import Acceptor, Identity
from pslite.net.coordinator_client import CoordinatorClient
from pslite.net.data_frames import Link, Receiver
from pslite.net.data_transport import open_listeners, tune
from pslite.net.framing import cut_off
from pslite.net.handshake_listener import HandshakeListener
from pslite.net.messages import Hello, Severed
from pslite.net.server_connections import ServerConnections
from pslite.server.server_state import ServerState

#: seconds after which the coordinator is told of a broken connection to a member that it has not given up
BROKEN_SECONDS = 3.0


@dataclass(eq=False)
class Connections:
    """Opens, accepts and closes them in a poll loop, and tells the coordinator of those that stay broken."""

    state: ServerState
    #: the loop's; connections are registered with themselves as data
    selector: selectors.BaseSelector
    #: who this server is, with the job's token
    identity: Identity
    #: the job's id
    job: str
    #: whether something comes or goes over a connection that has just broken
    needed: Callable[[Link], bool]
    #: takes a new connection to another server, in the thread that has opened it
    opened: InitVar[Callable[[Link], None]]
    #: where it listens: a port, and the name of a Unix socket
    port: int = field(init=False)
    local: str = field(init=False)
    #: by task, connections that workers and servers opened to this one
    links: dict[str, Link] = field(default_factory=dict)
    #: by task, connections that this one opened to other servers
    peers: dict[str, Link] = field(default_factory=dict)
    #: members that the coordinator has said are gone
    gone: set[str] = field(default_factory=set)
    _all: set[Link] = field(default_factory=set)
    _writing: set[Link] = field(default_factory=set)
    #: members whose connection is broken, since when and how
    _broken: dict[str, tuple[float, str]] = field(default_factory=dict)
    #: members that have violated the protocol
    _violators: set[str] = field(default_factory=set)
    _severed: bool = False

    def __post_init__(self, opened: Callable[[Link], None]) -> None:
        self.connector = ServerConnections(opened, self.state.faults)
        listeners, self.local = open_listeners()
        self.port = int(listeners[0].getsockname()[1])
        self._listeners = [
            HandshakeListener(
                self.selector, listener, acceptor=self._acceptor, welcome=self._welcome, say=self.state.say
            )
            for listener in listeners
        ]

    # --- opening and closing -----------------------------------------------------------------------------------------

    def _acceptor(self) -> Acceptor:
        identity = self.identity
        return Acceptor(
            job=self.job, task=identity.task, incarnation=identity.incarnation, token=identity.token,
            encrypt=identity.encrypt or "none", channel="data", verdict=self._verdict,
        )  # fmt: skip

    def _verdict(self, hello: Hello) -> str:
        if hello.task in self.gone:
            return f"{hello.task} was given up"
        return "" if hello.channel == "data" else "this is a parameter server: it takes data connections only"

    def _welcome(self, sock: socket.socket, hello: Hello) -> None:
        tune(sock)
        if hello.role == "worker" and hello.task not in self._violators:
            self._broken.pop(hello.task, None)  # it has reconnected, and asks for what it lacks
        self._adopt(Link(sock, hello.task, hello.incarnation, hello.role), self.links)

    def add_peer(self, link: Link) -> None:
        """Take up a connection to another server."""
        self._adopt(link, self.peers)

    def _adopt(self, link: Link, links: dict[str, Link]) -> None:
        old = links.get(link.task)
        if old is not None:
            self.drop(old)
        links[link.task] = link
        self.state.faults.reached(FaultPoint.CONNECTION_OPENED, link)
        self._all.add(link)
        self.selector.register(link.sock, selectors.EVENT_READ, link)
        if self._severed:
            cut_off([link.sock])

    def drop(self, link: Link) -> None:
        """Close a connection."""
        if link in self._all:
            self._all.discard(link)
            self._writing.discard(link)
            self.selector.unregister(link.sock)
            link.close()
            for links in (self.links, self.peers):
                if links.get(link.task) is link:
                    del links[link.task]
                    if links is self.peers:
                        self.connector.lost(link)

    def give_up(self, tasks: Collection[str]) -> None:
        """Close the connections of members that are gone, and let them in no more."""
        for task in tasks:
            self._broken.pop(task, None)
            for link in self.of(task):
                self.drop(link)
        self.gone.update(tasks)

    def keep_only(self, *, peers: Collection[str], links: Collection[str]) -> None:
        """Close the connections with all other members."""
        for mine, kept in ((self.peers, peers), (self.links, links)):
            for task in [task for task in mine if task not in kept]:
                self.drop(mine[task])

    def of(self, task: str) -> list[Link]:
        """Return the connections with a member."""
        return [links[task] for links in (self.links, self.peers) if task in links]

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be sent to workers and servers that opened connections."""
        return not any(link.unsent for link in self.links.values())

    def others(self, link: Link) -> Collection[Link]:
        """Return all other connections."""
        return self._all - {link}

    # --- in the loop ----------------------------------------------------------------------------------------------

    def serve(self, link: Link, mask: int, receiver: Receiver) -> None:
        """Receive and send what is possible without waiting."""
        if not link.open:
            return
        try:
            if mask & selectors.EVENT_READ:
                link.receive(receiver)
            if mask & selectors.EVENT_WRITE:
                link.flush()
        except PeerLost as error:
            self._lose(link, str(error))
        except ProtocolError as error:
            self.state.say(f"closed the connection of {link.task}: {error}")
            self._violators.add(link.task)
            self._lose(link, f"{link.task} broke the protocol: {error}")

    def flush(self) -> None:
        """Send what was queued; have the selector tell when a full socket can take more."""
        for link in list(self._all):
            if link.unsent:
                try:
                    link.flush()
                except PeerLost as error:
                    self._lose(link, str(error))
                    continue
            if link.unsent != (link in self._writing):
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
                self.selector.modify(link.sock, events, link)
                (self._writing.add if link.unsent else self._writing.discard)(link)

    def _lose(self, link: Link, reason: str) -> None:
        needed = self.needed(link)
        self.drop(link)
        if needed and link.task not in self.gone:
            # If the peer has died the coordinator notices by itself, and knows how; it is told only if it has not.
            self._broken[link.task] = (time.monotonic(), f"{self.state.task}: {reason}")

    def note_missing(self, server: str) -> None:
        """Note that a server to which something has to be sent is not connected."""
        if server not in self.gone:
            self._broken.setdefault(server, (time.monotonic(), f"{self.state.task}: no connection to {server}"))

    def forget_broken(self) -> None:
        """Report none of the broken connections: a plan is done without them."""
        self._broken.clear()

    def report_broken(self, control: CoordinatorClient) -> None:
        """Tell the coordinator of connections that stay broken; drop handshakes that take too long."""
        now = time.monotonic()
        for listener in self._listeners:
            listener.expire(now)
        for task, (since, reason) in list(self._broken.items()):
            if control.late(since, BROKEN_SECONDS):
                del self._broken[task]
                control.send(Severed(task=task, reason=reason))

    # --- the end --------------------------------------------------------------------------------------------------

    def sever(self) -> None:
        """Cut every connection at once, as the death of this process would (for tests; from any thread)."""
        self._severed = True
        cut_off([link.sock for link in list(self._all)])

    def close(self) -> None:
        """Close everything."""
        for link in list(self._all):
            link.close()
        for listener in self._listeners:
            listener.close()
