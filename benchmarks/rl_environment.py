"""Decisions per second of the vectorised environment, and slots per second of whole sizes chosen at once.

    python benchmarks/rl_environment.py [--clusters 1 50 200 800] [--jobs 60] [--nodes 96] [--seconds 2] [--json]

A decision is one action carried out in one cluster; time is that of `VectorClusterEnv.step`, which builds observations
and masks. Actions are drawn uniformly from the allowed ones (`random`), or are void half of the time (`void-heavy`), so
that slots end often; drawing them is not counted. `sizes` draws workers and PSs of all jobs for `Clusters.fill` and
runs the slot; a decision is then the size of one job. With two processes each has half of the clusters and a generator
of its own; what they do in the same seconds is added up. `per CPU second` leaves out the time in which a process waited
for a core that somebody else had: on a machine that is not idle, times the cores, it is what an idle one would do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier

import numpy as np

from dl2d.simulation.gymnasium_environments import VectorClusterEnv
from dl2d.simulation.vectorized.clusters import Clusters
from dl2d.simulation.vectorized.workload_arrays import Library
from dl2d.simulation.workload.generators import generate

MIXES = ("random", "void-heavy", "sizes")
WORKLOADS = 20


@dataclass(frozen=True, slots=True)
class Load:
    """What one process is to do."""

    mix: str
    clusters: int
    jobs: int
    nodes: int
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Done:
    """What one process did, and the seconds that it took, on the clock and on the core."""

    decisions: int
    slots: int
    seconds: float
    cpu_seconds: float


def library(load: Load) -> Library:
    given = {"jobs": str(load.jobs), "nodes": str(load.nodes), "node": "cpu:8,gpu:8", "cap": "3"}
    return Library.of([generate("dl2", given, np.random.default_rng(seed)) for seed in range(WORKLOADS)])


#: Carries out what it was made with; says how many decisions and slots that was.
Act = Callable[[], tuple[int, int]]


def decide(load: Load) -> Callable[[], Act]:
    """One action at a time: draws actions, outside of what is timed, and makes the step of them."""
    env = VectorClusterEnv(library(load), load.clusters)
    _, info = env.reset(seed=load.seed)
    draw = np.random.default_rng(load.seed)
    void = 0.5 if load.mix == "void-heavy" else 0.0

    def prepare() -> Act:
        masks = info["action_mask"]
        actions = (draw.random(masks.shape, dtype=np.float32) * masks).argmax(axis=1)
        if void:
            actions[draw.random(load.clusters) < void] = masks.shape[1] - 1

        def act() -> tuple[int, int]:
            nonlocal info
            _, _, terminated, truncated, info = env.step(actions)
            # The step after an end decides nothing.
            return load.clusters - int((terminated | truncated).sum()), int(info["slot_ended"].sum())

        return act

    return prepare


def size(load: Load) -> Callable[[], Act]:
    """All sizes of a slot at once: draws sizes, outside of what is timed, and fills and ends the slot with them."""
    clusters = Clusters(library(load), load.clusters)
    everywhere = np.arange(load.clusters)
    clusters.reset(everywhere, generators=[np.random.default_rng([load.seed, number]) for number in everywhere])
    draw = np.random.default_rng(load.seed)

    def prepare() -> Act:
        targets = draw.integers(1, 17, (*clusters.present.shape, 2))
        decisions = int(clusters.present.sum())

        def act() -> tuple[int, int]:
            clusters.fill(targets, everywhere)
            clusters.end_slot(everywhere)
            over = np.flatnonzero(clusters.over)
            if len(over):
                clusters.reset(over)
            return decisions, load.clusters

        return act

    return prepare


def measure(load: Load, barrier: Barrier | None = None) -> Done:
    """Act for some seconds, after a quarter of them to get warm; ``barrier``: begin together with others then."""
    prepare = size(load) if load.mix == "sizes" else decide(load)
    stop = np.inf
    decisions = slots = 0
    spent = busy = 0.0
    begin = time.perf_counter()
    warm = False
    while time.perf_counter() < stop:
        if not warm and time.perf_counter() - begin > load.seconds / 4:
            warm, decisions, slots, spent, busy = True, 0, 0, 0.0, 0.0
            if barrier is not None:
                barrier.wait()
            stop = time.perf_counter() + load.seconds
        act = prepare()
        start, started = time.perf_counter(), time.process_time()
        decided, ended = act()
        spent += time.perf_counter() - start
        busy += time.process_time() - started
        decisions += decided
        slots += ended
    return Done(decisions, slots, spent, busy)


def spread(load: Load, processes: int) -> dict[str, object]:
    """One row of figures."""
    share = max(1, load.clusters // processes)
    loads = [
        Load(load.mix, share, load.jobs, load.nodes, load.seconds, load.seed + number) for number in range(processes)
    ]
    if processes == 1:
        done = [measure(loads[0])]
    else:
        context = multiprocessing.get_context("spawn")
        with context.Manager() as manager, context.Pool(processes) as pool:
            barrier = manager.Barrier(processes)
            done = pool.starmap(measure, [(own, barrier) for own in loads])
    decisions = sum(own.decisions / own.seconds for own in done)
    per_cpu = sum(own.decisions for own in done) / sum(own.cpu_seconds for own in done)
    return {
        "mix": load.mix, "clusters": load.clusters, "processes": processes,
        "decisions_per_second": round(decisions), "decisions_per_cpu_second": round(per_cpu),
        "slots_per_second": round(sum(own.slots / own.seconds for own in done)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, nargs="+", default=[1, 50, 200, 800])
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--nodes", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for mix in options.mixes:
        for clusters in options.clusters:
            for processes in (1, 2):
                if clusters < processes:
                    continue
                row = spread(Load(mix, clusters, options.jobs, options.nodes, options.seconds, seed=0), processes)
                rows.append(row)
                if not options.json:
                    print(
                        f"{mix:<11} {clusters:>4} clusters  {processes} process{'es' if processes > 1 else '  '}"
                        f"  {row['decisions_per_second']:>11,} decisions/s"
                        f"  {row['decisions_per_cpu_second']:>11,} per CPU second"
                        f"  {row['slots_per_second']:>8,} slots/s"
                    )
    if options.json:
        print(json.dumps({"jobs": options.jobs, "nodes": options.nodes, "rows": rows}))


if __name__ == "__main__":
    main()
