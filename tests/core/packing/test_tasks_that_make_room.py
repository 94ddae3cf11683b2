from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tick.world import World

from dl2d.core.cluster import Task, TaskState
from dl2d.core.jobs import JobKey, Role
from dl2d.core.packing.tasks_that_make_room import MAX_EXAMINED_NODES, RoomMade, WaitingTask, make_room
from dl2d.core.resources import Resources
from dl2d.policies.dl2.policy import with_checkpoint
from dl2d.testing import make_nodes

A, B, C = (JobKey("test", name, 1) for name in "abc")


def task(job: JobKey, number: int, node: str, state: TaskState = TaskState.CONFIRMED, **demand: float) -> Task:
    return Task(job=job, id=f"worker-{number}", role=Role.WORKER, node=node, demand=Resources.of(demand), state=state)


def want(job: JobKey, **demand: float) -> WaitingTask:
    return WaitingTask((job, Role.WORKER), Resources.of(demand))


def ids(made: RoomMade) -> tuple[list[str], list[str]]:
    return [task.id for task in made.leaving], [task.id for task, _ in made.moving]


def test_the_task_in_the_way_leaves_not_the_newest() -> None:
    room = {"n1": Resources.of(cpu=2), "n2": Resources()}
    tasks = [task(A, 0, "n1", cpu=2), task(A, 1, "n2", cpu=2), task(A, 2, "n2", cpu=2)]
    assert ids(make_room([want(B, cpu=4)], room, tasks, {(A, Role.WORKER): 1})) == (["worker-0"], [])


def test_fewest_tasks_leave() -> None:
    room = {"n1": Resources.of(cpu=1), "n2": Resources.of(cpu=1)}
    tasks = [task(A, 0, "n1", cpu=1), task(A, 1, "n1", cpu=1), task(C, 2, "n2", cpu=2)]
    assert ids(make_room([want(B, cpu=3)], room, tasks, {(A, Role.WORKER): 2, (C, Role.WORKER): 1})) == (
        ["worker-2"],
        [],
    )


def test_room_that_is_free_or_on_its_way_needs_no_victim() -> None:
    room = {"n1": Resources.of(cpu=4)}
    tasks = [task(A, 0, "n1", cpu=4)]
    assert ids(make_room([want(B, cpu=4)], room, tasks, {(A, Role.WORKER): 1})) == ([], [])


def test_two_that_wait_do_not_count_on_the_same_room() -> None:
    room = {"n1": Resources.of(cpu=4)}
    tasks = [task(A, 0, "n1", cpu=4), task(A, 1, "n1", cpu=4)]
    assert ids(make_room([want(B, cpu=4)] * 2, room, tasks, {(A, Role.WORKER): 2})) == (["worker-1"], [])


def test_a_small_task_moves_for_a_large_one() -> None:
    room = {"n1": Resources.of(cpu=6), "n2": Resources.of(cpu=2)}
    tasks = [task(A, 0, "n1", cpu=2)]
    assert ids(make_room([want(B, cpu=8)], room, tasks, {})) == ([], ["worker-0"])


def test_a_task_that_holds_more_than_its_demand_leaves_that_free_and_moves_where_its_demand_fits() -> None:
    room = {"n1": Resources.of(cpu=4), "n2": Resources.of(cpu=2)}
    alike = [task(A, 0, "n1", cpu=2), structs.replace(task(A, 1, "n1", cpu=2), held=Resources.of(cpu=4))]
    assert ids(make_room([want(B, cpu=8)], room, alike, {})) == ([], ["worker-1"])


def test_nothing_moves_where_it_would_not_help() -> None:
    room = {"n1": Resources.of(cpu=5), "n2": Resources.of(cpu=2)}
    assert ids(make_room([want(B, cpu=8)], room, [task(A, 0, "n1", cpu=2)], {})) == ([], [])
    full = {"n1": Resources.of(cpu=6), "n2": Resources.of(cpu=1)}
    assert ids(make_room([want(B, cpu=8)], full, [task(A, 0, "n1", cpu=2)], {})) == ([], [])
    joining = task(A, 0, "n1", TaskState.GRANTED, cpu=2)
    assert ids(make_room([want(B, cpu=8)], {"n1": Resources.of(cpu=6), "n2": Resources.of(cpu=2)}, [joining], {})) == (
        [],
        [],
    )


def test_several_small_tasks_of_a_node_move_for_a_large_one() -> None:
    room = {"n1": Resources.of(cpu=4), "n2": Resources.of(cpu=2), "n3": Resources.of(cpu=2)}
    tasks = [task(A, 0, "n1", cpu=2), task(C, 1, "n1", cpu=2)]
    made = make_room([want(B, cpu=8)], room, tasks, {})
    assert made.moving == ((tasks[1], "n2"), (tasks[0], "n3"))
    assert ids(make_room([want(B, cpu=8)], room | {"n3": Resources.of(cpu=1)}, tasks, {})) == ([], [])


def test_of_the_nodes_the_one_is_vacated_where_the_fewest_tasks_move() -> None:
    room = {"n1": Resources.of(cpu=4), "n2": Resources.of(cpu=6), "n3": Resources.of(cpu=6)}
    tasks = [task(A, 0, "n1", cpu=2), task(C, 1, "n1", cpu=2), task(C, 2, "n2", cpu=2)]
    assert ids(make_room([want(B, cpu=8)], room, tasks, {})) == ([], ["worker-2"])


def test_tasks_that_hold_nothing_of_what_is_lacking_do_not_move() -> None:
    """Those of C hold CPUs, of which there are enough. If they moved, A's would have no room on the other node."""
    room = {"n1": Resources.of(cpu=4, gpu=2), "n2": Resources.of(cpu=2, gpu=2)}
    tasks = [task(C, 4, "n1", cpu=2), task(A, 0, "n1", cpu=1, gpu=1), task(A, 1, "n1", cpu=1, gpu=1)]
    assert ids(make_room([want(B, cpu=2, gpu=4)], room, tasks, {})) == ([], ["worker-1", "worker-0"])


def test_nodes_whose_tasks_cannot_move_hide_no_other() -> None:
    """Of the tasks on the nodes that lack least, some have not joined yet, and some wait for room themselves."""
    count = MAX_EXAMINED_NODES
    room = {f"n{number}": Resources.of(cpu=7) for number in range(2 * count)} | {"m": Resources.of(cpu=6)}
    tasks = [task(A, number, f"n{number}", TaskState.GRANTED, cpu=1) for number in range(count)]
    tasks += [task(B, number, f"n{number}", cpu=1) for number in range(count, 2 * count)]
    made = make_room([want(B, cpu=8)], room, [*tasks, task(C, 7, "m", cpu=2)], {})
    assert ids(made) == ([], ["worker-7"])
    assert made.without_room == ()
    assert make_room([want(B, cpu=8)], room, tasks, {}).without_room == (want(B, cpu=8),)


def test_on_the_vacated_node_surplus_tasks_leave_and_others_move() -> None:
    room = {"n1": Resources.of(cpu=4), "n2": Resources.of(cpu=2)}
    tasks = [task(A, 0, "n1", cpu=2), task(A, 1, "n1", cpu=2)]
    assert ids(make_room([want(B, cpu=8)], room, tasks, {(A, Role.WORKER): 1})) == (["worker-1"], ["worker-0"])


def test_a_job_with_tasks_as_large_as_a_node_starts_beside_a_job_that_has_tasks_on_each_node() -> None:
    world = World(cluster_nodes=make_nodes(4, cpu=8), url="")
    try:
        small = world.settled(worker=Resources.of(cpu=1), ps=Resources.of(cpu=1), max_workers=6, max_ps=6)
        large = world.submit(worker=Resources.of(cpu=8), ps=Resources.of(cpu=8), max_workers=1, max_ps=1)
        world.settle(20)
        assert len({task.node for task in world.tasks(small)}) == 2
        assert world.has(large) == (1, 1)
    finally:
        world.close()


def test_the_default_policy_has_small_tasks_moved_for_a_job_whose_worker_needs_a_whole_node() -> None:
    world = World(cluster_nodes=make_nodes(4, cpu=32, gpu=8), url="", policy=with_checkpoint())
    try:
        for _ in range(3):
            world.settled(worker=Resources.of(cpu=2, gpu=1), ps=Resources.of(cpu=1), max_workers=3, max_ps=1)
        large = world.submit(worker=Resources.of(cpu=2, gpu=8), ps=Resources.of(cpu=1), max_workers=1, max_ps=1)
        world.settle(20)
        assert world.has(large) == (1, 1)
    finally:
        world.close()


def test_a_job_whose_tasks_are_large_gets_in_among_small_ones() -> None:
    world = World(cluster_nodes=make_nodes(4, cpu=8, gpu=2), url="")
    try:
        small = world.settled(worker=Resources.of(cpu=2), ps=Resources.of(cpu=1), max_workers=10, max_ps=10)
        large = world.submit(worker=Resources.of(cpu=7, gpu=2), ps=Resources.of(cpu=1), max_workers=2, max_ps=1)
        world.settle(20)
        decided = world.state.slot_decision.in_force.allocations()
        assert decided[large].workers >= 1
        assert world.has(large) == decided[large]
        assert world.has(small) == decided[small]
    finally:
        world.close()


@settings(max_examples=5)
@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 2), st.integers(1, 3), st.integers(1, 6)), min_size=2, max_size=4
    )
)
def test_what_is_decided_is_reached_or_said_to_wait(shapes) -> None:
    world = World(cluster_nodes=make_nodes(3, cpu=8, gpu=2), url="")
    try:
        keys = []
        for cpu, gpu, ps, most in shapes:
            keys.append(
                world.submit(
                    worker=Resources.of(cpu=cpu, gpu=gpu), ps=Resources.of(cpu=ps), max_workers=most, max_ps=most
                )
            )
            world.settle(8)
        world.settle(8)
        report = world.tick(1.0)
        waiting = {item.job for item in report.plan.deferred}
        for key in keys:
            assert world.has(key) == report.decision.allocations()[key] or key in waiting
        assert not report.plan.stops  # nothing goes round in circles
        assert not report.plan.starts
    finally:
        world.close()
