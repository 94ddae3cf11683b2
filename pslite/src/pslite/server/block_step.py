"""One step of a block: its gradient sum, and the factors by which it is scaled, which may depend on all blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pslite.fault_points import FaultPoint
from pslite.job.job_spec import LAMB
from pslite.job.weight_blocks import Block
from pslite.net.messages import Factors, Norm, Vector
from pslite.numeric.norms import Squares
from pslite.numeric.optimizers import Updater, square_norm
from pslite.numeric.sparse_rows import Rows, parse
from pslite.server.block_state import NO_GRADIENT, Array, BlockState, Gradient, NoGradient
from pslite.server.server_state import ServerState


@dataclass(frozen=True)
class Step:
    """Everything that the optimizer needs to turn a version of a block into the next one."""

    #: sum of the gradients
    total: Gradient
    #: what the sum is divided by (`JobSpec.divisor`)
    divisor: float
    #: factor of the mean gradient by clipping; 1 if the norm of all gradients is within the limit
    clip: float = 1.0
    #: LAMB: factor of the update of each piece of a tensor in the block
    trust_ratios: tuple[float, ...] = ()

    def views(self) -> tuple[memoryview, ...]:
        """Return the payload that a replica is sent: divisor, clip and trust ratios as float64, then the sum."""
        if isinstance(self.total, NoGradient):
            return ()
        total = self.total.views() if isinstance(self.total, Rows) else (self.total.data.cast("B"),)
        factors = np.array((self.divisor, self.clip, *self.trust_ratios))
        return factors.data.cast("B"), *total

    @classmethod
    def parse(cls, definition: Block, payload: Array, count: int) -> Step:
        """Return the step in a payload that begins with `count` float64 factors; without any it has no gradient.

        Raises
        ------
        ProtocolError
            its rows (of a sparse block) are not rows of the block in ascending order.

        """
        if not count:
            return cls(NO_GRADIENT, 1.0)
        divisor, clip, *trust_ratios = np.frombuffer(payload, dtype=np.float64, count=count).tolist()
        sum_bytes = payload[8 * count :]
        total = parse(definition, sum_bytes.data) if definition.is_sparse else sum_bytes.view(definition.dtype)
        return cls(total, divisor, clip, tuple(trust_ratios))


@dataclass(eq=False)
class StepMaker:
    """Computes the step of a block from its gradient sum, and applies steps to blocks.

    The factor of gradient clipping and LAMB's trust ratios depend on other blocks: sums of squares go to the
    coordinator, which adds them up over all servers and sends the factors.
    """

    state: ServerState
    #: block number -> sums of squares that are not sent yet, by vector
    _unsent_squares: dict[Vector, dict[int, Squares]] = field(default_factory=lambda: {"gradient": {}, "update": {}})
    #: all that has been sent of the last step, by vector
    _sent_squares: dict[Vector, Norm] = field(default_factory=dict)
    #: the last factors of the coordinator, by vector
    _factors: dict[Vector, Factors] = field(default_factory=dict)

    @cached_property
    def _updater(self) -> Updater:
        return Updater(self.state.spec.clip_value)

    def make(self, block: BlockState, total: Gradient) -> Step | None:
        """Return the step of a block whose gradient sum is complete.

        If a factor has not come from the coordinator yet, return None and keep the sums of squares that the
        coordinator needs for it; `send_squares` sends them.
        """
        spec, number, version = self.state.spec, block.number, block.version
        if isinstance(total, NoGradient):
            return Step(total, 1.0)
        optimizer = block.definition.optimizer
        divisor = spec.divisor(optimizer, version, self.state.prepared_of(block).reduction.leaves)
        values = total.values if isinstance(total, Rows) else total
        clip = 1.0
        if spec.clip_norm:
            known = self._known_factors("gradient", version)
            if known is None:
                self._unsent_squares["gradient"][number] = (square_norm(optimizer, values, divisor),)
                return None
            clip = known[0]
        if not isinstance(optimizer, LAMB):
            return Step(total, divisor, clip)
        tensors = self.state.tensors
        shares_tensor = number in tensors.blocks_sharing_tensors
        trust = self._known_factors("update", version) if shares_tensor else None
        if trust is None:
            sizes = [piece.size for piece in tensors.pieces[number]]
            squares = {
                number: self._updater.squares(
                    optimizer, block.arrays, values, divisor, block.schedule_version, clip, sizes
                )
            }
            if shares_tensor:
                self._unsent_squares["update"].update(squares)
                return None
            trust = tensors.trust(squares)
        return Step(total, divisor, clip, tuple(factor for _, factor in tensors.factors(number, trust)))

    def apply(self, block: BlockState, step: Step, version: int | None = None, updates: int | None = None) -> None:
        """Update a block's state by a step; its version number is left to the caller.

        Parameters
        ----------
        block
            the block, which has its state.
        step
            the sum and its factors.
        version
            the version that schedules go by; None for the block's `schedule_version`.
        updates
            how often the optimizer has updated the block; None for the block's `updates`.

        """
        self.state.faults.reached(FaultPoint.APPLY, block, step)
        for squares in self._unsent_squares.values():
            # A new coordinator repeats factors, so that the step of a block may be computed again when its squares have
            # been sent.
            squares.pop(block.number, None)
        optimizer, total = block.definition.optimizer, step.total
        block.unchanged = isinstance(total, NoGradient)
        if isinstance(total, NoGradient):
            block.uncounted_steps += 1
            return
        updates = block.updates if updates is None else updates
        version = block.schedule_version if version is None else version
        self.state.meter.add(block.definition.nbytes)
        pieces = self.state.tensors.pieces[block.number] if step.trust_ratios else ()
        factors = tuple((piece.size, ratio) for piece, ratio in zip(pieces, step.trust_ratios, strict=True))
        self._updater.apply(optimizer, block.arrays, total, step.divisor, version, step.clip, factors, updates)
        if isinstance(total, Rows):
            block.note_rows(total)

    def _known_factors(self, vector: Vector, version: int) -> dict[int, float] | None:
        """Return the coordinator's factors for the step from a version; None if they have not come."""
        last = self._factors.get(vector)
        return last.factors if last is not None and last.version == version else None

    def take_factors(self, message: Factors) -> bool:
        """Take factors from the coordinator; return False if they belong to a step that is done."""
        last = self._factors.get(message.of)
        if last is not None and message.version < last.version:
            return False  # a new coordinator has sent them again
        self._factors[message.of] = message
        return True

    def send_squares(self) -> None:
        """Send the coordinator the sums of squares that were computed since the last call."""
        for vector, squares in self._unsent_squares.items():
            if squares:
                # The blocks have the same version: none completes a step before the coordinator has the squares of all.
                version = next(self.state.owned[number].version for number in squares)
                last = self._sent_squares.get(vector)
                # squares of this step that were sent in earlier calls, when other blocks were not complete
                reported = last.squares if last is not None and last.version == version else {}
                self._sent_squares[vector] = Norm(version=version, squares={**reported, **squares}, of=vector)
                self.state.send(Norm(version=version, squares=dict(squares), of=vector))
                squares.clear()

    def send_squares_again(self) -> None:
        """Repeat the reports of the present step to a new coordinator, which does not have them."""
        for norm in self._sent_squares.values():
            self.state.send(norm)
