"""How a worker of an all-reduce job gets weights and optimizer state from another: over an authenticated connection.

The giver sends from where its state lies, in a thread beside its computation, and must not change it before all is
sent.  Every block has its version and a checksum.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from pslite.errors import PeerLost, ProtocolError, PsliteError
from pslite.job.membership_plan import Member
from pslite.net.authentication import Acceptor, Identity
from pslite.net.handshake_listener import HandshakeListener
from pslite.net.messages import Hello
from pslite.net.tcp_or_unix_socket import machine, open_listeners, reach
from pslite.net.tensor_frames import STATE, Header, Link, bytes_of
from pslite.numeric.gradient_sums import Array

#: how long the giver may take to connect; it does so at once
_CONNECT_SECONDS = 30.0
_POLL_SECONDS = 0.2


class Giving:
    """A state on its way to one member.

    Parameters
    ----------
    to
        who gets it.
    identity
        this worker.
    plan
        the plan in force.
    version
        of the state.
    states
        by block; each stays as it is until it is sent.
    wake
        called when it is done.

    """

    def __init__(
        self,
        to: Member,
        identity: Identity,
        plan: int,
        version: int,
        states: Sequence[Array],
        wake: Callable[[], None],
    ) -> None:
        self.done = False
        #: blocks that are sent, from the first on: they may change again
        self.sent = 0
        #: why it did not arrive; the receiver's own matter, or its end
        self.failure = ""
        self._to, self._identity, self._plan, self._version, self._states = to, identity, plan, version, states
        self._wake = wake
        self._stopped = threading.Event()
        #: held while a block is looked at
        self._looking = threading.Lock()
        threading.Thread(target=self._run, name="pslite-giving", daemon=True).start()

    def stop(self) -> None:
        """Nobody needs it any more; no state is looked at after this returns."""
        self._stopped.set()
        with self._looking:
            pass

    def spares(self, block: int) -> bool:
        """Whether that block may change now."""
        return self.done or self._stopped.is_set() or self.sent > block

    def _run(self) -> None:
        try:
            link = Link(reach(self._to, self._identity), self._to.task, self._to.incarnation, "worker")
            try:
                self._send(link)
            finally:
                link.close()
        except PsliteError as error:
            self.failure = str(error)
        self.done = True
        self._wake()

    def _send(self, link: Link) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(link.sock, selectors.EVENT_WRITE)
            for number, state in enumerate(self._states):
                with self._looking:
                    if self._stopped.is_set():
                        return
                    whole = bytes_of(state)
                    version = self._version
                    header = Header.with_checksum(
                        STATE, whole, plan=self._plan, block=number, version=version, first=version
                    )
                    link.send(header, whole)
                    while not link.flush():
                        if self._stopped.is_set():
                            return
                        selector.select(_POLL_SECONDS)
                self.sent = number + 1
                self._wake()


class Taking:
    """Where a state arrives.

    Parameters
    ----------
    identity
        this worker.
    job
        the name of the job.
    host
        address of this host, on which connections are accepted.
    say
        takes lines for the user.

    """

    def __init__(self, identity: Identity, job: str, host: str, say: Callable[[str], None]) -> None:
        self._identity = identity
        self._job = job
        self._selector = selectors.DefaultSelector()
        listeners, self.local = open_listeners(host)
        self.port: int = listeners[0].getsockname()[1]
        self.machine = machine()
        self._listeners = [
            HandshakeListener(self._selector, listener, acceptor=self._acceptor, welcome=self._welcome, say=say)
            for listener in listeners
        ]
        self._links: set[Link] = set()
        #: the one that the state comes from
        self._source: Link | None = None
        self._giver = ""
        self._plan = 0
        self._states: Sequence[Array] = ()
        self._missing: set[int] = set()
        self._version = -1

    def take(self, giver: Member, plan: int, states: Sequence[Array], check: Callable[[], None]) -> int:
        """Fill `states` with what `giver` sends, and return its version.

        `check` is called now and then, and may raise.

        Raises
        ------
        PeerLost
            the connection ended before all was here, or never came.
        ProtocolError
            what came is damaged, or is something else.

        """
        self._giver, self._plan, self._states, self._version = giver.incarnation, plan, states, -1
        self._missing, self._source = set(range(len(states))), None
        deadline = time.monotonic() + _CONNECT_SECONDS
        try:
            while self._missing:
                check()
                now = time.monotonic()
                if not self._links and now > deadline:
                    raise PeerLost(f"{giver.task} did not send its state within {_CONNECT_SECONDS:g} s")
                for listener in self._listeners:
                    listener.expire(now)
                for key, _ in self._selector.select(_POLL_SECONDS):
                    if isinstance(key.data, Link):
                        self._receive(key.data)
                    else:
                        key.data()
        finally:
            for link in list(self._links):
                self._drop(link)
            self._states = ()
        return self._version

    def close(self) -> None:
        """Listen no more."""
        for listener in self._listeners:
            listener.close()
        self._selector.close()

    def _acceptor(self) -> Acceptor:
        return Acceptor(
            job=self._job,
            task=self._identity.task,
            incarnation=self._identity.incarnation,
            token=self._identity.token,
            encrypt=self._identity.encrypt or "none",
            channel="data",
            verdict=lambda hello: "" if hello.channel == "data" else "this worker accepts data connections only",
        )

    def _welcome(self, sock: socket.socket, hello: Hello) -> None:
        if hello.incarnation != self._giver:
            sock.close()  # of a plan that was given up
            return
        link = Link(sock, hello.task, hello.incarnation, hello.role)
        self._links.add(link)
        self._selector.register(sock, selectors.EVENT_READ, link)

    def _receive(self, link: Link) -> None:
        try:
            link.receive(self)
        except (PeerLost, ProtocolError):
            if link is self._source and self._missing:
                raise
            self._drop(link)  # it has done its part, or is left over from a plan that was given up

    def _drop(self, link: Link) -> None:
        self._links.discard(link)
        self._selector.unregister(link.sock)
        link.close()

    # --- what a link asks ---------------------------------------------------------------------------------------------

    def payload(self, link: Link, header: Header) -> memoryview:
        """Say where a block goes."""
        right = header.kind == STATE and header.plan == self._plan and header.block in self._missing
        if not right or self._version not in (-1, header.version):
            raise ProtocolError(
                f"{link.task} sent a frame of kind {header.kind} about block {header.block} at version "
                f"{header.version} of plan {header.plan}, which this worker does not expect"
            )
        self._source, self._version = link, header.version
        return bytes_of(self._states[header.block])

    def shared(self, link: Link, header: Header) -> None:  # noqa: ARG002
        """Refuse shared memory: what is not copied would change while it is read."""
        raise ProtocolError(f"{link.task} sent shared memory, but states of workers are not sent in shared memory")

    def arrived(self, link: Link, header: Header) -> None:
        """Check a block that is complete."""
        header.check(bytes_of(self._states[header.block]), link.task)
        self._missing.discard(header.block)
