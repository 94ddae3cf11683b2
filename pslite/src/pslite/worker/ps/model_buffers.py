"""The arrays of a worker's model: its weights, where new ones arrive, and where gradients come from."""

from __future__ import annotations

import itertools

from pslite.job.job_spec import JobSpec
from pslite.job.weight_blocks import cut
from pslite.numeric.gradient_encoding import encoding_of
from pslite.numeric.gradient_sums import Bundle, Supply


class ModelBuffers:
    """Memory for a job's model in one worker.

    There are two bundles, for weights of even and of odd versions: a step can be done over until all blocks of the next
    version are here.  In an open job there is one, as no gradient is computed again there.
    """

    def __init__(self, spec: JobSpec) -> None:
        #: by the plan in force
        self.spec = spec
        self.blocks = cut(spec)
        #: with what a plan adds that has been prepared
        self.known_spec, self.known_blocks = self.spec, self.blocks
        self.weights = Bundle(spec, self.blocks)
        self.supply = Supply(spec, self.blocks)
        self.encoding = encoding_of(spec)
        self._bundles = self.weights, self.weights if spec.open else Bundle(spec, self.blocks)

    def prepare(self, spec: JobSpec) -> range:
        """Take the job's description, which is this worker's or extends it; return the numbers of blocks that it adds.

        There is memory for their weights then; the plan that adds them is not in force yet.  Those of a plan that was
        given up are taken away.
        """
        pairs = zip(self.known_spec.segments, spec.segments, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        kept = max(same, len(self.spec.segments))
        before = sum(block.segment < kept for block in self.known_blocks)
        if before < len(self.known_blocks):
            self.weights.shorten(kept, self.known_blocks[:before])
        self.known_spec, self.known_blocks = spec, cut(spec)
        added = range(before, len(self.known_blocks))
        if added:
            self.weights.extend(spec, self.known_blocks)  # of an open job, all of whose versions arrive there
        return added

    def enter(self, blocks: int) -> None:
        """Go on with the description of a prepared plan that has so many blocks."""
        assert blocks == len(self.known_blocks)
        if blocks > len(self.blocks):
            self.supply = Supply(self.known_spec, self.known_blocks)
        self.spec, self.blocks = self.known_spec, self.known_blocks

    def arriving(self, version: int) -> Bundle:
        """Return where the blocks of a version arrive."""
        return self._bundles[version % 2]

    def show(self, version: int) -> None:
        """Have `weights` be those of a version of which all blocks are here."""
        self.weights = self.arriving(version)
