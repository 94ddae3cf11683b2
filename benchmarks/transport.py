"""What one exchange of gradients and weights costs, by transport: TCP, TCP with TLS, Unix sockets, shared memory.

Real jobs of real processes on this machine, momentum SGD on the servers, float32.  Workers compute nothing: they push
the same gradients in every step, so that all time is the exchange's.  ms is the first worker's median; CPU time is that
of all processes of the job, coordinator included, per step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from elastic_jobs import describe, run_job
from resnet50 import resnet50_shapes

from pslite.numeric.gradient_encoding import encoding_of
from pslite.numeric.gradient_sums import Bundle, Contribution
from pslite.worker.connect import session_for

SIZES = ((1, 1), (2, 1), (2, 2))
WARM = 4
#: by name, DL2_TRANSPORT and DL2_ENCRYPT
TRANSPORTS = {
    "TCP": ("tcp", "control"),
    "TLS": ("tcp", "all"),
    "Unix": ("unix", "control"),
    "shared memory": ("", "control"),
}


def cpu_seconds(root: int) -> float:
    """Return the CPU time so far of a process and all below it."""
    process = psutil.Process(root)
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        times = each.cpu_times()
        total += times.user + times.system
    return total


def work(options: argparse.Namespace) -> None:
    """Be a worker."""
    shapes: list[tuple[int, ...]] = resnet50_shapes() if options.model == "resnet50" else [(25_000_000,)]
    chosen = {"mode": options.mode, "wire": options.wire, "durability": options.durability}
    spec = describe(shapes, options.steps + WARM, **chosen)
    session = session_for(spec)
    session.weights.arrays[0][:] = 1.0
    session.start()
    contributions = []
    encoding = encoding_of(spec)
    for node in session.share.nodes:
        bundle = Bundle(spec, session.blocks)
        bundle.arrays[0][:] = np.linspace(-1e-3, 1e-3, bundle.arrays[0].size, dtype=np.float32)
        if encoding is not None:
            bundle.round(spec, encoding)
        contributions.append(Contribution(node, bundle))
    times = []
    cpu = 0.0
    while session.version < spec.total_versions:
        if session.version == WARM and session.is_chief:
            cpu = cpu_seconds(options.root)
        time.sleep(options.compute)
        began = time.monotonic()
        session.exchange(contributions, 0.0, 1)
        times.append((time.monotonic() - began) * 1e3)
    if session.is_chief:
        cpu = cpu_seconds(options.root) - cpu
        figures = {"ms": statistics.median(times[WARM:]), "cpu_ms": cpu / options.steps * 1e3}
        Path(options.out).write_text(json.dumps(figures), encoding="utf-8")
    session.finish()


def measure(options: argparse.Namespace, model: str, transport: str, workers: int, servers: int) -> dict[str, float]:
    """Run one job; return its figures."""
    way, encrypt = TRANSPORTS[transport]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures")
        run_job(
            [
                sys.executable, __file__, "--work", "--model", model, "--steps", str(options.steps),
                "--mode", options.mode, "--wire", options.wire, "--durability", options.durability,
                "--compute", str(options.compute), "--root", str(os.getpid()), "--out", str(out),
            ],
            workers=workers, servers=servers, timeout=300,
            environ={"DL2_TRANSPORT": way, "DL2_ENCRYPT": encrypt},
        )  # fmt: skip
        figures: dict[str, float] = json.loads(out.read_text(encoding="utf-8"))
        return figures


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet50", "one"], choices=["resnet50", "one"])
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=list(TRANSPORTS))
    parser.add_argument("--sizes", nargs="+", default=[f"{w},{s}" for w, s in SIZES], help="workers,servers")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2, help="the best of so many")
    parser.add_argument("--mode", default="fast", choices=["fast", "exact"])
    parser.add_argument("--wire", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--durability", default="none", choices=["none", "durable"])
    parser.add_argument("--compute", type=float, default=0.0, help="seconds that workers rest between two exchanges")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="resnet50", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    found: list[dict[str, Any]] = []
    for model in options.models:
        for size in options.sizes:
            workers, servers = map(int, size.split(","))
            for transport in options.transports:
                runs = [measure(options, model, transport, workers, servers) for _ in range(options.repeats)]
                ms, cpu = (min(run[key] for run in runs) for key in ("ms", "cpu_ms"))
                found.append(
                    {
                        "model": model,
                        "workers": workers,
                        "servers": servers,
                        "transport": transport,
                        "ms": ms,
                        "cpu": cpu,
                    }
                )
                if not options.json:
                    print(f"{model:9} ({size}) {transport:14} {ms:7.0f} ms {cpu:7.0f} CPU-ms", flush=True)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
