"""What one exchange of gradients and weights costs, by transport: TCP, TCP with TLS, Unix sockets, shared memory.

    python benchmarks/transport.py [--models resnet50 one] [--transports TCP TLS Unix shm] [--sizes 1,1 2,1 2,2]
        [--steps 20] [--repeats 2] [--mode fast|exact] [--wire float32|bfloat16|float16] [--durability none|durable]
        [--compute 0]

Real jobs of real processes on this machine, momentum SGD on the servers, float32.  Workers compute nothing: they rest
`--compute` seconds and push the same gradients in every step, so that all time is the exchange's.  `ms` is the first
worker's median; CPU time is that of all processes of the job, coordinator included, per step; of `--repeats` jobs the
least of each.  `--sizes` are workers,servers.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from functools import partial

import numpy as np
import psutil
from harness import cpu_seconds, measured, options_of, resnet50_shapes, show, write_figures
from runtime_jobs import describe, run_job

from pslite.numeric.gradient_encoding import encoding_of
from pslite.numeric.gradient_sums import Bundle, Contribution
from pslite.worker.elastic_job_base import session_for

WARM = 4
#: by name, DL2_TRANSPORT and DL2_ENCRYPT
TRANSPORTS = {"TCP": ("tcp", "control"), "TLS": ("tcp", "all"), "Unix": ("unix", "control"), "shm": ("", "control")}


def family(root: int) -> list[psutil.Process]:
    """Return a process and all below it."""
    process = psutil.Process(root)
    return [process, *process.children(recursive=True)]


def work(options: argparse.Namespace) -> None:
    """Be a worker."""
    shapes: list[tuple[int, ...]] = resnet50_shapes() if options.models == ["resnet50"] else [(25_000_000,)]
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
            cpu = cpu_seconds(family(options.root))
        time.sleep(options.compute)
        began = time.monotonic()
        session.exchange(contributions, 0.0, 1)
        times.append((time.monotonic() - began) * 1e3)
    if session.is_chief:
        cpu = cpu_seconds(family(options.root)) - cpu
        write_figures(options, {"ms": statistics.median(times[WARM:]), "cpu_ms": cpu / options.steps * 1e3})
    session.finish()


def measure(options: argparse.Namespace, transport: str, workers: int, servers: int) -> dict[str, float]:
    """Run one job; return its figures."""
    way, encrypt = TRANSPORTS[transport]
    environ = {"DL2_TRANSPORT": way, "DL2_ENCRYPT": encrypt}
    run = partial(run_job, workers=workers, servers=servers, timeout=300, environ=environ)
    figures: dict[str, float] = measured(options, "worker", run, root=os.getpid())[1]
    return figures


def main() -> None:
    """Run everything, and print a line for each."""
    options = options_of(
        __doc__, models=["resnet50", "one"], transports=list(TRANSPORTS), sizes=["1,1", "2,1", "2,2"], steps=20,
        repeats=2, mode=("fast", "exact"), wire=("float32", "bfloat16", "float16"), durability=("none", "durable"),
        compute=0.0, root=0,
    )  # fmt: skip
    if options.role:
        work(options)
        return
    for model, size, transport in itertools.product(options.models, options.sizes, options.transports):
        workers, servers = map(int, size.split(","))
        options.models = [model]
        runs = [measure(options, transport, workers, servers) for _ in range(options.repeats)]
        least = {key: min(run[key] for run in runs) for key in ("ms", "cpu_ms")}
        show(model=model, workers=workers, servers=servers, transport=transport, **least)


if __name__ == "__main__":
    main()
