"""What a run says: per workload and policy, means over seeds and comparisons with the baseline."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dl2d.experiments.cells import Result, Timings
from dl2d.experiments.definition import Case
from dl2d.experiments.run import Run
from dl2d.simulation.statistics import Estimate, estimate, paired_change, paired_difference


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
