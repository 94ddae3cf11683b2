"""Elastic jobs make room for jobs of others that wait in the resource manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs
from structlog.testing import capture_logs
from tick.world import GivesNothing, World

from dl2d.core.backoff_after_failed_starts import StartFailures
from dl2d.core.cluster import Claimant, Node, NodeSet, NodeState, Snapshot, Task, TaskState
from dl2d.core.decision import Constraint
from dl2d.core.errors import Rejected
from dl2d.core.jobs import Allocation, Architecture, JobKey, JobState, Role
from dl2d.core.resource_manager import Claim, EligibleNodes, GrowthLimit, RmJob, RmJobState, RmListing, Yields
from dl2d.core.resources import Resources
from dl2d.daemon.api.heartbeat import Heartbeat, receive
from dl2d.daemon.log_lines_of_ticks import TickLog
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.policies.srtf import Srtf
from dl2d.testing import make_job, make_nodes
from dl2d.tick.record_slot import Report
from dl2d.tick.tick_context import GuardRules
from dl2d.tick.vacating import vacate_for_waiting_jobs
from dl2d.tick.vacating.claim_history import ClaimHistory
from dl2d.tick.vacating.vacate_for_waiting_jobs import MAX_LOST, RETRY_SECONDS, vacate_nodes


@pytest.fixture
def world() -> Iterator[World]:
    world = World(url="")
    yield world
    world.close()


def claim(handle: str = "812", nodes: int = 2, priority: int = 9000, **changes: object) -> Claim:
    """A job of bob that waits for whole nodes."""
    given = {"demand": Resources.of(cpu=nodes), "whole": True, "user": "bob", **changes}
    return Claim(handle=handle, nodes=nodes, priority=priority, **given)  # type: ignore[arg-type]


def follow(world: World, ticks: int = 10) -> list[str]:
    """Ticks, heartbeats and the resource manager's scheduler in turn; returns the jobs of others that started."""
    started: list[str] = []
    for _ in range(ticks):
        world.tick(1.0)
        world.beat()
        started += world.manager.start_claims()
    return started


def five_ticks(world: World) -> Report:
    """Ticks and heartbeats in turn, in which no job of others starts; returns the last report."""
    for _ in range(5):
        report = world.tick(1.0)
        world.beat()
    return report


def test_a_job_that_waits_for_whole_nodes_starts_and_the_elastic_job_grows_again_afterwards(world: World) -> None:
    job = world.settled(max_workers=8, max_ps=8)
    assert world.has(job) == (8, 8)
    world.manager.claims.append(claim())
    (entry,) = world.tick(1.0).decision.jobs
    assert (entry.previous, entry.allocation) == ((8, 8), (4, 4))
    (reason,) = entry.guarded
    assert reason.constraint is Constraint.CLAIM
    assert reason.text.startswith("room made for job 812 of bob (priority 9000) on 2 nodes: ")
    assert reason.claimants == (Claimant("812", "bob", 9000, tasks_leave=True),)
    assert follow(world) == ["812"]
    assert world.job(job).state is JobState.RUNNING
    assert world.has(job) == (4, 4)
    assert world.manager.stopped == []  # they drained
    world.manager.end("812")
    world.tick(world.slot_seconds)
    world.settle()
    assert world.has(job) == (8, 8)


@pytest.mark.parametrize("planned", [(), ("n2",)])
def test_a_job_that_gets_all_memory_of_its_node_gets_that_of_the_node_that_is_chosen(planned: tuple[str, ...]) -> None:
    nodes = [Node(f"n{number}", Resources.of(cpu=4, memory=4000 * number)) for number in (1, 2)]
    with closing(World(url="", cluster_nodes=nodes)) as world:
        job = world.settled(max_workers=7, max_ps=1, worker=Resources.of(cpu=1, memory=10), ps=Resources.of(cpu=0.1))
        assert world.has(job) == (7, 1)
        eligible = frozenset({"n2"}) if planned else None
        world.manager.claims.append(
            claim(nodes=1, whole=False, demand=Resources.of(cpu=1), all_memory=True, eligible=eligible, planned=planned)
        )
        ((node, room),) = [(each.nodes, each.room) for each in five_ticks(world).snapshot.grants]
        (taken,) = [each for each in nodes if (each.name,) == node]
        assert room == (Resources.of(cpu=1, memory=taken.capacity.get("memory")),)
        assert not any(task.role is Role.WORKER and task.node == taken.name for task in world.tasks(job))
        assert world.has(job).workers >= 3


@pytest.mark.parametrize("spreads", [(), (2, 3)])
def test_a_job_that_needs_no_number_of_nodes_is_spread_where_its_least_number_cannot_be_had(
    spreads: tuple[int, ...],
) -> None:
    """On each of three nodes of eight CPUs a job of others holds four."""
    nodes = [Node(f"n{number}", Resources.of(cpu=8)) for number in (1, 2, 3)]
    with closing(World(url="", cluster_nodes=nodes)) as world:
        for node in nodes:
            other = RmJob(handle=f"of {node.name}", state=RmJobState.RUNNING, user="bob", node=node.name)
            world.manager.put(other, ((node.name, Resources.of(cpu=4)),))
        job = world.settled(max_workers=11, max_ps=1, worker=Resources.of(cpu=1), ps=Resources.of(cpu=1))
        assert world.has(job) == (11, 1)
        demand = Resources.of(cpu=6)
        world.manager.claims.append(
            claim(nodes=1, whole=False, demand=demand, spreads=tuple((number, demand) for number in spreads))
        )
        assert follow(world) == (["812"] if spreads else [])
        assert world.has(job) == ((5, 1) if spreads else (11, 1))


def test_only_jobs_of_lower_priority_yield_unless_the_site_says_otherwise(world: World) -> None:
    job = world.settled(max_workers=8, max_ps=8)
    for priority, yields, starts in (
        (100, Yields.HIGHER_PRIORITY, []),
        (9000, Yields.NEVER, []),
        (1, Yields.ALWAYS, ["812"]),
    ):
        world.manager.yields = yields
        world.manager.claims = [claim(priority=priority)]
        assert follow(world) == starts
        assert world.has(job) == ((4, 4) if starts else (8, 8))


def test_running_jobs_keep_their_floors_which_move_off_claimed_nodes(world: World) -> None:
    """Three of four nodes are vacated: the worker and the server of each job's floor end up on the last one."""
    world.manager.claims = []
    jobs = [world.submit(max_workers=4, max_ps=4) for _ in range(2)]
    world.settle()
    world.manager.claims.append(claim(nodes=3))
    assert follow(world, 20) == ["812"]
    for job in jobs:
        assert world.job(job).state is JobState.RUNNING
        assert world.has(job) == (1, 1)
    assert len({task.node for job in jobs for task in world.tasks(job)}) == 1


def test_a_claim_beyond_what_floors_leave_makes_nobody_shrink(world: World) -> None:
    jobs = [world.submit(max_workers=4, max_ps=4) for _ in range(2)]
    world.settle()
    before = [world.has(job) for job in jobs]
    world.manager.claims.append(claim(nodes=4))
    assert follow(world) == []
    assert [world.has(job) for job in jobs] == before


@pytest.mark.parametrize(
    "absurd",
    [
        claim(nodes=10**9),
        claim(nodes=0, demand=Resources.of(cpu=10**9)),
        claim(nodes=1, whole=False, demand=Resources.of(cpu=33)),
        claim(nodes=1, whole=False, demand=Resources.of(tpu=1)),
        claim(nodes=1, eligible=frozenset()),
        claim(nodes=1, eligible=frozenset({"no-such-node"})),
        claim(nodes=1, required=frozenset({"no-such-node"})),
        claim(nodes=2, required=frozenset({"n1", "n2", "n3", "n4"})),
        claim(nodes=9, planned=("no-such-node",), expected_start=1e300),
        claim(nodes=4, planned=("n1", "n2", "n3", "n4"), expected_start=1e300),
        claim(nodes=1, priority=-(2**63), planned=("n1",)),
    ],
    ids=lambda each: f"{each.nodes} nodes, {each.demand}",
)
def test_absurd_claims_drain_nothing_and_do_not_hide_a_proper_one(world: World, absurd: Claim) -> None:
    job = world.settled(max_workers=8, max_ps=8)
    world.manager.claims.append(absurd)
    for _ in range(5):
        report = world.tick(1.0)
        world.beat()
        assert report.plan.stops == ()
    assert world.has(job) == (8, 8)
    world.manager.claims.append(claim("900", nodes=1, priority=1000))
    five_ticks(world)
    assert world.manager.start_claims() == ["900"]
    assert world.job(job).state is JobState.RUNNING


def test_a_queue_of_ten_thousand_takes_no_more_than_can_be_met(world: World) -> None:
    job = world.settled(max_workers=8, max_ps=8)
    world.manager.claims = [claim(str(number), nodes=1 + number % 7) for number in range(10_000)]
    report = five_ticks(world)
    assert len({node for each in report.snapshot.grants for node in each.nodes}) == 3
    assert world.job(job).state is JobState.RUNNING
    assert world.has(job) == (2, 2)


def test_a_share_of_a_node_takes_only_the_tasks_in_its_way(world: World) -> None:
    job = world.settled(max_workers=8, max_ps=8)
    world.manager.claims.append(claim(nodes=1, whole=False, demand=Resources.of(cpu=2, gpu=1)))
    assert follow(world) == ["812"]
    assert world.has(job).workers == 7


def test_a_share_that_fits_on_no_node_is_spread_over_more(world: World) -> None:
    """An ``sbatch -n 16`` says one node, and gets two of eight processors."""
    job = world.settled(max_workers=8, max_ps=8)
    world.manager.claims.append(claim(nodes=1, whole=False, demand=Resources.of(cpu=16)))
    report = five_ticks(world)
    (claimed,) = report.snapshot.grants
    assert [room.get("cpu") for room in claimed.room] == [8, 8]
    assert world.has(job) == (4, 4)


def test_planned_nodes_are_vacated_first(world: World) -> None:
    job = world.settled(max_workers=8, max_ps=8)
    world.manager.claims.append(claim(planned=("n2", "n4")))
    report = five_ticks(world)
    (claimed,) = report.snapshot.grants
    assert claimed.nodes == ("n2", "n4")
    assert claimed.text == "free room is kept for job 812 of bob (priority 9000) on 2 nodes: n2, n4"
    assert (
        msgspec.structs.replace(claimed, priority=4294901743).text
        == "free room is kept for job 812 of bob on 2 nodes: n2, n4"
    )
    assert world.nodes_of(job) == {"n1", "n3"}


def occupy(world: World, handle: str, *nodes: str) -> None:
    """A job of another user that has these nodes."""
    whole = {node.name: node.capacity for node in world.manager.nodes}
    held = tuple((node, whole[node]) for node in nodes)
    world.manager.put(RmJob(handle=handle, state=RmJobState.RUNNING, user="eve", node=nodes[0]), held)


def test_tasks_move_to_a_planned_node_that_cannot_be_vacated_if_there_is_no_other() -> None:
    """A rigid job has half of n2 for another hour, and an elastic one has its minimum size on n1."""
    with closing(World(cluster_nodes=make_nodes(2), url="")) as world:
        occupy(world, "6", "n2")
        job = world.settled(max_workers=1, max_ps=1)
        world.manager.end("6")
        world.manager.put(
            RmJob(handle="7", state=RmJobState.RUNNING, user="eve", node="n2"), (("n2", Resources.of(cpu=4)),)
        )
        world.manager.claims = [claim(nodes=1, planned=("n2",), expected_start=world.now + 3600.0)]
        assert follow(world) == ["812"]
        assert world.nodes_of(job) == {"n2"}
        assert world.job(job).state is JobState.RUNNING


def test_growth_keeps_off_planned_nodes_and_they_are_vacated_in_time(world: World) -> None:
    """Bob's job is to get n1 and n2 when another one ends on n1, in ten minutes."""
    occupy(world, "7", "n1")
    job = world.submit(max_workers=8, max_ps=8)
    occupy(world, "8", "n3", "n4")
    world.settle()
    assert world.has(job) == (2, 2)
    world.manager.claims.append(claim(planned=("n1", "n2"), expected_start=world.now + 600.0))
    assert follow(world) == []
    assert world.has(job) == (2, 2)
    # What becomes free beside it is used, what becomes free on a planned node is not.
    world.manager.end("8")
    occupy(world, "9", "n3")
    world.tick(world.slot_seconds)
    world.settle()
    assert world.nodes_of(job) == {"n2", "n4"}
    world.tick(220.0)
    assert follow(world) == []
    assert world.nodes_of(job) == {"n4"}
    world.manager.end("7")
    assert follow(world) == ["812"]


def test_room_of_a_claim_that_vanished_is_used_again(world: World) -> None:
    job = world.settled(max_workers=8, max_ps=8)
    world.manager.claims.append(claim())
    five_ticks(world)
    assert world.has(job) == (4, 4)
    world.manager.claims.clear()
    world.tick(world.slot_seconds)
    world.settle()
    assert world.has(job) == (8, 8)


def test_a_job_that_does_not_start_although_its_room_is_free_gives_it_back(world: World) -> None:
    """It waits for something that the resource manager does not tell."""
    job = world.settled(max_workers=8, max_ps=8)
    world.manager.claims.append(claim())
    five_ticks(world)
    assert world.has(job) == (4, 4)
    for _ in range(4):
        world.tick(200.0)
        world.settle()
    assert world.has(job) == (8, 8)
    world.tick(3700.0)
    world.settle()
    assert world.has(job) == (4, 4)


@pytest.mark.parametrize("seconds_behind", [200.0, 800.0], ids=["before it was given up", "after it was given up"])
def test_a_job_behind_others_gets_room_again_as_soon_as_none_are_before_it(world: World, seconds_behind: float) -> None:
    """The resource manager starts none before those of higher priority, although it has room."""
    job = world.settled(max_workers=8, max_ps=8)
    world.manager.claims = [claim(behind_others=True)]
    for _ in range(int(seconds_behind / 100)):
        world.tick(100.0)
        world.settle()
    assert world.has(job) == ((4, 4) if seconds_behind < 300 else (8, 8))
    world.manager.claims = [claim()]
    for _ in range(2):
        world.tick(140.0)
        world.settle()
        assert world.has(job) == (4, 4)
    for _ in range(3):
        world.tick(140.0)
        world.settle()
    assert world.has(job) == (8, 8)
    # It is tried again after an hour only, whatever comes before it.
    for behind in (True, False):
        world.manager.claims = [claim(behind_others=behind)]
        world.tick(60.0)
        world.settle()
        assert world.has(job) == (8, 8)


def test_a_job_that_is_given_up_behind_others_takes_no_room_from_one_like_it_that_is_first(world: World) -> None:
    """Both are of one user; the second one comes shortly before the first one is given up."""
    world.settled(max_workers=8, max_ps=8)
    behind = claim(handle="1", priority=950, behind_others=True)
    first = claim(handle="2", priority=900)
    got = []
    for minute in range(9):
        world.manager.claims = [behind] if minute < 3 else [behind, first]
        world.tick(60.0)
        world.settle()
        got.append([each.handle for each in world.tick(0.0).snapshot.grants])
    assert got[0] == ["1"]
    assert got[-2:] == [["2"], ["2"]]


def test_jobs_that_were_given_up_behind_others_are_tried_together_as_soon_as_one_of_them_is_first(world: World) -> None:
    """Otherwise those of an array would get room one after the other."""
    world.settled(max_workers=8, max_ps=8)
    array = [claim(str(number), 1, 950 - number, behind_others=True) for number in range(2)]
    world.manager.claims = array
    for _ in range(9):
        world.tick(60.0)
        world.settle()
    assert world.tick(0.0).snapshot.grants == ()
    world.manager.claims = [structs.replace(array[0], behind_others=False), array[1]]
    assert [each.handle for each in world.tick(60.0).snapshot.grants] == ["0", "1"]


def minutes_at(world: World, job: JobKey, size: tuple[int, int], minutes: int = 120) -> int:
    """In how many of these minutes a job has a size."""
    found = 0
    for _ in range(minutes):
        world.tick(60.0)
        world.beat()
        found += world.has(job) == size
    return found


def test_a_job_that_never_starts_is_given_up_although_now_and_then_others_are_before_it(world: World) -> None:
    job = world.settled(max_workers=8, max_ps=8)
    at_full_size = 0
    for minute in range(120):
        world.manager.claims = [claim(behind_others=minute % 4 == 0)]
        at_full_size += minutes_at(world, job, (8, 8), 1)
    assert at_full_size > 90


@pytest.mark.parametrize(
    "claims",
    [
        pytest.param([claim(str(number)) for number in range(15)], id="an array"),
        pytest.param([claim(str(number), demand=Resources.of(cpu=2 + number)) for number in range(15)], id="15 shapes"),
        pytest.param([claim(planned=("n1", "n2"))], id="planned"),
    ],
)
def test_jobs_that_never_start_do_not_keep_nodes_vacated_in_turn(world: World, claims: list[Claim]) -> None:
    """One user's jobs, each of which waits for something that the resource manager does not tell."""
    job = world.settled(max_workers=8, max_ps=8)
    world.manager.claims = claims
    assert minutes_at(world, job, (8, 8)) > 45
    # Those of other users are met.
    world.manager.claims.append(claim("900", priority=1000, user="eve"))
    assert "900" in {each.handle for each in world.tick(1.0).snapshot.grants}


@pytest.mark.parametrize("first_are_tasks", [True, False])
def test_a_users_waiting_elastic_tasks_and_other_jobs_are_not_given_up_with_one_another(
    world: World, first_are_tasks: bool
) -> None:
    world.settled(max_workers=8, max_ps=8)
    demands = [Resources.of(cpu=2 + number) for number in range(5)]
    first = [claim(str(number), demand=demand, is_task=first_are_tasks) for number, demand in enumerate(demands)]
    world.manager.claims = first
    for _ in range(90):
        world.tick(30.0)
        world.beat()
    assert not world.tick(1.0).snapshot.grants
    alike = claim("900", priority=1000, demand=demands[0])
    world.manager.claims = [*first, structs.replace(alike, is_task=first_are_tasks)]
    assert not world.tick(1.0).snapshot.grants
    world.manager.claims = [*first, structs.replace(alike, is_task=not first_are_tasks)]
    assert [each.handle for each in world.tick(1.0).snapshot.grants] == ["900"]


def test_a_job_that_could_not_start_yet_is_not_given_up_with_those_behind_it(world: World) -> None:
    """They would delay it, so that they are not started on free nodes either."""
    occupy(world, "7", "n4")
    job = world.settled(max_workers=8, max_ps=8)
    behind = [claim(str(number), 1, 8000, demand=Resources.of(cpu=number)) for number in range(1, 7)]
    world.manager.claims = [claim(required=frozenset({"n4"})), *behind]
    assert minutes_at(world, job, (6, 6), 60) > 10
    world.manager.end("7")
    assert "812" in follow(world)


def test_nodes_planned_for_a_job_that_is_late_are_used_until_all_of_them_can_be_vacated(world: World) -> None:
    """A job of eve on n1 does not end when it should."""
    occupy(world, "7", "n1")
    job = world.settled(max_workers=8, max_ps=8)
    world.manager.claims.append(claim(nodes=3, planned=("n1", "n2", "n3"), expected_start=world.now))
    assert minutes_at(world, job, (2, 2), 5) > 2
    assert minutes_at(world, job, (6, 6)) > 90
    world.manager.end("7")
    assert follow(world) == ["812"]


def test_tasks_of_an_array_that_start_one_after_the_other_have_not_failed_to(world: World) -> None:
    """All that wait have the id of the array, there is always room for one of them, and not each is a claim."""
    job = world.settled(max_workers=8, max_ps=8)
    for waiting in range(20, 5, -1):
        world.manager.claims = [claim(nodes=1, waiting=waiting) for _ in range(5)]
        world.tick(60.0)
        world.beat()
    assert world.has(job) == (2, 2)


def test_nodes_planned_for_a_job_of_lower_priority_are_not_kept_from_elastic_jobs(world: World) -> None:
    """It would wait for five days for nodes of which most are free."""
    occupy(world, "7", "n1")
    planned = ("n1", "n2", "n3", "n4")
    world.manager.claims.append(claim(nodes=4, priority=1, planned=planned, expected_start=world.now + 432_000.0))
    job = world.settled(max_workers=8, max_ps=8)
    assert world.has(job) == (6, 6)


@pytest.mark.parametrize(
    ("start", "count", "claimed"), [(3600.0, 300, ["n3"]), (10.0, 200, ["n2"]), (10.0, 300, [])], ids=str
)
def test_planned_nodes_that_cannot_be_had_hide_none_behind_them_until_too_many_were_tried(
    start: float, count: int, claimed: list[str]
) -> None:
    """The task of n1 may use no other node, a job has one more than its floor on n2, and a part of n3 is free."""
    full = [structs.replace(node, used=node.capacity) for node in make_nodes(3)]
    worker = full[0].capacity
    nodes = (*full[:2], structs.replace(full[2], used=Resources.of(cpu=2)))
    jobs = [
        replace(make_job(number, worker=worker, min_ps=0, max_ps=0), state=JobState.RUNNING, anchor=str(number))
        for number in (1, 2)
    ]
    tasks = [
        Task(job=job.key, id="worker-0", role=Role.WORKER, node=node.name, demand=worker, state=TaskState.CONFIRMED)
        for job, node in zip(jobs, nodes[:2], strict=True)
    ]
    floors = ((jobs[0].key, Allocation(1, 0)), (jobs[1].key, Allocation(0, 0)))
    snapshot = Snapshot(
        at=0.0, slot=1, nodes=nodes, jobs=tuple(jobs), tasks=tuple(tasks), floors=floors,
        node_sets=(NodeSet((jobs[0].key,), frozenset({"n1"}), "partition small"),),
    )  # fmt: skip
    anchors = tuple(RmJob(handle=job.anchor, state=RmJobState.RUNNING, yields=Yields.ALWAYS) for job in jobs)
    front = [claim(str(each), 9, user="eve", planned=("n1",), expected_start=start) for each in range(100, 100 + count)]
    behind = claim(nodes=9, priority=1, planned=("n2",) if start < 60 else ("n3",), expected_start=start)
    listing = RmListing(0.0, nodes, anchors, claims=(*front, behind))
    found, _ = vacate_nodes(snapshot, listing, ClaimHistory(), now=0.0, lead_seconds=60.0, allocations={})
    assert [node for each in found.grants for node in each.nodes] == claimed


@pytest.mark.parametrize(
    ("others", "asked", "start"),
    [(8, 5, 10.0), (4, 5, 10.0), (4, 8, 3600.0)],
    ids=["of jobs of others", "of tasks that stay", "that is kept for later"],
)
def test_room_of_a_planned_node_goes_to_no_claim_of_lower_priority(
    world: World, others: int, asked: int, start: float
) -> None:
    world.manager.put(
        RmJob(handle="7", state=RmJobState.RUNNING, user="eve", node="n1"), (("n1", Resources.of(cpu=others)),)
    )
    planned = {"eligible": frozenset({"n1"}), "planned": ("n1",), "whole": False, "demand": Resources.of(cpu=asked)}
    claims = [claim("812", 1, **planned, expected_start=world.now + start)]
    if start > 60:
        world.manager.claims = claims
    world.settled(worker=Resources.of(cpu=2), max_workers=16, min_ps=0, max_ps=0, architecture=Architecture.ALLREDUCE)
    world.manager.claims = [
        *claims,
        claim("813", 1, 8000, **planned, expected_start=world.now),
        claim("814", 1, 7000, whole=False, demand=Resources.of(cpu=2)),
    ]
    found = {each.handle: (each.nodes, bool(each.leaving)) for each in world.tick(1.0).snapshot.grants}
    assert found == {"812": (("n1",), others < 8 and start < 60), "814": (("n2",), True)}


def test_claims_for_which_planned_nodes_are_vacated_do_not_count_as_met(world: World) -> None:
    occupy(world, "7", "n1")
    world.settled(max_workers=8, max_ps=8)
    world.manager.claims = [claim(planned=("n1", "n2"), eligible=frozenset({"n1", "n2"})), claim("813", 1, 8000)]
    assert len(world.tick(1.0).snapshot.grants) == 2
    assert world.state.claim_history.met_count == {"813": 1}


def test_a_decision_on_an_incomplete_listing_is_made_again_with_the_claims_of_the_next_complete_one() -> None:
    with closing(World(url="", slot_seconds=30.0)) as world:
        job = world.settled(max_workers=8, max_ps=8)
        world.manager.claims.append(claim())
        world.tick(1.0)
        world.manager.incomplete = ("squeue: cannot read a line",)
        world.beat()
        assert world.tick(30.0).decided
        world.manager.incomplete = ()
        world.beat()
        reports = [world.tick(1.0) for _ in range(3)]
        assert [report.decided for report in reports] == [True, False, False]
        assert [report.decision.jobs[0].allocation for report in reports] == [(4, 4)] * 3
        assert world.manager.start_claims() == ["812"]
        assert world.has(job) == (4, 4)


def test_a_job_that_may_not_use_planned_nodes_does_not_open_them_to_others(world: World) -> None:
    occupy(world, "7", "n1")
    planned = ("n1", "n2", "n3")
    jobs = [world.submit(max_workers=8, max_ps=8) for _ in range(2)]
    world.tick(1.0)
    above = world.job(jobs[0]).anchor
    world.manager.priorities[above] = 10_000
    world.manager.eligible = {above: EligibleNodes(frozenset({"n4"}), "partition other")}
    world.manager.claims.append(claim(nodes=3, planned=planned, expected_start=world.now + 432_000.0))
    world.beat()
    world.settle()
    assert world.nodes_of() == {"n4"}


def test_an_incomplete_listing_and_a_silent_coordinator_vacate_nothing(world: World) -> None:
    job = world.settled(max_workers=8, max_ps=8)
    world.manager.claims.append(claim())
    world.manager.incomplete = ("squeue: cannot read a line",)
    assert follow(world) == []
    assert world.has(job) == (8, 8)
    world.manager.incomplete = ()
    for _ in range(3):
        report = world.tick(70.0)
        assert report.plan.stops == ()
    world.beat()
    assert follow(world) == ["812"]


def test_the_guard_enforces_a_claim_and_names_it(build) -> None:
    """The policy wants to keep what the job has."""
    world = build()
    job = world.settled(max_workers=8, max_ps=8)
    world.policy = GivesNothing()
    world.manager.claims.append(claim())
    report = world.tick(1.0)
    (entry,) = report.decision.jobs
    assert entry.allocation == (4, 4)
    assert [reason.constraint for reason in entry.guarded] == [Constraint.CLAIM]
    assert "room made for job 812 of bob (priority 9000) on 2 nodes: " in entry.guarded[0].text
    assert len(report.plan.stops) == 8
    (claimed,) = report.snapshot.grants
    stay = {task.node for task in world.tasks(job) if task.state.wanted}
    assert stay == {"n1", "n2", "n3", "n4"} - set(claimed.nodes)


@pytest.mark.parametrize("yields", [Yields.ALWAYS, Yields.HIGHER_PRIORITY])
def test_an_elastic_job_of_higher_priority_that_waits_comes_before_a_claim(world: World, yields: Yields) -> None:
    world.manager.yields = yields
    first = world.settled(max_workers=8, max_ps=8)
    second = world.submit(worker=Resources.of(cpu=7, gpu=2), max_workers=1, max_ps=1)
    world.tick(1.0)
    world.manager.priorities[world.job(second).anchor] = 10_000
    world.beat()
    world.manager.claims.append(claim(nodes=3))
    assert follow(world) == []
    assert world.has(second) == (1, 1)
    assert world.job(first).state is JobState.RUNNING


#: Site's limits for each user, and what a limit of the resource manager leaves.
NO_LIMIT = Resources(), None
SITE_LIMIT = Resources.of(cpu=4), None
SHARE = Resources(), {"left": {"cpu": 0.0}, "enforced": False}
SUBMITTED = Resources(), {"left": {"cpu": 0.0, "tasks": 0.0}, "floors_may_exceed": True}
ENFORCED = Resources(), {"left": {"cpu": 0.0}}
ENFORCED_BEYOND_ONE = Resources(), {"left": {"cpu": 1.0}}


@pytest.mark.parametrize(
    ("limits", "yields", "priority", "starts", "has"),
    [
        (NO_LIMIT, Yields.ALWAYS, 50, 2, (5, 1)),
        (NO_LIMIT, Yields.ALWAYS, 9000, 4, (3, 1)),
        (NO_LIMIT, Yields.HIGHER_PRIORITY, 50, 2, (5, 1)),
        (NO_LIMIT, Yields.HIGHER_PRIORITY, 9000, 4, (3, 1)),
        (SITE_LIMIT, Yields.ALWAYS, 50, 2, (5, 1)),
        (SHARE, Yields.ALWAYS, 50, 2, (5, 1)),
        (SUBMITTED, Yields.ALWAYS, 50, 2, (5, 1)),
        # Tasks beyond it would not start.
        (ENFORCED, Yields.ALWAYS, 50, 4, (3, 1)),
        (ENFORCED_BEYOND_ONE, Yields.ALWAYS, 50, 3, (4, 1)),
    ],
)
def test_what_a_running_job_lacks_of_its_floor_comes_before_claims_of_lower_priority(
    limits: tuple[Resources, dict[str, object] | None],
    yields: Yields,
    priority: int,
    starts: int,
    has: tuple[int, int],
) -> None:
    """A node that was down comes back while four jobs of others wait that would fill it."""
    with closing(World(cluster_nodes=make_nodes(2, cpu=4, gpu=0), url="")) as world:
        world.manager.yields = yields
        demand = {"worker": Resources.of(cpu=1), "ps": Resources.of(cpu=1), "max_ps": 1}
        job = world.settled(min_workers=5, max_workers=5, **demand)
        (node,) = (node for node in world.manager.nodes if node.name == "n2")
        world.manager.set_node(structs.replace(node, used=Resources(), state=NodeState.DOWN))
        world.settle()
        of_site, of_manager = limits
        world.rules = GuardRules(per_user=of_site)
        if of_manager is not None:
            limit = GrowthLimit(frozenset({world.job(job).anchor}), reason="no more", **of_manager)  # type: ignore[arg-type]
            world.manager.growth_limits = (limit,)
        one = {"nodes": 1, "whole": False, "demand": Resources.of(cpu=1), "priority": priority}
        world.manager.claims = [claim(str(number), **one) for number in range(4)]
        world.manager.set_node(structs.replace(node, used=Resources(), state=NodeState.UP))
        assert len(follow(world)) == starts
        assert world.has(job) == has


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(("priority", "starts_after"), [(1, 520.0), (9000, None)])
def test_an_elastic_job_starts_on_the_first_node_that_a_rigid_job_of_lower_priority_would_have_got(
    world: World, priority: int, starts_after: float | None, planned: bool
) -> None:
    """There is always a rigid job that waits for a node, and nodes become free between two decisions."""
    world.manager.yields = Yields.ALWAYS
    ends: dict[str, float] = {}
    job, began, first = world.submit(max_workers=2, max_ps=2), world.now, None
    for number in range(100):
        for handle in [handle for handle, end in ends.items() if end <= world.now]:
            world.manager.end(handle)
            del ends[handle]
        world.tick(10.0)
        world.beat()
        if first is None and world.tasks(job):
            first = world.now - began
        for each in range(4):
            plan = {"planned": (f"n{each + 1}",), "expected_start": world.now + 3600.0} if planned else {}
            world.manager.claims.append(claim(f"r{number}.{each}", nodes=1, priority=priority, **plan))
        ends |= dict.fromkeys(world.manager.start_claims(), world.now + 500.0 + 50 * (number % 3))
    assert first == starts_after


def test_an_elastic_job_starts_on_nodes_that_are_planned_for_rigid_jobs_of_lower_priority(world: World) -> None:
    """Jobs of others hold half of each node."""
    world.manager.yields = Yields.ALWAYS
    for node in ("n1", "n2", "n3", "n4"):
        half = ((node, Resources.of(cpu=4)),)
        world.manager.put(RmJob(handle=node, state=RmJobState.RUNNING, user="eve", node=node), half)
        world.manager.claims.append(
            claim(f"8{node}", 1, priority=1, planned=(node,), expected_start=world.now + 3600.0)
        )
    job = world.submit(max_workers=2, max_ps=2)
    for _ in range(3):
        world.tick(10.0)
        world.beat()
    assert world.tasks(job)


def test_a_waiting_elastic_job_that_is_beyond_the_limits_of_the_site_takes_nothing_from_claims() -> None:
    with closing(World(url="", slot_seconds=30.0, rules=GuardRules(per_user=Resources.of(cpu=8)))) as world:
        world.manager.yields = Yields.ALWAYS
        world.settled(max_workers=4, max_ps=4)
        second = world.submit(worker=Resources.of(cpu=7), max_workers=1, max_ps=1)
        world.tick(1.0)
        world.beat()
        world.manager.claims.append(claim(nodes=3, priority=1))
        assert follow(world) == ["812"]
        assert world.has(second) == (0, 0)


def reservation(*nodes: str) -> Claim:
    """A reservation that begins within ten minutes."""
    return Claim(
        handle="reservation maint", user="", priority=-1, nodes=len(nodes), demand=Resources(), whole=True,
        eligible=frozenset(nodes), required=frozenset(nodes), standing=True,
    )  # fmt: skip


def test_tasks_leave_a_reservation_although_a_job_is_planned_on_its_nodes_for_later(world: World) -> None:
    world.manager.yields = Yields.ALWAYS
    job = world.settled(max_workers=5, max_ps=5)
    later = claim(eligible=frozenset(), planned=("n1", "n2"), expected_start=world.now + 7200.0)
    world.manager.claims = [later, reservation("n1", "n2")]
    five_ticks(world)
    assert world.nodes_of(job) <= {"n3", "n4"}


def test_a_job_gets_a_whole_node_that_is_planned_for_another_one_days_later(world: World) -> None:
    world.manager.yields = Yields.ALWAYS
    occupy(world, "7", "n1")
    world.settled(max_workers=4, max_ps=4)
    days = {"planned": ("n1", "n2", "n3", "n4"), "expected_start": world.now + 432_000.0}
    world.manager.claims = [claim(nodes=4, **days), claim("813", nodes=1, priority=8000)]
    assert follow(world) == ["813"]


@pytest.mark.parametrize("obstacle", ["silent", "backing off", "limit"])
def test_a_waiting_elastic_job_that_cannot_start_takes_nothing_from_claims(world: World, obstacle: str) -> None:
    world.policy = Fifo()
    first = world.settled(max_workers=8, max_ps=8)
    second = world.submit(min_workers=4, min_ps=4, max_workers=4)
    world.settle(2)
    anchor = world.job(second).anchor
    world.manager.priorities[anchor] = 10_000
    calling = [first, second]
    if obstacle == "limit":
        reason = "QOS small leaves bob no more"
        world.manager.growth_limits = (GrowthLimit(frozenset({anchor}), {"cpu": 3.0}, reason),)
    elif obstacle == "backing off":
        failed = {second: StartFailures(at=world.now, only_delaying=9)}
        world.store.keep_guard_state(replace(world.store.guard_state(), start_failures=failed))
    else:
        calling.remove(second)
        for _ in range(8):
            world.tick(10.0)
            world.beat(first)
    world.manager.claims.append(claim(nodes=3))
    for _ in range(8):
        world.tick(1.0)
        world.beat(*calling)
    assert world.manager.start_claims() == ["812"]
    assert world.job(first).state is JobState.RUNNING


@pytest.mark.parametrize("count", [16, 40, 300])
def test_claims_that_cannot_be_met_do_not_hide_those_behind_them(world: World, count: int) -> None:
    jobs = [world.submit(max_workers=4, max_ps=4) for _ in range(2)]
    world.settle()
    too_many = (
        claim(str(number), 4, 9900 - number, demand=Resources.of(cpu=4 + number % 29)) for number in range(count)
    )
    world.manager.claims = [*too_many, claim(nodes=1, priority=1000, user="eve")]
    assert follow(world, 12) == ["812"]
    assert all(world.job(job).state is JobState.RUNNING for job in jobs)


@pytest.mark.parametrize("count", [20, 300])
@pytest.mark.parametrize(("nodes", "priority"), [(4, 9500), (2, 8000)], ids=["in front", "behind"])
def test_a_claim_keeps_its_room_while_others_are_searched_for_in_vain_and_is_given_up_in_time(
    world: World, nodes: int, priority: int, count: int
) -> None:
    """Floors leave room for one job of bob, not for the other like it, nor for those of eve."""
    job = world.settled(max_workers=8, max_ps=8)
    world.manager.claims = [claim("812")]
    five_ticks(world)
    assert world.has(job) == (4, 4)
    others = (claim(str(each), nodes, priority, demand=Resources.of(cpu=each), user="eve") for each in range(count))
    world.manager.claims += [claim("813"), *others]
    has_room = []
    for _ in range(9):
        report = world.tick(50.0)
        world.beat()
        has_room.append("812" in {each.handle for each in report.snapshot.grants})
    assert has_room == [True] * 5 + [False] * 4


def test_with_equal_floors_the_nodes_that_fewest_tasks_leave_are_vacated(world: World) -> None:
    job = world.settled(max_workers=3, max_ps=3)
    used = world.nodes_of(job)
    assert len(used) > 2
    world.manager.claims.append(claim(nodes=1))
    report = world.tick(1.0)
    (claimed,) = report.snapshot.grants
    by_node = {node.name: 0 for node in make_nodes()}
    for task in world.tasks(job):
        by_node[task.node] += 1
    assert by_node[claimed.nodes[0]] == min(by_node.values())


def keep_free(nodes: int, *eligible: str) -> Claim:
    """Nodes that the site keeps free."""
    return Claim(
        handle="partition gpu", user="", priority=-1, nodes=nodes, demand=Resources(), whole=True, standing=True,
        eligible=frozenset(eligible) if eligible else None,
    )  # fmt: skip


def test_the_site_keeps_nodes_free_as_far_as_floors_allow(world: World) -> None:
    job = world.submit(max_workers=8, max_ps=8)
    world.manager.claims = [keep_free(1)]
    world.settle()
    assert world.has(job) == (6, 6)
    world.manager.claims = [keep_free(9)]
    for _ in range(5):
        report = world.tick(300.0)
        world.settle()
    assert world.has(job) == (2, 2)
    assert len({node for each in report.snapshot.grants for node in each.nodes}) == 3
    assert report.snapshot.grants[0].text.startswith("the site keeps 3 nodes of partition gpu free: n")
    # A job that waits takes one of them.
    world.manager.claims.append(claim(nodes=1))
    report = world.tick(1.0)
    assert report.plan.stops == ()
    assert world.manager.start_claims() == ["812"]
    world.manager.claims.clear()
    world.tick(300.0)
    world.settle()
    assert world.has(job) == (6, 6)
    world.manager.yields = Yields.NEVER
    world.manager.claims = [keep_free(4)]
    world.tick(1.0)
    assert world.tick(1.0).plan.stops == ()


def starts_and_stops(world: World, ticks: int = 20) -> list[str]:
    """Which tasks start and which stop in ticks in which nothing else happens."""
    changed: list[str] = []
    for _ in range(ticks):
        plan = world.tick(10.0).plan
        world.beat()
        changed += [f"start {each.role} on {each.node}" for each in plan.starts]
        changed += [f"stop {each.task}" for each in plan.stops]
    return changed


@pytest.mark.parametrize("waiting", [claim(nodes=1, priority=50), keep_free(1)], ids=lambda each: each.handle)
def test_the_replacement_of_a_floor_task_makes_no_room_for_an_elastic_job_that_waits(waiting: Claim) -> None:
    """One job has its worker on one node and its server on the other; another elastic job needs a whole node."""
    with closing(World(cluster_nodes=make_nodes(2, cpu=4), url="")) as world:
        world.manager.yields = Yields.ALWAYS
        runs = world.settled(max_workers=1, max_ps=1, worker=Resources.of(cpu=3), ps=Resources.of(cpu=1))
        assert world.nodes_of(runs) == {"n1", "n2"}
        waits = world.submit(
            worker=Resources.of(cpu=4), ps=Resources(), max_workers=2, min_ps=0, max_ps=0,
            architecture=Architecture.ALLREDUCE,
        )  # fmt: skip
        world.settle()
        world.manager.claims = [waiting]
        started = follow(world)
        assert started == ([] if waiting.standing else ["812"])
        assert bool(world.tasks(waits)) is waiting.standing
        assert starts_and_stops(world) == []


@pytest.mark.parametrize(
    ("nodes", "jobs", "claims"),
    [
        pytest.param(
            4, [(2, 2, 3), (3, 2, 2), (2, 2, 2)],
            [claim(nodes=1, whole=False, demand=Resources.of(cpu=2), eligible=frozenset({"n1"}))],
            id="tasks beside replacements",
        ),
        pytest.param(
            5, [(2, 5, 3), (1, 5, 3), (2, 3, 1)],
            [claim(demand=Resources.of(cpu=8), eligible=frozenset({"n1", "n2", "n4", "n5"}))],
            id="tasks where those of a claim of lower priority could move",
        ),
        pytest.param(
            5, [(3, 4, 3), (2, 5, 2), (3, 3, 3), (3, 4, 3)],
            [
                claim("811", 2, 9002, whole=False, demand=Resources.of(cpu=4), eligible=frozenset({"n2", "n4", "n5"})),
                claim("812", 1, 9001, whole=False, demand=Resources.of(cpu=4), eligible=frozenset({"n1", "n4", "n5"})),
            ],
            id="a worker of rank 0 in the way",
        ),
    ],
)  # fmt: skip
def test_what_moves_for_a_node_that_is_kept_free_does_not_hinder_a_claim_of_higher_priority_again_and_again(
    nodes: int, jobs: list[tuple[int, int, int]], claims: list[Claim]
) -> None:
    with closing(World(cluster_nodes=make_nodes(nodes, cpu=4), url="")) as world:
        world.manager.yields = Yields.ALWAYS
        world.manager.claims = [keep_free(1)]
        for cpus, workers, servers in jobs:
            demand = {"worker": Resources.of(cpu=cpus), "ps": Resources.of(cpu=1)}
            world.submit(max_workers=workers, max_ps=servers, **demand)
        world.settle(12, 10.0)
        world.manager.claims += claims
        assert "812" in follow(world)
        assert starts_and_stops(world) == []


def test_what_replaces_tasks_that_move_for_a_claim_makes_no_room_for_others_that_move_for_it() -> None:
    """A replacement would stop in the next tick for a task of the other node, and be started again after that."""
    with closing(World(cluster_nodes=make_nodes(5, cpu=8), url="")) as world:
        world.manager.yields = Yields.ALWAYS
        world.manager.claims = [keep_free(1)]
        for cpus, least, most, servers in ((3, 2, 3, 3), (3, 1, 4, 2), (1, 1, 2, 1), (3, 2, 5, 2)):
            demand = {"worker": Resources.of(cpu=cpus), "ps": Resources.of(cpu=1)}
            world.submit(min_workers=least, max_workers=most, max_ps=servers, **demand)
        world.settle(12, 10.0)
        share = {"whole": False, "demand": Resources.of(cpu=4), "eligible": frozenset({"n2", "n3", "n4", "n5"})}
        world.manager.claims += [claim("811", 1, 9001, **share), claim("812", 2, 9002)]
        assert follow(world) == ["811", "812"]
        assert starts_and_stops(world) == []


def test_a_claim_rests_whose_nodes_turn_out_again_and_again_not_to_be_had() -> None:
    """Where tasks that move first are placed, there is no room left for the last one, and all stay."""
    with closing(World(cluster_nodes=make_nodes(3, cpu=8), url="", slot_seconds=100.0)) as world:
        world.manager.yields = Yields.ALWAYS
        world.manager.claims = [keep_free(1)]
        for cpus, least, most, servers in ((2, 2, 5, 1), (2, 2, 2, 2), (3, 1, 1, 1)):
            demand = {"worker": Resources.of(cpu=cpus), "ps": Resources.of(cpu=1)}
            world.submit(min_workers=least, max_workers=most, max_ps=servers, **demand)
        world.settle(12, 10.0)
        share = {"whole": False, "demand": Resources.of(cpu=2), "eligible": frozenset({"n2"})}
        large = claim("812", 2, 9001, whole=False, demand=Resources.of(cpu=8))
        world.manager.claims = [claim("811", 1, 9002, **share), large, keep_free(1)]
        tick_log = TickLog()
        with capture_logs() as logs:
            for _ in range(130):
                tick_log.write(world.tick(10.0), 0.0)
                world.beat()
                world.manager.start_claims()
        # One loses its node in each tick, the other when jobs have grown with a new slot.
        assert [entry["claims"] for entry in logs if "claims" in entry] == [["partition gpu"], ["812"]]
        assert starts_and_stops(world, 60) == []
        world.tick(RETRY_SECONDS)
        assert starts_and_stops(world, 10) != []


def test_no_task_leaves_for_a_claim_that_rests_which_keeps_nodes_that_are_free_if_it_is_the_sites(world: World) -> None:
    occupy(world, "7", "n4")
    world.settled(max_workers=8, max_ps=8)
    world.manager.end("7")
    world.manager.claims = [claim(), keep_free(2)]
    lost = {vacate_for_waiting_jobs._kind(each): (world.elapsed,) * MAX_LOST for each in world.manager.claims}
    world.state = replace(world.state, claim_history=ClaimHistory(lost=lost))
    report = world.tick(1.0)
    assert [each.nodes for each in report.snapshot.grants] == [("n4",)]
    assert report.plan.stops == ()
    assert report.losing_claims == ("812", "partition gpu")
    world.tick(RETRY_SECONDS)
    assert follow(world) == ["812"]


def test_a_claim_that_takes_a_node_which_becomes_free_has_lost_none(world: World) -> None:
    world.manager.yields = Yields.ALWAYS
    occupy(world, "7", "n4")
    world.settled(min_workers=2, max_workers=2, min_ps=1, max_ps=1)
    world.manager.pending = True
    world.manager.claims = [keep_free(2)]
    (kept,) = world.tick(1.0).snapshot.grants
    assert (kept.nodes, len(kept.leaving)) == (("n2", "n3"), 2)
    world.manager.end("7")
    (kept,) = world.tick(1.0).snapshot.grants
    assert (kept.nodes, len(kept.leaving)) == (("n4", "n2"), 1)
    assert world.state.claim_history.lost == {}


@pytest.mark.parametrize("policy", [Drf, Fifo, Srtf])
def test_the_node_that_is_kept_free_stays_the_same_while_an_elastic_job_cannot_start(
    policy: type[Drf | Fifo | Srtf],
) -> None:
    """The job that runs may not shrink yet, or comes first."""
    only_workers = {
        "worker": Resources.of(cpu=1), "ps": Resources(), "min_ps": 0, "max_ps": 0,
        "architecture": Architecture.ALLREDUCE,
    }  # fmt: skip
    rules = GuardRules(cooldown_down=120.0)
    with closing(World(cluster_nodes=make_nodes(3, cpu=4), url="", rules=rules, policy=policy())) as world:
        world.manager.yields = Yields.ALWAYS
        world.manager.claims = [keep_free(1)]
        runs = world.settled(max_workers=8, **only_workers)
        assert world.has(runs) == (8, 0)
        waits = world.submit(min_workers=2, max_workers=3, **only_workers)
        assert starts_and_stops(world) == []
        world.tick(world.slot_seconds)
        world.settle()
        assert world.has(waits).workers == (3 if policy is Drf else 0)
        assert starts_and_stops(world) == []


@pytest.mark.parametrize("policy", [Fifo, Srtf])
@pytest.mark.parametrize("eligible", [{"n1", "n2"}, {"n3"}], ids=["nodes of the first", "a node that becomes free"])
def test_an_elastic_job_that_the_policy_passes_over_keeps_only_free_room_from_rigid_jobs(
    policy: type[Fifo | Srtf], eligible: set[str]
) -> None:
    """The first elastic job has two nodes, where it could make room for the second, and a job of eve the third."""
    with closing(World(cluster_nodes=make_nodes(3, cpu=4), url="", policy=policy(), slot_seconds=30.0)) as world:
        world.manager.yields = Yields.ALWAYS
        occupy(world, "7", "n3")
        demand = {"worker": Resources.of(cpu=1), "ps": Resources.of(cpu=1), "max_ps": 1}
        first = world.settled(max_workers=7, **demand)
        second = world.submit(min_workers=2, max_workers=2, **demand)
        world.settle()
        assert (world.has(first), world.has(second)) == ((7, 1), (0, 0))
        world.manager.claims = [claim(nodes=1, priority=50, eligible=frozenset(eligible))]
        assert follow(world, 40) == (["812"] if "n3" not in eligible else [])
        world.manager.end("7")
        world.settle()
        assert world.has(second) == ((2, 1) if "n3" in eligible else (0, 0))


@pytest.mark.parametrize(
    ("claims", "free"),
    [
        ([keep_free(1), keep_free(2), keep_free(1)], 2),
        ([keep_free(1, "n1", "n2"), keep_free(1)], 1),
        ([keep_free(1, "n1", "n2"), keep_free(1, "n3", "n4")], 2),
        ([reservation("n1"), keep_free(1), keep_free(1)], 2),
        ([keep_free(1, "n1"), reservation("n1", "n2"), keep_free(1)], 2),
    ],
    ids=["same nodes", "part of them", "other nodes", "reservation", "reservation of a node that is kept free"],
)
def test_a_node_that_is_kept_free_counts_for_each_partition_that_has_it(
    world: World, claims: list[Claim], free: int
) -> None:
    world.manager.claims = claims
    job = world.settled(max_workers=8, max_ps=8)
    assert len(world.nodes_of(job)) == 4 - free


def test_a_claim_counts_nodes_that_no_elastic_job_may_use_and_tasks_move_only_where_their_job_may(world: World) -> None:
    """The rigid job needs n4, which is not for elastic jobs, and one of the others."""
    job = world.submit(max_workers=8, max_ps=8)
    world.tick(1.0)
    world.manager.eligible = {world.job(job).anchor: EligibleNodes(frozenset({"n1", "n2", "n3"}), "partition gpu")}
    world.beat()
    world.settle()
    assert world.has(job) == (6, 6)
    world.manager.claims.append(claim())
    assert follow(world) == ["812"]
    assert world.has(job) == (4, 4)
    world.manager.claims.append(claim("813"))
    assert follow(world) == []
    assert world.has(job) == (4, 4)


@pytest.mark.parametrize("others", ["many", "new ones in each tick"])
def test_the_claim_of_highest_priority_is_met_as_soon_as_floors_allow_it(others: str) -> None:
    """However many others are searched for in vain, and whatever is searched for in vain before."""
    nodes = tuple(structs.replace(node, used=node.capacity) for node in make_nodes(8))
    whole = nodes[0].capacity
    job = replace(
        make_job(1, worker=whole, min_workers=4, max_workers=8, min_ps=0, max_ps=0), state=JobState.RUNNING, anchor="1"
    )
    tasks = tuple(
        Task(
            job=job.key, id=f"worker-{number}", role=Role.WORKER, node=node.name, demand=whole,
            state=TaskState.CONFIRMED,
        )
        for number, node in enumerate(nodes)
    )  # fmt: skip
    anchor = RmJob(handle="1", state=RmJobState.RUNNING, yields=Yields.ALWAYS)
    history, met = ClaimHistory(), []
    for tick, floor in enumerate((8, 8, 8, 4)):
        sizes = range(100 * tick, 100 * tick + 100) if others == "new ones in each tick" else range(1000)
        too_many = [
            claim(f"more {size}", 5, 9000 - size, demand=Resources.of(cpu=5 + size / 1000), user=f"user {size % 9}")
            for size in sizes
        ]
        snapshot = Snapshot(
            at=15.0 * tick, slot=1, nodes=nodes, jobs=(job,), tasks=tasks, floors=((job.key, Allocation(floor, 0)),)
        )
        listing = RmListing(15.0 * tick, nodes, (anchor,), claims=(claim("812", 2, 9900), *too_many))
        found, history = vacate_nodes(snapshot, listing, history, now=15.0 * tick, lead_seconds=60.0, allocations={})
        met.append([each.handle for each in found.grants])
    assert met == [[], [], [], ["812"]]
    assert len(history.queue) <= 1001  # those that do not wait any more are forgotten


@pytest.mark.parametrize("workers", [1, 2], ids=["none has room", "one has room"])
def test_a_node_behind_many_whose_tasks_cannot_all_move_is_vacated(workers: int) -> None:
    """On each of 100 nodes a server could move, and where there are two workers, one of them; on the last, all can."""
    large, small = Resources.of(cpu=2, gpu=2 / workers), Resources.of(cpu=1)
    nodes = [*make_nodes(101), structs.replace(make_nodes(102)[-1], capacity=Resources.of(cpu=8))]
    jobs, tasks = [], []
    used = {node.name: [Resources.of(gpu=1)] if node.name == "n101" else [] for node in nodes}
    for number in range(1, 101):
        servers = 1 if number > 4 else 2  # the first four jobs have their second server on the last node
        request = {"min_workers": workers, "max_workers": workers, "min_ps": servers, "max_ps": servers}
        job = replace(make_job(number, worker=large, ps=small, **request), state=JobState.RUNNING, anchor=str(number))
        jobs.append(job)
        places = [(Role.WORKER, f"n{number}", large)] * workers
        places += [(Role.PS, f"n{number}", small), (Role.PS, "n102", small)][:servers]
        for role, node, demand in places:
            used[node].append(demand)
            tasks.append(
                Task(job=job.key, id=f"{role}-{len(tasks)}", role=role, node=node, demand=demand,
                     state=TaskState.CONFIRMED)
            )  # fmt: skip
    held = tuple(structs.replace(node, used=Resources.total(used[node.name])) for node in nodes)
    anchors = tuple(RmJob(handle=job.anchor, state=RmJobState.RUNNING, yields=Yields.ALWAYS) for job in jobs)
    snapshot = Snapshot(at=0.0, slot=1, nodes=held, jobs=tuple(jobs), tasks=tuple(tasks))
    listing = RmListing(0.0, held, anchors, claims=(claim(nodes=1),))
    history, met = ClaimHistory(), []
    for tick in range(4):
        found, history = vacate_nodes(snapshot, listing, history, now=15.0 * tick, lead_seconds=60.0, allocations={})
        met.append([each.nodes for each in found.grants])
    assert [("n102",)] in met[:2]
    assert met[2:] == [[("n102",)]] * 2


@pytest.mark.parametrize("withdrawn", [False, True])
def test_the_only_server_that_has_to_move_runs_until_its_replacement_has_joined_and_the_claim_is_given_up(
    withdrawn: bool,
) -> None:
    """No replacement starts, or the first fails and others are refused; a coordinator keeps the last of a role."""
    with closing(World(cluster_nodes=make_nodes(2), url="")) as world:
        job = world.settled(max_workers=1, max_ps=1)
        world.manager.claims.append(claim(nodes=1))
        world.manager.pending = True
        granted = []
        for number in range(130):
            report = world.tick(15.0)
            if withdrawn and number == 5:
                world.manager.refuse = Rejected("sbatch: error: QOSMaxSubmitJobPerUserLimit")
                for each in world.manager.live():
                    if each.state is RmJobState.PENDING:
                        world.manager.end(each.handle, RmJobState.FAILED, "exit status 1")
            running = {each.tag for each in world.manager.live() if each.state is RmJobState.RUNNING}
            members = [
                {"task": task.id, "role": task.role.value, "state": "active"}
                for task in world.tasks(job)
                if task.tag in running
            ]
            said = Heartbeat.model_validate({"address": "127.0.0.1:1", "state": "running", "members": members})
            received = receive(world.job(job), world.tasks(job), said, world.now)
            world.store.change_tasks(received.tasks, world.now)
            world.store.report_progress(job, received.progress)
            granted.append(bool(report.snapshot.grants))
        assert {member["role"] for member in members} == {"worker", "ps"}
        assert granted[5]
        assert not granted[-1]


def test_tasks_of_a_floor_move_for_a_claim_although_a_limit_is_full() -> None:
    rules = GuardRules(per_user=Resources.of(cpu=3, gpu=1))
    with closing(World(cluster_nodes=make_nodes(2), rules=rules, url="")) as world:
        job = world.settled(max_workers=1, max_ps=1)
        world.manager.claims.append(claim(nodes=1))
        most = Allocation(0, 0)
        for _ in range(20):
            world.tick(1.0)
            counts = Counter(task.role for task in world.tasks(job))
            most = Allocation(max(most.workers, counts[Role.WORKER]), max(most.ps, counts[Role.PS]))
            world.beat()
        assert world.manager.start_claims() == ["812"]
        assert world.has(job) == (1, 1)
        assert max(most) == 2  # one task above the limit, no more


def test_a_task_of_a_floor_stays_on_a_claimed_node_where_a_limit_leaves_no_replacement() -> None:
    with closing(World(cluster_nodes=make_nodes(2), url="")) as world:
        job = world.settled(max_workers=1, min_ps=0, max_ps=0, architecture=Architecture.ALLREDUCE)
        world.manager.claims.append(claim(nodes=1, required=frozenset({world.tasks(job)[0].node})))
        anchors = frozenset({world.job(job).anchor})
        world.manager.growth_limits = (GrowthLimit(anchors, {"gpu": 0.0}, "QOS high has no more"),)
        assert follow(world, ticks=20) == []
        assert [task.id for task in world.tasks(job)] == ["worker-0"]
        assert world.has(job) == (1, 0)
        world.manager.growth_limits = ()
        assert follow(world, ticks=20) == ["812"]


def test_what_replaces_a_task_that_leaves_is_not_asked_for_again_and_again_beyond_a_limit() -> None:
    with closing(World(cluster_nodes=make_nodes(2), url="")) as world:
        job = world.settled(max_workers=1, min_ps=0, max_ps=0, architecture=Architecture.ALLREDUCE)
        world.manager.claims.append(claim(nodes=1, required=frozenset({world.tasks(job)[0].node})))
        world.manager.pending = True
        for _ in range(3):
            world.tick(5.0)
        leaving, replacement = world.tasks(job)
        assert leaving.state is TaskState.DRAINING
        world.manager.end(replacement.handle, RmJobState.CANCELLED, "")
        anchors = frozenset({world.job(job).anchor})
        world.manager.growth_limits = (GrowthLimit(anchors, {"gpu": 0.0}, "QOS high has no more"),)
        for _ in range(8):
            report = world.tick(5.0)
            assert report.plan.starts == ()
        assert "that is leaving has ended" in report.plan.deferred[0].postponed


def test_a_claim_takes_the_node_that_can_be_vacated_rather_than_that_of_a_floor_that_stays() -> None:
    one = {"min_ps": 0, "max_ps": 0, "architecture": Architecture.ALLREDUCE}
    with closing(World(cluster_nodes=make_nodes(2), url="")) as world:
        stays, yields = world.settled(max_workers=1, **one), world.settled(max_workers=3, **one)
        (kept,) = world.tasks(stays)
        anchors = frozenset({world.job(stays).anchor})
        world.manager.growth_limits = (GrowthLimit(anchors, {"gpu": 0.0}, "QOS high has no more"),)
        world.manager.claims.append(claim(nodes=1, whole=False, demand=Resources.of(cpu=2, gpu=2)))
        assert follow(world) == ["812"]
        assert [task.id for task in world.tasks(stays)] == [kept.id]
        assert world.has(yields).workers >= 1


@pytest.mark.parametrize("enforced", [True, False])
def test_tasks_of_a_floor_move_in_a_limit_without_room_that_the_resource_manager_does_not_enforce(
    enforced: bool,
) -> None:
    with closing(World(cluster_nodes=make_nodes(2), url="")) as world:
        job = world.settled(max_workers=1, max_ps=1)
        anchors = frozenset({world.job(job).anchor})
        limit = GrowthLimit(anchors, {"cpu": 0.0}, "elastic jobs may hold 50 %", enforced=enforced)
        world.manager.growth_limits = (limit,)
        world.manager.claims.append(claim(nodes=1))
        assert follow(world) == ([] if enforced else ["812"])
        assert world.has(job) == (1, 1)
        assert starts_and_stops(world) == []


def test_tasks_of_a_floor_whose_replacements_are_refused_are_tried_no_more_often_than_the_back_off_allows() -> None:
    with closing(World(cluster_nodes=make_nodes(2), url="")) as world:
        job = world.settled(max_workers=1, max_ps=1)
        had = world.tasks(job)
        world.manager.claims.append(claim(nodes=1))
        world.manager.refuse = Rejected("sbatch: error: QOSMaxSubmitJobPerUserLimit")
        attempts = 0
        for _ in range(120):
            attempts += bool(world.tick(15.0).plan.starts)
            world.beat()
        assert 1 <= attempts <= 8
        assert [task.id for task in world.tasks(job)] == [task.id for task in had]


def test_claims_of_low_priority_have_their_turn_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are searched for eight kinds of claims of highest priority in each tick, and here for five others."""
    monkeypatch.setattr(vacate_for_waiting_jobs, "MAX_SEARCHED_NODES", 20)
    nodes = make_nodes(4)
    job = replace(make_job(1), state=JobState.RUNNING, anchor="1")
    anchor = RmJob(handle="1", state=RmJobState.RUNNING, yields=Yields.ALWAYS)
    in_vain = [claim(str(number), 5, 9000 - number, demand=Resources.of(cpu=33 + number)) for number in range(40)]
    snapshot = Snapshot(at=0.0, slot=1, nodes=tuple(nodes), jobs=(job,), tasks=())
    listing = RmListing(0.0, tuple(nodes), (anchor,), claims=(*in_vain, claim("last", 1, 1)))
    history, met = ClaimHistory(), []
    for tick in range(8):
        found, history = vacate_nodes(snapshot, listing, history, now=15.0 * tick, lead_seconds=60.0, allocations={})
        met.append(bool(found.grants))
    assert met == [False] * 6 + [True] * 2  # it is the last of 33 behind the first eight


@pytest.mark.parametrize(("cpus", "free"), [(4, 20), (8, 0)], ids=["half", "full"])
def test_tasks_of_floors_move_together_so_that_nodes_become_free(cpus: int, free: int) -> None:
    """On each of forty nodes there is the only worker of a job, which takes half of the node, or all of it."""
    held = Resources.of(cpu=cpus)
    nodes = tuple(structs.replace(node, used=held) for node in make_nodes(40))
    jobs = [
        replace(make_job(number, worker=held, min_ps=0, max_ps=0), state=JobState.RUNNING, anchor=str(number))
        for number in range(1, 41)
    ]
    tasks = [
        Task(job=job.key, id="worker-1", role=Role.WORKER, node=node.name, demand=held, state=TaskState.CONFIRMED)
        for job, node in zip(jobs, nodes, strict=True)
    ]
    snapshot = Snapshot(at=0.0, slot=1, nodes=nodes, jobs=tuple(jobs), tasks=tuple(tasks))
    anchors = (RmJob(handle=job.anchor, state=RmJobState.RUNNING, yields=Yields.ALWAYS) for job in jobs)
    listing = RmListing(0.0, nodes, tuple(anchors), claims=(keep_free(40),))
    found, _ = vacate_nodes(snapshot, listing, ClaimHistory(), now=0.0, lead_seconds=60.0, allocations={})
    assert sum(len(each.nodes) for each in found.grants) == free
    assert sum(len(each.leaving) for each in found.grants) == free
