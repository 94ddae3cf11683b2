"""TCP sockets: addresses, listening, and the time after which a silent connection ends."""

from __future__ import annotations

import socket

#: in seconds: silence after which the kernel probes the peer; time between two probes; time after which the connection
#: ends if the peer has neither answered a probe nor acknowledged or taken data
_IDLE, _INTERVAL, _SILENCE = 10, 5, 30


def split_address(text: str) -> tuple[str, int]:
    """Split "host:port" (or "[v6]:port"). Raises `ValueError` if it is not of that form."""
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not an address of the form host:port")
    return host.strip("[]"), int(port)


def set_up_tcp(sock: socket.socket) -> None:
    """Have the kernel send at once, and end the connection if its peer is gone without closing it, or takes no data."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in ((socket.TCP_KEEPIDLE, _IDLE), (socket.TCP_KEEPINTVL, _INTERVAL)):
        sock.setsockopt(socket.IPPROTO_TCP, option, seconds)
    # also determines the number of probes that may stay without an answer
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE * 1000)


def listen(host: str = "", port: int = 0) -> socket.socket:
    """Open a listening socket on `port` (0: a free one) of `host` (empty: all interfaces), IPv4 or IPv6 as it is."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(256)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
