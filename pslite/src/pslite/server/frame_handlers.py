"""Data frames that a server takes, by kind: where the payload of each goes, and what happens when it is complete."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from pslite.errors import ProtocolError
from pslite.fault_points import FaultPoint
from pslite.job.blocks import Block
from pslite.net.data_frames import (
    AGAIN,
    FETCH,
    FIRST_STATE,
    INIT,
    MAX_REGIONS,
    PUSH,
    REGION,
    REPLICATE,
    REPLICATED,
    RESTORE,
    SEED,
    SEEDED,
    STATE,
    STATE_ACK,
    Header,
    Link,
)
from pslite.net.messages import Failed
from pslite.net.shared_memory import MappedMemory
from pslite.numeric.sparse_rows import checked_length
from pslite.server.block_handoff import Handoff
from pslite.server.block_state import Array, state_bytes
from pslite.server.connections import Connections
from pslite.server.replication import ReplicaSender, ReplicaStore
from pslite.server.rounds import Rounds
from pslite.server.server_state import ServerState


class _Kind(NamedTuple):
    """What is done with frames of a kind."""

    #: returns the memory for the payload; raises ProtocolError
    payload: Callable[[Link, Header, Block], memoryview]
    #: takes a frame whose payload is complete
    arrived: Callable[[Link, Header], None]


@dataclass(eq=False)
class Frames:
    """The `Receiver` of a server's data connections."""

    state: ServerState
    connections: Connections
    backups: ReplicaSender
    replicas: ReplicaStore
    handoff: Handoff
    #: set when the job is known
    rounds: Rounds = field(init=False)
    #: by connection, where the payload of the present frame goes, if it is not taken in place
    _buffers: WeakKeyDictionary[Link, Array] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        weights = _Kind(self._weights_payload, self._weights)
        request = _Kind(_no_payload, self._request)
        self._kinds = {
            PUSH: _Kind(self._push_payload, self._push),
            INIT: weights,
            RESTORE: weights,
            FIRST_STATE: _Kind(self._first_state_payload, self._first_state),
            STATE: _Kind(self._state_payload, self._state_arrived),
            STATE_ACK: _Kind(_no_payload, self._state_acknowledged),
            SEED: _Kind(self._seed_payload, self._seed),
            SEEDED: _Kind(_no_payload, self._seed_acknowledged),
            REPLICATE: _Kind(self._step_payload, self._step),
            REPLICATED: _Kind(_no_payload, self._step_acknowledged),
            FETCH: request,
            AGAIN: request,
        }

    # --- the Receiver interface -----------------------------------------------------------------------------------

    def payload(self, link: Link, header: Header) -> memoryview:
        """Return the memory for the payload of a frame; raise ProtocolError to refuse the peer."""
        if header.kind == AGAIN and not self.state.known:
            return memoryview(b"")  # the worker has been told sooner than this server what the job is: nothing is here
        if header.block >= len(self.state.blocks):
            raise ProtocolError(f"block {header.block} does not exist")
        kind = self._kinds.get(header.kind)
        if kind is None:
            raise ProtocolError(f"a frame of kind {header.kind} does not belong here")
        return kind.payload(link, header, self.state.blocks[header.block])

    def arrived(self, link: Link, header: Header) -> None:
        """Take a frame whose payload is complete."""
        if not self.state.faults.reached(FaultPoint.FRAME, link, header):
            self._kinds[header.kind].arrived(link, header)

    def shared(self, link: Link, header: Header) -> None:
        """Take a gradient that lies in the worker's own memory, or that memory."""
        if header.kind == REGION:
            if link.role != "worker" or header.place in link.regions or len(link.regions) >= MAX_REGIONS:
                raise ProtocolError(f"{link.task} may not hand over shared memory number {header.place}")
            link.regions[header.place] = MappedMemory(link.descriptor())
            return
        region, state = link.regions.get(header.place), self.state
        if header.kind != PUSH or region is None or header.block >= len(state.blocks):
            raise ProtocolError(f"{link.task} sent a frame that does not belong here")
        block = state.blocks[header.block]
        if header.length != block.nbytes or block.row or region.nbytes != state.layout.nbytes:
            raise ProtocolError(f"{link.task} announced {header.length} bytes in shared memory of {region.nbytes}")
        if self.rounds.accepts(link, header):
            # The worker leaves it as it is until it has the next version of every block.
            self._buffers[link] = region.array(block, state.layout.blocks[block.number])
        self.arrived(link, header)

    # --- gradients ------------------------------------------------------------------------------------------------

    def _push_payload(self, link: Link, header: Header, block: Block) -> memoryview:
        length = checked_length(block, header.length) if block.row else self.state.lengths[block.number]
        if not self.rounds.accepts(link, header):
            return memoryview(bytearray(length))  # nobody wants it
        if block.row:
            return self._keep(link, length)
        encoding = self.state.encodings[block.number]
        buffer = self.state.pool.take(block, encoding.dtype if encoding is not None else "")
        self._buffers[link] = buffer
        return buffer.data.cast("B")

    def _push(self, link: Link, header: Header) -> None:
        buffer = self._buffers.pop(link, None)
        if buffer is None:
            self.rounds.refuse(link, header)
        else:
            self.rounds.push(link, header, buffer)

    def _request(self, link: Link, header: Header) -> None:
        if self.state.known:
            self.rounds.request(link, header)

    # --- the first weights of a job, or of a worker ---------------------------------------------------------------

    def _weights_payload(self, link: Link, header: Header, block: Block) -> memoryview:
        if header.block in self.state.owned and self.state.is_first_worker(link, header.plan):
            # sent again, for the connection broke when it had come
            return self._keep(link, block.nbytes if header.kind == INIT else state_bytes(block))
        state = self.state.expected(link, header)
        return state.weights if header.kind == INIT else state.whole

    def _weights(self, link: Link, header: Header) -> None:
        if self._buffers.pop(link, None) is not None:
            return
        block = self.state.expected(link, header)
        self.handoff.receive(block, header)
        self.rounds.answer_requests()
        self.handoff.assign_backup(block, moved=False)
        self.rounds.broadcast(block)
        self.handoff.report()

    def _first_state_payload(self, link: Link, header: Header, block: Block) -> memoryview:
        """Where workers have weights and optimizer: what a worker sends to those that have just come."""
        prepared = self.state.plans.get(header.plan)
        if not self.state.sums_only or prepared is None or prepared.plan.worker_index(link.task) < 0:
            raise ProtocolError(f"{link.task} sent a state of block {header.block}, for which nobody waits")
        if header.length != state_bytes(block):
            raise ProtocolError(f"{header.length} bytes are no state of block {header.block}")
        return self._keep(link, header.length)

    def _first_state(self, link: Link, header: Header) -> None:
        state = self._buffers.pop(link).data
        for task in self.state.plans[header.plan].newcomers - {link.task}:
            other = self.connections.links.get(task)
            if other is not None:
                other.send(header, state)

    # --- blocks that move -----------------------------------------------------------------------------------------

    def _state_payload(self, link: Link, header: Header, block: Block) -> memoryview:  # noqa: ARG002
        return self.state.expected(link, header).whole

    def _state_arrived(self, link: Link, header: Header) -> None:
        block = self.state.expected(link, header)
        crc = zlib.crc32(block.whole)
        if crc != header.crc:
            damage = f"checksum {crc:08x}, not {header.crc:08x}"
            self.state.send(Failed(reason=f"block {header.block} came damaged from {link.task}: {damage}"))
            return
        link.send(header.reply(STATE_ACK))
        self.handoff.receive(block, header)
        self.rounds.answer_requests()
        self.handoff.assign_backup(block, moved=True)
        self.rounds.proceed(block)
        self.handoff.report()

    def _state_acknowledged(self, link: Link, header: Header) -> None:  # noqa: ARG002
        if header.block in self.handoff.unacknowledged:
            self.handoff.acknowledged(header.block)
        elif not self.state.replicated:
            raise ProtocolError(f"an acknowledgement of block {header.block}, which was not sent")
        self.handoff.report()

    # --- replicas -------------------------------------------------------------------------------------------------

    def _seed_payload(self, link: Link, header: Header, block: Block) -> memoryview:
        replica = self.replicas.find(link, header) if self._from_owner(link, header) else None
        return replica.whole if replica is not None else memoryview(bytearray(state_bytes(block)))

    def _seed(self, link: Link, header: Header) -> None:
        if self.state.is_owner(link, header.block) and self.replicas.find(link, header) is not None:
            self.replicas.take_seed(link, header)
            # what an owner before was sending may not come into what is a replica now
            for other in self.connections.others(link):
                late = other.coming
                if late is not None and (late.kind, late.block) == (SEED, header.block):
                    other.divert()

    def _seed_acknowledged(self, link: Link, header: Header) -> None:
        self.backups.seed_acknowledged(link, header, self.state.owned.get(header.block))
        self.handoff.report()

    def _step_payload(self, link: Link, header: Header, block: Block) -> memoryview:
        replica = self.replicas.find(link, header) if self._from_owner(link, header) else None
        buffer = self.replicas.buffer(block, header, len(self.state.tensors.pieces[header.block]))
        if replica is not None:
            self._buffers[link] = buffer
        return buffer.data

    def _step(self, link: Link, header: Header) -> None:
        buffer = self._buffers.pop(link, None)
        # the block may have got another owner while its bytes came
        if buffer is not None and self.state.is_owner(link, header.block) and self.replicas.find(link, header):
            self.replicas.take_step(link, header, buffer)

    def _step_acknowledged(self, link: Link, header: Header) -> None:
        block = self.backups.step_acknowledged(link, header)
        if block is not None:
            self.rounds.broadcast(block)

    def _from_owner(self, link: Link, header: Header) -> bool:
        """Whether a frame is of the block's owner, whose word may come before its acknowledgement of the block."""
        owner = self.state.is_owner(link, header.block)
        if owner and header.block in self.handoff.unacknowledged:
            self.handoff.acknowledged(header.block)
        return owner

    # --- memory ---------------------------------------------------------------------------------------------------

    def _keep(self, link: Link, length: int) -> memoryview:
        """Return new memory for a payload, which `arrived` finds."""
        buffer = np.empty(length, dtype=np.uint8)
        self._buffers[link] = buffer
        return buffer.data


def _no_payload(link: Link, header: Header, block: Block) -> memoryview:  # noqa: ARG001
    return memoryview(b"")
