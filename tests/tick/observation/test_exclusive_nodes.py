"""Tasks that get nodes of their own: what policies and placing see of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tick.world import World

from dl2d.core.cluster import Node, Task
from dl2d.core.jobs import Allocation, Role
from dl2d.core.resource_manager import Claim, RmJob, RmJobState, RmListing
from dl2d.core.resources import NO_RESOURCES, WHOLE_NODE, Resources, Shortfall
from dl2d.placement.dl2_paper import Dl2Paper
from dl2d.simulation.in_memory_resource_manager import MemoryManager
from dl2d.store.tables.slots_and_decisions import resource_use
from dl2d.testing import make_job, make_nodes
from dl2d.tick.decision.decide import decide
from dl2d.tick.observation.exclusive_nodes import with_whole_nodes
from dl2d.tick.observation.observe import LiveJobs
from dl2d.tick.tick import tick

CPU = Resources.of(cpu=1)
FIRST = replace(make_job(1, worker=CPU, ps=CPU), anchor="a1")
SECOND = replace(make_job(2, worker=CPU, ps=NO_RESOURCES, max_ps=0, min_ps=0), anchor="a2")


def a_task(job=FIRST, node="n1", handle="") -> Task:
    return Task(job=job.key, id="worker-0", role=Role.WORKER, node=node, demand=CPU, handle=handle)


def a_listing(*jobs: RmJob, used: float = 0, whole: frozenset[str] = frozenset({"a1"}), **more) -> RmListing:
    nodes = (Node("n1", Resources.of(cpu=8), Resources.of(cpu=used)), Node("n2", Resources.of(cpu=8)))
    return RmListing(1.0, nodes, jobs, whole_nodes=whole, **more)


def held(listing: RmListing) -> list[float]:
    return [node.used.get(WHOLE_NODE) for node in listing.nodes]


@pytest.mark.parametrize("whole", [frozenset(), frozenset({"a2"})])
def test_nothing_changes_where_no_task_of_a_known_job_has_a_whole_node(whole) -> None:
    """The second job has not registered when the listing shows its anchor."""
    live, listing = LiveJobs((FIRST,), (a_task(),)), a_listing(whole=whole)
    assert with_whole_nodes(live, listing) == (live, listing)
    assert with_whole_nodes(live, listing)[1] is listing


def test_jobs_and_nodes_have_the_resource_or_neither() -> None:
    live, listing = with_whole_nodes(LiveJobs((FIRST, SECOND), (a_task(),)), a_listing(used=8))
    first, second = (job.request for job in live.jobs)
    assert [each.get(WHOLE_NODE) for each in (first.worker, first.ps, second.worker)] == [1, 1, 0.001]
    assert second.ps == NO_RESOURCES
    assert {node.capacity.get(WHOLE_NODE) for node in listing.nodes} == {1}


@pytest.mark.parametrize(
    ("task", "used", "expected"),
    [
        pytest.param(None, 0, [0, 0], id="nothing"),
        pytest.param(None, 1, [0.001, 0], id="a job of others, or an anchor"),
        pytest.param(a_task(handle="7"), 8, [1, 0], id="a task"),
        # What the task holds is added to the use of its node when the snapshot is made.
        pytest.param(a_task(), 8, [0, 0], id="a task is asked for, where one of others is ending"),
        pytest.param(a_task(SECOND, handle="7"), 8, [0.001, 0], id="a task that shares its node"),
        pytest.param(a_task(SECOND, handle="7"), 9, [0.002, 0], id="one that shares it with others"),
    ],
)
def test_what_runs_on_a_node_holds_all_of_it_or_a_part(task, used, expected) -> None:
    running = RmJob(handle="7", state=RmJobState.RUNNING, node="n1", held=Resources.of(cpu=8))
    live = LiveJobs((FIRST, SECOND), () if task is None else (task,))
    assert held(with_whole_nodes(live, a_listing(running, used=used))[1]) == expected


def test_claims_share_nodes_unless_they_are_for_whole_ones() -> None:
    claim = Claim(handle="1", user="eve", priority=1, nodes=2, demand=Resources.of(cpu=2))
    claims = claim, Claim(handle="2", user="eve", priority=1, nodes=1, demand=CPU, whole=True)
    _, listing = with_whole_nodes(LiveJobs((FIRST,)), a_listing(claims=claims))
    assert [each.demand.get(WHOLE_NODE) for each in listing.claims] == [0.002, 0]


@pytest.mark.parametrize(
    ("wanted", "had", "text"),
    [
        (1, 0.999, "whole nodes: wanted 1, had 0"),
        (3, 2.997, "whole nodes: wanted 3, had 2"),
        (0.001, 0, "each node is kept for one task"),
    ],
)
def test_too_few_whole_nodes_in_words(wanted, had, text) -> None:
    assert str(Shortfall(WHOLE_NODE, wanted, had)) == text
    assert str(Resources.of({"cpu": 1, WHOLE_NODE: 2.999})) == "cpu=1 whole-node=2"


class Exclusive(MemoryManager):
    """Gives each task of the jobs of some anchors, if these are listed, a node of its own."""

    def listing(self, ended_since=None, tasks=None) -> RmListing:
        found = super().listing(ended_since, tasks)
        return replace(found, whole_nodes=frozenset(job.handle for job in found.jobs if job.tag.endswith(":anchor")))


@pytest.fixture
def world() -> Iterator[World]:
    world = World(cluster_nodes=make_nodes(4))
    world.manager = world.coordinator._manager = Exclusive(world.cluster_nodes, lambda: world.now)  # type: ignore[assignment]
    yield world
    world.close()


@pytest.mark.parametrize("bundles", [False, True], ids=["apart", "bundles"])
def test_each_task_is_placed_on_a_node_of_its_own(world: World, bundles: bool) -> None:
    key = world.submit()
    for _ in range(6):
        context = world.context()
        placement = Dl2Paper() if bundles else context.deciders.placement
        world.now += 10.0
        world.elapsed += 10.0
        world.state, report = tick(
            replace(context, deciders=replace(context.deciders, placement=placement)), world.state
        )
        world.beat()
    assert world.has(key) == Allocation(2, 2)
    assert len(world.nodes_of(key)) == 4
    # A recorded decision is computed again from what was recorded; administrators see the resources of the nodes alone.
    slot = world.store.slot(world.store.last_slot_number())
    assert slot is not None
    again = decide(slot.snapshot, replace(context.deciders, placement=placement), slot.seed)
    assert again.allocations() == slot.proposed.allocations()
    assert {use["resource"] for use in resource_use(report.snapshot)} == {"cpu", "gpu"}


def test_two_jobs_share_whole_nodes_and_get_what_is_decided(world: World) -> None:
    first = world.settled()
    second = world.submit()
    reports = []
    for _ in range(60):
        reports.append(world.tick(10.0))
        world.beat()
    assert (world.has(first), world.has(second)) == (Allocation(1, 1), Allocation(1, 1))
    assert world.nodes_of(first).isdisjoint(world.nodes_of(second))
    assert not any(report.plan.starts or report.plan.stops for report in reports[20:])
    assert not any(report.needless_wait.jobs for report in reports[20:])
