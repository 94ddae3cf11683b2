"""Generator that samples jobs from the kinds in a workload file: its speeds, and the first job of each model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dl2d.core.errors import WorkloadError
from dl2d.simulation.parse_key_value_options import Options, within
from dl2d.simulation.workload.generators import MAX_CAP, arrivals
from dl2d.simulation.workload.workload_file import (
    MAX_JOBS,
    MAX_NODES,
    SimulatedJob,
    Workload,
    describe_workload,
    read_workload,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindsSettings(Options):
    """Settings of ``draw_kinds``."""

    jobs: int = within(60, 1, MAX_JOBS)
    #: Nodes of the cluster, like the file's; 0: the file's cluster.
    nodes: int = within(0, 0, MAX_NODES)
    #: Most arrivals of a slot.
    cap: int = within(3, 1, MAX_CAP)


def draw_kinds(known: Workload, settings: KindsSettings, random: np.random.Generator, *, where: str) -> Workload:
    """Jobs that come as those of the generator ``dl2``, each like the first job of a model that is drawn.

    The models are not drawn independently: each has as many jobs as any other, or one more, in an order that is drawn.
    So workloads differ in what comes when, and no more than that in how much there is to do. A job has the demands,
    bounds and epochs, real and declared, of the one that it is like.

    Raises
    ------
    WorkloadError
        The file has several kinds of nodes and another number is asked for, or jobs do not fit; names ``where``.
    """
    firsts: dict[str, SimulatedJob] = {}
    for job in known.jobs:
        firsts.setdefault(job.model, job)
    names = sorted(firsts)
    slots = arrivals(settings.jobs, settings.cap, random)
    rounds = -(-settings.jobs // len(names))
    unordered = np.concatenate([random.permutation(len(names)) for _ in range(rounds)])[: settings.jobs]
    kinds = random.permutation(unordered).tolist()
    jobs = tuple(
        replace(firsts[names[kind]], id=str(number), submit_slot=slot)
        for number, (slot, kind) in enumerate(zip(slots, kinds, strict=False), start=1)
    )
    made = replace(known, jobs=jobs, speeds={name: known.speeds[name] for name in names})
    if not settings.nodes:
        return made
    if known.capacity_changes or len(known.cluster) > 1:
        raise WorkloadError(
            "nodes", "cannot be set where the file has several groups of nodes, or changes of them", where=where
        )
    group = replace(known.cluster[0], count=settings.nodes)
    # Read once more, for what fits many nodes may not fit few.
    return read_workload(describe_workload(replace(made, cluster=(group,))), where=where)
