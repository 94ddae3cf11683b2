from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from policies.snapshots import NO_PS, a_job, a_snapshot, cluster

from dl2d.core.cluster import Node, NodeSet, NodeState, Snapshot, Task, TaskState
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.jobs import NOTHING, TASK_ROLES, Allocation, Architecture, Job, Role
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.plan_of_starts_and_stops import Deferred, Plan, Start
from dl2d.core.resource_manager import GrowthLimit
from dl2d.core.resources import Resources
from dl2d.placement.best_fit import BestFit
from dl2d.placement.dl2_paper import Dl2Paper
from dl2d.placement.load_balance import LoadBalance
from dl2d.placement.optimus import Optimus
from dl2d.tick.limits.defer_starts_beyond_limits import groups_without_replacement, within_limits
from dl2d.tick.place.place import place
from dl2d.tick.tick_context import GuardRules

WHY = Reason(Constraint.SATISFIED, "because")
W, P = Role.WORKER, Role.PS
LIVE = [state for state in TaskState if not state.ended]


def plan_for(
    snapshot: Snapshot,
    wanted: dict[int, tuple[int, int]],
    placement: Placement | None = None,
    nodes: Sequence[tuple[int, Role, str]] = (),
    steps: Sequence[tuple[int, tuple[int, int]]] = (),
) -> Plan:
    """The plan for a decision that gives job ``number`` so many workers and servers, and would have them on nodes.

    ``steps``: what was given to which job, one after the other.
    """
    jobs = [
        JobDecision(job.key, Allocation(*wanted[int(job.key.id)]), WHY)
        for job in snapshot.jobs
        if int(job.key.id) in wanted
    ]
    keys = {int(job.key.id): job.key for job in snapshot.jobs}
    named = tuple((keys[number], role, node) for number, role, node in nodes)
    actions = tuple((keys[number], Allocation(*step)) for number, step in steps)
    return place(snapshot, Decision("test", "1", tuple(jobs), nodes=named, actions=actions), placement or LoadBalance())


def roles(plan: Plan) -> Counter[tuple[str, Role]]:
    return Counter((start.job.id, start.role) for start in plan.starts)


def a_task(job: Job, role: Role, number: int, state: TaskState, node: str = "n0") -> Task:
    return Task(job=job.key, id=f"{role}-{number}", role=role, node=node, demand=job.request.demand(role), state=state)


def test_tasks_of_the_highest_positions_leave_where_the_manager_stops_no_others() -> None:
    job = a_job(1)
    tasks = [a_task(job, W, number, TaskState.CONFIRMED, node=f"n{number}") for number in range(4)]
    snapshot = structs.replace(a_snapshot([job], cluster(4)), tasks=tuple(tasks))
    decision = Decision("test", "1", (JobDecision(job.key, Allocation(2, 0), WHY),))
    # The third waits for a container, and the first is in the highest one.
    positions = {tasks[0].tag: 3, tasks[1].tag: 1, tasks[3].tag: 0}
    plan = place(snapshot, decision, LoadBalance(), positions=positions)
    assert [stop.task for stop in plan.stops] == ["worker-2", "worker-0"]
    assert [stop.task for stop in place(snapshot, decision, LoadBalance()).stops] == ["worker-3", "worker-2"]


def test_nothing_is_done_where_everything_is_as_it_should_be() -> None:
    snapshot = a_snapshot([a_job(1)], cluster(2, cpu=8, gpu=2), held={0: Allocation(3, 2)})
    assert plan_for(snapshot, {1: (3, 2)}) == Plan()
    assert plan_for(snapshot, {}) == Plan()  # who was not decided on is left alone


def test_those_that_have_not_begun_leave_first_then_the_newest() -> None:
    job = a_job(1)
    states = [TaskState.CONFIRMED, TaskState.ASKED, TaskState.JOINED, TaskState.GRANTED, TaskState.CONFIRMED]
    tasks = [a_task(job, Role.WORKER, number, state) for number, state in enumerate(states)]
    tasks.append(a_task(job, Role.WORKER, 9, TaskState.DRAINING))  # is leaving already and does not count
    snapshot = structs.replace(a_snapshot([job], cluster(1, cpu=99, gpu=99)), tasks=tuple(tasks))
    leaving = [[stop.task for stop in plan_for(snapshot, {1: (left, 0)}).stops] for left in (4, 3, 2, 1)]
    assert leaving == [
        ["worker-3"],
        ["worker-3", "worker-1"],
        ["worker-3", "worker-1", "worker-4"],
        ["worker-3", "worker-1", "worker-4", "worker-2"],
    ]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("why", "guarded", "leaving"),
    [
        (Constraint.SATISFIED, None, ["worker-3", "worker-1", "worker-2"]),
        (Constraint.LIMIT, None, ["worker-3", "worker-1", "worker-2"]),
        (Constraint.CAPACITY, None, ["worker-2", "worker-0", "worker-3"]),
        (Constraint.QUEUE, None, ["worker-2", "worker-0", "worker-3"]),
        (Constraint.SATISFIED, Constraint.CAPACITY, ["worker-2", "worker-0", "worker-3"]),
        (Constraint.SATISFIED, Constraint.CLAIM, ["worker-2", "worker-0", "worker-3"]),
    ],
)
def test_tasks_on_closed_nodes_leave_first_unless_the_job_shrinks_for_want_of_room(
    why, guarded, leaving, named
) -> None:
    """The second node takes no new tasks, so that nobody gets the room of the workers there."""
    job = a_job(1)
    tasks = [a_task(job, W, number, TaskState.JOINED, node=f"n{number % 2}") for number in range(4)]
    nodes = [Node("n0", Resources.of(cpu=8, gpu=4)), Node("n1", Resources.of(cpu=8, gpu=4), state=NodeState.DRAINING)]
    snapshot = structs.replace(a_snapshot([job], nodes), tasks=tuple(tasks))
    reasons = () if guarded is None else (Reason(guarded, "the nodes have less"),)
    plans = (
        place(
            snapshot,
            Decision(
                "test", "1", (JobDecision(job.key, Allocation(left, 0), Reason(why, "because"), guarded=reasons),),
                nodes=tuple((job.key, W, task.node) for task in tasks) if named else (),
            ),
            LoadBalance(),
        )
        for left in (3, 2, 1)
    )  # fmt: skip
    assert [[stop.task for stop in plan.stops] for plan in plans] == [leaving[:1], leaving[:2], leaving]


def test_a_job_that_has_nothing_starts_with_its_minimum_or_not_at_all() -> None:
    job = a_job(1, min_workers=3)
    short = plan_for(a_snapshot([job], cluster(1, cpu=8, gpu=2)), {1: (4, 2)})
    assert short.starts == ()
    assert [(item.role, item.count, item.nearest) for item in short.deferred] == [(Role.WORKER, 4, "n0")]
    assert [(part.resource, part.wanted, part.had) for part in short.deferred[0].shortfalls] == [("gpu", 1, 0)]
    enough = plan_for(a_snapshot([job], cluster(1, cpu=8, gpu=3)), {1: (4, 1)})
    assert roles(enough) == {("1", Role.WORKER): 3, ("1", Role.PS): 1}
    assert [(item.role, item.count) for item in enough.deferred] == [(Role.WORKER, 1)]


WORKER, PS, BUNDLE = (1, 0), (0, 1), (1, 1)


@pytest.mark.parametrize("placement", [LoadBalance(), BestFit(), Optimus(), Dl2Paper()], ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("least", "steps"),
    [
        ({}, [WORKER, WORKER, PS, WORKER, PS, PS]),
        ({}, [PS, PS, PS, WORKER, WORKER, WORKER]),
        ({}, [(3, 0), (0, 3)]),
        ({}, [WORKER, WORKER]),  # the guard, or a floor, gave the rest
        ({"min_workers": 3, "min_ps": 2}, [WORKER, BUNDLE, WORKER, PS, PS]),
        ({"allowed_workers": (3,)}, [BUNDLE, BUNDLE, BUNDLE]),
    ],
)
def test_a_job_starts_whatever_the_steps_in_which_it_was_decided(placement, least, steps) -> None:
    """Single steps used to be looked at one by one, and none of them is a size that a job can start with."""
    jobs = [a_job(number, **least) for number in (1, 2)]
    snapshot = a_snapshot(jobs, cluster(4, cpu=12, gpu=4))
    both = [(number, step) for step in steps for number in (1, 2)]
    plan = plan_for(snapshot, {1: (3, 3), 2: (3, 3)}, placement, steps=both)
    assert roles(plan) == {("1", W): 3, ("1", P): 3, ("2", W): 3, ("2", P): 3}
    assert plan.deferred == ()


def test_a_job_starts_with_its_minimum_size_where_the_steps_that_lead_there_have_no_room_all() -> None:
    snapshot = a_snapshot([a_job(1)], cluster(1, cpu=8, gpu=2))
    plan = plan_for(snapshot, {1: (4, 2)}, steps=[(1, (4, 0)), (1, (0, 2))])
    assert roles(plan) == {("1", W): 2, ("1", P): 2}
    assert [(item.role, item.count) for item in plan.deferred] == [(W, 2)]


@pytest.mark.parametrize("placement", [LoadBalance(), BestFit(), Optimus()], ids=lambda one: one.name)
@pytest.mark.parametrize("small", ["ps", "worker"])
def test_a_small_task_that_was_decided_first_does_not_take_the_only_room_of_a_large_one(placement, small) -> None:
    """Both placements by load put the small task on the large node, best fit on the one that is nearly full."""
    large = "worker" if small == "ps" else "ps"
    job = a_job(1, **{small: Resources.of(cpu=1), large: Resources.of(cpu=8)})
    used = Node("n1", Resources.of(cpu=8), Resources.of(cpu=7))
    for nodes in (
        [Node("n0", Resources.of(cpu=8)), used],
        [Node("n0", Resources.of(cpu=9), Resources.of(cpu=1)), used],
    ):
        for steps in ([PS, WORKER], [WORKER, PS], [BUNDLE]):
            plan = plan_for(a_snapshot([job], nodes), {1: (1, 1)}, placement, steps=[(1, step) for step in steps])
            assert {str(role): node for _, role, node in where(plan)} == {small: "n1", large: "n0"}
            assert plan.deferred == ()


def test_a_worker_with_a_gpu_does_not_take_the_only_room_of_a_server_that_needs_more_of_another_resource() -> None:
    job = a_job(1, worker=Resources.of(cpu=1, gpu=1), ps=Resources.of(cpu=8))
    nodes = [Node("n0", Resources.of(cpu=8, gpu=8)), Node("n1", Resources.of(cpu=8, gpu=8), Resources.of(cpu=7))]
    plan = plan_for(a_snapshot([job], nodes), {1: (1, 1)}, steps=[(1, BUNDLE)])
    assert {str(role): node for _, role, node in where(plan)} == {"worker": "n1", "ps": "n0"}


def test_what_one_job_could_not_use_whole_is_there_for_the_next() -> None:
    jobs = [a_job(1, min_workers=3), a_job(2)]
    plan = plan_for(a_snapshot(jobs, cluster(1, cpu=8, gpu=2)), {1: (3, 1), 2: (2, 1)})
    assert roles(plan) == {("2", Role.WORKER): 2, ("2", Role.PS): 1}


def test_a_job_that_runs_grows_by_whatever_there_is_room_for() -> None:
    snapshot = a_snapshot([a_job(1, min_workers=3)], cluster(1, cpu=12, gpu=4), held={0: Allocation(3, 1)})
    plan = plan_for(snapshot, {1: (6, 3)})
    assert roles(plan) == {("1", Role.WORKER): 1, ("1", Role.PS): 2}
    assert [(item.role, item.count) for item in plan.deferred] == [(Role.WORKER, 2)]


def test_room_that_a_leaving_task_still_holds_is_not_given() -> None:
    first, second = a_job(1), a_job(2)
    snapshot = a_snapshot([first, second], cluster(1, cpu=8, gpu=2), held={0: Allocation(2, 1)})
    plan = plan_for(snapshot, {1: (1, 1), 2: (1, 1)})
    assert [stop.task for stop in plan.stops] == ["worker-1"]
    assert plan.starts == ()
    assert [(item.job.id, item.role, item.count) for item in plan.deferred] == [("2", Role.WORKER, 1)]


def test_a_task_moves_to_let_a_larger_one_in_unless_its_coordinator_is_silent() -> None:
    small = a_job(1, worker=Resources.of(cpu=1))
    large = a_job(2, worker=Resources.of(cpu=4), ps=Resources.of(cpu=1))
    tasks = [a_task(small, Role.WORKER, number, TaskState.CONFIRMED, f"n{number}") for number in range(2)]
    tasks.append(a_task(large, Role.PS, 0, TaskState.CONFIRMED, "n2"))
    used = [structs.replace(node, used=Resources.of(cpu=1)) for node in cluster(3, cpu=4)]
    snapshot = structs.replace(a_snapshot([small, large], used), tasks=tuple(tasks))
    decision = Decision(
        "test", "1",
        (JobDecision(small.key, Allocation(2, 0), WHY), JobDecision(large.key, Allocation(1, 1), WHY)),
    )  # fmt: skip
    moved = place(snapshot, decision, LoadBalance())
    assert [move.job for move in moved.moves] == [small.key]
    assert place(snapshot, decision, LoadBalance(), keep={small.key, large.key}).moves == ()


def test_the_worker_of_rank_0_is_not_moved_where_it_is_the_only_one() -> None:
    """It leaves last, so that the next tick would stop its replacement, and the one after it start it again."""
    small, large = a_job(1, worker=Resources.of(cpu=1)), a_job(2, worker=Resources.of(cpu=4))
    tasks = (
        a_task(small, Role.WORKER, 0, TaskState.CONFIRMED, "n0"),
        a_task(large, Role.PS, 0, TaskState.CONFIRMED, "n1"),
    )
    first, second = cluster(2, cpu=4)
    nodes = [structs.replace(first, used=Resources.of(cpu=1)), structs.replace(second, used=Resources.of(cpu=2))]
    snapshot = structs.replace(a_snapshot([small, large], nodes), tasks=tasks)
    decided = JobDecision(small.key, Allocation(1, 0), WHY), JobDecision(large.key, Allocation(1, 1), WHY)
    plan = place(snapshot, Decision("test", "1", decided), LoadBalance())
    assert (plan.moves, plan.starts, plan.stops) == ((), (), ())
    assert [item.job for item in plan.deferred] == [large.key]


def where(plan: Plan) -> list[tuple[str, Role, str]]:
    return [(start.job.id, start.role, start.node) for start in plan.starts]


def test_new_tasks_go_where_the_decision_would_have_them() -> None:
    snapshot = a_snapshot([a_job(1)], cluster(3, cpu=8, gpu=2), held={0: Allocation(1, 1)})
    # The nodes of the tasks that run already (n0, n1) are no places for new ones.
    plan = plan_for(snapshot, {1: (3, 1)}, nodes=[(1, W, "n0"), (1, W, "n1"), (1, W, "n1"), (1, P, "n1")])
    assert where(plan) == [("1", W, "n1"), ("1", W, "n1")]
    assert (plan.stops, plan.deferred) == ((), ())


@pytest.mark.parametrize("node", ["n0", "gone", "n2"], ids=["full", "unknown", "draining"])
def test_a_task_goes_elsewhere_when_it_will_never_have_room_where_it_should(node) -> None:
    nodes = [*cluster(2, cpu=4, gpu=1), Node("n2", Resources.of(cpu=4, gpu=1), state=NodeState.DRAINING)]
    snapshot = a_snapshot([a_job(1), a_job(2)], nodes, held={0: Allocation(1, 1)})
    plan = plan_for(snapshot, {1: (1, 1), 2: (1, 1)}, nodes=[(2, W, node), (2, P, "n0")])
    assert where(plan) == [("2", W, "n1"), ("2", P, "n0")]


def test_a_task_waits_for_who_leaves_its_node_though_there_is_room_elsewhere() -> None:
    """Job 1 has a worker on each node and loses one: not its newest, but the one that is not in the layout."""
    snapshot = a_snapshot([a_job(1), a_job(2)], cluster(3, cpu=8, gpu=1), held={0: Allocation(3, 1)})
    nodes = [(1, W, "n0"), (1, W, "n2"), (1, P, "n0"), (2, W, "n1"), (2, P, "n1")]
    plan = plan_for(snapshot, {1: (2, 1), 2: (1, 1)}, nodes=nodes)
    assert [(stop.job.id, stop.task) for stop in plan.stops] == [("1", "worker-1")]
    assert (plan.starts, plan.moves) == ((), ())
    assert [(item.job.id, item.role, item.nearest) for item in plan.deferred] == [("2", W, "n1")]
    left = tuple(task for task in snapshot.tasks if task.id != "worker-1")
    emptied = structs.replace(snapshot.nodes[1], used=Resources())
    after = structs.replace(snapshot, tasks=left, nodes=(snapshot.nodes[0], emptied, snapshot.nodes[2]))
    assert where(plan_for(after, {1: (2, 1), 2: (1, 1)}, nodes=nodes)) == [("2", W, "n1"), ("2", P, "n1")]


@pytest.mark.parametrize("nodes", [[], [(1, W, "n1"), (1, P, "n1")]], ids=["another job waits", "the layout"])
def test_the_first_worker_stays_where_another_is_in_the_way(nodes) -> None:
    """Only the first one's node will have room for job 2, which needs it whole; and it is not in the layout."""
    jobs = [a_job(1, worker=Resources.of(gpu=1)), a_job(2, worker=Resources.of(gpu=2))]
    kept = [Node("n0", Resources.of(cpu=8, gpu=2)), Node("n1", Resources.of(cpu=8, gpu=2))]
    tasks = [structs.replace(a_task(jobs[0], W, 0, TaskState.CONFIRMED, "n1"), since=9.0)]
    tasks += [structs.replace(a_task(jobs[0], W, number, TaskState.CONFIRMED, "n0"), since=5.0) for number in (3, 1)]
    tasks.append(structs.replace(a_task(jobs[0], W, 2, TaskState.CONFIRMED, "n1"), since=7.0))
    used = [structs.replace(node, used=Resources.of(gpu=2)) for node in kept]
    snapshot = structs.replace(a_snapshot(jobs, used), tasks=tuple(tasks))
    stops = {left: {stop.task for stop in plan_for(snapshot, {1: (left, 0), 2: (1, 0)}, nodes=nodes).stops}
             for left in (3, 2, 1, 0)}  # fmt: skip
    assert all("worker-1" not in stops[left] for left in (3, 2, 1))
    assert stops[1] == {"worker-0", "worker-2", "worker-3"}
    assert len(stops[0]) == 4


def test_a_job_that_loses_everything_makes_room_where_another_is_wanted() -> None:
    snapshot = a_snapshot([a_job(1), a_job(2)], cluster(2, cpu=8, gpu=1), held={0: Allocation(2, 1)})
    plan = plan_for(snapshot, {1: (0, 0), 2: (1, 1)}, nodes=[(2, W, "n1"), (2, P, "n1")])
    assert {stop.task for stop in plan.stops} == {"worker-0", "worker-1", "ps-0"}
    assert [item.nearest for item in plan.deferred] == ["n1"]


def test_optimus_lays_small_jobs_first_each_evenly_on_as_few_nodes_as_hold_it() -> None:
    """Two bundles a node. By load alone every node would have a bundle of the first job."""
    jobs = [a_job(1), a_job(2)]
    nodes = cluster(3, cpu=6, gpu=2)
    plan = plan_for(a_snapshot(jobs, nodes), {1: (4, 4), 2: (2, 2)}, Optimus())
    assert {(job, node) for job, _, node in where(plan)} == {("2", "n0"), ("1", "n1"), ("1", "n2")}
    assert Counter(where(plan))["1", W, "n1"] == 2
    spread = plan_for(a_snapshot(jobs, nodes), {1: (4, 4), 2: (2, 2)})
    assert {node for job, _, node in where(spread) if job == "1"} == {"n0", "n1", "n2"}


def test_optimus_joins_new_tasks_to_those_that_run_and_falls_back_to_one_by_one() -> None:
    nodes = cluster(3, cpu=6, gpu=2)
    grows = a_snapshot([a_job(1)], nodes, held={0: Allocation(1, 1)})  # the worker on n0, the PS on n1
    assert where(plan_for(grows, {1: (2, 2)}, Optimus())) == [("1", W, "n1"), ("1", P, "n0")]
    odd = [*cluster(1, cpu=12, gpu=4), Node("small", Resources.of(cpu=3, gpu=1))]
    five = a_snapshot([a_job(1, max_workers=5, max_ps=5)], odd)  # evenly they do not fit, one by one they do
    assert Counter(node for *_, node in where(plan_for(five, {1: (5, 5)}, Optimus()))) == {"n0": 8, "small": 2}
    assert plan_for(five, {1: (5, 5)}, Optimus()).deferred == ()


_nodes = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 6), st.integers(0, 4), st.sampled_from(NodeState)), max_size=4
).map(
    lambda nodes: [
        Node(f"n{number}", Resources.of(cpu=cpu, gpu=gpu), Resources.of(cpu=used), state)
        for number, (cpu, gpu, used, state) in enumerate(nodes)
    ]
)
_jobs = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(1, 3), st.integers(0, 6), st.integers(0, 6)), max_size=5
)
_tasks = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([Role.WORKER, Role.PS]), st.sampled_from(TaskState)), max_size=12
)


_named = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([Role.WORKER, Role.PS]), st.sampled_from(["n0", "n1", "n2", "gone"])),
    max_size=12,
)


@given(_nodes, _jobs, _tasks, _named, st.sampled_from([LoadBalance(), BestFit(), Optimus(), Dl2Paper()]))
def test_whatever_is_decided(nodes, shapes, present, named, placement) -> None:
    jobs = [
        a_job(number, worker=Resources.of(cpu=cpu, gpu=gpu), min_workers=least)
        for number, (cpu, gpu, least, _, _) in enumerate(shapes, start=1)
    ]
    wanted = {number: shape[3:] for number, shape in enumerate(shapes, start=1)}
    tasks = [
        a_task(jobs[which % len(jobs)], role, number, state)
        for number, (which, role, state) in enumerate(present)
        if jobs and not state.ended
    ]
    snapshot = structs.replace(a_snapshot(jobs, nodes), tasks=tuple(tasks))
    named = [(which % len(jobs) + 1, role, node) for which, role, node in named if jobs]
    plan = plan_for(snapshot, wanted, placement, named)
    assert plan == plan_for(snapshot, wanted, placement, named)
    for node in nodes:
        starts = [start.demand for start in plan.starts if start.node == node.name]
        if starts:  # only room that is free at this moment, and only where tasks are taken
            assert node.state is NodeState.UP
            assert Resources.total((node.used, *starts)).fits_in(node.capacity)
    held = snapshot.held()
    stopped = Counter((stop.job, stop.task) for stop in plan.stops)
    assert all(count == 1 for count in stopped.values())
    for job in jobs:
        for role in (Role.WORKER, Role.PS):
            has, target = held[job.key].count(role), Allocation(*wanted[int(job.key.id)]).count(role)
            moved = sum(move.job == job.key and move.task.startswith(f"{role}-") for move in plan.moves)
            started = sum(start.job == job.key and start.role is role for start in plan.starts) - moved
            leaving = sum(stop.job == job.key and stop.task.startswith(f"{role}-") for stop in plan.stops)
            short = sum(item.count for item in plan.deferred if item.job == job.key and item.role is role)
            assert leaving == max(has - target, 0)
            members = [task for task in tasks if (task.job, task.role, task.state) == (job.key, W, TaskState.CONFIRMED)]
            if role is W and members and target > 0:
                first = min(members, key=lambda task: task.number)
                assert (job.key, first.id) not in stopped
                assert has == 1 or first.id not in [move.task for move in plan.moves if move.job == job.key]
            assert started + short <= max(target - has, 0)
            assert not (started and leaving)
            assert not moved or plan.deferred
            if short == 0 and held[job.key] != NOTHING:
                assert started == max(target - has, 0)
        if held[job.key] == NOTHING:
            placed = Allocation(
                *(sum(s.job == job.key and s.role is role for s in plan.starts) for role in (Role.WORKER, Role.PS))
            )
            assert placed == NOTHING or (placed.workers >= job.request.min_workers and placed.ps >= job.request.min_ps)
    known = {(task.job, task.id): task for task in tasks}
    assert all(known[stop.job, stop.task].state.wanted for stop in plan.stops)


_requests = st.fixed_dictionaries(
    {
        "worker": st.builds(lambda cpu, gpu: Resources.of(cpu=cpu, gpu=gpu), st.integers(1, 4), st.integers(0, 2)),
        "min_workers": st.integers(1, 3),
        "allowed_workers": st.sampled_from([(), (2, 4), (3,), (1, 2, 4)]),
    }
)
_with_servers = st.fixed_dictionaries(
    {"ps": st.builds(lambda cpu: Resources.of(cpu=cpu), st.integers(1, 3)), "min_ps": st.integers(1, 2)}
)
_without_servers = st.just({**NO_PS, "max_workers": 4, "architecture": Architecture.ALLREDUCE})
_limits = st.sampled_from([{}, {}, {"cpu": 6}, {"gpu": 3}, {"cpu": 10, "gpu": 2}]).map(Resources.of)


@st.composite
def _decided(draw: st.DrawFn) -> tuple[Snapshot, dict[int, tuple[int, int]], list[tuple[int, tuple[int, int]]]]:
    """Jobs with and without tasks, sizes with which they can run, or nothing, and steps that lead there in any order.

    The steps may lead there only in part.
    """
    requests = draw(st.lists(st.tuples(_requests, st.one_of(_with_servers, _without_servers)), max_size=5))
    jobs = [a_job(number, **first, **second) for number, (first, second) in enumerate(requests, start=1)]
    nodes = {node.name: node for node in draw(_nodes)}
    tasks, sizes, steps = list[Task](), {}, list[tuple[int, tuple[int, int]]]()
    for number, job in enumerate(jobs, start=1):
        roles_ = [W, P] if job.request.max_ps else [W]
        shapes = st.tuples(st.sampled_from(roles_), st.sampled_from(sorted(nodes) or [""]), st.sampled_from(LIVE))
        for ordinal, (role, node, state) in enumerate(draw(st.lists(shapes, max_size=4)) if nodes else ()):
            task = a_task(job, role, ordinal, state, node)
            used = nodes[node].used + task.demand
            if used.fits_in(nodes[node].capacity):
                nodes[node] = structs.replace(nodes[node], used=used)
                tasks.append(task)
        least = job.request.min_size
        workers = draw(st.sampled_from([0, *(count for count in range(5) if job.request.allows(count))]))
        ps = draw(st.integers(least.ps, job.request.max_ps)) if workers else 0
        sizes[number] = workers, ps
        steps += [(number, WORKER)] * workers + [(number, PS)] * ps
    order = draw(st.permutations(steps))
    keys = [job.key for job in jobs]
    some = draw(st.sets(st.sampled_from(keys))) if keys else set()
    node_sets = (NodeSet(tuple(sorted(some)), frozenset({"n0", "n2"}), "partition small"),) if some else ()
    snapshot = structs.replace(a_snapshot(jobs, list(nodes.values())), tasks=tuple(tasks), node_sets=node_sets)
    return snapshot, sizes, order[: draw(st.integers(0, len(order)))]


@pytest.mark.parametrize("has_server", [False, True])
def test_a_job_that_has_nothing_starts_no_server_without_its_worker(has_server: bool) -> None:
    job = a_job(1)
    tasks = [a_task(job, W, 0, TaskState.DRAINING), a_task(job, P, 0, TaskState.CONFIRMED)]
    snapshot = structs.replace(a_snapshot([job], cluster(1)), tasks=tuple(tasks[: 1 + has_server]))
    start_both = Plan(starts=tuple(Start(job.key, role, "n0", job.request.demand(role)) for role in (W, P)))
    plan = within_limits(start_both, snapshot, {job.key: job.owner}, GuardRules(), {(job.key, W)})
    assert roles(plan) == (Counter({(job.key.id, P): 1}) if has_server else Counter())
    reasons = {item.role: item.postponed for item in plan.deferred}
    assert "that is leaving has ended" in reasons.pop(W)
    assert reasons == ({} if has_server else {P: "waits for the other tasks of its job's smallest size"})


@pytest.mark.parametrize(
    ("left", "roles_"), [({"gpu": -1.0}, {W}), ({"gpu": 0.0}, {W}), ({"cpu": -1.0}, {W, P}), ({"gpu": 1.0}, set())]
)
def test_a_limit_concerns_the_tasks_that_need_what_it_is_about(left: dict[str, float], roles_: set[Role]) -> None:
    job = replace(a_job(1), anchor="a")
    limit = GrowthLimit(frozenset({"a"}), left, "QOS high has no more")
    found = groups_without_replacement(a_snapshot([job], cluster(1)), (), [limit])
    assert found == {(job.key, role) for role in roles_}


@pytest.mark.parametrize(
    ("left", "has", "starts"),
    [
        ({"cpu": 2.0, "gpu": 1.0}, TaskState.DRAINING, 1),
        ({"cpu": 4.5, "gpu": 2.0}, TaskState.DRAINING, 2),
        # What is asked for does not run yet, so that the limit leaves this as well.
        ({"gpu": 1.0}, TaskState.ASKED, 0),
        ({"gpu": 2.0}, TaskState.ASKED, 1),
        ({"gpu": 0.0}, TaskState.CONFIRMED, 0),
        ({"gpu": -4.0}, TaskState.CONFIRMED, 0),
        ({"memory": 0.0}, TaskState.CONFIRMED, 3),
    ],
)
def test_no_start_exceeds_a_limit_that_the_resource_manager_does_not_enforce(
    left: dict[str, float], has: TaskState, starts: int
) -> None:
    job, other = (replace(a_job(number), anchor=f"anchor-{number}") for number in (1, 2))
    running = a_task(job, W, 1, TaskState.CONFIRMED)
    snapshot = structs.replace(a_snapshot([job, other], cluster(1)), tasks=(running, a_task(other, W, 0, has)))
    planned = Plan(starts=(Start(job.key, W, "n0", job.request.worker),) * 3)
    owners = {each.key: each.owner for each in (job, other)}
    limit = GrowthLimit(frozenset({job.anchor, other.anchor}), left, "elastic jobs may hold 50 %", enforced=False)
    plan = within_limits(planned, snapshot, owners, GuardRules(), growth_limits=[limit])
    assert len(plan.starts) == starts
    assert [(item.count, item.limit) for item in plan.deferred] == ([(3 - starts, limit.reason)] if starts < 3 else [])
    unlimited = replace(limit, enforced=True), replace(limit, anchors=frozenset({other.anchor}))
    assert within_limits(planned, snapshot, owners, GuardRules(), growth_limits=unlimited) == planned


@given(_decided(), _named, st.sampled_from([LoadBalance(), BestFit(), Optimus(), Dl2Paper()]), _limits)
@settings(max_examples=200, deadline=None)
def test_what_has_room_starts_and_what_does_not_is_deferred_with_a_true_reason(
    decided, named, placement, limit
) -> None:
    snapshot, sizes, steps = decided
    count = len(snapshot.jobs)
    named = [(which % count + 1, role, node) for which, role, node in named if count]
    planned = plan_for(snapshot, sizes, placement, named, steps)
    owners = {job.key: job.owner for job in snapshot.jobs}
    plan = within_limits(planned, snapshot, owners, GuardRules(per_user=limit))
    #: What is free when all has started that had room on a node, and what the tasks of the user hold then.
    left = Packing(snapshot.nodes, placement, node_sets=snapshot.node_sets)
    for start in planned.starts:
        assert left.place_on(start.node, start.demand, start.job)
    in_use = Resources.total(one.demand for one in (*snapshot.tasks, *plan.starts))
    started = roles(replace(plan, starts=plan.starts[: plan.first_replacement]))
    held = snapshot.held()
    for number, job in enumerate(snapshot.jobs, start=1):
        wanted, least, before = Allocation(*sizes[number]), job.request.min_size, held[job.key]
        new = Allocation(started[str(number), W], started[str(number), P])
        waits = [item for item in plan.deferred if item.job == job.key]
        assert len({(item.role, item.limit) for item in waits}) == len(waits)
        starts_whole = before == NOTHING
        if starts_whole:
            assert new == NOTHING or new.covers(least)
            assert new == wanted or waits
        if not starts_whole or new != NOTHING:
            for role in TASK_ROLES:
                count = sum(item.count for item in waits if item.role is role)
                assert new.count(role) + count == max(wanted.count(role) - before.count(role), 0)
        for item in waits:
            unit = least if starts_whole and new == NOTHING else Allocation(int(item.role is W), int(item.role is P))
            assert item.count > 0
            if item.limit:
                assert item.limit == f"jobs of ann may hold {limit} together"
                assert item.shortfalls
                wanting = in_use + job.request.demand_of(unit)
                for short in item.shortfalls:
                    assert wanting.get(short.resource) > limit.get(short.resource)
            elif not placement.first_node_only:
                # Where only the first node in order is tried, a later start may change which it is: the next tick
                # sees it.
                assert not left.fits(job, unit) or waits_for_named_node(snapshot, plan, item, named)
                assert_lacks(snapshot, left, item, job.request.demand_of(unit))


def waits_for_named_node(
    snapshot: Snapshot, plan: Plan, item: Deferred, named: Sequence[tuple[int, Role, str]]
) -> bool:
    """Whether tasks wait for a node that the decision names, which others are about to leave."""
    stopped = {(stop.job, stop.task) for stop in plan.stops}
    on_node = [task for task in snapshot.tasks if task.node == item.nearest]
    leaving = any(not task.state.wanted or (task.job, task.id) in stopped for task in on_node)
    return leaving and (int(item.job.id), item.role, item.nearest) in named


def assert_lacks(snapshot: Snapshot, left: Packing, item: Deferred, unit: Resources) -> None:
    """The node that is named has less than a task needs, when the others of ``unit`` have been put there."""
    demand = next(job for job in snapshot.jobs if job.key == item.job).request.demand(item.role)
    allowed = snapshot.may_use().get(item.job)
    usable = {node.name for node in snapshot.nodes if node.state is NodeState.UP}
    usable = usable if allowed is None else usable & allowed
    if not item.nearest:
        assert not usable
        return
    assert item.nearest in usable
    assert item.shortfalls
    for short in item.shortfalls:
        assert demand.get(short.resource) == short.wanted > short.had
        assert left.room_on(item.nearest).get(short.resource) <= short.had + unit.get(short.resource)


@pytest.mark.parametrize(("held", "leave"), [((1, 1), []), ((3, 1), ["worker-1", "worker-2"])])
def test_before_their_time_limit_tasks_beyond_the_floor_leave_where_others_would_not_start(
    held: tuple[int, int], leave: list[str]
) -> None:
    snapshot = a_snapshot([a_job(1)], cluster(4, cpu=8, gpu=2), held={0: Allocation(*held)})
    snapshot = structs.replace(snapshot, expiring=frozenset(task.tag for task in snapshot.tasks))
    job = snapshot.jobs[0]
    decision = Decision("test", "1", (JobDecision(job.key, Allocation(*held), WHY),))
    plan = place(snapshot, decision, LoadBalance(), without_replacement={(job.key, W), (job.key, P)})
    assert sorted(move.task for move in plan.moves) == ["ps-0", "worker-0"]
    assert sorted(stop.task for stop in plan.stops) == leave
    assert len(place(snapshot, decision, LoadBalance()).moves) == sum(held)


def test_no_more_tasks_move_than_tasks_wait() -> None:
    """Of two large workers one has room already."""
    small = a_job(1, worker=Resources.of(cpu=1, gpu=1), min_workers=1, max_workers=9)
    large = a_job(2, worker=Resources.of(cpu=6, gpu=2), ps=Resources.of(cpu=1), min_workers=2, max_workers=2, max_ps=1)
    tasks = [a_task(small, role, 0, TaskState.CONFIRMED, "n4") for role in (W, P)]
    tasks += [a_task(small, W, number, TaskState.CONFIRMED, f"n{number}") for number in (1, 2, 3)]
    used = Resources.of(cpu=1, gpu=1)
    nodes = [node if node.name == "n0" else structs.replace(node, used=used) for node in cluster(4, cpu=8, gpu=2)]
    nodes.append(Node("n4", Resources.of(cpu=16, gpu=8), Resources.of(cpu=11, gpu=5)))
    snapshot = structs.replace(
        a_snapshot([small, large], nodes), tasks=tuple(tasks), floors=((small.key, small.request.min_size),)
    )
    assert len(plan_for(snapshot, {1: (4, 1), 2: (2, 1)}).moves) == 1
