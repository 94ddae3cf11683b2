"""Learning speeds on one live cluster: a stream of jobs for days, and no table of speeds.

    python benchmarks/live.py [--policies lookahead lookahead-fit optimus drf] [--nodes 96 24] [--slots 216]
        [--history 72] [--seeds 0 1 2] [--tables FILE.json] [--noise 0.05] [--drift-at 144] [--resize-costs]
        [--new-type-at 108] [--json FILE]

About 2.6 jobs come in each slot of 20 minutes, each of a type drawn at random. Types are those of the generator `dl2`
as `benchmarks/replay.py` has them (shipped profiles), or with `--tables` those of a workload file: its speeds, and of
each model the file's first job. Rules are those of the preset `dl2-paper` but for the kept cluster with
`--resize-costs`. For the first `--history` slots DRF schedules, then the policy, which sees the speeds that the jobs
reported so far and no others.

For each policy: mean JCT of the jobs that arrived in each window of 36 slots, over the ceiling (what the jobs would
take at their best sizes alone on 48 nodes and more, else lookahead with the true speeds); the worst mean of 12 slots
over DRF's; and the slot from which its speed stays above that of Optimus with true speeds. Speed is the mean over all
jobs that are there of their speed over the best of their type, in windows of 12 slots. Windows are counted from the
end of the history.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Decision
from dl2d.core.jobs import Architecture, Job
from dl2d.core.packing import Packing
from dl2d.core.policy import Evidence, Policy
from dl2d.core.resources import Resources
from dl2d.daemon.plugins import load_policy
from dl2d.placement.dl2_paper import Dl2Paper
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf
from dl2d.policies.lookahead import Lookahead
from dl2d.policies.optimus import Optimus
from dl2d.simulation.generators import generate
from dl2d.simulation.realism import REALISTIC, Realism
from dl2d.simulation.replay import Replayed, Rules, replay
from dl2d.simulation.speeds import SpeedModel
from dl2d.simulation.workload import NodeGroup, SimulatedJob, Workload, read_workload

MODELS = "bert,cnn-text-classification,dssm,gpt-2,inception-bn,inception-v3,resnet-50,resnext-110"
SLOT = 1200.0
#: Windows of arrivals and of speeds, in slots.
LONG, SHORT = 36, 12
#: Nodes from which on jobs do not wait for each other at their best sizes.
ROOMY = 48


class Clock:
    """The slot that a replay is in, for speeds that change."""

    def __init__(self) -> None:
        self.slot = 0


@dataclass(frozen=True)
class Drifting:
    """A speed model that is faster or slower by a factor from some slot on."""

    model: SpeedModel
    factor: float
    at: int
    clock: Clock

    @property
    def architecture(self) -> Architecture:
        return self.model.architecture

    @property
    def batch(self) -> int | None:
        return self.model.batch

    @property
    def now(self) -> float:
        return self.factor if self.clock.slot >= self.at else 1.0

    def samples_per_second(self, workers: int, ps: int) -> float:
        return self.now * self.model.samples_per_second(workers, ps)

    def grid(self, max_workers: int, max_ps: int) -> NDArray[np.float64]:
        return self.now * self.model.grid(max_workers, max_ps)

    def describe(self) -> dict[str, object]:
        return self.model.describe()


class Speeds:
    """The speeds as they are in the slot that a replay is in."""

    def __init__(self, speeds: Mapping[str, SpeedModel], clock: Clock) -> None:
        self._speeds = speeds
        self._clock = clock
        self._grids: dict[tuple[str, int, int, float], NDArray[np.float64]] = {}

    def at(self, model: str, workers: int, ps: int) -> NDArray[np.float64]:
        speed = self._speeds[model]
        now = speed.now if isinstance(speed, Drifting) else 1.0
        asked = (model, workers, ps, now)
        if asked not in self._grids:
            self._grids[asked] = speed.grid(workers, ps)
        return self._grids[asked]

    def grid(self, job: Job) -> NDArray[np.float64]:
        """See ``KnownSpeeds.grid``."""
        return self.at(job.request.model, job.request.max_workers, job.request.max_ps)


class After:
    """DRF until some slot, another policy from then on; tells the clock."""

    def __init__(self, policy: Policy, slot: int, clock: Clock) -> None:
        self._first = Drf(end_at_first_failure=True, whole_bundles=True)
        self._then = policy
        self._slot = slot
        self._clock = clock

    @property
    def name(self) -> str:
        return self._then.name

    @property
    def version(self) -> str:
        return self._then.version

    @property
    def needs(self) -> frozenset[Evidence]:
        return self._then.needs

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        self._clock.slot = round(snapshot.at / SLOT)
        now = self._first if self._clock.slot < self._slot else self._then
        return now.decide(snapshot, packing, rng)


@dataclass(frozen=True)
class Stream:
    """A workload, the clock that its speeds go by, and them."""

    workload: Workload
    clock: Clock
    speeds: Speeds


def types(tables: str | None) -> Workload:
    """A workload whose speeds, and first job of each model, are what a stream is made of."""
    if tables is not None:
        return read_workload(tables)
    settings = {"jobs": "400", "nodes": "96", "models": MODELS, "longest_slots": "8", "stretch": "16"}
    made = generate("dl2", settings, np.random.default_rng(1))
    jobs = tuple(
        replace(job, worker=Resources.of(cpu=2, gpu=4 if job.worker.get("gpu") else 0), ps=Resources.of(cpu=2))
        for job in made.jobs
    )
    return replace(made, jobs=jobs, slot_seconds=SLOT)


def stream(options: argparse.Namespace, nodes: int, seed: int) -> Stream:
    """Jobs for all slots; with equal seeds the same ones for any number of nodes."""
    made, random, clock = types(options.tables), np.random.default_rng(seed), Clock()
    first: dict[str, SimulatedJob] = {}
    for job in made.jobs:
        first.setdefault(job.model, job)
    names = sorted(first)
    late = names[int(random.integers(len(names)))]
    factors = dict(zip(names, random.uniform(0.7, 1.3, len(names)).tolist(), strict=True))
    jobs = []
    for slot in range(options.slots):
        for _ in range(int(random.poisson(options.rate))):
            model = names[int(random.integers(len(names)))]
            other = names[int(random.integers(len(names)))]
            if model == late and slot < options.new_type_at:
                model = other if other != late else names[names.index(late) - 1]
            jobs.append(replace(first[model], id=str(len(jobs) + 1), submit_slot=slot))
    speeds: dict[str, SpeedModel] = {name: made.speeds[name] for name in names}
    if options.drift_at is not None:
        speeds = {name: Drifting(speeds[name], factors[name], options.drift_at, clock) for name in names}
    cluster = (NodeGroup(nodes, Resources.of(cpu=8, gpu=8)),)
    workload = Workload(slot_seconds=SLOT, cluster=cluster, speeds=speeds, jobs=tuple(jobs))
    return Stream(workload, clock, Speeds(speeds, clock))


def run(made: Stream, policy: Policy, options: argparse.Namespace, seed: int) -> Replayed:
    """The stream under a policy, to its end."""
    made.clock.slot = 0
    realism = Realism(speed_noise=options.noise)
    if options.resize_costs:
        realism = replace(
            realism,
            start_seconds=REALISTIC.start_seconds,
            join_seconds=REALISTIC.join_seconds,
            move_seconds_per_mb=REALISTIC.move_seconds_per_mb,
        )
    return replay(
        made.workload,
        After(policy, options.history, made.clock),
        LoadBalance() if options.resize_costs else Dl2Paper(),
        rules=Rules(empty_each_slot=not options.resize_costs, realism=realism),
        seed=seed,
        timer=time.perf_counter,
        keep_series=True,
    )


def best_alone(made: Stream) -> list[float]:
    """JCT of each job, in slots, at its best size from its first slot on; the clock is put through all slots."""
    lengths = []
    for job in made.workload.jobs:
        left, slot = job.epochs * job.samples_per_epoch, job.submit_slot
        while True:
            made.clock.slot = slot
            gain = float(made.speeds.at(job.model, job.max_workers, job.max_ps).max()) * SLOT
            if gain >= left:
                lengths.append(slot - job.submit_slot + left / gain)
                break
            left, slot = left - gain, slot + 1
    return lengths


def speeds_by_slot(made: Stream, played: Replayed, slots: int) -> list[float]:
    """Mean over the jobs that are there of speed over the best of the type, in each slot."""
    assert played.series is not None
    by_slot = dict(zip(played.series.slots, played.series.allocations, strict=True))
    there: dict[int, list[tuple[SimulatedJob, str]]] = defaultdict(list)
    for job, outcome in zip(made.workload.jobs, played.jobs, strict=True):
        for slot in range(job.submit_slot, min(outcome.last_slot + 1, slots)):
            there[slot].append((job, job.id))
    means = []
    for slot in range(slots):
        made.clock.slot = slot
        parts = []
        for job, name in there[slot]:
            grid = made.speeds.at(job.model, job.max_workers, job.max_ps)
            size = by_slot.get(slot, {}).get(name)
            parts.append(float(grid[size.ps, size.workers] / grid.max()) if size is not None else 0.0)
        means.append(statistics.fmean(parts) if parts else 1.0)
    return means


def windowed(values: Sequence[float], wide: int) -> list[float]:
    """Means of so many values up to each one."""
    return [statistics.fmean(values[max(0, end - wide + 1) : end + 1]) for end in range(len(values))]


def above_from(one: Sequence[float], other: Sequence[float]) -> int | None:
    """Place from which ``one`` stays above ``other``; None where it is not above at the end."""
    below = [place for place, (mine, its) in enumerate(zip(one, other, strict=True)) if mine < its]
    start = below[-1] + 1 if below else 0
    return start if start < len(one) else None


def by_window(lengths: Sequence[float], jobs: Sequence[SimulatedJob], begin: int, wide: int) -> list[float]:
    """Mean length of the jobs that arrived in each window; of those that begin with ``begin``."""
    of: dict[int, list[float]] = defaultdict(list)
    for length, job in zip(lengths, jobs, strict=True):
        if job.submit_slot >= begin:
            of[(job.submit_slot - begin) // wide].append(length)
    return [statistics.fmean(of[window]) if of[window] else float("nan") for window in range(max(of) + 1)]


def policies(made: Stream) -> dict[str, Callable[[], Policy]]:
    """All that can be asked for beside installed ones."""
    return {
        "drf": lambda: Drf(end_at_first_failure=True, whole_bundles=True),
        "optimus-true": lambda: Optimus(known=made.speeds),
        "lookahead-true": lambda: Lookahead(known=made.speeds),
        "lookahead-fit": lambda: Lookahead(fitted=True),
        **{f"lookahead-{value}": lambda value=value: Lookahead(optimism=float(value)) for value in OPTIMISMS},
    }


OPTIMISMS = ("0", "0.25", "0.5", "1", "2")


def measure(options: argparse.Namespace, nodes: int, seed: int) -> list[dict[str, object]]:
    """A row for each policy on one stream."""
    made = stream(options, nodes, seed)
    jobs, begin = made.workload.jobs, options.history
    there = policies(made)
    played: dict[str, Replayed] = {}
    took: dict[str, float] = {}
    needed = ["drf", "optimus-true", *(["lookahead-true"] if nodes < ROOMY else [])]
    for name in dict.fromkeys([*needed, *options.policies]):
        start = time.perf_counter()
        played[name] = run(made, there[name]() if name in there else load_policy(name), options, seed)
        took[name] = time.perf_counter() - start
    jcts = {name: [job.jct for job in result.jobs] for name, result in played.items()}
    ceiling = by_window(jcts["lookahead-true"] if nodes < ROOMY else best_alone(made), jobs, begin, LONG)
    drf = by_window(jcts["drf"], jobs, begin, SHORT)
    speeds = {
        name: windowed(speeds_by_slot(made, result, options.slots)[begin:], SHORT) for name, result in played.items()
    }
    rows = []
    for name in played:
        windows = by_window(jcts[name], jobs, begin, LONG)
        worst = max(mine / its for mine, its in zip(by_window(jcts[name], jobs, begin, SHORT), drf, strict=True))
        rows.append(
            {
                "nodes": nodes,
                "seed": seed,
                "policy": name,
                "over_ceiling": [round(mine / best, 4) for mine, best in zip(windows, ceiling, strict=True)],
                "worst_over_drf": round(worst, 3),
                "above_optimus_true_from": above_from(speeds[name], speeds["optimus-true"]),
                "speed": [round(value, 3) for value in speeds[name][SHORT - 1 :: SHORT]],
                "seconds": round(took[name], 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["lookahead", "lookahead-fit"])
    parser.add_argument("--nodes", type=int, nargs="+", default=[96, 24])
    parser.add_argument("--slots", type=int, default=216, help="in which jobs come, the history's not counted")
    parser.add_argument("--history", type=int, default=0, help="slots that DRF schedules before")
    parser.add_argument("--rate", type=float, default=2.6, help="jobs a slot")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tables", help="a workload file with other types")
    parser.add_argument("--noise", type=float, default=0.0, help="speeds of a slot: x U(1 - noise, 1 + noise)")
    parser.add_argument("--drift-at", type=int, help="slot from which speeds are x U(0.7, 1.3), by type")
    parser.add_argument("--new-type-at", type=int, default=0, help="slot from which one of the types comes")
    parser.add_argument("--resize-costs", action="store_true", help="as in the preset realistic")
    parser.add_argument("--json", help="also write all rows to this file")
    options = parser.parse_args()
    options.slots += options.history
    rows = []
    print(
        f"{'nodes':>5} {'seed':>4} {'policy':15} {'worst/DRF':>9} {'above':>5} {'s':>6}  JCT over the ceiling by window"
    )
    for nodes in options.nodes:
        for seed in options.seeds:
            for row in measure(options, nodes, seed):
                rows.append(row)
                over, above = row["over_ceiling"], row["above_optimus_true_from"]
                assert isinstance(over, list)
                text = " ".join(f"{value:.3f}" for value in over)
                print(
                    f"{nodes:5} {seed:4} {row['policy']:15} {row['worst_over_drf']:9.3f} "
                    f"{'never' if above is None else above:>5} {row['seconds']:6.1f}  {text}",
                    flush=True,
                )
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
