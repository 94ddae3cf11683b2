"""How a data connection is made: over a Unix socket to a process of this machine, over TCP to any other.

Both carry the same frames after the same handshake.  Over a Unix socket a worker also hands out its memory
(`SharedMemory`), so that gradients and weights need not go through the socket: only their headers do.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path

from pslite.errors import ConnectError, PsliteError, Unreachable
from pslite.job.membership_plan import Member
from pslite.net.authentication import Identity, connect
from pslite.net.shared_memory import VARIABLE
from pslite.net.tcp_sockets import listen

#: how long another member may take to accept a connection
_CONNECT_SECONDS = 15.0


def machine() -> str:
    """Return what is alike for processes that can reach each other by an abstract Unix socket, "" if it is not known.

    That is the boot and the network namespace: abstract names live in the latter (unix(7)).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return ""


def open_listeners(host: str) -> tuple[list[socket.socket], str]:
    """Open the sockets on which data is taken, TCP on `host` first; return them, and the Unix socket's name or ""."""
    listeners = [listen(host)]
    if os.environ.get(VARIABLE) == "tcp" or not machine():
        return listeners, ""
    name = f"pslite-{secrets.token_hex(16)}"
    with contextlib.suppress(OSError):
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.bind(f"\0{name}")
        local.listen(256)
        local.setblocking(False)
        return [*listeners, local], name
    return listeners, ""


def reach(member: Member, identity: Identity) -> socket.socket:
    """Open a data connection to a server, by the best way that there is.

    Raises
    ------
    Unreachable
        the server does not answer, or is not who it should be.

    """
    addresses = [member.address]
    if member.local and member.machine == machine() and os.environ.get(VARIABLE) != "tcp":
        addresses.insert(0, f"\0{member.local}")
    failed: PsliteError = ConnectError(f"{member.task} has no address")
    for address in addresses:
        try:
            sock, _ = connect(address, identity, "data", timeout=_CONNECT_SECONDS, incarnation=member.incarnation)
        except PsliteError as error:
            failed = error
        else:
            return sock
    raise Unreachable(member.task, str(failed)) from failed
