"""A workload of two jobs on two nodes, small enough to be followed by hand."""

from __future__ import annotations

from typing import Any

from dl2d.simulation.workload.workload_file import Workload, read_workload


def two_jobs(*, epochs: float = 4.0, **more: Any) -> Workload:
    """Two nodes of 8 CPUs and 8 GPUs; bundles of (4, 4); 1 epoch a slot with 1 worker, 2 with 2."""
    jobs = [
        {"id": str(number), "model": model, "submit_slot": 0, "epochs": epochs, "samples_per_epoch": 100.0,
         "worker": {"cpu": 2, "gpu": 4}, "ps": {"cpu": 2}, "max_workers": 2, "max_ps": 2, **more}
        for number, model in ((1, "b"), (2, "a"))
    ]  # fmt: skip
    table = {"table": [[1.0, 2.0], [1.0, 2.0]]}
    return read_workload(
        {
            "slot_seconds": 100,
            "cluster": [{"count": 2, "resources": {"cpu": 8, "gpu": 8}}],
            "speeds": {"a": table, "b": table},
            "jobs": jobs,
        }
    )
