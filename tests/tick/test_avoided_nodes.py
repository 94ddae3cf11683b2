"""Whole ticks in which the resource manager refuses nodes to a job, or tasks fail on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

import pytest
from msgspec import structs
from tick.scripted_manager import ScriptedManager
from tick.world import World

from dl2d.core.cluster import Node, NodeState, Task, TaskState
from dl2d.core.errors import NodeRefused
from dl2d.core.jobs import Architecture, JobKey, JobState, Progress, Role
from dl2d.core.resize_guard_state import NodeTrouble
from dl2d.core.resource_manager import EligibleNodes, RmJob, RmJobState, RmListing, TaskSpec
from dl2d.core.resources import Resources
from dl2d.placement.load_balance import LoadBalance
from dl2d.plugins import load_policy
from dl2d.testing import make_job, make_nodes
from dl2d.tick.avoided_nodes import node_sets
from dl2d.tick.tick_state import TickState

SMALL = EligibleNodes(frozenset({"n1"}), "partition small")


class Restricted(ScriptedManager):
    """Jobs may use some nodes only; tasks on others are refused, or wait for ever."""

    def prepare(self) -> None:
        #: By handles of anchors.
        self.eligible: dict[str, EligibleNodes] = {}
        #: Nodes on which starts are refused, and on which tasks wait.
        self.refusing: set[str] = set()
        self.waiting: set[str] = set()
        #: Nodes on which tasks wait since they need more than they were asked for with.
        self.without_room: set[str] = set()
        self.without_gpus: set[str] = set()

    def listing(self, ended_since: float | None = None, tasks: Collection[Task] | None = None) -> RmListing:
        listing = super().listing(ended_since, tasks)
        nodes = tuple(
            structs.replace(node, capacity=Resources.of(cpu=8)) if node.name in self.without_gpus else node
            for node in listing.nodes
        )
        return replace(listing, nodes=nodes, eligible_nodes=self.eligible)

    def submit(self, task: TaskSpec) -> str:
        if task.node in self.refusing:
            raise NodeRefused(f"{task.name} on {task.node}", said="not on this node")
        handle = super().submit(task)
        if task.node in self.without_room:
            self._change(handle, RmJobState.PENDING, "Resources")
        elif task.node in self.waiting:
            self._change(handle, RmJobState.PENDING, "ReqNodeNotAvail")
            job = next(job for job in self.live() if job.handle == handle)
            self.put(structs.replace(job, node_refused=True), ())
        return handle


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(policy=load_policy(getattr(request, "param", "drf")), slot_seconds=60.0)
    manager = made.manager = Restricted(made.cluster_nodes, lambda: made.now)
    made.coordinator._manager = manager
    manager.prepare()
    yield made
    made.close()


def manager_of(world: World) -> Restricted:
    assert isinstance(world.manager, Restricted)
    return world.manager


def ready(world: World, **changes: object) -> JobKey:
    """A job whose tasks may run on n1 only, once its coordinator has called."""
    key = world.submit(**changes)
    world.tick(1.0)
    manager_of(world).eligible[world.job(key).anchor] = SMALL
    world.beat()
    return key


def nodes_of(world: World, key: JobKey) -> set[str]:
    return {task.node for task in world.tasks(key) if task.state.wanted}


POLICIES = ("drf", "fifo", "srtf", "optimus", "tetris", "lookahead", "dl2")


@pytest.mark.parametrize("world", POLICIES, indirect=True)
def test_a_job_gets_as_much_as_the_nodes_have_that_it_may_use(world: World) -> None:
    restricted, other = ready(world), world.ready()
    world.settle()
    assert nodes_of(world, restricted) == {"n1"}
    assert nodes_of(world, other) - {"n1"}
    workers = [task for task in world.tasks(restricted) if task.role is Role.WORKER]
    assert 1 <= len(workers) <= 2
    report = world.tick()
    assert report.plan.deferred == ()
    assert {spec.node for spec in manager_of(world).submitted if spec.job == restricted and spec.node} == {"n1"}
    if len(workers) == 2:
        reason = next(entry.reason for entry in report.decision.jobs if entry.job == restricted)
        assert "may use 1 of 4 nodes (partition small)" in reason.text


def test_a_node_that_no_job_may_use_is_shown_to_take_no_tasks(world: World) -> None:
    ready(world)
    nodes = world.tick().snapshot.nodes
    assert [node.state for node in nodes] == [NodeState.UP, *[NodeState.DRAINING] * 3]
    world.ready()
    assert {node.state for node in world.tick().snapshot.nodes} == {NodeState.UP}


def test_a_node_that_refused_a_jobs_task_is_not_tried_again_for_a_while(world: World) -> None:
    manager = manager_of(world)
    manager.refusing = {"n1", "n2"}
    key = world.ready()
    for _ in range(6):
        world.tick(20.0)
        world.beat()
        # As after a restart.
        world.state = TickState(slot=world.state.slot)
    assert nodes_of(world, key) == {"n3", "n4"}
    failed = [report.node for report in world.store.tasks(live=False, job=key) if report.state is TaskState.FAILED]
    assert sorted(set(failed)) == ["n1", "n2"]
    (nodes,) = world.tick(0.1).snapshot.node_sets
    assert nodes.nodes == {"n3", "n4"}
    assert "not n1, refused: worker-0 on n1: not on this node; not n2, refused: " in nodes.reason
    manager.refusing = set()
    world.settle(12, 30.0)
    assert world.tick().snapshot.node_sets == ()


def test_a_task_that_will_not_be_started_on_its_node_is_asked_for_elsewhere(world: World) -> None:
    manager = manager_of(world)
    manager.waiting = {"n1", "n2", "n3"}
    key = world.ready(max_workers=1, max_ps=1)
    world.settle(20, 20.0)
    assert nodes_of(world, key) == {"n4"}
    asked = Counter(spec.node for spec in manager.submitted if spec.node)
    assert asked == {"n1": 1, "n2": 1, "n3": 1, "n4": 2}


ALL_REDUCE = {"architecture": Architecture.ALLREDUCE, "max_workers": 1, "min_ps": 0, "max_ps": 0}


@pytest.mark.parametrize("fails", ["at once", "to start"])
def test_a_node_on_which_tasks_fail_or_do_not_start_is_not_asked_again_and_again(world: World, fails: str) -> None:
    """Nothing runs there, so that it is always the node with the lowest load."""
    manager = manager_of(world)
    for name in ("n2", "n3", "n4"):
        manager.put(RmJob(handle=name, state=RmJobState.RUNNING, user="bob", node=name), ((name, Resources.of(cpu=2)),))
    manager.without_room = {"n1"} if fails == "to start" else set()
    key = world.ready(**ALL_REDUCE)
    for _ in range(60):
        world.tick(20.0)
        for job in manager.live() if fails == "at once" else ():
            if job.node == "n1":
                manager.end(job.handle, RmJobState.FAILED, "exit status 1")
        world.beat()
    assert world.has(key) == (1, 0)
    assert nodes_of(world, key) == {"n2"}
    assert Counter(spec.node for spec in manager.submitted if spec.job == key and spec.node) == {"n1": 1, "n2": 1}


def test_a_node_that_requeues_tasks_is_avoided_and_does_not_end_their_job(world: World) -> None:
    """Slurm does so with the tasks that a node cannot launch, whatever they were submitted with."""
    manager = manager_of(world)
    for name in ("n2", "n3", "n4"):
        manager.put(RmJob(handle=name, state=RmJobState.RUNNING, user="bob", node=name), ((name, Resources.of(cpu=2)),))
    key = world.ready(**ALL_REDUCE)
    for _ in range(60):
        world.tick()
        on_n1 = [job for job in manager.live() if job.node == "n1" and job.state is RmJobState.RUNNING]
        for job in on_n1:
            if job.submitted < world.now:  # this tick has seen it running
                later = {"submitted": int(world.now), "requeues": 1, "reason": "launch failed requeued held"}
                manager.put(structs.replace(job, state=RmJobState.PENDING, **later), ())
        if not on_n1:
            world.beat()
    assert world.has(key) == (1, 0)
    assert Counter(spec.node for spec in manager.submitted if spec.job == key and spec.node) == {"n1": 1, "n2": 1}
    assert [job.state for job in manager.listing().jobs if job.node == "n1"] == [RmJobState.CANCELLED]
    (gone,) = (task for task in world.store.tasks(live=False, job=key) if task.node == "n1")
    assert (gone.state, gone.note) == (TaskState.FAILED, "was requeued, or its id was reused")


@pytest.mark.parametrize(
    "why",
    ["it hangs", "it prepares data", "is suspended", "stays suspended", "coordinator silent", "old runtime"],
)
def test_a_task_that_runs_and_does_not_reach_its_coordinator_is_replaced_elsewhere(world: World, why: str) -> None:
    manager = manager_of(world)
    for name in ("n2", "n3", "n4"):
        manager.put(RmJob(handle=name, state=RmJobState.RUNNING, user="bob", node=name), ((name, Resources.of(cpu=2)),))
    key = world.ready(**ALL_REDUCE)
    world.starting = {"it prepares data": ("worker-0",), "old runtime": None}.get(why, ())
    ended_after = 0.0
    for _ in range(110 if why == "stays suspended" else 60):
        world.tick(20.0)
        on_n1 = [job for job in manager.live() if job.node == "n1"]
        for job in on_n1:
            manager.put(structs.replace(job, not_executing="suspended" in why), (("n1", Resources.of(gpu=1)),))
            ended_after = world.now - job.submitted
        if not on_n1:
            world.beat()
        elif why != "coordinator silent":
            world.store.report_progress(key, Progress(at=world.now))
    asked = Counter(spec.node for spec in manager.submitted if spec.job == key and spec.node)
    if why not in ("it hangs", "stays suspended"):
        assert (asked, world.has(key, state=TaskState.GRANTED)) == ({"n1": 1}, (1, 0))
        return
    assert (asked, world.has(key)) == ({"n1": 1, "n2": 1}, (1, 0))
    assert 0 <= ended_after - (600 if why == "it hangs" else 1800) <= 60
    refusal = world.store.guard_state().avoided_nodes[key]["n1"]
    state = "although it runs" if why == "it hangs" else "it has resources and does not execute"
    assert refusal.reason == f"a task did not reach its job's coordinator in 600 s, {state}"


def test_tasks_that_do_not_reach_their_coordinator_delay_the_next_and_count_as_ended_from_outside(world: World) -> None:
    key = world.ready(**ALL_REDUCE)
    world.starting = ()
    most = 0
    for _ in range(200):
        world.tick(20.0)
        world.store.report_progress(key, Progress(at=world.now))
        failures = world.store.guard_state().start_failures.get(key)
        most = most if failures is None else failures.from_outside
    assert most >= 3
    assert len({task.node for task in world.store.tasks(live=False, job=key)}) >= 2
    assert world.job(key).state is JobState.READY


def test_no_job_ends_for_a_node_on_which_all_tasks_fail(world: World) -> None:
    """The outputs of their tasks, which the reasons name, differ."""
    manager = manager_of(world)
    keys = [world.ready(**ALL_REDUCE, worker=Resources.of(cpu=0.25)) for _ in range(20)]
    for _ in range(30):
        world.tick(20.0)
        for job in manager.live():
            if job.node == "n1":
                manager.end(job.handle, RmJobState.FAILED, f"exit status 1; its output: {job.tag}.out")
        world.beat()
    assert {world.has(key) for key in keys} == {(1, 0)}
    assert len(world.tick(1.0).snapshot.node_sets) <= 1


@pytest.mark.parametrize("others", ["may not be used", "are too small"])
def test_a_node_on_which_a_task_failed_is_used_where_the_job_has_no_other(world: World, others: str) -> None:
    manager = manager_of(world)
    if others == "are too small":
        manager.without_gpus = {"n2", "n3", "n4"}
    key = ready(world, **ALL_REDUCE) if others == "may not be used" else world.ready(**ALL_REDUCE)
    world.tick()
    (first,) = world.tasks(key)
    manager.end(first.handle, RmJobState.FAILED, "exit status 1")
    world.settle(20, 20.0)
    assert nodes_of(world, key) == {"n1"}


@pytest.mark.parametrize("min_workers", [3, 4])
def test_a_node_on_which_a_task_failed_is_used_where_the_smallest_size_needs_it(world: World, min_workers: int) -> None:
    whole_nodes = {"worker": Resources.of(cpu=2, gpu=2), "min_workers": min_workers, "max_workers": 4}
    key = world.ready(**{**ALL_REDUCE, **whole_nodes})
    assert {node.capacity.get("gpu") for node in world.cluster_nodes} == {2.0}
    world.tick()
    failed = next(task for task in world.tasks(key) if task.node == "n3")
    manager_of(world).end(failed.handle, RmJobState.FAILED, "NODE_FAIL")
    world.settle(6, 20.0)
    assert nodes_of(world, key) == {"n1", "n2", "n4"} | ({"n3"} if min_workers == 4 else set())


def test_of_nodes_on_which_tasks_failed_only_as_many_are_used_again_as_it_takes(world: World) -> None:
    """One is broken, on another one task failed."""
    manager = manager_of(world)
    whole_nodes = {"worker": Resources.of(cpu=2, gpu=2), "min_workers": 3, "max_workers": 3}
    key = world.ready(**{**ALL_REDUCE, **whole_nodes})
    failing = {"n2", "n3"}
    for _ in range(30):
        world.tick(10.0)
        ended = [task for task in world.tasks(key) if task.state.wanted and task.node in failing]
        for task in ended:
            manager.end(task.handle, RmJobState.FAILED, "exit status 1")
        failing = {"n2"}
        if not ended:
            world.beat()
    assert nodes_of(world, key) == {"n1", "n3", "n4"}


def test_a_job_that_does_not_fit_beside_a_node_on_which_a_task_failed_uses_it() -> None:
    """Tasks go to the node with the lowest load, and so the others have no room for the server at the end."""
    cpus = (6, 4, 3, 2)
    world = World(cluster_nodes=[Node(f"n{n}", Resources.of(cpu=cpu, gpu=2)) for n, cpu in enumerate(cpus, start=1)])
    size = {"min_workers": 2, "max_workers": 2, "min_ps": 1, "max_ps": 1}
    key = world.ready(worker=Resources.of(cpu=3, gpu=2), ps=Resources.of(cpu=2), **size)
    refusals = {key: {"n3": NodeTrouble(1, world.now, "a task failed there", failed=True)}}
    world.store.keep_guard_state(replace(world.store.guard_state(), avoided_nodes=refusals))
    world.settle(3, 1.0)
    assert world.has(key) == (2, 1)


@pytest.mark.parametrize(("least", "avoiding"), [(1, 100), (8, 32)])
def test_of_many_jobs_that_may_each_use_other_nodes_few_are_packed(least: int, avoiding: int) -> None:
    """A packing costs as much as there are nodes; where there are more nodes than tasks none is made."""
    nodes = make_nodes(8)
    jobs = [
        replace(make_job(number, min_workers=least, max_workers=8, min_ps=1, max_ps=1), anchor=str(number))
        for number in range(100)
    ]
    may_use = {
        job.anchor: EligibleNodes(frozenset({*(node.name for node in nodes), f"gone-{job.anchor}"}), "named")
        for job in jobs
    }
    failed = {job.key: {"n1": NodeTrouble(1, 0.0, "a task failed there", failed=True)} for job in jobs}
    listing = RmListing(at=1.0, nodes=nodes, jobs=(), eligible_nodes=may_use)
    sets = node_sets(jobs, listing, failed, LoadBalance(), 1.0)
    assert sum(len(each.jobs) for each in sets) == avoiding
    assert all(each.nodes == {node.name for node in nodes[1:]} for each in sets)


def test_jobs_of_many_sizes_avoid_a_node_where_the_same_others_hold_each() -> None:
    """Their workers take whole nodes, so that servers need others."""
    nodes = make_nodes(8, cpu=64, gpu=8)
    jobs = [
        make_job(number, worker=Resources.of(cpu=62, gpu=8, memory=number), ps=Resources.of(cpu=4), min_workers=4)
        for number in range(40)
    ]
    nodes = [structs.replace(node, capacity=node.capacity + Resources.of(memory=100)) for node in nodes]
    failed = {job.key: {"n1": NodeTrouble(1, 0.0, "a task failed there", failed=True)} for job in jobs}
    sets = node_sets(jobs, RmListing(at=1.0, nodes=tuple(nodes), jobs=()), failed, LoadBalance(), 1.0)
    assert [len(each.jobs) for each in sets] == [40]


def test_jobs_that_avoid_a_node_for_different_causes_are_told_what_is_true_of_each(world: World) -> None:
    manager = manager_of(world)
    manager.refusing = {"n1"}
    refused = world.ready(**ALL_REDUCE)
    world.tick()
    manager.refusing = set()
    failing = world.ready(**ALL_REDUCE)
    world.tick(1.0)
    (task,) = world.tasks(failing)
    assert task.node == "n1"
    manager.end(task.handle, RmJobState.FAILED, "exit status 1")
    world.tick(1.0)
    (nodes,) = world.tick(1.0).snapshot.node_sets
    assert set(nodes.jobs) == {refused, failing}
    assert nodes.reason == "not n1, a task failed there, was not started or was refused"


@pytest.mark.parametrize("held", [True, False])
def test_a_node_is_not_avoided_for_a_task_that_waits_for_something_else(world: World, held: bool) -> None:
    """As for a licence, or since its user holds it."""
    key = world.ready(max_workers=1, max_ps=1)
    manager = world.manager
    manager.pending = True
    world.tick(1.0)
    for job in manager.live():
        if ":anchor" not in job.tag:
            manager.put(structs.replace(job, reason="Licenses", any_node=held), ())
    manager.pending = False
    for _ in range(3):
        world.tick(301.0)
        world.beat()
    notes = [task.note for task in world.store.tasks(live=False, job=key)]
    assert notes
    assert all("not started in 600 s: Licenses" in note for note in notes)
    assert bool(world.store.guard_state().avoided_nodes) is not held
