"""An open job by hand: a loop as a script of MXNet's KVStore has one, whose steps are the same at any size.

The gradient is of small whole numbers and depends on the version alone.  So weights and optimizer state of a version
have the same bits whoever computes it, and every worker compares them with those of a run in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from regression import segments, table_segments

from pslite.job.job_spec import LAMB, MAX_SHARDS, SGD, Adam, JobSpec, Segment
from pslite.job.sample_assignment import Seen
from pslite.numeric.gradient_sums import Array, Bundle, Contribution, GradientSums
from pslite.numeric.sparse_rows import Rows
from pslite.worker.elastic_job_base import OpenSession
from pslite.worker.single_process_session import SingleSession

#: after so many steps a script ends
STEPS = 60
#: of the data set; and taken by a worker for a step
SAMPLES, PART = 61, 4


def _lazy(rule: SGD | Adam) -> tuple[Segment, ...]:
    table, seen = table_segments(100, 3, SGD(lr=0.1))
    return Segment(dtype="float32", optimizer=rule, parts=table.parts, sparse=True, lazy=True), seen


KINDS: Mapping[str, Mapping[str, Any]] = {
    "momentum": {"segments": segments(40, SGD(lr=0.001, momentum=0.9, rate_in_momentum=True))},
    "adam": {"segments": segments(40, Adam(lr=0.01, eps_first=True))},
    "lamb": {"segments": segments(40, LAMB(lr=0.02, weight_decay=0.01))},
    "rows": {"segments": _lazy(SGD(lr=0.05, momentum=0.9)), "block_bytes": 120},
    "one block": {"segments": segments(40, Adam(lr=0.01)), "block_bytes": 1024},
}


def own_loop(**changes: object) -> JobSpec:
    """An open job in ten or so blocks."""
    values = {
        "segments": KINDS["momentum"]["segments"], "mode": "open", "epochs": 0, "samples": 1, "batch": 1, "seed": 7,
        "shards": MAX_SHARDS, "block_bytes": 24,
    }  # fmt: skip
    return JobSpec(**{**values, **changes})


class OwnLoop:
    """The loop, and what each version must be."""

    #: steps from one barrier to the next
    every = 16

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        #: ranks of workers, in the order in which each had them
        self.ranks: dict[int, list[int]] = {}
        #: samples that steps were made of, by epoch and place in its order
        self.trained: list[tuple[int, int]] = []

    def comes_to_barriers(self, session: OpenSession) -> bool:
        """Whether this worker comes to the barriers within the loop."""
        return True

    def gradient(self, version: int, bundle: Bundle) -> None:
        """Put the gradient of a version into a bundle."""
        rng = np.random.Generator(np.random.PCG64(version))
        segment = self.spec.segments[0]
        if segment.sparse:
            numbers = rng.integers(segment.size // segment.row, size=9)
            bundle.rows[0] = Rows.of(numbers, rng.integers(-2, 3, size=(9, segment.row)).astype(np.float32))
        else:
            bundle.arrays[0][:] = rng.integers(-2, 3, size=segment.size)
        bundle.arrays[1].fill(1.0)

    def _take(self, session: OpenSession, seen: Seen) -> Seen:
        """Take samples for a step, of one epoch; return what is seen of all of them."""
        left = PART
        while left:
            given = session.ask_samples("", SAMPLES, seen, left)
            if given.low < given.high:
                seen = seen._replace(epoch=given.epoch)
                self.trained += [(given.order, place) for place in range(given.low, given.high)]
                left -= given.high - given.low
            else:
                seen = seen._replace(over=given.epoch)
                left = left if left == PART else 0
        return seen

    def train(
        self,
        session: OpenSession,
        *,
        before_step: Callable[[int], None] = lambda _: None,
        computed: Callable[[int, Sequence[Any]], None] = lambda epoch, samples: None,
    ) -> None:
        """Train to the end of the loop; every version must be that of a run in one process."""
        undisturbed = () if isinstance(session, SingleSession) else undisturbed_states(self.spec)
        session.attach()
        session.barrier()
        session.describe(self.spec)
        session.weights.arrays[0][:] = np.linspace(-0.1, 0.1, self.spec.segments[0].size, dtype=np.float32)
        session.start()
        sums = GradientSums(self.spec, session.supply)
        ranks, seen = self.ranks.setdefault(id(session), []), Seen()
        while session.version < STEPS:
            version, share = session.version, session.share
            before_step(version)
            if undisturbed:
                _compare(
                    [session.weights.part(block) for block in session.blocks], [s[0] for s in undisturbed[version]]
                )
            if session.rank_and_size[0] not in ranks[-1:]:
                ranks.append(session.rank_and_size[0])
            seen = self._take(session, seen)
            sums.begin(share.leaves, share.nodes[:1])
            bundle = sums.take()
            self.gradient(version, bundle)
            sums.add(share.index, bundle)
            computed(0, [])
            left = session.exchange(
                [*sums.contributions, *(Contribution(node, bundle) for node in share.nodes[1:])], 0.0, 0
            )
            while left:
                left = session.exchange([Contribution(node, bundle) for node in left], 0.0, 0)
            if session.version % self.every == 7 % self.every and self.comes_to_barriers(session):
                session.barrier()
            if undisturbed and session.rank_and_size[0] == 0 and session.version % 8 == 3:
                _compare(session.fetch(), undisturbed[session.version])
        session.barrier()
        if undisturbed:
            _compare(session.fetch(), undisturbed[STEPS])
        session.finish()


def _compare(found: Sequence[Array], expected: Sequence[Array]) -> None:
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert np.array_equal(ours, theirs), f"block {number} is {ours}, not {theirs}"


@cache
def undisturbed_states(spec: JobSpec) -> tuple[tuple[Array, ...], ...]:
    """By version, the state of each block in a run in one process."""
    session = SingleSession(None)
    found: list[tuple[Array, ...]] = []
    OwnLoop(spec).train(session, before_step=lambda _: found.append(tuple(session.fetch())))
    return (*found, tuple(session.fetch()))
