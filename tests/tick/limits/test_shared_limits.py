"""Limits on what jobs hold together: policies see them, so nobody waits for what the guard would take away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from policies.dl2_paper.test_policy import a_checkpoint
from policies.snapshots import a_job, a_snapshot, cluster
from tick.world import World

from dl2d.core.cluster import SharedLimit, Snapshot, Task, TaskState
from dl2d.core.decision import Constraint, Decision
from dl2d.core.jobs import NOTHING, Allocation, JobKey, Owner
from dl2d.core.json_codec import as_plain, decode, encode
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.packing.room_in_limits import LimitRoom
from dl2d.core.plan_of_starts_and_stops import Plan
from dl2d.core.policy import Policy
from dl2d.core.resize_guard_state import GuardState
from dl2d.core.resource_manager import GrowthLimit
from dl2d.core.resources import Resources
from dl2d.placement.dl2_paper import Dl2Paper
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.dl2.policy import with_checkpoint
from dl2d.policies.dl2_paper.policy import Dl2PaperPolicy
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.policies.lookahead import Lookahead
from dl2d.policies.optimus import Optimus
from dl2d.policies.srtf import Srtf
from dl2d.policies.tetris import Tetris
from dl2d.testing import make_job, make_nodes
from dl2d.tick.decision.decide import decide
from dl2d.tick.limits.resize_guard import guard
from dl2d.tick.limits.shared_limits import limits_for_policies
from dl2d.tick.place.place import place
from dl2d.tick.policy_check.decision_check import check_decision
from dl2d.tick.policy_check.waiting_jobs_that_fit import jobs_with_room
from dl2d.tick.tick_context import Deciders, GuardRules

POLICIES: dict[str, Policy] = {
    "fifo": Fifo(),
    "srtf": Srtf(),
    "drf": Drf(),
    "tetris": Tetris(),
    "optimus": Optimus(),
    "lookahead": Lookahead(),
    "dl2": with_checkpoint(),
    "dl2_paper": Dl2PaperPolicy(a_checkpoint(3, models=["resnet-50", "other"], resources=["cpu", "gpu"])),
}
OWNERS = {name: Owner(name, 1000 + number, 1000, account="lab") for number, name in enumerate(("ann", "bob", "eve"))}


class Site(World):
    def ready_jobs(self, *users: str, **changes: Any) -> list[JobKey]:
        """Jobs of these users, whose coordinators have called; a tick with them has not been run."""
        keys = []
        for user in users:
            self.number += 1
            job = replace(make_job(self.number, submitted=int(self.now), **changes), owner=OWNERS[user])
            self.store.add_job(job)
            keys.append(job.key)
        self.tick(1.0)
        self.beat()
        return keys


@pytest.mark.parametrize("by", ["guard", "resource manager"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_who_is_in_no_limit_starts_in_the_same_tick(policy: Policy, by: str) -> None:
    """The first job would take all 8 GPUs; its limit is 2."""
    world = Site(make_nodes(4), policy=policy, url="")
    ann, bob = world.ready_jobs("ann", "bob", max_workers=8, max_ps=2)
    if by == "guard":
        world.rules, text = GuardRules(per_user=Resources.of(gpu=2)), "jobs of ann may hold gpu=2 together"
    else:
        text = "QOS small leaves ann 2 GPUs"
        world.manager.growth_limits = (GrowthLimit(frozenset({world.job(ann).anchor}), {"gpu": 2.0}, text),)
    report = world.tick(1.0)
    entries = {entry.job: entry for entry in report.decision.jobs}
    assert {start.job for start in report.plan.starts} == {ann, bob}
    assert [entry.guarded for entry in entries.values()] == [(), ()]
    assert 1 <= entries[ann].allocation.workers <= 2
    if entries[ann].allocation.workers == 2 and policy.name in ("fifo", "srtf", "drf", "tetris", "dl2"):
        assert entries[ann].reason.constraint is Constraint.LIMIT
        assert text in entries[ann].reason.text
        assert entries[ann].reason.shortfalls[0].resource == "gpu"
    assert entries[ann].reason.constraint not in (Constraint.CAPACITY, Constraint.FRAGMENTED)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_whom_a_limit_keeps_waiting_is_told_so_and_it_is_not_the_policys_fault(policy: Policy) -> None:
    world = Site(make_nodes(4), policy=policy, url="", rules=GuardRules(per_user=Resources.of(gpu=1)), idle_seconds=5.0)
    first, second, bob = world.ready_jobs("ann", "ann", "bob")
    for _ in range(4):
        report = world.tick(5.0)
        world.beat()
        entries = {entry.job: entry for entry in report.decision.jobs}
        assert (entries[first].allocation == NOTHING) != (entries[second].allocation == NOTHING)
        waiting = first if entries[first].allocation == NOTHING else second
        assert entries[waiting].binding_reason.constraint is Constraint.LIMIT
        assert "jobs of ann may hold gpu=1 together (gpu: wanted 1, had 0)" in entries[waiting].binding_reason.text
        assert entries[bob].allocation.workers == 1
        assert (report.needless_wait.jobs, report.set_aside) == ((), None)


@pytest.mark.parametrize("name", ["drf", "optimus", "lookahead", "dl2"])
def test_jobs_of_one_limit_share_it(name: str) -> None:
    """The first has all of it when the second comes."""
    world = Site(make_nodes(4), policy=POLICIES[name], url="", rules=GuardRules(per_user=Resources.of(gpu=4)))
    (first,) = world.ready_jobs("ann", max_workers=8)
    world.settle()
    (second,) = world.ready_jobs("ann", max_workers=8)
    report = world.tick(1.0)
    sizes = report.decision.allocations()
    assert sizes[first].workers + sizes[second].workers <= 4
    assert min(sizes[first].workers, sizes[second].workers) >= 1
    assert all(entry.guarded == () for entry in report.decision.jobs)


def test_a_silent_job_counts_with_what_it_has() -> None:
    jobs = [replace(a_job(number), owner=OWNERS["ann"], anchor=f"a{number}") for number in (1, 2)]
    snapshot = a_snapshot(jobs, cluster(1, cpu=99, gpu=99), held={0: Allocation(3, 1)})
    site, manager = GuardRules(per_user=Resources.of(gpu=4)), GrowthLimit(frozenset({"a1", "a2"}), {"gpu": 1.0}, "QOS")
    both = limits_for_policies(snapshot, site, [manager])
    assert [(limit.jobs, limit.most) for limit in both] == [((jobs[0].key, jobs[1].key), (("gpu", 4000),))] * 2
    others = limits_for_policies(snapshot, site, [manager], silent=[jobs[0].key])
    assert [(limit.jobs, limit.most) for limit in others] == [((jobs[1].key,), (("gpu", 1000),))] * 2
    assert limits_for_policies(snapshot, site, [manager], silent=[job.key for job in jobs]) == ()


def test_where_jobs_have_more_than_a_limit_allows_by_now_each_may_keep_that_and_the_guard_makes_room() -> None:
    jobs = [replace(a_job(number, max_workers=8), anchor=f"a{number}") for number in (1, 2)]
    snapshot = a_snapshot(jobs, cluster(1, cpu=99, gpu=99), held={0: Allocation(6, 1)})
    limit = GrowthLimit(frozenset({"a1", "a2"}), {"gpu": -2.0, "cpu": 50.0}, "QOS")
    limits = limits_for_policies(snapshot, GuardRules(), [limit])
    keys = [job.key for job in jobs]
    assert [(each.jobs, each.most) for each in limits] == [
        ((keys[0], keys[1]), (("cpu", 63_000),)), ((keys[0],), (("gpu", 6000),)), ((keys[1],), (("gpu", 1000),)),
    ]  # fmt: skip
    decision = decide(structs.replace(snapshot, limits=limits), Deciders(Fifo(), Fifo(), LoadBalance()), 1)
    assert [entry.allocation.workers for entry in decision.jobs] == [6, 1]
    guarded = guard(decision, snapshot, GuardRules(), GuardState(), growth_limits=[limit])
    assert [entry.allocation.workers for entry in guarded.jobs] == [3, 1]


def test_a_recorded_slot_has_the_limits_and_one_from_before_them_is_read() -> None:
    world = Site(make_nodes(4), policy=Fifo(), rules=GuardRules(per_user=Resources.of(gpu=2)))
    world.ready_jobs("ann", "bob", max_workers=8)
    report = world.tick(1.0)
    slot = world.store.slot(report.snapshot.slot)
    world.close()
    assert slot is not None
    assert [limit.text.split()[2] for limit in slot.snapshot.limits] == ["ann", "bob"]
    again = decide(slot.snapshot, Deciders(Fifo(), Fifo(), LoadBalance()), slot.seed)
    assert again == slot.proposed
    plain = as_plain(slot.snapshot)
    del plain["limits"]
    assert decode(encode(plain), Snapshot) == structs.replace(slot.snapshot, limits=())


def test_in_mode_canary_both_groups_share_a_limit() -> None:
    jobs = [replace(a_job(number, max_workers=8, max_ps=1), owner=OWNERS["ann"]) for number in (1, 2, 3)]
    snapshot = a_snapshot(jobs, cluster(4, cpu=64, gpu=8))
    snapshot = structs.replace(
        snapshot, limits=limits_for_policies(snapshot, GuardRules(per_user=Resources.of(gpu=6)), ())
    )
    deciders = Deciders(Fifo(), Drf(), LoadBalance())
    decision = decide(snapshot, deciders, 1, canary=[jobs[1].key])
    sizes = [entry.allocation.workers for entry in decision.jobs]
    assert (sum(sizes), sizes[1]) == (6, 2)


def test_a_job_without_room_in_a_limit_is_not_one_for_which_room_appeared() -> None:
    jobs = [replace(a_job(number), owner=OWNERS["ann"]) for number in (1, 2)]
    snapshot = a_snapshot(jobs, cluster(1, cpu=99, gpu=99), held={0: Allocation(1, 1)})
    decision = decide(snapshot, Deciders(Fifo(), Fifo(), LoadBalance()), 1)
    nothing = tuple(replace(entry, allocation=entry.previous) for entry in decision.jobs)
    decision = replace(decision, jobs=nothing)
    limited = structs.replace(
        snapshot, limits=limits_for_policies(snapshot, GuardRules(per_user=Resources.of(gpu=1)), ())
    )
    assert jobs_with_room(snapshot, decision, LoadBalance()) == {jobs[1].key}
    assert jobs_with_room(limited, decision, LoadBalance()) == frozenset()


@pytest.mark.parametrize(
    "policy", [Optimus(), Lookahead(), POLICIES["dl2_paper"]], ids=["optimus", "lookahead", "paper"]
)
def test_a_job_that_lacks_room_in_its_limit_says_nothing_about_others_with_equal_tasks(policy: Policy) -> None:
    jobs = [replace(a_job(n), owner=OWNERS[user]) for n, user in enumerate(("ann", "ann", "bob", "eve"), start=1)]
    snapshot = a_snapshot(jobs, cluster(2, cpu=16, gpu=8))
    limit = SharedLimit((jobs[0].key, jobs[1].key), (("gpu", 1000),), "ann has 1 GPU")
    decision = decide(structs.replace(snapshot, limits=(limit,)), Deciders(policy, Fifo(), LoadBalance()), 1)
    sizes = [entry.allocation.workers for entry in decision.jobs]
    assert sizes[:2] == [1, 0]
    assert min(sizes[2:]) >= 1
    assert decision.policy == policy.name


_amounts = st.none() | st.dictionaries(st.sampled_from(["cpu", "gpu"]), st.integers(1, 9), min_size=1)


@st.composite
def _situations(draw: st.DrawFn) -> tuple[Snapshot, GuardRules, list[GrowthLimit]]:
    shapes = draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "worker": st.sampled_from([Resources.of(cpu=2, gpu=1), Resources.of(cpu=1, gpu=2)]),
                    "ps": st.just(Resources.of(cpu=1)),
                    "min_workers": st.integers(1, 3),
                    "max_workers": st.integers(3, 6),
                    "max_ps": st.integers(1, 4),
                }
            ),
            min_size=1, max_size=5,
        )
    )  # fmt: skip
    jobs = [
        replace(a_job(number, **shape), owner=OWNERS[draw(st.sampled_from(sorted(OWNERS)))], anchor=f"a{number}")
        for number, shape in enumerate(shapes, start=1)
    ]
    held = {}
    for number, job in enumerate(jobs):
        if draw(st.booleans()):
            held[number] = Allocation(
                draw(st.integers(job.request.min_workers, 3)), draw(st.integers(1, job.request.max_ps))
            )
    # Room for all that runs, and some more.
    snapshot = a_snapshot(jobs, cluster(9, cpu=draw(st.integers(6, 9)), gpu=draw(st.integers(4, 6))), held)
    per_user, per_account = (Resources.of(draw(_amounts) or {}) for _ in range(2))
    anchors = st.sets(st.sampled_from([job.anchor for job in jobs]))
    drawn = draw(st.lists(st.tuples(anchors, st.integers(-2, 6)), max_size=2))
    growth = [
        GrowthLimit(frozenset(members), {"gpu": float(left)}, f"QOS {number}")
        for number, (members, left) in enumerate(drawn)
    ]
    return snapshot, GuardRules(per_user=per_user, per_account=per_account), growth


@pytest.mark.parametrize("placement", [LoadBalance(), Dl2Paper()], ids=["load-balance", "dl2-paper"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(situation=_situations())
def test_no_job_waits_for_room_that_there_is_and_the_guard_has_nothing_to_take(policy, placement, situation) -> None:
    snapshot, rules, growth_limits = situation
    snapshot = structs.replace(snapshot, limits=limits_for_policies(snapshot, rules, growth_limits))
    decision = decide(snapshot, Deciders(policy, Fifo(), placement), 1)
    assert decision.policy == policy.name, decision.fallback_cause
    check_decision(decision, snapshot)
    guarded = guard(decision, snapshot, rules, GuardState(), growth_limits=growth_limits)
    if not _exceeded(snapshot, growth_limits):
        assert guarded.allocations() == decision.allocations()
    left = LimitRoom(snapshot.limits)
    for job in snapshot.jobs:
        left.take(job, decision.allocations()[job.key])
    _reasons_are_true(policy, decision, snapshot, left, placement)


def _exceeded(snapshot: Snapshot, growth_limits: list[GrowthLimit]) -> bool:
    """Whether jobs have more than a limit of the resource manager allows by now."""
    anchors = {job.anchor for job in snapshot.jobs if snapshot.held()[job.key] != NOTHING}
    return any(limit.left["gpu"] < 0 and limit.anchors & anchors for limit in growth_limits)


def _reasons_are_true(policy: Policy, decision: Decision, snapshot: Snapshot, left: LimitRoom, placement: Any) -> None:
    """Of jobs that get nothing; beside what the plan starts and what runs."""
    jobs = {job.key: job for job in snapshot.jobs}
    plan = place(snapshot, decision, placement)
    room = Packing(snapshot.nodes, placement)
    for start in plan.starts:
        room.place_on(start.node, start.demand)
    for entry in decision.jobs:
        if entry.allocation != NOTHING:
            continue
        job = jobs[entry.job]
        smallest = job.request.min_size
        # Tasks that wait for others to leave have their room in the decision. A placement that keeps bundles together
        # may place those of running jobs otherwise than the decision, which has packed all tasks anew.
        without_room = entry.reason.constraint in (Constraint.CAPACITY, Constraint.FRAGMENTED)
        if without_room and not plan.deferred and not placement.keeps_bundles and room.fits(job, smallest):
            # Where the decision had its tasks is not always where they start. The next one sees the room.
            following = decide(_after(plan, snapshot), Deciders(policy, Fifo(), placement), 1)
            assert following.allocations()[job.key] != NOTHING, entry.reason
        if entry.reason.constraint is Constraint.LIMIT:
            assert left.blocked(job, smallest) is not None, entry.reason


def _after(plan: Plan, snapshot: Snapshot) -> Snapshot:
    """The snapshot when all of a plan has happened."""
    stopped = {(stop.job, stop.task) for stop in plan.stops} | {(move.job, move.task) for move in plan.moves}
    started = [
        Task(job=start.job, id=f"{start.role}-{100 + number}", role=start.role, node=start.node, demand=start.demand,
             state=TaskState.CONFIRMED)
        for number, start in enumerate(plan.starts)
    ]  # fmt: skip
    tasks = [task for task in snapshot.tasks if (task.job, task.id) not in stopped] + started
    nodes = tuple(
        structs.replace(node, used=Resources.total(task.demand for task in tasks if task.node == node.name))
        for node in snapshot.nodes
    )
    return structs.replace(snapshot, slot=snapshot.slot + 1, nodes=nodes, tasks=tuple(tasks))
