"""Tasks that get more than they demand: what policies and placing see of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from msgspec import structs
from tick.world import World

from dl2d.core.cluster import Node, Task, TaskState
from dl2d.core.jobs import Allocation, Architecture, JobKey, Role
from dl2d.core.resource_manager import GrowthLimit, RmJob, RmJobState, RmListing, TaskSpec
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.simulation.in_memory_resource_manager import MemoryManager
from dl2d.testing import make_job
from dl2d.tick.observation.allocated_resources import with_given

CPU = Resources.of(cpu=1)
MEMORY = Resources.of(cpu=1, memory=500)


@dataclass(frozen=True)
class Gives:
    """Cores of some CPUs, and so much memory for each CPU to a task that demands none."""

    core: int = 1
    memory: int = 0

    def __call__(self, demand: Resources) -> Resources:
        cpus = math.ceil(demand.get("cpu") / self.core) * self.core
        return Resources.of(cpu=cpus, memory=demand.get("memory") or cpus * self.memory)


CORES = Gives(core=2)
BOTH = Gives(core=2, memory=100)

# Jobs and tasks of one snapshot


@pytest.mark.parametrize(
    ("demand", "given", "expected"),
    [
        (CPU, None, {"cpu": 1}),
        (CPU, CORES, {"cpu": 2}),
        (Resources.of(cpu=2), CORES, {"cpu": 2}),
        (CPU, BOTH, {"cpu": 2, "memory": 200}),
        (MEMORY, BOTH, {"cpu": 2, "memory": 500}),
        (Resources.of(cpu=3, gpu=1), BOTH, {"cpu": 4, "gpu": 1, "memory": 400}),
        (NO_RESOURCES, BOTH, {}),
    ],
)
def test_demands_are_what_tasks_get(demand: Resources, given: Gives | None, expected: dict[str, float]) -> None:
    job = replace(make_job(1, worker=demand, ps=NO_RESOURCES), anchor="a1")
    listing = RmListing(1.0, (), (), given={"a1": given} if given else {})
    (seen,), _ = with_given([job], [], listing)
    assert seen.request.worker.as_dict() == expected
    assert seen.request.ps == NO_RESOURCES


@pytest.mark.parametrize(
    ("handle", "listed", "given", "expected"),
    [
        pytest.param("", NO_RESOURCES, {"a1": BOTH}, ((2, 200), ()), id="not running"),
        pytest.param("7", Resources.of(cpu=2, memory=200), {"a1": BOTH}, ((2, 200), ()), id="what was expected"),
        pytest.param("7", Resources.of(cpu=2, memory=900), {"a1": BOTH}, ((2, 200), (2, 900)), id="more"),
        pytest.param("7", Resources.of(cpu=1, memory=50), {"a1": BOTH}, ((2, 200), (1, 50)), id="less, by old rules"),
        pytest.param("7", NO_RESOURCES, {"a1": BOTH}, ((2, 200), ()), id="not said"),
        pytest.param("7", Resources.of(cpu=2), {}, ((1, 0), (2, 0)), id="more, of which nothing is known"),
        pytest.param("7", Resources.of(cpu=2), {"a2": BOTH}, ((1, 0), (2, 0)), id="more, by the rules of other jobs"),
    ],
)
def test_running_tasks_have_what_they_hold(
    handle: str, listed: Resources, given: dict[str, Gives], expected: tuple[tuple[float, ...], ...]
) -> None:
    job = replace(make_job(1, worker=CPU), anchor="a1")
    task = Task(job=job.key, id="worker-0", role=Role.WORKER, node="n1", demand=CPU, handle=handle)
    running = RmJob(handle="7", state=RmJobState.RUNNING, node="n1", held=listed)
    _, (seen,) = with_given([job], [task], RmListing(1.0, (), (running,), given=given))
    assert (amounts(seen.demand), amounts(seen.held)) == expected


def amounts(resources: Resources) -> tuple[float, ...]:
    return (resources.get("cpu"), resources.get("memory")) if resources.thousandths else ()


@pytest.mark.parametrize("why", ["static", "ended"])
def test_tasks_that_dl2d_does_not_start_keep_their_demands(why: str) -> None:
    job = replace(make_job(1, worker=CPU), anchor="a1", static=why == "static")
    task = Task(job=job.key, id="worker-0", role=Role.WORKER, node="n1", demand=CPU)
    jobs, tasks = with_given([job] if why == "static" else [], [task], RmListing(1.0, (), (), given={"a1": BOTH}))
    assert tasks == (task,)
    assert jobs in ((), (job,))


# Whole ticks


class Generous(MemoryManager):
    """Gives tasks more than they demand. As in Slurm, those that have no room on their nodes wait."""

    def __init__(self, nodes: list[Node], world: World, gives: Gives) -> None:
        super().__init__(nodes, lambda: world.now)
        self._gives = gives
        self.submitted: list[Resources] = []

    def listing(self, *more: Any) -> RmListing:
        found = super().listing(*more)
        anchors = [job.handle for job in found.jobs if job.tag.endswith(":anchor")]
        return replace(found, given=dict.fromkeys(anchors, self._gives))

    def submit(self, task: TaskSpec) -> str:
        if task.role is Role.COORDINATOR:
            return super().submit(task)
        self.submitted.append(task.demand)
        given = task.demand.maximum(self._gives(task.demand))
        free = {node.name: node.capacity.minus(node.used) for node in self.nodes}[task.node]
        handle = super().submit(structs.replace(task, demand=NO_RESOURCES))
        job = next(job for job in self.live() if job.handle == handle)
        if given.fits_in(free):
            self.put(structs.replace(job, held=given), ((task.node, given),))
        else:
            self.put(structs.replace(job, state=RmJobState.PENDING, reason="Resources"), ())
        return handle


ALL_REDUCE = {"architecture": Architecture.ALLREDUCE, "ps": NO_RESOURCES, "min_ps": 0, "max_ps": 0, "max_workers": 16}


def a_world(gives: Gives, *nodes: Resources, **more: Any) -> World:
    cluster = [Node(f"n{number}", capacity) for number, capacity in enumerate(nodes, 1)]
    world = World(cluster_nodes=cluster, **more)
    world.manager = world.coordinator._manager = Generous(cluster, world, gives)  # type: ignore[assignment]
    return world


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.close()


def run(world: World, ticks: int = 40) -> None:
    """Ticks in none of which a task waits in the resource manager."""
    for _ in range(ticks):
        world.tick()
        assert not [job for job in world.manager.live() if job.state is RmJobState.PENDING]
        world.beat()


NODE = Resources.of(cpu=8, memory=1000)


@pytest.mark.parametrize(
    ("gives", "demand", "nodes", "expected"),
    [
        pytest.param(Gives(), CPU, [NODE, NODE], 16, id="as asked for"),
        pytest.param(CORES, CPU, [NODE, NODE], 8, id="cores of two threads"),
        pytest.param(CORES, Resources.of(cpu=3), [NODE, NODE], 4, id="two cores for three CPUs"),
        pytest.param(Gives(memory=300), CPU, [NODE, NODE], 6, id="memory for each CPU"),
        pytest.param(BOTH, CPU, [NODE, NODE], 8, id="memory and cores"),
        pytest.param(Gives(memory=600), CPU, [Resources.of(cpu=8, memory=500), NODE], 1, id="one node has room"),
        pytest.param(BOTH, MEMORY, [NODE, NODE], 4, id="memory that is demanded"),
    ],
)
def test_a_job_starts_with_as_many_tasks_as_fit_and_none_waits(
    worlds: list[World], gives: Gives, demand: Resources, nodes: list[Resources], expected: int
) -> None:
    world = a_world(gives, *nodes)
    worlds.append(world)
    key = world.submit(worker=demand, **ALL_REDUCE)
    run(world)
    assert world.has(key) == Allocation(expected, 0)
    # It is stored and submitted as its user demands.
    assert {task.demand for task in world.store.tasks(live=True, job=key)} == {demand}
    assert set(world.manager.submitted) == {demand}  # type: ignore[attr-defined]
    assert world.job(key).request.worker == demand


def test_two_jobs_share_what_their_tasks_get(worlds: list[World]) -> None:
    world = a_world(BOTH, NODE, NODE)
    worlds.append(world)
    keys = [world.submit(worker=CPU, **ALL_REDUCE) for _ in range(2)]
    run(world, 60)
    assert [world.has(key) for key in keys] == [Allocation(4, 0)] * 2


def test_a_job_that_shrinks_leaves_room_for_what_another_ones_task_gets(worlds: list[World]) -> None:
    """A worker of the second job gets four CPUs, for which two tasks of the first have to leave one node."""
    world = a_world(Gives(core=4), NODE)
    worlds.append(world)
    first = world.submit(worker=CPU, **ALL_REDUCE)
    run(world)
    assert world.has(first) == Allocation(2, 0)
    second = world.submit(worker=Resources.of(cpu=3), **ALL_REDUCE)
    run(world)
    assert [world.has(key) for key in (first, second)] == [Allocation(1, 0)] * 2


def test_a_task_moves_where_it_gets_its_room(worlds: list[World]) -> None:
    """It reaches its time limit. Others hold the remainder of its node; n2 has room for its demand only."""
    others = Resources.of(cpu=6)
    world = a_world(CORES, NODE, Resources.of(cpu=1, memory=1000), Resources.of(cpu=2, memory=1000))
    worlds.append(world)
    key = world.submit(worker=CPU, **{**ALL_REDUCE, "max_workers": 1})
    run(world, 6)
    assert nodes_of(world, key) == {"n1"}
    world.manager.set_node(Node("n1", NODE, used=others))
    (running,) = [job for job in world.manager.live() if not job.tag.endswith(":anchor")]
    limited = structs.replace(running, time_limit_at=world.now + 3600)
    world.manager.put(limited, (("n1", running.held),))
    world.now, world.elapsed = world.now + 3500, world.elapsed + 3500
    run(world)
    assert nodes_of(world, key) == {"n3"}


class Limited(Generous):
    """Tasks beyond four CPUs wait for a limit, which no listing tells."""

    def submit(self, task: TaskSpec) -> str:
        handle = super().submit(task)
        jobs = {job.handle: job for job in self.live()}
        anchors = frozenset(job.handle for job in jobs.values() if job.tag.endswith(":anchor"))
        if sum(job.held.get("cpu") for job in jobs.values()) > 4:
            limit = GrowthLimit(anchors, {"cpu": 0.0}, "QOS high has no more")
            waits = {"state": RmJobState.PENDING, "reason": "QOSGrpCpuLimit", "limit": limit, "held": NO_RESOURCES}
            self.put(structs.replace(jobs[handle], **waits), ())
        return handle


def test_a_limit_that_was_learned_leaves_room_for_a_task_in_place_of_one_that_ended(worlds: list[World]) -> None:
    world = a_world(CORES, NODE, slot_seconds=20.0)
    worlds.append(world)
    world.manager = world.coordinator._manager = Limited(world.cluster_nodes, world, CORES)  # type: ignore[assignment]
    key = world.submit(worker=CPU, **ALL_REDUCE)
    while not world.store.guard_state().learned_limits or world.has(key) != Allocation(2, 0):
        world.tick()
        world.beat()
        assert world.now < 1_001_000
    last = [job for job in world.manager.live() if ":worker" in job.tag and job.state is RmJobState.RUNNING][-1]
    world.manager.end(last.handle, RmJobState.PREEMPTED, "for another job")
    for _ in range(4):
        world.tick()
        world.beat()
    assert world.has(key) == Allocation(2, 0)


def nodes_of(world: World, key: JobKey) -> set[str]:
    return {task.node for task in world.store.tasks(live=True, job=key) if task.state is TaskState.CONFIRMED}
