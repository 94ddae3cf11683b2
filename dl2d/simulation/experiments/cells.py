"""One cell of an experiment: a workload, a policy and a seed in, a result out; in whatever process."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from dl2d.core.errors import Dl2dError, WorkloadError
from dl2d.core.wording import printable
from dl2d.daemon.plugins import load_placement
from dl2d.simulation.books import SlotSeries
from dl2d.simulation.bound import lower_bound
from dl2d.simulation.contenders import contender
from dl2d.simulation.experiments.definition import Case, Experiment
from dl2d.simulation.preset import Preset, preset
from dl2d.simulation.realism import Realism
from dl2d.simulation.replay import Rules, replay
from dl2d.simulation.sources import load_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is to be run. ``number`` counts the cells of an experiment from 0."""

    number: int
    case: Case
    policy: str
    seed: int
    placement: str
    most_slots: int
    #: Keep what each job held in each slot: much, so for one seed only.
    keeps_allocations: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of it: the same whenever the same cell is run. Times are in slots."""

    slot_seconds: float
    #: Slots until the last job had ended.
    slots: int
    avg_jct: float
    avg_jct_plain: float
    makespan: float
    #: Bound on the average completion time of the workload without options (``dl2d.simulation.bound``), and the
    #: resource that makes it so.
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
    """How long it took: another time each time."""

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
    return tuple(
        Cell(
            number=number, case=case, policy=policy, seed=seed,
            placement=experiment.placement, most_slots=experiment.most_slots,
            keeps_allocations=seed == experiment.seeds[0],
        )
        for number, (case, policy, seed) in enumerate(kinds)
    )  # fmt: skip


def rules_of(cell: Cell) -> Preset:
    """The rules under which a cell is run. Raises ``WorkloadError`` or ``PluginError``."""
    name = cell.case.preset
    chosen = preset(name) if name is not None else Preset(Rules(), load_placement(cell.placement), {})
    try:
        realism = chosen.rules.realism.with_options(cell.case.options)
    except WorkloadError as error:
        where = f"workload {cell.case.name}"
        raise WorkloadError(f"with.{printable(error.key)}", error.problem, where=where) from None
    return replace(chosen, rules=replace(chosen.rules, realism=realism, most_slots=cell.most_slots))


def is_ideal(case: Case) -> bool:
    """Whether the simulated cluster is free of noise, costs and failures: only then is the bound one."""
    rules = preset(case.preset).rules if case.preset is not None else Rules()
    return rules.realism.with_options(case.options) == Realism()


def check_cell(cell: Cell) -> str:
    """Make all that a cell needs, without running it; returns what there is to say of its workload.

    Raises ``WorkloadError`` or ``PluginError``.
    """
    chosen = rules_of(cell)
    sourced = load_source(cell.case.source, seed=cell.seed)
    contender(cell.policy, sourced.workload, chosen)
    return sourced.note


def replay_cell(cell: Cell) -> Finished:
    """Run a cell in the simulator. Everything that is drawn follows the cell's seed."""
    begin = time.perf_counter()
    chosen = rules_of(cell)
    workload = load_source(cell.case.source, seed=cell.seed).workload
    limit = lower_bound(workload)
    replayed = replay(
        workload,
        contender(cell.policy, workload, chosen),
        chosen.placement_of(cell.policy),
        rules=chosen.rules,
        seed=cell.seed,
        timer=time.perf_counter,
        keep_series=True,
    )
    series = replayed.series
    if series is not None and not cell.keeps_allocations:
        series = replace(series, allocations=())
    p50, p99 = np.percentile(replayed.decision_ms or (0.0,), (50, 99))
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
            p50_ms=float(p50),
            p99_ms=float(p99),
        ),
        series=series,
    )


def failed(cell: Cell, error: str, trace: str = "") -> Finished:
    """A cell from which nothing came."""
    return Finished(case=cell.case.name, policy=cell.policy, seed=cell.seed, error=error, trace=trace)


def attempt(runner: Runner, cell: Cell) -> Finished:
    """Run a cell; whatever it raises is told in its record, so that one bad cell does not spoil the others."""
    try:
        return runner(cell)
    except Dl2dError as error:
        return failed(cell, str(error), traceback.format_exc())
    except Exception as error:  # noqa: BLE001 - a policy may fail in any way; the other cells still count
        return failed(cell, f"{type(error).__name__}: {error}", traceback.format_exc())
