"""Time of a training step in each mode of `pslite.torch.ElasticJob`, beside PyTorch's DistributedDataParallel.

    python benchmarks/step_time_by_mode.py [--workers 2] [--batch 32] [--shards 16 8 4 2] [--steps 20] [--repeats 2]

A perceptron of 76 MB, momentum SGD, one thread for each worker, all processes on one machine.  DDP adds gradients with
gloo; pslite has one server and uses shared memory.  In exact mode a step has as many forward and backward passes as
there are shards; each worker does its part of them.  The variants take turns; a value is the median of the steps of all
rounds but the first four steps of each.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from harness import by_turns, measured, options_of, show, write_figures
from runtime_jobs import run_job
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from pslite.torch import SGD, ElasticJob

SKIPPED = 4
LR, MOMENTUM = 0.01, 0.9


def model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((1024, 3072, 3072, 2048, 100)):
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


def run_once(options: Any, way: tuple[str, int]) -> list[float]:
    """Return the seconds of each step of the first worker."""
    mode, shards = way
    one_thread = {"OMP_NUM_THREADS": "1"}

    def start(own: list[str]) -> None:
        if mode == "ddp":
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.workers}"]
            environ = {**os.environ, **one_thread}
            subprocess.run([own[0], *launch, *own[1:]], env=environ, check=True, stderr=subprocess.DEVNULL)
        else:
            settings = {"balance": "even"}
            run_job(own, workers=options.workers, servers=1, timeout=240, settings=settings, environ=one_thread)

    _, times = measured(options, mode, start, shards=[shards])
    return [after - before for before, after in pairwise(times)][SKIPPED:]


def main() -> None:
    options = options_of(__doc__, workers=2, batch=32, shards=[16, 8, 4, 2], steps=20, repeats=2)
    if options.role:
        torch.set_num_threads(1)
        if options.role == "ddp":
            times = train_ddp(options.batch, options.steps)
        else:
            times = train_elastic(options.batch, options.steps, options.role, options.shards[0])
        write_figures(options, times)
        return
    ways = [("ddp", 1), ("fast", 16), *(("exact", shards) for shards in options.shards)]
    runs = by_turns(ways, options.repeats, partial(run_once, options))
    medians = {way: statistics.median(chain(*found)) * 1e3 for way, found in runs.items()}
    for (way, shards), ms in medians.items():
        show(mode=way, shards=shards, ms=ms, beside_ddp=ms / medians["ddp", 1])


if __name__ == "__main__":
    main()
