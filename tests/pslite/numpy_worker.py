"""A training script without torch, for tests of the runtime: linear regression on made-up data, by hand."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np

from pslite.connect import session_for
from pslite.gradients import GradientSums
from pslite.sampler import permutation
from pslite.schedules import Cosine
from pslite.session import SingleSession
from pslite.shards import sample_slice
from pslite.spec import SGD, Adam, JobSpec, Mean, Part, Segment
from pslite.testing import pace


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--mode", default="exact")
    parser.add_argument("--samples", type=int, default=203)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--features", type=int, default=700)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--block-bytes", type=int, default=1024)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--begin-anew", action="store_true")
    parser.add_argument("--log", default="")
    parser.add_argument("--save", default="")
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    options = parser.parse_args()
    optimizer = {
        "sgd": SGD(lr=0.001, weight_decay=0.01),
        "momentum": SGD(lr=0.0002, momentum=0.9),
        "nesterov": SGD(lr=0.0002, momentum=0.9, nesterov=True),
        "adam": Adam(lr=0.01),
        "scheduled": SGD(lr=0.0004, momentum=0.9, schedule=Cosine(over=90, floor=0.1, warmup=10)),
    }[options.optimizer]
    features = options.features
    spec = JobSpec(
        segments=(
            Segment(dtype="float32", optimizer=optimizer, parts=(Part("weight", (features,)), Part("bias", (1,)))),
            Segment(dtype="float64", optimizer=Mean(), parts=(Part("seen", (3,)),)),
        ),
        samples=options.samples,
        batch=options.batch,
        epochs=options.epochs,
        seed=7,
        mode=options.mode,
        shards=options.shards,
        block_bytes=options.block_bytes,
        clip_norm=options.clip,
        checkpoint=options.checkpoint,
        checkpoint_every=options.every,
        resume=not options.begin_anew,
    )
    rng = np.random.Generator(np.random.PCG64(3))
    inputs = rng.standard_normal((options.samples, features), dtype=np.float32)
    targets = (inputs @ rng.standard_normal(features, dtype=np.float32) / 20).astype(np.float32)
    session = session_for(spec)
    session.weights.arrays[0][:] = np.linspace(-0.1, 0.1, features + 1, dtype=np.float32)
    session.start()
    sums = GradientSums(spec, session.blocks)
    lines = []
    while session.version < spec.total_versions:
        version = session.version
        pace(version, spec.total_versions)
        time.sleep(options.step_seconds)
        if version == options.raise_at and session.is_chief:
            raise ValueError("the user's own mistake")
        epoch, first, count = spec.position(version)
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
                    x = inputs[picked]
                    error = x @ weights[:-1] + weights[-1] - targets[picked]
                    bundle.arrays[0][:-1] = error @ x
                    bundle.arrays[0][-1] = error.sum()
                    bundle.arrays[1][:] = picked.size
                    loss += float(error @ error)
                mine += picked.size
                lines.append(f"{epoch} {' '.join(str(int(i)) for i in picked)}".rstrip())
                sums.add(leaf, bundle)
            if options.log:
                path = Path(f"{options.log}.{os.environ.get('DL2_TASK', 'single')}")
                with path.open("a", encoding="utf-8") as file:
                    file.write("\n".join(lines) + "\n")
                lines.clear()
            nodes, again = session.exchange(sums.contributions, loss, mine), True
    session.finish()
    weights, seen = session.weights.arrays
    if options.save and session.is_chief:
        np.save(options.save, weights)
    assert np.array_equal(seen, np.full(3, float(spec.total_versions))), seen
    if isinstance(session, SingleSession):
        print(session.digest())
    return 0


if __name__ == "__main__":
    sys.exit(main())
