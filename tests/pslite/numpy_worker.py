"""A training script without torch, for tests of the runtime: linear regression on made-up data, by hand."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from regression import Lookup, Regression, segments, table_segments

from pslite.job.job_spec import LAMB, SGD, Adam, JobSpec
from pslite.job.learning_rates import Cosine
from pslite.launch.environment_parsing import architecture_of
from pslite.testing import pace
from pslite.worker.elastic_job_base import session_for
from pslite.worker.single_process_session import SingleSession


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
    parser.add_argument("--wire", default="float32")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--durability", default="none")
    parser.add_argument("--on-loss", default="restore")
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--begin-anew", action="store_true")
    parser.add_argument("--log", default="")
    parser.add_argument("--save", default="")
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--hang-at", type=int, default=-1)
    parser.add_argument("--hang-task", default="")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--sample-seconds", type=float, default=0.0)
    options = parser.parse_args()
    optimizer = {
        "sgd": SGD(lr=0.001, weight_decay=0.01),
        "momentum": SGD(lr=0.0002, momentum=0.9),
        "nesterov": SGD(lr=0.0002, momentum=0.9, nesterov=True),
        "adam": Adam(lr=0.01),
        "lamb": LAMB(lr=0.01, weight_decay=0.01),
        "plain": SGD(lr=0.001),
        "scheduled": SGD(lr=0.0004, momentum=0.9, schedule=Cosine(over=90, floor=0.1, warmup=10)),
    }[options.optimizer]
    spec = JobSpec(
        segments=(
            table_segments(options.features, 3, optimizer) if options.table else segments(options.features, optimizer)
        ),
        samples=options.samples,
        batch=options.batch,
        epochs=options.epochs,
        seed=7,
        mode=options.mode,
        shards=options.shards,
        block_bytes=options.block_bytes,
        clip_norm=options.clip,
        wire=options.wire,
        durability=options.durability,
        on_loss=options.on_loss,
        staleness=options.staleness,
        checkpoint=options.checkpoint,
        checkpoint_every=options.every,
        resume=not options.begin_anew,
        architecture=architecture_of(os.environ),
    )
    session = session_for(spec)

    def before_step(version: int) -> None:
        pace(version, spec.total_versions)
        time.sleep(options.step_seconds)
        if version == options.hang_at and os.environ.get("DL2_TASK", "").startswith(options.hang_task):
            while True:
                time.sleep(1)
        if version == options.raise_at and session.is_chief:
            raise ValueError("the user's own mistake")

    def computed(epoch: int, samples: Sequence[int]) -> None:
        time.sleep(options.sample_seconds * len(samples))
        if options.log:
            path = Path(f"{options.log}.{os.environ.get('DL2_TASK', 'single')}")
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{epoch} {' '.join(str(int(i)) for i in samples)}".rstrip() + "\n")

    model = (Lookup if options.table else Regression)(spec)
    model.exact = options.mode != "async"
    model.train(session, before_step=before_step, computed=computed)
    if options.save and session.is_chief:
        np.save(options.save, session.weights.arrays[0])
    if isinstance(session, SingleSession):
        print(session.digest())
    return 0


if __name__ == "__main__":
    sys.exit(main())
