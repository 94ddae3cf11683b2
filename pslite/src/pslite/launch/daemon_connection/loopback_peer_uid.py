"""Check of which account serves a connection over the loopback interface, before a secret is sent on it without TLS.

Any user can listen on a free port: while the daemon is down, another user may have its port. `/proc/net/tcp` of Linux
names the account that accepted a connection.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import time
from collections.abc import Collection, Iterator
from pathlib import Path

#: variable with the uid of the daemon's account, as the address file has it
UID_VARIABLE = "DL2_DAEMON_UID"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
_NAMESPACE = ("/proc/sys/kernel/overflowuid", "/proc/self/uid_map")
#: pause between two looks while the other side has not accepted the connection, in seconds
_MIN_PAUSE, _MAX_PAUSE = 0.001, 0.05


def trusted_accounts(*more: int) -> frozenset[int]:
    """Return the accounts that may serve the job API: root, this process's, that of this installation, and `more`.

    With them that of the daemon, as far as its address file says it.
    """
    told = os.environ.get(UID_VARIABLE, "")
    return frozenset((0, os.geteuid(), Path(__file__).stat().st_uid, *more, *([int(told)] if told.isdecimal() else ())))


def check_peer(connection: socket.socket, trusted: Collection[int], seconds: float) -> None:
    """Check that one of the trusted accounts has accepted a connection, and wait until it is accepted.

    Does nothing where the peer is not on the loopback interface, or this system does not tell whose its connections
    are: another than Linux, and a container with a user namespace that lacks the account.

    Raises
    ------
    OSError
        another account has accepted it, or none within `seconds`, or whoever accepted it has closed it.

    """
    own, peer = connection.getsockname()[:2], connection.getpeername()[:2]
    if not ipaddress.ip_address(peer[0]).is_loopback:
        return
    ours, theirs = _entries(own), _entries(peer)
    end, pause = time.monotonic() + seconds, _MIN_PAUSE
    while True:
        listed, closed, uid = False, False, None
        for row in _rows():
            # until it is accepted, a connection has no inode, and root as its account whoever listens
            if row[1] in theirs and row[2] in ours and row[9] != "0":
                uid = int(row[7])
                break
            if row[1] in ours and row[2] in theirs:
                listed, closed = True, row[3] != _ESTABLISHED
        if uid in trusted or (uid is None and not listed) or (uid is not None and _is_unmapped(uid)):
            return
        if uid is not None:
            raise PermissionError(
                f"the program that has port {peer[1]} belongs to uid {uid}, and not to the daemon's account, so "
                "nothing is sent to it: end that program and start the daemon; if it is the daemon, set "
                f"{UID_VARIABLE}={uid}, or ask the administrator to set api.certificate"
            )
        if closed:  # and so nobody's: whose it was cannot be told any more
            raise ConnectionResetError(f"the program that has port {peer[1]} closed the connection at once")
        if time.monotonic() + pause > end:
            raise TimeoutError(
                f"the program that has port {peer[1]} did not accept the connection within {seconds:g} s"
            )
        time.sleep(pause)
        pause = min(_MAX_PAUSE, 2 * pause)


def _entries(address: tuple[str, int]) -> tuple[str, ...]:
    """Return how the tables write an address: as one of IPv4, and as one of IPv6."""
    host = ipaddress.ip_address(address[0])
    four = host if isinstance(host, ipaddress.IPv4Address) else host.ipv4_mapped
    forms = [host.packed] if four is None else [four.packed, bytes(10) + b"\xff\xff" + four.packed]
    words = ("".join(f"{word:08X}" for word in struct.unpack(f"={len(form) // 4}I", form)) for form in forms)
    return tuple(f"{text}:{address[1]:04X}" for text in words)


def _is_unmapped(uid: int) -> bool:
    """Return whether a uid stands for every account that this process's user namespace does not have."""
    try:
        every, mapped = (Path(name).read_text("ascii").split() for name in _NAMESPACE)
    except OSError:
        return False
    return every == [str(uid)] and mapped != ["0", "0", "4294967295"]


def _rows() -> Iterator[list[str]]:
    """Yield the rows of both tables in words: local address in 1, remote one in 2, state in 3, uid in 7, inode in 9."""
    for table in _TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        yield from (line.split() for line in lines)
