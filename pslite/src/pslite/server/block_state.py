"""What a server keeps: blocks with their optimizer state, the sums coming in for them, and the buffers those use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pslite.job.blocks import Block
from pslite.job.reduction_tree import ROOT, TreeSum
from pslite.numeric.optimizers import slots
from pslite.numeric.sparse_rows import Numbers, Rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pslite.net.shared_memory import Arena

Array = NDArray[Any]


class BufferPool:
    """Gradient buffers by type and size, made once and used again; memory is touched when it is made."""

    def __init__(self) -> None:
        self._free: dict[tuple[str, int], list[Array]] = {}

    def take(self, block: Block, dtype: str = "") -> Array:
        """Return a buffer of the block's size and type (or another one), with undefined content."""
        return self._take(dtype or block.dtype, block.size)

    def take_like(self, array: Array) -> Array:
        """Return a buffer of an array's type and size, with undefined content."""
        return self._take(array.dtype.name, array.size)

    def _take(self, dtype: str, size: int) -> Array:
        free = self._free.setdefault((dtype, size), [])
        return free.pop() if free else np.zeros(size, dtype=dtype)

    def give(self, buffer: Array) -> None:
        """Take a buffer back; what lies in a peer's memory is the peer's, and rows have any size."""
        if not buffer.flags.writeable or buffer.dtype == np.uint8:
            return
        self._free.setdefault((buffer.dtype.name, buffer.size), []).append(buffer)

    def reserve(self, blocks: list[Block], copies: int) -> None:
        """Make `copies` buffers for each block beforehand, so that no step has to."""
        for block in blocks:
            for _ in range(copies):
                buffer = np.empty(block.size, dtype=block.dtype)
                buffer.fill(0)
                self.give(buffer)

    def trim(self, wanted: Iterable[tuple[Block, int]]) -> None:
        """Drop buffers beyond what blocks can use, each with so many buffers."""
        need: dict[tuple[str, int], int] = {}
        for block, copies in wanted:
            key = (block.dtype, block.size)
            need[key] = need.get(key, 0) + copies
        for key, free in list(self._free.items()):
            del free[need.get(key, 0) :]


class Arrivals:
    """What a block of an async job knows of its workers."""

    __slots__ = ("highest", "received", "staged", "waiting")

    def __init__(self) -> None:
        #: by version, the nodes whose contributions are applied; of versions that are not complete
        self.received: dict[int, set[int]] = {}
        #: contributions that came before the block did, of which workers
        self.staged: list[tuple[str, int, Array]] = []
        #: workers that wait for an answer, and of which version
        self.waiting: list[tuple[str, int]] = []
        #: the highest version that a worker has been sent
        self.highest = 0


class Holding:
    """One block on one server.

    Its owner's: ABSENT (`here` False: pushes of the coming step are staged) -> OWNED -> SENDING (after the clock, read
    only) -> freed on the new owner's acknowledgement, or kept as its replica.  A replica: ABSENT -> here.
    """

    __slots__ = (
        "arena", "arrivals", "block", "coming", "first", "guard", "here", "plan", "received", "rows", "stamp", "state",
        "sums", "total", "version", "waits",
    )  # fmt: skip

    def __init__(self, block: Block, plan: int, leaves: int, arena: Arena | None = None) -> None:
        self.block = block
        #: where its state lies, if workers of this machine may look there
        self.arena = arena
        #: the plan in force at `version`
        self.plan = plan
        #: completed updates; -1 until it is known
        self.version = -1
        #: the version at which `plan` took effect
        self.first = 0
        self.here = False
        #: row 0 the weights, then the optimizer's slots
        shape = 1 + slots(block.optimizer), block.size
        self.state: Array = np.empty(shape, dtype=block.dtype) if arena is None else arena.state(block)
        self.state.fill(0)
        self.received: set[int] = set()
        self.sums: TreeSum[Array | Rows] = TreeSum(leaves, frozenset((ROOT,)))
        self.total: Array | Rows | None = None
        self.arrivals = Arrivals()
        #: of a sparse block, which rows the step before the last and the last have changed, as far as it is known
        self.rows: tuple[Numbers | None, Numbers] | None = None
        #: the server whose replica is told of each step, and another one that will take its place
        self.guard = ""
        self.coming = ""
        #: whether workers wait for an answer until a replica has the step
        self.waits = False
        #: of a replica: the stamp that its owner knew
        self.stamp = 0, 0

    @property
    def weights(self) -> memoryview:
        """The weights, as bytes."""
        weights: memoryview = self.state[0].data.cast("B")
        return weights

    @property
    def whole(self) -> memoryview:
        """Weights and slots, as bytes."""
        return self.state.reshape(-1).data.cast("B")

    def note(self, total: Rows) -> None:
        """Note which rows a step changes."""
        self.rows = self.rows[1] if self.rows is not None else None, total.numbers

    def recent(self) -> Rows | None:
        """Return what a worker lacks that has the version before the last; None if that is everything."""
        # Who has come with the plan has no such version, nor do we know of the steps before we got the block.
        before, last = self.rows if self.rows is not None else (None, None)
        if before is None or last is None or self.version < self.first + 2:
            return None
        numbers = np.union1d(before, last)
        return Rows(numbers, self.state[0].reshape(-1, self.block.row)[numbers])

    def enter(self, plan: int, first: int, leaves: int) -> None:
        """Let `plan` rule this block from the present version on."""
        self.plan = plan
        self.first = first
        self.begin(leaves)

    def begin(self, leaves: int) -> None:
        """Take contributions of the coming step from its beginning."""
        self.received.clear()
        self.total = None
        self.sums = TreeSum(leaves, frozenset((ROOT,)))

    @property
    def guards(self) -> list[str]:
        """The servers that are told of each step."""
        return [task for task in (self.guard, self.coming) if task]
