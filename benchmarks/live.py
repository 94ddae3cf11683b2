"""Learning speeds on one live cluster: a stream of jobs for days, and no table of speeds.

    python benchmarks/live.py [--policies lookahead lookahead-fit optimus drf] [--nodes 96 24] [--slots 216]
        [--history 72] [--seeds 0 1 2] [--tables FILE.json] [--noise 0.05] [--drift-at 144] [--resize-costs]
        [--new-type-at 108] [--wrong-labels 0.1] [--json FILE]

About 2.6 jobs come in each slot of 20 minutes, each of a type drawn at random. Types are those of the generator `dl2`
as `benchmarks/replay.py` has them (shipped profiles), or with `--tables` those of a workload file: its speeds, and of
each model the file's first job. Rules are those of the preset `dl2-paper` but for the kept cluster with
`--resize-costs`. For the first `--history` slots DRF schedules, then the policy, which sees the speeds that the jobs
reported so far and no others.

For each policy: mean JCT of the jobs that arrived in each window of 36 slots, over the ceiling (what the jobs would
take at their best sizes alone on 48 nodes and more, else lookahead with the true speeds); the worst mean of 12 slots
over DRF's; and the slot from which its speed stays above that of Optimus with true speeds. Speed is the mean over all
jobs that are there of their speed over the best of their type, in windows of 12 slots. Windows are counted from the
end of the history. With `--new-type-at` (a slot, the history's counted), after how many slots with jobs of the late
type their mean speed, over five of them, is within 10 % of the best.
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
from dl2d.core.jobs import Allocation, Architecture, Job
from dl2d.core.measured import MeasuredSpeeds, SpeedPoint, TrainingKind
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
#: Between the type of a job and what its user says it is.
_AS = " as "


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
        # One that is told the speeds is told those of the job itself.
        return now.decide(as_labelled(snapshot) if self._then.needs else snapshot, packing, rng)


def as_labelled(snapshot: Snapshot) -> Snapshot:
    """The snapshot with the types that users say (``TRUE as SAID``), and what was measured under each."""
    if not any(_AS in job.request.model for job in snapshot.jobs):
        return snapshot
    jobs = tuple(
        replace(job, request=replace(job.request, model=job.request.model.split(_AS)[-1])) for job in snapshot.jobs
    )
    found: dict[TrainingKind, dict[Allocation, SpeedPoint]] = defaultdict(dict)
    for speeds in snapshot.speeds:
        points = found[speeds.kind._replace(model=speeds.kind.model.split(_AS)[-1])]
        for point in speeds.points:
            other = points.get(point.allocation, SpeedPoint(point.allocation, 0.0, 0))
            times = point.measurements + other.measurements
            total = point.samples_per_second * point.measurements + other.samples_per_second * other.measurements
            points[point.allocation] = SpeedPoint(point.allocation, total / times, times)
    merged = [MeasuredSpeeds(kind, tuple(points[size] for size in sorted(points))) for kind, points in found.items()]
    return replace(snapshot, jobs=jobs, speeds=tuple(sorted(merged, key=lambda speeds: speeds.kind)))


@dataclass(frozen=True)
class Stream:
    """A workload, the clock that its speeds go by, and them."""

    workload: Workload
    clock: Clock
    speeds: Speeds
    #: Type that comes late.
    late: str


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
    jobs: list[SimulatedJob] = []
    for slot in range(options.slots):
        for _ in range(int(random.poisson(options.rate))):
            model = names[int(random.integers(len(names)))]
            other = names[int(random.integers(len(names)))]
            if model == late and slot < options.new_type_at:
                model = other if other != late else names[names.index(late) - 1]
            wrong = other != model and random.random() < options.wrong_labels
            name = f"{model}{_AS}{other}" if wrong else model
            jobs.append(replace(first[model], id=str(len(jobs) + 1), submit_slot=slot, model=name))
    speeds: dict[str, SpeedModel] = {name: made.speeds[name] for name in names}
    if options.drift_at is not None:
        speeds = {name: Drifting(speeds[name], factors[name], options.drift_at, clock) for name in names}
    speeds |= {job.model: speeds[job.model.split(_AS)[0]] for job in jobs}
    cluster = (NodeGroup(nodes, Resources.of(cpu=8, gpu=8)),)
    workload = Workload(slot_seconds=SLOT, cluster=cluster, speeds=speeds, jobs=tuple(jobs))
    return Stream(workload, clock, Speeds(speeds, clock), late)


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


def parts_of_best(made: Stream, played: Replayed, slots: int) -> list[list[tuple[str, float]]]:
    """In each slot type and speed, over the best of the type, of the jobs that are there."""
    assert played.series is not None
    by_slot = dict(zip(played.series.slots, played.series.allocations, strict=True))
    there: dict[int, list[SimulatedJob]] = defaultdict(list)
    for job, outcome in zip(made.workload.jobs, played.jobs, strict=True):
        for slot in range(job.submit_slot, min(outcome.last_slot + 1, slots)):
            there[slot].append(job)
    parts: list[list[tuple[str, float]]] = []
    for slot in range(slots):
        made.clock.slot = slot
        parts.append([])
        for job in there[slot]:
            grid = made.speeds.at(job.model, job.max_workers, job.max_ps)
            size = by_slot.get(slot, {}).get(job.id)
            parts[-1].append((job.model, float(grid[size.ps, size.workers] / grid.max()) if size is not None else 0.0))
    return parts


def learned_after(parts: Sequence[Sequence[tuple[str, float]]], model: str) -> int | None:
    """Slots with jobs of a type until the mean speed of those, over five slots, is within 10 % of the type's best."""
    means = [
        statistics.fmean(part for name, part in slot if name == model)
        for slot in parts
        if any(name == model for name, _ in slot)
    ]
    return next((place for place in range(len(means) - 4) if statistics.fmean(means[place : place + 5]) >= 0.9), None)


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
    parts = {name: parts_of_best(made, result, options.slots) for name, result in played.items()}
    speeds = {
        name: windowed([statistics.fmean([part for _, part in slot] or [1.0]) for slot in slots[begin:]], SHORT)
        for name, slots in parts.items()
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
                "late_type_learned_after": learned_after(parts[name], made.late) if options.new_type_at else None,
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
    parser.add_argument("--wrong-labels", type=float, default=0.0, help="share of jobs that say they are of any type")
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
                if options.new_type_at:
                    text += f"   late type learned after {row['late_type_learned_after']} slots"
                print(
                    f"{nodes:5} {seed:4} {row['policy']:15} {row['worst_over_drf']:9.3f} "
                    f"{'never' if above is None else above:>5} {row['seconds']:6.1f}  {text}",
                    flush=True,
                )
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
