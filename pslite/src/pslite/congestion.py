"""TCP inside one machine, where nothing is ever congested: it goes as fast as it can.

Where the system's congestion control is bbr each connection is paced, even over the loopback interface, by timers that
take a third of the CPU time of an exchange.  A socket that has once had bbr is paced for good (tcp(7) has no way back),
so another one is chosen before it is connected, and the system's put back if it leads to another machine.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Final

#: always there, and allowed to everybody
_PLAIN: Final = b"reno"


def unpace(sock: socket.socket) -> None:
    """Choose what suits a connection inside the machine, for a socket that is to be connected, or that listens."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _PLAIN)


def stays_inside(sock: socket.socket) -> bool:
    """Whether both ends of a TCP connection are on this machine."""
    return bool(sock.getsockname()[0] == sock.getpeername()[0])


def restore(sock: socket.socket) -> None:
    """Put the system's choice back, for a socket that has just been connected, unless it stays inside."""
    with contextlib.suppress(OSError):
        if stays_inside(sock):
            return
        with socket.socket(sock.family, socket.SOCK_STREAM) as fresh:
            system = fresh.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, system.rstrip(b"\0"))


def open_connection(host: str, port: int, timeout: float) -> socket.socket:
    """Connect, as `socket.create_connection` does; raises OSError."""
    failed = OSError(f"{host} has no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(timeout)
            unpace(sock)
            sock.connect(place)
        except OSError as error:
            sock.close()
            failed = error
        else:
            restore(sock)
            return sock
    raise failed
