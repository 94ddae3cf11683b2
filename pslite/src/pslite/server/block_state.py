"""State of the parameter blocks that a server holds, and the buffers into which their gradients are received."""

from __future__ import annotations

from collections import Counter
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pslite.job.reduction_tree import ROOT, TreeSum
from pslite.net.data_frames import Header
from pslite.numeric.optimizers import slots
from pslite.numeric.sparse_rows import Numbers, Rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pslite.job.blocks import Block
    from pslite.net.shared_memory import Arena

Array = NDArray[Any]


def state_bytes(block: Block) -> int:
    """Return the bytes of a block's weights and optimizer state."""
    return (1 + slots(block.optimizer)) * block.nbytes


class BufferPool:
    """Gradient buffers by type and size, allocated once and used again; memory is touched when it is allocated."""

    def __init__(self) -> None:
        self._free: dict[tuple[str, int], list[Array]] = {}

    def take(self, like: Block | Array, dtype: str = "") -> Array:
        """Return a buffer of the size and type (or another one) of a block or array, with undefined content."""
        key = dtype or str(like.dtype), like.size
        free = self._free.get(key)
        return free.pop() if free else np.zeros(key[1], dtype=key[0])

    def give(self, buffer: Array | Rows) -> None:
        """Take a buffer back; rows, which have any size, and a worker's shared memory are not kept."""
        if isinstance(buffer, Rows) or not buffer.flags.writeable or buffer.dtype == np.uint8:
            return
        self._free.setdefault((buffer.dtype.name, buffer.size), []).append(buffer)

    def reserve(self, blocks: list[Block], copies: int) -> None:
        """Allocate `copies` buffers for each block beforehand, so that no step has to."""
        for block in blocks:
            for _ in range(copies):
                self.give(np.full(block.size, 0, dtype=block.dtype))

    def trim(self, wanted: Iterable[tuple[Block, int]]) -> None:
        """Free the buffers beyond what blocks can use, each with so many buffers."""
        need = Counter[tuple[str, int]]()
        for block, copies in wanted:
            need[block.dtype, block.size] += copies
        for key, free in self._free.items():
            del free[need[key] :]


@dataclass(eq=False, slots=True)
class AsyncProgress:
    """How far the workers of an asynchronous job have come with a block."""

    #: by version that is not complete, the tree nodes that have been pushed
    received: dict[int, set[int]] = field(default_factory=dict)
    #: gradients that are not applied yet, with their worker and version
    staged: list[tuple[str, int, Array]] = field(default_factory=list)
    #: workers that wait for an answer, and of which version
    waiting: list[tuple[str, int]] = field(default_factory=list)
    #: the highest version that a worker has been sent
    highest: int = 0

    def has(self, version: int, node: int) -> bool:
        """Whether a tree node of a version that is not complete has been pushed."""
        return node in self.received.get(version, ())


@dataclass(eq=False, slots=True)
class BlockState:
    """One parameter block on one server: its weights, optimizer state and version, and the step under way.

    On its owner: expected (`here` is False: pushes of its coming step are staged), owned, sent to its next owner
    (from the version on at which a plan gives it to another server; read only), then freed or kept as a replica.  A
    replica: expected, then `here`.
    """

    block: Block
    #: the plan in force at `version`
    plan: int
    #: of the reduction tree
    leaves: InitVar[int]
    #: shared memory in which its state lies, if workers of this machine may read it there
    arena: Arena | None = None
    number: int = field(init=False)
    #: completed updates; -1 until it is known
    version: int = -1
    #: the version at which `plan` took effect
    first: int = 0
    here: bool = False
    #: row 0 the weights, then the optimizer's slots
    state: Array = field(init=False)
    #: tree nodes of the step under way that have been pushed, their partial sums, and the sum when it is complete
    received: set[int] = field(default_factory=set)
    sums: TreeSum[Array | Rows] = field(init=False)
    total: Array | Rows | None = None
    progress: AsyncProgress = field(default_factory=AsyncProgress)
    #: of a sparse block, which rows the step before the last and the last have changed, as far as it is known
    rows: tuple[Numbers | None, Numbers] | None = None
    #: the server that keeps its replica, and another one that will take that one's place
    backup: str = ""
    next_backup: str = ""
    #: whether workers wait for an answer until the replica has the step
    awaits_backup: bool = False
    #: of a replica: the stamp (`pslite.server.plan_activation`) that its owner knew
    stamp: tuple[int, int] = (0, 0)

    def __post_init__(self, leaves: int) -> None:
        block = self.block
        self.number = block.number
        shape = 1 + slots(block.optimizer), block.size
        self.state = np.empty(shape, dtype=block.dtype) if self.arena is None else self.arena.state(block)
        self.state.fill(0)
        self.begin_step(leaves)

    @property
    def weights(self) -> memoryview:
        """The weights, as bytes."""
        weights: memoryview = self.state[0].data.cast("B")
        return weights

    @property
    def whole(self) -> memoryview:
        """Weights and slots, as bytes."""
        return self.state.reshape(-1).data.cast("B")

    @property
    def backups(self) -> list[str]:
        """The servers that are sent each step."""
        return [task for task in (self.backup, self.next_backup) if task]

    def header(self, kind: int, length: int, *, node: int = 0, stamp: tuple[int, int] = (0, 0), crc: int = 0) -> Header:
        """Return the header of a frame about the block as it is now."""
        return Header(kind, self.plan, self.number, node, length, self.version, self.first, *stamp, crc)

    def note_rows(self, total: Rows) -> None:
        """Note which rows a step changes."""
        self.rows = self.rows[1] if self.rows is not None else None, total.numbers

    def changed_rows(self) -> Rows | None:
        """Return what a worker lacks that has the version before the last; None if that is everything."""
        # Who has come with the plan has no such version, nor do we know of the steps before we got the block.
        before, last = self.rows if self.rows is not None else (None, None)
        if before is None or last is None or self.version < self.first + 2:
            return None
        numbers = np.union1d(before, last)
        return Rows(numbers, self.state[0].reshape(-1, self.block.row)[numbers])

    def arrive(self, header: Header) -> None:
        """Know that the state has come with a frame."""
        self.version, self.first, self.here = header.version, header.first, True

    def enter_plan(self, plan: int, first: int, leaves: int) -> None:
        """Have `plan` rule the block from the present version on."""
        self.plan = plan
        self.first = first
        self.begin_step(leaves)

    def begin_step(self, leaves: int) -> None:
        """Take pushes of the coming step from its beginning."""
        self.received.clear()
        self.total = None
        self.sums = TreeSum(leaves, frozenset((ROOT,)))
