"""Learning speeds on one live cluster: a stream of jobs for days, no table of speeds, and a verdict for each bar.

    python benchmarks/live_learning.py [--policies dl2 lookahead] [--nodes 96 24] [--seeds 0 1 2 3 4]
        [--scenarios plain noise drift wrong-labels resize-costs new-type] [--tables FILE.json]

About 2.6 jobs come in each slot of 20 minutes, each of a type drawn at random. Types are those of the generator `dl2`
as `benchmarks/simulation_replay.py` has them (shipped profiles), or with `--tables` those of a workload file: its
speeds, and of each model the file's first job. Rules are those of the preset `dl2-paper` but for the kept cluster with
resize costs. For the first 72 slots (the history) DRF schedules, then for 216 slots the policy, which sees the speeds
that the jobs reported so far and no others: `dl2` has the weights that come with dl2d without their speeds.

| scenario | what is other than plain |
|---|---|
| noise | the speed of a job in a slot is x U(0.95, 1.05) |
| drift | overnight (108 slots after the history) every type gets faster or slower by 30 % |
| wrong-labels | a tenth of the jobs say that they are of another type |
| resize-costs | those of the preset `realistic`, on a cluster that is kept from slot to slot |
| new-type | one of the types comes from slot 36 after the history on |

Bars, on the jobs that come after the history; each is judged in every stream, and met where it is met in all:

- above (48 nodes and more): slot from which its speed stays above that of Optimus with true speeds: 20 at most. That is
  the mean over all jobs there are of their speed over the best of their type, in windows of 12 slots.
- optimus (fewer nodes): speed of Optimus with true speeds from slot 20 on over its own: 1 at most. (There, whoever has
  fewer jobs waiting is ahead for some hours: lookahead with true speeds itself falls back in single windows.)
- ceiling: mean JCT of the jobs from slot 72 on, over what they would take at their best sizes alone (48 nodes and
  more), or under lookahead with the true speeds: 1.03 at most.
- drf: the worst window of 12 slots of arrivals, mean JCT over that under DRF: 0.9 at most.
- slower (48 nodes and more): share of the jobs that take more than 1.1 times as long as under DRF: under 5 %.
- new type (48 nodes and more): slots with jobs of the new type until their mean speed, over five such slots, is within
  10 % of the best: 15 at most.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from harness import options_of, show
from numpy.typing import NDArray
from simulation_replay import workload

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Decision
from dl2d.core.jobs import Job
from dl2d.core.packing import Packing
from dl2d.core.policy import Policy
from dl2d.core.resources import Resources
from dl2d.placement.dl2_paper import Dl2Paper
from dl2d.placement.load_balance import LoadBalance
from dl2d.plugins import load_policy
from dl2d.policies.common.checkpoint import read_checkpoint
from dl2d.policies.common.speeds_after_resize import DEFAULT_OPTIMISM
from dl2d.policies.dl2 import policy as dl2
from dl2d.policies.dl2.checkpoint_contents import as_arrays
from dl2d.policies.dl2.policy import Dl2
from dl2d.policies.drf import Drf
from dl2d.policies.lookahead import Lookahead
from dl2d.policies.optimus import Optimus
from dl2d.simulation.replay import Replayed, Rules, replay
from dl2d.simulation.speeds.realism_options import REALISTIC, Realism
from dl2d.simulation.speeds.speed_models import SpeedModel
from dl2d.simulation.workload.format import NodeGroup, SimulatedJob, Workload, read_workload

SLOT = 1200.0
#: Slots that DRF schedules first, and those after them in which jobs come; jobs in each on average.
HISTORY, LIVE, RATE = 72, 216, 2.6
#: Slots after the history from which speeds are others, and from which jobs of the new type come.
DRIFT_AT, NEW_TYPE_AT = 108, 36
#: What dl2 is told that a resize costs, where it does.
RESIZE_SECONDS = 10.0
#: Window of arrivals and of speeds, in slots.
WINDOW = 12
#: Nodes from which on jobs do not wait for each other at their best sizes.
ROOMY = 48
#: Slots after the history from which jobs count for the ceiling.
SETTLED = 72
#: Slots after the history from which it is to be faster than Optimus.
FAST = 20
SCENARIOS = ("plain", "noise", "drift", "wrong-labels", "resize-costs", "new-type")


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def now(self) -> float:
        return self.factor if self.clock.slot >= self.at else 1.0

    def samples_per_second(self, workers: int, ps: int) -> float:
        return self.now * self.model.samples_per_second(workers, ps)

    def grid(self, max_workers: int, max_ps: int) -> NDArray[np.float64]:
        return self.now * self.model.grid(max_workers, max_ps)


class Speeds:
    """The speeds as they are in the slot that a replay is in."""

    def __init__(self, speeds: Mapping[str, SpeedModel], jobs: Sequence[SimulatedJob]) -> None:
        self._speeds = speeds
        self._models = {job.id: job.model for job in jobs}
        self._grids: dict[tuple[str, int, int, float], NDArray[np.float64]] = {}

    def at(self, model: str, workers: int, ps: int) -> NDArray[np.float64]:
        speed = self._speeds[model]
        now = speed.now if isinstance(speed, Drifting) else 1.0
        asked = (model, workers, ps, now)
        if asked not in self._grids:
            self._grids[asked] = speed.grid(workers, ps)
        return self._grids[asked]

    def grid(self, job: Job) -> NDArray[np.float64]:
        """See ``KnownSpeeds.grid``; by what a job is, whatever its user says."""
        return self.at(self._models[job.key.id], job.request.max_workers, job.request.max_ps)


class After:
    """DRF until some slot, another policy from then on; tells the clock."""

    def __init__(self, policy: Policy, slot: int, clock: Clock) -> None:
        self._first = Drf(end_at_first_failure=True, whole_bundles=True)
        self._then = policy
        self._slot = slot
        self._clock = clock
        self.name, self.version, self.needs = policy.name, policy.version, policy.needs

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        self._clock.slot = round(snapshot.at / SLOT)
        return (self._first if self._clock.slot < self._slot else self._then).decide(snapshot, packing, rng)


@dataclass(frozen=True)
class Stream:
    """A workload, the clock that its speeds go by, and them."""

    workload: Workload
    clock: Clock
    speeds: Speeds
    #: Type that comes late.
    late: str


def types(tables: str) -> Workload:
    """A workload whose speeds, and first job of each model, are what a stream is made of."""
    if tables:
        return read_workload(tables)
    return replace(workload(400, 96, longest_slots="8"), slot_seconds=SLOT)


def stream(tables: str, scenario: str, nodes: int, seed: int) -> Stream:
    """Jobs for all slots; with equal seeds the same ones for any number of nodes."""
    made, random, clock = types(tables), np.random.default_rng(seed), Clock()
    first: dict[str, SimulatedJob] = {}
    for job in made.jobs:
        first.setdefault(job.model, job)
    names = sorted(first)
    late = names[int(random.integers(len(names)))]
    faster = dict(zip(names, (random.random(len(names)) < 0.5).tolist(), strict=True))
    comes = HISTORY + NEW_TYPE_AT if scenario == "new-type" else 0
    jobs: list[SimulatedJob] = []
    for slot in range(HISTORY + LIVE):
        for _ in range(int(random.poisson(RATE))):
            model = names[int(random.integers(len(names)))]
            other = names[int(random.integers(len(names)))]
            if model == late and slot < comes:
                model = other if other != late else names[names.index(late) - 1]
            jobs.append(replace(first[model], id=str(len(jobs) + 1), submit_slot=slot))
    speeds: dict[str, SpeedModel] = {name: made.speeds[name] for name in names}
    if scenario == "drift":
        at = HISTORY + DRIFT_AT
        speeds = {name: Drifting(speeds[name], 1.3 if faster[name] else 0.7, at, clock) for name in names}
    cluster = (NodeGroup(nodes, Resources.of(cpu=8, gpu=8)),)
    workload = Workload(slot_seconds=SLOT, cluster=cluster, speeds=speeds, jobs=tuple(jobs))
    return Stream(workload, clock, Speeds(speeds, jobs), late)


def run(made: Stream, policy: Policy, scenario: str, seed: int) -> Replayed:
    """The stream under a policy, to its end."""
    made.clock.slot = 0
    kept = scenario == "resize-costs"
    realism = {
        "noise": Realism(speed_noise=0.05),
        "wrong-labels": Realism(wrong_labels=0.1),
        "resize-costs": Realism(
            start_seconds=REALISTIC.start_seconds, join_seconds=REALISTIC.join_seconds,
            move_seconds_per_mb=REALISTIC.move_seconds_per_mb,
        ),
    }.get(scenario, Realism())  # fmt: skip
    return replay(
        made.workload,
        After(policy, HISTORY, made.clock),
        LoadBalance() if kept else Dl2Paper(),
        rules=Rules(empty_each_slot=not kept, realism=realism),
        seed=seed,
        timer=time.process_time,
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


def windowed(slots: Sequence[Sequence[float]]) -> list[float]:
    """Means over all jobs of the window up to each slot; 1 where there are none."""
    ends = range(1, len(slots) + 1)
    windows = ([part for slot in slots[max(0, end - WINDOW) : end] for part in slot] for end in ends)
    return [statistics.fmean(parts or [1.0]) for parts in windows]


def mean_part(slots: Sequence[Sequence[tuple[str, float]]]) -> float:
    """Mean over all jobs of all slots."""
    return statistics.fmean(part for slot in slots for _, part in slot)


def above_from(one: Sequence[float], other: Sequence[float]) -> int | None:
    """Place from which ``one`` stays above ``other``; None where it is not above at the end."""
    below = [place for place, (mine, its) in enumerate(zip(one, other, strict=True)) if mine < its]
    start = below[-1] + 1 if below else 0
    return start if start < len(one) else None


def by_window(lengths: Sequence[float], jobs: Sequence[SimulatedJob]) -> list[float]:
    """Mean length of the jobs that arrived in each window after the history."""
    of: dict[int, list[float]] = defaultdict(list)
    for length, job in zip(lengths, jobs, strict=True):
        if job.submit_slot >= HISTORY:
            of[(job.submit_slot - HISTORY) // WINDOW].append(length)
    return [statistics.fmean(of[window]) if of[window] else float("nan") for window in range(max(of) + 1)]


def without_speeds(resize_seconds: float) -> Dl2:
    """``dl2`` with the weights that come with it and no speeds."""
    learned = read_checkpoint(dl2.DEFAULT_CHECKPOINT, policy="dl2")
    arrays, kinds = as_arrays(())
    other = replace(learned, weights={**learned.weights, **arrays}, settings={**learned.settings, "kinds": kinds})
    return Dl2(other, optimism=DEFAULT_OPTIMISM, slot_seconds=SLOT, resize_seconds=resize_seconds)


def policy_of(name: str, made: Stream, scenario: str) -> Policy:
    """A policy by its name; those whose name ends in ``-true`` are told the speeds."""
    match name:
        case "drf":
            return Drf(end_at_first_failure=True, whole_bundles=True)
        case "optimus-true":
            return Optimus(known=made.speeds)
        case "lookahead-true":
            return Lookahead(known=made.speeds)
        case "dl2":
            return without_speeds(RESIZE_SECONDS if scenario == "resize-costs" else 0.0)
        case _:
            return load_policy(name)


#: What each value may be at most.
BARS = {"above": 20.0, "optimus": 1.0, "ceiling": 1.03, "drf": 0.9, "slower": 0.05, "new type": 15.0}


def met(bar: str, value: float | None) -> bool:
    """Whether a value is within its bar."""
    return value is not None and (value < BARS[bar] if bar == "slower" else value <= BARS[bar])


def measure(options: argparse.Namespace, scenario: str, nodes: int, seed: int) -> dict[str, dict[str, float | None]]:
    """Values of the bars by policy on one stream; None where it never gets there."""
    made = stream(options.tables, scenario, nodes, seed)
    jobs = made.workload.jobs
    needed = ["drf", "optimus-true", *(["lookahead-true"] if nodes < ROOMY else [])]
    played = {
        name: run(made, policy_of(name, made, scenario), scenario, seed)
        for name in dict.fromkeys([*needed, *options.policies])
    }
    jcts = {name: [job.jct for job in result.jobs] for name, result in played.items()}
    least = jcts["lookahead-true"] if nodes < ROOMY else best_alone(made)
    drf = by_window(jcts["drf"], jobs)
    parts = {name: parts_of_best(made, result, HISTORY + LIVE) for name, result in played.items()}
    speeds = {name: windowed([[part for _, part in slot] for slot in slots[HISTORY:]]) for name, slots in parts.items()}
    settled = [place for place, job in enumerate(jobs) if job.submit_slot >= HISTORY + SETTLED]
    live = [place for place, job in enumerate(jobs) if job.submit_slot >= HISTORY]
    found = {}
    for name in played:
        mine = jcts[name]
        bars: dict[str, float | None] = {
            "ceiling": sum(mine[place] for place in settled) / sum(least[place] for place in settled),
            "drf": max(own / its for own, its in zip(by_window(mine, jobs), drf, strict=True)),
        }
        if nodes < ROOMY:
            its, own = (mean_part(parts[one][HISTORY + FAST :]) for one in ("optimus-true", name))
            bars["optimus"] = its / own
        else:
            bars["above"] = above_from(speeds[name], speeds["optimus-true"])
            bars["slower"] = statistics.fmean(mine[place] > 1.1 * jcts["drf"][place] for place in live)
            if scenario == "new-type":
                bars["new type"] = learned_after(parts[name], made.late)
        found[name] = bars
    return found


def main() -> None:
    options = options_of(
        __doc__, policies=["dl2", "lookahead"], scenarios=list(SCENARIOS), nodes=[96, 24], seeds=[0, 1, 2, 3, 4],
        tables="",
    )  # fmt: skip
    for scenario, nodes in itertools.product(options.scenarios, options.nodes):
        found = [measure(options, scenario, nodes, seed) for seed in options.seeds]
        for policy in options.policies:
            for bar in found[0][policy]:
                values = [bars[policy][bar] for bars in found]
                known = None if None in values else [float(value or 0) for value in values]
                show(
                    scenario=scenario, nodes=nodes, policy=policy, bar=bar, most=BARS[bar],
                    mean=known and statistics.fmean(known), worst=known and max(known),
                    met=sum(met(bar, value) for value in values), streams=len(values),
                )  # fmt: skip


if __name__ == "__main__":
    main()
