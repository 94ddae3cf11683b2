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
        #: whether the script computes: it does not wait for others
        self.computes = False
        #: whether it waits for something that can be done when the last version is there
        self.patient = False
        #: whether the first weights are here, so that a script that ends now leaves the job in its middle
        self.entered = False
        #: whether the job has begun with weights of this worker
        self.began = False
        #: the version whose blocks are awaited, and those of them that have not come
        self.awaited = -1
        self.missing: set[int] = set()
        #: whether they are awaited at any version: at the one that their server has
        self.any_version = False
        #: segments of which the first worker had a gradient in the last step
        self.led: set[int] = set()
        #: by block, version and plan of the weights that have come
        self.arrived: dict[int, tuple[int, int]] = {}

    def expect(self, version: int, blocks: int) -> None:
        """Wait for all blocks of a version."""
        self.missing, self.led = set(range(blocks)), set()
        self.awaited = version

    def expect_newest(self, blocks: int) -> None:
        """Wait for all blocks at whichever version servers have them."""
        self.missing, self.any_version, self.led = set(range(blocks)), True, set()

    def wants(self, block: int, version: int) -> bool:
        """Whether that version of a block is awaited."""
        return block in self.missing and (self.any_version or version == self.awaited)

    def may_leave_after(self, version: int) -> bool:
        """Whether nothing is to be done before the worker leaves an open job whose last version that is; -1: any."""
        return version < 0 or (self.awaited > version and not self.patient)

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
