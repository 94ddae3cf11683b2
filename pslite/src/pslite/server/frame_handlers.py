"""Handlers of the data frames that a server receives, by kind: where the payload goes, and what is done with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from pslite.errors import ProtocolError
from pslite.fault_points import FaultPoint
from pslite.job.weight_blocks import Block
from pslite.net.messages import Failed
from pslite.net.shared_memory import MappedMemory
from pslite.net.tensor_frames import (
    FETCH,
    INIT,
    MAX_REGIONS,
    PUSH,
    REGION,
    REPLICATE,
    REPLICATED,
    RESEND,
    RESTORE,
    SEED,
    SEEDED,
    SKIP,
    STATE,
    STATE_ACK,
    Header,
    Link,
)
from pslite.numeric.sparse_rows import checked_length
from pslite.server.block_handoff import Handoff
from pslite.server.block_state import Array, BlockState, state_bytes
from pslite.server.data_connections import Connections
from pslite.server.replication import ReplicaSender, ReplicaStore
from pslite.server.server_state import ServerState
from pslite.server.training_rounds import Rounds


class _Handler(NamedTuple):
    """The two functions that handle a kind of frame."""

    #: returns the memory for the payload; raises ProtocolError to refuse the frame
    payload: Callable[[Link, Header, Block], memoryview]
    #: takes a frame whose payload is complete
    arrived: Callable[[Link, Header], None]


@dataclass(eq=False)
class FrameHandlers:
    """The `Receiver` of a server's data connections."""

    state: ServerState
    connections: Connections
    replica_sender: ReplicaSender
    replica_store: ReplicaStore
    handoff: Handoff
    #: set when the job's description is known
    rounds: Rounds = field(init=False)
    #: connection -> memory into which the payload of its present frame is received, unless it goes into a block's
    #: state, or is dropped
    _buffers: WeakKeyDictionary[Link, Array] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        weights = _Handler(self._weights_payload, self._weights_arrived)
        request = _Handler(_no_payload, self._request_arrived)
        self._handlers = {
            PUSH: _Handler(self._push_payload, self._push_arrived),
            SKIP: _Handler(_no_payload, self._skip_arrived),
            INIT: weights,
            RESTORE: weights,
            STATE: _Handler(self._state_payload, self._state_arrived),
            STATE_ACK: _Handler(_no_payload, self._state_acknowledged),
            SEED: _Handler(self._seed_payload, self._seed_arrived),
            SEEDED: _Handler(_no_payload, self._seed_acknowledged),
            REPLICATE: _Handler(self._step_payload, self._step_arrived),
            REPLICATED: _Handler(_no_payload, self._step_acknowledged),
            FETCH: request,
            RESEND: request,
        }

    # --- the Receiver interface -----------------------------------------------------------------------------------

    def payload(self, link: Link, header: Header) -> memoryview:
        """Return the memory for the payload of a frame; raise ProtocolError to refuse the peer."""
        count = len(self.state.definitions)
        if header.kind == RESEND and header.block >= count:
            # A worker may ask before this server knows the job, or for a block that an aborted plan would have added;
            # `_request_arrived` ignores it.
            return memoryview(b"")
        if header.block >= count:
            raise ProtocolError(f"{link.task} sent a frame about block {header.block}, but the job has {count} blocks")
        handler = self._handlers.get(header.kind)
        if handler is None:
            raise ProtocolError(f"{link.task} sent a frame of kind {header.kind}, which no server accepts")
        return handler.payload(link, header, self.state.definitions[header.block])

    def arrived(self, link: Link, header: Header) -> None:
        """Take a frame whose payload is complete."""
        if not self.state.faults.reached(FaultPoint.FRAME, link, header):
            self._handlers[header.kind].arrived(link, header)

    def shared(self, link: Link, header: Header) -> None:
        """Take a gradient in the worker's shared memory, or the descriptor of such memory.

        Raises
        ------
        ProtocolError
            the memory, or the frame, is not one that the peer may send.

        """
        if header.kind == REGION:
            if link.role != "worker" or len(link.regions.keys() - {header.region}) >= MAX_REGIONS:
                raise ProtocolError(
                    f"{link.task} sent shared memory number {header.region}, which is not allowed: only workers may, "
                    f"at most {MAX_REGIONS}"
                )
            # replaces the region that had this number
            link.regions[header.region] = MappedMemory(link.descriptor())
            return
        region, state = link.regions.get(header.region), self.state
        if header.kind != PUSH or region is None or header.block >= len(state.definitions):
            raise ProtocolError(
                f"{link.task} sent a frame of kind {header.kind} about block {header.block} in shared memory number "
                f"{header.region}, which is not allowed: shared memory must have been sent before, and contains only "
                f"gradients (kind {PUSH}) of the job's blocks"
            )
        definition = state.definitions[header.block]
        if header.length != definition.nbytes or definition.is_sparse or region.nbytes not in state.region_sizes:
            raise ProtocolError(
                f"{link.task} sent a gradient of {header.length} bytes of block {header.block} in shared memory of "
                f"{region.nbytes} bytes; {definition.nbytes} and {state.layout.nbytes} bytes are right, "
                "and gradients of sparse blocks are not shared"
            )
        if self.rounds.admit(link, header) is not None:
            # The worker does not write to it until it has the next version of every block.
            self._buffers[link] = region.array(definition, state.layout.blocks[definition.number])
        self.arrived(link, header)

    # --- gradients and requests -----------------------------------------------------------------------------------

    def _push_payload(self, link: Link, header: Header, definition: Block) -> memoryview:
        number, state = header.block, self.state
        length = checked_length(definition, header.length) if definition.is_sparse else state.wire_lengths[number]
        if self.rounds.admit(link, header) is None:
            return _dropped(length)
        if definition.is_sparse:
            return self._new_buffer(link, length)
        encoding = state.encodings[number]
        buffer = state.pool.take(definition, encoding.dtype if encoding is not None else "")
        self._buffers[link] = buffer
        return buffer.data.cast("B")

    def _push_arrived(self, link: Link, header: Header) -> None:
        buffer = self._buffers.pop(link, None)
        if buffer is None:
            self.rounds.not_admitted(link, header)
        else:
            self.rounds.push(link, header, buffer)

    def _skip_arrived(self, link: Link, header: Header) -> None:
        self.rounds.skip(link, header)

    def _request_arrived(self, link: Link, header: Header) -> None:
        if header.block < len(self.state.definitions):
            self.rounds.take_request(link, header)

    # --- initial weights of the job -------------------------------------------------------------------------------

    def _weights_payload(self, link: Link, header: Header, definition: Block) -> memoryview:
        if header.block in self.state.owned and self.state.may_send_initial_weights(link, header):
            # They have arrived before: sent again because the worker's connection broke, or by another worker.
            return self._new_buffer(link, definition.nbytes if header.kind == INIT else state_bytes(definition))
        block = self.state.block_for_state(link, header)
        return block.weights if header.kind == INIT else block.weights_and_slots

    def _weights_arrived(self, link: Link, header: Header) -> None:
        if self._buffers.pop(link, None) is not None or header.block in self.state.owned:
            return
        block = self.state.block_for_state(link, header)
        if not self.handoff.receive(block, header):
            return
        self.rounds.answer_requests()
        # the replica of a block that a later plan adds is seeded at once
        self.handoff.assign_backup(block, moved=self.state.prepared_of(block).previous is not None)
        self.rounds.answer_workers(block)
        self.handoff.report_moved_if_complete()

    # --- blocks that move -----------------------------------------------------------------------------------------

    def _state_payload(self, link: Link, header: Header, definition: Block) -> memoryview:  # noqa: ARG002
        return self.state.block_for_state(link, header).weights_and_slots

    def _state_arrived(self, link: Link, header: Header) -> None:
        block = self.state.block_for_state(link, header)
        try:
            header.check(block.weights_and_slots, link.task)
        except ProtocolError as error:
            # The former owner does not send it a second time: the job cannot go on.  A damaged seed
            # (`ReplicaStore.take_seed`) only closes the connection, as the job can go on without the replica.
            self.state.send(Failed(reason=str(error)))
            return
        if not self.handoff.receive(block, header):
            return
        link.send(header.reply(STATE_ACK))
        self.rounds.answer_requests()
        self.handoff.assign_backup(block, moved=True)
        self.rounds.proceed(block)
        self.handoff.report_moved_if_complete()

    def _state_acknowledged(self, link: Link, header: Header) -> None:
        if header.block in self.handoff.unacknowledged:
            self.handoff.acknowledged(header.block)
        elif not self.state.replicated:  # with replicas, `_note_acknowledged` may have been called before
            raise ProtocolError(f"{link.task} acknowledged block {header.block}, which it was not sent")
        self.handoff.report_moved_if_complete()

    # --- replicas -------------------------------------------------------------------------------------------------

    def _note_acknowledged(self, link: Link, header: Header) -> None:
        """Count a seed or step from a block's new owner as its acknowledgement: it proves that it has the block."""
        if header.block in self.handoff.unacknowledged and self.state.peer_owns(link, header.block):
            self.handoff.acknowledged(header.block)

    def _replica(self, link: Link, header: Header) -> BlockState | None:
        """Return the replica that a seed or step is for; None if the frame is to be dropped.

        Raises
        ------
        ProtocolError
            the peer has never owned the block, or the replica is at another version.

        """
        return self.replica_store.find(link, header) if self.state.check_owner(link, header.block) else None

    def _seed_payload(self, link: Link, header: Header, definition: Block) -> memoryview:
        self._note_acknowledged(link, header)
        replica = self._replica(link, header)
        return replica.weights_and_slots if replica is not None else _dropped(state_bytes(definition))

    def _seed_arrived(self, link: Link, header: Header) -> None:
        if self.state.peer_owns(link, header.block) and self.replica_store.find(link, header) is not None:
            self.replica_store.take_seed(link, header)
            # Discard a seed from a former owner that is still arriving: it goes into the same memory.
            for other_link in self.connections.except_link(link):
                coming = other_link.coming
                if coming is not None and (coming.kind, coming.block) == (SEED, header.block):
                    other_link.divert()

    def _seed_acknowledged(self, link: Link, header: Header) -> None:
        self.replica_sender.seed_acknowledged(link, header, self.state.owned.get(header.block))
        self.handoff.report_moved_if_complete()

    def _step_payload(self, link: Link, header: Header, definition: Block) -> memoryview:
        self._note_acknowledged(link, header)
        replica = self._replica(link, header)
        buffer = self.replica_store.buffer(definition, header, len(self.state.tensors.pieces[header.block]))
        if replica is not None:
            self._buffers[link] = buffer
        return buffer.data

    def _step_arrived(self, link: Link, header: Header) -> None:
        buffer = self._buffers.pop(link, None)
        # while the payload arrived, a failover may have given the block another owner
        if buffer is not None and self.state.peer_owns(link, header.block) and self.replica_store.find(link, header):
            self.replica_store.take_step(link, header, buffer)

    def _step_acknowledged(self, link: Link, header: Header) -> None:
        block = self.replica_sender.step_acknowledged(link, header)
        if block is not None:
            self.rounds.answer_workers(block)

    # --- memory ---------------------------------------------------------------------------------------------------

    def _new_buffer(self, link: Link, length: int) -> memoryview:
        """Return new memory for a payload, which the `arrived` handler finds in `_buffers`."""
        buffer = np.empty(length, dtype=np.uint8)
        self._buffers[link] = buffer
        return buffer.data


def _no_payload(link: Link, header: Header, definition: Block) -> memoryview:  # noqa: ARG001
    return memoryview(b"")


def _dropped(length: int) -> memoryview:
    """Return memory for a payload that is not used."""
    return memoryview(bytearray(length))
