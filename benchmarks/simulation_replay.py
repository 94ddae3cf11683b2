"""How long a replay takes: a whole workload through the daemon's tick in virtual time.

    python benchmarks/simulation_replay.py [--policies fifo srtf ...] [--sizes 60x96 1000x500] [--repeats 3]

Jobs of the generator `dl2`: eight types that come in bursts and in two waves, with up to 16 workers (2 CPUs and 4 GPU
slots each, two of the types without GPUs) and 16 PSs (2 CPUs each) on nodes of 8 CPUs and 8 GPU slots, as in the
simulator of DL2's authors; 60 jobs come at most 3 a slot, 1,000 at most 10. Each policy runs on a cluster that is kept
from slot to slot, as `dl2d simulate` does it, those of the preset `dl2-paper` by its rules, and all on the preset
`realistic`. A time is the least of the repeats.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
from harness import options_of, show

from dl2d.core.resources import Resources
from dl2d.simulation.policy_by_name import find_policy
from dl2d.simulation.replay import replay
from dl2d.simulation.simulation_presets import PresetName, preset
from dl2d.simulation.workload.generators import generate
from dl2d.simulation.workload.workload_file import Workload

MODELS = "bert,cnn-text-classification,dssm,gpt-2,inception-bn,inception-v3,resnet-50,resnext-110"
PRESETS = {
    "none": preset(None),
    "dl2-paper": preset(PresetName.DL2_PAPER),
    "realistic": preset(PresetName.REALISTIC),
}


def workload(jobs: int, nodes: int) -> Workload:
    """Jobs of the generator, with the demands of DL2's testbed."""
    settings = {
        "jobs": f"{jobs}", "nodes": f"{nodes}", "models": MODELS, "cap": "3" if jobs < 200 else "10",
        "longest_slots": "40", "stretch": "16",
    }  # fmt: skip
    made = generate("dl2", settings, np.random.default_rng(1))
    return replace(
        made,
        cluster=tuple(replace(group, resources=Resources.of(cpu=8, gpu=8)) for group in made.cluster),
        jobs=tuple(
            replace(job, worker=Resources.of(cpu=2, gpu=4 if job.worker.get("gpu") else 0), ps=Resources.of(cpu=2))
            for job in made.jobs
        ),
    )


def main() -> None:
    options = options_of(
        __doc__, policies=["fifo", "srtf", "drf"], presets=list(PRESETS), sizes=["60x96", "1000x500"], repeats=3
    )
    for size, name, chosen in itertools.product(options.sizes, options.policies, options.presets):
        known, rules, times = workload(*map(int, size.split("x"))), PRESETS[chosen], []
        for _ in range(options.repeats):
            begin = time.perf_counter()
            policy, placement = find_policy(name, known, rules), rules.placement_of(name)
            result = replay(known, policy, placement, rules=rules.rules, timer=time.perf_counter)
            times.append(time.perf_counter() - begin)
        show(size=size, policy=name, preset=chosen, seconds=min(times), slots=result.slots, avg_jct=result.avg_jct)


if __name__ == "__main__":
    main()
