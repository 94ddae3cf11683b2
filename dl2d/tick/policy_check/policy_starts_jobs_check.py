"""Start check: simulates whether a policy starts jobs on an idle cluster, before it may decide on a real one.

The policy's decisions are checked and placed as in a tick, on the site's nodes with nothing on them, for jobs that the
site had and for small jobs with and without parameter servers. Training is not simulated: the promotion gate
(``dl2d.learning.promotion_gate``) compares completion times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from dl2d.core.cluster import Node, Snapshot, Task, TaskState
from dl2d.core.jobs import NO_LAUNCH, Architecture, Job, JobKey, JobRequest, JobState, Owner
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.tick.place.place import place
from dl2d.tick.policy_check.decision_check import check_decision
from dl2d.tick.policy_check.waiting_jobs_that_fit import startable_waiting_jobs

#: Number of slots that are simulated. A job may be left waiting in the first, since some policies choose at random.
_SLOTS = 2
_SLOT_SECONDS = 300.0
#: Maximum number of ticks in which the tasks that were decided on in a slot are started.
_MAX_TICKS = 8
#: Maximum number of different requests that are tried.
_MAX_REQUESTS = 24
#: Number of jobs that are submitted at once.
_JOBS_AT_ONCE = 16
#: Nodes that are taken if those of the site are not known.
_DEFAULT_NODES = tuple(Node(f"node-{number}", Resources.of(cpu=32, gpu=8, memory=2**18)) for number in (1, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCheck:
    """Result of a start check."""

    #: Number of jobs that were tried.
    jobs: int
    #: Requests of those that the policy left waiting.
    waiting: tuple[JobRequest, ...]
    #: What the policy raised, or what was wrong with its decision; empty if nothing was.
    error: str = ""

    @property
    def problem(self) -> str:
        """Why the policy must not decide, in words that follow its name; empty if it may."""
        if self.error:
            return f"fails on an idle cluster: {self.error}"
        if not self.waiting:
            return ""
        first = self.waiting[0]
        demands = f"{first.worker} a worker" + (f" and {first.ps} a PS" if first.max_ps else "")
        return (
            f"leaves {len(self.waiting)} of {self.jobs} jobs waiting on an idle cluster "
            f"(one asks for {demands}, at least {first.min_size})"
        )


def start_check(
    policy: Policy, placement: Placement, nodes: Sequence[Node], requests: Iterable[JobRequest] = ()
) -> StartCheck:
    """Have a policy start a job of each request alone, and jobs of many requests at once.

    Parameters
    ----------
    nodes
        Nodes of the site, whatever is on them; if none of them takes tasks, two usual nodes are taken.
    requests
        Requests of jobs that the site had.
    """
    idle = _idle(nodes)
    jobs, waiting = 0, []
    for workload in _workloads(requests_to_try(placement, idle, requests)):
        jobs += len(workload)
        try:
            waiting += _left_waiting(policy, placement, idle, workload)
        except Exception as error:  # noqa: BLE001 - a plug-in, or weights from elsewhere, may raise anything
            return StartCheck(jobs=jobs, waiting=(), error=f"{type(error).__name__}: {error}")
    return StartCheck(jobs=jobs, waiting=tuple(waiting))


def requests_to_try(
    placement: Placement, nodes: Sequence[Node], requests: Iterable[JobRequest] = ()
) -> list[JobRequest]:
    """Requests of small jobs with and without parameter servers, and the first different ones of ``requests``.

    Jobs whose minimum size the empty nodes do not hold are left out.
    """
    idle = _idle(nodes)
    return _different([*_small_requests(idle), *requests], idle, placement)


def _idle(nodes: Sequence[Node]) -> list[Node]:
    """Nodes that take tasks, without anything on them; two usual ones if there are none."""
    idle = [structs.replace(node, used=NO_RESOURCES) for node in nodes if node.is_open]
    return idle or list(_DEFAULT_NODES)


def _small_requests(nodes: Sequence[Node]) -> Iterator[JobRequest]:
    """Small requests with and without parameter servers, of one bundle and of two.

    A worker needs a CPU, and a GPU if there are nodes that have one; a PS needs a CPU. Where nodes have none, it is one
    unit of another resource: policies may leave out jobs that ask for nothing. Nodes without resources get none.
    """
    capacity = max(nodes, key=lambda node: (node.capacity.get("gpu"), node.capacity.get("cpu"))).capacity
    names = {name for name, _ in capacity.thousandths}
    if not names:
        return
    of_ps = "cpu" if "cpu" in names else min(names - {"gpu"}, default="gpu")
    of_worker = {"cpu", "gpu"} & names or {of_ps}
    worker, ps = (capacity.minimum(Resources.of(dict.fromkeys(of_task, 1))) for of_task in (of_worker, {of_ps}))
    plain = JobRequest(
        name="plain", model="other", epochs=10.0, samples_per_epoch=1000.0, steps_per_epoch=None, batch=None,
        worker=worker, ps=ps,
    )  # fmt: skip
    yield plain
    yield replace(plain, min_workers=2, min_ps=2)
    yield replace(plain, ps=NO_RESOURCES, min_ps=0, max_ps=0, architecture=Architecture.ALLREDUCE)


def _different(requests: Iterable[JobRequest], nodes: Sequence[Node], placement: Placement) -> list[JobRequest]:
    """The first of the requests that ask for the same, without those whose minimum size the empty nodes do not hold."""
    examined: set[tuple[object, ...]] = set()
    different: list[JobRequest] = []
    empty = Packing(nodes, placement)
    for request in requests:
        asked = request.model, request.worker, request.ps, request.min_size, request.max_workers, request.max_ps
        if asked not in examined and empty.fits(_job(0, request), request.min_size):
            different.append(request)
        examined.add(asked)
        if len(different) == _MAX_REQUESTS:
            break
    return different


def _workloads(requests: Sequence[JobRequest]) -> Iterator[Sequence[JobRequest]]:
    """Each request alone; then ``_JOBS_AT_ONCE`` jobs at once, repeating the requests until there are that many."""
    yield from ([request] for request in requests)
    for start in range(0, len(requests), _JOBS_AT_ONCE):
        together = list(requests[start : start + _JOBS_AT_ONCE])
        yield (together * _JOBS_AT_ONCE)[:_JOBS_AT_ONCE]


def _left_waiting(
    policy: Policy, placement: Placement, nodes: Sequence[Node], workload: Sequence[JobRequest]
) -> list[JobRequest]:
    """Requests of the workload whose jobs are given nothing in the last slot although they have room."""
    jobs = tuple(_job(number, request) for number, request in enumerate(workload))
    tasks: list[Task] = []
    waiting: tuple[JobKey, ...] = ()
    task_count = 0
    for slot in range(1, _SLOTS + 1):
        snapshot = _snapshot(slot, nodes, jobs, tasks)
        packing = Packing.for_decision(snapshot.nodes, snapshot.tasks, placement)
        with np.errstate(all="ignore"):  # numbers that overflow are found by check_decision
            decision = policy.decide(snapshot, packing, np.random.default_rng([0, slot]))
        check_decision(decision, snapshot)
        for _ in range(_MAX_TICKS):
            plan = place(snapshot, decision, placement)
            waiting = startable_waiting_jobs(snapshot, decision, plan, placement)
            if not plan.starts and not plan.stops:
                break
            stopped = {(stop.job, stop.task) for stop in plan.stops}
            tasks = [task for task in tasks if (task.job, task.id) not in stopped]
            for start in plan.starts:
                task_count += 1
                tasks.append(start.task(task_count, state=TaskState.CONFIRMED))
            snapshot = _snapshot(slot, nodes, jobs, tasks)
    return [job.request for job in jobs if job.key in waiting]


def _snapshot(slot: int, nodes: Sequence[Node], jobs: tuple[Job, ...], tasks: Sequence[Task]) -> Snapshot:
    used: dict[str, list[Resources]] = {}
    for task in tasks:
        used.setdefault(task.node, []).append(task.demand)
    nodes = tuple(structs.replace(node, used=Resources.total(used.get(node.name, (NO_RESOURCES,)))) for node in nodes)
    started = {task.job for task in tasks}
    floors = tuple((job.key, job.request.min_size) for job in jobs if job.key in started)
    return Snapshot(at=slot * _SLOT_SECONDS, slot=slot, nodes=nodes, jobs=jobs, tasks=tuple(tasks), floors=floors)


def _job(number: int, request: JobRequest) -> Job:
    return Job(
        key=JobKey("start-check", str(number), number), request=request, owner=Owner("start-check", 0, 0),
        launch=NO_LAUNCH, state=JobState.READY,
    )  # fmt: skip
