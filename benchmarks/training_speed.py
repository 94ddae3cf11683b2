"""How fast `dl2-original` learns: updates, and decisions while acting.

    python benchmarks/training_speed.py [--workload generator:dl2] [--rounds 8] [--dense]

Rounds of `Settings()` (8,192 samples of 128 clusters, a quarter of the decisions kept, 16 updates of both networks)
without imitation; with `--dense` the paper's fully connected networks. An update is one minibatch of 1,024 through
policy and critic, gradients, clipping and Adam; `updates_per_s` counts learning alone, `all_updates_per_s` acting as
well. A decision is one inference in one cluster, with its mask, draw and placing. Processor seconds of this process,
one thread.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from harness import options_of, show

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
    options = options_of(__doc__, workload="generator:dl2?nodes=96", draws=16, rounds=8, dense=False)
    torch.set_num_threads(1)
    workloads = [load_source(options.workload, seed=seed).workload for seed in range(options.draws)]
    show(**measure(workloads, options.rounds, NetworkKind.DENSE if options.dense else NetworkKind.SHARED))


if __name__ == "__main__":
    main()
