"""Start check: whether a policy starts jobs on an idle cluster, tried before it may decide on a real one. Pure.

A policy is asked, checked and placed as in a tick, on a site's own nodes with nothing on them, for jobs that the site
had and for plain jobs of each kind. Training is not played: comparing completion times is the gate's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from msgspec import structs

from dl2d.core.cluster import Node, NodeState, Snapshot, Task, TaskState
from dl2d.core.jobs import Architecture, Job, JobKey, JobRequest, JobState, Launch, Owner
from dl2d.core.packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.core.store import Store
from dl2d.tick.guard import check, check_scores
from dl2d.tick.idle_cluster import idle_jobs
from dl2d.tick.place.place import place

#: Intervals that are run. A job may be left waiting in the first, since some policies choose at random.
_SLOTS: Final = 2
_SLOT_SECONDS: Final = 300.0
#: Maximum number of ticks until what was decided in an interval runs.
_MAX_TICKS: Final = 8
#: Maximum number of kinds of jobs that are tried, and of jobs at once.
_MAX_KINDS: Final = 24
_MAX_JOBS: Final = 16
#: Maximum number of jobs of a store from which kinds are taken, newest first.
_MAX_STORED_JOBS: Final = 200
#: Nodes where those of the site are not known.
_DEFAULT_NODES: Final = tuple(Node(f"node-{number}", Resources.of(cpu=32, gpu=8, memory=2**18)) for number in (1, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCheck:
    """Result: the number of jobs that were tried, and the requests of those that were left waiting."""

    jobs: int
    waiting: tuple[JobRequest, ...]
    #: What the policy raised, or what was wrong with its answer; empty for nothing.
    error: str = ""

    @property
    def problem(self) -> str:
        """Why the policy must not decide, in words that follow its name; empty where it may."""
        if self.error:
            return f"fails on an idle cluster: {self.error}"
        if not self.waiting:
            return ""
        one = self.waiting[0]
        kinds = f"one asks for {one.worker} a worker" + (f" and {one.ps} a PS" if one.max_ps else "")
        return (
            f"leaves {len(self.waiting)} of {self.jobs} jobs waiting on an idle cluster ({kinds}, at least {one.least})"
        )


def start_check(
    policy: Policy, placement: Placement, nodes: Sequence[Node], requests: Iterable[JobRequest] = (), *, seed: int = 0
) -> StartCheck:
    """Have a policy start jobs of each kind by itself and of many kinds at once, and count those that are left waiting.

    Parameters
    ----------
    nodes
        Of the site, whatever is on them; where there are none that take tasks, usual ones.
    requests
        Of jobs that the site had.
    """
    idle = [structs.replace(node, used=NO_RESOURCES) for node in nodes if node.state is NodeState.UP] or list(
        _DEFAULT_NODES
    )
    kinds = _kinds([*_plain(idle), *requests], idle, placement)
    jobs, waiting = 0, []
    for load in _loads(kinds):
        jobs += len(load)
        try:
            waiting += _left_waiting(policy, placement, idle, load, seed)
        except Exception as error:  # noqa: BLE001 - a plug-in, or weights from outside: whatever it raises is the answer
            return StartCheck(jobs=jobs, waiting=(), error=f"{type(error).__name__}: {error}")
    return StartCheck(jobs=jobs, waiting=tuple(waiting))


def site_start_check(policy: Policy, placement: Placement, store: Store) -> StartCheck:
    """The start check on the nodes of a site's newest slot, for the newest jobs of its store.

    Raises
    ------
    StoreError
        The store cannot be read.
    """
    newest = store.slot(store.last_slot_number())
    requests = [job.request for job in store.jobs(live=False, limit=_MAX_STORED_JOBS)]
    return start_check(policy, placement, newest.snapshot.nodes if newest is not None else (), requests)


def _plain(nodes: Sequence[Node]) -> Iterator[JobRequest]:
    """Small requests with and without parameter servers, of one bundle and of two."""
    whole = dict(
        max(nodes, key=lambda node: sum(amount for _, amount in node.capacity.thousandths)).capacity.thousandths
    )
    worker = Resources(
        tuple((name, min(amount, 1000)) for name, amount in sorted(whole.items()) if name in ("cpu", "gpu"))
    )
    ps = Resources(tuple((name, min(amount, 1000)) for name, amount in sorted(whole.items()) if name == "cpu"))
    plain = JobRequest(
        name="plain", model="other", epochs=10.0, samples_per_epoch=1000.0, steps_per_epoch=None, batch=None,
        worker=worker, ps=ps,
    )  # fmt: skip
    yield plain
    yield replace(plain, min_workers=2, min_ps=2)
    yield replace(plain, ps=NO_RESOURCES, min_ps=0, max_ps=0, architecture=Architecture.ALLREDUCE)


def _kinds(requests: Iterable[JobRequest], nodes: Sequence[Node], placement: Placement) -> list[JobRequest]:
    """The requests that differ in what they ask for, as far as the empty nodes hold their least size."""
    seen: set[tuple[object, ...]] = set()
    found: list[JobRequest] = []
    empty = Packing(nodes, placement)
    for request in requests:
        kind = request.model, request.worker, request.ps, request.least, request.max_workers, request.max_ps
        if kind not in seen and empty.fits(_job(0, request), request.least):
            found.append(request)
        seen.add(kind)
        if len(found) == _MAX_KINDS:
            break
    return found


def _loads(kinds: Sequence[JobRequest]) -> Iterator[Sequence[JobRequest]]:
    yield from ([kind] for kind in kinds)
    for start in range(0, len(kinds), _MAX_JOBS):
        together = list(kinds[start : start + _MAX_JOBS])
        yield (together * _MAX_JOBS)[:_MAX_JOBS]


def _left_waiting(
    policy: Policy, placement: Placement, nodes: Sequence[Node], load: Sequence[JobRequest], seed: int
) -> list[JobRequest]:
    """Those of the load that are given nothing in the last interval, though there is room for them."""
    jobs = tuple(_job(number, request) for number, request in enumerate(load))
    tasks: list[Task] = []
    idle: tuple[JobKey, ...] = ()
    count = 0
    for slot in range(1, _SLOTS + 1):
        seen = _snapshot(slot, nodes, jobs, tasks)
        packing = Packing.for_decision(seen.nodes, seen.tasks, placement)
        with np.errstate(all="ignore"):  # what comes of it is checked
            decision = policy.decide(seen, packing, np.random.default_rng([seed, slot]))
        check(decision, seen)
        check_scores(decision)
        for _ in range(_MAX_TICKS):
            plan = place(seen, decision, placement)
            idle = idle_jobs(seen, decision, plan, placement)
            if not plan.starts and not plan.stops:
                break
            stopped = {(stop.job, stop.task) for stop in plan.stops}
            tasks = [task for task in tasks if (task.job, task.id) not in stopped]
            for start in plan.starts:
                count += 1
                tasks.append(
                    Task(job=start.job, id=f"{start.role}-{count}", role=start.role, node=start.node,
                         demand=start.demand, state=TaskState.CONFIRMED)
                )  # fmt: skip
            seen = _snapshot(slot, nodes, jobs, tasks)
    return [job.request for job in jobs if job.key in idle]


def _snapshot(slot: int, nodes: Sequence[Node], jobs: tuple[Job, ...], tasks: Sequence[Task]) -> Snapshot:
    used: dict[str, list[Resources]] = {}
    for task in tasks:
        used.setdefault(task.node, []).append(task.demand)
    own = tuple(structs.replace(node, used=Resources.total(used.get(node.name, (NO_RESOURCES,)))) for node in nodes)
    has = {task.job for task in tasks}
    floors = tuple((job.key, job.request.least) for job in jobs if job.key in has)
    return Snapshot(at=slot * _SLOT_SECONDS, slot=slot, nodes=own, jobs=jobs, tasks=tuple(tasks), floors=floors)


def _job(number: int, request: JobRequest) -> Job:
    return Job(
        key=JobKey("start-check", str(number), number), request=request, owner=Owner("start-check", 0, 0),
        launch=Launch((), ""), state=JobState.READY,
    )  # fmt: skip
