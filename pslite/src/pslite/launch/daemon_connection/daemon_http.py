"""HTTP and HTTPS requests to the daemon's job API, and the certificate by which it is trusted.

Before a secret is sent over the loopback interface without TLS, the account that serves the connection is checked, as
`/proc/net/tcp` of Linux names it: any user can listen on a free port, such as the daemon's while it is down.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import re
import socket
import ssl
import struct
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator
from functools import lru_cache
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path

import msgspec

from pslite.errors import UsageError

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


#: variable with the certificate of the daemon, or of the authority that signed it: path (PEM), or `certificate_text`
CERTIFICATE_VARIABLE = "DL2_DAEMON_CERTIFICATE"
_TEXT = "der:"
#: maximum length of an answer, and of one that refuses a request, in bytes
_MAX_ANSWER, _MAX_ERROR = 1 << 22, 65536
#: maximum length of a reason, in characters
_MAX_REASON = 300
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def fetch(url: str, body: object = None, *, credential: str = "", timeout: float = 10.0) -> bytes:
    """Send a request to an http or https URL, with a body as JSON if there is one; return the answer.

    Without TLS nothing is sent to a program on this machine that belongs to another account than the daemon's.

    Raises `OSError` if there is no answer, or it is no HTTP; `urllib.error.HTTPError` where it refuses the request.
    """
    request = urllib.request.Request(url, None if body is None else msgspec.json.encode(body))  # noqa: S310
    if body is not None:
        request.add_header("Content-Type", "application/json")
    if credential:
        request.add_header("Authorization", f"Bearer {credential}")
    if request.type == "https":
        context = tls_context(os.environ.get(CERTIFICATE_VARIABLE, ""))
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
    else:
        opener = _clear_opener()
    try:
        with opener.open(request, timeout=timeout) as answer:
            found: bytes = answer.read(_MAX_ANSWER)
            return found
    except HTTPException as error:
        raise OSError(f"the answer cannot be read as HTTP: {type(error).__name__}: {error}"[:_MAX_REASON]) from error


class _CheckedConnection(HTTPConnection):
    """Connection without TLS; on the loopback interface only to a trusted account."""

    def connect(self) -> None:
        """Connect, and check who has accepted the connection."""
        super().connect()
        try:
            check_peer(self.sock, trusted_accounts(), self.timeout or 0.0)
        except OSError:
            self.close()
            raise


class _CheckedHandler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_CheckedConnection, request)


@lru_cache(maxsize=1)
def _clear_opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_CheckedHandler)


def error_text(error: urllib.error.HTTPError) -> str:
    """Read what the daemon says of a request that it refuses, or else its HTTP status, and close the connection."""
    try:
        with error:
            data = error.read(_MAX_ERROR)
        return str(msgspec.json.decode(data, type=dict[str, object])["error"])
    except (OSError, HTTPException, msgspec.MsgspecError, KeyError):
        return f"{error.code} {error.reason}"


def is_loopback(host: str) -> bool:
    """Whether a host of a URL is the machine itself, whichever machine that is."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_private(daemon: str) -> None:
    """Check that requests to the daemon do not cross a network unencrypted: it is reached by https, or on this machine.

    Raises `UsageError` if they would.
    """
    parts = urllib.parse.urlsplit(daemon)
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise UsageError(
            "requests to the daemon hold secrets of jobs and credentials of users, which go over https only, but the "
            f"daemon's address is {daemon!r}: ask the administrator to set api.certificate, and api.advertise (or "
            f"DL2_DAEMON where it is set) to the https:// URL ({CERTIFICATE_VARIABLE} names the certificate if this "
            "machine does not trust who signed it)"
        )


def certificate_text(pem: str) -> str:
    """Return the certificates of a PEM file, and nothing else of it, as a value of DL2_DAEMON_CERTIFICATE.

    Raises `ValueError` if one is not Base64.
    """
    found = b"".join(ssl.PEM_cert_to_DER_cert(part) for part in _PEM.findall(pem))
    return _TEXT + base64.b64encode(found).decode()


def tls_context(certificate: str) -> ssl.SSLContext:
    """Return a context that trusts a value of DL2_DAEMON_CERTIFICATE as well, or what the machine trusts for "".

    Raises `OSError` if the file that it names cannot be read.
    """
    # a file may be replaced while the job runs, when its certificate expires
    changed = 0 if not certificate or certificate.startswith(_TEXT) else os.stat(certificate).st_mtime_ns  # noqa: PTH116
    return _made_context(certificate, changed)


@lru_cache(maxsize=4)
def _made_context(certificate: str, changed: int) -> ssl.SSLContext:
    del changed
    if certificate.startswith(_TEXT):
        context = ssl.create_default_context()  # the daemon's next certificate may be of an authority that is trusted
        context.load_verify_locations(cadata=base64.b64decode(certificate.removeprefix(_TEXT)))
    else:
        context = ssl.create_default_context(cafile=certificate or None)
    # a certificate that is given is trusted as it is, whoever has signed it
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    return context
