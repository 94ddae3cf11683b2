"""A worker's view of a job: its weights, its share of the next step, and the exchange that ends a step.

Three kinds: `pslite.worker.ps.worker.Worker` and `pslite.worker.allreduce.worker.AllReduceWorker` in an elastic job,
and `pslite.worker.single_process_session.SingleSession` without one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pslite.job.job_spec import JobSpec
from pslite.job.membership_plan import reduction
from pslite.job.reduction_tree import span
from pslite.job.sample_assignment import SampleRange, Seen
from pslite.job.weight_blocks import Block
from pslite.numeric.gradient_sums import Array, Bundle, Contribution, Supply


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


class Session(Protocol):
    """What the adapters (PyTorch, plain numpy) program against."""

    @property
    def share(self) -> Share:
        """What this worker does in the next step."""

    @property
    def spec(self) -> JobSpec:
        """The job."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Its blocks."""

    @property
    def weights(self) -> Bundle:
        """Filled by the adapter with initial weights before `start`; holds the weights of `version` afterwards.

        Another bundle after each step: until a new version is complete the old one stays as it is.  In an open job the
        same one: from the first push of a step on, the new weights replace the old ones as they arrive.
        """

    @property
    def supply(self) -> Supply:
        """Where memory for gradients comes from."""

    @property
    def version(self) -> int:
        """Completed updates."""

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the first of the plan in force."""

    def start(self) -> None:
        """Become a member; returns when `weights`, `version` and `share` are valid."""

    def exchange(self, contributions: Sequence[Contribution], loss: float, samples: int) -> tuple[int, ...]:
        """Push gradient sums of this step, first those of `share.nodes`, and wait for the next version.

        Returns the tree nodes that have to be computed and given to another call, because a worker is gone before it
        has pushed them; none where the version is complete.  Raises Drained if the worker leaves the job here.
        """

    def finish(self) -> None:
        """Say that the last version is reached."""


class OpenSession(Session, Protocol):
    """What an adapter needs for scripts with a loop of their own: a `Session` that learns late what is trained."""

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """This worker's rank, and the number of workers."""

    @property
    def joined_late(self) -> bool:
        """Whether this worker has come to a job that was under way; valid after `start`."""

    @property
    def next_weights(self) -> Bundle | None:
        """Where the next version's weights will arrive; None if they only change where they are."""

    @property
    def memory_is_shared(self) -> bool:
        """Whether servers look into gradients that lie in shared memory: those need not be sent."""

    @property
    def first_worker_segments(self) -> frozenset[int]:
        """Segments of which the first worker had a gradient in the last step, as far as that is known."""

    def attach(self) -> None:
        """Come to the job before it is known what to train; `rank_and_size` is valid afterwards."""

    def describe(self, spec: JobSpec) -> None:
        """Say what is trained; `spec`, `blocks` and `weights` are there afterwards."""

    def extend(self, spec: JobSpec, weights: Mapping[int, Array]) -> None:
        """Ask for further segments after the first step: `spec` begins with the present one.

        `weights` has the added segments' weights by their numbers, shape (size,); the first worker's are used.  All
        workers go on with steps until `spec` and `blocks` have the segments; `supply` is another one then.
        """

    def start_from(self, given: StartState) -> None:
        """Have the job begin with that state instead of the first worker's weights; call it before `start`."""

    def barrier(self) -> None:
        """Wait until every worker does."""

    def ask_samples(self, dataset: str, samples: int, seen: Seen, count: int) -> SampleRange:
        """Return up to `count` samples that no other worker has in this epoch; none if the epoch is over."""

    def fetch(self) -> list[Array]:
        """Return weights and optimizer state of every block at the present version; shape (1 + slots, size) each."""

    def updates(self, blocks: Sequence[int]) -> list[int]:
        """Return how many steps had a gradient of each of some blocks, by their numbers: what its optimizer counts."""


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
