"""The first stage of the tick: from what the resource manager has and the store knows to a snapshot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace

from msgspec import structs

from dl2d.core.cluster import Snapshot, Task, in_submit_order
from dl2d.core.jobs import Allocation, Job, JobKey, JobState, Launch, Progress
from dl2d.core.measured import TrainingKind
from dl2d.core.policy import Evidence
from dl2d.core.resource_manager import RmJobState, RmSnapshot
from dl2d.core.resources import Resources
from dl2d.core.store import Store

#: Kinds of which no job is there that are looked up beside those of the jobs that are.
_OTHER_KINDS = 8
_NO_LAUNCH = Launch((), "")


def take_snapshot(jobs: Iterable[Job], tasks: Iterable[Task], seen: RmSnapshot, slot: int) -> Snapshot:
    """Join the manager's answer with the store's jobs and tasks, after they were reconciled.

    Tasks that were asked for but do not hold their room yet are counted as used, so that no room is given twice.
    Commands and environments are left out: no policy may look at them and they do not belong into recorded slots.
    """
    tasks = tuple(tasks)
    holding = {job.handle for job in seen.jobs if job.state in (RmJobState.RUNNING, RmJobState.ENDING)}
    promised: dict[str, list[Resources]] = defaultdict(list)
    for task in tasks:
        if task.handle not in holding:
            promised[task.node].append(task.demand)
    nodes = tuple(
        structs.replace(node, used=Resources.total((node.used, *promised[node.name])))
        if node.name in promised
        else node
        for node in seen.nodes
    )
    found = tuple(job for job in jobs if job.state in (JobState.READY, JobState.RUNNING))
    fresh = _fresh(found, tasks, seen.at)
    present = in_submit_order([_shown(job, seen.at, fresh=job.key in fresh) for job in found])
    floors = tuple(_floors(job for job in present if job.key not in fresh))
    return Snapshot(at=seen.at, slot=slot, nodes=nodes, jobs=present, tasks=tasks, floors=floors)


def _fresh(jobs: Iterable[Job], tasks: Iterable[Task], at: float) -> frozenset[JobKey]:
    """Static jobs that the scheduler in charge has started just now.

    When that was decided they had nothing yet, and whoever learns from it has to see them so.
    """
    static = frozenset(job.key for job in jobs if job.static)
    return static - {task.job for task in tasks if task.asked_at < at} if static else static


def _shown(job: Job, at: float, *, fresh: bool) -> Job:
    if not job.unreported:
        return replace(job, launch=_NO_LAUNCH)
    return replace(job, launch=_NO_LAUNCH, progress=Progress(at=at) if fresh else job.progress_at(at))


def with_evidence(snapshot: Snapshot, needs: Collection[Evidence], store: Store) -> Snapshot:
    """The snapshot with what a policy needs to know of the past."""
    if Evidence.SPEEDS in needs:
        kinds = {TrainingKind.of(job.request) for job in snapshot.jobs}
        # Where jobs are judged one by one, some may be of kinds that none says it is.
        others = _OTHER_KINDS if Evidence.JOB_SPEEDS in needs else 0
        snapshot = replace(snapshot, speeds=store.speeds(kinds, others=others))
    if Evidence.JOB_SPEEDS in needs:
        snapshot = replace(snapshot, job_speeds=store.job_speeds([job.key for job in snapshot.jobs]))
    if Evidence.LOSSES in needs:
        snapshot = replace(snapshot, losses=store.losses([job.key for job in snapshot.jobs]))
    return snapshot


def _floors(jobs: Iterable[Job]) -> Iterable[tuple[JobKey, Allocation]]:
    """A running job keeps its minimum: its state lives in its servers, so it is never shrunk to nothing."""
    for job in jobs:
        if job.state is JobState.RUNNING:
            yield job.key, job.request.least
