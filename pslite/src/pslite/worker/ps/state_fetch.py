"""Fetches weights and optimizer state from the servers, at the present version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from pslite.net.tensor_frames import FETCH, Header, bytes_of
from pslite.numeric.gradient_sums import Array
from pslite.numeric.optimizers import slots
from pslite.worker.progress_reports import Progress
from pslite.worker.ps.data_connections import DataPlane
from pslite.worker.ps.known_plans import PlanTable
from pslite.worker.ps.model_buffers import ModelBuffers


@dataclass(eq=False)
class StateFetch:
    """Blocks whose state is on its way to this worker."""

    _model: ModelBuffers
    _plans: PlanTable
    _progress: Progress
    _plane: DataPlane
    _awaited: dict[int, Array] = field(default_factory=dict)
    #: by block that has come, how many steps had no gradient of it
    uncounted_steps: dict[int, int] = field(default_factory=dict)

    def begin(self, numbers: Iterable[int]) -> list[Array]:
        """Ask for some blocks; returns where they arrive, each of shape (1 + slots, size)."""
        blocks = [self._model.blocks[number] for number in numbers]
        states = [np.empty((1 + slots(block.optimizer), block.size), dtype=block.dtype) for block in blocks]
        self._awaited = {block.number: state for block, state in zip(blocks, states, strict=True)}
        self.ask(self._awaited)
        return states

    @property
    def done(self) -> bool:
        """Whether all that was asked for is here."""
        return not self._awaited

    def ask(self, blocks: Iterable[int]) -> None:
        """Ask the present owners for those of some blocks that have not come."""
        plan = self._plans.current
        assert plan is not None
        for number in self._awaited.keys() & set(blocks):
            header = Header(FETCH, plan.number, number, 0, 0, self._progress.version, self._plans.first)
            self._plane.send(plan.owner(number).task, header)

    def place(self, block: int, version: int) -> memoryview | None:
        """Return where the state of a block goes; None if it is not awaited, since it came from another owner."""
        if block not in self._awaited or version != self._progress.version:
            return None
        return bytes_of(self._awaited[block])

    def arrived(self, block: int, uncounted_steps: int) -> None:
        """Note that the state of a block is here."""
        self._awaited.pop(block, None)
        self.uncounted_steps[block] = uncounted_steps
