"""Gradients in 16 bits on the wire: bfloat16, or IEEE half precision.

A worker rounds what it pushes, so that packing it loses nothing and every transport carries the same values.  Sums and
weights stay float32.  In exact mode every node of the tree is rounded, whoever adds it up, so that the bits do not
depend on which nodes are pushed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pslite.job.job_spec import JobSpec, Mean, Segment
from pslite.job.weight_blocks import Block

Array = NDArray[Any]

#: elements that are worked on at a time, so that the cache holds them
_PIECE = 32768


class Encoding:
    """One way to write float32 in 16 bits: rounds to nearest, ties to even.

    Parameters
    ----------
    name
        "bfloat16" or "float16".
    batch
        samples in a sum: half precision, whose largest value is 65504, holds sums divided by the power of two that is
        not below it.

    """

    def __init__(self, name: str, batch: int) -> None:
        self.dtype = "uint16" if name == "bfloat16" else "float16"
        self._scale = np.float32(2.0 ** -math.ceil(math.log2(batch)))
        self._wide = np.empty(_PIECE, dtype=np.float32)

    def pack(self, values: Array, packed: Array) -> None:
        """Write float32 `values` into `packed`, of as many elements and of type `dtype`."""
        for low in range(0, values.size, _PIECE):
            part, out = values[low : low + _PIECE], packed[low : low + _PIECE]
            wide = self._wide[: part.size]
            if self.dtype == "uint16":
                bits = self._round(part, wide)
                np.right_shift(bits, 16, out=bits)
                np.copyto(out, bits, casting="unsafe")
            else:
                np.multiply(part, self._scale, out=wide)
                with np.errstate(over="ignore"):
                    np.copyto(out, wide, casting="same_kind")

    def unpack(self, packed: Array, values: Array) -> None:
        """Write `packed` as float32 into `values`."""
        for low in range(0, values.size, _PIECE):
            part, out = packed[low : low + _PIECE], values[low : low + _PIECE]
            if self.dtype == "uint16":
                bits = out.view(np.uint32)
                np.copyto(bits, part)
                np.left_shift(bits, 16, out=bits)
            else:
                np.copyto(out, part)
                np.divide(out, self._scale, out=out)

    def round(self, values: Array) -> None:
        """Make of float32 `values` what they are after they were packed and unpacked."""
        if self.dtype == "uint16":
            for low in range(0, values.size, _PIECE):
                part = values[low : low + _PIECE]
                bits = self._round(part, self._wide[: part.size])
                np.bitwise_and(bits, 0xFFFF0000, out=part.view(np.uint32))
            return
        packed = np.empty(min(values.size, _PIECE), dtype=np.float16)
        for low in range(0, values.size, _PIECE):
            part = values[low : low + _PIECE]
            self.pack(part, packed[: part.size])
            self.unpack(packed[: part.size], part)

    @staticmethod
    def _round(values: Array, scratch: Array) -> Array:
        """Return bits whose upper half is the value in bfloat16; in the memory of `scratch`."""
        own, bits = values.view(np.uint32), scratch.view(np.uint32)
        np.right_shift(own, 16, out=bits)
        np.bitwise_and(bits, 1, out=bits)
        np.add(bits, 0x7FFF, out=bits)
        np.add(bits, own, out=bits)
        with np.errstate(all="ignore"):
            total = values.sum()
        if np.isnan(total):
            # the carry of a NaN with all bits set would make a number of it
            bits[np.isnan(values)] = 0x7FC00000
        return bits


def encoding_of(spec: JobSpec) -> Encoding | None:
    """Return how gradients of a job are written on the wire; None for as they are."""
    return None if spec.wire == "float32" else Encoding(spec.wire, spec.batch)


def narrow(spec: JobSpec, part: Segment | Block) -> bool:
    """Whether gradients of a segment or a block are written in 16 bits: those of float32 weights are, rows are not."""
    return spec.wire != "float32" and part.dtype == "float32" and not isinstance(part.optimizer, Mean) and not part.row


def wire_bytes(spec: JobSpec, block: Block) -> int:
    """Return the length of a gradient of a block on the wire."""
    return block.nbytes // 2 if narrow(spec, block) else block.nbytes
