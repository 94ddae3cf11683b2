from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl2d.core.cluster import Node, NodeState, Task, TaskState
from dl2d.core.decision import Constraint
from dl2d.core.jobs import Allocation, Job, JobKey, JobRequest, Launch, Owner, Role
from dl2d.core.packing import Blocked, Packing
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.placement.load_balance import LoadBalance

PLACEMENT = LoadBalance()
FOUR = Resources.of(cpu=4)


def a_job(worker: Resources, ps: Resources, number: int = 1) -> Job:
    request = JobRequest(
        name="j", model="other", epochs=1, samples_per_epoch=1, steps_per_epoch=None, batch=None, worker=worker, ps=ps
    )
    return Job(key=JobKey("c", str(number), 1), request=request, owner=Owner("u", 1, 1), launch=Launch(("x",), "/"))


def a_task(job: Job, number: int, node: str, role: Role = Role.WORKER) -> Task:
    return Task(
        job=job.key, id=f"{role}-{number}", role=role, node=node, demand=job.request.demand(role),
        state=TaskState.CONFIRMED,
    )  # fmt: skip


resources = st.builds(
    lambda cpu, gpu, memory: Resources.of(cpu=cpu / 4, gpu=gpu / 4, memory=memory),
    st.integers(0, 32), st.integers(0, 8), st.integers(0, 64),
)  # fmt: skip
demands = resources.filter(lambda demand: bool(demand.thousandths))
node_lists = st.lists(st.tuples(resources, resources, st.sampled_from(NodeState)), max_size=5).map(
    lambda given_nodes: [
        Node(f"n{number}", capacity, used, state) for number, (capacity, used, state) in enumerate(given_nodes)
    ]
)


@given(node_lists, st.lists(demands, max_size=12))
def test_what_is_placed_fits_in_the_room_that_is_free_on_a_node_that_takes_tasks(nodes, wanted) -> None:
    packing = Packing(nodes, PLACEMENT)
    placed: dict[str, list[Resources]] = {node.name: [] for node in nodes}
    by_name = {node.name: node for node in nodes}
    for demand in wanted:
        where = packing.place(demand, Role.WORKER)
        if isinstance(where, Blocked):
            for node in nodes:
                room = node.capacity.minus(Resources.total((node.used, *placed[node.name])))
                assert node.state is not NodeState.UP or not demand.fits_in(room)
            continue
        assert by_name[where].state is NodeState.UP
        placed[where].append(demand)
    for node in nodes:
        assert Resources.total(placed[node.name]).fits_in(node.capacity.minus(node.used))


@given(node_lists, st.lists(demands, min_size=1, max_size=6), demands)
def test_taking_out_what_was_placed_leaves_everything_as_it_was(nodes, wanted, probe) -> None:
    packing, fresh = Packing(nodes, PLACEMENT), Packing(nodes, PLACEMENT)
    done = [(where, demand) for demand in wanted if isinstance(where := packing.place(demand, Role.PS), str)]
    for where, demand in done:
        packing.remove(where, demand)
    assert packing.place(probe, Role.WORKER) == fresh.place(probe, Role.WORKER)


@given(node_lists, demands, demands, st.integers(0, 4), st.integers(0, 4), st.data())
def test_a_bundle_that_does_not_fit_whole_changes_nothing(nodes, worker, ps, workers, servers, data) -> None:
    job, other = a_job(worker, ps), a_job(ps, worker, 2)
    names = st.sampled_from([node.name for node in nodes] or ["gone"])
    incumbents = [a_task(job, number, data.draw(names)) for number in range(data.draw(st.integers(0, 3)))]
    packing = Packing(nodes, PLACEMENT, incumbents=incumbents)
    fresh = Packing(nodes, PLACEMENT, incumbents=incumbents)
    if packing.add(job, Allocation(workers, servers)) is None:
        return
    for step in (
        (other, Allocation(1, 0)),
        (job, Allocation(1, 1)),
        (job, Allocation(0, 1)),
        (other, Allocation(1, 1)),
    ):
        assert packing.add(*step) == fresh.add(*step)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_tasks_that_run_are_taken_up_where_they_are_whatever_the_order(places) -> None:
    nodes = [Node(f"n{number}", Resources.of(cpu=8)) for number in range(4)]
    first, second = a_job(Resources.of(cpu=1), Resources.of(cpu=1)), a_job(Resources.of(cpu=8), NO_RESOURCES, 2)
    tasks = [a_task(first, number, f"n{place}") for number, place in enumerate(places)]
    booked = Counter(f"n{place}" for place in places)
    used = [Node(node.name, node.capacity, Resources.of(cpu=booked[node.name])) for node in nodes]
    packing = Packing.for_decision(used, tasks, PLACEMENT)
    # Another job's whole nodes go where nothing runs as long as there is such a node.
    free = 4 - len(booked)
    for _ in range(free):
        assert packing.add(second, Allocation(1, 0)) is None
    for _ in places:
        assert packing.add(first, Allocation(1, 0)) is None
    assert isinstance(packing.add(second, Allocation(1, 0)), Blocked)


def test_what_others_hold_is_taken_for_good() -> None:
    job = a_job(Resources.of(cpu=2), Resources.of(cpu=1))
    node = Node("n", Resources.of(cpu=8), Resources.of(cpu=2 + 5))
    packing = Packing.for_decision([node], [a_task(job, 0, "n")], PLACEMENT)
    assert packing.add(job, Allocation(1, 1)) is None
    blocked = packing.add(job, Allocation(0, 1))
    assert blocked is not None
    assert (blocked.constraint, blocked.shortfalls[0].had) == (Constraint.CAPACITY, 0)


@pytest.mark.parametrize(
    ("nodes", "demand", "constraint", "text"),
    [
        ([], Resources.of(cpu=1), Constraint.CAPACITY, "no room for a worker (cpu: wanted 1, had 0 on every node)"),
        (
            [Node("n1", Resources.of(cpu=4)), Node("n2", Resources.of(cpu=8))], Resources.of(cpu=9),
            Constraint.INFEASIBLE, "a worker is larger than any node (cpu: wanted 9, had 8 on n2)",
        ),
        (
            [Node("n1", FOUR, Resources.of(cpu=1)), Node("n2", FOUR, Resources.of(cpu=2))],
            Resources.of(cpu=4),
            Constraint.FRAGMENTED, "no single node has room for a worker (cpu: wanted 4, had 3 on n1)",
        ),
        (
            [Node("n1", Resources.of(cpu=4), Resources.of(cpu=3))], Resources.of(cpu=2),
            Constraint.CAPACITY, "no room for a worker (cpu: wanted 2, had 1 on n1)",
        ),
        ([Node("n1", Resources.of(cpu=4))], Resources.of(tpu=1), Constraint.INFEASIBLE, "tpu: wanted 1, had 0 on n1"),
        ([Node("n1", FOUR, state=NodeState.DOWN)], Resources.of(cpu=1), Constraint.CAPACITY, "every node"),
    ],
)  # fmt: skip
def test_what_stands_in_the_way_is_named(nodes, demand, constraint, text) -> None:
    blocked = Packing(nodes, PLACEMENT).place(demand, Role.WORKER)
    assert isinstance(blocked, Blocked)
    assert blocked.constraint is constraint
    assert text in str(blocked)


def test_a_thousand_small_parts_fill_a_node_exactly() -> None:
    packing = Packing([Node("n", Resources.of(gpu=1))], PLACEMENT)
    for _ in range(10):
        assert packing.place(Resources.of(gpu=0.1), Role.WORKER) == "n"
    assert isinstance(packing.place(Resources.of(gpu=0.001), Role.WORKER), Blocked)


def test_equal_nodes_are_taken_in_order_and_load_is_balanced() -> None:
    packing = Packing([Node(f"n{number}", Resources.of(cpu=4)) for number in range(3)], PLACEMENT)
    assert [packing.place(Resources.of(cpu=1), Role.WORKER) for _ in range(6)] == ["n0", "n1", "n2"] * 2
    assert PLACEMENT.load([0], [0]) == 0.0
