"""A worker of an open job without MXNet: it learns its place, then says what it trains, and has a loop of its own."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import time
from pathlib import Path

import numpy as np

from pslite.job.job_spec import MAX_SHARDS, SGD, Adam, JobSpec, Mean, Part, Segment
from pslite.launch.environment_parsing import durability_of
from pslite.numeric.gradient_sums import Contribution, GradientSums
from pslite.testing import pace
from pslite.worker.elastic_job_base import open_session
from pslite.worker.training_session import StartState


def die_before_second_segment(block):
    """Die when the first one has been sent."""
    if block.segment == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--leave", type=int, default=0)
    parser.add_argument("--barrier", type=int, default=0)
    parser.add_argument("--die-pushing", type=int, default=-1, help="a worker that came late dies in that step")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--adam", action="store_true", help="of a gradient that is always 1: each update is the rate")
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--from-version", type=int, default=-1)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    session = open_session()
    session.attach()
    places = [session.rank_and_size]
    session.barrier()
    # the rate depends on who it is: the first worker's counts
    rule = Adam(lr=0.01) if options.adam else SGD(lr=0.1 if session.rank_and_size[0] == 0 else 0.7, momentum=0.5)
    spec = JobSpec(
        segments=(
            Segment(dtype="float32", optimizer=rule, parts=(Part("w", (3000,)),)),
            Segment(dtype="float32", optimizer=Mean(), parts=(Part("seen", (2,)),)),
        ),
        samples=1,
        batch=1,
        epochs=0,
        seed=0,
        mode="open",
        staleness=options.staleness,
        shards=MAX_SHARDS,
        block_bytes=1024,
        scale=2.0,
        durability=durability_of(os.environ) or "none",
    )
    session.describe(spec)
    session.weights.arrays[0][:] = 1.0 + session.rank_and_size[0]
    if options.from_version >= 0:
        arrays = [
            np.full((2 if block.segment == 0 else 1, block.size), 4.0 if block.segment == 0 else 0.0, np.float32)
            for block in session.blocks
        ]
        session.start_from(StartState("the test", options.from_version, tuple(arrays), session.blocks))
    session.start()
    sums = GradientSums(session.spec, session.supply)
    steps = options.leave if options.leave and session.rank_and_size[0] else options.steps
    parts = [options.barrier, steps - options.barrier] if options.barrier else [steps]
    for number, part in enumerate(parts):
        # at the barrier those that were there first wait for one that comes later and makes as many steps as it says
        waits = number < len(parts) - 1 and not session.joined_late
        end = math.inf if waits else session.version + part
        while session.version < end:
            if waits and end == math.inf and session.rank_and_size[1] == 3:
                end = session.version + 5  # a newcomer counts at a barrier from its first step on
            if number == len(parts) - 1:
                pace(session.version, end if options.barrier else options.steps)
            time.sleep(10 * options.sleep if waits and session.version >= 11 else options.sleep)
            share = session.share
            sums.begin(share.leaves, share.nodes[:1])
            bundle = sums.take(zero=False)
            if options.adam:
                bundle.arrays[0].fill(1.0)
            else:
                np.multiply(session.weights.arrays[0], 0.5, out=bundle.arrays[0])
            bundle.arrays[1].fill(1.0)
            sums.add(share.index, bundle)
            if session.joined_late and session.version == options.die_pushing:
                bundle.fill = die_before_second_segment
            left = session.exchange(
                [*sums.contributions, *(Contribution(node, bundle) for node in share.nodes[1:])], 0.0, 0
            )
            while left:
                left = session.exchange([Contribution(node, bundle) for node in left], 0.0, 0)
            if session.rank_and_size != places[-1]:
                places.append(session.rank_and_size)
        if number < len(parts) - 1:
            session.barrier()
    states = session.fetch()
    weights = session.weights.arrays
    found = {
        "places": places,
        "late": session.joined_late,
        "version": session.version,
        "weight": float(weights[0][0]),
        "alike": bool((weights[0] == weights[0][0]).all()),
        "seen": float(weights[1][0]),
        "fetched": float(states[0][0, 0]),
        "momentum": float(states[0][1, 0]),
    }
    Path(f"{options.out}.{os.environ.get('DL2_TASK', 'single')}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
