"""What all sessions of workers have in common: a share of each step, the state to begin with, and waiting times.

A session is a worker's view of a job. There are three kinds: `pslite.worker.ps.worker.Worker` and
`pslite.worker.allreduce.worker.AllReduceWorker` in an elastic job, and
`pslite.worker.single_process_session.SingleSession` without one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pslite.job.job_spec import JobSpec
from pslite.job.membership_plan import reduction
from pslite.job.reduction_tree import span
from pslite.job.weight_blocks import Block
from pslite.numeric.gradient_sums import Array


class Drained(SystemExit):
    """This worker has left the job in good order: the process ends with status 0 and runs nothing after the loop."""

    def __init__(self) -> None:
        super().__init__(0)


class Part(NamedTuple):
    """One leaf of the tree, and the half-open range of logical shards that it stands for."""

    leaf: int
    low: int
    high: int


class Share:
    """What this worker does in a step: the tree nodes that it pushes, and the shards below them."""

    __slots__ = ("_exact", "_shards", "index", "leaves", "nodes")

    def __init__(self, spec: JobSpec, workers: int, index: int, shares: Sequence[int] = ()) -> None:
        how = reduction(spec, workers, shares)
        self.index = index
        self.leaves = how.leaves
        #: its own, and those of workers that are gone
        self.nodes = how.nodes[index]
        self._exact = spec.mode == "exact"
        self._shards = how.shards

    def parts(self, nodes: Iterable[int]) -> list[Part]:
        """Return the leaves below some nodes, each with its shards."""
        leaves = [leaf for node in nodes for leaf in range(*span(node, self.leaves))]
        return [Part(leaf, *((leaf, leaf + 1) if self._exact else self._shards[leaf])) for leaf in leaves]

    def amount(self, nodes: Iterable[int]) -> int:
        """Return the number of shards below some nodes."""
        return sum(part.high - part.low for part in self.parts(nodes))


@dataclass(frozen=True)
class StartState:
    """A state of the job that an open job begins with."""

    place: str
    version: int
    #: of each block, shape (1 + slots, size)
    arrays: tuple[Array, ...]
    blocks: tuple[Block, ...]

    def states(self) -> Iterator[tuple[Block, Array]]:
        """Give each block with its weights and optimizer state."""
        return zip(self.blocks, self.arrays, strict=True)


class Stopwatch:
    """Waiting times in milliseconds, on the monotonic clock."""

    def __init__(self) -> None:
        self.total_ms = 0.0
        self._since = 0.0

    def start(self) -> None:
        """Begin to wait."""
        self._since = time.monotonic()

    def stop(self) -> None:
        """End to wait."""
        self.total_ms += (time.monotonic() - self._since) * 1e3
