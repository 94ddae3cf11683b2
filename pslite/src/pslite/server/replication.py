"""Replicas of blocks: what a server does so that another one can go on in its place, and what it keeps for others.

The owner of a block sends its backup the gradient sum of each step; both apply it, so that they have the same bits, the
optimizer's state included.  Workers are answered when the sum has come there: a replica is never behind
what a worker has been told, and no step is lost with the owner.  A new backup is first sent the whole state, once.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from pslite.errors import ProtocolError
from pslite.fault_points import FaultPoint, FaultPoints
from pslite.job.blocks import Block
from pslite.net.data_frames import REPLICATE, REPLICATED, SEED, SEEDED, Header, Link
from pslite.numeric.sparse_rows import Rows, checked_length, parse
from pslite.server.block_state import Array, BufferPool, Holding

#: seeds on their way at a time: they give way to answering workers
_SEEDS = 2


@dataclass(frozen=True)
class Step:
    """All that makes a version out of the one before: the sum of the gradients, and what it is scaled by."""

    total: Array | Rows
    #: what makes a mean of it
    divisor: float
    #: what the mean is multiplied by because all together are too long
    clip: float
    #: for LAMB, what the update of each tensor in the block is multiplied by
    factors: tuple[float, ...]

    def views(self) -> tuple[memoryview, ...]:
        """Return it as it travels."""
        total = self.total.views() if isinstance(self.total, Rows) else (self.total.data.cast("B"),)
        numbers = np.array((self.divisor, self.clip, *self.factors))
        return numbers.data.cast("B"), *total

    @classmethod
    def parse(cls, block: Block, data: Array, count: int) -> Step:
        """Return what has come with `count` numbers; raises ProtocolError."""
        divisor, clip, *factors = np.frombuffer(data, dtype=np.float64, count=count).tolist()
        body = data[8 * count :]
        total = parse(block, body.data) if block.row else body.view(block.dtype)
        return cls(total, divisor, clip, tuple(factors))


@dataclass
class _Sent:
    """The sum of a block's last step, on its way to replicas."""

    holding: Holding
    version: int
    total: Array | Rows
    waits_for: set[str]


class Guards:
    """The owner's part: has other servers keep replicas of its blocks.

    Parameters
    ----------
    links
        connections to other servers, by task; kept by the server.
    pool
        where buffers go back to.
    faults
        the server's fault points.

    """

    def __init__(self, links: Mapping[str, Link], pool: BufferPool, faults: FaultPoints) -> None:
        self._links = links
        self._pool = pool
        self._faults = faults
        #: by block; workers wait for an answer until it has arrived
        self._sent: dict[int, _Sent] = {}
        #: blocks that want another backup, with its task
        self._due: deque[tuple[Holding, str]] = deque()
        #: seeds that are not acknowledged: block -> task
        self._seeds: dict[int, str] = {}

    @property
    def settled(self) -> bool:
        """Whether every block has the backup that it should have."""
        return not self._due and not self._seeds

    @property
    def may_plant(self) -> bool:
        """Whether a seed may be sent."""
        if not self._due or len(self._seeds) >= _SEEDS:
            return False
        return not self._faults.reached(FaultPoint.REPLICA_DUE, self._due[0][0].plan)

    def tell(self, holding: Holding, step: Step, stamp: tuple[int, int]) -> None:
        """Send a step just applied to the replicas, which sets `waits`; its sum is given back when they have it."""
        block, tasks = holding.block, set(holding.guards)
        holding.waits = bool(tasks)
        if not tasks:
            self._give(step.total)
            return
        views = step.views()
        header = Header(
            REPLICATE, holding.plan, block.number, 2 + len(step.factors), sum(view.nbytes for view in views),
            holding.version, holding.first, *stamp,
        )  # fmt: skip
        for task in tasks:
            link = self._links.get(task)
            if link is not None and link.open:
                link.send(header, *views)
        self._sent[block.number] = _Sent(holding, holding.version, step.total, tasks)

    def _give(self, total: Array | Rows) -> None:
        if not isinstance(total, Rows):
            self._pool.give(total)

    def told(self, link: Link, header: Header) -> Holding | None:
        """Take the acknowledgement of a sum; returns the block whose workers can be answered now."""
        sent = self._sent.get(header.block)
        if sent is None or sent.version != header.version:
            return None  # of a block that has another owner since
        sent.waits_for.discard(link.task)
        return self._finished(sent)

    def _finished(self, sent: _Sent) -> Holding | None:
        if sent.waits_for:
            return None
        del self._sent[sent.holding.block.number]
        self._give(sent.total)
        sent.holding.waits = False
        return sent.holding

    def settle(self) -> list[Holding]:
        """A plan is in force everywhere: who is no backup any more may have gone before it could acknowledge a sum.

        Those that came in its place have all that it was sent. Returns the blocks whose workers can be answered now.
        """
        return self._wait_for(lambda sent: sent.waits_for & set(sent.holding.guards))

    def want(self, holding: Holding, task: str) -> None:
        """Have a server become the backup of a block, when there is time."""
        self._due.append((holding, task))

    def plant_next(self) -> None:
        """Send one of the seeds that are due."""
        self.plant(*self._due.popleft())

    def plant(self, holding: Holding, task: str) -> None:
        """Send the state of a block to a server, which is told of each further step."""
        if self._faults.reached(FaultPoint.SEND_REPLICA, holding.plan):
            return
        link = self._links.get(task)
        if link is None or not link.open:
            return  # it is gone; the next plan will have another one
        # a copy, for the block goes on
        state = np.array(holding.state).reshape(-1).data.cast("B")
        block = holding.block.number
        link.send(
            Header(
                SEED, holding.plan, block, 0, state.nbytes, holding.version, holding.first, crc=zlib.crc32(state)
            ),
            state,
        )  # fmt: skip
        self._seeds[block] = task
        if holding.guard:
            holding.coming = task
        else:
            holding.guard = task

    def planted(self, link: Link, header: Header, holding: Holding | None) -> None:
        """Take the acknowledgement of a seed: that server is the block's backup now."""
        if self._seeds.get(header.block) == link.task:
            del self._seeds[header.block]
        if holding is not None and holding.coming == link.task:
            holding.guard, holding.coming = link.task, ""

    def dismiss(self, holding: Holding) -> bool:
        """Keep a block without replicas; returns whether its workers can be answered now."""
        free = holding.waits
        self.release(holding)
        return free

    def release(self, holding: Holding) -> None:
        """Forget all about a block that is no longer ours."""
        holding.guard = holding.coming = ""
        holding.waits = False
        self._seeds.pop(holding.block.number, None)
        self._due = deque((other, task) for other, task in self._due if other is not holding)
        sent = self._sent.get(holding.block.number)
        if sent is not None and sent.holding is holding:
            del self._sent[holding.block.number]

    def without(self, gone: Collection[str], holdings: Collection[Holding]) -> list[Holding]:
        """Wait no more for servers that are gone; returns the blocks whose workers can be answered now."""
        self._due = deque((holding, task) for holding, task in self._due if task not in gone)
        self._seeds = {block: task for block, task in self._seeds.items() if task not in gone}
        for holding in holdings:
            if holding.guard in gone:
                holding.guard, holding.coming = holding.coming, ""
            if holding.coming in gone:
                holding.coming = ""
        return self._wait_for(lambda sent: sent.waits_for - set(gone))

    def _wait_for(self, still: Callable[[_Sent], set[str]]) -> list[Holding]:
        """Have each sum wait for those that `still` names; returns the blocks whose workers can be answered now."""
        free = []
        for sent in list(self._sent.values()):
            sent.waits_for = still(sent)
            free.append(self._finished(sent))
        return [holding for holding in free if holding is not None]


class Replicas:
    """The backup's part: keeps blocks of others.

    Parameters
    ----------
    apply
        applies a step to a block.

    """

    def __init__(self, apply: Callable[[Holding, Step], None]) -> None:
        self._apply = apply
        self._kept: dict[int, Holding] = {}
        #: made ready for seeds
        self._awaited: dict[int, Holding] = {}
        #: buffers that are not in use, by length
        self._free: dict[int, list[Array]] = {}
        #: the last plan that everybody has moved to
        self._settled = 0

    @property
    def kept(self) -> Mapping[int, Holding]:
        """Whole replicas, by block."""
        return self._kept

    def expect(self, holdings: Mapping[int, Holding]) -> None:
        """Take seeds for these blocks from now on."""
        self._awaited.update(holdings)

    def keep(self, holding: Holding) -> None:
        """Keep a block that was ours as a replica."""
        self._kept[holding.block.number] = holding

    def take(self, block: int) -> Holding | None:
        """Give a replica away: it is nobody's replica any more."""
        self._awaited.pop(block, None)
        return self._kept.pop(block, None)

    def retain(self, blocks: Collection[int], plan: int) -> None:
        """Drop all others: `plan` is in force everywhere."""
        for number in [number for number in self._kept if number not in blocks]:
            self.take(number)
        self._awaited.clear()
        self._settled = plan
        for holding in self._kept.values():
            self._enter(holding)

    def _enter(self, holding: Holding) -> None:
        """Have the plan that everybody has moved to rule a replica that has none of its steps yet."""
        if holding.plan < self._settled:
            holding.plan, holding.first = self._settled, holding.version

    def find(self, link: Link, header: Header) -> Holding | None:
        """Return the replica that a frame of the block's owner is for; None if the block has another owner since.

        Raises
        ------
        ProtocolError
            it is at another version.

        """
        if header.kind == SEED:
            return self._awaited.get(header.block)
        holding = self._kept.get(header.block)
        if holding is not None and holding.version != header.version:
            raise ProtocolError(
                f"{link.task} sent step {header.version} of block {header.block}: its replica is at {holding.version}"
            )
        return holding

    def seeded(self, link: Link, header: Header) -> None:
        """A whole state has come."""
        holding = self._awaited.pop(header.block)
        crc = zlib.crc32(holding.whole)
        if crc != header.crc:
            raise ProtocolError(f"the replica of block {header.block} came damaged: checksum {crc:08x}")
        holding.plan, holding.version, holding.first, holding.here = header.plan, header.version, header.first, True
        self._kept[header.block] = holding
        link.send(Header(SEEDED, header.plan, header.block, 0, 0, header.version, header.first))

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

    def replicated(self, link: Link, header: Header, data: Array) -> None:
        """A step has come."""
        holding = self._kept[header.block]
        self._apply(holding, Step.parse(holding.block, data, header.node))
        holding.plan, holding.first, holding.stamp = header.plan, header.first, (header.next_plan, header.next_first)
        holding.version += 1
        self._enter(holding)
        if not holding.block.row:
            self._free.setdefault(data.size, []).append(data)
        link.send(Header(REPLICATED, header.plan, header.block, 0, 0, header.version, header.first))
