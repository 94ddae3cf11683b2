"""Small workloads, and settings for quick trainings on them."""

from __future__ import annotations

import numpy as np

from dl2d.learning.dl2_paper.settings import Settings
from dl2d.simulation.workload.workload_file import Workload, read_workload


def a_workload(seed: int, *, jobs: int = 6, nodes: int = 20, **more: float) -> Workload:
    """Two models: with the one workers pay and PSs do not, with the other it is the other way round.

    Each node has twenty times ``more`` resources, and each worker asks for them.
    """
    rng = np.random.default_rng(seed)
    sizes = np.arange(1, 5)
    workers = [[10.0 * w / p for w in sizes] for p in sizes]
    ps = [[10.0 * p / w for w in sizes] for p in sizes]
    return read_workload(
        {
            "slot_seconds": 100,
            "cluster": [{"count": nodes, "resources": {"cpu": 8, **{name: 20 * of for name, of in more.items()}}}],
            "speeds": {"workers": {"table": workers}, "servers": {"table": ps}},
            "jobs": [
                {"id": str(number), "model": str(rng.choice(["workers", "servers"])), "submit_slot": number // 2,
                 "epochs": 60.0, "samples_per_epoch": 100.0, "worker": {"cpu": 1, **more}, "ps": {"cpu": 1},
                 "max_workers": 4, "max_ps": 4}
                for number in range(1, jobs + 1)
            ],
        }
    )  # fmt: skip


TRAINING = [a_workload(seed) for seed in range(8)]
VALIDATION = [a_workload(seed) for seed in range(100, 104)]
SMALL = Settings(
    window=6, hidden=32, clusters=16, supervised_updates=20, iterations=4, samples=256, minibatch=64, kept=1.0,
    critic_iterations=1, validate_every=2,
)  # fmt: skip
