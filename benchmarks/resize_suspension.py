"""How long do workers wait when a job gets more servers or workers, and how long do the parts of a resize take?

    python benchmarks/resize_suspension.py [--adds 1 2 4] [--repeats 2] [--cycles 2] [--compute 0.3] [--scale 1]
        [--scales 0.1 0.5 1 2] [--joins 1 4] [--architecture ps|allreduce] [--mode fast|exact]

The job has two workers, one server, momentum SGD and the sizes of ResNet-50's 161 tensors (102 MB); 1, 2 or 4 servers
are added at once and leave again, `--cycles` times in a job.  Forward and backward passes are a sleep (`--compute`),
since what is measured is everything else; the gradient depends on the weights.  Suspension is the time between a worker
being ready to push and being allowed to push.

Training steps around resizes are measured that add so many workers, or servers, at once (`--joins`): the median step
before, and the longest while the plan is prepared and carried out.  A job that comes near its end before new tasks are
there waits for them, up to 5 s in a step.  With `--architecture allreduce` (gradients are added up over gloo, without
servers) nothing else is measured.

At last the parts of adding a server are measured, by size of the model (`--scales`), as in figure 12 of the DL2 paper:
start and registration of the new process, assignment of blocks, preparation (connections and memory), moving of blocks,
and the workers' change to the new plan.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
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


def scaled_resnet50(options: argparse.Namespace) -> JobSpec:
    """Return the job; `--scale` makes the model smaller or larger."""
    shapes = resnet50_shapes()
    if options.scale != 1:
        shapes = [(max(1, int(np.prod(shape) * options.scale)),) for shape in shapes]
    steps = PERIOD * (2 * options.cycles + 1)
    return describe(shapes, steps, architecture=options.architecture, mode=options.mode)


def work(options: argparse.Namespace) -> None:
    """Be a worker."""
    spec = scaled_resnet50(options)
    session, sums = started(spec)
    while session.version < spec.total_versions:
        pace(session.version, spec.total_versions)
        time.sleep(options.compute)
        exchange(session, sums)
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


def resized(options: argparse.Namespace, workers: int, servers: int, **more: Any) -> LocalResult:
    """Run a job that gets so many more workers and servers, loses them, and so on."""
    least = 1 if options.architecture == "ps" else 0
    changes = [
        Resize(PERIOD * number, *((WORKERS + workers, least + servers) if number % 2 else (WORKERS, least)))
        for number in range(1, 2 * options.cycles)
    ]
    return run_job(command_of(options, "worker"), workers=WORKERS, servers=least, schedule=changes, timeout=600, **more)


def server_additions(result: LocalResult, added: int) -> list[tuple[PlanReport, list[float]]]:
    """Return the plans that added servers, each with its workers' suspensions."""
    waits = [result.suspensions_ms[WORKERS * i : WORKERS * (i + 1)] for i in range(len(result.plans) - 1)]
    return [
        (plan, list(found))
        for plan, found in zip(result.plans[1:], waits, strict=True)
        if plan.servers == 1 + added and len(plan.added) == added
    ]


def suspension(options: argparse.Namespace, added: int) -> dict[str, Any]:
    """Return how long workers wait when so many servers are added, and the digests of the final weights."""
    results = [resized(options, 0, added) for _ in range(options.repeats)]
    plans = [each for result in results for each in server_additions(result, added)]
    waits = [wait for _, found in plans for wait in found]
    return {
        "p50_ms": statistics.median(waits), "p99_ms": float(np.percentile(waits, 99)), "max_ms": max(waits),
        "values": len(waits), "moved_mb": statistics.median(plan.moved_bytes for plan, _ in plans) / 1e6,
        "move_ms": statistics.median(plan.move_ms for plan, _ in plans),
        "digests": sorted({result.digest for result in results}),
    }  # fmt: skip


def steps_around_resizes(options: argparse.Namespace, workers: int, servers: int) -> dict[str, Any]:
    """Return the training steps around resizes that add so many workers and servers."""
    result = resized(options, workers, servers)
    plans = [plan for plan in result.plans[1:] if plan.added and plan.longest_step_ms is not None]
    return {
        "added": f"{workers} workers, {servers} servers", "values": len(plans),
        "median_step_ms": statistics.median(plan.median_step_ms for plan in plans),
        "longest_step_ms": max(plan.longest_step_ms for plan in plans),
        "suspension_max_ms": max(plan.suspension_ms.max for plan in plans),
    }  # fmt: skip


def parts_of_adding_a_server(options: argparse.Namespace) -> dict[str, float]:
    """Return the medians of the parts of adding one server, for one size of the model."""
    registrations = Registrations()
    result = resized(options, 0, 1, say=registrations)
    sizes = [block.nbytes for block in cut(scaled_resnet50(options))]
    began = time.perf_counter()
    assign(sizes, dict.fromkeys(range(len(sizes)), "ps-0"), ["ps-0", "ps-1"])
    assigned = (time.perf_counter() - began) * 1e3
    plans = server_additions(result, 1)
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
        __doc__, adds=[1, 2, 4], repeats=2, cycles=2, compute=0.3, scale=1.0, scales=[0.1, 0.5, 1.0, 2.0],
        joins=[1, 4], architecture=("ps", "allreduce"), mode=("fast", "exact"),
    )  # fmt: skip
    if options.role:
        work(options)
        return
    has_servers = options.architecture == "ps"
    for added in options.adds if has_servers else ():
        show(servers=f"1 -> {1 + added}", **suspension(options, added))
    for workers in options.joins:
        show(**steps_around_resizes(options, workers, 0))
    for servers in options.joins if has_servers else ():
        show(**steps_around_resizes(options, 0, servers))
    for scale in options.scales if has_servers else ():
        options.scale = scale
        show(**parts_of_adding_a_server(options))


if __name__ == "__main__":
    main()
