"""Blocks that a server makes anew because the one that had them is gone: a worker's weights, and what there is of the
optimizer's state: an older copy's, that of a checkpoint, or none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pslite.errors import CheckpointError
from pslite.holding import Array, Holding
from pslite.job.blocks import Block
from pslite.net.data_frames import Header
from pslite.numeric.optimizers import slots
from pslite.storage.checkpoints import Checkpoint, place_of


@dataclass(frozen=True)
class Slots:
    """What a checkpoint has of some blocks: by block, the optimizer's arrays; `reason` says why it has nothing."""

    number: int
    version: int
    states: Mapping[int, Array]
    reason: str = ""


@dataclass(eq=False)
class _Entry:
    """A block on its way."""

    holding: Holding
    #: the version of the weights that are to come
    version: int
    #: the version of the optimizer's state in `holding`; -1: it has none
    kept: int
    #: whether a checkpoint is being read for it
    reads: bool
    #: the frame that the weights came with
    header: Header | None = None


class Rebuilding:
    """All of them.

    Parameters
    ----------
    put
        takes, from any thread, what a checkpoint has.

    """

    def __init__(self, put: Callable[[Slots], None]) -> None:
        self._put = put
        self._number = 0
        self._entries: dict[int, _Entry] = {}
        self._states: dict[int, int] = {}

    @property
    def number(self) -> int:
        """That of the newest `Promote`."""
        return self._number

    @property
    def busy(self) -> bool:
        """Whether a block is not whole yet."""
        return bool(self._entries)

    def begin(self, number: int) -> None:
        """Prepare for the blocks of a `Promote`; those of the one before are not awaited any more."""
        self._number, self._states = number, {}
        self._entries.clear()

    def lagging(self, block: int) -> Holding | None:
        """Return the older copy that there is of a block."""
        entry = self._entries.get(block)
        return entry.holding if entry is not None and entry.kept >= 0 else None

    def expect(self, holding: Holding, version: int, *, reads: bool) -> None:
        """Await the weights of a block; `holding` is an older copy, or new (at version -1)."""
        holding.here = False
        self._entries[holding.block.number] = _Entry(holding, version, holding.version, reads)

    def read(self, folder: Path, version: int) -> None:
        """Begin to read a checkpoint for the blocks that want it, in a thread of its own."""
        wanted = {number: entry.holding.block for number, entry in self._entries.items() if entry.reads}
        if wanted:
            arguments = (self._number, place_of(folder, version), version, wanted)
            threading.Thread(target=self._read, args=arguments, name="pslite-rebuilding", daemon=True).start()

    def _read(self, number: int, place: Path, version: int, wanted: Mapping[int, Block]) -> None:
        found: dict[int, Array] = {}
        reason = ""
        try:
            for block, state in Checkpoint(place).states(wanted):
                if block != wanted[block.number]:
                    raise CheckpointError(f"{place}: block {block.number} is another one")
                found[block.number] = state[1:]
        except CheckpointError as error:
            found, reason = {}, str(error)
        self._put(Slots(number, version, found, reason))

    def awaits(self, header: Header) -> bool:
        """Whether the weights that come with a frame are awaited."""
        entry = self._entries.get(header.block)
        # a worker may have got the next version meanwhile, from an owner that has given the block away since
        return entry is not None and entry.header is None and entry.version <= header.version

    def weights(self, header: Header, data: Array) -> None:
        """The weights of a block have come."""
        if self.awaits(header):
            entry = self._entries[header.block]
            np.copyto(entry.holding.state[0], data.view(entry.holding.block.dtype))
            entry.header = header

    def slots(self, found: Slots) -> None:
        """What a checkpoint has is there, or there is nothing."""
        if found.number != self._number:
            return
        for number, entry in self._entries.items():
            if entry.reads:
                entry.reads = False
                state = found.states.get(number)
                if state is not None:
                    np.copyto(entry.holding.state[1:], state)
                    entry.kept = found.version

    def whole(self) -> list[Holding]:
        """Give the blocks that have everything, at the version and under the plan that the worker says."""
        found = []
        for number, entry in list(self._entries.items()):
            holding, header = entry.holding, entry.header
            if header is None or entry.reads:
                continue
            del self._entries[number]
            # the coordinator compares it with the version that it knows of
            self._states[number] = entry.version if entry.kept == header.version else min(entry.kept, entry.version - 1)
            if entry.kept < 0:
                holding.since = header.version
            holding.version, holding.plan, holding.first = header.version, header.plan, header.first
            holding.stamp = header.next_plan, header.next_first
            holding.here = True
            found.append(holding)
        return found

    def report(self) -> dict[int, int]:
        """Return of which version the optimizer's state is that each block goes on with, -1 for none."""
        return dict(self._states)


def reads_checkpoint(block: Block, newest: Holding | None, snapshot: int) -> bool:
    """Whether a checkpoint has more of a block than there is."""
    return newest is None and snapshot >= 0 and slots(block.optimizer) > 0
