"""State of the blocks that a server holds, and the pool of buffers into which their gradients are received.

In this package `block` is a `BlockState`, `definition` its `Block` (position, type and optimizer, as the job's
description gives them), and `number` the number of the block in the job.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pslite.job.reduction_tree import ROOT, TreeSum
from pslite.net.tensor_frames import PARAM, REPLICATE, Header, bytes_of
from pslite.numeric.optimizers import slots
from pslite.numeric.sparse_rows import Numbers, Rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pslite.job.weight_blocks import Block
    from pslite.net.shared_memory import Arena

Array = NDArray[Any]


def state_bytes(definition: Block) -> int:
    """Return how many bytes a block's weights and optimizer slots have."""
    return (1 + slots(definition.optimizer)) * definition.nbytes


class BufferPool:
    """Pool of gradient buffers by type and size.

    `reserve` allocates them, and touches their memory, when a plan is prepared; then they are reused.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[str, int], list[Array]] = {}

    def take(self, like: Block | Array, dtype: str = "") -> Array:
        """Return a buffer with the size of a block or array and its type, or `dtype`; its content is undefined."""
        key = dtype or str(like.dtype), like.size
        free = self._free.get(key)
        return free.pop() if free else np.zeros(key[1], dtype=key[0])

    def give(self, buffer: Gradient) -> None:
        """Take a buffer back for reuse.

        Not kept are rows and the bytes in which rows arrived (uint8), as their sizes differ, and a worker's shared
        memory, which is read-only.
        """
        if isinstance(buffer, Rows | NoGradient) or not buffer.flags.writeable or buffer.dtype == np.uint8:
            return
        self._free.setdefault((buffer.dtype.name, buffer.size), []).append(buffer)

    def reserve(self, definitions: list[Block], count: int) -> None:
        """Allocate `count` buffers for each block in advance, so that no step has to."""
        for definition in definitions:
            for _ in range(count):
                self.give(np.full(definition.size, 0, dtype=definition.dtype))

    def trim(self, needed: Iterable[tuple[Block, int]]) -> None:
        """Free the buffers beyond those that are needed: pairs of a block and its number of buffers."""
        counts = Counter[tuple[str, int]]()
        for definition, count in needed:
            counts[definition.dtype, definition.size] += count
        # copied, because a thread that prepares a plan may reserve buffers of other sizes meanwhile
        for key, free in list(self._free.items()):
            del free[counts[key] :]


class NoGradient:
    """A push, or the sum of a step, without a gradient of the block: its weights stay as they are."""

    __slots__ = ()


NO_GRADIENT = NoGradient()
#: a gradient of a block, or a sum of them
Gradient = Array | Rows | NoGradient


@dataclass(eq=False, slots=True)
class AsyncProgress:
    """Progress of the workers of an asynchronous job with one block."""

    #: incomplete version -> tree nodes that have been pushed
    received: dict[int, set[int]] = field(default_factory=dict)
    #: gradients that are not applied yet: worker, version, gradient
    unapplied: list[tuple[str, int, Array]] = field(default_factory=list)
    #: workers that are to be sent weights, each with the version that it expects
    to_answer: list[tuple[str, int]] = field(default_factory=list)
    #: highest version that a worker has been sent
    highest_sent: int = 0
    #: gradients that have been applied; 0: not known
    applied: int = 0

    def has(self, version: int, node: int) -> bool:
        """Return whether a tree node of an incomplete version has been pushed."""
        return node in self.received.get(version, ())


@dataclass(eq=False, slots=True)
class BlockState:
    """One block on one server: weights, optimizer slots, version, and the gradient sum of the present step.

    Its state is the weights, the optimizer slots and the version, which a hand-off or a seed sends to another server.
    On its owner a block goes through these stages: expected (`has_state` is False; pushes of its first step are kept);
    owned; outgoing, when a plan has given it to another server (read only, until the state is sent and acknowledged);
    then freed, or kept as a replica.  A replica is expected until its seed arrives.
    """

    definition: Block
    #: number of the plan that the block has entered, or will be under when its state arrives
    plan_number: int
    #: leaves of the reduction tree under that plan
    leaves: InitVar[int]
    #: shared memory that contains `arrays`, if workers of this machine may read them there
    arena: Arena | None = None
    #: of the block; copied from `definition`, as it is read for every frame
    number: int = field(init=False)
    #: completed updates; -1: not known yet
    version: int = -1
    #: first version of `plan`; of a replica that was put under the plan without a step, the version that it had then
    first: int = 0
    #: whether the state has arrived
    has_state: bool = False
    #: weights (row 0) and optimizer slots; shape (1 + optimizer slots, size)
    arrays: Array = field(init=False)
    #: synchronous jobs: tree nodes of the present step that have been pushed
    received: set[int] = field(default_factory=set)
    #: synchronous jobs: partial sums of the present step
    sums: TreeSum[Gradient] = field(init=False)
    #: synchronous jobs: the sum of the present step, when it is complete
    total: Gradient | None = None
    #: synchronous jobs: steps that the optimizer does not count: those before the block was added, and those without a
    #: gradient
    uncounted_steps: int = 0
    #: synchronous jobs: whether the last step had no gradient
    unchanged: bool = False
    #: synchronous jobs: whether the first worker has a gradient in the present step, and had one in the last; all
    #: workers are sent the latter, so that those of an MXNet job go through the groups of keys in the same order
    first_worker_has_gradient: bool = False
    first_worker_had_gradient: bool = False
    #: asynchronous jobs only
    progress: AsyncProgress = field(default_factory=AsyncProgress)
    #: of a sparse block: numbers of the rows that the last step but one (None: not known) and the last one changed
    step_rows: tuple[Numbers | None, Numbers] | None = None
    #: the server that keeps the replica, or is to keep it when the seed arrives that it was sent; "" for none
    backup: str = ""
    #: while `backup` keeps the replica: a server that was sent a seed, and takes the place of `backup` when it
    #: acknowledges that
    next_backup: str = ""
    #: whether the answer to workers waits until the replica has the last step
    awaits_backup: bool = False
    #: of a replica: the announcement (`pslite.server.plan_activation`) that came with the last step: plan, version
    announced: tuple[int, int] = (0, 0)

    def __post_init__(self, leaves: int) -> None:
        definition = self.definition
        self.number = definition.number
        shape = 1 + slots(definition.optimizer), definition.size
        self.arrays = np.empty(shape, dtype=definition.dtype) if self.arena is None else self.arena.state(definition)
        self.arrays.fill(0)
        self.begin_step(leaves)

    @property
    def updates(self) -> int:
        """How often the optimizer has updated the block."""
        return self.version - self.uncounted_steps

    @property
    def schedule_version(self) -> int:
        """The version that schedules go by, and LAMB's bias correction."""
        return self.updates + self.definition.since

    @property
    def weights(self) -> memoryview:
        """The weights, as bytes."""
        return bytes_of(self.arrays[0])

    @property
    def weights_and_slots(self) -> memoryview:
        """The weights and the optimizer slots (`arrays`), as bytes."""
        return bytes_of(self.arrays)

    @property
    def backups(self) -> list[str]:
        """The servers that are sent each step."""
        return [task for task in (self.backup, self.next_backup) if task]

    def weights_header(self, announced: tuple[int, int]) -> Header:
        """Return the header of a frame with the present weights."""
        nbytes, flag = self.definition.nbytes, int(self.first_worker_had_gradient)
        return Header(
            PARAM, self.plan_number, self.number, 0, nbytes, self.version, self.first, *announced, crc_or_flag=flag
        )

    def step_header(self, length: int, factor_count: int, announced: tuple[int, int]) -> Header:
        """Return the header of a frame that has a replica apply the step from the present version."""
        return Header(
            REPLICATE, self.plan_number, self.number, factor_count, length, self.version, self.first, *announced
        )

    def state_header(self, kind: int, payload: memoryview, steps: int) -> Header:
        """Return the header of a frame with the present state (`Header.with_checksum`)."""
        return Header.with_checksum(
            kind, payload, plan=self.plan_number, block=self.number, version=self.version, first=self.first,
            steps=steps,
        )  # fmt: skip

    def note_rows(self, total: Rows) -> None:
        """Note which rows a step changes."""
        self.step_rows = self.step_rows[1] if self.step_rows is not None else None, total.numbers

    def changed_rows(self) -> Rows | None:
        """Return the rows that the last two steps changed: all that a worker lacks if it has the weights before them.

        Two, because a worker puts the weights into the memory of the last version but one
        (`pslite.worker.ps.model_buffers`).  None if that may be everything: in the first two versions of a plan, since
        workers that the plan added have no earlier weights, and as long as this server does not know both steps.
        """
        before_last, last = self.step_rows if self.step_rows is not None else (None, None)
        if before_last is None or last is None or self.version < self.first + 2:
            return None
        numbers = np.union1d(before_last, last)
        return Rows(numbers, self.arrays[0].reshape(-1, self.definition.row)[numbers])

    def state_arrived(self, header: Header) -> None:
        """Note that the state has arrived with a frame, and at which version."""
        self.version, self.first, self.has_state = header.version, header.first, True

    def enter_plan(self, plan_number: int, first: int, leaves: int) -> None:
        """Put the block under a plan whose first version is `first`, the present one."""
        self.plan_number = plan_number
        self.first = first
        self.begin_step(leaves)

    def begin_step(self, leaves: int) -> None:
        """Drop all gradients of the present step: it is pushed from its beginning."""
        self.received.clear()
        self.total, self.first_worker_has_gradient = None, False
        self.sums = TreeSum(leaves, frozenset((ROOT,)))
