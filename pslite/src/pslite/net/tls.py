"""TLS 1.3 between the members of a job: without the job's token one can neither take part, nor read, nor alter.

Key and certificate are made of the token, so that nothing has to be handed out: HKDF (RFC 5869) gives the seed of an
Ed25519 key (RFC 8032), whose signatures are deterministic, so that every process makes the same certificate.  Each
presents it and accepts nothing else.  Keys of connections are fresh (ephemeral Diffie-Hellman): who learns the token
later cannot read what was recorded.  There are no tickets, so no session is taken up again and no handshake replayed.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self, cast

from pslite.errors import UsageError

#: what of a job is encrypted: nothing, what its members say to its coordinator, or all that goes between machines
Encryption = Literal["none", "control", "all"]
#: variable that says it
VARIABLE = "DL2_ENCRYPT"

#: TLS cuts what is sent into records of at most so many bytes (RFC 8446, 5.1)
_RECORD = 16384
#: by how an end of a handshake is named by OpenSSL: the two sides have different certificates
_STRANGE = ("TLSV1_ALERT_UNKNOWN_CA", "CERTIFICATE_VERIFY_FAILED", "PEER_DID_NOT_RETURN_A_CERTIFICATE")


class Contexts(NamedTuple):
    """TLS contexts of a job, for the connecting and for the accepting side."""

    client: ssl.SSLContext
    server: ssl.SSLContext


def is_sealed(encrypt: Encryption, channel: str) -> bool:
    """Whether a channel ("control", "agent", "data") goes over TLS, where it is not within one machine."""
    return encrypt == "all" if channel == "data" else encrypt != "none"


def begins_tls(first: bytes) -> bool:
    """Whether a connection that begins with these three bytes speaks TLS: no Hello is that long."""
    return len(first) == 3 and first[:2] == b"\x16\x03" and first[2] > 0


def why(error: OSError) -> str:
    """Return why a TLS handshake failed, in plain words where OpenSSL's tell less."""
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return f"wrong token ({reason})" if reason in _STRANGE else f"no TLS handshake ({reason})"


# A process belongs to one job, so this is called with one token; tests have several jobs in a process.
@lru_cache(maxsize=8)
def contexts(token: bytes) -> Contexts:
    """Return what the connections of the job with that token are made with.

    Raises
    ------
    UsageError
        something that TLS needs is missing on this machine.

    """
    try:
        key, certificate = _identity(token)
        made = Contexts(_context(ssl.PROTOCOL_TLS_CLIENT), _context(ssl.PROTOCOL_TLS_SERVER))
        # ssl takes keys from files only; this one is in memory and has no name
        fd = os.memfd_create("pslite-key", os.MFD_CLOEXEC)
        with os.fdopen(fd, "wb") as file:
            file.write(key + ssl.DER_cert_to_PEM_cert(certificate).encode())
            file.flush()
            for context in made:
                context.load_cert_chain(f"/proc/self/fd/{fd}")
                context.load_verify_locations(cadata=certificate)
    except (ImportError, AttributeError, OSError) as error:
        raise UsageError(
            f"TLS is not available for this job's connections: {error}; set {VARIABLE}=none in all tasks to train "
            "without it"
        ) from error
    return made


def _identity(token: bytes) -> tuple[bytes, bytes]:
    """Return a job's private key (PEM) and its certificate (DER), the same ones in each process."""
    # imported here because it takes longer than all of pslite, and jobs of one process do without it
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415

    seed = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"pslite TLS 1").derive(token)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pslite")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        # for ever (RFC 5280, 4.1.2.5): it ends with the job, and clocks of machines differ
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, None)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.DER)


def _context(side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # the job's key proves membership; the handshake inside tells which member it is
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    context.sslsocket_class = EncryptedSocket
    return context


class EncryptedSocket(ssl.SSLSocket):
    """An encrypted connection that behaves like a plain socket.

    It raises BlockingIOError where it would have to wait, has `sendmsg`, may be used by a thread that sends and one
    that receives, and never sends anything in clear, not even while another thread ends it.
    """

    _turn: threading.Lock
    #: what OpenSSL has begun to send: the next call must give it the same
    _begun: bytes | memoryview

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make it; `SSLContext.wrap_socket` does not call `__init__`."""
        self = super().__new__(cls, *args, **kwargs)
        self._turn = threading.Lock()
        self._begun = b""
        return self

    def binding(self) -> bytes:
        """Return what is the same for both ends of this connection and of no other.

        That is the client's Finished, a MAC over the whole handshake (RFC 8446, 4.4.4; RFC 5929, 3).
        """
        found = self.get_channel_binding("tls-unique")
        if not found:
            raise OSError(errno.ENOTCONN, "the TLS handshake is not over")
        return found

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:  # noqa: ARG002
        """Receive at most so many bytes; none at the end."""
        try:
            with self._turn:
                return self.read(buflen)
        except (OSError, ValueError) as error:
            raise _as_plain(error) from None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:  # noqa: ARG002
        """Receive into a buffer as much as there is; return how many bytes, 0 at the end.  Not for blocking use."""
        view = memoryview(buffer)[: nbytes or None]
        size, got = view.nbytes, 0
        try:
            with self._turn:
                while got < size:
                    more = self.read(size - got, view[got:])  # what is left of one record, at the most
                    if not more:
                        break
                    got += cast("int", more)
        except (OSError, ValueError) as error:
            if not got:
                raise _as_plain(error) from None
        return got

    def send(self, data: Any, flags: int = 0) -> int:  # noqa: ARG002
        """Send some of `data`; return how many bytes.  After BlockingIOError call it with what begins the same."""
        with self._turn:
            return self._send(self._begun or bytes(memoryview(data)[:_RECORD]))

    def sendall(self, data: Any, flags: int = 0) -> None:  # noqa: ARG002
        """Send all of it."""
        left = memoryview(data)
        while left.nbytes:
            left = left[self.send(left) :]

    def sendmsg(self, buffers: Any, *_: Any) -> int:  # type: ignore[override]  # its parent refuses it
        """Send some of several buffers, as `send`: what is small goes into one record with what follows."""
        with self._turn:
            if self._begun:
                return self._send(self._begun)
            if buffers[0].nbytes >= _RECORD:
                return self._send(buffers[0])
            pieces, room = [], _RECORD
            for buffer in buffers:
                pieces.append(buffer[:room])
                room -= pieces[-1].nbytes
                if not room:
                    break
            return self._send(b"".join(pieces))

    def _send(self, data: bytes | memoryview) -> int:
        self._begun = data
        try:
            sent = self.write(data)
        except (OSError, ValueError) as error:
            raise _as_plain(error) from None
        self._begun = b""
        return sent

    def shutdown(self, how: int) -> None:
        """End the connection; unlike its parent it stays encrypted for a thread that still sends."""
        socket.socket.shutdown(self, how)

    def close(self) -> None:
        """Close it; a thread that still sends finds it closed."""
        with self._turn:
            super().close()


def _as_plain(error: OSError | ValueError) -> OSError:
    """Return what a plain socket would raise."""
    if isinstance(error, ssl.SSLWantReadError | ssl.SSLWantWriteError):
        return BlockingIOError(errno.EAGAIN, "not now")
    return error if isinstance(error, OSError) else OSError(errno.ENOTCONN, str(error))
