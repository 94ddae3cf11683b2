"""Decisions per second of the vectorised environment, and slots per second of whole sizes chosen at once.

    python benchmarks/rl_environment.py [--clusters 1 50 200 800] [--jobs 60] [--nodes 96] [--seconds 2]

A decision is one action carried out in one cluster; time is that of `VectorClusterEnv.step`, which builds observations
and masks. Actions are drawn uniformly from the allowed ones (`random`), or are void half of the time (`void-heavy`), so
that slots end often; drawing them is not counted. `sizes` draws workers and PSs of all jobs for `Clusters.fill` and
runs the slot; a decision is then the size of one job. Seconds are those of this process on its core.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import numpy as np
from harness import options_of, show

from dl2d.simulation.gymnasium_environments import VectorClusterEnv
from dl2d.simulation.vectorized.clusters import Clusters
from dl2d.simulation.vectorized.workload_arrays import Library
from dl2d.simulation.workload.generators import generate

MIXES = ("random", "void-heavy", "sizes")
WORKLOADS = 20


SEED = 0


def library(options: argparse.Namespace) -> Library:
    given = {"jobs": str(options.jobs), "nodes": str(options.nodes), "node": "cpu:8,gpu:8", "cap": "3"}
    return Library.of([generate("dl2", given, np.random.default_rng(seed)) for seed in range(WORKLOADS)])


#: Carries out what it was made with; says how many decisions and slots that was.
Act = Callable[[], tuple[int, int]]


def decide(known: Library, count: int, void: float) -> Callable[[], Act]:
    """One action at a time: draws actions, outside of what is timed, and makes the step of them."""
    env = VectorClusterEnv(known, count)
    _, info = env.reset(seed=SEED)
    draw = np.random.default_rng(SEED)

    def prepare() -> Act:
        masks = info["action_mask"]
        actions = (draw.random(masks.shape, dtype=np.float32) * masks).argmax(axis=1)
        if void:
            actions[draw.random(count) < void] = masks.shape[1] - 1

        def act() -> tuple[int, int]:
            nonlocal info
            _, _, terminated, truncated, info = env.step(actions)
            # The step after an end decides nothing.
            return count - int((terminated | truncated).sum()), int(info["slot_ended"].sum())

        return act

    return prepare


def size(known: Library, count: int) -> Callable[[], Act]:
    """All sizes of a slot at once: draws sizes, outside of what is timed, and fills and ends the slot with them."""
    clusters = Clusters(known, count)
    everywhere = np.arange(count)
    clusters.reset(everywhere, generators=[np.random.default_rng([SEED, number]) for number in everywhere])
    draw = np.random.default_rng(SEED)

    def prepare() -> Act:
        targets = draw.integers(1, 17, (*clusters.present.shape, 2))
        decisions = int(clusters.present.sum())

        def act() -> tuple[int, int]:
            clusters.fill(targets, everywhere)
            clusters.end_slot(everywhere)
            over = np.flatnonzero(clusters.over)
            if len(over):
                clusters.reset(over)
            return decisions, count

        return act

    return prepare


def measure(options: argparse.Namespace, mix: str, clusters: int) -> None:
    """Act for some seconds, after a quarter of them to get warm, and print the figures."""
    known = library(options)
    prepare = size(known, clusters) if mix == "sizes" else decide(known, clusters, 0.5 if mix == "void-heavy" else 0.0)
    begin, warm = time.perf_counter(), False
    decisions = slots = 0
    spent = 0.0
    while (elapsed := time.perf_counter() - begin) < 1.25 * options.seconds:
        if not warm and elapsed > 0.25 * options.seconds:
            warm, decisions, slots, spent = True, 0, 0, 0.0
        act = prepare()
        started = time.process_time()
        decided, ended = act()
        spent += time.process_time() - started
        decisions += decided
        slots += ended
    show(mix=mix, clusters=clusters, decisions_per_s=round(decisions / spent), slots_per_s=round(slots / spent))


def main() -> None:
    options = options_of(__doc__, clusters=[1, 50, 200, 800], jobs=60, nodes=96, seconds=2.0, mixes=list(MIXES))
    for mix, clusters in itertools.product(options.mixes, options.clusters):
        measure(options, mix, clusters)


if __name__ == "__main__":
    main()
