"""One step of a block: the sum of its gradients, and what it is scaled by, which may depend on the whole model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from pslite.fault_points import FaultPoint
from pslite.job.blocks import Block
from pslite.job.job_spec import LAMB
from pslite.net.messages import Clip, Norm, Trust
from pslite.numeric.norms import Squares
from pslite.numeric.optimizers import Updater, square_norm
from pslite.numeric.sparse_rows import Rows, parse
from pslite.server.block_state import Array, BlockState
from pslite.server.server_state import ServerState

#: what norms are of
Of = Literal["gradient", "update"]


@dataclass(frozen=True)
class Step:
    """All that makes a version out of the one before: the sum of the gradients, and what it is scaled by."""

    total: Array | Rows
    #: what makes a mean of it
    divisor: float
    #: what the mean is multiplied by because the norm of all gradients is too large
    clip: float = 1.0
    #: for LAMB, what the update of each tensor in the block is multiplied by
    factors: tuple[float, ...] = ()

    def views(self) -> tuple[memoryview, ...]:
        """Return it as it travels to a replica."""
        total = self.total.views() if isinstance(self.total, Rows) else (self.total.data.cast("B"),)
        numbers = np.array((self.divisor, self.clip, *self.factors))
        return numbers.data.cast("B"), *total

    @classmethod
    def parse(cls, block: Block, data: Array, count: int) -> Step:
        """Return what has come with `count` numbers; raises ProtocolError."""
        divisor, clip, *factors = np.frombuffer(data, dtype=np.float64, count=count).tolist()
        body = data[8 * count :]
        total = parse(block, body.data) if block.row else body.view(block.dtype)
        return cls(total, divisor, clip, tuple(factors))


@dataclass(eq=False)
class Steps:
    """Makes steps of gradient sums, and applies them.

    The factor of gradient clipping and LAMB's trust ratios depend on other blocks: sums of squares go to the
    coordinator, which adds them up over all servers and sends the factors.
    """

    state: ServerState
    #: of blocks whose sums are complete, not reported yet, by what they are of
    _squares: dict[Of, dict[int, Squares]] = field(default_factory=lambda: {"gradient": {}, "update": {}})
    #: what the coordinator has been told of the last step, by what it is of
    _reported: dict[Of, Norm] = field(default_factory=dict)
    #: the factors that the coordinator has sent, and of which version
    _clip: tuple[int, float] = -1, 1.0
    _trust: tuple[int, dict[int, float]] = field(default_factory=lambda: (-1, {}))

    @cached_property
    def _updater(self) -> Updater:
        return Updater(self.state.spec.clip_value)

    def make(self, block: BlockState, total: Array | Rows) -> Step | None:
        """Return the step of a block whose gradient sum is complete; None as long as factors of it are not known."""
        spec, number, version, rule = self.state.spec, block.number, block.version, block.block.optimizer
        divisor = spec.divisor(rule, version, self.state.plan_of(block).reduction.leaves)
        if self.state.sums_only:
            return Step(total, divisor)
        values = total.values if isinstance(total, Rows) else total
        clip = 1.0
        if spec.clip_norm:
            if self._clip[0] != version:
                self._squares["gradient"][number] = (square_norm(rule, values, divisor),)
                return None
            clip = self._clip[1]
        if not isinstance(rule, LAMB):
            return Step(total, divisor, clip)
        tensors = self.state.tensors
        asks = number in tensors.asking
        if asks and self._trust[0] == version:
            trust = self._trust[1]
        else:
            sizes = [piece.size for piece in tensors.pieces[number]]
            squares = {number: self._updater.lengths(rule, block.state, values, divisor, version, clip, sizes)}
            if asks:
                self._squares["update"].update(squares)
                return None
            trust = tensors.trust(squares)
        return Step(total, divisor, clip, tuple(factor for _, factor in tensors.factors(number, trust)))

    def apply(self, block: BlockState, step: Step, version: int | None = None) -> None:
        """Make the next version of a block, without counting it; `version` is where it differs from the block's."""
        self.state.faults.reached(FaultPoint.APPLY, block, step)
        for squares in self._squares.values():
            # summed up again, after a factor that a second coordinator sent again
            squares.pop(block.number, None)
        rule, total = block.block.optimizer, step.total
        version = block.version if version is None else version
        self.state.meter.add(block.block.nbytes)
        if isinstance(total, Rows):
            self._updater.apply_rows(rule, block.state, total, step.divisor, version, step.clip)
            block.note_rows(total)
        else:
            pieces = self.state.tensors.pieces[block.number] if step.factors else ()
            factors = tuple((piece.size, factor) for piece, factor in zip(pieces, step.factors, strict=True))
            self._updater.apply(rule, block.state, total, step.divisor, version, step.clip, factors)

    def take_factors(self, message: Clip | Trust) -> bool:
        """Take factors from the coordinator; returns False if they are of a step that is done."""
        known = self._clip[0] if isinstance(message, Clip) else self._trust[0]
        if message.version < known:
            return False  # from a coordinator that has heard again of a step that is done
        if isinstance(message, Clip):
            self._clip = message.version, message.factor
        else:
            self._trust = message.version, message.factors
        return True

    def report(self) -> None:
        """Tell the coordinator of the blocks whose sums have become complete since the last time."""
        for of, squares in self._squares.items():
            if squares:
                version = next(self.state.owned[number].version for number in squares)
                last = self._reported.get(of)
                before = last.squares if last is not None and last.version == version else {}
                self._reported[of] = Norm(version=version, squares={**before, **squares}, of=of)
                self.state.send(Norm(version=version, squares=dict(squares), of=of))
                squares.clear()

    def report_again(self) -> None:
        """Tell another coordinator, which knows nothing of the step under way."""
        for norm in self._reported.values():
            self.state.send(norm)
