"""Replicas of blocks: an owner sends its backup each step, so that the backup can go on in its place.

Both apply the same gradient sum, so that they have the same bits, the optimizer's state included.  Workers are answered
when the sum has come to the backup: a replica is never behind what a worker has been told, and no step is lost with the
owner.  A new backup is first sent the whole state (its seed), once.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from pslite.errors import ProtocolError
from pslite.fault_points import FaultPoint, FaultPoints
from pslite.job.blocks import Block
from pslite.net.data_frames import REPLICATE, REPLICATED, SEED, SEEDED, Header, Link
from pslite.numeric.sparse_rows import Rows, checked_length
from pslite.server.block_state import Array, BlockState, BufferPool
from pslite.server.block_step import Step

#: seeds on their way at a time: they give way to answering workers
_SEEDS = 2


@dataclass
class _Sent:
    """The sum of a block's last step, on its way to backups."""

    block: BlockState
    version: int
    total: Array | Rows
    waits_for: set[str]


@dataclass(eq=False)
class ReplicaSender:
    """The owner's part: has other servers keep replicas of its blocks."""

    #: connections to other servers, by task
    peers: Mapping[str, Link]
    pool: BufferPool
    faults: FaultPoints
    #: by block; workers wait for an answer until it has arrived
    _sent: dict[int, _Sent] = field(default_factory=dict)
    #: blocks that want another backup, with its task
    _due: deque[tuple[BlockState, str]] = field(default_factory=deque)
    #: seeds that are not acknowledged: block -> task
    _seeds: dict[int, str] = field(default_factory=dict)

    # --- steps ----------------------------------------------------------------------------------------------------

    def send_step(self, block: BlockState, step: Step, stamp: tuple[int, int]) -> None:
        """Send a step just applied to the backups, for which answers wait; its sum is given back when they have it."""
        tasks = set(block.backups)
        block.awaits_backup = bool(tasks)
        if not tasks:
            self.pool.give(step.total)
            return
        views = step.views()
        nbytes = sum(view.nbytes for view in views)
        header = block.header(REPLICATE, nbytes, node=2 + len(step.factors), stamp=stamp)
        for task in tasks:
            link = self.peers.get(task)
            if link is not None and link.open:
                link.send(header, *views)
        self._sent[block.number] = _Sent(block, block.version, step.total, tasks)

    def step_acknowledged(self, link: Link, header: Header) -> BlockState | None:
        """Take the acknowledgement of a step; returns the block whose workers can be answered now."""
        sent = self._sent.get(header.block)
        if sent is None or sent.version != header.version:
            return None  # of a block that has another owner since
        sent.waits_for.discard(link.task)
        return self._finished(sent)

    def _finished(self, sent: _Sent) -> BlockState | None:
        if sent.waits_for:
            return None
        del self._sent[sent.block.number]
        self.pool.give(sent.total)
        sent.block.awaits_backup = False
        return sent.block

    # --- seeds ----------------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether every block has the backup that it should have."""
        return not self._due and not self._seeds

    @property
    def may_seed(self) -> bool:
        """Whether a seed may be sent."""
        if not self._due or len(self._seeds) >= _SEEDS:
            return False
        return not self.faults.reached(FaultPoint.REPLICA_DUE, self._due[0][0].plan)

    def seed_later(self, block: BlockState, task: str) -> None:
        """Have a server become the backup of a block, when there is time."""
        self._due.append((block, task))

    def seed_next(self) -> None:
        """Send one of the seeds that are due."""
        self.seed(*self._due.popleft())

    def seed(self, block: BlockState, task: str) -> None:
        """Send the state of a block to a server, which is sent each further step."""
        if self.faults.reached(FaultPoint.SEND_REPLICA, block.plan):
            return
        link = self.peers.get(task)
        if link is None or not link.open:
            return  # it is gone; the next plan will have another one
        # a copy, for the block goes on
        state = np.array(block.state).reshape(-1).data.cast("B")
        link.send(block.header(SEED, state.nbytes, crc=zlib.crc32(state)), state)
        self._seeds[block.number] = task
        if block.backup:
            block.next_backup = task
        else:
            block.backup = task

    def seed_acknowledged(self, link: Link, header: Header, block: BlockState | None) -> None:
        """Take the acknowledgement of a seed: that server is the block's backup now."""
        if self._seeds.get(header.block) == link.task:
            del self._seeds[header.block]
        if block is not None and block.next_backup == link.task:
            block.backup, block.next_backup = link.task, ""

    # --- backups that are none any more ---------------------------------------------------------------------------

    def plan_done(self, blocks: Collection[BlockState], backups: Mapping[int, str]) -> list[BlockState]:
        """Keep the backups that a plan names (by block), now that it is in force everywhere.

        Who is no backup any more may have gone before it could acknowledge a sum; those that came in its place have all
        that it was sent.  Returns the blocks whose workers can be answered now.
        """
        free = []
        for block in blocks:
            # one that left with the plan before, where the one that should follow it is gone
            if block.backup and block.backup != backups.get(block.number):
                if block.awaits_backup:
                    free.append(block)
                self.release(block)
        return free + self._wait_for(lambda sent: sent.waits_for & set(sent.block.backups))

    def release(self, block: BlockState) -> None:
        """Forget all about a block that is no longer owned, or has no backup."""
        block.backup = block.next_backup = ""
        block.awaits_backup = False
        self._seeds.pop(block.number, None)
        self._due = deque((other, task) for other, task in self._due if other is not block)
        sent = self._sent.get(block.number)
        if sent is not None and sent.block is block:
            del self._sent[block.number]

    def servers_lost(self, gone: Collection[str], blocks: Collection[BlockState]) -> list[BlockState]:
        """Wait no more for servers that are gone; returns the blocks whose workers can be answered now."""
        self._due = deque((block, task) for block, task in self._due if task not in gone)
        self._seeds = {block: task for block, task in self._seeds.items() if task not in gone}
        for block in blocks:
            if block.backup in gone:
                block.backup, block.next_backup = block.next_backup, ""
            if block.next_backup in gone:
                block.next_backup = ""
        return self._wait_for(lambda sent: sent.waits_for - set(gone))

    def _wait_for(self, still: Callable[[_Sent], set[str]]) -> list[BlockState]:
        """Have each sum wait for those that `still` names; returns the blocks whose workers can be answered now."""
        free = []
        for sent in list(self._sent.values()):
            sent.waits_for = still(sent)
            free.append(self._finished(sent))
        return [block for block in free if block is not None]


@dataclass(eq=False)
class ReplicaStore:
    """The backup's part: keeps blocks of others."""

    #: applies a step to a block
    apply: Callable[[BlockState, Step], None]
    #: whole replicas, by block
    kept: dict[int, BlockState] = field(default_factory=dict)
    #: prepared for seeds
    _expected: dict[int, BlockState] = field(default_factory=dict)
    #: buffers that are not in use, by length
    _free: dict[int, list[Array]] = field(default_factory=dict)
    #: the last plan that everybody has moved to
    _settled: int = 0

    def expect(self, blocks: Mapping[int, BlockState]) -> None:
        """Take seeds for these blocks from now on."""
        self._expected.update(blocks)

    def keep(self, block: BlockState) -> None:
        """Keep a block that was owned here as a replica."""
        self.kept[block.number] = block

    def remove(self, block: int) -> None:
        """Keep no replica of a block any more."""
        self._expected.pop(block, None)
        self.kept.pop(block, None)

    def plan_done(self, blocks: Collection[int], plan: int) -> None:
        """Drop all replicas but of these blocks: `plan` is in force everywhere."""
        for number in [number for number in self.kept if number not in blocks]:
            self.remove(number)
        self._expected.clear()
        self._settled = plan
        for block in self.kept.values():
            self._enter(block)

    def _enter(self, block: BlockState) -> None:
        """Have the plan that everybody has moved to rule a replica that has none of its steps yet."""
        if block.plan < self._settled:
            block.plan, block.first = self._settled, block.version

    def find(self, link: Link, header: Header) -> BlockState | None:
        """Return the replica that a frame of the block's owner is for; None if the block has another owner since.

        Raises
        ------
        ProtocolError
            it is at another version.

        """
        if header.kind == SEED:
            return self._expected.get(header.block)
        block = self.kept.get(header.block)
        if block is not None and block.version != header.version:
            raise ProtocolError(
                f"{link.task} sent step {header.version} of block {header.block}: its replica is at {block.version}"
            )
        return block

    def take_seed(self, link: Link, header: Header) -> None:
        """Take a whole state that has come into the memory of an expected replica."""
        block = self._expected.pop(header.block)
        crc = zlib.crc32(block.whole)
        if crc != header.crc:
            raise ProtocolError(f"the replica of block {header.block} came damaged: checksum {crc:08x}")
        block.plan = header.plan
        block.arrive(header)
        self.kept[header.block] = block
        link.send(header.reply(SEEDED))

    def buffer(self, block: Block, header: Header, pieces: int) -> Array:
        """Return memory for the step of a block that has so many pieces of tensors.

        Raises
        ------
        ProtocolError
            its length cannot be right.

        """
        count = header.node
        body = header.length - 8 * count
        if count not in (2, 2 + pieces) or (body != block.nbytes if not block.row else checked_length(block, body) < 0):
            raise ProtocolError(f"{header.length} bytes with {count} numbers are no step of block {block.number}")
        free = self._free.get(header.length)
        return free.pop() if free else np.empty(header.length, dtype=np.uint8)

    def take_step(self, link: Link, header: Header, data: Array) -> None:
        """Apply a step that has come."""
        block = self.kept[header.block]
        self.apply(block, Step.parse(block.block, data, header.node))
        block.plan, block.first, block.stamp = header.plan, header.first, (header.next_plan, header.next_first)
        block.version += 1
        self._enter(block)
        if not block.block.row:
            self._free.setdefault(data.size, []).append(data)
        link.send(header.reply(REPLICATED))
