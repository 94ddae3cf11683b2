"""Sums of gradients along the tree: the same bits whether a shard is added to its neighbour's or has its own bundle."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pslite.job.job_spec import SGD, JobSpec, Part, Segment
from pslite.job.membership_plan import reduction
from pslite.job.reduction_tree import TreeSum, span
from pslite.job.weight_blocks import cut
from pslite.numeric.gradient_sums import GradientSums, Supply

ELEMENTS = 40


def pushed(spec, workers, gradients, *, joined):
    """Return by tree node what each of so many workers pushes."""
    found = {}
    for nodes in reduction(spec, workers).nodes:
        sums = GradientSums(spec, Supply(spec, cut(spec)))
        sums.begin(spec.shards, nodes)
        for node in nodes:
            for leaf in range(*span(node, spec.shards)):
                bundle, add = sums.take_for(leaf) if joined else (sums.take(), False)
                out = bundle.arrays[0]
                np.add(out, gradients[leaf], out=out)
                assert joined or not add
                sums.add(leaf, bundle)
        found |= {each.node: each.bundle.arrays[0].copy() for each in sums.contributions}
    return found


@given(st.integers(1, 17), st.sampled_from(["float32", "bfloat16"]), st.integers(0, 2**32 - 1), st.data())
def test_the_sum_has_the_same_bits_at_every_number_of_workers(shards, wire, seed, data):
    segment = Segment(dtype="float32", optimizer=SGD(lr=0.1), parts=(Part("w", (ELEMENTS,)),))
    spec = JobSpec(
        segments=(segment,), samples=20, batch=20, epochs=1, seed=0, mode="exact", shards=shards, block_bytes=64,
        wire=wire,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    gradients = rng.standard_normal((shards, ELEMENTS), dtype=np.float32)
    gradients *= rng.choice(np.float32([0.0, -0.0, 1e-20, 1.0, 1e20]), gradients.shape)
    workers = data.draw(st.integers(1, shards))
    joined, apart = (pushed(spec, workers, gradients, joined=joined) for joined in (True, False))
    assert joined.keys() == apart.keys()
    assert all(joined[node].tobytes() == apart[node].tobytes() for node in joined)
    if wire != "float32":
        return  # servers round on the way up, too
    tree, whole = TreeSum(shards, frozenset((1,))), None
    for node, value in joined.items():
        whole = tree.add(node, value, np.add) or whole
    assert whole[1].tobytes() == pushed(spec, 1, gradients, joined=True)[1].tobytes()
