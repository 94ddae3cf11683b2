"""How fast is a job one of whose four workers computes at half speed? Divided evenly, and by measured speed, by turns.

Forward and backward passes are a sleep for each shard, twice as long in the slow worker, since what is measured is
how the work is divided; the gradient depends on the weights.  A step is timed by the first worker.  With `--slowdown 1`
nobody is slow, and nothing should change.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from elastic_jobs import describe, run_job

from pslite.job.job_spec import JobSpec
from pslite.job.load_balancing import Rule
from pslite.numeric.gradient_sums import GradientSums
from pslite.worker.connect import session_for

WORKERS, SLOW = 4, "worker-3"
WAYS = ("even", "speed")


def job(options: argparse.Namespace) -> JobSpec:
    """Return the job: one tensor of `--mb` megabytes."""
    return describe([(max(1, int(options.mb * 250_000)),)], options.steps, mode=options.mode)


def work(options: argparse.Namespace) -> None:
    """Be a worker."""
    spec = job(options)
    session = session_for(spec)
    session.weights.arrays[0][:] = np.linspace(-1, 1, session.weights.arrays[0].size, dtype=np.float32)
    session.start()
    sums = GradientSums(spec, session.supply)
    seconds = options.shard * (options.slowdown if os.environ["DL2_TASK"] == SLOW else 1.0)
    times = [time.monotonic()]
    while session.version < spec.total_versions:
        share, weights = session.share, session.weights.arrays[0]
        nodes, again = share.nodes, False
        while nodes:
            sums.begin(share.leaves, nodes, again=again)
            for leaf, low, high in share.parts(nodes):
                time.sleep(seconds * (high - low))
                bundle = sums.take()
                np.multiply(weights, 0.1 * (high - low), out=bundle.arrays[0])
                sums.add(leaf, bundle)
            nodes, again = session.exchange(sums.contributions, 0.0, 1), True
        times.append(time.monotonic())
    if os.environ["DL2_TASK"] == "worker-0":
        Path(options.out).write_text(json.dumps(np.diff(times).tolist()))
    session.finish()


def run(options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Run the job one way; return the median step of its last half in ms, its plans and its digest."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/steps"
        command = [
            sys.executable, __file__, "--role-worker", f"--out={out}", f"--mb={options.mb}", f"--shard={options.shard}",
            f"--slowdown={options.slowdown}", f"--steps={options.steps}", f"--mode={options.mode}",
        ]  # fmt: skip
        # as the default, but six times as quick to judge
        rule = Rule(measure=5.0, steady=1.5, pause=10.0, worth=0.0)
        result = run_job(
            command, workers=WORKERS, servers=options.servers, settings={"balance": way, "rule": rule}, timeout=900
        )
        steps = json.loads(Path(out).read_text())
    return {
        "way": way,
        "step_ms": 1e3 * statistics.median(steps[len(steps) // 2 :]),
        "divisions": [line for line in result.log if "become" in line or " move between" in line],
        "suspension_ms": max(result.suspensions_ms, default=0.0),
        "digest": result.digest,
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", type=float, default=0.02, help="seconds for a shard (default 0.02)")
    parser.add_argument("--slowdown", type=float, default=2.0, help="how many times as long the slow worker takes")
    parser.add_argument("--mb", type=float, default=1.0, help="size of the model")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--mode", choices=("exact", "fast"), default="exact")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role-worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role_worker:
        work(options)
        return
    runs = [run(options, way) for _ in range(options.repeats) for way in WAYS]
    steps = {way: statistics.median(r["step_ms"] for r in runs if r["way"] == way) for way in WAYS}
    found = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "step_ms": steps,
        "ratio": steps["even"] / steps["speed"],
        "same_weights": len({r["digest"] for r in runs}) == 1,
        "runs": runs,
    }
    if options.json:
        print(json.dumps(found))
        return
    print(f"{options.mode}, {WORKERS} workers, one {options.slowdown:g} times as slow ({found['machine']})")
    for way in WAYS:
        print(f"  {way:6} {steps[way]:7.1f} ms a step  {[r['divisions'] for r in runs if r['way'] == way]}")
    print(f"  {found['ratio']:.2f} times as fast; same weights: {found['same_weights']}")


if __name__ == "__main__":
    main()
