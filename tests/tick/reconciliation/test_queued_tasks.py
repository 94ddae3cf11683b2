"""Elastic jobs that get no room beside jobs of others wait in the resource manager's queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec import structs
from tick.world import World

from dl2d.core.cluster import Node, TaskState
from dl2d.core.errors import Unavailable
from dl2d.core.jobs import NOTHING, Allocation, JobKey, JobState, Role
from dl2d.core.resource_manager import Claim, EligibleNodes, RmJob, RmJobState, StartAllowance, Yields
from dl2d.core.resources import Resources
from dl2d.testing import make_job, make_nodes
from dl2d.tick.reconciliation.queued_tasks import MAX_HELD_SECONDS
from dl2d.tick.tick_context import GuardRules, Timeouts
from dl2d.tick.tick_state import TickState

#: A claim that leaves nothing for a job without tasks: it waits for all nodes, with a higher priority.
OTHERS = Claim(handle="812", user="bob", priority=9000, nodes=2, demand=Resources.of(gpu=8, cpu=32), whole=True)

QUEUE_SECONDS = Timeouts().queue_seconds


@pytest.fixture
def world() -> Iterator[World]:
    world = World(url="", queues_tasks=True, cluster_nodes=full_nodes())
    world.manager.claims = [OTHERS]
    yield world
    world.close()


def full_nodes() -> list[Node]:
    """Two nodes, which jobs of others fill."""
    return [structs.replace(node, used=node.capacity) for node in make_nodes()[:2]]


def empty(world: World, number: int = 0) -> None:
    """Jobs of others end on a node; the resource manager may give the room to whom it likes."""
    world.manager.set_node(make_nodes()[number])


def wait(world: World, seconds: float, step: float = 20.0) -> None:
    """Ticks and heartbeats over so many seconds."""
    for _ in range(int(seconds / step)):
        world.tick(step)
        world.beat()


def queued(world: World) -> list[str]:
    """Handles of the tasks that wait without a node."""
    live = {job.handle for job in world.manager.live() if job.state is RmJobState.PENDING}
    return [handle for handle in world.manager.queued if handle in live]


def in_queue(world: World, **changes: object) -> JobKey:
    key = world.ready(**changes)
    wait(world, QUEUE_SECONDS + 20)
    return key


def start_queued(world: World, ticks: int = 4) -> list[str]:
    """The resource manager starts what is queued, the worker first and then its server; returns the nodes."""
    nodes: list[str] = []
    for _ in range(ticks):
        nodes += world.manager.start_queued()
        world.tick(1.0)
        world.beat()
    return nodes


def test_a_job_that_gets_no_room_beside_others_is_queued_at_its_smallest_size_and_trains_where_it_is_started(
    world: World,
) -> None:
    key = world.ready()
    wait(world, QUEUE_SECONDS - 20)
    assert not queued(world)
    wait(world, 40)
    # Its worker first: a server, which needs no GPU, may start long before.
    assert [(task.id, task.node, task.state) for task in world.tasks(key)] == [("worker-0", "", TaskState.ASKED)]
    # The policy goes on deciding on the job by what runs.
    report = world.tick()
    assert report.snapshot.tasks == ()
    (entry,) = report.decision.jobs
    assert (entry.previous, entry.allocation) == (NOTHING, NOTHING)
    # It waits for as long as it takes.
    wait(world, 7200, 60)
    assert len(queued(world)) == 1
    empty(world)
    nodes = start_queued(world)
    assert world.job(key).state is JobState.RUNNING
    assert {task.node for task in world.tasks(key)} == set(nodes)
    report = world.tick()
    assert dict(report.snapshot.floors) == {key: Allocation(1, 1)}
    assert not report.snapshot.silent


def test_its_tasks_keep_their_place_when_nobody_else_waits_and_are_withdrawn_when_the_job_has_tasks(
    world: World,
) -> None:
    key = in_queue(world)
    world.manager.claims = []
    wait(world, 1200)
    assert len(queued(world)) == 1
    empty(world)
    wait(world, world.slot_seconds + 60)  # the policy sees the room before the resource manager starts them
    assert world.has(key).workers >= 1
    assert all(task.node for task in world.tasks(key))
    assert not queued(world)


def test_a_job_whose_tasks_preempt_running_jobs_is_queued_although_nobody_waits(world: World) -> None:
    world.manager.claims = []
    key = in_queue(world)
    assert not queued(world)
    world.manager.may_preempt = frozenset({world.job(key).anchor})
    wait(world, QUEUE_SECONDS - 20)
    assert not queued(world)
    wait(world, 40)
    assert len(queued(world)) == 1


def test_what_starts_first_is_kept_until_the_rest_starts_and_given_up_if_that_takes_too_long(world: World) -> None:
    key = in_queue(world)

    def start_the_worker_alone() -> None:
        empty(world)
        assert len(world.manager.start_queued()) == 1
        world.manager.set_node(structs.replace(make_nodes()[0], used=make_nodes()[0].capacity))

    start_the_worker_alone()
    wait(world, MAX_HELD_SECONDS - 20)
    assert [(task.role, bool(task.node)) for task in world.tasks(key)] == [("worker", True), ("ps", False)]
    assert world.tick().snapshot.silent == (key,)
    wait(world, 120)
    assert not world.tasks(key)
    wait(world, QUEUE_SECONDS + 60)
    start_the_worker_alone()
    wait(world, 100)
    empty(world)
    assert start_queued(world)
    assert world.job(key).state is JobState.RUNNING
    assert world.tick().snapshot.silent == ()


def wait_for_others(world: World, seconds: float) -> None:
    """Ticks and heartbeats over so many seconds, in which others take at once what becomes free."""
    for _ in range(int(seconds / 60)):
        world.tick(60.0)
        for node in full_nodes():
            world.manager.set_node(node)
        world.beat()


def start_alone(world: World, handle: str) -> None:
    """One of the tasks that wait in the queue starts; others take what else is free."""
    kept = world.manager.queued
    world.manager.queued = {handle: kept[handle]}
    empty(world)
    assert len(world.manager.start_queued()) == 1
    world.manager.queued = kept
    world.manager.set_node(full_nodes()[0])


def queued_of(world: World, key: JobKey) -> str:
    """Handle of the only task of a job that waits in the queue."""
    (handle,) = [task.handle for task in world.tasks(key) if task.state is TaskState.ASKED]
    return handle


@pytest.mark.parametrize(
    ("worker_waits", "server_waits"), [(1200.0, 1200.0), (0.0, 1200.0), (1200.0, 0.0), (4 * 3600.0, 5 * 3600.0)]
)
def test_a_job_starts_however_long_a_turn_in_the_queue_takes(
    world: World, worker_waits: float, server_waits: float
) -> None:
    key, submitted = world.ready(), world.now
    longest = max(worker_waits, server_waits)
    while world.job(key).state is JobState.READY:
        wait_for_others(world, 60)
        assert world.now < submitted + 5 * longest
        for task in world.tasks(key):
            waits = worker_waits if task.role is Role.WORKER else server_waits
            if not task.node and world.now - task.asked_at >= waits:
                start_alone(world, task.handle)
    assert world.job(key).state is JobState.RUNNING


@pytest.mark.parametrize("restarted", [False, True])
def test_one_job_at_a_time_keeps_its_worker_for_as_long_as_it_had_waited_and_others_for_less(
    world: World, restarted: bool
) -> None:
    keys = [world.ready() for _ in range(3)]
    wait_for_others(world, 7200)

    def that_have_a_worker() -> list[JobKey]:
        return [key for key in keys if any(task.node and task.state.wanted for task in world.tasks(key))]

    # Not in the order of submission.
    for key in (keys[1], keys[0]):
        start_alone(world, queued_of(world, key))
        wait_for_others(world, 120)
    if restarted:
        world.state = TickState(slot=world.state.slot)
        wait_for_others(world, 180)
    wait_for_others(world, MAX_HELD_SECONDS - 180)
    assert that_have_a_worker() == keys[:2]
    wait_for_others(world, 120)
    assert that_have_a_worker() == [keys[1]]
    # When the server of the first has started, the next one keeps its worker for long.
    start_alone(world, queued_of(world, keys[2]))
    wait_for_others(world, 300)
    start_alone(world, queued_of(world, keys[1]))
    wait_for_others(world, 6900)
    assert world.job(keys[1]).state is JobState.RUNNING
    assert that_have_a_worker() == keys[1:]
    wait_for_others(world, 1800)
    assert that_have_a_worker() == [keys[1]]


@pytest.mark.parametrize("seconds", [1.0, 20.0])
def test_tasks_that_start_before_the_next_tick_are_kept(world: World, seconds: float) -> None:
    key = world.ready()
    while not queued(world):
        world.tick(seconds)
        world.beat()
    empty(world)
    assert len(world.manager.start_queued()) == 1
    world.settle()
    assert "worker-0" in {task.id for task in world.tasks(key) if task.state is TaskState.CONFIRMED}
    assert start_queued(world)
    assert {"worker-0", "ps-0"} <= {task.id for task in world.tasks(key)}
    assert world.job(key).state is JobState.RUNNING


@pytest.mark.parametrize(
    "case",
    [
        "nobody waits",
        "for other nodes",
        "for no node",
        "kept free",
        "no queue",
        "not allowed",
        "too large",
        "many tasks",
    ],
)
def test_a_job_is_not_queued_if(world: World, case: str) -> None:
    changes: dict[str, object] = {}
    if case == "nobody waits":
        world.manager.claims = []
    elif case == "for no node":
        world.manager.claims = [structs.replace(OTHERS, eligible=frozenset())]
    elif case == "many tasks":
        changes = {"min_workers": 2}
    elif case == "for other nodes":
        names = [node.name for node in world.manager.nodes]
        world.manager.claims = [structs.replace(OTHERS, nodes=1, eligible=frozenset(names[1:]))]
        world.manager.eligible = {"m1": EligibleNodes(frozenset(names[:1]), "partition small")}
    elif case == "kept free":
        world.manager.claims = [structs.replace(OTHERS, standing=True)]
    elif case == "no queue":
        world.queues_tasks = False
    elif case == "not allowed":
        world.rules = GuardRules(per_user=Resources.of(cpu=1))
    else:
        changes = {"worker": Resources.of(cpu=10_000)}
    in_queue(world, **changes)
    assert not queued(world)


def test_nothing_is_queued_by_an_incomplete_listing(world: World) -> None:
    key = world.ready()
    wait(world, QUEUE_SECONDS - 20)
    world.manager.incomplete = ("squeue: cannot read",)
    wait(world, 100)
    assert not queued(world)
    world.manager.incomplete = ()
    wait(world, 20)
    assert {task.job for task in world.tasks(key)} == {key}


def test_elastic_jobs_give_up_tasks_to_a_queued_one_as_to_jobs_of_others() -> None:
    world = World(url="", queues_tasks=True, cluster_nodes=list(make_nodes()[:1]))
    world.manager.yields = Yields.ALWAYS
    large = world.settled()
    before = world.has(large)
    assert before.workers > 1
    # Others wait for what will never be free, so that nothing is vacated for them.
    world.manager.claims = [structs.replace(OTHERS, nodes=2, priority=1)]
    world.policy = world.fallback  # in the order of the queue: nothing is left for the second job
    key = world.ready()
    wait(world, QUEUE_SECONDS + 200)
    assert start_queued(world)
    world.settle()
    assert world.job(key).state is JobState.RUNNING
    assert world.has(large).workers < before.workers
    world.close()


def test_a_task_that_fails_in_the_queue_is_queued_again_and_a_start_that_is_not_answered_is_found(
    world: World,
) -> None:
    key = in_queue(world)
    (first,) = queued(world)
    world.manager.end(first, RmJobState.CANCELLED, "CANCELLED by 0")
    wait(world, 300)
    (second,) = queued(world)
    assert [task.id for task in world.tasks(key)] == ["worker-1"]
    world.manager.refuse = Unavailable("no answer")
    world.manager.end(second, RmJobState.CANCELLED, "CANCELLED by 0")
    wait(world, 400)
    world.manager.refuse = None
    wait(world, 300)
    assert len(queued(world)) == 1


def test_starts_where_there_is_room_come_before_those_in_the_queue(world: World) -> None:
    world.start_allowance = lambda: StartAllowance(2, "the rate of requests")
    names = [node.name for node in world.manager.nodes]
    world.manager.claims = [structs.replace(OTHERS, nodes=1, eligible=frozenset(names[:1]))]
    keys = [world.ready() for _ in range(6)]
    world.manager.eligible = {
        world.job(key).anchor: EligibleNodes(frozenset(names[at == 5 :][:1]), "partition")
        for at, key in enumerate(keys)
    }
    wait(world, QUEUE_SECONDS - 20)
    world.manager.set_node(make_nodes()[1])
    wait(world, 60)
    assert world.has(keys[5]) != NOTHING
    assert len(queued(world)) >= 2


def test_jobs_are_queued_some_in_each_tick(world: World) -> None:
    for _ in range(70):
        world.submit()
    wait(world, QUEUE_SECONDS + 40)
    assert 60 <= len(queued(world)) <= 70
    wait(world, 40)
    assert len(queued(world)) == 70


def test_a_daemon_that_starts_again_finds_them_in_the_queue(world: World) -> None:
    key = in_queue(world)
    world.state = TickState(slot=world.state.slot)
    wait(world, 300)
    assert len(queued(world)) == len(world.tasks(key)) == 1
    empty(world)
    start_queued(world)
    assert world.job(key).state is JobState.RUNNING
    assert {"worker-0", "ps-0"} <= {task.id for task in world.tasks(key)}


def test_a_job_that_trains_and_lost_a_task_of_its_smallest_size_is_queued_with_it(world: World) -> None:
    empty(world)
    world.manager.claims = []
    key = world.settled()
    assert world.job(key).state is JobState.RUNNING
    world.manager.claims = [OTHERS]
    for task in world.tasks(key):
        if task.id.startswith("worker-"):
            world.manager.end(task.handle, RmJobState.LOST, "node failed")
    world.manager.put(RmJob(handle="9", state=RmJobState.RUNNING, user="bob", node="n1"), ())
    world.manager.set_node(structs.replace(make_nodes()[0], used=make_nodes()[0].capacity))
    wait(world, QUEUE_SECONDS + 60)
    (handle,) = queued(world)
    assert "worker-" in world.manager.queued[handle].name
    world.manager.set_node(make_nodes()[0])
    world.manager.start_queued()
    world.settle()
    assert world.has(key).workers >= 1
    assert not queued(world)


def test_queued_tasks_reserve_no_limit_and_are_withdrawn_when_others_have_it(world: World) -> None:
    demand = make_job(1).request.demand_of(Allocation(1, 1))
    world.rules = GuardRules(per_user=demand)
    key = in_queue(world)
    assert len(queued(world)) == 1
    other = world.ready()
    wait(world, QUEUE_SECONDS + 60)
    assert not world.tasks(other)  # both wait, one of them in the queue
    empty(world)
    wait(world, world.slot_seconds + 60)
    assert {world.has(key), world.has(other)} == {Allocation(1, 1), NOTHING}
    assert not queued(world)


def test_a_job_that_ends_takes_its_tasks_out_of_the_queue(world: World) -> None:
    key = in_queue(world)
    world.manager.end(world.job(key).anchor, RmJobState.CANCELLED, "CANCELLED by 1000")
    wait(world, 40)
    assert not queued(world)
    assert world.job(key).state is JobState.CANCELLED


def test_tasks_that_lost_the_room_on_their_nodes_to_others_are_queued_as_well(world: World) -> None:
    """Each time that room is seen, others have it before the task starts there."""
    world.manager.pending = True
    key = world.ready()
    for _ in range(int(QUEUE_SECONDS / 20) + 1):
        empty(world)
        world.tick(20)
        world.beat()
        world.manager.set_node(structs.replace(make_nodes()[0], used=make_nodes()[0].capacity))
    wait(world, 40)
    assert [task.role for task in world.tasks(key) if not task.node] == ["worker"]


def test_others_that_do_not_wait_for_a_moment_change_nothing(world: World) -> None:
    world.ready()
    for _ in range(int(QUEUE_SECONDS / 40)):
        world.manager.claims = []
        world.tick(20)
        world.manager.claims = [OTHERS]
        wait(world, 20)
    wait(world, 60)
    assert len(queued(world)) == 1
    for _ in range(5):
        world.manager.claims = []
        wait(world, 400)
        world.manager.claims = [OTHERS]
        wait(world, 20)
    assert len(queued(world)) == 1


def test_nodes_that_a_job_avoids_are_not_chosen_for_its_queued_tasks(world: World) -> None:
    key = in_queue(world)
    empty(world)
    (node,) = world.manager.start_queued()
    world.tick()
    world.manager.end(next(task.handle for task in world.tasks(key)), RmJobState.FAILED, "exit status 1")
    world.manager.set_node(structs.replace(make_nodes()[0], used=make_nodes()[0].capacity))
    wait(world, QUEUE_SECONDS + 60)
    assert world.manager.submitted[-1].node == ""
    assert world.manager.submitted[-1].avoid == (node,)
