"""A worker's memory: bundles shaped like the model, and the sums of gradients over its shards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pslite.job.job_spec import JobSpec
from pslite.job.reduction_tree import TreeSum, width
from pslite.job.weight_blocks import Block
from pslite.net.shared_memory import Layout, SharedMemory
from pslite.net.tensor_frames import bytes_of
from pslite.numeric.gradient_encoding import Encoding, encoding_of, narrow
from pslite.numeric.sparse_rows import Rows

Array = NDArray[Any]


class Bundle:
    """One flat array per segment of the job, and the byte view of each block in them; full of zeros at first.

    Parameters
    ----------
    spec, blocks
        the job, and its blocks.
    shared
        whether servers of the same machine may look into it, as into gradients: what is pushed must then stay as it is
        until the next version is complete.

    """

    def __init__(self, spec: JobSpec, blocks: Sequence[Block], *, shared: bool = False) -> None:
        layout = Layout(spec, blocks)
        self.region = SharedMemory(layout.nbytes, shared=shared and spec.architecture != "allreduce")
        self.arrays: list[Array] = [
            np.frombuffer(self.region.memory, dtype=segment.dtype, count=segment.size, offset=offset)
            for segment, offset in zip(spec.segments, layout.arrays, strict=True)
        ]
        #: all of it as bytes; every worker's has the same layout
        self.memory: NDArray[np.uint8] = np.frombuffer(self.region.memory, dtype=np.uint8)
        self._packed: dict[int, Array] = {}
        #: by sparse segment, the rows of a gradient; its array is not used then, nor its memory
        self.rows: dict[int, Rows] = {}
        self._sparse = [(i, segment.row, segment.dtype) for i, segment in enumerate(spec.segments) if segment.sparse]
        self._clear_rows()
        #: of a gradient: segments of which there is none in this step, nor in the bundle
        self.idle: frozenset[int] = frozenset()
        if not spec.open:
            # Its pages are there before a step needs them.  Most arrays of an open job lie elsewhere (`point`), so that
            # the pages here are never needed.
            self.clear()
        #: called with each block before it is pushed: puts there what is to be
        self.fill: Callable[[Block], None] | None = None
        #: called with each block of the weights as it has arrived
        self.take: Callable[[Block], None] | None = None
        self._blocks = blocks
        self._own = list(self.arrays)
        self.views = [bytes_of(self.part(block)) for block in blocks]

    def extend(self, spec: JobSpec, blocks: Sequence[Block]) -> None:
        """Have the further segments and blocks of a description that begins with the present one, full of zeros."""
        for segment in spec.segments[len(self.arrays) :]:
            self.arrays.append(np.zeros(segment.size, dtype=segment.dtype))
            self._own.append(self.arrays[-1])
        self._blocks = blocks
        self.views += [bytes_of(self.part(block)) for block in blocks[len(self.views) :]]

    def shorten(self, segments: int, blocks: Sequence[Block]) -> None:
        """Have the first segments and blocks only: others were to be added, but are not."""
        del self.arrays[segments:], self._own[segments:], self.views[len(blocks) :]
        self._blocks = blocks

    def part(self, block: Block) -> Array:
        """Return the elements of a block."""
        return self.arrays[block.segment][block.offset : block.offset + block.size]

    def point(self, segment: int, array: Array | None) -> None:
        """Have a segment lie in memory that is given, shape (size,), or with None in its own again.

        What is there is not copied.
        """
        array = self._own[segment] if array is None else array
        if array is not self.arrays[segment]:
            self.arrays[segment] = array
            for block in self._blocks:
                if block.segment == segment:
                    self.views[block.number] = bytes_of(self.part(block))

    def is_own(self, segment: int) -> bool:
        """Whether a segment lies in this bundle's own memory, into which servers may look if it is shared."""
        return self.arrays[segment] is self._own[segment]

    def _clear_rows(self) -> None:
        self.rows = {index: Rows.none(row, dtype) for index, row, dtype in self._sparse}

    def clear(self) -> None:
        """Set everything to zero, as a gradient."""
        self._clear_rows()
        for index, array in enumerate(self.arrays):
            if index not in self.rows:
                array.fill(0)

    def add(self, other: Bundle) -> None:
        """Add another bundle to this one."""
        for index, (mine, theirs) in enumerate(zip(self.arrays, other.arrays, strict=True)):
            if index in self.rows:
                self.rows[index] = self.rows[index].plus(other.rows[index])
            else:
                np.add(mine, theirs, out=mine)

    def round(self, spec: JobSpec, encoding: Encoding) -> None:
        """Round what travels in 16 bits to what that can hold."""
        for segment, array in zip(spec.segments, self.arrays, strict=True):
            if narrow(spec, segment):
                encoding.round(array)

    def packed(self, block: Block, encoding: Encoding) -> memoryview:
        """Return a block in 16 bits, in memory that is used again for the same block."""
        packed = self._packed.get(block.number)
        if packed is None:
            packed = self._packed[block.number] = np.empty(block.size, dtype=encoding.dtype)
        encoding.pack(self.part(block), packed)
        return bytes_of(packed)


@dataclass(eq=False, slots=True)
class Contribution:
    """The sum of gradients below one node of the tree."""

    node: int
    bundle: Bundle


class Supply:
    """Makes bundles for the gradients of a job, some of them before they are needed; any thread may call it."""

    def __init__(self, spec: JobSpec, blocks: tuple[Block, ...]) -> None:
        self._spec = spec
        self._blocks = blocks
        self._lock = threading.Lock()
        self._ready: list[Bundle] = []
        self._taken = 0

    def take(self) -> Bundle:
        """Return a bundle full of zeros, to be kept."""
        with self._lock:
            self._taken += 1
            return self._ready.pop() if self._ready else self._new()

    def reserve(self, count: int) -> None:
        """Make what is missing for so many in all, those that were taken among them."""
        with self._lock:
            while self._taken + len(self._ready) < count:
                self._ready.append(self._new())

    def _new(self) -> Bundle:
        return Bundle(self._spec, self._blocks, shared=True)


class GradientSums:
    """Adds the gradients of a worker's shards along the fixed tree; bundles are used again from step to step."""

    def __init__(self, spec: JobSpec, supply: Supply) -> None:
        self._spec = spec
        self._supply = supply
        self._free: list[Bundle] = []
        self._tree: TreeSum[Bundle] = TreeSum(1, frozenset((1,)))
        self._leaves = 1
        self._encoding = encoding_of(spec)
        self._done: list[Contribution] = []
        #: the leaf whose gradients are being added to those of its sibling; -1 for none
        self._joined = -1
        #: of earlier parts of the same step; servers may look at them, and they may have to be pushed again
        self._kept: list[Contribution] = []

    def begin(self, leaves: int, nodes: Iterable[int], *, again: bool = False) -> None:
        """Start a step, or with `again` a further part of the same: `nodes` are the tree nodes that are pushed next."""
        self._leaves = leaves
        self._tree = TreeSum(leaves, frozenset(nodes))
        self._kept += self._done
        self._done.clear()
        if not again:
            for contribution in self._kept:
                self._free.append(contribution.bundle)
            self._kept.clear()

    def take(self, *, zero: bool = True) -> Bundle:
        """Return a bundle full of zeros, or with `zero` False of anything."""
        if not self._free:
            return self._supply.take()
        bundle = self._free.pop()
        if zero:
            bundle.clear()
        return bundle

    def take_for(self, leaf: int) -> tuple[Bundle, bool]:
        """Return the bundle into which the gradients of a leaf go, and whether it has its sibling's already.

        To add them there gives the same bits as to add two bundles, without clearing and reading one more.  Gradients
        that travel in 16 bits are rounded before they are added, so they have a bundle of their own.
        """
        sibling = None if self._encoding is not None else self._tree.take_sibling(width(self._leaves) + leaf)
        if sibling is None:
            return self.take(), False
        self._joined = leaf
        return sibling, True

    def add(self, leaf: int, bundle: Bundle) -> None:
        """Add the gradients of one leaf (a shard, or in fast mode the worker)."""
        if self._encoding is not None:
            bundle.round(self._spec, self._encoding)
        node = width(self._leaves) + leaf
        if leaf == self._joined:
            self._joined, node = -1, node >> 1
        done = self._tree.add(node, bundle, self._combine)
        if done is not None:
            self._done.append(Contribution(*done))

    def _combine(self, left: Bundle, right: Bundle) -> Bundle:
        left.add(right)
        if self._encoding is not None:
            left.round(self._spec, self._encoding)
        self._free.append(right)
        return left

    @property
    def contributions(self) -> list[Contribution]:
        """What is ready to be pushed."""
        return self._done
