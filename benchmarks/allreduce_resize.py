"""How long does an all-reduce job stand still when a worker joins or leaves? pslite and torchrun, side by side.

    python benchmarks/allreduce_resize.py [--compute 0.3] [--scale 1] [--without-torchrun]

The model has the sizes of ResNet-50's tensors (102 MB) with momentum SGD, which every worker applies to its own copy;
gradients are added up over gloo on this machine.  Forward and backward passes are a sleep (`--compute`), since what is
measured is everything else.

pslite: workers 1 -> 2 -> 3 -> 2.  The gap of a resize is how much longer the workers that stay had between the last
step before it and the first after it, or between that one and the second (a joiner gets its state then), than the
median of the steps that follow; pauses in which the job waits for a newcomer, so as not to end before it comes, are
taken off.  What is printed as suspension is the part of the gap that pslite itself knows of.
torchrun: nodes 1 -> 2 -> 1 with an agent of its own each, `--nnodes=1:2`, a checkpoint every 10 steps, which the script
writes and loads.  The gap is the time without a finished step; steps done over are those since the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import command_of, free_port, options_of, show
from resize_suspension import scaled_resnet50
from runtime_jobs import exchange, run_job, started

from pslite.testing import Resize, pace

SCHEDULE = (Resize(8, 2, 0), Resize(22, 3, 0), Resize(36, 2, 0))
STEPS = 60
#: parts of a batch: in exact mode a worker has a forward and backward pass for each of its own
SHARDS = 4
#: steps that a join takes from when all are ready: the first after it, and the one in which the state moves
_AFFECTED = 2


def note(folder: Path, name: str, **values: Any) -> None:
    """Write a line with the time."""
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"at": time.monotonic(), **values}) + "\n")


def read(place: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; none if there is no such file yet."""
    return [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()] if place.exists() else []


# --- pslite ---------------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Be a worker."""
    folder, task = Path(options.out), os.environ["DL2_TASK"]
    note(folder, f"{task}.started")
    spec = scaled_resnet50(options.scale, STEPS, architecture="allreduce", mode=options.mode, shards=SHARDS)
    session, sums = started(spec)
    while session.version < spec.total_versions:
        begun = time.monotonic()
        pace(session.version, spec.total_versions)
        paused = time.monotonic() - begun
        time.sleep(options.compute)
        exchange(session, sums)
        note(folder, f"{task}.steps", version=session.version, paused=paused)
    session.finish()


def with_pslite(options: argparse.Namespace, mode: str, folder: Path) -> list[dict[str, Any]]:
    """Run the schedule; return what it cost."""
    result = run_job(
        command_of(options, "worker", out=folder, mode=mode), workers=1, servers=0, schedule=SCHEDULE, timeout=400
    )
    begun = {place.stem: read(place)[0]["at"] for place in folder.glob("*.started")}
    lines = {line["version"]: line for line in read(folder / "worker-0.steps")}
    ends = {version: line["at"] for version, line in lines.items()}
    took = {v: ends[v] - ends[v - 1] - lines[v]["paused"] for v in ends if v - 1 in ends}
    rows = []
    for before, plan in zip(result.plans, result.plans[1:], strict=False):
        clock = plan.first_version
        after = [took[v] for v in range(clock + _AFFECTED + 1, min(clock + 11, STEPS))]
        usual = statistics.median(after)
        row: dict[str, Any] = {
            "workers": f"{before.workers} -> {plan.workers}",
            "gap_ms": round(1e3 * max(0.0, sum(took[clock + i] - usual for i in range(1, _AFFECTED + 1)))),
            "suspension_max_ms": plan.suspension_ms.max,
            "prepare_ms": round(plan.prepare_ms),
            "step_ms": round(1e3 * usual),
        }
        if plan.added:
            coming = begun[plan.added[0]]
            joining = [took[v] for v in took if v <= clock and ends[v - 1] > coming]
            earlier = [took[v] for v in took if before.first_version + _AFFECTED < v and ends[v] < coming]
            row["steps_while_joining"] = len(joining)
            row["step_ms_before"] = round(1e3 * statistics.median(earlier)) if earlier else None
            row["step_ms_while_joining"] = round(1e3 * statistics.median(joining)) if joining else None
        rows.append(row)
    return rows


# --- torchrun -------------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Be a worker under torchrun: the same work, and what its users write to survive a resize."""
    import torch  # noqa: PLC0415  (the other roles do not need it)
    import torch.distributed as dist  # noqa: PLC0415

    folder = Path(options.out)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    size = sum(segment.size for segment in scaled_resnet50(options.scale, STEPS).segments)
    weights, velocity, step = torch.linspace(-1, 1, size), torch.zeros(size), 0
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        weights, velocity, step = saved["weights"], saved["velocity"], saved["step"]
    gradient = torch.empty_like(weights)
    while True:
        time.sleep(options.compute)
        torch.mul(weights, 0.1 / world, out=gradient)
        dist.all_reduce(gradient)
        velocity.mul_(0.9).add_(gradient)
        weights.sub_(velocity, alpha=0.01)
        step += 1
        if rank == 0:
            note(folder, "torchrun.steps", step=step, world=world)
            if step % 10 == 0:
                torch.save({"weights": weights, "velocity": velocity, "step": step}, folder / "new.pt")
                (folder / "new.pt").rename(checkpoint)


def with_torchrun(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run nodes 1 -> 2 -> 1; return what it cost."""
    worker = command_of(options, "torchrun", out=folder)
    command = [
        worker[0], "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=resize", "--max-restarts=3", *worker[1:],
    ]  # fmt: skip
    # Otherwise the newcomer fails after 60 s (torch 2.13).
    environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def agent(name: str) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(command, env=environ, stdout=log, stderr=log)

    def steps() -> list[dict[str, Any]]:
        return read(folder / "torchrun.steps")

    def until(done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 150.0
        while not done():
            if time.monotonic() > deadline:
                raise SystemExit(f"torchrun: {what} did not happen within 150 s; logs are in {folder}")
            time.sleep(0.1)

    rows = []
    agents = [agent("first")]
    try:
        until(lambda: len(steps()) >= 15, "training with one node")
        for change in ("1 -> 2", "2 -> 1"):
            world = int(change[-1])
            asked, seen = time.monotonic(), len(steps())
            if world == 2:
                agents.append(agent("second"))
            else:
                agents[1].send_signal(signal.SIGTERM)
            until(lambda s=seen, w=world: sum(x["world"] == w for x in steps()[s:]) >= 15, change)
            lines = steps()
            at = next(i for i in range(seen, len(lines)) if lines[i]["world"] == world)
            rows.append(
                {
                    "nodes": change,
                    "asked_to_first_step_s": round(lines[at]["at"] - asked, 1),
                    "gap_ms": round(1e3 * (lines[at]["at"] - lines[at - 1]["at"])),
                    "steps_done_over": lines[at - 1]["step"] + 1 - lines[at]["step"],
                }
            )
    finally:
        for process in agents:
            process.terminate()
        for process in agents:
            process.wait(60)
    return rows


def main() -> None:
    """Run everything, and print a line for each resize."""
    options = options_of(__doc__, compute=0.3, scale=1.0, without_torchrun=False, mode="exact")
    if options.role:
        (work if options.role == "worker" else train)(options)
        return
    with tempfile.TemporaryDirectory() as place:
        for way in ("exact", "fast", *(() if options.without_torchrun else ("torchrun",))):
            folder = Path(place, way)
            folder.mkdir()
            for row in with_torchrun(options, folder) if way == "torchrun" else with_pslite(options, way, folder):
                show(way=way, **row)


if __name__ == "__main__":
    main()
