"""What the cluster looked like over time: slots in groups, means over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dl2d.experiments.results import CaseSummary
from dl2d.experiments.run import Run, read_series
from dl2d.simulation.books import SlotSeries

_Floats = NDArray[np.float64]

#: Most points of a curve; more slots than that are averaged in groups.
MOST_POINTS: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One policy on one workload: a value per group of slots in each array. Slots without a job count as 0."""

    #: Fraction of the case's resource that was held.
    utilisation: _Floats
    workers: _Floats
    ps: _Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Timelines:
    """All policies of a workload, on one axis."""

    #: Slots at which groups begin, and the end of the last one.
    edges: _Floats
    #: Slots in a group; the last one may have fewer.
    width: int
    policies: Mapping[str, Timeline]
    #: By policy, tasks of each job (row, in order of coming) in each group, for the seed that kept them.
    by_job: Mapping[str, _Floats]


def read_timelines(run: Run, case: CaseSummary) -> Timelines:
    """Read the series of a workload's cells, one at a time. Policies without any are left out."""
    slots = max(result.slots for each in case.policies for result in each.results.values())
    width = math.ceil(slots / MOST_POINTS)
    starts = np.arange(0, slots, width)
    edges = np.append(starts, slots).astype(np.float64)
    sizes = np.diff(edges)
    sums: dict[str, list[_Floats]] = {}
    counts: dict[str, int] = {}
    kept: dict[str, SlotSeries] = {}
    for cell in run.cells:
        done = run.finished.get(cell.number)
        if cell.case.name != case.case.name or done is None or done.result is None:
            continue
        series = read_series(run, cell)
        if series is None:
            continue
        values: tuple[Sequence[float], ...] = (series.utilisation.get(case.resource, ()), series.workers, series.ps)
        groups = np.array(series.slots, dtype=np.int64) // width
        means = [
            np.bincount(groups, weights=each, minlength=len(sizes)) / sizes if len(each) else np.zeros(len(sizes))
            for each in values
        ]
        before = sums.get(cell.policy)
        sums[cell.policy] = means if before is None else [a + b for a, b in zip(before, means, strict=True)]
        counts[cell.policy] = counts.get(cell.policy, 0) + 1
        if series.allocations:
            kept[cell.policy] = series
    order = {job: place for place, job in enumerate(_in_order(kept))}
    return Timelines(
        edges=edges,
        width=width,
        policies={
            policy: Timeline(utilisation=total[0] / count, workers=total[1] / count, ps=total[2] / count)
            for (policy, total), count in zip(sums.items(), counts.values(), strict=True)
        },
        by_job={policy: _tasks_by_job(series, order, width, sizes) for policy, series in kept.items()},
    )


def _tasks_by_job(series: SlotSeries, order: Mapping[str, int], width: int, sizes: _Floats) -> _Floats:
    tasks = np.zeros((len(order), len(sizes)))
    for slot, jobs in zip(series.slots, series.allocations, strict=True):
        for job, has in jobs.items():
            tasks[order[job], slot // width] += has.workers + has.ps
    return tasks / sizes


def _in_order(kept: Mapping[str, SlotSeries]) -> list[str]:
    """Jobs by the slot in which any policy first gave them something."""
    first: dict[str, tuple[int, int, str]] = {}
    for series in kept.values():
        for slot, jobs in zip(series.slots, series.allocations, strict=True):
            for job in jobs:
                key = (slot, len(job), job)
                first[job] = min(first.get(job, key), key)
    return sorted(first, key=lambda job: first[job])
