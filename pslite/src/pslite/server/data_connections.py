"""Data connections of a server: those that it accepts from workers and servers, and those that it opens to servers."""

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
from pslite.net.handshake_listener import HandshakeListener
from pslite.net.messages import Hello, Severed
from pslite.net.server_connections_with_retry import ServerConnections
from pslite.net.tcp_or_unix_socket import open_listeners
from pslite.net.tensor_frames import Link, Receiver
from pslite.server.server_state import ServerState

#: seconds after which a broken connection to a member that the coordinator has not reported dead is reported to it
BROKEN_SECONDS = 3.0


@dataclass(eq=False)
class Connections:
    """The open data connections, served by the loop's selector; those that stay broken are reported."""

    state: ServerState
    #: the loop's selector; the data of a connection's key is its `Link`
    selector: selectors.BaseSelector
    #: of this server, with the job's token
    identity: Identity
    #: the job's id
    job: str
    #: address of this host on which connections are accepted
    host: str
    #: returns whether the training needs a connection that has just broken
    is_needed: Callable[[Link], bool]
    #: is called with a new connection to another server, in the thread that has opened it
    on_opened: InitVar[Callable[[Link], None]]
    #: the TCP port on which connections are accepted
    port: int = field(init=False)
    #: the name of the Unix socket on which connections are accepted
    unix_socket: str = field(init=False)
    #: task -> connection that a worker or server opened to this server
    accepted: dict[str, Link] = field(default_factory=dict)
    #: task -> connection that this server opened to another one
    opened: dict[str, Link] = field(default_factory=dict)
    #: members that the coordinator has reported dead
    dead: set[str] = field(default_factory=set)
    _all: dict[Link, None] = field(default_factory=dict)
    #: members whose connection is broken: time (monotonic, seconds) and reason
    _broken: dict[str, tuple[float, str]] = field(default_factory=dict)
    #: members that have violated the protocol
    _violators: set[str] = field(default_factory=set)

    def __post_init__(self, on_opened: Callable[[Link], None]) -> None:
        self.connector = ServerConnections(on_opened, self.state.faults)
        listeners, self.unix_socket = open_listeners(self.host)
        self.port = int(listeners[0].getsockname()[1])
        self._listeners = [
            HandshakeListener(
                self.selector, listener, acceptor=self._acceptor, welcome=self._accept, say=self.state.say
            )
            for listener in listeners
        ]

    # --- opening and closing -----------------------------------------------------------------------------------------

    def _acceptor(self) -> Acceptor:
        identity = self.identity
        return Acceptor(
            job=self.job, task=identity.task, incarnation=identity.incarnation, token=identity.token,
            encrypt=identity.encrypt or "none", channel="data", verdict=self._refusal,
        )  # fmt: skip

    def _refusal(self, hello: Hello) -> str:
        """Return the reason why a connection is refused; "" if it is accepted."""
        if hello.task in self.dead:
            return f"the coordinator has reported {hello.task} dead"
        if hello.channel != "data":
            return f"{self.identity.task} is a parameter server: it accepts data connections only, not {hello.channel}"
        return ""

    def _accept(self, sock: socket.socket, hello: Hello) -> None:
        if hello.role == "worker" and hello.task not in self._violators:
            self._broken.pop(hello.task, None)  # it has reconnected, and asks for the weights that it lacks
        self._add(Link(sock, hello.task, hello.incarnation, hello.role), self.accepted)

    def add_opened(self, link: Link) -> None:
        """Add a connection that this server has opened to another one."""
        self._add(link, self.opened)

    def _add(self, link: Link, links: dict[str, Link]) -> None:
        """Add a connection to `links` in place of an earlier one with the same member, which is closed."""
        earlier = links.get(link.task)
        if earlier is not None:
            self.drop(earlier)
        links[link.task] = link
        self.state.faults.reached(FaultPoint.CONNECTION_OPENED, link)
        self._all[link] = None
        self.selector.register(link.sock, selectors.EVENT_READ, link)

    def drop(self, link: Link) -> None:
        """Close a connection; nothing if it is closed."""
        if link in self._all:
            del self._all[link]
            self.selector.unregister(link.sock)
            link.close()
            for links in (self.accepted, self.opened):
                if links.get(link.task) is link:
                    del links[link.task]
                    if links is self.opened:
                        self.connector.lost(link)

    def drop_dead(self, tasks: Collection[str]) -> None:
        """Close the connections with members that have died, and accept no other ones from them."""
        for task in tasks:
            self._broken.pop(task, None)
            for link in self.with_member(task):
                self.drop(link)
        self.dead.update(tasks)

    def keep_only(self, *, opened: Collection[str], accepted: Collection[str]) -> None:
        """Close the opened and the accepted connections with all members except these."""
        for links, kept in ((self.opened, opened), (self.accepted, accepted)):
            for task in [task for task in links if task not in kept]:
                self.drop(links[task])

    def with_member(self, task: str) -> list[Link]:
        """Return the connections with a member: none, one or two."""
        return [links[task] for links in (self.accepted, self.opened) if task in links]

    @property
    def all_answers_sent(self) -> bool:
        """Whether nothing waits to be sent over the accepted connections."""
        return not any(link.unsent for link in self.accepted.values())

    def except_link(self, link: Link) -> Collection[Link]:
        """Return all connections except one."""
        return [each for each in self._all if each is not link]

    # --- in the loop ----------------------------------------------------------------------------------------------

    def serve(self, link: Link, mask: int, receiver: Receiver) -> None:
        """Receive and send over a connection for which the selector reports `mask`, without waiting."""
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
            self.state.say(f"closed the connection of {link.task}, which violated the protocol: {error}")
            self._violators.add(link.task)
            self._lose(link, f"{link.task} violated the protocol: {error}")

    def flush(self) -> None:
        """Send what is queued; where a socket is full, have the selector wait until it is writable."""
        for link in list(self._all):
            if link.unsent:
                try:
                    link.flush()
                except PeerLost as error:
                    self._lose(link, str(error))
                    continue
            link.await_room(self.selector)

    def _lose(self, link: Link, reason: str) -> None:
        """Close a broken connection; `check_timeouts` reports it later if it is needed and stays broken."""
        needed = self.is_needed(link)
        self.drop(link)
        if needed and link.task not in self.dead:
            # Nothing is reported at once: if the peer has died, the coordinator finds out by itself, with the cause.
            self._broken[link.task] = (time.monotonic(), f"{self.state.task}: {reason}")

    def note_missing(self, task: str) -> None:
        """Note that there is no connection to a server to which something has to be sent."""
        if task not in self.dead:
            self._broken.setdefault(task, (time.monotonic(), f"{self.state.task} has no connection to {task}"))

    def forget_broken(self) -> None:
        """Report none of the connections that are broken now: a plan was completed without them."""
        self._broken.clear()

    def check_timeouts(self, control: CoordinatorClient) -> None:
        """End handshakes that take too long; report connections that have stayed broken to the coordinator."""
        now = time.monotonic()
        for listener in self._listeners:
            listener.expire(now)
        for task, (since, reason) in list(self._broken.items()):
            if control.late(since, BROKEN_SECONDS):
                del self._broken[task]
                control.send(Severed(task=task, reason=reason))

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all connections and listeners."""
        for link in list(self._all):
            link.close()
        for listener in self._listeners:
            listener.close()
