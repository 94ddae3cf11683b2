"""How long the learned policies take: one inference of the network, and one decision of a slot.

    python benchmarks/policy_inference.py [--policies dl2 lookahead dl2-original dl2-original-dense]
        [--jobs 40] [--nodes 500] [--slots 200] [--times 3] [--json]

Slots of 40 jobs of eight types, some half done, on 500 nodes of 8 CPUs and 2 GPUs with room for all: every job asks for
up to 16 workers and 16 parameter servers. `dl2-original` has a checkpoint that is made at once by 100 updates of
supervised learning from Optimus with true speeds, so that sizes are sensible; J is the number of jobs;
`dl2-original-dense` has the paper's network (two layers of 256 units over all jobs) with random weights, and takes
steps until there is no more. `dl2` has the weights that come with dl2d and the speeds in them; it and `lookahead` are
told the speeds of 25 sizes of each type and of two sizes of each job.

- slot: the same speeds in each slot.
- slot_of_a_stream: what a simulated cluster shows, of the preset `realistic` (speeds measured with noise, wrong epochs,
  interference, failures, costs of resizes): several of ten times as many jobs, the slots in which so many jobs, or up
  to a tenth more or fewer, are there. They are gone through several times, and of each slot the least counts: a
  machine on which others work, too, is half as fast for seconds now and then, which would be all that a p99 says.

An inference is one call of the network on one observation. A slot is `Packing.for_decision` and `Policy.decide`
together; garbage is collected after it, as in the daemon. Times are of this thread's processor.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dl2d.core.cluster import Node, Snapshot
from dl2d.core.decision import Decision
from dl2d.core.jobs import (
    Allocation,
    Architecture,
    Consistency,
    Job,
    JobKey,
    JobRequest,
    JobState,
    Launch,
    Owner,
    Progress,
)
from dl2d.core.measured_speeds import JobSpeeds, MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.core.packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.core.resources import Resources
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.common.checkpoint import Checkpoint
from dl2d.policies.dl2.policy import with_checkpoint
from dl2d.policies.dl2_paper import policy as dl2_paper
from dl2d.policies.lookahead import Lookahead
from dl2d.simulation.replay import replay
from dl2d.simulation.simulation_presets import PresetName, preset
from dl2d.simulation.speeds.model_profiles import load_profile, profile_names
from dl2d.simulation.workload.generators import generate
from dl2d.tick.policy_call import gc_paused

MODELS = sorted(profile_names())[:8]
SIZES = [(workers, ps) for workers in (1, 2, 4, 8, 16) for ps in (1, 2, 4, 8, 16)]


def snapshot(jobs: int, nodes: int, rng: np.random.Generator) -> Snapshot:
    """A queue as it may stand in some slot, on an empty cluster."""
    queue = []
    for number in range(jobs):
        model = MODELS[int(rng.integers(len(MODELS)))]
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
    known = {model: load_profile(model).speed(Architecture.PS) for model in MODELS}

    def point(model: str, size: tuple[int, int]) -> SpeedPoint:
        return SpeedPoint(Allocation(*size), known[model].samples_per_second(*size), 3)

    # As the daemon shows them: also of kinds of which there is no job now.
    kinds = [TrainingKind(model, Architecture.PS, Consistency.SYNC) for model in sorted(known)]
    speeds = [MeasuredSpeeds(kind, tuple(point(kind.model, size) for size in SIZES)) for kind in kinds]
    shown = [
        JobSpeeds(job.key, tuple(point(job.request.model, SIZES[(place + 7 * more) % len(SIZES)]) for more in range(2)))
        for place, job in enumerate(queue)
    ]
    return Snapshot(
        60_000.0, 1, tuple(Node(f"n{number:04}", Resources.of(cpu=8, gpu=2)) for number in range(nodes)), tuple(queue),
        (), speeds=tuple(speeds), job_speeds=tuple(shown),
    )  # fmt: skip


class Timed:
    """A network whose calls are timed."""

    def __init__(self, network: dl2_paper.Network) -> None:
        self.network = network
        self.calls: list[float] = []

    def __call__(self, observations: dl2_paper.Matrix) -> dl2_paper.Matrix:
        begin = time.thread_time()
        answer = self.network(observations)
        self.calls.append(time.thread_time() - begin)
        return answer


def a_checkpoint(jobs: int) -> Checkpoint:
    """Of a network that sizes as Optimus does."""
    from dl2d.learning.dl2_paper.settings import Settings  # noqa: PLC0415 - torch takes seconds
    from dl2d.learning.dl2_paper.trainer import train  # noqa: PLC0415
    from dl2d.simulation.workload.sources import load_source  # noqa: PLC0415

    source = "generator:dl2?nodes=96&jobs=30&models=" + ",".join(MODELS)
    workloads = [load_source(source, seed=seed).workload for seed in range(6)]
    return train(workloads[:5], workloads[5:], Settings(teacher="optimus", window=jobs, iterations=0), seed=0)


def a_dense_checkpoint(jobs: int) -> Checkpoint:
    """Of the paper's network, with weights that are drawn."""
    rng, units = np.random.default_rng(0), 256
    shapes = [(jobs * (len(MODELS) + 5) + 2, units), (units, units), (units, 3 * jobs + 1)]
    weights: dict[str, NDArray[Any]] = {}
    for place, (inputs, outputs) in enumerate(shapes):
        weights[f"policy.{place}.weight"] = rng.normal(0.0, inputs**-0.5, (outputs, inputs)).astype(np.float32)
        weights[f"policy.{place}.bias"] = np.zeros(outputs, dtype=np.float32)
    weights[f"policy.{len(shapes) - 1}.bias"][-1] = -100.0
    settings = {
        "network": "dense", "window": jobs, "models": list(MODELS), "resources": ["cpu", "gpu"],
        "first_bundles": False, "extras": False, "sampled": True, "slot_seconds": 1200.0,
    }  # fmt: skip
    return Checkpoint(policy="dl2-original", weights=weights, settings=settings, training={})


#: Policies that are told speeds, and checkpoints of those that are not, for so many jobs.
MAKERS: dict[str, Callable[[], Policy]] = {"dl2": with_checkpoint, "lookahead": Lookahead}
CHECKPOINTS: dict[str, Callable[[int], Checkpoint]] = {
    "dl2-original": a_checkpoint, "dl2-original-dense": a_dense_checkpoint
}  # fmt: skip


def slots(policy: Policy, jobs: int, nodes: int, count: int) -> tuple[list[float], list[int]]:
    """Seconds of each slot, and tasks that were given in it; see ``snapshot``."""
    rng, placement = np.random.default_rng(0), LoadBalance()
    times, tasks = [], []
    for number in range(count + 5):
        seen = snapshot(jobs, nodes, rng)
        with gc_paused():
            begin = time.thread_time()
            packing = Packing.for_decision(seen.nodes, seen.tasks, placement)
            decision = policy.decide(seen, packing, np.random.default_rng(number))
            times.append(time.thread_time() - begin)
        tasks.append(sum(sum(each.allocation) for each in decision.jobs))
    # The first ones fill caches.
    return times[5:], tasks[5:]


class TimedPolicy:
    """A policy whose decisions are timed, those on about so many jobs."""

    def __init__(self, policy: Policy, placement: Placement, jobs: int) -> None:
        self._policy = policy
        self._placement = placement
        self._jobs = jobs
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        begin = time.thread_time()
        # Once more what was made for it, to be timed with it.
        packing = Packing.for_decision(snapshot.nodes, snapshot.tasks, self._placement)
        decision = self._policy.decide(snapshot, packing, rng)
        if 0.9 * self._jobs <= len(snapshot.jobs) <= 1.1 * self._jobs:
            self.seconds.append(time.thread_time() - begin)
        return decision


def streams(policy: Policy, jobs: int, nodes: int, count: int) -> list[float]:
    """Seconds of so many decisions or some more with about so many jobs, of simulated streams: always the same ones."""
    # Jobs stay about six slots.
    settings = {"jobs": f"{10 * jobs}", "nodes": f"{nodes}", "models": ",".join(MODELS), "cap": f"{max(jobs // 6, 1)}"}
    rules = preset(PresetName.REALISTIC)
    placement = rules.placement_of(policy.name)
    timed = TimedPolicy(policy, placement, jobs)
    seeds = itertools.count(1)
    while len(timed.seconds) < count:
        known = generate("dl2", settings, np.random.default_rng(next(seeds)))
        replay(known, timed, placement, rules=rules.rules, timer=time.perf_counter)
    return timed.seconds


def milliseconds(seconds: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    p50, p99 = (1e3 * float(value) for value in np.percentile(seconds, [50, 99]))
    return {"p50_ms": round(p50, 3), "p99_ms": round(p99, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=[*MAKERS, *CHECKPOINTS], default=[*MAKERS, *CHECKPOINTS])
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--slots", type=int, default=200)
    parser.add_argument("--times", type=int, default=3, help="how often streams are gone through (default: 3)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    for name in options.policies:
        entry: dict[str, object] = {}
        if name in MAKERS:
            policy = MAKERS[name]()
        else:
            policy = dl2_paper.Dl2Original(CHECKPOINTS[name](options.jobs))
            # Timed apart, so that its timer is in no slot's time.
            timed = Timed(policy.network)
            policy.network = timed
            count = max(options.slots // 4, 10)
            slots(policy, options.jobs, options.nodes, count)
            policy.network = timed.network
            entry = {"inference": milliseconds(timed.calls[100:])}
            entry["inferences_a_slot"] = round(len(timed.calls) / (count + 5), 1)
        times, tasks = slots(policy, options.jobs, options.nodes, options.slots)
        found[name] = {**entry, "slot": milliseconds(times), "tasks_a_slot": round(float(np.mean(tasks)), 1)}
        if name in MAKERS:
            runs = [streams(MAKERS[name](), options.jobs, options.nodes, options.slots) for _ in range(options.times)]
            found[name]["slot_of_a_stream"] = milliseconds(np.min(runs, axis=0))
    if options.json:
        print(json.dumps(found))
        return
    for name, entry in found.items():
        print(name, ", ".join(f"{key} {value}" for key, value in entry.items()))


if __name__ == "__main__":
    main()
