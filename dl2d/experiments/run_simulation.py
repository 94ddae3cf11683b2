"""Simulation runs of an experiment: that of one workload with one policy and one seed, and its result."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dl2d.core.errors import Dl2dError
from dl2d.experiments.definition import Case, Experiment
from dl2d.experiments.participant_training import Preparation, combinations, to_prepare
from dl2d.experiments.participants import Participant
from dl2d.experiments.simulation_setup import placement_for, policy_for, rules_for, tuned
from dl2d.simulation.completion_time_lower_bound import lower_bound
from dl2d.simulation.replay import replay
from dl2d.simulation.result_time_series import SlotSeries
from dl2d.simulation.workload.workload_source_by_name import load_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One simulation to run. ``number`` counts the cells of an experiment from 0."""

    number: int
    experiment: Experiment
    case: Case
    policy: str
    seed: int
    #: What the participant must have been prepared with, and the folder that has that.
    preparation: Preparation | None = None
    prepared: Path | None = None

    @property
    def participant(self) -> Participant:
        """Who decides."""
        return self.experiment.participant(self.policy)

    @property
    def keeps_allocations(self) -> bool:
        """Whether what each job held in each slot is kept: much, so for one seed only."""
        return self.seed == self.experiment.seeds[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Deterministic results of a cell. Times are in slots."""

    slot_seconds: float
    #: Slots until the last job had ended.
    slots: int
    avg_jct: float
    avg_jct_plain: float
    makespan: float
    #: Lower bound on the average completion time of the workload without options, and the resource that makes it so.
    bound: float
    scarce: str
    #: By resource, fraction of amount x time that was held.
    utilisation: Mapping[str, float]
    #: Changes of size of all jobs together.
    resizes: int
    #: Completion time of each job.
    jobs: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Wall-clock times of a cell's simulation."""

    seconds: float
    decisions: int
    #: Percentiles of decisions, milliseconds.
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A cell that was run: either ``result`` or ``error`` is given."""

    case: str
    policy: str
    seed: int
    result: Result | None = None
    timings: Timings | None = None
    series: SlotSeries | None = field(default=None, repr=False)
    #: What went wrong, for people; and where in the code, for those who mend it.
    error: str = ""
    trace: str = ""


#: What runs a cell. It raises what it likes: ``attempt`` makes a record of that.
Runner = Callable[[Cell], Finished]


def cells_of(experiment: Experiment) -> tuple[Cell, ...]:
    """All cells: by case, then policy, then seed."""
    kinds = [
        (case, policy, seed) for case in experiment.cases for policy in experiment.policies for seed in experiment.seeds
    ]
    #: By policy, workload (tuning) and seed (training): files are read once to tell what is to be made of them.
    known: dict[tuple[str, str, int], Preparation] = {}

    def preparation(case: Case, policy: str, seed: int) -> Preparation | None:
        participant = experiment.participant(policy)
        if not (participant.training or participant.tune):
            return None
        what = (
            policy,
            case.name if participant.tune else "",
            seed % experiment.trainings if participant.training is not None else 0,
        )
        if what not in known:
            known[what] = to_prepare(experiment, participant, case, what[2])
        return known[what]

    return tuple(
        Cell(
            number=number, experiment=experiment, case=case, policy=policy, seed=seed,
            preparation=preparation(case, policy, seed),
        )
        for number, (case, policy, seed) in enumerate(kinds)
    )  # fmt: skip


def check_cell(cell: Cell) -> str:
    """Make what a cell needs, without running it or preparing anything; returns what there is to say of its workload.

    Raises ``WorkloadError``, ``PluginError`` or ``ConfigError``.
    """
    chosen = rules_for(cell.experiment, cell.case)
    sourced = load_source(cell.case.source(cell.seed), seed=cell.seed)
    participant = cell.participant
    for values in combinations(participant.tune):
        each = tuned(participant, values)
        placement_for(each, chosen)
        if participant.training is None:
            policy_for(each, sourced.workload, chosen)
    return sourced.note


def prepare_cell(cell: Cell) -> Finished:
    """Train or tune what a cell needs and keep it in the cell's folder; the record has no result."""
    if cell.preparation is not None and cell.prepared is not None:
        cell.preparation.make(cell.prepared)
    return Finished(case=cell.case.name, policy=cell.policy, seed=cell.seed)


def replay_cell(cell: Cell) -> Finished:
    """Simulate a cell. All randomness derives from the cell's seed."""
    begin = time.perf_counter()
    chosen = rules_for(cell.experiment, cell.case)
    workload = load_source(cell.case.source(cell.seed), seed=cell.seed).workload
    participant, checkpoint = cell.participant, None
    if cell.preparation is not None and cell.prepared is not None:
        participant, checkpoint = cell.preparation.ready(cell.prepared)
    limit = lower_bound(workload)
    replayed = replay(
        workload,
        policy_for(participant, workload, chosen, checkpoint),
        placement_for(participant, chosen),
        rules=chosen.rules,
        seed=cell.seed,
        timer=time.perf_counter,
        keep_series=True,
    )
    series = replayed.series
    if series is not None and not cell.keeps_allocations:
        series = replace(series, allocations=())
    p50, p99 = replayed.decision_percentiles
    return Finished(
        case=cell.case.name,
        policy=cell.policy,
        seed=cell.seed,
        result=Result(
            slot_seconds=workload.slot_seconds,
            slots=replayed.slots,
            avg_jct=replayed.avg_jct,
            avg_jct_plain=replayed.avg_jct_plain,
            makespan=replayed.makespan,
            bound=limit.avg_jct,
            scarce=limit.resource,
            utilisation=dict(replayed.utilisation),
            resizes=replayed.resizes,
            jobs={job.id: job.jct for job in replayed.jobs},
        ),
        timings=Timings(
            seconds=time.perf_counter() - begin,
            decisions=len(replayed.decision_ms),
            p50_ms=p50,
            p99_ms=p99,
        ),
        series=series,
    )


def failed(cell: Cell, error: str, trace: str = "") -> Finished:
    """Record of a cell that failed."""
    return Finished(case=cell.case.name, policy=cell.policy, seed=cell.seed, error=error, trace=trace)


def attempt(runner: Runner, cell: Cell) -> Finished:
    """Run a cell; an exception becomes the error of its record, so that other cells are not affected."""
    try:
        return runner(cell)
    except Dl2dError as error:
        return failed(cell, str(error), traceback.format_exc())
    except Exception as error:  # noqa: BLE001 - a policy may fail in any way; the other cells still count
        return failed(cell, f"{type(error).__name__}: {error}", traceback.format_exc())
