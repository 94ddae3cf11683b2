"""Lengths of tensors whose parts lie in several blocks, perhaps on several servers.

Each block gives the sum of squares of its piece of each tensor; whoever has those of all blocks adds them up by
`math.fsum`, whose result does not depend on their order.  So the number of servers changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pslite.job.job_spec import LAMB, JobSpec
from pslite.job.weight_blocks import Block


class Piece(NamedTuple):
    """What a block holds of a tensor: the tensor's number in the job, and the number of elements."""

    tensor: int
    size: int


#: by piece of a block, in their order: the sums of squares of its weights and of its update
Squares = tuple[float, ...]


class Tensors:
    """The pieces of tensors that blocks hold, and which of them LAMB has to ask others about."""

    def __init__(self, spec: JobSpec, blocks: Sequence[Block]) -> None:
        self.pieces: list[tuple[Piece, ...]] = []
        holders: dict[int, set[int]] = {}
        numbers = [0]
        for segment in spec.segments:
            numbers.append(numbers[-1] + len(segment.parts))
        for block in blocks:
            found: list[Piece] = []
            place = 0
            for number, part in enumerate(spec.segments[block.segment].parts, numbers[block.segment]):
                low, high = max(place, block.offset), min(place + part.size, block.offset + block.size)
                if low < high:
                    found.append(Piece(number, high - low))
                    holders.setdefault(number, set()).add(block.number)
                place += part.size
            self.pieces.append(tuple(found))
        #: blocks that hold a piece of a tensor of which others hold pieces too, if that matters
        self.blocks_sharing_tensors = frozenset(
            block.number
            for block in blocks
            if isinstance(block.optimizer, LAMB)
            and any(len(holders[piece.tensor]) > 1 for piece in self.pieces[block.number])
        )

    def trust(self, squares: Mapping[int, Squares]) -> dict[int, float]:
        """Return LAMB's factor for each tensor, from the squares of blocks that hold them whole among themselves."""
        weights: dict[int, list[float]] = {}
        updates: dict[int, list[float]] = {}
        for block in sorted(squares):
            for piece, weight, update in zip(
                self.pieces[block], squares[block][::2], squares[block][1::2], strict=True
            ):
                weights.setdefault(piece.tensor, []).append(weight)
                updates.setdefault(piece.tensor, []).append(update)
        return {tensor: _ratio(math.fsum(weights[tensor]), math.fsum(updates[tensor])) for tensor in weights}

    def factors(self, block: int, trust: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
        """Return how many elements of a block after each other get which factor."""
        return tuple((piece.size, trust[piece.tensor]) for piece in self.pieces[block])


def _ratio(weights: float, update: float) -> float:
    """Return the length of weights by that of their update; 1 where one has none (You et al. 2020, algorithm 2)."""
    if not weights or not update:
        return 1.0
    return math.sqrt(weights) / math.sqrt(update)
