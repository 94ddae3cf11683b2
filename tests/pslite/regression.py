"""Linear regression on made-up data, by hand: what jobs of the tests train where no framework is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pslite.job.job_spec import JobSpec, Mean, Optimizer, Part, Segment
from pslite.job.sample_order import permutation
from pslite.job.shard_and_block_assignment import sample_slice
from pslite.numeric.gradient_sums import Bundle, GradientSums
from pslite.numeric.sparse_rows import Rows
from pslite.worker.elastic_job_base import Session


def segments(features: int, optimizer: Optimizer) -> tuple[Segment, ...]:
    """Weights and a bias, and a counter of versions in three places."""
    return (
        Segment(dtype="float32", optimizer=optimizer, parts=(Part("weight", (features,)), Part("bias", (1,)))),
        Segment(dtype="float64", optimizer=Mean(), parts=(Part("seen", (3,)),)),
    )


class Regression:
    """The data, and the loop over a session."""

    #: whether nothing may be missing at the end; or as much as deaths leave out in async mode
    exact = True

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        features = spec.segments[0].size - 1
        rng = np.random.Generator(np.random.PCG64(3))
        self._inputs = rng.standard_normal((spec.samples, features), dtype=np.float32)
        self._targets = (self._inputs @ rng.standard_normal(features, dtype=np.float32) / 20).astype(np.float32)

    def gradient(self, picked: Any, weights: Any, bundle: Bundle) -> float:
        """Put the gradient of some samples into a bundle; return their loss."""
        x = self._inputs[picked]
        error = x @ weights[:-1] + weights[-1] - self._targets[picked]
        bundle.arrays[0][:-1] = error @ x
        bundle.arrays[0][-1] = error.sum()
        return float(error @ error)

    def train(
        self,
        session: Session,
        *,
        before_step: Callable[[int], None] = lambda _: None,
        computed: Callable[[int, Sequence[Any]], None] = lambda epoch, samples: None,
    ) -> None:
        """Train to the end.

        `before_step` hears each version; `computed` the epoch and the samples of each shard that is computed.
        Afterwards every version must have been applied once.
        """
        spec = self.spec
        session.weights.arrays[0][:] = np.linspace(-0.1, 0.1, spec.segments[0].size, dtype=np.float32)
        session.start()
        sums = GradientSums(spec, session.supply)
        while session.version < spec.total_versions:
            before_step(session.version)
            epoch, first, count = spec.position(session.version)
            order = permutation(spec.seed, epoch, spec.samples)[first : first + count]
            share = session.share
            weights = session.weights.arrays[0]
            nodes, again = share.nodes, False
            while nodes:
                sums.begin(share.leaves, nodes, again=again)
                loss, mine = 0.0, 0
                for leaf, low, high in share.parts(nodes):
                    bundle = sums.take()
                    start, stop = sample_slice(low, high, spec.shards, count)
                    picked = order[start:stop]
                    if picked.size:
                        loss += self.gradient(picked, weights, bundle)
                        bundle.arrays[1][:] = picked.size
                    mine += picked.size
                    computed(epoch, picked)
                    sums.add(leaf, bundle)
                nodes, again = session.exchange(sums.contributions, loss, mine), True
        session.finish()
        seen = session.weights.arrays[1]
        # in async jobs the parts of a version are added up in any order
        slack = 1e-12 if spec.mode == "async" else 0.0
        assert not self.exact or np.allclose(seen, spec.total_versions, rtol=slack, atol=0.0), seen


def table_segments(rows: int, width: int, optimizer: Optimizer) -> tuple[Segment, ...]:
    """One table of rows, and the counter of versions."""
    table = Segment(dtype="float32", optimizer=optimizer, parts=(Part("table", (rows, width)),), sparse=True)
    return table, segments(1, optimizer)[1]


class Lookup(Regression):
    """Each sample picks two rows of a table, whose elements are to add up to a number."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        rng = np.random.Generator(np.random.PCG64(3))
        rows, self._width = spec.segments[0].parts[0].shape
        self._picks = rng.integers(rows, size=(spec.samples, 2))
        self._targets = rng.standard_normal(spec.samples).astype(np.float32)

    def gradient(self, picked: Any, weights: Any, bundle: Bundle) -> float:
        picks = self._picks[picked]
        error = weights.reshape(-1, self._width)[picks].sum(axis=(1, 2)) - self._targets[picked]
        values = np.repeat(error, 2)[:, None] * np.ones((1, self._width), dtype=np.float32)
        bundle.rows[0] = Rows.of(picks.reshape(-1), values)
        return float(error @ error)
