"""How fast `dl2-original` learns: updates, and decisions while acting.

    python benchmarks/training_speed.py [--workload generator:dl2] [--rounds 8] [--dense] [--json]

Rounds of `Settings()` (8,192 samples of 128 clusters, a quarter of the decisions kept, 16 updates of both networks)
without imitation; with `--dense` the paper's fully connected networks. An update is one minibatch of 1,024 through
policy and critic, gradients, clipping and Adam; `updates_per_s` counts learning alone, `all_updates_per_s` acting as
well. A decision is one inference in one cluster, with its mask, draw and placing. Processor seconds of this process,
one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import torch

from dl2d.learning.dl2_paper.settings import NetworkKind, Settings
from dl2d.learning.dl2_paper.trainer import Report
from dl2d.learning.dl2_paper.trainer import train as learn
from dl2d.simulation.workload.format import Workload
from dl2d.simulation.workload.sources import load_source


def measure(workloads: list[Workload], rounds: int, network: NetworkKind) -> dict[str, float]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="generator:dl2?nodes=96")
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    workloads = [load_source(options.workload, seed=seed).workload for seed in range(options.draws)]
    kind = NetworkKind.DENSE if options.dense else NetworkKind.SHARED
    found = measure(workloads, options.rounds, kind)
    if options.json:
        print(json.dumps(found))
        return
    print(", ".join(f"{key} {value:,.1f}" for key, value in found.items()))


if __name__ == "__main__":
    main()
