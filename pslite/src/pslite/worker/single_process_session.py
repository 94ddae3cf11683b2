"""A whole job in one process, without any network.

It gives the same bits as `exact` mode does at any size (or as `fast` mode with one worker).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pslite.job.job_spec import JobSpec
from pslite.job.sample_assignment import SampleAssigner, SampleRange, Seen
from pslite.job.weight_blocks import Block, cut, digest_of
from pslite.numeric.gradient_sums import Array, Bundle, Contribution, Supply
from pslite.storage.checkpoint_files import complete, to_resume, write_blocks
from pslite.worker.model_replica import ModelReplica
from pslite.worker.training_session import Share, StartState


class SingleSession:
    """The whole job in this process, seen as `pslite.worker.ps.worker.Worker` shows an elastic one."""

    rank_and_size = 0, 1
    is_chief = True
    joined_late = False
    #: the weights change where they are
    next_weights: Bundle | None = None
    memory_is_shared = False
    first_worker_segments: frozenset[int] = frozenset()

    def __init__(self, spec: JobSpec | None) -> None:
        self.spec: JobSpec
        self.blocks: tuple[Block, ...] = ()
        self.weights: Bundle
        self.supply: Supply
        self.version = 0
        self.share: Share
        self._assigners: dict[tuple[str, int], SampleAssigner] = {}
        self._replica: ModelReplica
        self._given: StartState | None = None
        if spec is not None:
            self.describe(spec)

    def describe(self, spec: JobSpec) -> None:
        """Say what is trained, and allocate memory for it."""
        self.spec = spec
        self.blocks = cut(spec)
        self.weights = Bundle(spec, self.blocks)
        self.supply = Supply(spec, self.blocks)
        self.share = Share(spec, 1, 0)
        self._replica = ModelReplica(spec, self.blocks, self.weights)

    def extend(self, spec: JobSpec, weights: Mapping[int, Array]) -> None:
        """Add the further segments of `spec` at once, with the given weights."""
        self.spec, self.blocks = spec, cut(spec)
        self.weights.extend(spec, self.blocks)
        for segment, values in weights.items():
            self.weights.arrays[segment][:] = values
        self.supply = Supply(spec, self.blocks)
        self._replica.extend(spec, self.blocks, self.version)

    def attach(self) -> None:
        """Return at once: there is no other worker."""

    def barrier(self) -> None:
        """Return at once: there is no other worker."""

    def ask_samples(self, dataset: str, samples: int, seen: Seen, count: int) -> SampleRange:
        """Return the next samples of this epoch; none if it is over."""
        assigner = self._assigners.setdefault((dataset, samples), SampleAssigner(samples))
        return assigner.assign("single", self.version, seen, count, 1)

    def start_from(self, given: StartState) -> None:
        """Go on from that state at `start`."""
        self._given = given

    def fetch(self) -> list[Array]:
        """Return weights and optimizer state of every block; each has shape (1 + slots, size)."""
        return [state.copy() for state in self._replica.states]

    def updates(self, blocks: Sequence[int]) -> list[int]:
        """Return how many steps had a gradient of each of some blocks."""
        return self._replica.updates(blocks, self.version)

    def start(self) -> None:
        """Take the initial weights, or those of a checkpoint."""
        found = self._given or to_resume(self.spec)
        self._replica.begin(found)
        if found is not None:
            self.version = found.version

    def exchange(
        self,
        contributions: Sequence[Contribution],
        loss: float,  # noqa: ARG002
        samples: int,  # noqa: ARG002
    ) -> tuple[int, ...]:
        """Apply one step."""
        (contribution,) = contributions
        if contribution.bundle.fill is not None:
            for block in self.blocks:
                if block.segment not in contribution.bundle.idle:
                    contribution.bundle.fill(block)
        self._replica.apply(contribution.bundle, self.version)
        self.version += 1
        if self.spec.checkpoint and self.spec.checkpoint_every and self.version % self.spec.checkpoint_every == 0:
            name, folder = "all.safetensors", Path(self.spec.checkpoint)
            written = write_blocks(folder, self.version, name, dict(enumerate(self._replica.states)))
            complete(folder, self.version, self.spec, {name: written})
        return ()

    def finish(self) -> None:
        """Nothing is left to do."""

    def digest(self) -> str:
        """Return the digest of the weights, as a coordinator would report it."""
        return digest_of(self._replica.digests())
