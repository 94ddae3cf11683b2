"""A whole model in one process: weights and optimizer arrays of every block, and the step that changes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from pslite.job.job_spec import LAMB, JobSpec
from pslite.job.weight_blocks import Block
from pslite.numeric.gradient_sums import Array, Bundle
from pslite.numeric.norms import Tensors
from pslite.numeric.optimizers import Updater, clip_factor, slots, square_norm


class States(Protocol):
    """Where the state of every block is to be had."""

    def states(self) -> Iterator[tuple[Block, Array]]:
        """Give each block with its weights and optimizer state."""


class ModelReplica:
    """All blocks of a job.

    Parameters
    ----------
    spec
        the job.
    blocks
        its blocks.
    weights
        kept equal to the blocks' weights: what the user's model looks at.

    """

    def __init__(self, spec: JobSpec, blocks: tuple[Block, ...], weights: Bundle) -> None:
        self._spec = spec
        self._blocks = blocks
        self._weights = weights
        self._updater = Updater(spec.clip_value)
        self._tensors = Tensors(spec, blocks)
        #: by block, shape (1 + slots, elements): weights, then the optimizer's arrays
        self.states: list[Array] = []
        #: by block, steps without a gradient, which its optimizer does not count
        self._idle: list[int] = []
        self._allocate(0)

    def _allocate(self, version: int) -> None:
        for block in self._blocks[len(self.states) :]:
            state = np.empty((1 + slots(block.optimizer), block.size), dtype=block.dtype)
            state.fill(0)  # touched now, not in a step
            self.states.append(state)
            self._idle.append(version)

    def extend(self, spec: JobSpec, blocks: tuple[Block, ...], version: int) -> None:
        """Have further blocks from a version on, with the weights that are there."""
        before = len(self._blocks)
        self._spec, self._blocks, self._tensors = spec, blocks, Tensors(spec, blocks)
        self._allocate(version)
        for block in blocks[before:]:
            self.states[block.number][0] = self._weights.part(block)

    def begin(self, found: States | None) -> None:
        """Start from a checkpoint or the like, or without one from the weights that are there."""
        if found is None:
            for block, state in zip(self._blocks, self.states, strict=True):
                state[0] = self._weights.part(block)
            return
        for block, state in found.states():
            self.states[block.number][:] = state
        self.show()

    def show(self) -> None:
        """Bring the weights of the blocks to where the model looks at them."""
        for block, state in zip(self._blocks, self.states, strict=True):
            self._weights.part(block)[:] = state[0]

    def apply(self, gradient: Bundle, version: int, before: Callable[[int], None] = lambda _: None) -> None:
        """Turn version `version` into the next; `gradient` is the sum over its samples.

        `before` is called with the number of each block, in their order, before it changes.
        """
        spec = self._spec
        blocks = [block for block in self._blocks if block.segment not in gradient.idle]
        states = [self.states[block.number] for block in blocks]
        if len(blocks) < len(self._blocks):
            for block in self._blocks:
                self._idle[block.number] += block.segment in gradient.idle
        counts = [spec.divisor(block.optimizer, version, 1) for block in blocks]
        rows = [gradient.rows[b.segment].within(b) if b.is_sparse else None for b in blocks]
        parts = [
            gradient.part(block) if some is None else some.values for block, some in zip(blocks, rows, strict=True)
        ]
        squares = (
            [square_norm(b.optimizer, part, n) for b, part, n in zip(blocks, parts, counts, strict=True)]
            if spec.clip_norm
            else []
        )
        clip = clip_factor(spec.clip_norm, squares)
        lengths = {
            block.number: self._updater.squares(
                block.optimizer, state, part, count, self._schedule_version(block, version), clip,
                [piece.size for piece in self._tensors.pieces[block.number]],
            )
            for block, state, part, count in zip(blocks, states, parts, counts, strict=True)
            if isinstance(block.optimizer, LAMB)
        }  # fmt: skip
        trust = self._tensors.trust(lengths)
        for block, state, part, some, count in zip(blocks, states, parts, rows, counts, strict=True):
            before(block.number)
            updates = version - self._idle[block.number]
            schedule = self._schedule_version(block, version)
            factors = self._tensors.factors(block.number, trust) if block.number in lengths else ()
            total = part if some is None else some
            self._updater.apply(block.optimizer, state, total, count, schedule, clip, factors, updates)
            self._weights.part(block)[:] = state[0]

    def _schedule_version(self, block: Block, version: int) -> int:
        """Return the version that schedules go by in a step from a version of the model, and LAMB's bias correction."""
        return version - self._idle[block.number] + block.since

    def updates(self, blocks: Iterable[int], version: int) -> list[int]:
        """Return how many steps up to a version had a gradient of each of some blocks."""
        return [version - self._idle[number] for number in blocks]

    def digests(self) -> dict[int, bytes]:
        """Return the SHA-256 of each block's weights."""
        return {b.number: hashlib.sha256(s[0]).digest() for b, s in zip(self._blocks, self.states, strict=True)}
