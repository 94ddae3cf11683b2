"""The data plane: frames of one block each, over non-blocking sockets, into and out of memory that exists already.

A frame is a fixed header and a payload whose length must be the one that the job's description gives for that block;
it is checked before a byte of payload is received.
"""

from __future__ import annotations

import itertools
import os
import selectors
import socket
import struct
import zlib
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Protocol

from numpy.typing import NDArray

from pslite.errors import PeerLost, ProtocolError
from pslite.net.shared_memory import MappedMemory
from pslite.net.tls import EncryptedSocket

# Kinds of frames.  Every frame is about one block; "state" are its weights and optimizer slots.

#: worker -> server: gradient sum of one tree node, for step `version`
PUSH = 1
#: server -> worker: weights at `version`
PARAM = 2
#: old owner -> new owner: state at `version`, with a checksum
STATE = 3
#: new owner -> old owner: the state has arrived undamaged
STATE_ACK = 4
#: first worker -> server: initial weights
INIT = 5
#: server -> worker: a push was refused, as the server does not own the block or expects another step
REFUSED = 6
#: first worker -> server: state from a checkpoint of `version`
RESTORE = 7
#: worker -> server, server -> worker: descriptor of the sender's shared memory number `region`; about no block
REGION = 8
#: server -> worker: the rows of a sparse block that steps `version` - 2 and `version` - 1 changed, at `version`
PARAM_ROWS = 9
#: owner -> backup: step `version`: `factor_count` float64 factors, then the gradient sum
REPLICATE = 10
#: backup -> owner: that step has arrived
REPLICATED = 11
#: owner -> backup: state at `version`, with a checksum, from which the backup begins a replica
SEED = 12
#: backup -> owner: the seed has arrived undamaged
SEEDED = 13
#: worker -> server: that tree node has no gradient in step `version`, which is one of other keys
SKIP = 14
#: server -> worker: step `version` - 1 has left the weights as they were
SAME = 15
#: worker -> server: send me the state at `version`
FETCH = 20
#: server -> worker: the state that FETCH asked for
WHOLE = 21
#: worker -> server, after a new connection or a failover: send me the weights at `version` again if you have sent them
RESEND = 24
#: version in a RESEND: the first one that a new worker gets
FIRST = -1
#: version in a RESEND: the one that the owner has
NEWEST = -2
#: regions of one peer, at most
MAX_REGIONS = 256

_MAGIC = 0x31534C50  # "PLS1"
_HEADER = struct.Struct("<IHHIIIIIIqqq")
HEADER_BYTES = _HEADER.size
_GATHER = 32
_FILE = struct.Struct("i")
#: room for one open file: more than one is dropped by the kernel
_ANCILLARY = socket.CMSG_LEN(_FILE.size)
#: bytes received from one peer, or looked at in its memory, before others get their turn and answers are sent
_BUDGET = 2 << 20
#: of a Unix socket; its default is a fraction of a block
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a frame.

    `detail` and `crc_or_flag` carry different things in frames of different kinds; each property says for which kinds
    it may be read.
    """

    kind: int
    #: number of the plan under which it is sent
    plan: int
    #: number of the block
    block: int
    #: `node`, `factor_count`, `page_offset`, `uncounted_steps` or `gradients_applied`; 0 in other frames
    detail: int
    #: bytes of the payload
    length: int
    version: int
    #: first version of `plan`
    first: int
    #: number of a plan that is about to take effect; 0: none is announced
    next_plan: int = 0
    #: first version of `next_plan`
    next_first: int = 0
    #: `crc` or `first_worker_had_gradient`; 0 in other frames
    crc_or_flag: int = 0
    #: 0: the payload follows.  Otherwise it does not, but lies in the sender's shared memory of this number
    region: int = 0

    @classmethod
    def with_checksum(
        cls, kind: int, payload: memoryview, *, plan: int, block: int, version: int, first: int, steps: int = 0
    ) -> Header:
        """Return the header of a frame with a block's state and its checksum: STATE or SEED.

        `steps` is read as `uncounted_steps`, or in an asynchronous job as `gradients_applied`.
        """
        return cls(kind, plan, block, steps, payload.nbytes, version, first, crc_or_flag=zlib.crc32(payload))

    def in_shared_memory(self, region: int, page_offset: int) -> Header:
        """Return this PARAM for a payload that does not follow, but lies in the sender's shared memory."""
        return replace(self, region=region, detail=page_offset)

    @property
    def node(self) -> int:
        """PUSH, SKIP, REFUSED: the tree node of the gradient."""
        return self.detail

    @property
    def factor_count(self) -> int:
        """REPLICATE: how many float64 numbers precede the gradient sum; 0: the step has no gradient."""
        return self.detail

    @property
    def page_offset(self) -> int:
        """PARAM in shared memory: offset of the block in that memory, in pages."""
        return self.detail

    @property
    def uncounted_steps(self) -> int:
        """STATE, SEED, WHOLE in synchronous jobs: how many steps the optimizer does not count for the block.

        These are steps without a gradient of the block, and those before it was added.
        """
        return self.detail

    @property
    def gradients_applied(self) -> int:
        """STATE in asynchronous jobs: how many gradients have been applied to the block."""
        return self.detail

    @property
    def crc(self) -> int:
        """STATE, SEED: CRC-32 of the payload."""
        return self.crc_or_flag

    @property
    def first_worker_had_gradient(self) -> bool:
        """PARAM, PARAM_ROWS, SAME: whether the first worker had a gradient of the block in step `version` - 1."""
        return bool(self.crc_or_flag)

    def check(self, payload: memoryview, sender: str) -> None:
        """Raise `ProtocolError` if a payload does not have this header's checksum (STATE, SEED)."""
        crc = zlib.crc32(payload)
        if crc != self.crc:
            raise ProtocolError(
                f"the state of block {self.block} was damaged on its way from {sender}: its checksum is {crc:08x}, not "
                f"{self.crc:08x}"
            )

    def reply(self, kind: int) -> Header:
        """Return the header of a frame without payload about the same block and version."""
        return Header(kind, self.plan, self.block, self.detail, 0, self.version, self.first)

    def pack(self) -> bytes:
        """Return the header as bytes on the wire."""
        return _HEADER.pack(
            _MAGIC,
            self.kind,
            self.region,
            self.plan,
            self.block,
            self.detail,
            self.length,
            self.crc_or_flag,
            self.next_plan,
            self.version,
            self.first,
            self.next_first,
        )


def region_header(number: int) -> Header:
    """Return the header that announces the sender's shared memory of that number."""
    return Header(REGION, 0, 0, 0, 0, 0, 0, region=number)


def unpack(data: bytearray) -> Header:
    """Return the header in `data`. Raises `ProtocolError` if it is not one."""
    (
        magic, kind, region, plan, block, detail, length, crc_or_flag, next_plan, version, first, next_first
    ) = _HEADER.unpack_from(data)  # fmt: skip
    if magic != _MAGIC:
        raise ProtocolError("a data frame does not begin with a valid header")
    return Header(kind, plan, block, detail, length, version, first, next_plan, next_first, crc_or_flag, region)


def bytes_of(array: NDArray[Any]) -> memoryview:
    """Return the memory of an array without gaps, as the payload of a frame."""
    view: memoryview = array.reshape(-1).data.cast("B")
    return view


class Receiver(Protocol):
    """Receiver of frames: gives the memory for a payload, and is called again when the payload is complete."""

    def payload(self, link: Link, header: Header) -> memoryview:
        """Return the memory for the payload (as long as it must be); raise ProtocolError to refuse the peer."""

    def arrived(self, link: Link, header: Header) -> None:
        """The payload is complete."""

    def shared(self, link: Link, header: Header) -> None:
        """The payload lies in shared memory; for REGION, `link.descriptor()` gives that.  Raises ProtocolError."""


class Link:
    """One authenticated data connection."""

    def __init__(self, sock: socket.socket, task: str, incarnation: str, role: str) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.task = task
        self.incarnation = incarnation
        self.role = role
        self.open = True
        self._sealed = sock if isinstance(sock, EncryptedSocket) else None
        #: whether memory can be shared over it
        self.local = sock.family == socket.AF_UNIX
        if self.local:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        #: the peer's shared memory, by number
        self.regions: dict[int, MappedMemory] = {}
        self._out: deque[memoryview] = deque()
        #: whether a selector waits until the socket is writable
        self._awaited = False
        #: open files that go with queued headers, by the latter's identity, and what has come
        self._handing: dict[int, int] = {}
        self._descriptors: list[int] = []
        self._header = bytearray(HEADER_BYTES)
        self._got = 0
        self._frame: Header | None = None
        self._payload = memoryview(b"")

    @property
    def unsent(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self._out)

    def send(self, header: Header, *payload: memoryview) -> None:
        """Queue a frame; the pieces of its payload are not copied and must stay as they are until they are sent."""
        self._out.append(memoryview(header.pack()))
        self._out += [piece for piece in payload if piece.nbytes]

    def hand(self, header: Header, descriptor: int) -> None:
        """Queue a header with an open file, which must stay open until it is sent."""
        view = memoryview(header.pack())
        self._handing[id(view)] = descriptor
        self._out.append(view)

    def descriptor(self) -> int:
        """Return the open file that came with the header just received; it is the caller's from now on.

        Raises `ProtocolError` if there is none.
        """
        if not self._descriptors:
            raise ProtocolError(f"{self.task} announced shared memory, but sent no descriptor of it")
        return self._descriptors.pop()

    def flush(self) -> bool:
        """Send what the socket takes; return whether nothing is left. Raises `PeerLost` if the connection broke."""
        try:
            while self._out:
                self._gather()
            return True
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise PeerLost(f"connection to {self.task} broke: {error.strerror}") from error

    def await_room(self, selector: selectors.BaseSelector) -> None:
        """Have a selector, which reports what comes, also wait for room in the socket as long as bytes are unsent."""
        if self.unsent != self._awaited:
            self._awaited = self.unsent
            selector.modify(self.sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._awaited else 0), self)

    def _gather(self) -> None:
        """Send what is queued, in one call; an open file goes with the first byte of its header."""
        views = list(itertools.islice(self._out, _GATHER))
        given: list[tuple[int, int, bytes]] = []
        if self._handing:
            first = next((i for i, view in enumerate(views) if id(view) in self._handing), len(views))
            if first == 0:
                given = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FILE.pack(self._handing[id(views[0])]))]
            del views[max(1, first) :]
        sent = self.sock.sendmsg(views, given)
        if given:
            del self._handing[id(views[0])]
        self._sent(sent)

    def _sent(self, count: int) -> None:
        """Forget queued bytes that are on their way."""
        out = self._out
        while count:
            view = out[0]
            if count < view.nbytes:
                out[0] = view[count:]
                return
            out.popleft()
            count -= view.nbytes

    def receive(self, receiver: Receiver) -> bool:
        """Receive frames until the socket is empty or the peer has had its turn; returns whether there may be more.

        Raises
        ------
        PeerLost
            the connection ended.
        ProtocolError
            the peer sent what it must not.

        """
        budget = _BUDGET
        # what TLS has deciphered already the selector does not see
        while budget > 0 or (self._sealed is not None and self._sealed.pending()):
            target = (memoryview(self._header) if self._frame is None else self._payload)[self._got :]
            try:
                if self.local and self._frame is None:
                    got = self._receive_header(target)
                else:
                    got = self.sock.recv_into(target)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                raise PeerLost(f"connection to {self.task} broke: {error.strerror}") from error
            if not got:
                raise PeerLost(f"{self.task} closed its connection")
            self._got += got
            budget -= got
            if got == target.nbytes:
                budget -= self._advance(receiver)
        return True

    def _receive_header(self, target: memoryview) -> int:
        """Receive part of a header; an open file comes with its first byte."""
        got, ancillary, _, _ = self.sock.recvmsg_into([target], _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._descriptors += [d for (d,) in _FILE.iter_unpack(data[: len(data) - len(data) % _FILE.size])]
        return got

    @property
    def coming(self) -> Header | None:
        """The frame whose payload is on its way."""
        return self._frame

    def divert(self) -> None:
        """Have the rest of the payload that is on its way go nowhere."""
        self._payload = memoryview(bytearray(self._payload.nbytes))

    def _advance(self, receiver: Receiver) -> int:
        """Take what is complete; return how many bytes of the peer's memory have been looked at."""
        if self._frame is None:
            header = unpack(self._header)
            if header.region:
                self._got = 0
                receiver.shared(self, header)
                self._forget_descriptors()
                return header.length
            self._forget_descriptors()
            payload = receiver.payload(self, header)
            if payload.nbytes != header.length:
                raise ProtocolError(
                    f"{self.task} announced {header.length} bytes, but the frame must have {payload.nbytes}"
                )
            self._got = 0
            if header.length:
                self._frame, self._payload = header, payload
            else:
                receiver.arrived(self, header)
        else:
            header, self._frame, self._payload, self._got = self._frame, None, memoryview(b""), 0
            receiver.arrived(self, header)
        return 0

    def close(self) -> None:
        """Close the socket."""
        if self.open:
            self.open = False
            self._out.clear()
            self._handing.clear()
            self._forget_descriptors()
            self.regions.clear()
            self.sock.close()

    def _forget_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
