"""How far a worker is: the version that it has, and the blocks of the next one that are still to come."""

from __future__ import annotations

from collections.abc import Iterable


class Progress:
    """Versions of a worker's weights; of the sums of gradients, where the workers update.

    Workers on parameter servers receive a version block by block; all-reduce workers use `version` and `entered` alone.
    """

    def __init__(self) -> None:
        #: completed updates
        self.version = 0
        #: whether the first weights are here, so that a script that ends now leaves the job in its middle
        self.entered = False
        #: whether the job has begun with weights of this worker
        self.began = False
        #: the version whose blocks are awaited, and those of them that have not come
        self.awaited = -1
        self.missing: set[int] = set()

    def expect_next(self, blocks: int) -> None:
        """Wait for all blocks of the next version."""
        self.missing = set(range(blocks))
        self.awaited = self.version + 1

    def wants(self, block: int, version: int) -> bool:
        """Whether that version of a block is awaited."""
        return version == self.awaited and block in self.missing

    def newest(self, block: int) -> int:
        """Return the version that is here of a block; -1 if there is none."""
        if block not in self.missing:
            return self.awaited
        if self.entered:
            return self.awaited - 1
        return self.awaited if self.began else -1

    def unanswered(self, blocks: Iterable[int]) -> list[int]:
        """Return those of some blocks of which there is no answer to this step's push."""
        return [block for block in blocks if self.newest(block) <= self.version]
