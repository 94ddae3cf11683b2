"""Free ports for servers of tests that are started again on the port they had."""

from __future__ import annotations

import contextlib
import random
import socket


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below the range from which outgoing connections take theirs.

    From that range, a client that tries again and again to reach a server that is down takes the server's port as its
    own sooner or later; it is then connected to itself, and the server cannot start again.
    """
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = random.randrange(20_000, 32_000)
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
        return found


def free_port() -> int:
    """One such port."""
    return free_ports(1)[0]
