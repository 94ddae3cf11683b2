"""How long does an all-reduce job stand still when a worker joins or leaves, in exact and in fast mode?

    python benchmarks/allreduce_resize.py [--compute 0.3] [--scale 1]

The model has the sizes of ResNet-50's tensors (102 MB) with momentum SGD, which every worker applies to its own copy;
gradients are added up over gloo on this machine.  Forward and backward passes are a sleep (`--compute`), since what is
measured is everything else.

Workers are 1 -> 2 -> 3 -> 2.  The gap of a resize is how much longer the workers that stay had between the last
step before it and the first after it, or between that one and the second (a joiner gets its state then), than the
median of the steps that follow; pauses in which the job waits for a newcomer, so as not to end before it comes, are
taken off.  What is printed as suspension is the part of the gap that pslite itself knows of.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import command_of, options_of, show
from resize_suspension import scaled_resnet50
from runtime_jobs import exchange, run_job, started

from pslite.testing import Resize, pace

SCHEDULE = (Resize(8, 2, 0), Resize(22, 3, 0), Resize(36, 2, 0))
STEPS = 60
#: parts of a batch: in exact mode a worker has a forward and backward pass for each of its own
SHARDS = 4
#: steps that a join takes from when all are ready: the first after it, and the one in which the state moves
_AFFECTED = 2


def note(folder: Path, name: str, **values: Any) -> None:
    """Add a line with the time to a file."""
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"at": time.monotonic(), **values}) + "\n")


def read(place: Path) -> list[dict[str, Any]]:
    """Return the lines of a file."""
    return [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]


def work(options: argparse.Namespace) -> None:
    """Be a worker."""
    folder, task = Path(options.out), os.environ["DL2_TASK"]
    note(folder, f"{task}.started")
    spec = scaled_resnet50(options.scale, STEPS, architecture="allreduce", mode=options.mode, shards=SHARDS)
    session, sums = started(spec)
    while session.version < spec.total_versions:
        begun = time.monotonic()
        pace(session.version, spec.total_versions)
        paused = time.monotonic() - begun
        time.sleep(options.compute)
        exchange(session, sums)
        note(folder, f"{task}.steps", version=session.version, paused=paused)
    session.finish()


def resized(options: argparse.Namespace, mode: str, folder: Path) -> list[dict[str, Any]]:
    """Run the schedule; return what it cost."""
    result = run_job(
        command_of(options, "worker", out=folder, mode=mode), workers=1, servers=0, schedule=SCHEDULE, timeout=400
    )
    begun = {place.stem: read(place)[0]["at"] for place in folder.glob("*.started")}
    lines = {line["version"]: line for line in read(folder / "worker-0.steps")}
    ends = {version: line["at"] for version, line in lines.items()}
    took = {v: ends[v] - ends[v - 1] - lines[v]["paused"] for v in ends if v - 1 in ends}
    rows = []
    for before, plan in zip(result.plans, result.plans[1:], strict=False):
        clock = plan.first_version
        after = [took[v] for v in range(clock + _AFFECTED + 1, min(clock + 11, STEPS))]
        usual = statistics.median(after)
        row: dict[str, Any] = {
            "workers": f"{before.workers} -> {plan.workers}",
            "gap_ms": round(1e3 * max(0.0, sum(took[clock + i] - usual for i in range(1, _AFFECTED + 1)))),
            "suspension_max_ms": plan.suspension_ms.max,
            "prepare_ms": round(plan.prepare_ms),
            "step_ms": round(1e3 * usual),
        }
        if plan.added:
            coming = begun[plan.added[0]]
            joining = [took[v] for v in took if v <= clock and ends[v - 1] > coming]
            earlier = [took[v] for v in took if before.first_version + _AFFECTED < v and ends[v] < coming]
            row["steps_while_joining"] = len(joining)
            row["step_ms_before"] = round(1e3 * statistics.median(earlier)) if earlier else None
            row["step_ms_while_joining"] = round(1e3 * statistics.median(joining)) if joining else None
        rows.append(row)
    return rows


def main() -> None:
    """Run everything, and print a line for each resize."""
    options = options_of(__doc__, compute=0.3, scale=1.0, mode="exact")
    if options.role:
        work(options)
        return
    for mode in ("exact", "fast"):
        with tempfile.TemporaryDirectory() as folder:
            for row in resized(options, mode, Path(folder)):
                show(mode=mode, **row)


if __name__ == "__main__":
    main()
