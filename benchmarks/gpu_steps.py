"""Training steps a second of a model on a GPU: PyTorch alone, and as elastic jobs whose workers share the GPU.

    python benchmarks/gpu_steps.py [--models perceptron resnet50] [--sizes 1,1 2,1 2,2 2,0] [--steps 60] [--repeats 1]

The models are a perceptron of 76 MB (a batch of 256, float32) and ResNet-50 (102 MB, a batch of 128, under autocast to
bfloat16; needs torchvision), with momentum SGD.  The samples are on the GPU already.  `torch` is PyTorch alone, `alone`
an elastic job in one process, `1,1` one of a worker and a server (0 servers: all-reduce), in fast mode.  The first ten
steps do not count.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from harness import by_turns, measured, options_of, show, write_figures
from runtime_jobs import run_job
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from pslite.torch import SGD, ElasticJob

SKIPPED = 10
LR, MOMENTUM = 0.01, 0.9
BATCHES = {"perceptron": 256, "resnet50": 128}


def perceptron() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((1024, 3072, 3072, 2048, 100)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def made(name: str) -> tuple[nn.Module, TensorDataset]:
    """A model on the GPU, and four batches of its samples."""
    torch.manual_seed(0)
    samples = 4 * BATCHES[name]
    if name == "resnet50":
        import torchvision  # noqa: PLC0415

        net, shape, classes = torchvision.models.resnet50(), (3, 224, 224), 1000
    else:
        net, shape, classes = perceptron(), (1024,), 100
    data = torch.randn(samples, *shape, device="cuda"), torch.randint(0, classes, (samples,), device="cuda")
    return net.to("cuda"), TensorDataset(*data)


def train(name: str, steps: int, *, elastic: bool) -> dict[str, float]:
    """Return the steps a second, and the GPU memory that this process has had at most."""
    net, data = made(name)
    batch, began = BATCHES[name], 0.0

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=name == "resnet50"):
            return cross_entropy(net(inputs), targets)

    def note(step: int) -> None:
        nonlocal began
        if step == SKIPPED:
            torch.cuda.synchronize()
            began = time.monotonic()

    if elastic:
        job = ElasticJob(
            net, optimizer=SGD(lr=LR, momentum=MOMENTUM), dataset=data, batch_size=batch, epochs=-(-steps // 4)
        )
        for version, parts in enumerate(job.steps()):
            note(version)
            for inputs, targets in parts:
                job.backward(loss_of(inputs, targets))
        steps = job.total_versions
    else:
        optimizer = torch.optim.SGD(net.parameters(), LR, MOMENTUM)
        for step in range(steps):
            note(step)
            inputs, targets = data[torch.randperm(len(data), device="cuda")[:batch]]
            optimizer.zero_grad()
            loss_of(inputs, targets).backward()
            optimizer.step()
        torch.cuda.synchronize()
    return {
        "steps_per_s": (steps - SKIPPED) / (time.monotonic() - began),
        "gpu_mb": torch.cuda.max_memory_allocated() / 1e6,
    }


def run_once(options: Any, name: str, way: str) -> dict[str, float]:
    """Return what the first worker, or the only process, has measured."""

    def start(command: list[str]) -> None:
        if way in ("torch", "alone"):
            subprocess.run(command, env={**os.environ, "DL2_QUIET": "1"}, check=True)
        else:
            workers, servers = map(int, way.split(","))
            run_job(command, workers=workers, servers=servers, timeout=240, settings={"balance": "even"})

    found: dict[str, float] = measured(options, "torch" if way == "torch" else "elastic", start, models=[name])[1]
    return found


def main() -> None:
    options = options_of(
        __doc__, models=["perceptron", "resnet50"], sizes=["1,1", "2,1", "2,2", "2,0"], steps=60, repeats=1
    )
    if options.role:
        write_figures(options, train(options.models[0], options.steps, elastic=options.role == "elastic"))
        return
    show(gpu=torch.cuda.get_device_name(), torch=torch.__version__)
    for name in options.models:
        ways = ("torch", "alone", *options.sizes)
        for way, runs in by_turns(ways, options.repeats, partial(run_once, options, name)).items():
            speed = statistics.median(run["steps_per_s"] for run in runs)
            show(model=name, way=way, steps_per_s=speed, ms=1e3 / speed, gpu_mb=runs[-1]["gpu_mb"])


if __name__ == "__main__":
    main()
