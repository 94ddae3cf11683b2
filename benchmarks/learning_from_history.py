"""Imitation of a recorded scheduler, and learning after it: mean completion times beside the scheduler's own.

    python benchmarks/learning_from_history.py [--teachers fifo drf srtf static] [--designs dl2 dl2-original]
        [--nodes 2] [--load 1] [--jobs 110] [--rounds 40] [--weeks 0] [--tests 6] [--floors] [--seed 0]

As figure 10 of the DL2 paper. A scheduler decides for some days on a made-up site of `--nodes` nodes and is recorded in
a store as in mode `observe`; `static` gives each job a fixed size by its model, first come, first served. The site's
models have names that no checkpoint knows. Each policy then decides on workloads of other seeds with the true speeds,
of which it sees only what jobs report. A change is that of the mean completion time compared with the recorded
scheduler on the same workloads: the mean of the logarithm over workloads, with its 95 % interval. With `--load L`, L
times as many jobs come in an hour, to the store and in the workloads: with 2, jobs wait for long. With `--floors`, the
workloads are replayed, for the scheduler too, while running jobs keep their minimum size, as in mode `live`.

- imitation: what `dl2d train supervised` learns; of dl2 the fitted weights, whatever the gate says
- warm start: dl2 as `dl2d train supervised` writes it, with the speeds of the store; its weights are the fitted ones if
  they pass the gate against those that come with dl2d, otherwise the latter
- imitation, then learning: as one night of the learner, `--rounds` rounds (dl2-original) or iterations (dl2, which
  begins with the warm start); with 0, nothing but imitation is tested
- own weeks: dl2-original, which imitates at first, decides on `--weeks` times `--jobs` jobs more (`exploration: 0.1`),
  and after each learns for a night from all that was recorded, as a live site does; tested without exploration
- learning alone: the same from drawn weights (dl2-original) or the initial weights of a search (dl2)
- as shipped: dl2 with the weights that come with dl2d
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from harness import options_of, show

from dl2d.cli.policy_trials.train_on_site_records import TwinSettings, learn
from dl2d.cli.policy_trials.trial_on_recorded_days import TrialPolicy, on_trial, policy_of, recorded_days
from dl2d.config.settings import Settings
from dl2d.core.cluster import Snapshot
from dl2d.core.confidence_interval import estimate
from dl2d.core.decision import Constraint, Decision, Reason
from dl2d.core.jobs import NOTHING, Allocation
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy import NO_EVIDENCE, Policy
from dl2d.learning.dl2.supervised import imitate_with_scorer
from dl2d.learning.dl2_paper.imitation_learning import imitate_recordings
from dl2d.learning.dl2_paper.settings import SITE
from dl2d.learning.dl2_paper.settings import Settings as PaperSettings
from dl2d.learning.dl2_paper.training_loop import train
from dl2d.learning.site_records.recorded_decisions import Recording
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.common.checkpoint import Checkpoint, write_checkpoint
from dl2d.policies.common.greedy_allocation import GreedyAllocation
from dl2d.policies.dl2.policy import Dl2, with_checkpoint
from dl2d.policies.dl2.scoring import initial_weights
from dl2d.policies.dl2_paper.policy import Dl2PaperPolicy
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.policies.srtf import Srtf
from dl2d.simulation.replay import Rules, replay
from dl2d.simulation.workload.workload_file import Workload
from dl2d.simulation.workload.workload_source_by_name import load_source
from dl2d.store.sql_store import SqlStore

# isort: split
from recorded_site import MONDAY, record

SLOT, DAY = 1200.0, 86_400.0
EXPLORATION = 0.1
POLICIES: dict[str, Callable[[Checkpoint], Policy]] = {"dl2": Dl2, "dl2-original": Dl2PaperPolicy}


class Static:
    """A fixed size for each model, whole or not at all, in the order of submission. Implements `Policy`."""

    name, version, needs = "static", "1", NO_EVIDENCE

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        del rng
        allocation, blocked = GreedyAllocation(snapshot, packing), False
        for job in sorted(snapshot.jobs, key=lambda job: allocation.held[job.key] == NOTHING):
            request = job.request
            count = (1, 2, 4)[sum(request.model.encode()) % 3]
            size = Allocation(max(min(count, request.max_workers), request.min_workers), min(count, request.max_ps))
            blocked = blocked or allocation.add(job, size.beyond(allocation.allocations[job.key])) is not None
            allocation.refuse(job, Reason(Constraint.QUEUE, "as its user asked, in its turn"))
        return allocation.decision(self)


TEACHERS: dict[str, Callable[[], Policy]] = {"fifo": Fifo, "drf": Drf, "srtf": Srtf, "static": Static}


def a_workload(nodes: int, load: float, jobs: int, seed: int) -> Workload:
    """The load of a node is the same for each number of nodes."""
    source = (
        f"generator:poisson?nodes={nodes}&jobs={jobs}&rate={load * nodes / 8:g}&median_seconds=9000&most_gpus=4"
        f"&slot_seconds={SLOT:g}"
    )
    made = load_source(source, seed=seed).workload
    return replace(
        made,
        speeds={f"site-{model}": speed for model, speed in made.speeds.items()},
        jobs=tuple(replace(job, model=f"site-{job.model}") for job in made.jobs),
    )


def untold(*_: object, **__: object) -> None:
    """Show no progress."""


def learned(options: argparse.Namespace, url: str, folder: Path, design: str) -> dict[str, Checkpoint]:
    """The checkpoints that are compared, by what they learned from."""
    made = partial(a_workload, options.nodes, options.load)
    with closing(SqlStore(url)) as store:
        slots = [slot for each in reversed(store.slots(limit=5000)) if (slot := store.slot(each.number)) is not None]
        days, seed = int((slots[-1].at - MONDAY) // DAY), options.seed
        recordings = [Recording(slot.snapshot, slot.decision, LoadBalance()) for slot in slots]
        split = recorded_days(
            site(url, design, folder), store, now=MONDAY + days * DAY, seed=seed, tell=untold,
            expected_speeds=design != "dl2",
        )  # fmt: skip

        def night(start: Checkpoint, name: str, days: int = days) -> Checkpoint:
            write_checkpoint(start, folder / name / "start")
            settings = site(url, design, folder / name / "start")
            chosen = TwinSettings(iterations=options.rounds, days=None, minutes=30.0, seed=seed, gate=False)
            now = MONDAY + days * DAY
            return learn(settings, store, design, chosen, tell=untold, now=now).checkpoint

        if design == "dl2":
            own, speeds = with_checkpoint().checkpoint, store.history(MONDAY, MONDAY + days * DAY).speeds
            held_out = split.held_out_times
            others = [each for each in recordings if not any(a <= each.snapshot.at < b for a, b in held_out)]
            both = imitate_with_scorer(others, own, speeds, slot_seconds=SLOT, seed=seed)
            settings, imitated = site(url, design, folder), both.fitted
            sides = [TrialPolicy(each.digest, policy_of(settings, each)) for each in (imitated, both.begun_with)]
            passed = on_trial(settings, design, split, *sides, tell=untold).passed
            found = {"warm start": imitated if passed else both.begun_with, "as shipped": own}
            if not options.rounds:
                return {"imitation": imitated, **found}
            drawn = initial_weights(0, np.random.default_rng(seed))
            alone = night(replace(own, weights={**own.weights, "scorer": drawn}), "alone")
            after = night(found["warm start"], "after")
        else:
            paper = replace(PaperSettings(teacher=""), supervised_updates=400)
            imitated = imitate_recordings(
                recordings, paper, slot_seconds=SLOT, seed=seed, workloads=split.training
            ).checkpoint
            if not options.rounds:
                return {"imitation": imitated}
            how = replace(SITE, iterations=options.rounds)
            alone, found = train(split.training, split.validation, how, seed=seed), {}
            after, live = night(imitated, "after"), imitated
            # From now on the store has speeds of sizes that the recorded scheduler does not give.
            for week in range(1, options.weeks + 1):
                more, number = made(options.jobs, 500 + 100 * seed + week), store.last_slot_number() + 1
                deciding = Dl2PaperPolicy(live, exploration=EXPLORATION)
                record(url, more, deciding, begin=MONDAY + days * DAY, first_slot=number)
                days = math.ceil((store.slots(limit=1)[0].at - MONDAY) / DAY)
                live = night(live, f"week {week}", days)
                found[f"own weeks: {week}"] = live
        return {"imitation": imitated, "imitation, then learning": after, "learning alone": alone, **found}


def site(url: str, design: str, checkpoint: Path) -> Settings:
    return Settings.model_validate({
        "policy": {"name": design, "checkpoint": str(checkpoint)}, "store": {"url": url},
        "schedule": {"slot_seconds": SLOT}, "learning": {"gate_min_days": 2},
    })  # fmt: skip


def main() -> None:
    options = options_of(
        __doc__, teachers=list(TEACHERS), designs=list(POLICIES), nodes=2, load=1.0, jobs=110, rounds=40, weeks=0,
        tests=6, floors=False, seed=0,
    )  # fmt: skip
    made, jct = partial(a_workload, options.nodes, options.load), partial(mean_jct, rules=Rules(floors=options.floors))
    tests = [made(20 * options.nodes, 1000 + 100 * options.seed + number) for number in range(options.tests)]
    for teacher in options.teachers:
        with tempfile.TemporaryDirectory() as name:
            url = f"sqlite:///{name}/dl2d.sqlite"
            record(url, made(options.jobs, options.seed), TEACHERS[teacher](), decided_by="observed")
            base = [jct(workload, TEACHERS[teacher]()) for workload in tests]
            for design in options.designs:
                begin = time.process_time()
                checkpoints = learned(options, url, Path(name) / design, design)
                seconds = time.process_time() - begin
                for way, checkpoint in checkpoints.items():
                    times = [jct(workload, POLICIES[design](checkpoint)) for workload in tests]
                    over = estimate([math.log(own / other) for own, other in zip(times, base, strict=True)])
                    change, low, high = (math.expm1(each) for each in (over.mean, *(over.interval or (0.0, 0.0))))
                    show(teacher=teacher, teacher_jct=np.mean(base), design=design, way=way, change=change, low=low,
                         high=high, learned_in_cpu_s=seconds)  # fmt: skip


def mean_jct(workload: Workload, policy: Policy, rules: Rules) -> float:
    return replay(workload, policy, LoadBalance(), rules=rules, timer=time.process_time).avg_jct


if __name__ == "__main__":
    main()
