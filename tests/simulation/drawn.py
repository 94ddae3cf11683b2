"""Small random workloads with everything that a workload may have: for tests that compare two ways to simulate."""

from __future__ import annotations

import random
from typing import Any

from dl2d.simulation.workload.workload_file import Workload, read_workload


def drawn(seed: int, *, jobs: int = 12, nodes: int | None = None, plain: bool = False, most_least: int = 2) -> Workload:
    """A workload in which jobs queue more often than not, with minimum sizes up to ``most_least``.

    ``plain``: alike nodes.
    """
    draw = random.Random(seed)
    cluster = [{"count": nodes or draw.randint(2, 12), "resources": {"cpu": 8, "gpu": 8, "memory": 64}}]
    if not plain:
        if draw.random() < 0.5:
            cluster.append({"count": draw.randint(1, 4), "resources": {"cpu": 16, "gpu": 4, "memory": 64}})
        if draw.random() < 0.3:
            cluster.append({"count": draw.randint(1, 3), "resources": {"cpu": 8, "memory": 512}})
    theta = lambda: [
        draw.uniform(*span) for span in ((0.005, 0.02), (0.01, 0.1), (0.05, 0.3), (0.001, 0.02), (0.001, 0.02))
    ]
    speeds: dict[str, Any] = {
        f"m{number}": {"formula": "ps-sync", "theta": theta(), "batch": 32} for number in range(3)
    }
    speeds["holes"] = {"table": [[20.0, 0.0, 60.0, 70.0], [30.0, 50.0, 0.0, 90.0], [35.0, 60.0, 80.0, 99.0]]}
    speeds["ring"] = {
        "formula": "allreduce", "batch": 64, "compute_seconds_per_sample": 0.02, "model_bytes": 1e8,
        "bandwidth_bytes_per_second": 1e9,
    }  # fmt: skip
    made = []
    slot = 0
    for number in range(jobs):
        slot += draw.choice([0, 0, 0, 1, 2] if number != jobs // 2 else [40])
        model = draw.choice(sorted(speeds))
        least = min(draw.choice([0, 1, 1, 2]), most_least)
        small = model == "holes"
        made.append(
            {
                "id": str(number + 1), "model": model, "submit_slot": slot,
                "epochs": draw.uniform(30, 2000), "samples_per_epoch": 115.0,
                "worker": {"cpu": draw.choice([1, 2, 2.5]), "gpu": draw.choice([0, 0.5, 2, 4]), "memory": 4},
                "ps": {"cpu": draw.choice([1, 2]), "memory": draw.choice([0, 8])},
                "min_workers": least, "max_workers": 4 if small else draw.choice([4, 16]),
                "min_ps": least, "max_ps": 3 if small else draw.choice([4, 16]),
            }
        )  # fmt: skip
    return read_workload({"slot_seconds": 1200, "cluster": cluster, "speeds": speeds, "jobs": made})
