"""How long do workers stand still when servers are added to a running job? Three ways, side by side in one run.

(a) tagged: pslite's version-tagged hand-off.
(b) stop: workers stand still at the clock until everything has moved, as the DL2 paper does it (the same code with
    `Settings(handoff="stop")`; connections and memory are made ready beforehand in both, which is kind to this way).
(c) restart: checkpoint the weights (not the momentum), end every process at once, start anew with one more server,
load,
    push.  Without importing a framework, without a container, on one machine: as quick as a restart can be.

The model has the sizes of ResNet-50's 161 tensors (102 MB), two workers, momentum SGD on the servers, servers 1 -> 2
-> 3. Forward and backward passes are a sleep (`--compute`), since what is measured is everything else; the gradient
depends on the weights.  Suspension is the time between a worker being ready to push and being let to push.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from resnet50 import resnet50_shapes

from pslite.connect import session_for
from pslite.coordinator import Settings
from pslite.gradients import GradientSums
from pslite.spec import SGD, JobSpec, Part, Segment, block_bytes_for
from pslite.testing import LocalResult, Resize, pace, run_local

WORKERS = 2


def describe(scale: float, steps: int) -> JobSpec:
    """Return the job; `scale` shrinks the model for a quick look."""
    shapes = resnet50_shapes()
    if scale < 1:
        shapes = [(max(1, int(np.prod(shape) * scale)),) for shape in shapes]
    parts = tuple(Part(f"t{i}", shape) for i, shape in enumerate(shapes))
    segments = (Segment(dtype="float32", optimizer=SGD(lr=0.01, momentum=0.9), parts=parts),)
    return JobSpec(
        segments=segments,
        samples=64 * steps,
        batch=64,
        epochs=1,
        seed=1,
        mode="fast",
        shards=16,
        block_bytes=block_bytes_for(segments[0].nbytes),
    )


def work(options: argparse.Namespace) -> None:
    """Be a worker."""
    folder = Path(options.folder)
    spec = describe(options.scale, options.steps)
    session = session_for(spec)
    weights = session.weights.arrays[0]
    checkpoint = folder / "checkpoint.npy"
    if options.load:
        weights[:] = np.load(checkpoint)
    else:
        weights[:] = np.linspace(-1, 1, weights.size, dtype=np.float32)
    session.start()
    sums = GradientSums(spec, session.blocks)
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


def command(options: argparse.Namespace, *more: str) -> list[str]:
    """Return the command of a worker."""
    return [
        sys.executable,
        __file__,
        "--role-worker",
        f"--scale={options.scale}",
        f"--compute={options.compute}",
        f"--steps={options.steps}",
        *more,
    ]


def hand_off(options: argparse.Namespace, way: str) -> LocalResult:
    """Run a job that goes from one server to three."""
    settings = Settings(
        grace=120.0, start=120.0, settle=120.0, lease=60.0, handoff="stop" if way == "stop" else "tagged"
    )
    result = run_local(
        command(options),
        workers=WORKERS,
        servers=1,
        schedule=[Resize(4, WORKERS, 2), Resize(9, WORKERS, 3)],
        settings=settings,
        timeout=600,
        environ={**os.environ, "DL2_QUIET": "1"},
    )
    if result.state != "finished":
        raise SystemExit(f"{way}: {result.reason}")
    return result


def restart(options: argparse.Namespace, servers: int) -> list[float]:
    """Stop a job with so many servers, start it with one more; return each worker's stop-to-push time in ms."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        quiet = {**os.environ, "DL2_QUIET": "1"}
        base = [f"--folder={name}"]
        run = [sys.executable, "-m", "pslite.run", f"--workers={WORKERS}"]
        first = subprocess.Popen(
            [*run, f"--servers={servers}", *command(options, *base, "--stop-at=4")],
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
            [*run, f"--servers={servers + 1}", *command(options, *base, "--load", "--steps=2")],
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


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compute", type=float, default=0.3, help="seconds of a forward and backward pass")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the model, 1 = 102 MB")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--role-worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=".", help=argparse.SUPPRESS)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stop-at", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role_worker:
        work(options)
        return
    results: dict[str, Any] = {}
    digests = set()
    waits: dict[str, list[float]] = {"tagged": [], "stop": [], "restart": []}
    plans: dict[str, list[dict[str, float]]] = {"tagged": [], "stop": []}
    for _ in range(options.repeats):
        for way in ("tagged", "stop"):
            result = hand_off(options, way)
            waits[way] += result.suspensions_ms
            digests.add(result.digest)
            plans[way] += [
                {
                    "servers": p.servers,
                    "moved_mb": p.moved_bytes / 1e6,
                    "move_ms": p.move_ms,
                    "prepare_ms": p.prepare_ms,
                }
                for p in result.plans[1:]
            ]
        for servers in (1, 2):
            waits["restart"] += restart(options, servers)
    results["suspension"] = {way: summary(values) for way, values in waits.items()}
    results["plans"] = plans
    results["same_final_weights"] = len(digests) == 1
    results["model_mb"] = describe(options.scale, options.steps).segments[0].nbytes / 1e6
    results["compute_seconds"] = options.compute
    results["machine"] = f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"
    if options.json:
        print(json.dumps(results, indent=1))
        return
    print(f"{results['model_mb']:.0f} MB model, {WORKERS} workers, servers 1 -> 2 -> 3; {results['machine']}\n")
    print(f"{'suspension of workers':34}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}{'values':>8}")
    titles = {
        "tagged": "(a) version-tagged hand-off",
        "stop": "(b) stop and notify",
        "restart": "(c) checkpoint and restart",
    }
    for way, title in titles.items():
        row = results["suspension"][way]
        print(f"{title:34}{row['p50_ms']:10.3f}{row['p99_ms']:10.3f}{row['max_ms']:10.3f}{row['values']:8d}")
    for way in ("tagged", "stop"):
        for servers in (2, 3):
            chosen = [p for p in plans[way] if p["servers"] == servers]
            moved, took = (statistics.median(p[key] for p in chosen) for key in ("moved_mb", "move_ms"))
            print(f"  {way}: to {servers} servers moved {moved:.0f} MB in {took:.0f} ms (median)")
    print(f"(a) and (b) end with the same weights: {'yes' if results['same_final_weights'] else 'NO'}")


if __name__ == "__main__":
    main()
