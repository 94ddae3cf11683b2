"""How fast both designs learn: updates, and decisions while acting.

    python benchmarks/training_speed.py [--designs jumps original] [--workload generator:dl2] [--rounds 8] [--json]

`original`: rounds of `Settings()` (8,192 samples of 128 clusters, a quarter of the decisions kept, 16 updates of both
networks) without imitation; with `--dense` the paper's fully connected networks. An update is one minibatch of 1,024
through policy and critic, gradients, clipping and Adam; `updates_per_s` counts learning alone, `all_updates_per_s`
acting as well. A decision is one inference in one cluster, with its mask, draw and placing. `jumps`: an update is an
iteration of the search, in which every member plays ten workloads from beginning to end; a decision is one job sized in
one slot, with all of its jumps, which takes `original` one to thirty. Processor seconds of this process, one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dl2d.learning.dl2_paper.settings import NetworkKind, Settings
from dl2d.learning.dl2_paper.trainer import Report
from dl2d.learning.dl2_paper.trainer import train as learn
from dl2d.learning.rollout import Ground, play
from dl2d.learning.training import Trainer, TrainingSettings
from dl2d.simulation.workload.format import Workload
from dl2d.simulation.workload.sources import load_source
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.observations import by_kind


def original(workloads: list[Workload], rounds: int, network: NetworkKind) -> dict[str, float]:
    """Rounds of acting and learning; the first are not counted."""
    begun = [0.0, 0.0]
    reports: list[Report] = []
    settings = replace(
        Settings(), teacher="", network=network, iterations=rounds, critic_iterations=0, validate_every=rounds
    )

    def on_step(phase: str, done: int, total: int) -> None:
        del phase, total
        if done == 1:
            begun[0] = time.process_time()
        begun[1] = time.process_time()

    learn(workloads, workloads[:1], settings, seed=0, on_step=on_step, on_validation=reports.append)
    report = reports[-1]
    seconds = (begun[1] - begun[0]) * rounds / (rounds - 1)
    share = report.learning_seconds / (report.learning_seconds + report.acting_seconds)
    updates = rounds * settings.epochs * (settings.samples // settings.minibatch)
    return {
        "decisions": report.decisions,
        "updates": updates,
        "decisions_per_s": report.decisions / (seconds * (1.0 - share)),
        "updates_per_s": updates / (seconds * share),
        "all_updates_per_s": updates / seconds,
        "samples_learned_per_s": updates * settings.minibatch / (seconds * share),
    }


def jumps(workloads: list[Workload]) -> dict[str, float]:
    """Two iterations of the search, after speeds were measured; and a play of all workloads with their weights."""
    settings = TrainingSettings(iterations=2, every=2, rounds=1, explored=len(workloads))
    trainer = Trainer(workloads, workloads[:1], settings)
    state = trainer.explore()
    begin = time.process_time()
    for reached in trainer.search(state):
        state = reached
    seconds = time.process_time() - begin
    ground = Ground(workloads)
    surfaces = ground.surfaces(GaussianProcess(by_kind(state.measured)), settings.deciding_optimism)
    every = np.arange(len(workloads))
    begin = time.process_time()
    played = play(ground, surfaces, every, state.best[None], seeds=every.tolist())
    taken = time.process_time() - begin
    sized = float(np.nansum(np.ceil(played.completion)))
    return {"all_updates_per_s": 2 / seconds, "decisions": sized, "decisions_per_s": sized / taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--designs", nargs="+", choices=["jumps", "original"], default=["original", "jumps"])
    parser.add_argument("--workload", default="generator:dl2?nodes=96")
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    workloads = [load_source(options.workload, seed=seed).workload for seed in range(options.draws)]
    found: dict[str, Any] = {}
    for design in options.designs:
        if design == "original":
            kind = NetworkKind.DENSE if options.dense else NetworkKind.SHARED
            found[design] = original(workloads, options.rounds, kind)
        else:
            found[design] = jumps(workloads)
    if options.json:
        print(json.dumps(found))
        return
    for design, entry in found.items():
        print(design, ", ".join(f"{key} {value:,.1f}" for key, value in entry.items()))


if __name__ == "__main__":
    main()
