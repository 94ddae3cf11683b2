"""Gradients of tensors of which a step touches a few rows: the rows' numbers and their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pslite.errors import ProtocolError
from pslite.job.weight_blocks import Block

Array = NDArray[Any]
Numbers = NDArray[np.uint32]


@dataclass(eq=False, slots=True)
class Rows:
    """Some rows of a tensor or of a block: `numbers`, ascending, and `values`, shape (rows, elements of a row)."""

    numbers: Numbers
    values: Array

    @classmethod
    def none(cls, width: int, dtype: str) -> Rows:
        """Return no rows, of so many elements."""
        return cls(np.empty(0, dtype=np.uint32), np.empty((0, width), dtype=dtype))

    @classmethod
    def of(cls, numbers: NDArray[np.integer[Any]], values: Array) -> Rows:
        """Return the sums of rows that are given in any order, some perhaps several times."""
        distinct, places = np.unique(numbers, return_inverse=True)
        sums = np.zeros((distinct.size, values.shape[1]), dtype=values.dtype)
        np.add.at(sums, places, values)
        return cls(distinct.astype(np.uint32), sums)

    def plus(self, other: Rows) -> Rows:
        """Return the sum.

        A row that only one has keeps its value.  So the sum at a node of the tree depends on what lies below it alone.
        """
        numbers = np.union1d(self.numbers, other.numbers)
        mine, theirs = np.searchsorted(numbers, self.numbers), np.searchsorted(numbers, other.numbers)
        values = np.empty((numbers.size, self.values.shape[1]), dtype=self.values.dtype)
        values[theirs] = other.values
        values[mine] = self.values
        _, left, right = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
        values[mine[left]] = self.values[left] + other.values[right]
        return Rows(numbers, values)

    def within(self, block: Block) -> Rows:
        """Return those of a tensor that lie in a block, numbered from its first."""
        first, count = block.offset // block.row, block.size // block.row
        low, high = np.searchsorted(self.numbers, (first, first + count))
        return Rows(self.numbers[low:high] - np.uint32(first), self.values[low:high])

    def views(self) -> tuple[memoryview, memoryview]:
        """Return them as they travel: numbers, then values."""
        return _bytes(self.numbers), _bytes(self.values)

    @property
    def nbytes(self) -> int:
        """Their length as they travel."""
        return self.numbers.nbytes + self.values.nbytes


def _bytes(array: Array) -> memoryview:
    view: memoryview = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return view


def checked_length(block: Block, length: int) -> int:
    """Return the length of some rows of a block. Raises `ProtocolError` if no rows of the block are so long."""
    each = np.dtype(np.uint32).itemsize + block.row * np.dtype(block.dtype).itemsize
    if length % each or length // each > block.size // block.row:
        raise ProtocolError(
            f"{length} bytes cannot be rows of block {block.number}, which has {block.size // block.row} rows of "
            f"{each} bytes"
        )
    return length


def parse(block: Block, data: memoryview) -> Rows:
    """Return the rows of a block that have come.

    Raises
    ------
    ProtocolError
        they are not rows of the block, in their order.

    """
    width = np.dtype(block.dtype).itemsize * block.row
    count = len(data) // (width + 4)
    if not count:
        return Rows.none(block.row, block.dtype)
    numbers = np.frombuffer(data, dtype=np.uint32, count=count)
    values = np.frombuffer(data, dtype=block.dtype, count=count * block.row, offset=4 * count)
    if int(numbers[-1]) >= block.size // block.row or bool((numbers[1:] <= numbers[:-1]).any()):
        raise ProtocolError(
            f"row numbers of block {block.number} must be ascending and below {block.size // block.row}"
        )
    return Rows(numbers, values.reshape(count, block.row))
