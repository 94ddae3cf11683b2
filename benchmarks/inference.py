"""How long the learned policies take: one inference of the network, and one decision of a slot.

    python benchmarks/inference.py [--policies dl2 dl2-original] [--checkpoint FOLDER] [--jobs 40] [--nodes 500]
        [--slots 200] [--json]

Slots of 40 jobs of eight types, some half done, on 500 nodes of 8 CPUs and 2 GPUs with room for all: every job asks for
up to 16 workers and 16 parameter servers. `dl2-original` has the checkpoint, whose types the jobs are then of, or one
that is made at once by 100 updates of supervised learning from Optimus with true speeds, so that sizes are sensible; J
is the number of jobs. `dl2` has the weights that come with dl2d and knows the speeds of some sizes. An inference is one
call of the network on one observation, all of it anew; in a slot, what did not change is not worked out again. A slot
is `Packing.for_decision` and `Policy.decide` together. Times are of this thread's processor.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dl2d.core.cluster import Node, Snapshot
from dl2d.core.jobs import Allocation, Architecture, Job, JobKey, JobRequest, JobState, Launch, Owner, Progress
from dl2d.core.measured import MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.core.packing import Packing
from dl2d.core.policy import Policy
from dl2d.core.resources import Resources
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies import dl2, dl2_original
from dl2d.policies.checkpoint import Checkpoint, read_checkpoint
from dl2d.simulation.profiles import load_profile, profile_names

MODELS = sorted(profile_names())[:8]
SIZES = [(workers, ps) for workers in (1, 2, 4, 8, 16) for ps in (1, 2, 4, 8, 16)]


def snapshot(jobs: int, nodes: int, rng: np.random.Generator, models: Sequence[str]) -> Snapshot:
    """A queue as it may stand in some slot, on an empty cluster."""
    queue = []
    for number in range(jobs):
        model = models[int(rng.integers(len(models)))]
        epochs = float(rng.integers(20, 200))
        request = JobRequest(
            name="j", model=model, epochs=epochs, samples_per_epoch=10_000, steps_per_epoch=None, batch=64,
            worker=Resources.of(cpu=2, gpu=1), ps=Resources.of(cpu=1), max_workers=16, max_ps=16,
        )  # fmt: skip
        queue.append(
            Job(
                key=JobKey("c", str(number), int(rng.integers(0, 50_000))),
                request=request,
                owner=Owner("u", 1, 1),
                launch=Launch((), ""),
                state=JobState.READY,
                progress=Progress(epoch=epochs * float(rng.random()) * (number % 2)),
            )
        )
    queue.sort(key=lambda job: (job.key.submitted, int(job.key.id)))
    speeds = []
    for kind in sorted({TrainingKind.of(job.request) for job in queue if job.request.model in MODELS}):
        model = load_profile(kind.model).speed(Architecture.PS)
        points = [SpeedPoint(Allocation(*size), model.samples_per_second(*size), 3) for size in SIZES]
        speeds.append(MeasuredSpeeds(kind, tuple(points)))
    return Snapshot(
        60_000.0, 1, tuple(Node(f"n{number:04}", Resources.of(cpu=8, gpu=2)) for number in range(nodes)), tuple(queue),
        (), speeds=tuple(speeds),
    )  # fmt: skip


class Timed:
    """A network whose calls are timed."""

    def __init__(self, network: dl2_original.Network) -> None:
        self.network = network
        self.calls: list[float] = []

    def __call__(self, observations: dl2_original.Matrix) -> dl2_original.Matrix:
        begin = time.thread_time()
        answer = self.network(observations)
        self.calls.append(time.thread_time() - begin)
        return answer


def a_checkpoint(jobs: int) -> Checkpoint:
    """Of a network that sizes as Optimus does."""
    from dl2d.learning.original.settings import Settings  # noqa: PLC0415 - torch takes seconds
    from dl2d.learning.original.supervised import school_by_teacher  # noqa: PLC0415
    from dl2d.simulation.sources import load_source  # noqa: PLC0415

    source = "generator:dl2?nodes=96&jobs=30&models=" + ",".join(MODELS)
    workloads = [load_source(source, seed=seed).workload for seed in range(6)]
    settings = Settings(teacher="optimus", window=jobs)
    return school_by_teacher(workloads[:5], workloads[5:], settings, seed=0).checkpoint


def slots(
    policy: Policy, jobs: int, nodes: int, count: int, models: Sequence[str] = MODELS
) -> tuple[list[float], list[int]]:
    """Seconds of each slot, and tasks that were given in it."""
    rng, placement = np.random.default_rng(0), LoadBalance()
    times, tasks = [], []
    for number in range(count + 5):
        seen = snapshot(jobs, nodes, rng, models)
        begin = time.thread_time()
        packing = Packing.for_decision(seen.nodes, seen.tasks, placement)
        decision = policy.decide(seen, packing, np.random.default_rng(number))
        times.append(time.thread_time() - begin)
        tasks.append(sum(sum(each.allocation) for each in decision.jobs))
    # The first ones fill caches.
    return times[5:], tasks[5:]


def milliseconds(seconds: list[float]) -> dict[str, float]:
    p50, p99 = (1e3 * float(value) for value in np.percentile(seconds, [50, 99]))
    return {"p50_ms": round(p50, 3), "p99_ms": round(p99, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=["dl2", "dl2-original"], default=["dl2", "dl2-original"])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--slots", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    for name in options.policies:
        entry: dict[str, object] = {}
        models: Sequence[str] = MODELS
        if name == "dl2":
            policy: Policy = dl2.shipped()
        else:
            checkpoint = (
                read_checkpoint(options.checkpoint, policy=name) if options.checkpoint else a_checkpoint(options.jobs)
            )
            policy = dl2_original.Dl2Original(
                replace(checkpoint, settings={**checkpoint.settings, "window": options.jobs})
                if checkpoint.settings["network"] == "shared" else checkpoint
            )  # fmt: skip
            models = checkpoint.settings["models"]
            # Timed apart, so that its timer is in no slot's time.
            timed = Timed(policy.network)
            policy.network = timed
            _, tasks = slots(policy, options.jobs, options.nodes, max(options.slots // 4, 10), models)
            policy.network = timed.network
            entry = {"inference": milliseconds(timed.calls[100:])}
            steps = len(timed.calls) / (max(options.slots // 4, 10) + 5)
            entry["inferences_a_slot"] = round(steps, 1)
        times, tasks = slots(policy, options.jobs, options.nodes, options.slots, models)
        found[name] = {**entry, "slot": milliseconds(times), "tasks_a_slot": round(float(np.mean(tasks)), 1)}
    if options.json:
        print(json.dumps(found))
        return
    for name, entry in found.items():
        print(name, ", ".join(f"{key} {value}" for key, value in entry.items()))


if __name__ == "__main__":
    main()
