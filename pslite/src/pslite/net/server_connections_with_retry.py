"""Connections to servers, opened beside the work for plans to come, and again when they break: one to each at a time.

Two plans may be made ready at once.  A second connection would take the place of the first, and what is on that would
be lost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from pslite.errors import PsliteError
from pslite.fault_points import FaultPoint, FaultPoints
from pslite.job.membership_plan import Member
from pslite.net.authentication import Identity
from pslite.net.tcp_or_unix_socket import reach
from pslite.net.tensor_frames import Link

#: seconds between two tries to open a connection again, the first and the longest
_MIN_PAUSE, _MAX_PAUSE = 0.02, 0.5


class ServerConnections:
    """Opens them, in any number of threads.

    Parameters
    ----------
    take
        takes a connection, in the thread that has opened it.
    faults
        fault points of who opens them.

    """

    def __init__(self, take: Callable[[Link], None], faults: FaultPoints) -> None:
        self._take = take
        self._faults = faults
        self._lock = threading.Lock()
        self._closed = threading.Event()
        #: server -> its incarnation that there is, or is about to be, a connection to; and who may open one
        self._reached: dict[str, str] = {}
        self._turns: dict[str, threading.Lock] = {}

    def reach(self, member: Member, identity: Identity) -> None:
        """Open a connection to a server, unless there is one or another thread does it.  Raises Unreachable."""
        with self._lock:
            turn = self._turns.setdefault(member.task, threading.Lock())
        self._faults.reached(FaultPoint.CONNECT, member)
        with turn:
            if self._reached.get(member.task) != member.incarnation:
                link = Link(reach(member, identity), member.task, member.incarnation, "ps")
                with self._lock:
                    self._reached[member.task] = member.incarnation
                self._faults.reached(FaultPoint.CONNECTED, link)
                self._take(link)

    def again(self, member: Member, identity: Identity, wanted: Callable[[], bool]) -> None:
        """Try to open a connection to a server in a thread of its own, as long as it is `wanted`."""
        if self._faults.reached(FaultPoint.RECONNECT, member):
            return

        def try_again() -> None:
            pause = _MIN_PAUSE
            # if the server has gone, the coordinator is about to say so
            while not self._closed.wait(pause) and wanted():
                with contextlib.suppress(PsliteError):
                    self.reach(member, identity)
                    return
                pause = min(2 * pause, _MAX_PAUSE)

        threading.Thread(target=try_again, name="pslite-redial", daemon=True).start()

    def lost(self, link: Link) -> None:
        """Know that a connection which was taken is there no more."""
        with self._lock:
            if self._reached.get(link.task) == link.incarnation:
                del self._reached[link.task]

    def close(self) -> None:
        """Try to open no connection again; from any thread."""
        self._closed.set()
