"""Mutual challenge-response on every connection.

Both sides prove that they know the job's token, without sending it: HMAC-SHA256 over everything either side claims
(protocol, channel, job, role, task, incarnations, both nonces), over the TLS connection that it goes over, if any, and
over which side is speaking.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

import msgspec

from pslite.errors import AuthenticationError, ConnectError, PeerLost, ProtocolError, Rejected
from pslite.net.message_framing import Inbox, frame, receive_one
from pslite.net.messages import (
    MAX_HANDSHAKE_BYTES,
    PROTOCOL,
    Accepted,
    Challenge,
    Handshake,
    Hello,
    Proof,
    Refused,
)
from pslite.net.tcp_sockets import set_up_tcp, split_address
from pslite.net.tls import VARIABLE, EncryptedSocket, Encryption, contexts, is_sealed, why

M = TypeVar("M", Challenge, Accepted)

TOKEN_BYTES = 32
NONCE_BYTES = 32
MAX_NAME = 128


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is, inside its job."""

    role: Literal["worker", "ps"]
    task: str
    incarnation: str
    token: bytes
    #: what the job encrypts; "": not known yet, which the coordinator says then, over TLS
    encrypt: Literal["", "none", "control", "all"] = ""

    def __repr__(self) -> str:
        """Leave out the token, so that no log can hold it."""
        return f"Identity({self.task}, {self.incarnation})"


def parse_token(text: str) -> bytes:
    """Return the token from its hexadecimal form. Raises `AuthenticationError` if it is not 32 bytes in hexadecimal."""
    try:
        token = bytes.fromhex(text)
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise AuthenticationError(f"the job token (DL2_TOKEN) is not {TOKEN_BYTES} bytes in hexadecimal")
    return token


def _mac(token: bytes, side: bytes, hello: Hello, challenge: Challenge, binding: bytes) -> bytes:
    text = b"pslite " + side + b"\0" + msgspec.msgpack.encode((hello, challenge, binding))
    return hmac.new(token, text, hashlib.sha256).digest()


class Acceptor:
    """The accepting side's half, for a poll loop: feed it bytes, send what it returns.

    `verdict` may refuse a peer whose token is right (unknown task, say): it returns the reason, or "" to admit.
    `encrypt` is what the job encrypts, `channel` what kind of connections are taken here.
    """

    def __init__(
        self,
        *,
        job: str,
        task: str,
        incarnation: str,
        token: bytes,
        encrypt: Encryption = "none",
        channel: Literal["control", "data"] = "control",
        verdict: Callable[[Hello], str] = lambda _: "",
    ) -> None:
        self._token = token
        self._challenge = Challenge(
            job=job, task=task, incarnation=incarnation, nonce=secrets.token_bytes(NONCE_BYTES), encrypt=encrypt
        )
        #: whether connections from other machines must be encrypted
        self.sealed = is_sealed(encrypt, channel)
        self._binding = b""
        self._turned_away = ""
        self._inbox: Inbox[Handshake] = Inbox(Handshake, MAX_HANDSHAKE_BYTES)
        self._verdict = verdict
        #: the peer, once it has introduced itself; believe it only when `accepted`
        self.hello: Hello | None = None
        self.accepted = False
        #: why the connection is refused, once it is
        self.refusal = ""

    @property
    def wanted(self) -> int:
        """How many bytes may be received now; what follows the handshake is not this object's to receive."""
        return self._inbox.wanted

    def seal(self, sock: socket.socket) -> EncryptedSocket:
        """Encrypt a connection that has just come; its TLS handshake is to be done."""
        sealed = contexts(self._token).server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return cast("EncryptedSocket", sealed)

    def bind(self, binding: bytes) -> None:
        """The handshake goes over the TLS connection that has this name."""
        self._binding = binding

    def turn_away(self, reason: str) -> None:
        """Refuse the peer as soon as it has introduced itself."""
        self._turned_away = reason

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the peer, return bytes for it; look at `accepted` and `refusal` afterwards.

        Raises
        ------
        ProtocolError
            this is not pslite's protocol; close the connection.

        """
        answer = b""
        for message in self._inbox.feed(data):
            if isinstance(message, Hello) and self.hello is None:
                answer += self._greet(message)
            elif isinstance(message, Proof) and self.hello is not None and not self.accepted:
                answer += self._judge(self.hello, message)
            else:
                raise ProtocolError(f"{type(message).__name__} is not the next message of the handshake")
        return answer

    def _greet(self, hello: Hello) -> bytes:
        if hello.protocol != PROTOCOL:
            return self._refuse(
                f"its pslite has protocol {hello.protocol}, this one {PROTOCOL}: use the same version of pslite in "
                "all tasks"
            )
        if len(hello.nonce) != NONCE_BYTES or len(hello.task) > MAX_NAME or len(hello.incarnation) > MAX_NAME:
            raise ProtocolError("the Hello message has a nonce of the wrong length, or too long names")
        self.hello = hello
        return self._refuse(self._turned_away) if self._turned_away else frame(self._challenge)

    def _judge(self, hello: Hello, proof: Proof) -> bytes:
        if not hmac.compare_digest(proof.mac, _mac(self._token, b"client", hello, self._challenge, self._binding)):
            return self._refuse("wrong token")
        ours = self._challenge.encrypt
        if hello.encrypt not in ("", ours):
            return self._refuse(f"{VARIABLE} is {ours} here, {hello.encrypt} there; it must be the same in all tasks")
        reason = self._verdict(hello)
        if reason:
            return self._refuse(reason)
        self.accepted = True
        return frame(Accepted(mac=_mac(self._token, b"server", hello, self._challenge, self._binding)))

    def _refuse(self, reason: str) -> bytes:
        self.refusal = reason
        return frame(Refused(reason=reason))


def connect(
    address: str,
    identity: Identity,
    channel: Literal["control", "agent", "data"],
    *,
    timeout: float,
    incarnation: str = "",
) -> tuple[socket.socket, Challenge]:
    """Connect to `address` and authenticate both ways; returns the blocking socket and the peer's Challenge.

    It is encrypted if the job's channels of that kind are; one to a Unix socket is not.

    Parameters
    ----------
    address
        host:port, or the name of an abstract Unix socket with its leading zero.
    identity
        this process.
    channel
        what the connection is for.
    timeout
        seconds for everything; a refused TCP connection is tried again until then.
    incarnation
        the incarnation the peer must have, if known.

    Raises
    ------
    ConnectError
        nobody answered in time.
    AuthenticationError
        the peer refused this process, or is not the one that it should be.

    """
    deadline = time.monotonic() + timeout
    sock = _open(address, deadline)
    binding = b""
    try:
        if is_sealed(identity.encrypt or "control", channel) and not address.startswith("\0"):
            sock = sealed = _seal(sock, address, identity.token, deadline)
            binding = sealed.binding()
        challenge = _introduce(sock, address.lstrip("\0"), identity, channel, binding, incarnation, deadline)
    except (PeerLost, ProtocolError, OSError) as error:
        sock.close()
        raise AuthenticationError(
            f"{address} ended the handshake ({error}): is this the right address of a pslite process?"
        ) from error
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    return sock, challenge


def _seconds_to(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def _open(address: str, deadline: float) -> socket.socket:
    if address.startswith("\0"):
        return _open_local(address, deadline)
    host, port = split_address(address)
    pause = 0.05
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=_seconds_to(deadline))
        except OSError as error:
            if time.monotonic() + pause >= deadline:
                raise ConnectError(f"cannot connect to {address}: {error}") from error
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        else:
            set_up_tcp(sock)
            return sock


def _open_local(address: str, deadline: float) -> socket.socket:
    """Connect to an abstract Unix socket: it is there or it is not, so that nothing is tried again."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_seconds_to(deadline))
    try:
        sock.connect(address)
    except OSError as error:
        sock.close()
        raise ConnectError(f"cannot connect to {address[1:]}: {error}") from error
    return sock


def _seal(sock: socket.socket, address: str, token: bytes, deadline: float) -> EncryptedSocket:
    """Do the TLS handshake; the socket is closed if it fails."""
    context = contexts(token).client
    sock.settimeout(_seconds_to(deadline))
    sealed = cast("EncryptedSocket", context.wrap_socket(sock, do_handshake_on_connect=False))
    try:
        sealed.do_handshake()
    except OSError as error:
        sealed.close()
        if isinstance(error, ssl.SSLCertVerificationError):
            raise Rejected(f"{address} is not of this job: {why(error)}; is DL2_TOKEN the one of this job?") from error
        raise AuthenticationError(
            f"{address} ended the connection: {why(error)}: is this the right address of a pslite process, "
            f"and {VARIABLE} the same in all tasks of the job?"
        ) from error
    return sealed


def _introduce(
    sock: socket.socket,
    address: str,
    identity: Identity,
    channel: Literal["control", "agent", "data"],
    binding: bytes,
    incarnation: str,
    deadline: float,
) -> Challenge:
    inbox: Inbox[Handshake] = Inbox(Handshake, MAX_HANDSHAKE_BYTES)
    hello = Hello(
        protocol=PROTOCOL,
        channel=channel,
        role=identity.role,
        task=identity.task,
        incarnation=identity.incarnation,
        nonce=secrets.token_bytes(NONCE_BYTES),
        encrypt=identity.encrypt,
    )
    sock.settimeout(_seconds_to(deadline))
    sock.sendall(frame(hello))
    challenge = _expect(receive_one(sock, inbox, deadline), Challenge, address)
    if incarnation and challenge.incarnation != incarnation:
        # Before it accepts: it may have another connection of this process, and have got the address of a dead member.
        raise AuthenticationError(
            f"the process at {address} is incarnation {challenge.incarnation} of {challenge.task}, not {incarnation}"
        )
    sock.sendall(frame(Proof(mac=_mac(identity.token, b"client", hello, challenge, binding))))
    accepted = _expect(receive_one(sock, inbox, deadline), Accepted, address)
    if not hmac.compare_digest(accepted.mac, _mac(identity.token, b"server", hello, challenge, binding)):
        raise AuthenticationError(f"{challenge.task} at {address} could not prove that it knows this job's token")
    return challenge


def _expect(message: Handshake, kind: type[M], address: str) -> M:
    if isinstance(message, kind):
        return message
    if isinstance(message, Refused):
        hint = "; is DL2_TOKEN the one of this job?" if message.reason == "wrong token" else ""
        raise Rejected(f"refused by {address}: {message.reason}{hint}")
    raise AuthenticationError(
        f"{address} sent {type(message).__name__}, which is not the next message of the handshake"
    )
