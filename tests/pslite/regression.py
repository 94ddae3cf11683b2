"""Linear regression on made-up data, by hand: what jobs of the tests train where no framework is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pslite.gradients import GradientSums
from pslite.sampler import permutation
from pslite.session import Session
from pslite.shards import sample_slice
from pslite.spec import JobSpec, Mean, Optimizer, Part, Segment


def segments(features: int, optimizer: Optimizer) -> tuple[Segment, ...]:
    """Weights and a bias, and a counter of versions in three places."""
    return (
        Segment(dtype="float32", optimizer=optimizer, parts=(Part("weight", (features,)), Part("bias", (1,)))),
        Segment(dtype="float64", optimizer=Mean(), parts=(Part("seen", (3,)),)),
    )


class Regression:
    """The data, and the loop over a session."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        features = spec.segments[0].size - 1
        rng = np.random.Generator(np.random.PCG64(3))
        self._inputs = rng.standard_normal((spec.samples, features), dtype=np.float32)
        self._targets = (self._inputs @ rng.standard_normal(features, dtype=np.float32) / 20).astype(np.float32)

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
        features = spec.segments[0].size - 1
        session.weights.arrays[0][:] = np.linspace(-0.1, 0.1, features + 1, dtype=np.float32)
        session.start()
        sums = GradientSums(spec, session.blocks)
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
                        x = self._inputs[picked]
                        error = x @ weights[:-1] + weights[-1] - self._targets[picked]
                        bundle.arrays[0][:-1] = error @ x
                        bundle.arrays[0][-1] = error.sum()
                        bundle.arrays[1][:] = picked.size
                        loss += float(error @ error)
                    mine += picked.size
                    computed(epoch, picked)
                    sums.add(leaf, bundle)
                nodes, again = session.exchange(sums.contributions, loss, mine), True
        session.finish()
        seen = session.weights.arrays[1]
        assert np.array_equal(seen, np.full(3, float(spec.total_versions))), seen
