"""Receives frames from servers: says where each payload goes, and takes what has arrived."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from pslite.errors import ProtocolError
from pslite.fault_points import FaultPoint, FaultPoints
from pslite.net.shared_memory import MappedMemory
from pslite.net.tensor_frames import (
    MAX_REGIONS,
    PARAM,
    PARAM_ROWS,
    REFUSED,
    REGION,
    SAME,
    WHOLE,
    Header,
    Link,
)
from pslite.numeric.optimizers import slots
from pslite.numeric.sparse_rows import checked_length, parse
from pslite.worker.progress_reports import Progress
from pslite.worker.ps.data_connections import DataPlane
from pslite.worker.ps.known_plans import PlanTable
from pslite.worker.ps.model_buffers import ModelBuffers
from pslite.worker.ps.state_fetch import StateFetch


@dataclass(eq=False)
class FrameReceiver:
    """Takes frames into the model's memory.

    A frame that is not needed any more, such as weights that another server has sent already, is received into memory
    that nobody looks at, and dropped.
    """

    _model: ModelBuffers
    _plans: PlanTable
    _progress: Progress
    _plane: DataPlane
    _fetch: StateFetch
    _faults: FaultPoints
    #: rows that are coming in
    _rows: WeakKeyDictionary[Link, bytearray] = field(default_factory=WeakKeyDictionary)
    #: connections over which a frame comes that is dropped, and memory for it
    _dropping: WeakSet[Link] = field(default_factory=WeakSet)
    _spare: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        weights = self._weights_place, self._weights_arrived
        #: by kind of frame: where its payload goes, and what takes it when it is complete
        self._handlers: dict[int, tuple[Callable[[Link, Header], memoryview], Callable[[Link, Header], None]]] = {
            PARAM: weights,
            PARAM_ROWS: weights,
            SAME: (self._nothing, self._weights_arrived),
            WHOLE: (self._fetched_place, self._fetched_arrived),
            REFUSED: (self._nothing, self._refused),
        }

    def payload(self, link: Link, header: Header) -> memoryview:
        """Return the memory for the payload of a frame."""
        self._faults.reached(FaultPoint.PAYLOAD, link, header)
        known = header.kind == REFUSED or header.block < len(self._model.known_blocks)
        if header.kind not in self._handlers or not known:
            raise _misplaced(link, header)
        place, _ = self._handlers[header.kind]
        return place(link, header)

    def arrived(self, link: Link, header: Header) -> None:
        """Take a frame whose payload is complete."""
        if self._faults.reached(FaultPoint.FRAME, link, header):
            return
        if link in self._dropping:
            self._dropping.discard(link)
        else:
            _, take = self._handlers[header.kind]
            take(link, header)

    def shared(self, link: Link, header: Header) -> None:
        """Take weights that lie in the server's memory, or that memory."""
        if header.kind == REGION:
            if link.role != "ps" or header.region in link.regions or len(link.regions) >= MAX_REGIONS:
                raise ProtocolError(
                    f"{link.task} sent shared memory number {header.region}, which is not allowed: only servers may, "
                    f"each number once and at most {MAX_REGIONS}"
                )
            link.regions[header.region] = MappedMemory(link.descriptor())
            return
        region = link.regions.get(header.region)
        if header.kind != PARAM or region is None:
            raise _misplaced(link, header)
        view = self.payload(link, header)
        block = self._model.known_blocks[header.block]
        if not header.length == view.nbytes == block.nbytes:
            raise ProtocolError(
                f"{link.task} announced {header.length} bytes for block {header.block}, which has {block.nbytes}"
            )
        offset = header.page_offset * mmap.PAGESIZE
        there = region.array(block, offset)
        np.copyto(np.frombuffer(view, dtype=there.dtype), there)
        region.drop_pages(offset, block.nbytes)
        self.arrived(link, header)

    # --- where payloads go ----------------------------------------------------------------------------------------

    def _nothing(self, link: Link, header: Header) -> memoryview:  # noqa: ARG002  (as the other handlers)
        return memoryview(b"")

    def _weights_place(self, link: Link, header: Header) -> memoryview:
        """Return where weights go: straight into the bundle of their version."""
        progress = self._progress
        if self._plans.current is None:
            if self._plans.begin(header.plan) is None:
                raise ProtocolError(
                    f"{link.task} sent weights under plan {header.plan}, which this worker has not prepared"
                )
            progress.awaited = header.first
        block = self._model.known_blocks[header.block]
        if not progress.wants(header.block, header.version):
            if header.version <= progress.awaited:
                # from a server that has taken another one's place; the same bytes as before
                rows = header.kind == PARAM_ROWS
                return self._drop(link, checked_length(block, header.length) if rows else block.nbytes)
            raise ProtocolError(
                f"{link.task} sent block {header.block} at version {header.version}, but this worker needs "
                f"version {progress.awaited}"
            )
        if header.kind == PARAM:
            return self._model.arriving(header.version).views[header.block]
        if not block.is_sparse:
            raise ProtocolError(f"{link.task} sent single rows of block {header.block}, which is not sparse")
        self._rows[link] = bytearray(checked_length(block, header.length))
        return memoryview(self._rows[link])

    def _fetched_place(self, link: Link, header: Header) -> memoryview:
        """Return where the state goes that was asked for; it comes again if its owner has changed."""
        place = self._fetch.place(header.block, header.version)
        if place is not None:
            return place
        block = self._model.blocks[header.block]
        return self._drop(link, (1 + slots(block.optimizer)) * block.nbytes)

    def _drop(self, link: Link, length: int) -> memoryview:
        """Have a frame be dropped, also if it is needed by the time when all of it is here."""
        self._dropping.add(link)
        if len(self._spare) < length:
            self._spare = bytearray(length)
        return memoryview(self._spare)[:length]

    # --- what has arrived -----------------------------------------------------------------------------------------

    def _weights_arrived(self, link: Link, header: Header) -> None:
        progress, number = self._progress, header.block
        if not progress.wants(number, header.version):
            return
        block = self._model.known_blocks[number]
        if header.kind == PARAM_ROWS:
            rows = parse(block, memoryview(self._rows.pop(link)))
            self._model.arriving(header.version).part(block).reshape(-1, block.row)[rows.numbers] = rows.values
        self._divert_others(link, header)
        progress.missing.discard(number)
        take = self._model.arriving(header.version).take
        if take is not None:
            take(block)
        self._faults.reached(FaultPoint.WEIGHTS_HERE, number, header.version)
        progress.arrived[number] = header.version, header.plan
        if header.first_worker_had_gradient:
            progress.first_worker_segments.add(block.segment)
        if header.next_plan:
            self._plans.announced(header.next_plan, header.next_first)

    def _fetched_arrived(self, link: Link, header: Header) -> None:
        self._divert_others(link, header)
        self._fetch.arrived(header.block, header.uncounted_steps)

    def _refused(self, link: Link, header: Header) -> None:
        """A server has refused a push, as it does not own the block: the coordinator may know why."""
        if header.version < self._progress.version or header.block not in self._progress.missing:
            return  # what came twice came late, and has been answered
        self._plane.doubt(
            link.task,
            f"{link.task} refused the gradient of block {header.block} for step {header.version} under plan "
            f"{header.plan}: it does not own that block",
        )

    def _divert_others(self, link: Link, header: Header) -> None:
        """Drop what another server is sending of the block that has just come: it is not to be written over."""
        for other in self._plane.links.values():
            late = other.coming if other is not link else None
            if late is None or (late.block, late.version) != (header.block, header.version):
                continue
            if late.kind == header.kind or {late.kind, header.kind} == {PARAM, PARAM_ROWS}:
                self._dropping.add(other)
                other.divert()


def _misplaced(link: Link, header: Header) -> ProtocolError:
    return ProtocolError(
        f"{link.task} sent a frame of kind {header.kind} about block {header.block}, which this worker does not accept"
    )
