"""Data connections of a worker to the servers, and the event loop that moves frames over them."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Collection, Iterable

from pslite.errors import PeerLost
from pslite.fault_points import FaultPoint, FaultPoints
from pslite.job.membership_plan import Member
from pslite.net.authentication import Identity
from pslite.net.server_connections_with_retry import ServerConnections
from pslite.net.tensor_frames import Header, Link, Receiver
from pslite.net.wakeup import Wakeup
from pslite.worker.ps.known_plans import PlanTable

#: Seconds between two calls of `check` while nothing comes; shorter while a connection to a server is broken.
_WAIT_SECONDS = 1.0
_DOUBT_WAIT_SECONDS = 0.2


class DataPlane:
    """One connection to each server of the plans in force and to come; a broken one is opened again.

    Parameters
    ----------
    identity
        the worker's, with the job's token.
    plans
        say which servers are needed.
    opened
        takes a new connection, in the thread that has opened it.
    faults
        the worker's fault points.

    """

    #: takes frames; set before there is a connection
    receiver: Receiver

    def __init__(
        self, identity: Identity, plans: PlanTable, opened: Callable[[Link], None], faults: FaultPoints
    ) -> None:
        self.identity = identity
        self.links: dict[str, Link] = {}
        #: set when the worker leaves the job: a broken connection is then no reason to doubt its server
        self.leaving = False
        self._plans = plans
        self._faults = faults
        self._opener = ServerConnections(opened, faults)
        self._selector = selectors.DefaultSelector()
        #: servers whose connections have ended and are opened again
        self._reopening: set[str] = set()
        #: servers in doubt: since when and why, until they answer again or the coordinator has said what is so
        self._doubted: dict[str, tuple[float, str]] = {}
        self._wakeup = Wakeup(self._selector)
        #: has `pump` call `check`; from any thread
        self.wake = self._wakeup.wake

    # --- the event loop -------------------------------------------------------------------------------------------

    def pump(self, done: Callable[[], bool], check: Callable[[], None]) -> None:
        """Move bytes in both directions until `done`; `check` handles what other threads have queued."""
        while True:
            check()
            self.flush_all()
            if done():
                return
            self._faults.reached(FaultPoint.WAIT)
            ready = self._selector.select(_DOUBT_WAIT_SECONDS if self._doubted else _WAIT_SECONDS)
            if any(not isinstance(key.data, Link) for key, _ in ready):
                # before any frame: it may be of the plan that has just been prepared
                self._wakeup.clear()
                check()
            for key, mask in ready:
                link = key.data
                if isinstance(link, Link) and mask & selectors.EVENT_READ and link.open:
                    self._receive(link)

    def _receive(self, link: Link) -> None:
        try:
            link.receive(self.receiver)
        except PeerLost as error:
            self._lost(link, str(error))

    def flush_all(self) -> None:
        """Send what the sockets take."""
        for link in list(self.links.values()):
            self.flush(link)

    def flush(self, link: Link) -> None:
        """Send what one socket takes."""
        try:
            link.flush()
        except PeerLost as error:
            self._lost(link, str(error))
            return
        link.await_room(self._selector)

    def send(self, server: str, header: Header, *payload: memoryview) -> None:
        """Queue a frame; one without a connection, or its successor, is sent or asked later for what it lacks."""
        link = self.links.get(server)
        if link is not None:
            link.send(header, *payload)

    @property
    def unsent(self) -> bool:
        """Whether bytes wait to be sent."""
        return any(link.unsent for link in self.links.values())

    # --- connections open and end ---------------------------------------------------------------------------------

    def reach(self, members: Iterable[Member]) -> None:
        """Open a connection to each server that has none; from any thread.  Raises Unreachable."""
        for member in members:
            self._opener.reach(member, self.identity)

    def adopt(self, link: Link) -> bool:
        """Take up a connection; returns whether something may have been lost with the one before."""
        if link.task in self._plans.gone:
            # others own its blocks: nothing more may come from it, should it live
            self._opener.lost(link)
            link.close()
            return False
        old = self.links.get(link.task)
        if old is not None:
            self._unlink(old)
        self.links[link.task] = link
        self._faults.reached(FaultPoint.CONNECTION_OPENED, link)
        self._selector.register(link.sock, selectors.EVENT_READ, link)
        plan = self._plans.current
        if link.task not in self._reopening and (plan is None or link.task not in plan.tasks()):
            return False
        self._trust(link.task)
        return True

    def reopen_missing(self) -> None:
        """Open connections again that ended before their plan was known here."""
        for task in self._plans.servers().keys() - self.links.keys() - self._reopening:
            self._reopen(task, f"the connection to {task} ended before its plan had begun")

    def doubt(self, server: str, reason: str) -> None:
        """Note that a server does not behave as it should; the coordinator may know why."""
        self._doubted[server] = time.monotonic(), reason

    def overdue(self, late: Callable[[float], bool]) -> list[tuple[str, str]]:
        """Take out the servers that have been in doubt for too long by `late`, with the reasons."""
        found = [(server, reason) for server, (since, reason) in self._doubted.items() if late(since)]
        for server, _ in found:
            del self._doubted[server]
        return found

    def clear_doubts(self) -> None:
        """Forget all doubts: the coordinator has said which servers are gone."""
        self._doubted.clear()

    def forget(self, gone: Iterable[str]) -> None:
        """Take nothing more from servers that are gone."""
        for task in gone:
            self._trust(task)
            if task in self.links:
                self._unlink(self.links[task])

    def close_unused(self, tasks: Collection[str]) -> None:
        """Close connections to servers that no plan needs any more."""
        for link in [link for task, link in self.links.items() if task in tasks]:
            self._unlink(link)
        for task in self._reopening - self._plans.servers().keys():
            self._trust(task)

    def stop_reopening(self) -> None:
        """Open no broken connection again: the job is done."""
        self._reopening.clear()

    def close(self) -> None:
        """Close everything."""
        self._opener.close()
        for link in list(self.links.values()):
            link.close()
        for closable in (self._selector, self._wakeup):
            closable.close()

    def _lost(self, link: Link, reason: str) -> None:
        """Handle the end of a connection: its server has left, has died, or is connected to again."""
        self._unlink(link)
        if link.task in self._plans.servers():
            self._reopen(link.task, reason)

    def _reopen(self, server: str, reason: str) -> None:
        if not self.leaving:
            self.doubt(server, reason)
        self._reopening.add(server)
        self._opener.again(self._plans.servers()[server], self.identity, lambda: server in self._reopening)

    def _trust(self, server: str) -> None:
        self._reopening.discard(server)
        self._doubted.pop(server, None)

    def _unlink(self, link: Link) -> None:
        if self.links.get(link.task) is link:
            del self.links[link.task]
            self._opener.lost(link)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.sock)
        link.close()
