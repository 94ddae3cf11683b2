"""How long one decision takes, from small clusters to large ones, and how that grows.

    python benchmarks/decision.py [--jobs 250 1000 4000 16000] [--repeats 3] [--json]

Every job is new and asks for up to 8 workers and 8 PSs of one of two shapes; there are 2.5 nodes a job, as in Optimus'
4,000 jobs on 10,000 nodes (Peng et al., EuroSys 2018: 5 s), and too little room for all, so every job ends with a
reason. A time is that of `Packing.for_decision` and `Policy.decide` together, the least of the repeats.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import numpy as np

from dl2d.core.cluster import Node, Snapshot
from dl2d.core.jobs import Job, JobKey, JobRequest, JobState, Launch, Owner
from dl2d.core.packing import Packing
from dl2d.core.policy import Policy
from dl2d.core.resources import Resources
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo


def snapshot(jobs: int) -> Snapshot:
    """A full queue and an empty cluster."""
    shapes = [
        JobRequest(
            name="j",
            model="m",
            epochs=1,
            samples_per_epoch=1,
            steps_per_epoch=None,
            batch=1,
            worker=Resources.of(cpu=2, gpu=gpu),
            ps=Resources.of(cpu=2),
            max_workers=8,
            max_ps=8,
        )
        for gpu in (1, 2)
    ]
    owner, launch = Owner("u", 1, 1), Launch((), "")
    queue = tuple(
        Job(
            key=JobKey("c", str(number), number),
            request=shapes[number % 2],
            owner=owner,
            launch=launch,
            state=JobState.READY,
        )
        for number in range(jobs)
    )
    nodes = tuple(Node(f"n{number}", Resources.of(cpu=8, gpu=8)) for number in range(int(2.5 * jobs)))
    return Snapshot(0.0, 1, nodes, queue, ())


def seconds(policy: Policy, seen: Snapshot, repeats: int) -> float:
    """Least time of some decisions."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        policy.decide(seen, Packing.for_decision(seen.nodes, (), LoadBalance()), np.random.default_rng(0))
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=[250, 1000, 4000, 16000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for jobs in options.jobs:
        seen = snapshot(jobs)
        for policy in (Fifo(), Drf()):
            took = seconds(policy, seen, options.repeats)
            before = next((row for row in reversed(rows) if row["policy"] == policy.name), None)
            growth = took / before["seconds"] / (jobs / before["jobs"]) if before else None
            rows.append(
                {
                    "policy": policy.name,
                    "jobs": jobs,
                    "nodes": len(seen.nodes),
                    "seconds": took,
                    "growth_per_job": growth,
                }
            )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if options.json:
        print(json.dumps({"rows": rows, "peak_mib": peak}))
        return
    print(f"{'policy':8}{'jobs':>8}{'nodes':>8}{'seconds':>10}   time per job, against the row before")
    for row in rows:
        growth = f"{row['growth_per_job']:.2f} x" if row["growth_per_job"] else ""
        print(f"{row['policy']:8}{row['jobs']:>8}{row['nodes']:>8}{row['seconds']:>10.3f}   {growth}")
    print(f"peak memory {peak:.0f} MiB")


if __name__ == "__main__":
    main()
