"""How long do workers stand still when servers are added to a running job? Three ways, side by side in one run.

    python benchmarks/resize_suspension.py [--adds 1 2 4] [--ways tagged stop restart] [--repeats 2] [--cycles 2]
        [--compute 0.3] [--scale 1] [--scales 0.1 0.5 1 2] [--joins 1 4]

tagged: pslite's version-tagged hand-off.
stop: workers stand still at the clock until everything has moved, as the DL2 paper does it (the same code with
    `Settings(handoff="stop")`; connections and memory are made ready beforehand in both, which is kind to this way).
restart: checkpoint the weights (not the momentum), end every process at once, start anew with more servers, load, push.
    Without importing a framework, without a container, on one machine: as quick as a restart can be.

The model has the sizes of ResNet-50's 161 tensors (102 MB), two workers, momentum SGD on the servers; one server gets
1, 2 or 4 more at once, and in the first two ways they leave again and others come, `--cycles` times in a job.  Forward
and backward passes are a sleep (`--compute`), since what is measured is everything else; the gradient depends on the
weights.  Suspension is the time between a worker being ready to push and being let to push.

Then the steps of adding a server, by size of the model (`--scales`), as the paper's figure 12: start and registration
of the new process, assignment of blocks, making ready (connections and memory), moving, and the workers' new plan. At
last the steps around resizes that add so many workers, or servers, at once (`--joins`).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import command_of, options_of, resnet50_shapes, show
from runtime_jobs import describe, exchange, run_job, started

from pslite.job.job_spec import JobSpec
from pslite.job.job_status import PlanReport
from pslite.job.shard_and_block_assignment import assign
from pslite.job.weight_blocks import cut
from pslite.testing import LocalResult, Resize, pace

WORKERS = 2
#: versions between two changes of size
PERIOD = 12


def scaled_resnet50(scale: float, steps: int, **changes: Any) -> JobSpec:
    """Return the job; `scale` makes the model smaller or larger."""
    shapes = resnet50_shapes()
    if scale != 1:
        shapes = [(max(1, int(np.prod(shape) * scale)),) for shape in shapes]
    return describe(shapes, steps, **changes)


def work(options: argparse.Namespace) -> None:
    """Be a worker."""
    folder, task = Path(options.out), os.environ["DL2_TASK"]
    spec = scaled_resnet50(options.scale, options.steps)
    session, sums = started(spec)
    checkpoint = folder / "checkpoint.npy"
    if options.load:
        session.weights.arrays[0][:] = np.load(checkpoint)
    while session.version < spec.total_versions:
        pace(session.version, spec.total_versions)
        time.sleep(options.compute)
        if options.load and session.version == 0:
            (folder / f"push-{task}").write_text(repr(time.monotonic()))
        exchange(session, sums)
        if options.stop_at and session.version == options.stop_at:
            (folder / f"stop-{task}").write_text(repr(time.monotonic()))
            if session.is_chief:
                np.save(checkpoint, session.weights.arrays[0])
                (folder / "saved").touch()
            os._exit(0)  # the benchmark ends the rest of the job
    session.finish()


class Registrations:
    """How long new processes took from their start to their registration, in ms, as the coordinator tells of them."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def __call__(self, line: str) -> None:
        """Take a line of the coordinator's."""
        match = re.search(r"^ps-.*\(pid (\d+)\) has joined", line)
        if match:
            self.found.append((time.time() - psutil.Process(int(match[1])).create_time()) * 1e3)


def resized(options: argparse.Namespace, way: str, workers: int, servers: int, **more: Any) -> LocalResult:
    """Run a job that gets so many workers and servers, loses them, and again."""
    changes = [
        Resize(PERIOD * number, *((WORKERS + workers, 1 + servers) if number % 2 else (WORKERS, 1)))
        for number in range(1, 2 * options.cycles)
    ]
    return run_job(
        command_of(options, "worker"), workers=WORKERS, servers=1, schedule=changes, settings={"handoff": way},
        timeout=600, **more,
    )  # fmt: skip


def ups(result: LocalResult, added: int) -> list[tuple[PlanReport, list[float]]]:
    """Return the plans that added servers, each with its workers' suspensions."""
    waits = [result.suspensions_ms[WORKERS * i : WORKERS * (i + 1)] for i in range(len(result.plans) - 1)]
    return [
        (plan, list(found))
        for plan, found in zip(result.plans[1:], waits, strict=True)
        if plan.servers == 1 + added and len(plan.added) == added
    ]


def restart(options: argparse.Namespace, added: int) -> list[float]:
    """Stop a job with one server, start it with so many more; return each worker's stop-to-push time in ms."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        quiet = {**os.environ, "DL2_QUIET": "1"}
        run = [sys.executable, "-m", "pslite.run", f"--workers={WORKERS}"]
        first = subprocess.Popen(
            [*run, "--servers=1", *command_of(options, "worker", out=name, stop_at=4)],
            env=quiet,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 300
        while not (folder / "saved").exists():
            if first.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("restart: the first job did not reach its checkpoint")
            time.sleep(0.001)
        # the quickest end there is: no grace for anybody, the tasks end when they see the coordinator gone
        first.kill()
        first.wait()
        again = command_of(options, "worker", out=name, load=True, steps=2)
        subprocess.run([*run, f"--servers={1 + added}", *again], env=quiet, check=True, timeout=300)
        # forward and backward pass of the new first step are not counted
        stops = [float((folder / f"stop-worker-{i}").read_text()) for i in range(WORKERS)]
        pushes = [float((folder / f"push-worker-{i}").read_text()) for i in range(WORKERS)]
        return [(push - stop - options.compute) * 1e3 for stop, push in zip(stops, pushes, strict=True)]


def suspension(options: argparse.Namespace, way: str, added: int) -> dict[str, Any]:
    """Return how long workers stand still when so many servers are added one way, and the final weights' digests."""
    waits: list[float] = []
    plans: list[PlanReport] = []
    digests = set()
    for _ in range(options.repeats):
        if way == "restart":
            waits += restart(options, added)
            continue
        result = resized(options, way, 0, added)
        digests.add(result.digest)
        for plan, found in ups(result, added):
            plans.append(plan)
            waits += found
    moved = {
        "moved_mb": statistics.median(plan.moved_bytes for plan in plans) / 1e6,
        "move_ms": statistics.median(plan.move_ms for plan in plans),
    } if plans else {}  # fmt: skip
    return {
        "p50_ms": statistics.median(waits), "p99_ms": float(np.percentile(waits, 99)), "max_ms": max(waits),
        "values": len(waits), **moved, "digests": sorted(digests),
    }  # fmt: skip


def steps(options: argparse.Namespace) -> dict[str, float]:
    """Return the medians of the steps of adding one server to a model of a size."""
    registrations = Registrations()
    result = resized(options, "tagged", 0, 1, say=registrations)
    sizes = [block.nbytes for block in cut(scaled_resnet50(options.scale, options.steps))]
    began = time.perf_counter()
    assign(sizes, dict.fromkeys(range(len(sizes)), "ps-0"), ["ps-0", "ps-1"])
    assigned = (time.perf_counter() - began) * 1e3
    plans = ups(result, 1)
    return {
        "model_mb": sum(sizes) / 1e6,
        "registration_ms": statistics.median(registrations.found[1:]),
        "assignment_ms": assigned,
        "prepare_ms": statistics.median(plan.prepare_ms for plan, _ in plans),
        "move_ms": statistics.median(plan.move_ms for plan, _ in plans),
        "worker_ms": statistics.median(wait for _, found in plans for wait in found),
    }


def main() -> None:
    """Run everything, and print a line for each."""
    options = options_of(
        __doc__, adds=[1, 2, 4], ways=["tagged", "stop", "restart"], repeats=2, cycles=2, compute=0.3, scale=1.0,
        scales=[0.1, 0.5, 1.0, 2.0], joins=[1, 4], steps=0, load=False, stop_at=0,
    )  # fmt: skip
    options.steps = options.steps or PERIOD * (2 * options.cycles + 1)
    if options.role:
        work(options)
        return
    for added in options.adds:
        for way in options.ways:
            show(way=way, servers=f"1 -> {1 + added}", **suspension(options, way, added))
    for workers, servers in [(each, 0) for each in options.joins] + [(0, each) for each in options.joins]:
        result = resized(options, "tagged", workers, servers)
        plans = [plan for plan in result.plans[1:] if plan.added and plan.longest_step_ms is not None]
        show(
            added=f"{workers} workers, {servers} servers", values=len(plans),
            median_step_ms=statistics.median(plan.median_step_ms for plan in plans),
            longest_step_ms=max(plan.longest_step_ms for plan in plans),
        )  # fmt: skip
    for scale in options.scales:
        options.scale = scale
        show(**steps(options))


if __name__ == "__main__":
    main()
