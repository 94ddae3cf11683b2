"""Results of a run: estimates over seeds, comparison with published figures, learning curves, and timelines."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dl2d.core.array_types import Floats
from dl2d.core.confidence_interval import Estimate, estimate, paired_change, paired_difference
from dl2d.experiments.definition import Case, Claim
from dl2d.experiments.participant_training import Preparation, Prepared
from dl2d.experiments.run_experiment import Run, read_series
from dl2d.experiments.run_simulation import Result, Timings
from dl2d.experiments.simulation_setup import is_ideal


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySummary:
    """One policy on one workload. Times are in slots, shares are fractions; every estimate is over seeds."""

    policy: str
    jct: Estimate
    jct_plain: Estimate
    makespan: Estimate
    #: Average completion time over the bound, less 1.
    above_bound: Estimate
    #: Of the resource that the case names.
    utilisation: Estimate
    #: Changes of size of the mean job.
    resizes: Estimate
    #: Average completion time against the baseline on the same seeds; None for the baseline itself.
    difference: Estimate | None
    change: Estimate | None
    #: Mean over seeds of the percentiles of a decision's time.
    p50_ms: float
    p99_ms: float
    results: Mapping[int, Result]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSummary:
    """One workload. Policies of which no cell has a result are left out."""

    case: Case
    slot_seconds: float
    jobs: Estimate
    bound: Estimate
    #: The resource that was used most.
    resource: str
    policies: tuple[PolicySummary, ...]


def summarise(run: Run) -> tuple[CaseSummary, ...]:
    """All cases that have a result, in the definition's order."""
    return tuple(made for case in run.experiment.cases if (made := _case(run, case)) is not None)


def _case(run: Run, case: Case) -> CaseSummary | None:
    results: dict[str, dict[int, Result]] = {policy: {} for policy in run.experiment.policies}
    timings: dict[str, list[Timings]] = {policy: [] for policy in run.experiment.policies}
    for _, done in sorted(run.finished.items()):
        if done.case == case.name and done.result is not None:
            results[done.policy][done.seed] = done.result
            if done.timings is not None:
                timings[done.policy].append(done.timings)
    by_seed = {seed: result for each in results.values() for seed, result in each.items()}
    if not by_seed:
        return None
    some = next(iter(by_seed.values()))
    used: Counter[str] = Counter()
    for each in results.values():
        for result in each.values():
            used.update(result.utilisation)
    resource = max(sorted(used), key=lambda name: used[name], default="")
    baseline = {seed: result.avg_jct for seed, result in results[run.experiment.baseline].items()}
    return CaseSummary(
        case=case,
        slot_seconds=some.slot_seconds,
        jobs=_over(by_seed, lambda result: len(result.jobs)),
        bound=_over(by_seed, lambda result: result.bound),
        resource=resource,
        policies=tuple(
            _policy(policy, each, timings[policy], resource, baseline if policy != run.experiment.baseline else {})
            for policy, each in results.items()
            if each
        ),
    )


def _policy(
    policy: str, results: dict[int, Result], timings: list[Timings], resource: str, baseline: dict[int, float]
) -> PolicySummary:
    jct = {seed: result.avg_jct for seed, result in results.items()}
    return PolicySummary(
        policy=policy,
        jct=_over(results, lambda result: result.avg_jct),
        jct_plain=_over(results, lambda result: result.avg_jct_plain),
        makespan=_over(results, lambda result: result.makespan),
        above_bound=_over(results, lambda result: result.avg_jct / result.bound - 1),
        utilisation=_over(results, lambda result: result.utilisation.get(resource, 0.0)),
        resizes=_over(results, lambda result: result.resizes / len(result.jobs)),
        difference=paired_difference(jct, baseline),
        change=paired_change(jct, baseline),
        p50_ms=statistics.fmean(each.p50_ms for each in timings) if timings else 0.0,
        p99_ms=statistics.fmean(each.p99_ms for each in timings) if timings else 0.0,
        results=results,
    )


def _over(results: Mapping[int, Result], value: Callable[[Result], float]) -> Estimate:
    return estimate([value(result) for _, result in sorted(results.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A claim, and what was measured on one workload: a fraction, mean over seeds; None where results are missing."""

    claim: Claim
    workload: str
    measured: Estimate | None
    #: The most that any policy could have: the bound against the same policy; None where it is none.
    possible: Estimate | None

    @property
    def distance(self) -> float | None:
        """Percentage points from what is claimed to what was measured; below 0: faster than claimed."""
        if self.measured is None or self.claim.change is None:
            return None
        return 100 * self.measured.mean - self.claim.change


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """How a participant learned: times on validation workloads against those of DRF, over its trainings."""

    participant: str
    unit: str
    #: By step, the change as a fraction: -0.4 is 40 % faster than DRF.
    points: tuple[tuple[int, Estimate], ...]
    #: Best of each training.
    best: Estimate
    #: First step at which the mean is no slower than DRF; None: never.
    level: int | None
    #: Mean seconds of one training.
    seconds: float


def findings(run: Run, cases: Sequence[CaseSummary]) -> tuple[Finding, ...]:
    """Every claim, for each workload that it is of."""
    made = []
    for claim in run.experiment.claims:
        for case in cases:
            if claim.workload in ("", case.case.name):
                times = {
                    each.policy: {seed: result.avg_jct for seed, result in each.results.items()}
                    for each in case.policies
                }
                against = times.get(claim.against, {})
                bounds = {seed: result.bound for each in case.policies for seed, result in each.results.items()}
                made.append(
                    Finding(
                        claim=claim,
                        workload=case.case.name,
                        measured=paired_change(times.get(claim.policy, {}), against),
                        possible=paired_change(bounds, against) if is_ideal(case.case) else None,
                    )
                )
    return tuple(made)


def curves(run: Run) -> tuple[Curve, ...]:
    """Of all that was trained, in the definition's order; participants of which nothing was made are left out."""
    made: dict[str, list[tuple[Preparation, Prepared]]] = {}
    for wanted, prepared in run.preparations:
        if prepared is not None and wanted.participant.training is not None and prepared.curve:
            made.setdefault(wanted.participant.name, []).append((wanted, prepared))
    return tuple(_curve(run, name, made[name]) for name in run.experiment.policies if name in made)


def _curve(run: Run, name: str, made: Sequence[tuple[Preparation, Prepared]]) -> Curve:
    by_step: dict[int, list[float]] = {}
    for _, prepared in made:
        for look in prepared.curve:
            by_step.setdefault(look.step, []).append(look.jct / prepared.reference - 1)
    points = tuple((step, estimate(values)) for step, values in sorted(by_step.items()))
    return Curve(
        participant=name,
        unit=made[0][1].unit,
        points=points,
        best=estimate([min(look.jct for look in prepared.curve) / prepared.reference - 1 for _, prepared in made]),
        level=next((step for step, value in points if value.mean <= 0), None),
        seconds=sum(run.seconds(wanted) for wanted, _ in made) / len(made),
    )


def choices(run: Run) -> tuple[Prepared, ...]:
    """Results of all tunings."""
    return tuple(made for wanted, made in run.preparations if made is not None and wanted.participant.tune)


def by_unit(curves_: Sequence[Curve]) -> Mapping[str, list[Curve]]:
    """Curves grouped by the unit of their steps."""
    groups: dict[str, list[Curve]] = {}
    for curve in curves_:
        groups.setdefault(curve.unit, []).append(curve)
    return groups


#: Most points of a curve; more slots than that are averaged in groups.
MAX_POINTS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One policy on one workload: a value per group of slots in each array. Slots without a job count as 0."""

    #: Fraction of the case's resource that was held.
    utilisation: Floats
    workers: Floats
    ps: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Timelines:
    """All policies of a workload, on one axis."""

    #: Slots at which groups begin, and the end of the last one.
    edges: Floats
    #: Slots in a group; the last one may have fewer.
    width: int
    policies: Mapping[str, Timeline]


def read_timelines(run: Run, case: CaseSummary) -> Timelines:
    """Read the series of a workload's cells, cell by cell. Policies without any are left out."""
    slots = max(result.slots for each in case.policies for result in each.results.values())
    width = math.ceil(slots / MAX_POINTS)
    starts = np.arange(0, slots, width)
    edges = np.append(starts, slots).astype(float)
    sizes = np.diff(edges)
    found: dict[str, list[list[Floats]]] = {}
    for cell in run.cells:
        done = run.finished.get(cell.number)
        if cell.case.name != case.case.name or done is None or done.result is None:
            continue
        series = read_series(run, cell)
        if series is None:
            continue
        values: tuple[Sequence[float], ...] = (series.utilisation.get(case.resource, ()), series.workers, series.ps)
        groups = np.array(series.slots, int) // width
        means = [
            np.bincount(groups, weights=each, minlength=len(sizes)) / sizes if len(each) else np.zeros(len(sizes))
            for each in values
        ]
        found.setdefault(cell.policy, []).append(means)
    over_seeds = {policy: np.mean(each, axis=0) for policy, each in found.items()}
    policies = {
        policy: Timeline(utilisation=used, workers=workers, ps=ps) for policy, (used, workers, ps) in over_seeds.items()
    }
    return Timelines(edges=edges, width=width, policies=policies)
