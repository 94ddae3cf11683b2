"""Jobs that wait although they fit into free resources: reported by the tick; after a while the fallback decides."""

from __future__ import annotations

import math

import pytest
from msgspec import structs
from policies.snapshots import a_job, a_snapshot, cluster
from tick.world import GivesNothing

from dl2d.core.cluster import NodeSet
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.jobs import NOTHING, Allocation, Role
from dl2d.core.plan_of_starts_and_stops import Deferred, Plan
from dl2d.core.resource_manager import Claim, EligibleNodes, RmJob, RmJobState
from dl2d.core.resources import Resources
from dl2d.daemon.health_and_metrics import Health
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.testing import make_nodes
from dl2d.tick.policy_check.waiting_jobs_that_fit import jobs_with_room, startable_waiting_jobs
from dl2d.tick.tick_context import GuardRules


def test_jobs_that_wait_beside_room_are_seen_and_after_a_while_the_fallback_starts_them(build) -> None:
    world = build(policy=GivesNothing(), idle_seconds=50.0)
    keys = [world.ready(), world.ready()]
    report = world.tick(1.0)
    # The first job has waited since the tick before.
    assert (set(report.needless_wait.jobs), report.needless_wait.seconds) == (set(keys), 1.0)
    world.beat()
    report = world.tick(48.0)
    assert (report.needless_wait.seconds, report.set_aside, report.decision.policy) == (49.0, None, "nothing")
    world.beat()
    report = world.tick(1.0)
    assert report.set_aside is not None
    assert report.set_aside.reason == "left 2 jobs waiting for 50 s although they fit into free resources"
    world.beat()
    report = world.tick(1.0)  # at once, though the standing decision would stand for minutes
    assert (report.decided, report.decision.policy, report.needless_wait.jobs) == (True, "fifo", ())
    entry = next(entry for entry in report.decision.jobs if entry.job == keys[0])
    assert entry.guarded[0].constraint is Constraint.FALLBACK
    assert entry.guarded[0].text.startswith("policy nothing is set aside: it left 2 jobs waiting for 50 s")
    assert report.plan.starts


def test_the_policy_stays_aside_until_another_version_of_it_decides(build) -> None:
    world = build(policy=GivesNothing(), idle_seconds=10.0)
    world.ready()
    world.settle(20)
    assert world.tick(1.0).decision.policy == "fifo"
    world.ready()
    world.settle(2)
    report = world.tick(400.0)
    assert (report.decision.policy, report.set_aside is None) == ("fifo", False)
    better = GivesNothing()
    better.version = "2"
    world.policy = better
    world.beat()
    report = world.tick(1.0)
    assert (report.decision.policy, report.decision.policy_version, report.set_aside) == ("nothing", "2", None)


@pytest.mark.parametrize(
    ("options", "jobs"),
    [
        ({"policy": Drf()}, [{}]),
        # The first of the queue waits for room, and the second behind it.
        ({"policy": Fifo(), "cluster_nodes": make_nodes(1)}, [{}, {"min_workers": 4}, {}]),
        ({"policy": GivesNothing(), "cluster_nodes": make_nodes(1)}, [{"min_workers": 4, "max_workers": 4}]),
        ({"policy": Drf(), "rules": GuardRules(per_user=Resources.of(gpu=4))}, [{}, {}]),
        ({"policy": Drf(), "rules": GuardRules(churn=2)}, [{}, {}]),
    ],
    ids=["it starts", "first of a queue", "larger than the cluster", "limit of its user", "churn"],
)
def test_jobs_that_wait_for_a_reason_are_not_idle(build, options, jobs) -> None:
    world = build(idle_seconds=10.0, **options)
    for job in jobs:
        world.ready(**job)
    for _ in range(30):
        world.beat()
        report = world.tick(1.0)
        assert report.needless_wait.jobs == ()
        assert report.set_aside is None


@pytest.mark.parametrize("is_deferred", [False, True], ids=["given nothing", "given a size"])
@pytest.mark.parametrize(
    ("nodes", "counts"),
    [({"n1"}, True), ({"n0", "n1"}, False), (None, False)],
    ids=["other nodes", "the full node too", "all nodes"],
)
def test_a_job_without_room_hides_needless_waits_of_jobs_that_may_use_its_nodes(nodes, counts, is_deferred) -> None:
    first, second = a_job(1), a_job(2)
    full, idle = cluster(2, cpu=8, gpu=2)
    sets = [NodeSet((first.key,), frozenset({"n0"}), "small")]
    if nodes is not None:
        sets.append(NodeSet((second.key,), frozenset(nodes), "large"))
    snapshot = a_snapshot([first, second], [structs.replace(full, used=full.capacity), idle])
    why, size = Reason(Constraint.SATISFIED, "because"), Allocation(1, 1) if is_deferred else NOTHING
    decision = Decision("test", "1", (JobDecision(first.key, size, why), JobDecision(second.key, NOTHING, why)))
    plan = Plan(deferred=(Deferred(first.key, Role.WORKER, 1, "n0", ()),) if is_deferred else ())
    found = startable_waiting_jobs(structs.replace(snapshot, node_sets=tuple(sets)), decision, plan, LoadBalance())
    assert found == ((second.key,) if counts else ())


def test_the_fallback_starts_jobs_that_wait_beside_idle_nodes_while_another_waits_for_a_full_one(build) -> None:
    world = build(policy=GivesNothing(), cluster_nodes=make_nodes(2), idle_seconds=50.0)
    world.manager.put(
        RmJob(handle="7", state=RmJobState.RUNNING, user="eve"), [("n1", world.cluster_nodes[0].capacity)]
    )
    keys = [world.submit(), world.submit()]
    world.tick(1.0)
    for key, node in zip(keys, ("n1", "n2"), strict=True):
        world.manager.eligible[world.job(key).anchor] = EligibleNodes(frozenset({node}), f"partition of {node}")
    for _ in range(8):
        world.beat()
        world.tick(10.0)
    assert [world.has(key) for key in keys] == [NOTHING, (2, 2)]


def test_a_clock_that_is_set_back_does_not_count_as_waiting(build) -> None:
    world = build(policy=GivesNothing(), idle_seconds=10.0)
    world.ready()
    world.tick(1.0)
    world.now -= 500.0
    world.beat()
    report = world.tick(0.0)
    assert (len(report.needless_wait.jobs), report.needless_wait.seconds, report.set_aside) == (1, 0.0, None)


@pytest.mark.parametrize("stands_still", [False, True], ids=["the clock is set forward", "no tick for an hour"])
def test_an_hour_without_ticks_does_not_count_as_waiting(build, stands_still: bool) -> None:
    world = build(policy=GivesNothing(), idle_seconds=200.0)
    world.ready()
    world.tick(1.0)
    world.now += 3600.0
    world.elapsed += 3600.0 * stands_still
    world.beat()
    report = world.tick(1.0)
    assert (len(report.needless_wait.jobs), report.needless_wait.seconds) == (1, 60.0 if stands_still else 1.0)
    assert report.set_aside is None


def test_a_silent_job_is_not_the_policys_fault(build) -> None:
    world = build(policy=GivesNothing(), idle_seconds=10.0)
    world.ready()
    report = world.tick(1000.0)  # its coordinator has not called since
    assert (report.needless_wait.jobs, report.set_aside) == ((), None)


def test_metrics_say_that_the_policy_is_set_aside(build) -> None:
    world = build(policy=GivesNothing(), idle_seconds=5.0)
    health = Health(lambda: world.now)
    key = world.ready()
    for _ in range(8):
        world.beat()
        health.completed(world.tick(1.0))
    assert any("is set aside and the fallback decides" in problem for problem in health.status().problems)
    assert b"dl2d_policy_set_aside 1.0" in health.metrics()
    assert world.tick(1.0).decision.allocations()[key] > NOTHING
    assert Allocation(1, 1) <= world.has(key)


def test_room_that_appears_between_two_decisions_is_offered_once(build) -> None:
    """Not each time when it comes and goes, as while jobs of others end and start."""
    world = build(policy=GivesNothing(), cluster_nodes=make_nodes(2), idle_seconds=math.inf)
    whole = tuple((node.name, node.capacity) for node in world.cluster_nodes)
    job_of_others = RmJob(handle="7", state=RmJobState.RUNNING, user="eve")
    world.manager.put(job_of_others, whole)
    world.ready(max_workers=1, max_ps=1)
    # It waits for more nodes than there are.
    world.manager.claims = [Claim(handle="8", user="bob", priority=1, nodes=9, demand=whole[0][1] * 9)]
    decided = []
    for held in (whole, whole, whole[1:], whole[1:], (), whole, whole[1:], (), ()):
        world.manager.put(job_of_others, held)
        decided.append(world.tick(1.0).decided)
        world.beat()
    assert decided == [True, False, True, False, False, False, False, False, False]
    world.policy = Drf()
    world.manager.put(job_of_others, whole)
    assert world.tick(world.slot_seconds).decision.jobs[0].allocation == NOTHING
    world.beat()
    world.manager.put(job_of_others, whole[1:])
    report = world.tick(1.0)
    assert (report.decided, len(report.plan.starts)) == (True, 2)


@pytest.mark.parametrize(
    ("given", "silent", "with_room"),
    [
        ([(0, 0), (0, 0)], (), {1, 2}),
        ([(1, 1), (0, 0)], (), {2}),
        ([(2, 1), (0, 0)], (), set()),
        ([(0, 0), (0, 0)], (2,), {1}),
        ([(2, 1), (0, 0)], (1,), {2}),
    ],
    ids=[
        "each by itself",
        "beside what the other is given",
        "the other is given all",
        "one is silent",
        "one that is silent has lost its tasks",
    ],
)
def test_jobs_with_room(given, silent, with_room) -> None:
    jobs = [a_job(1), a_job(2)]
    snapshot = a_snapshot(jobs, cluster(1, cpu=6, gpu=2))
    why = Reason(Constraint.SATISFIED, "because")
    entries = [JobDecision(job.key, Allocation(*size), why, NOTHING) for job, size in zip(jobs, given, strict=True)]
    found = jobs_with_room(
        structs.replace(snapshot, silent=tuple(jobs[each - 1].key for each in silent)),
        Decision("test", "1", tuple(entries)),
        LoadBalance(),
    )
    assert found == {jobs[each - 1].key for each in with_room}
