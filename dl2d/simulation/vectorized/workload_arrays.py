"""Workloads as arrays, side by side: what the vectorised simulator reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from dl2d.core.array_types import Floats, Ints
from dl2d.core.errors import WorkloadError
from dl2d.core.jobs import NOTHING, Allocation, Architecture
from dl2d.core.resources import Resources
from dl2d.simulation.speeds.speed_models import SpeedModel
from dl2d.simulation.workload.workload_file import Workload

#: A slot that never comes: when padding is submitted.
NEVER = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """K workloads, padded to J jobs, M nodes and R resources. Arrays are not to be changed.

    Jobs stand in submit order (``Workload.jobs``), nodes in file order, padding last. Amounts of resources are whole
    thousandths. A padding job has ``submit`` = ``NEVER``, lengths 1 and no tasks; a padding node has ``capacity`` -1.
    """

    #: Names of resources, sorted; of models, in the order of one-hot types.
    resources: tuple[str, ...]
    models: tuple[str, ...]
    #: Usual size of each model; empty where policies do not see the sizes that users ask for.
    usual_sizes: tuple[Allocation, ...]
    #: Ids of the jobs of each workload.
    ids: tuple[tuple[str, ...], ...]
    #: Samples/s, shape (speeds, most PSs + 1, most workers + 1); 0 beyond the bounds of those who use the speed.
    speeds: Floats
    #: Shape (K,).
    slot_seconds: Floats
    nodes: Ints
    jobs: Ints
    #: Shape (K, M, R).
    capacity: Ints
    #: Shape (K, J): slot, epochs, index into ``models`` and into ``speeds``.
    submit: Ints
    epochs: Floats
    declared: Floats
    samples: Floats
    model: Ints
    speed: Ints
    #: Shape (K, J, 2): workers, PSs. Below ``least`` a job does not run; that is 1 or more, and 0 PSs for all-reduce.
    least: Ints
    most: Ints
    #: What users ask for, else what is usual for the type, else the least; at most ``most``. Shape (K, J, 2).
    asked: Ints
    #: Shape (K, J, 2, R): demand of one worker, of one PS.
    demand: Ints

    @property
    def size(self) -> tuple[int, int, int, int]:
        """K, J, M, R."""
        count, nodes, resources = self.capacity.shape
        return count, self.submit.shape[1], nodes, resources

    @classmethod
    def of(
        cls, workloads: Iterable[Workload], *, models: Sequence[str] | None = None, resources: Sequence[str] = (),
        usual_sizes: Sequence[Allocation] = (),
    ) -> Self:  # fmt: skip
        """Compile workloads; about 1 ms for 60 jobs, and the speeds' own time once for each speed.

        Parameters
        ----------
        workloads
            One or more; they may differ in everything.
        models
            Types in the order of the one-hot code, where it must be the same for several libraries; may name more
            than there are. By default the workloads' own, sorted.
        resources
            Names of resources to have beside the workloads' own; those without one have none of it.
        usual_sizes
            Of the types, in their order, where policies see the sizes that users ask for: those of jobs whose users ask
            for none.

        Raises
        ------
        WorkloadError
            There is no workload, one has no job, or ``models`` lacks one that is used.
        """
        given = tuple(workloads)
        if not given or not all(workload.jobs for workload in given):
            raise WorkloadError("jobs", "a library needs a workload, and each workload a job")
        used = sorted({job.model for workload in given for job in workload.jobs})
        order = tuple(models) if models is not None else tuple(used)
        if missing := [model for model in used if model not in order]:
            raise WorkloadError("models", f"the list lacks {', '.join(missing[:5])}")
        own_names = {name for workload in given for part in _resources(workload) for name, _ in part.thousandths}
        names = sorted(own_names.union(resources)) or ["cpu"]
        speeds, which = _speeds(given)
        count, jobs = len(given), max(len(workload.jobs) for workload in given)
        nodes = [workload.nodes() for workload in given]
        capacity = np.full((count, max(map(len, nodes)), len(names)), -1, int)
        numbers = {model: index for index, model in enumerate(order)}
        made = cls(
            resources=tuple(names),
            models=order,
            usual_sizes=tuple(usual_sizes),
            ids=tuple(tuple(job.id for job in workload.jobs) for workload in given),
            speeds=speeds,
            slot_seconds=np.array([workload.slot_seconds for workload in given], float),
            nodes=np.array([len(list_) for list_ in nodes], int),
            jobs=np.array([len(workload.jobs) for workload in given], int),
            capacity=capacity,
            submit=np.full((count, jobs), NEVER, int),
            epochs=np.ones((count, jobs)),
            declared=np.ones((count, jobs)),
            samples=np.ones((count, jobs)),
            model=np.zeros((count, jobs), int),
            speed=np.zeros((count, jobs), int),
            least=np.zeros((count, jobs, 2), int),
            most=np.zeros((count, jobs, 2), int),
            asked=np.zeros((count, jobs, 2), int),
            demand=np.zeros((count, jobs, 2, len(names)), int),
        )
        for place, workload in enumerate(given):
            for number, node in enumerate(nodes[place]):
                capacity[place, number] = node.capacity.in_order(names)
            own = which[place]
            for number, job in enumerate(workload.jobs):
                has_ps = job.architecture is Architecture.PS
                at = place, number
                made.submit[at] = job.submit_slot
                made.epochs[at] = job.epochs
                made.declared[at] = job.declared_epochs
                made.samples[at] = job.samples_per_epoch
                made.model[at] = numbers[job.model]
                made.speed[at] = own[job.model]
                made.least[at] = max(1, job.min_workers), max(1, job.min_ps) if has_ps else 0
                made.most[at] = job.max_workers, job.max_ps if has_ps else 0
                usual = usual_sizes[numbers[job.model]] if usual_sizes else NOTHING
                sizes = (tuple(size) for size in (job.asked_size, usual) if size != NOTHING)
                made.asked[at] = np.minimum(next(sizes, tuple(made.least[at])), made.most[at])
                made.demand[at] = job.worker.in_order(names), job.ps.in_order(names)
        for entry in fields(made):
            value = getattr(made, entry.name)
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
        return made


def _resources(workload: Workload) -> Iterable[Resources]:
    yield from (group.resources for group in workload.cluster)
    for job in workload.jobs:
        yield job.worker
        yield job.ps


def _speeds(workloads: Sequence[Workload]) -> tuple[Floats, list[dict[str, int]]]:
    """One grid for each distinct speed, as large as any job of it may be; and by workload which model has which.

    Workloads made from the same profiles share their speeds, and equal ones read from files are one, too.
    """
    known: dict[SpeedModel, int] = {}
    bounds: list[tuple[int, int]] = []
    which: list[dict[str, int]] = []
    for workload in workloads:
        own: dict[str, int] = {}
        for job in workload.jobs:
            if job.model not in own:
                own[job.model] = known.setdefault(workload.speeds[job.model], len(known))
                if len(bounds) < len(known):
                    bounds.append((0, 0))
            number = own[job.model]
            bounds[number] = max(bounds[number][0], job.max_workers), max(bounds[number][1], job.max_ps)
        which.append(own)
    grids = np.zeros((len(known), max(ps for _, ps in bounds) + 1, max(workers for workers, _ in bounds) + 1))
    for model, number in known.items():
        workers, ps = bounds[number]
        grids[number, : ps + 1, : workers + 1] = model.grid(workers, ps)
    return grids, which
