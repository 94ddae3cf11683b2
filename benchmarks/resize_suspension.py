"""How long do workers stand still when servers are added to a running job? Three ways, side by side in one run.

(a) tagged: pslite's version-tagged hand-off.
(b) stop: workers stand still at the clock until everything has moved, as the DL2 paper does it (the same code with
    `Settings(handoff="stop")`; connections and memory are made ready beforehand in both, which is kind to this way).
(c) restart: checkpoint the weights (not the momentum), end every process at once, start anew with one more server,
load,
    push.  Without importing a framework, without a container, on one machine: as quick as a restart can be.

The model has the sizes of ResNet-50's 161 tensors (102 MB), two workers, momentum SGD on the servers; one server gets
1, 2 or 4 more at once, and in (a) and (b) they leave again and others come, `--cycles` times in a job.  Forward and
backward passes are a sleep (`--compute`), since what is measured is everything else; the gradient depends on the
weights.  Suspension is the time between a worker being ready to push and being let to push.

A second table has the steps of adding a server, by size of the model, as the paper's figure 12: start and registration
of the new process, assignment of blocks, making ready (connections and memory), moving, and the workers' new plan.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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
from elastic_jobs import describe, run_job
from resnet50 import resnet50_shapes

from pslite.job.blocks import cut
from pslite.job.job_spec import JobSpec
from pslite.job.job_status import PlanReport
from pslite.job.work_assignment import assign
from pslite.numeric.gradient_sums import GradientSums
from pslite.testing import LocalResult, Resize, pace
from pslite.worker.connect import session_for

WORKERS = 2
TITLES = {
    "tagged": "(a) version-tagged hand-off",
    "stop": "(b) stop and notify",
    "restart": "(c) checkpoint and restart",
}
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
    folder = Path(options.folder)
    spec = scaled_resnet50(options.scale, options.steps)
    session = session_for(spec)
    weights = session.weights.arrays[0]
    checkpoint = folder / "checkpoint.npy"
    if options.load:
        weights[:] = np.load(checkpoint)
    else:
        weights[:] = np.linspace(-1, 1, weights.size, dtype=np.float32)
    session.start()
    sums = GradientSums(spec, session.supply)
    while session.version < spec.total_versions:
        pace(session.version, spec.total_versions)
        time.sleep(options.compute)
        share, weights = session.share, session.weights.arrays[0]
        sums.begin(share.leaves, share.nodes)
        bundle = sums.take()
        np.multiply(weights, 0.1, out=bundle.arrays[0])
        sums.add(share.index, bundle)
        if options.load and session.version == 0:
            (folder / f"push-{os.environ['DL2_TASK']}").write_text(repr(time.monotonic()))
        session.exchange(sums.contributions, 0.0, 1)
        if options.stop_at and session.version == options.stop_at:
            (folder / f"stop-{os.environ['DL2_TASK']}").write_text(repr(time.monotonic()))
            if session.is_chief:
                np.save(checkpoint, session.weights.arrays[0])
                (folder / "saved").touch()
            os._exit(0)  # the benchmark ends the rest of the job
    session.finish()


def command(options: argparse.Namespace, *more: str, scale: float = 0.0) -> list[str]:
    """Return the command of a worker."""
    return [
        sys.executable,
        __file__,
        "--role-worker",
        f"--scale={scale or options.scale}",
        f"--compute={options.compute}",
        f"--steps={options.steps}",
        *more,
    ]


class Registrations:
    """How long new processes took from their start to their registration, in ms, as the coordinator tells of them."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def __call__(self, line: str) -> None:
        """Take a line of the coordinator's."""
        match = re.search(r"^ps-.*\(pid (\d+)\) has joined", line)
        if match:
            self.found.append((time.time() - psutil.Process(int(match[1])).create_time()) * 1e3)


def hand_off(options: argparse.Namespace, way: str, added: int, scale: float) -> tuple[LocalResult, list[float]]:
    """Run a job that gets so many servers, loses them, and again; return how registrations went too."""
    changes = [
        Resize(PERIOD * number, WORKERS, 1 + added if number % 2 else 1) for number in range(1, 2 * options.cycles)
    ]
    registrations = Registrations()
    result = run_job(
        command(options, scale=scale),
        workers=WORKERS,
        servers=1,
        schedule=changes,
        settings={"handoff": way},
        timeout=600,
        say=registrations,
    )
    return result, registrations.found[1:]


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
        base = [f"--folder={name}"]
        run = [sys.executable, "-m", "pslite.run", f"--workers={WORKERS}"]
        first = subprocess.Popen(
            [*run, "--servers=1", *command(options, *base, "--stop-at=4")],
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
        subprocess.run(
            [*run, f"--servers={1 + added}", *command(options, *base, "--load", "--steps=2")],
            env=quiet,
            check=True,
            timeout=300,
        )
        # forward and backward pass of the new first step are not counted
        stops = [float((folder / f"stop-worker-{i}").read_text()) for i in range(WORKERS)]
        pushes = [float((folder / f"push-worker-{i}").read_text()) for i in range(WORKERS)]
        return [(push - stop - options.compute) * 1e3 for stop, push in zip(stops, pushes, strict=True)]


def summary(waits: list[float]) -> dict[str, float]:
    """Return p50, p99 and max in ms."""
    return {
        "p50_ms": round(statistics.median(waits), 3),
        "p99_ms": round(float(np.percentile(waits, 99)), 3),
        "max_ms": round(max(waits), 3),
        "values": len(waits),
    }


def steps(options: argparse.Namespace, scale: float) -> dict[str, float]:
    """Return the medians of the steps of adding one server to a model of a size."""
    result, registrations = hand_off(options, "tagged", 1, scale)
    sizes = [block.nbytes for block in cut(scaled_resnet50(scale, options.steps))]
    began = time.perf_counter()
    assign(sizes, dict.fromkeys(range(len(sizes)), "ps-0"), ["ps-0", "ps-1"])
    assigned = (time.perf_counter() - began) * 1e3
    plans = ups(result, 1)
    return {
        "model_mb": sum(sizes) / 1e6,
        "registration_ms": statistics.median(registrations),
        "assignment_ms": assigned,
        "prepare_ms": statistics.median(plan.prepare_ms for plan, _ in plans),
        "move_ms": statistics.median(plan.move_ms for plan, _ in plans),
        "moved_mb": statistics.median(plan.moved_bytes for plan, _ in plans) / 1e6,
        "worker_ms": statistics.median(wait for _, found in plans for wait in found),
    }


def steps_around(options: argparse.Namespace, workers: int, servers: int) -> dict[str, Any]:
    """Return how long steps take around resizes that add so many workers and servers to two workers and one server."""
    larger = WORKERS + workers, 1 + servers
    changes = [
        Resize(PERIOD * number, *(larger if number % 2 else (WORKERS, 1))) for number in range(1, 2 * options.cycles)
    ]
    result = run_job(command(options), workers=WORKERS, servers=1, schedule=changes, settings={}, timeout=600)
    plans = [plan for plan in result.plans[1:] if plan.added and plan.longest_step_ms is not None]
    return {
        "added": f"{workers} workers, {servers} servers",
        "median_step_ms": statistics.median(plan.median_step_ms for plan in plans),
        "longest_step_ms": max(plan.longest_step_ms for plan in plans),
        "values": len(plans),
    }


def steps_table(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure, and print, how long steps take around resizes that add workers, or servers."""
    rows = []
    if options.joins and not options.json:
        print(f"\n{'added at once':>24}{'median step':>13}{'longest':>10}{'resizes':>9}  ms, as workers measure them")
    for workers, servers in [(each, 0) for each in options.joins] + [(0, each) for each in options.joins]:
        row = steps_around(options, workers, servers)
        rows.append(row)
        if not options.json:
            print(
                f"{row['added']:>24}{row['median_step_ms']:13.1f}{row['longest_step_ms']:10.1f}{row['values']:9d}",
                flush=True,
            )
    return rows


def main() -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=2, help="how often servers come in a job")
    parser.add_argument("--compute", type=float, default=0.3, help="seconds of a forward and backward pass")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the model, 1 = 102 MB")
    parser.add_argument("--adds", type=int, nargs="*", default=[1, 2, 4], help="servers that come at once")
    parser.add_argument("--ways", nargs="+", default=list(TITLES), choices=list(TITLES))
    parser.add_argument("--scales", type=float, nargs="*", default=[0.1, 0.5, 1.0, 2.0], help="of the second table")
    parser.add_argument("--joins", type=int, nargs="*", default=[1, 4], help="workers, servers of the third table")
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--role-worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=".", help=argparse.SUPPRESS)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stop-at", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.steps or PERIOD * (2 * options.cycles + 1)
    if options.role_worker:
        work(options)
        return
    results: dict[str, Any] = {
        "model_mb": scaled_resnet50(options.scale, options.steps).segments[0].nbytes / 1e6,
        "compute_seconds": options.compute,
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}",
        "suspension": [],
        "steps": [],
    }
    if not options.json:
        print(f"{results['model_mb']:.0f} MB model, {WORKERS} workers; {results['machine']}\n")
        print(
            f"{'suspension of workers':30}{'servers':>9}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}{'values':>8}  moved"
        )
    digests = set()
    for added in options.adds:
        for way in options.ways:
            waits: list[float] = []
            plans: list[PlanReport] = []
            for _ in range(options.repeats):
                if way == "restart":
                    waits += restart(options, added)
                    continue
                result, _ = hand_off(options, way, added, options.scale)
                digests.add(result.digest)
                for plan, found in ups(result, added):
                    plans.append(plan)
                    waits += found
            row: dict[str, Any] = {"way": way, "servers": f"1 -> {1 + added}", **summary(waits)}
            moved = ""
            if plans:
                row["moved_mb"] = round(statistics.median(plan.moved_bytes for plan in plans) / 1e6, 1)
                row["move_ms"] = round(statistics.median(plan.move_ms for plan in plans), 1)
                moved = f"{row['moved_mb']:.0f} MB in {row['move_ms']:.0f} ms"
            results["suspension"].append(row)
            if not options.json:
                print(
                    f"{TITLES[way]:30}{row['servers']:>9}{row['p50_ms']:10.3f}{row['p99_ms']:10.3f}{row['max_ms']:10.3f}"
                    f"{row['values']:8d}  {moved}",
                    flush=True,
                )
    results["same_final_weights"] = len(digests) == 1
    if options.adds and not options.json:
        print(f"(a) and (b) end with the same weights: {'yes' if results['same_final_weights'] else 'NO'}\n")
        print(f"{'model MB':>9}{'start':>9}{'assign':>9}{'prepare':>9}{'move':>9}{'workers':>9}  ms, 1 -> 2 servers")
    for scale in options.scales:
        found = steps(options, scale)
        results["steps"].append(found)
        if not options.json:
            print(
                f"{found['model_mb']:9.0f}{found['registration_ms']:9.0f}{found['assignment_ms']:9.2f}"
                f"{found['prepare_ms']:9.0f}{found['move_ms']:9.0f}{found['worker_ms']:9.3f}",
                flush=True,
            )
    results["steps_around_resizes"] = steps_table(options)
    if options.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
