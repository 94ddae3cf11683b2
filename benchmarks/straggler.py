"""How fast is a job one of whose four workers computes at half speed? Divided evenly, and by measured speed, by turns.

    python benchmarks/straggler.py [--slowdown 2] [--shard 0.02] [--mb 1] [--steps 200] [--servers 1]
        [--mode exact|fast] [--repeats 2]

Forward and backward passes are a sleep of `--shard` seconds for each shard, longer in the slow worker, since what is
measured is how the work is divided; the gradient depends on the weights.  A step is timed by the first worker.  With
`--slowdown 1` nobody is slow, and nothing should change.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial

import numpy as np
from harness import measured, options_of, show, write_figures
from runtime_jobs import describe, exchange, run_job, started

from pslite.job.load_balancing import Rule

WORKERS, SLOW = 4, "worker-3"


def work(options: argparse.Namespace) -> None:
    """Be a worker of a job with one tensor of `--mb` megabytes."""
    spec = describe([(max(1, int(options.mb * 250_000)),)], options.steps, mode=options.mode)
    session, sums = started(spec)
    seconds = options.shard * (options.slowdown if os.environ["DL2_TASK"] == SLOW else 1.0)
    times = [time.monotonic()]
    while session.version < spec.total_versions:
        exchange(session, sums, seconds)
        times.append(time.monotonic())
    if os.environ["DL2_TASK"] == "worker-0":
        write_figures(options, np.diff(times).tolist())
    session.finish()


def main() -> None:
    """Measure, and print."""
    options = options_of(
        __doc__, shard=0.02, slowdown=2.0, mb=1.0, steps=200, servers=1, mode=("exact", "fast"), repeats=2
    )
    if options.role:
        work(options)
        return
    # as the default, but six times as quick to judge
    rule = Rule(measure=5.0, steady=1.5, pause=10.0, worth=0.0)
    for way in ("even", "speed") * options.repeats:
        run = partial(
            run_job, workers=WORKERS, servers=options.servers, settings={"balance": way, "rule": rule}, timeout=900
        )
        result, steps = measured(options, "worker", run)
        show(
            way=way, step_ms=1e3 * statistics.median(steps[len(steps) // 2 :]),
            divisions=[line for line in result.log if "become" in line or " move between" in line],
            suspension_ms=max(result.suspensions_ms, default=0.0), digest=result.digest,
        )  # fmt: skip


if __name__ == "__main__":
    main()
