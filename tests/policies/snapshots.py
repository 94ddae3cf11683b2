"""Snapshots for tests of policies, and what each policy promises whatever it is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from msgspec import structs

from dl2d.core.cluster import Node, NodeState, Snapshot, Task, TaskState
from dl2d.core.decision import Decision
from dl2d.core.jobs import NO_LAUNCH, Allocation, Job, JobKey, JobRequest, JobState, Owner, Role
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy import Policy
from dl2d.core.resources import Resources
from dl2d.placement.load_balance import LoadBalance

NO_PS: dict[str, Any] = {"ps": Resources(), "min_ps": 0, "max_ps": 0, "max_workers": 1000}


def a_job(number: int, *, static: bool = False, **changes: Any) -> Job:
    request = JobRequest(
        name=f"job {number}", model="other", epochs=1, samples_per_epoch=1, steps_per_epoch=None, batch=None,
        worker=Resources.of(cpu=2, gpu=1), ps=Resources.of(cpu=1), max_workers=4, max_ps=4,
    )  # fmt: skip
    return Job(
        key=JobKey("c", str(number), 1000 + number), request=replace(request, **changes),
        owner=Owner("ann", 1, 1), launch=NO_LAUNCH, state=JobState.READY, static=static,
    )  # fmt: skip


def a_snapshot(jobs: list[Job], nodes: list[Node], held: dict[int, Allocation] | None = None) -> Snapshot:
    """Jobs of ``held`` run with that many tasks, put where there is room, and have the least they may have as floor."""
    packing, tasks, floors = Packing(nodes, LoadBalance()), [], []
    for number, has in (held or {}).items():
        job = jobs[number]
        for role in (Role.WORKER, Role.PS):
            for ordinal in range(has.count(role)):
                demand = job.request.demand(role)
                node = packing.place(demand, role)
                assert isinstance(node, str), "the test's own cluster is too small"
                tasks.append(
                    Task(job=job.key, id=f"{role}-{ordinal}", role=role, node=node, demand=demand,
                         state=TaskState.CONFIRMED)
                )  # fmt: skip
        floors.append((job.key, job.request.min_size))
    used = [
        structs.replace(
            node, used=Resources.total((node.used, *(task.demand for task in tasks if task.node == node.name)))
        )
        for node in nodes
    ]
    return Snapshot(1000.0, 1, tuple(used), tuple(jobs), tuple(tasks), tuple(floors))


def ask(policy: Policy, snapshot: Snapshot) -> Decision:
    packing = Packing.for_decision(
        snapshot.nodes, snapshot.tasks, LoadBalance(), snapshot.node_sets, snapshot.limits
    )  # fmt: skip
    return policy.decide(snapshot, packing, np.random.default_rng(7))


def given(policy: Policy, snapshot: Snapshot) -> list[Allocation]:
    allocations = ask(policy, snapshot).allocations()
    return [allocations[job.key] for job in snapshot.jobs]


def cluster(count: int, **amounts: float) -> list[Node]:
    return [Node(f"n{number}", Resources.of(amounts)) for number in range(count)]


_jobs = st.lists(
    st.fixed_dictionaries(
        {
            "worker": st.builds(lambda cpu, gpu: Resources.of(cpu=cpu, gpu=gpu), st.integers(1, 5), st.integers(0, 3)),
            "ps": st.builds(lambda cpu: Resources.of(cpu=cpu), st.integers(1, 3)),
            "min_workers": st.integers(1, 2),
            "max_workers": st.integers(2, 6),
            "max_ps": st.integers(1, 6),
            "allowed_workers": st.sampled_from([(), (), (1, 2, 4), (2,)]),
        }
    ),
    max_size=6,
).map(lambda jobs: [a_job(number, **job) for number, job in enumerate(jobs, start=1)])
_nodes = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 4), st.sampled_from([NodeState.UP, NodeState.UP, NodeState.DRAINING])),
    min_size=1,
    max_size=4,
).map(
    lambda nodes: [
        Node(f"n{number}", Resources.of(cpu=cpu, gpu=gpu), state=state)
        for number, (cpu, gpu, state) in enumerate(nodes)
    ]
)
snapshots = st.builds(a_snapshot, _jobs, _nodes)
