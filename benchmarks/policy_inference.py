"""How long a decision of a slot takes the learned policies.

    python benchmarks/policy_inference.py [--policies dl2 lookahead dl2-original] [--jobs 40] [--nodes 500]
        [--slots 200] [--times 3]

Slots are those that a simulated cluster shows, of the preset `realistic` (speeds measured with noise, wrong epochs,
interference, failures, costs of resizes): jobs of eight types that ask for up to 16 workers and 16 parameter servers,
on nodes of the generator `dl2`. There are several streams of ten times as many jobs; those slots count in which
`--jobs` jobs, or up to a tenth more or fewer, are there. They are gone through `--times` times, and of each slot the
least counts: a machine on which others work, too, is half as fast for seconds now and then, which would be all that a
p99 says.

`dl2` has the weights that come with dl2d. `dl2-original` has a checkpoint that is made at once by 100 updates of
supervised learning from Optimus with true speeds, so that sizes are sensible; J is the number of jobs.

A time is that of `Packing.for_decision` and `Policy.decide` together, of this thread's processor; `tasks` are those of
the decision.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import options_of, show

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Decision
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.policies.dl2.policy import with_checkpoint
from dl2d.policies.dl2_paper.policy import Dl2PaperPolicy
from dl2d.policies.lookahead import Lookahead
from dl2d.simulation.replay import replay
from dl2d.simulation.simulation_presets import PresetName, preset
from dl2d.simulation.speeds.model_profiles import profile_names
from dl2d.simulation.workload.generators import generate

MODELS = sorted(profile_names())[:8]


def original(jobs: int) -> Policy:
    """The paper's policy with a network that sizes as Optimus does."""
    from dl2d.learning.dl2_paper.settings import Settings  # noqa: PLC0415 - torch takes seconds
    from dl2d.learning.dl2_paper.training_loop import train  # noqa: PLC0415
    from dl2d.simulation.workload.workload_source_by_name import load_source  # noqa: PLC0415

    source = "generator:dl2?nodes=96&jobs=30&models=" + ",".join(MODELS)
    workloads = [load_source(source, seed=seed).workload for seed in range(6)]
    settings = Settings(teacher="optimus", window=jobs, iterations=0)
    return Dl2PaperPolicy(train(workloads[:5], workloads[5:], settings, seed=0))


#: Policies by name, for so many jobs.
MAKERS: dict[str, Callable[[int], Policy]] = {
    "dl2": lambda _: with_checkpoint(),
    "lookahead": lambda _: Lookahead(),
    "dl2-original": original,
}


class TimedPolicy:
    """A policy whose decisions are timed, those on about so many jobs."""

    def __init__(self, policy: Policy, placement: Placement, jobs: int) -> None:
        self._policy = policy
        self._placement = placement
        self._jobs = jobs
        self.seconds: list[float] = []
        self.tasks: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        begin = time.thread_time()
        # Once more what was made for it, to be timed with it.
        packing = Packing.for_decision(snapshot.nodes, snapshot.tasks, self._placement)
        decision = self._policy.decide(snapshot, packing, rng)
        if 0.9 * self._jobs <= len(snapshot.jobs) <= 1.1 * self._jobs:
            self.seconds.append(time.thread_time() - begin)
            self.tasks.append(sum(sum(each.allocation) for each in decision.jobs))
        return decision


def streams(policy: Policy, jobs: int, nodes: int, count: int) -> TimedPolicy:
    """The policy after so many decisions or some more with about so many jobs: always on the same simulated streams."""
    # Jobs stay about six slots.
    settings = {"jobs": f"{10 * jobs}", "nodes": f"{nodes}", "models": ",".join(MODELS), "cap": f"{max(jobs // 6, 1)}"}
    rules = preset(PresetName.REALISTIC)
    placement = rules.placement_of(policy.name)
    timed = TimedPolicy(policy, placement, jobs)
    seeds = itertools.count(1)
    while len(timed.seconds) < count:
        known = generate("dl2", settings, np.random.default_rng(next(seeds)))
        replay(known, timed, placement, rules=rules.rules, timer=time.perf_counter)
    return timed


def main() -> None:
    options = options_of(__doc__, policies=list(MAKERS), jobs=40, nodes=500, slots=200, times=3)
    for name in options.policies:
        policy = MAKERS[name](options.jobs)
        runs = [streams(policy, options.jobs, options.nodes, options.slots) for _ in range(options.times)]
        p50, p99 = (1e3 * np.percentile(np.min([run.seconds for run in runs], axis=0), [50, 99])).tolist()
        show(policy=name, p50_ms=p50, p99_ms=p99, tasks=float(np.mean(runs[0].tasks)))


if __name__ == "__main__":
    main()
