"""Length-prefixed messages over a socket, for control and handshake: sizes are checked before receiving."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any, Generic, TypeVar

import msgspec

from pslite.errors import ConnectError, PeerLost, ProtocolError

_LENGTH = struct.Struct("<I")
_CHUNK = 65536

T = TypeVar("T")


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as bytes on the wire."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Inbox(Generic[T]):
    """Cuts a byte stream into messages of the types it was made for; never holds more than `limit` bytes of one."""

    def __init__(self, types: Any, limit: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(types)
        self._limit = limit
        self._data = bytearray()

    @property
    def wanted(self) -> int:
        """How many bytes may be received without reaching into what follows the message now coming in."""
        if len(self._data) < _LENGTH.size:
            return _LENGTH.size - len(self._data)
        return self._length() + _LENGTH.size - len(self._data)

    def _length(self) -> int:
        (length,) = _LENGTH.unpack_from(self._data)
        if length > self._limit:
            raise ProtocolError(f"a control message announces {length} bytes, but at most {self._limit} are allowed")
        return int(length)

    def feed(self, data: bytes) -> list[T]:
        """Take bytes; return the messages they complete.

        Raises
        ------
        ProtocolError
            a message is too long or is not one of the allowed types.

        """
        self._data += data
        found: list[T] = []
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + self._length()
            if len(self._data) < end:
                break
            body = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            try:
                found.append(self._decoder.decode(body))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ProtocolError(f"a control message is malformed: {error}") from error
        return found


class Channel(Generic[T]):
    """A control connection for a poll loop: never blocks."""

    def __init__(self, sock: socket.socket, inbox: Inbox[T]) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._inbox = inbox
        self._out = bytearray()

    @property
    def unsent(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self._out)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message and send what the socket takes now. A broken connection shows when it is read."""
        self._out += frame(message)
        self.flush()

    def flush(self) -> None:
        """Send queued bytes as far as possible."""
        while self._out:
            try:
                del self._out[: self.sock.send(self._out)]
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._out.clear()
                return

    def receive(self) -> tuple[list[T], bool]:
        """Return the messages that have arrived, and whether the connection is still open."""
        found: list[T] = []
        while True:
            try:
                data = self.sock.recv(_CHUNK)
            except (BlockingIOError, InterruptedError):
                return found, True
            except OSError:
                return found, False
            if not data:
                return found, False
            found += self._inbox.feed(data)

    def wait(self) -> tuple[list[T], bool]:
        """Wait until something arrives on a blocking socket; return as `receive` does."""
        try:
            data = self.sock.recv(_CHUNK)
        except OSError:
            return [], False
        return self._inbox.feed(data), bool(data)

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def receive_one(sock: socket.socket, inbox: Inbox[T], deadline: float) -> T:
    """Receive exactly one message from a blocking socket, not one byte more.

    Raises
    ------
    ConnectError
        the deadline (monotonic seconds) passed.
    PeerLost
        the peer closed the connection.

    """
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ConnectError("no answer within the time limit")
        sock.settimeout(left)
        try:
            data = sock.recv(inbox.wanted)
        except TimeoutError:
            continue
        except OSError as error:
            raise PeerLost(f"connection lost: {error}") from error
        if not data:
            raise PeerLost("the peer closed the connection")
        messages = inbox.feed(data)
        if messages:
            return messages[0]
