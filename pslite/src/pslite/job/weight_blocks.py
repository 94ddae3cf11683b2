"""Blocks: the pieces, of at most about a MiB, in which weights and gradients travel and are owned."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from pslite.job.job_spec import ITEM_BYTES, JobSpec, Optimizer


@dataclass(frozen=True, slots=True)
class Block:
    """A slice [offset, offset + size) of one segment's flat array."""

    number: int
    segment: int
    offset: int
    size: int
    dtype: str
    optimizer: Optimizer
    #: elements of a row, of which there are whole ones, if the segment is sparse; else 0
    row: int = 0
    #: updates of others before it was added, if the segment is late; else 0
    since: int = 0

    @property
    def is_sparse(self) -> bool:
        """Whether its gradients are rows."""
        return self.row > 0

    @property
    def nbytes(self) -> int:
        """Bytes of the weights (or of one gradient) of this block."""
        return self.size * ITEM_BYTES[self.dtype]


def cut(spec: JobSpec) -> tuple[Block, ...]:
    """Cut the job's segments into blocks of at most their `block_bytes`; the same for every process of the job."""
    blocks: list[Block] = []
    for index, segment in enumerate(spec.segments):
        step, size = segment.block_size(spec.block_bytes), segment.size
        for offset in range(0, size, step):
            blocks.append(
                Block(
                    number=len(blocks),
                    segment=index,
                    offset=offset,
                    size=min(step, size - offset),
                    dtype=segment.dtype,
                    optimizer=segment.optimizer,
                    row=segment.row,
                    since=segment.since,
                )
            )
    return tuple(blocks)


def digest_of_fixed(tensors: Iterable[tuple[object, tuple[int, ...], object, bytes | memoryview]]) -> str:
    """Return the digest of what is not trained, given as names, shapes, types and values; "" if there is nothing."""
    found, empty = hashlib.sha256(), True
    for name, shape, dtype, values in tensors:
        empty = False
        found.update(f"{name} {shape} {dtype}\n".encode())
        found.update(values)
    return "" if empty else found.hexdigest()


def digest_of(blocks: dict[int, bytes]) -> str:
    """Return the digest of a whole model, from the SHA-256 of each block's weights, taken in block order."""
    return hashlib.sha256(b"".join(blocks[number] for number in sorted(blocks))).hexdigest()
