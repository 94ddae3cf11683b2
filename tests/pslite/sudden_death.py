"""Sudden ends in rehearsals, where a process is a thread: connections are cut as by the death of the process."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable

from pslite.coordinator import Coordinator
from pslite.server import Server
from pslite.worker.allreduce.worker import AllReduceWorker
from pslite.worker.ps.worker import Worker


def cut_off(sockets: Iterable[socket.socket]) -> None:
    """End connections in both directions at once; what was sent before still arrives."""
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def cut_control(member: Server | Worker | AllReduceWorker) -> None:
    """Cut a member's connection to the coordinator, and have it open no connection again; from any thread."""
    client = member._control if isinstance(member, Server) else member._client
    if client is not None:
        with client._lock:
            client._closed.set()
            if client._line.channel is not None:
                cut_off([client._line.channel.sock])
    if isinstance(member, Worker):
        member._plane._opener.close()
    elif isinstance(member, AllReduceWorker) and member._group is not None:
        member._group.close()


def cut_coordinator(coordinator: Coordinator) -> None:
    """Cut all connections of a coordinator; from any thread."""
    cut_off([connection.sock for connection in list(coordinator._connections)])
    coordinator._wakeup.wake()


def lose_control(coordinator: Coordinator, task: str) -> None:
    """Lose the control connection of a member, which comes back; in the thread of the coordinator's loop."""
    for connection in list(coordinator._connections):
        if connection.hello.task == task and connection.member is not None:
            coordinator._disconnect(connection, "")
