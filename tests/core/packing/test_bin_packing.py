from __future__ import annotations

import copy
from collections import Counter
from unittest import mock

import pytest
from core.plain_packing import ROLES, PlainPacking
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from dl2d.core.cluster import Node, NodeSet, NodeState, SharedLimit, Task, TaskState
from dl2d.core.decision import Constraint
from dl2d.core.jobs import Allocation, Job, JobKey, JobRequest, Launch, Owner, Role
from dl2d.core.packing import node_classes
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.packing.room_in_limits import Blocked
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.placement.best_fit import BestFit
from dl2d.placement.dl2_paper import Dl2Paper
from dl2d.placement.load_balance import LoadBalance
from dl2d.placement.optimus import Optimus

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


def test_a_task_goes_where_the_caller_says_if_there_is_room_and_tasks_are_taken() -> None:
    nodes = [Node("n0", FOUR), Node("n1", FOUR), Node("n2", FOUR, state=NodeState.DRAINING)]
    packing = Packing(nodes, PLACEMENT)
    assert packing.place_on("n1", Resources.of(cpu=3))
    assert not packing.place_on("n1", Resources.of(cpu=2))
    assert not packing.place_on("n2", Resources.of(cpu=1))
    assert not packing.place_on("gone", Resources.of(cpu=1))
    assert not packing.place_on("n0", Resources.of(tpu=1))
    assert packing.room()["n1"] == Resources.of(cpu=1)
    packing.remove("n1", Resources.of(cpu=3))
    assert packing.room()["n1"] == FOUR


@given(st.integers(1, 4), st.integers(0, 6), st.lists(st.integers(1, 3), min_size=1, max_size=24))
def test_new_tasks_go_round_incumbents_whatever_the_number_of_demands(nodes, room, others) -> None:
    """Each node has a job's task; those of others take its room only when there is no other."""
    job = a_job(Resources.of(cpu=2), Resources())
    tasks = [a_task(job, number, f"n{number}") for number in range(nodes)]
    packing = Packing(
        [Node(f"n{number}", Resources.of(cpu=2 + room)) for number in range(nodes)], PLACEMENT, incumbents=tasks
    )
    free = [room] * nodes
    for number, cpu in enumerate(others):
        # Demands that differ by a thousandth: more of them than there are heaps.
        where = packing.place(Resources.of(cpu=cpu - number / 1000), Role.WORKER)
        if max(free) < cpu:
            break
        assert isinstance(where, str)
        assert free[int(where[1:])] >= cpu
        free[int(where[1:])] -= cpu
    else:
        assert packing.add(job, Allocation(nodes, 0)) is None


def gathered(nodes: list[int], new: tuple[int, int], there: dict[str, Allocation] | None = None) -> list[str] | None:
    """Nodes of the workers and then of the PSs, on nodes of so many CPUs: a worker takes two of them, a PS one."""
    packing = Packing([Node(f"n{number}", Resources.of(cpu=cpu)) for number, cpu in enumerate(nodes)], Optimus())
    before = packing.room()
    request = a_job(Resources.of(cpu=2), Resources.of(cpu=1)).request
    laid = packing.gather(request, Allocation(*new), there or {})
    if laid is None:
        assert packing.room() == before
        return None
    left = dict(before)
    for role, node in laid:
        left[node] = left[node].minus(request.demand(role))
    assert left == packing.room()
    assert [role for role, _ in laid] == [Role.WORKER] * new[0] + [Role.PS] * new[1]
    return [node for _, node in laid]


@pytest.mark.parametrize(
    ("nodes", "new", "expected"),
    [
        pytest.param([6, 6, 6], (2, 2), ["n0"] * 4, id="one node is enough"),
        pytest.param([6, 6, 6], (4, 4), ["n0", "n1"] * 4, id="two nodes, the same on each"),
        pytest.param([6, 6, 6], (3, 3), ["n0", "n1", "n0"] * 2, id="what is left over begins at the first"),
        pytest.param([6, 6], (4, 2), ["n0", "n1", "n0", "n1", "n0", "n1"], id="more workers than PSs"),
        pytest.param([5, 5, 5], (3, 3), ["n0", "n1", "n2"] * 2, id="two nodes have the room, but not evenly"),
        pytest.param([12, 3], (4, 4), ["n0"] * 8, id="the node with the most comes first"),
        pytest.param([2, 6, 6], (2, 2), ["n1"] * 4, id="a node without room for both is passed over"),
        pytest.param([6, 6], (5, 5), None, id="no number of nodes will do"),
        pytest.param([], (1, 1), None, id="no nodes"),
    ],
)  # fmt: skip
def test_a_job_is_laid_evenly_on_the_fewest_nodes(nodes, new, expected) -> None:
    assert gathered(nodes, new) == expected


@pytest.mark.parametrize(
    ("there", "new", "expected"),
    [
        pytest.param({"n1": (1, 1)}, (1, 1), ["n1", "n1"], id="its own node first"),
        pytest.param({"n1": (2, 2)}, (1, 1), ["n0", "n0"], id="another, as that is more even"),
        pytest.param({"n0": (1, 0), "n1": (0, 1)}, (1, 1), ["n1", "n0"], id="where its role is fewest"),
        pytest.param({"gone": (1, 1)}, (1, 1), ["n0", "n0"], id="on a node that is gone"),
    ],
)
def test_tasks_that_run_count_in_the_evenness(there, new, expected) -> None:
    used = {name: Allocation(*has) for name, has in there.items()}
    room = [6 - 2 * used.get(f"n{number}", (0, 0))[0] - used.get(f"n{number}", (0, 0))[1] for number in range(3)]
    if "gone" in there or used.get("n1") != (2, 2):
        room = [6, 6, 6]  # as roomy as each other, so that only the evenness decides
    assert gathered(room, new, used) == expected


@given(node_lists, demands, demands, st.integers(0, 6), st.integers(0, 6), st.integers(0, 20))
def test_gathering_fills_no_node_beyond_its_room_and_is_even(nodes, worker, ps, workers, servers, others) -> None:
    packing = Packing(nodes, Optimus())
    for number in range(others):  # more demands than are kept in heaps
        packing.place(Resources.of(cpu=(number + 1) / 1000), Role.PS)
    before = packing.room()
    laid = packing.gather(a_job(worker, ps).request, Allocation(workers, servers), {})
    taken: dict[str, list[Resources]] = {name: [] for name in before}
    for role, node in laid or []:
        taken[node].append(worker if role is Role.WORKER else ps)
    for name, room in before.items():
        assert Resources.total(taken[name]).fits_in(room)
        assert packing.room()[name] == room.minus(Resources.total(taken[name]))
    if laid:
        on = sorted({node for _, node in laid})
        for role, count in ((Role.WORKER, workers), (Role.PS, servers)):
            each = Counter(node for kind, node in laid if kind is role)
            assert sum(each.values()) == count
            assert max(each.values(), default=0) - min(each[node] for node in on) <= 1


def test_where_only_the_first_node_is_tried_a_refusal_holds_for_that_node_alone() -> None:
    """The head has two CPUs and no room for four; one small task later another node is the head, with room."""
    packing = Packing([Node("a", Resources.of(cpu=2)), Node("b", Resources.of(cpu=8))], Dl2Paper())
    assert isinstance(packing.place(Resources.of(cpu=4), Role.WORKER), Blocked)
    assert packing.place(Resources.of(cpu=1), Role.WORKER) == "a"
    assert packing.place(Resources.of(cpu=4), Role.WORKER) == "b"


def test_where_only_the_first_node_is_tried_the_reason_is_what_that_lacks() -> None:
    """The second node has room, but is not asked."""
    packing = Packing([Node("a", NO_RESOURCES), Node("b", Resources.of(cpu=2))], Dl2Paper())
    blocked = packing.place(Resources.of(cpu=1), Role.WORKER)
    assert isinstance(blocked, Blocked)
    assert (blocked.nearest, [(part.resource, part.had) for part in blocked.shortfalls]) == ("a", [("cpu", 0)])


def test_what_is_given_back_can_be_had_again() -> None:
    packing = Packing([Node("a", Resources.of(cpu=4))], LoadBalance())
    assert packing.place(Resources.of(cpu=3), Role.WORKER) == "a"
    assert isinstance(packing.place(Resources.of(cpu=2), Role.PS), Blocked)
    packing.remove("a", Resources.of(cpu=3))
    assert packing.place(Resources.of(cpu=2), Role.PS) == "a"


@given(
    node_lists, st.lists(st.tuples(demands, demands, st.integers(0, 3), st.integers(0, 3)), max_size=8),
    st.sampled_from([LoadBalance(), BestFit(), Dl2Paper(), Dl2Paper(keeps_bundles=False)]),
)  # fmt: skip
def test_asking_whether_something_fits_tells_what_adding_it_would_and_changes_nothing(nodes, wanted, placement) -> None:
    asked, other = Packing(nodes, placement), Packing(nodes, placement)
    for number, (worker, ps, workers, servers) in enumerate(wanted):
        job, delta = a_job(worker, ps, number), Allocation(workers, servers)
        before = asked.room()
        fits = asked.fits(job, delta)
        assert asked.room() == before
        blocked = other.add(job, delta)
        assert fits == (blocked is None)
        assert asked.add(job, delta) == blocked
        assert asked.room() == other.room()


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(Role), st.integers(0, 3)), max_size=12),
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 4)), max_size=4, unique_by=lambda of: of[0]
    ),
)
def test_what_stays_is_taken_up_as_if_it_were_added_or_not_at_all(nodes, running, sizes) -> None:
    """Where there is less room than there was some cannot stay; new tasks then find the same room."""
    jobs = {number: a_job(Resources.of(cpu=2), Resources.of(cpu=1), number) for number in (1, 2, 3)}
    tasks = [
        a_task(jobs[number], at, f"n{place}", role)
        for at, (number, role, place) in enumerate(running)
        if place < len(nodes)
    ]
    together, apart = (
        Packing([Node(f"n{number}", Resources.of(cpu=cpu)) for number, cpu in enumerate(nodes)], PLACEMENT,
                incumbents=tasks)
        for _ in range(2)
    )  # fmt: skip
    stayed = together.stay([(jobs[number], Allocation(*size)) for number, *size in sizes])
    for (number, workers, ps), stays in zip(sizes, stayed, strict=True):
        has = Counter(task.role for task in tasks if task.job == jobs[number].key)
        assert not stays or (workers <= has[Role.WORKER] and ps <= has[Role.PS])
        if stays:
            assert apart.add(jobs[number], Allocation(workers, 0)) is None
            assert apart.add(jobs[number], Allocation(0, ps)) is None
    assert together.room() == apart.room()
    assert together.left() == apart.left()
    for job in jobs.values():
        for delta in (Allocation(1, 0), Allocation(0, 1)):
            assert str(together.add(job, delta)) == str(apart.add(job, delta))
    assert together.room() == apart.room()


@given(
    node_lists, st.lists(st.tuples(demands, st.integers(0, 5), st.sampled_from(TaskState)), max_size=8),
    st.lists(st.tuples(demands, st.integers(1, 4)), max_size=5), st.sampled_from([LoadBalance(), BestFit()]),
)  # fmt: skip
def test_for_a_decision_is_taken_what_others_hold(others, ours, wanted, placement) -> None:
    """What our tasks hold is free again, of those that leave too; where those that stay were is given last."""
    tasks = [
        replace(a_task(a_job(demand, NO_RESOURCES), number, f"n{place}"), state=state)
        for number, (demand, place, state) in enumerate(ours)
        if not state.ended
    ]
    held = {node.name: Resources.total(task.demand for task in tasks if task.node == node.name) for node in others}
    nodes = [replace(node, used=node.used + held[node.name]) for node in others]
    decided = Packing.for_decision(nodes, tasks, placement)
    expected = Packing(others, placement, incumbents=[task for task in tasks if task.state.wanted])
    assert decided.room() == expected.room()
    for demand, many in wanted:
        assert decided.place_all(demand, Role.WORKER, many) == expected.place_all(demand, Role.WORKER, many)


#: Few amounts and few kinds of nodes, so that many are equal.
few = st.builds(lambda cpu, gpu: Resources.of(cpu=cpu, gpu=gpu), st.integers(0, 3), st.integers(0, 1))
few_nodes = st.lists(
    st.builds(
        lambda large, used, state: (Resources.of(cpu=8, gpu=2) if large else Resources.of(cpu=4), used, state),
        st.booleans(), few, st.sampled_from([NodeState.UP, NodeState.UP, NodeState.UP, NodeState.DRAINING]),
    ),
    max_size=8,
).map(lambda drawn: [Node(f"n{number}", *each) for number, each in enumerate(drawn)])  # fmt: skip
placements = st.sampled_from([LoadBalance(), BestFit(), Dl2Paper(), Dl2Paper(keeps_bundles=False)])


class AsSpecified(RuleBasedStateMachine):
    """Whatever is done to it, a packing does what one that places task after task does."""

    @initialize(
        nodes=few_nodes | node_lists, placement=placements,
        shapes=st.lists(st.tuples(few, few), min_size=3, max_size=3),
        running=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(ROLES), st.integers(0, 8)), max_size=8),
        looked_at=st.sampled_from([1, 2, 64]),
        sets=st.lists(st.frozensets(st.integers(0, 8).map(lambda number: f"n{number}")), max_size=2),
        limits=st.lists(
            st.tuples(
                st.sets(st.integers(0, 2), min_size=1),
                st.dictionaries(st.sampled_from(["cpu", "gpu"]), st.integers(0, 9), min_size=1),
            ),
            max_size=2,
        ),
    )  # fmt: skip
    def begin(self, nodes, placement, shapes, running, looked_at, sets, limits) -> None:
        self.patch = mock.patch.object(node_classes, "MAX_LOOKED_AT", looked_at)
        self.patch.start()
        self.jobs = [a_job(worker, ps, number) for number, (worker, ps) in enumerate(shapes)]
        tasks = [a_task(self.jobs[job], number, f"n{place}", role) for number, (job, role, place) in enumerate(running)]
        # Of the three jobs the first may use all nodes.
        node_sets = [NodeSet((job.key,), names, "a reason") for job, names in zip(self.jobs[1:], sets, strict=False)]
        shared = [
            SharedLimit(
                tuple(self.jobs[job].key for job in members),
                tuple((name, 1000 * amount) for name, amount in sorted(most.items())),
                f"limit {number}",
            )
            for number, (members, most) in enumerate(limits)
        ]
        self.packing = Packing(nodes, placement, incumbents=tasks, node_sets=node_sets, limits=shared)
        self.plain = PlainPacking(nodes, placement, tasks, node_sets, shared)
        self.placed: list[tuple[str, Resources, JobKey | None]] = []

    @rule(job=st.integers(0, 2), workers=st.integers(0, 4), ps=st.integers(0, 4))
    def add(self, job, workers, ps) -> None:
        delta = Allocation(workers, ps)
        assert self.packing.fits(self.jobs[job], delta) == (
            copy.deepcopy(self.plain).add(self.jobs[job], delta) is None
        )
        assert self.packing.add(self.jobs[job], delta) == self.plain.add(self.jobs[job], delta)

    @rule(sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)), max_size=3))
    def stay(self, sizes) -> None:
        wanted = [(self.jobs[job], Allocation(workers, ps)) for job, workers, ps in sizes]
        assert self.packing.stay(wanted) == [self.plain.stay(*each) for each in wanted]

    @rule(
        demand=few | demands, role=st.sampled_from(ROLES), count=st.integers(0, 10),
        job=st.none() | st.integers(0, 2),
    )  # fmt: skip
    def place_all(self, demand, role, count, job) -> None:
        key = None if job is None else self.jobs[job].key
        nodes, blocked = self.packing.place_all(demand, role, count, key)
        one_by_one = [self.plain.place(demand, role, key) for _ in range(min(count, len(nodes) + 1))]
        assert one_by_one == [*nodes, *([blocked] if blocked is not None else [])]
        assert blocked is not None or len(nodes) == count
        self.placed += [(node, demand, key) for node in nodes]

    @rule(demand=few | demands, place=st.integers(0, 8), job=st.none() | st.integers(0, 2))
    def place_on(self, demand, place, job) -> None:
        key = None if job is None else self.jobs[job].key
        fits = self.packing.place_on(f"n{place}", demand, key)
        assert fits == self.plain.place_on(f"n{place}", demand, key)
        if fits:
            self.placed.append((f"n{place}", demand, None))

    @precondition(lambda self: self.placed)
    @rule(which=st.integers(0, 100))
    def remove(self, which) -> None:
        node, demand, key = self.placed.pop(which % len(self.placed))
        self.packing.remove(node, demand, key)
        self.plain.remove(node, demand, key)

    @invariant()
    def has_the_same_room(self) -> None:
        if hasattr(self, "packing"):
            assert self.packing.room() == self.plain.room()
            assert self.packing.left() == self.plain.left()

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.stop()


AsSpecified.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
test_a_packing_does_what_one_that_places_task_after_task_does = AsSpecified.TestCase
