"""Acceptor of the job API's connections: they begin one after the other, the addresses in turn.

asyncio would begin the TLS handshakes of all connections that have come at once. Each takes the event loop one to two
milliseconds, in which no heartbeat is read, and costs a client that does not complete it next to nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import structlog
from starlette.exceptions import HTTPException

from dl2d.daemon.api.connection_limits import CONNECTION_SECONDS, AcceptedSocket, ConnectionTable, client_group
from dl2d.daemon.api.request_limits import FairTurns

log = structlog.get_logger()

#: Maximum number of connections that are accepted in one turn of the event loop. Connections that are closed to make
#: room are closed in the next turn, so up to this many more may be open.
_MAX_ACCEPTED_IN_TURN = 16
#: After an error of the operating system, seconds until connections are accepted again.
_RETRY_SECONDS = 1.0


class Acceptor:
    """Accepts the connections of a listening socket, and begins to serve them in turns of their addresses.

    For the thread of the event loop, except for the constructor.

    Parameters
    ----------
    listener
        The listening socket.
    table
        Counts the connections.
    """

    def __init__(self, listener: socket.socket, table: ConnectionTable) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._table = table
        self._turns = FairTurns(1, pause=CONNECTION_SECONDS, newest_first=True)
        self._begin: Callable[[AcceptedSocket], Awaitable[object]] | None = None
        #: Connections that wait for their turn or are in their TLS handshake, with their tasks: asyncio itself keeps
        #: only weak references to tasks.
        self._beginning: dict[AcceptedSocket, asyncio.Task[None]] = {}

    def start(self, begin: Callable[[AcceptedSocket], Awaitable[object]]) -> None:
        """Accept connections; ``begin`` is called for each in its turn, and returns after its TLS handshake."""
        self._begin = begin
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def stop(self) -> None:
        """Accept no more connections, and end those that have not begun."""
        self._begin = None
        asyncio.get_running_loop().remove_reader(self._listener)
        for accepted in self._beginning:
            accepted.abort()

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED_IN_TURN):
            try:
                plain, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # such as too many open files in the whole system
                log.error("cannot accept connections now; trying again in a moment", error=str(error))
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                loop.call_later(_RETRY_SECONDS, self._accept_again)
                return
            accepted = AcceptedSocket(plain.family, plain.type, plain.proto, fileno=plain.detach())
            accepted.setblocking(False)
            accepted.begin(self._table, client_group(str(address[0])))
            if not self._table.add(accepted):
                accepted.close()
                continue
            self._beginning[accepted] = asyncio.get_running_loop().create_task(self._serve(accepted))

    def _accept_again(self) -> None:
        if self._begin is not None:
            self.start(self._begin)

    async def _serve(self, accepted: AcceptedSocket) -> None:
        try:
            await _first_bytes(accepted)
            async with self._turns.turn(accepted.group, accepted):
                pass
            if self._begin is not None:
                await self._begin(accepted)
        except (HTTPException, OSError):
            pass  # it was closed while it waited, or the client does not speak TLS
        finally:
            del self._beginning[accepted]
            if accepted.connection is None:
                accepted.close()


async def _first_bytes(accepted: AcceptedSocket) -> None:
    """Wait until a client has sent something; raises ConnectionError if it closes the connection instead."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(accepted, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(accepted)
    if not accepted.recv(1, socket.MSG_PEEK):
        raise ConnectionAbortedError
