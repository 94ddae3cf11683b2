"""Time of a training step in each mode of `pslite.torch.ElasticJob`, beside PyTorch's DistributedDataParallel.

    python benchmarks/step_time_by_mode.py [--workers 2] [--batch 32] [--shards 16 8 4 2] [--steps 20] [--repeats 2]

A perceptron of 76 MB, momentum SGD, one thread for each worker, all processes on one machine.  DDP adds gradients with
gloo; pslite has one server and uses shared memory.  In exact mode a step has as many forward and backward passes as
there are shards; each worker does its part of them.  The variants take turns; a value is the median of the steps of all
rounds but the first four steps of each.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from harness import command_of, options_of, show
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from pslite.testing import run_local
from pslite.torch import SGD, ElasticJob

SKIPPED = 4
LR, MOMENTUM = 0.01, 0.9


def model() -> nn.Module:
    torch.manual_seed(0)
    sizes = (1024, 3072, 3072, 2048, 100)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def data(samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 1024), torch.randint(0, 100, (samples,)))


def train_ddp(batch: int, steps: int) -> list[float]:
    """Train with DDP in one of the processes that torchrun has started; returns the times between steps."""
    torch.distributed.init_process_group("gloo")
    rank, workers = torch.distributed.get_rank(), torch.distributed.get_world_size()
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), LR, MOMENTUM)
    inputs, targets = data(batch * steps).tensors
    times = [time.monotonic()]
    for step in range(steps):
        part = slice(step * batch + rank * batch // workers, step * batch + (rank + 1) * batch // workers)
        optimizer.zero_grad()
        cross_entropy(net(inputs[part]), targets[part]).backward()
        optimizer.step()
        times.append(time.monotonic())
    torch.distributed.destroy_process_group()
    return times


def train_elastic(batch: int, steps: int, mode: Any, shards: int) -> list[float]:
    """Train in a worker of an elastic job; returns the times between steps."""
    net = model()
    job = ElasticJob(
        net, optimizer=SGD(lr=LR, momentum=MOMENTUM), dataset=data(batch * steps), batch_size=batch, epochs=1,
        mode=mode, shards=shards, threads=1,
    )  # fmt: skip
    times = [time.monotonic()]
    for step in job.steps():
        for inputs, targets in step:
            job.backward(cross_entropy(net(inputs), targets))
        times.append(time.monotonic())
    return times


def run_once(options: Any, way: str, shards: int) -> list[float]:
    """Return the seconds of each step of the first worker."""
    with tempfile.TemporaryDirectory() as folder:
        own = command_of(options, way, shards=[shards], out=folder)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "DL2_QUIET": "1"}
        if way == "ddp":
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.workers}"]
            subprocess.run([own[0], *launch, *own[1:]], env=environ, check=True, stderr=subprocess.DEVNULL)
        else:
            result = run_local(own, workers=options.workers, servers=1, environ=environ)
            if result.state != "finished":
                raise SystemExit(result.log)
        times = json.loads(min(Path(folder).iterdir()).read_text())
    return [after - before for before, after in pairwise(times)][SKIPPED:]


def main() -> None:
    options = options_of(__doc__, workers=2, batch=32, shards=[16, 8, 4, 2], steps=20, repeats=2, out="")
    if options.role:
        torch.set_num_threads(1)
        if options.role == "ddp":
            times = train_ddp(options.batch, options.steps)
        else:
            times = train_elastic(options.batch, options.steps, options.role, options.shards[0])
        Path(options.out, str(os.getpid())).write_text(json.dumps(times))
        return
    ways = [("ddp", 1), ("fast", 16), *(("exact", shards) for shards in options.shards)]
    seconds: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
    for _ in range(options.repeats):
        for way in ways:
            seconds[way] += run_once(options, *way)
    medians = {way: statistics.median(found) * 1e3 for way, found in seconds.items()}
    for (way, shards), ms in medians.items():
        show(mode=way, shards=shards, ms=ms, beside_ddp=ms / medians["ddp", 1])


if __name__ == "__main__":
    main()
