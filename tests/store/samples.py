"""Records for tests of the store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dl2d.core.cluster import Node, Snapshot, Task
from dl2d.core.decision import Alternative, Constraint, Decision, JobDecision, Reason
from dl2d.core.jobs import Allocation, Job, JobKey, JobRequest, Launch, Owner, Role
from dl2d.core.plan_of_starts_and_stops import Deferred, Failure, Outcome, Plan, Start, Stop
from dl2d.core.resources import Resources, Shortfall
from dl2d.core.store import Slot

WORKER = Resources.of(cpu=2, gpu=0.5, memory=4096)
PS = Resources.of(cpu=1)


def a_job(number: int | str = 1, *, cluster: str = "main", submitted: int = 1_700_000_000, **fields: Any) -> Job:
    request = JobRequest(
        name=fields.pop("name", f"digits-{number}"),
        model="mlp",
        epochs=90.0,
        samples_per_epoch=1797.0,
        steps_per_epoch=None,
        batch=64,
        worker=WORKER,
        ps=PS,
        allowed_workers=(1, 2, 4),
    )
    job = Job(
        key=JobKey(cluster, str(number), submitted),
        request=request,
        owner=Owner("ada", 1001, 1001, "physics", "gpu", "normal"),
        launch=Launch(("python", "train.py", "--lr=0.1"), "/home/ada", (("PATH", "/usr/bin"), ("LANG", "de_AT.UTF-8"))),
    )
    return replace(job, **fields)


def starts(job: Job, *, workers: int = 1, ps: int = 0, node: str = "n1") -> list[Start]:
    return [Start(job.key, Role.WORKER, node, WORKER)] * workers + [Start(job.key, Role.PS, node, PS)] * ps


def a_slot(number: int, jobs: tuple[Job, ...], tasks: tuple[Task, ...] = (), *, guarded: bool = False) -> Slot:
    """A slot in which every kind of record occurs."""
    lacking = Shortfall("gpu", 0.5, 0.0)
    decided = tuple(
        JobDecision(
            job.key,
            Allocation(2, 1),
            Reason(Constraint.CAPACITY, f"no gpu left for a third worker of {job.request.name}", (lacking,)),
            previous=Allocation(1, 1),
            alternatives=(Alternative(Allocation(3, 1), 0.375), Alternative(Allocation(1, 1), -1e-9)),
        )
        for job in jobs
    )
    proposed = Decision("drf", "1", decided, "dominant share", tuple((job.key, Allocation(1, 0)) for job in jobs))
    decision = proposed
    if guarded:
        limit = Reason(Constraint.COOLDOWN, "resized 3 s ago", (lacking,))
        decision = replace(proposed, jobs=tuple(each.changed_by(Allocation(1, 1), limit) for each in decided))
    return Slot(
        number=number,
        at=1_700_000_100.25 + number,
        snapshot=Snapshot(
            at=1_700_000_100.0 + number,
            slot=number,
            nodes=(Node("n1", Resources.of(cpu=8, gpu=2), Resources.of(cpu=0.1)),),
            jobs=jobs,
            tasks=tasks,
            floors=tuple((job.key, Allocation(1, 1)) for job in jobs),
        ),
        proposed=proposed,
        decision=decision,
        plan=Plan(
            starts=tuple(Start(job.key, Role.WORKER, "n1", WORKER) for job in jobs),
            stops=tuple(Stop(task.job, task.id) for task in tasks),
            deferred=tuple(Deferred(job.key, Role.PS, 2, "n1", (lacking,)) for job in jobs),
        ),
        outcome=Outcome(
            started=tuple(task.tag for task in tasks),
            draining=("dl2:x:worker-9",),
            failures=tuple(Failure(job.key, "start worker", "sbatch: no such partition – “gpu”") for job in jobs),
        ),
        inputs_hash="ab" * 32,
        seed=2**100 + number,
        seconds=0.125,
    )
