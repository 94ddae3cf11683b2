"""How long a replay takes: a whole workload through the daemon's tick in virtual time.

    python benchmarks/simulation_replay.py [--policies fifo srtf ...] [--sizes 60x96 1000x500] [--repeats 3] [--json]

Jobs of the generator `dl2`: eight types that come in bursts and in two waves, with up to 16 workers (2 CPUs and 4 GPU
slots each, two of the types without GPUs) and 16 PSs (2 CPUs each) on nodes of 8 CPUs and 8 GPU slots, as in the
simulator of DL2's authors; 60 jobs come at most 3 a slot, 1,000 at most 10. Each policy runs on a cluster that is kept
from slot to slot, as `dl2d simulate` does it, those of the preset `dl2-paper` by its rules, and all on the preset
`realistic`. A time is the least of the repeats.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dl2d.core.resources import Resources
from dl2d.placement.load_balance import LoadBalance
from dl2d.simulation.policy_lookup import find_policy
from dl2d.simulation.replay import Replayed, Rules, replay
from dl2d.simulation.simulation_presets import Preset, PresetName, preset
from dl2d.simulation.workload.format import Workload
from dl2d.simulation.workload.generators import generate

MODELS = "bert,cnn-text-classification,dssm,gpt-2,inception-bn,inception-v3,resnet-50,resnext-110"
PRESETS = {
    "none": Preset(Rules(), LoadBalance(), {}),
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


def least(run: Callable[[], Replayed], repeats: int) -> tuple[float, Replayed]:
    """Least time of some runs, and the last one's result."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - begin)
    return min(times), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["fifo", "srtf", "drf"])
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--sizes", nargs="+", metavar="JOBSxNODES", default=["60x96", "1000x500"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for size in options.sizes:
        jobs, nodes = map(int, size.split("x"))
        known = workload(jobs, nodes)
        for name in options.policies:
            for chosen in options.presets:
                rules = PRESETS[chosen]

                def run(name: str = name, rules: Preset = rules, known: Workload = known) -> Replayed:
                    policy = find_policy(name, known, rules)
                    placement = rules.placement_of(name)
                    return replay(known, policy, placement, rules=rules.rules, timer=time.perf_counter)

                took, result = least(run, options.repeats)
                row = {
                    "jobs": jobs, "nodes": nodes, "policy": name, "preset": chosen, "seconds": took,
                    "slots": result.slots, "avg_jct_slots": result.avg_jct,
                }  # fmt: skip
                rows.append(row)
                if not options.json:
                    if len(rows) == 1:
                        print(
                            f"{'jobs':>5}{'nodes':>6}  {'policy':14}{'preset':11}{'seconds':>8}{'slots':>7}{'JCT':>9}"
                        )
                    text = f"{jobs:5}{nodes:6}  {name:14}{chosen:11}{took:8.3f}{result.slots:7}{result.avg_jct:9.3f}"
                    print(text, flush=True)
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
