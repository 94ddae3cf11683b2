"""Elastic jobs make room in limits for jobs of others that wait for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest
from msgspec import structs
from tick.scripted_manager import ScriptedManager
from tick.world import World

from dl2d.core.cluster import ANCHOR, Claimant, Task, TaskState, parse_tag
from dl2d.core.decision import Constraint
from dl2d.core.jobs import Allocation, JobKey
from dl2d.core.resource_manager import TASKS, Claim, GrowthLimit, RmJob, RmJobState, RmListing, TaskSpec, Yields
from dl2d.core.resources import Resources
from dl2d.testing import make_nodes
from dl2d.tick.record_slot import Report
from dl2d.tick.tick_context import GuardRules

LAB, GROUP = "limit GrpTRES of account lab", "limit GrpTRES of account group"


class Slurm(ScriptedManager):
    """Starts tasks and jobs of others within limits, those of others first."""

    limits: Mapping[str, Mapping[str, float]] = {LAB: {"gpu": 8}}
    #: What listings say of them instead.
    shown: Mapping[str, Mapping[str, float]] = {}
    #: Handles of the jobs of others for which a limit holds; without one, all.
    only: Mapping[str, Collection[str]] = {}
    #: Reasons of jobs that wait and that no limit keeps from starting; without one, they start.
    reasons: Mapping[str, str] = {}

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        #: Jobs of others that wait for a limit, and those that run; both by handle.
        self.queue: dict[str, Claim] = {}
        self.others: dict[str, Claim] = {}

    def add(self, *claims: Claim) -> None:
        for claim in claims:
            self.queue[claim.handle] = claim
            self.priorities[claim.handle] = claim.priority

    def listing(self, ended_since: float | None = None, tasks: Collection[Task] | None = None) -> RmListing:
        pending = [
            RmJob(handle=handle, state=RmJobState.PENDING, user=claim.user, priority=claim.priority)
            for handle, claim in self.queue.items()
        ]
        listing = super().listing(ended_since, tasks)
        anchors = frozenset(job.handle for job in self.live() if (parse_tag(job.tag) or (0, ""))[1] == ANCHOR)
        waiting = {claim for handle, claim in self.queue.items() if self.reasons.get(handle, "limit") == "limit"}
        limits = tuple(
            GrowthLimit(
                anchors,
                self.left(name, self.shown),
                name,
                waiting=frozenset(c.handle for c in waiting if self.holds(name, c)),
            )
            for name in self.limits
        )
        on_nodes = [claim for handle, claim in self.queue.items() if self.reasons.get(handle) == "Resources"]
        return replace(
            listing, jobs=(*listing.jobs, *pending), growth_limits=limits,
            limit_claims=tuple(sorted(waiting, key=lambda claim: claim.handle)), claims=tuple(on_nodes),
        )  # fmt: skip

    def holds(self, name: str, claim: Claim) -> bool:
        return claim.handle in self.only.get(name, self.queue.keys() | self.others.keys())

    def left(self, name: str, shown: Mapping[str, Mapping[str, float]] = MappingProxyType({})) -> dict[str, float]:
        used: Counter[str] = Counter()
        for claim in self.others.values():
            if self.holds(name, claim):
                used.update({**claim.demand.as_dict(), TASKS: 1})
        for handle, entry in self._entries.items():
            tag = parse_tag(entry.job.tag)
            if entry.job.state.holds_resources and handle not in self.others and tag and tag[1] != ANCHOR:
                used.update({**Resources.total(held for _, held in entry.held).as_dict(), TASKS: 1})
        return {resource: most - used[resource] for resource, most in {**self.limits, **shown}[name].items()}

    def allowed(self, demand: Resources, names: Collection[str]) -> bool:
        needs = {**demand.as_dict(), TASKS: 1}
        return all(needs.get(each, 0) <= left for name in names for each, left in self.left(name).items())

    def submit(self, task: TaskSpec) -> str:
        fits = self.allowed(task.demand, self.limits)
        handle = super().submit(task)
        if (parse_tag(task.tag) or (0, ""))[1] != ANCHOR and not fits:
            self._change(handle, RmJobState.PENDING, "AssocGrpGRES")
        return handle

    def schedule(self) -> list[str]:
        """Start what the limits allow; returns the jobs of others that started."""
        started = []
        for handle, claim in sorted(self.queue.items(), key=lambda item: -item[1].priority):
            fits = self.allowed(claim.demand, [name for name in self.limits if self.holds(name, claim)])
            if fits and handle not in self.reasons:
                self.put(RmJob(handle=handle, state=RmJobState.RUNNING, user=claim.user), (("n4", claim.demand),))
                self.others[handle] = self.queue.pop(handle)
                started.append(handle)
        for job in self.live():
            demand = Resources.total(held for _, held in self._entries[job.handle].held)
            if job.state is RmJobState.PENDING and self.allowed(demand, self.limits):
                self._change(job.handle, RmJobState.RUNNING, "")
        return started

    def finish(self, handle: str) -> None:
        del self.others[handle]
        self.end(handle)


def build(limits: Mapping[str, Mapping[str, float]] | None = None, **options: object) -> World:
    world = World(cluster_nodes=make_nodes(4, cpu=64, gpu=16), url="", **options)  # type: ignore[arg-type]
    manager = Slurm(world.cluster_nodes, lambda: world.now)
    manager.limits = limits or {LAB: {"gpu": 8}}
    world.manager = world.coordinator._manager = manager
    return world


@pytest.fixture
def world() -> Iterator[World]:
    world = build()
    yield world
    world.close()


def job_of_bob(handle: str = "17", priority: int = 9000, gpus: int = 3, **more: bool) -> Claim:
    return Claim(handle=handle, user="bob", priority=priority, nodes=1, demand=Resources.of(cpu=1, gpu=gpus), **more)


def follow(world: World, ticks: int = 10, seconds: float = 1.0) -> list[str]:
    """Ticks, heartbeats and the resource manager's scheduler in turn, at least twice a minute; returns the jobs of
    others that started.
    """
    started: list[str] = []
    times = math.ceil(seconds / 30)
    for _ in range(ticks * times):
        world.tick(seconds / times)
        world.beat()
        started += world.manager.schedule()
    return started


def filled(world: World, **changes: object) -> JobKey:
    """A job that has all that the limit allows."""
    key = world.submit(max_workers=16, max_ps=1, **changes)
    follow(world)
    return key


def reasons(report: Report, key: JobKey) -> list[tuple[Constraint, str]]:
    (entry,) = (entry for entry in report.decision.jobs if entry.job == key)
    return [(reason.constraint, reason.text) for reason in entry.guarded]


def test_a_job_that_waits_for_a_limit_starts_and_the_elastic_job_grows_again_when_it_has_ended(world: World) -> None:
    key = filled(world)
    assert world.has(key) == (8, 1)
    world.manager.add(job_of_bob())
    report = world.tick(1.0)
    assert report.decided
    (text,) = [text for constraint, text in reasons(report, key) if constraint is Constraint.CLAIM]
    assert text == f"room made for job 17 of bob (priority 9000) in {LAB}"
    (entry,) = report.decision.jobs
    assert [each.claimants for each in entry.guarded if each.text == text] == [(Claimant("17", "bob", 9000),)]
    world.beat()
    assert follow(world) == ["17"]
    assert world.has(key) == (5, 1)
    assert world.manager.stopped == []  # they drained
    follow(world, 10, world.slot_seconds)
    assert world.has(key) == (5, 1)  # it is not given the room of the job that runs
    world.manager.finish("17")
    follow(world, 3, world.slot_seconds)
    assert world.has(key) == (8, 1)


def test_nothing_changes_any_more_once_there_is_room(world: World) -> None:
    """Sixty ticks with the waiting job, which starts late, and sixty with it running: sizes change once."""
    key = filled(world)
    world.manager.reasons = {"17": "limit"}
    world.manager.add(job_of_bob())
    sizes, tasks = [world.has(key)], []
    for number in range(120):
        if number == 6:
            world.manager.reasons = {}
        follow(world, 1, 30.0)
        sizes.append(world.has(key))
        tasks.append({task.id for task in world.tasks(key)})
    assert "17" in world.manager.others
    assert [size for size, before in zip(sizes[1:], sizes, strict=False) if size != before] == [(5, 1)]
    assert all(each == tasks[5] for each in tasks[5:])  # none started or ended since


def test_room_is_kept_while_the_job_waits_for_nodes_or_for_nothing_that_is_said(world: World) -> None:
    key = filled(world)
    world.manager.reasons = {"17": "limit"}
    world.manager.add(job_of_bob())
    follow(world, 5)
    for reason in ("Resources", "None"):
        world.manager.reasons = {"17": reason}
        follow(world, 4, 120.0)
        assert world.has(key) == (5, 1), reason
    world.manager.reasons = {}
    assert follow(world, 3) == ["17"]


def test_a_job_that_does_not_start_although_the_limit_has_room_is_given_up_for_an_hour(world: World) -> None:
    key = filled(world)
    world.manager.reasons = {"17": "limit", "18": "limit"}
    world.manager.add(job_of_bob())
    smaller = []
    for minute in range(80):
        follow(world, 2, 30.0)
        smaller += [minute] if world.has(key) != (8, 1) else []
        if minute == 20:
            world.manager.add(job_of_bob("18", priority=1000))  # one like it
    assert smaller[0] == 0
    again = next(minute for minute in smaller if minute > 30)
    assert 5 <= smaller.index(again) <= 12
    assert 64 <= again <= 70
    assert world.has(key) == (8, 1)


def test_a_job_of_a_user_is_not_given_up_with_waiting_elastic_tasks_of_the_user(world: World) -> None:
    key = filled(world)
    world.manager.reasons = {"17": "limit"}
    world.manager.add(job_of_bob(is_task=True))
    follow(world, 20, 60.0)
    assert world.has(key) == (8, 1)
    world.manager.add(job_of_bob("18", priority=1000))
    assert follow(world, 10) == ["18"]


def test_a_job_that_waits_for_nodes_although_its_limit_has_room_is_given_up_for_an_hour(world: World) -> None:
    key = filled(world)
    world.manager.reasons = {"17": "limit"}
    world.manager.add(job_of_bob())
    follow(world, 5)
    assert world.has(key) == (5, 1)
    world.manager.reasons = {"17": "Resources"}
    follow(world, 30, 60.0)
    assert world.has(key) == (8, 1)
    world.manager.reasons = {"17": "limit"}
    for _ in range(40):
        follow(world, 1, 60.0)
        assert world.has(key) == (8, 1)
    sizes = set()
    for _ in range(30):
        follow(world, 1, 60.0)
        sizes.add(world.has(key))
    assert (5, 1) in sizes


class WaitsByTurns(Slurm):
    """Jobs of others wait for their limit while it has no room, and otherwise for nodes; they never start."""

    def listing(self, ended_since: float | None = None, tasks: Collection[Task] | None = None) -> RmListing:
        self.reasons = {
            handle: "Resources" if self.allowed(claim.demand, self.limits) else "limit"
            for handle, claim in self.queue.items()
        }
        return super().listing(ended_since, tasks)


def test_tasks_are_not_moved_without_end_for_a_job_whose_room_in_a_limit_their_replacement_takes() -> None:
    world = World(cluster_nodes=make_nodes(3, cpu=8, gpu=2), url="")
    manager = WaitsByTurns(world.cluster_nodes, lambda: world.now)
    world.manager = world.coordinator._manager = manager
    manager.limits, manager.only = {LAB: {"gpu": 4}}, {LAB: {"17"}}
    for node in ("n1", "n3"):
        running = RmJob(handle=f"eve-{node}", state=RmJobState.RUNNING, user="eve", node=node)
        manager.put(running, ((node, Resources.of(cpu=1, gpu=1)),))
    key = world.submit(min_workers=2, max_workers=2, max_ps=1)
    follow(world)
    assert world.has(key) == (2, 1)
    manager.add(job_of_bob(gpus=2))
    started = set[str]()
    for _ in range(720):
        follow(world, 1, 10.0)
        started |= {task.id for task in world.tasks(key)}
    world.close()
    assert len(started) <= 3 + 6  # in two hours


def test_a_limit_on_the_number_of_tasks_is_known_to_the_policy() -> None:
    world = build({LAB: {TASKS: 6}})
    key = filled(world)
    assert world.has(key) == (5, 1)
    second = world.submit(max_workers=16, max_ps=1)
    for _ in range(3):  # its anchor starts
        report = world.tick(1.0)
        world.beat()
    entries = {entry.job: entry for entry in report.decision.jobs}
    assert entries[second].reason.constraint is Constraint.LIMIT
    assert entries[key].guarded == ()  # the policy gave no more
    world.close()


@pytest.mark.parametrize(
    ("priority", "yields", "starts"),
    [
        (9000, Yields.HIGHER_PRIORITY, True),
        (100, Yields.HIGHER_PRIORITY, False),
        (1, Yields.ALWAYS, True),
        (9000, Yields.NEVER, False),
    ],
)
def test_only_jobs_that_yield_give_up_room(world: World, priority: int, yields: Yields, *, starts: bool) -> None:
    key = filled(world)
    world.manager.yields = yields
    world.manager.add(job_of_bob(priority=priority))
    assert follow(world) == (["17"] if starts else [])
    assert world.has(key) == ((5, 1) if starts else (8, 1))


def test_elastic_jobs_keep_their_minimum_sizes_and_nobody_shrinks_for_what_cannot_be_met(world: World) -> None:
    keys = [filled(world, min_workers=2), filled(world, min_workers=2)]
    follow(world, 4, world.slot_seconds)
    assert sum(world.has(key).workers for key in keys) == 8
    before = [world.has(key) for key in keys]
    world.manager.add(job_of_bob("16", gpus=5))
    assert follow(world) == []
    assert [world.has(key) for key in keys] == before
    world.manager.add(job_of_bob("17", gpus=4, priority=8000))
    assert follow(world) == ["17"]
    assert [world.has(key) for key in keys] == [(2, 1), (2, 1)]


def test_one_of_the_jobs_that_do_not_yield_does_not_take_the_room_that_others_make() -> None:
    world = build({LAB: {"gpu": 9}})
    first, second = filled(world, min_workers=4), world.submit(max_workers=16, max_ps=1)
    follow(world, 4, world.slot_seconds)
    sizes = {key: world.has(key).workers for key in (first, second)}
    assert sum(sizes.values()) == 9
    world.manager.yields = Yields.HIGHER_PRIORITY
    anchors = {job.key: job.anchor for job in world.store.jobs(live=True)}
    world.manager.priorities |= {anchors[first]: 100, anchors[second]: 10_000}
    world.manager.reasons = {"17": "limit"}
    world.manager.add(job_of_bob(gpus=1))
    follow(world, 10, 60.0)
    world.manager.reasons = {}
    follow(world, 1)
    assert "17" in world.manager.others
    assert world.has(second).workers == sizes[second]
    assert world.has(first).workers == sizes[first] - 1


def test_a_job_gets_room_in_all_its_limits_or_in_none() -> None:
    world = build({LAB: {"gpu": 8}, GROUP: {"gpu": 10, TASKS: 20}})
    key = filled(world)
    world.manager.add(job_of_bob("1", gpus=9), job_of_bob("2", gpus=4, priority=8000))
    world.manager.only = {LAB: ["2"], GROUP: ["1", "2"]}
    assert follow(world) == ["1"]  # which needs 9 of 10, where the elastic job keeps one
    assert world.has(key) == (1, 1)
    world.manager.finish("1")
    assert follow(world, 4, world.slot_seconds) == ["2"]
    assert world.has(key) == (4, 1)


def test_where_the_number_of_jobs_is_limited_a_task_ends_for_each_job() -> None:
    world = build({LAB: {TASKS: 8}})
    key = filled(world)
    assert sum(world.has(key)) == 8
    world.manager.add(job_of_bob("1", gpus=0), job_of_bob("2", gpus=0))
    assert follow(world) == ["1", "2"]
    assert sum(world.has(key)) == 6
    follow(world, 5, world.slot_seconds)
    assert sum(world.has(key)) == 6


def test_tasks_of_an_array_get_room_one_by_one(world: World) -> None:
    key = filled(world)
    world.manager.add(*(job_of_bob(f"5_{task}", gpus=2) for task in range(9)))
    assert len(follow(world, 20)) == 3  # of 8 GPUs the elastic job keeps one
    assert world.has(key) == (2, 1) or world.has(key) == (1, 1)
    for handle in list(world.manager.others):
        world.manager.finish(handle)
        follow(world, 4, world.slot_seconds)
        assert len(world.manager.others) == 3


def test_a_cool_down_and_used_up_starts_do_not_delay_it() -> None:
    world = build(rules=GuardRules(cooldown_up=3600, cooldown_down=3600, churn=2))
    key = world.submit(max_workers=8, max_ps=1)
    follow(world, 40, 100.0)
    before = world.has(key)
    world.manager.limits = {LAB: {"gpu": before.workers}}
    world.manager.add(job_of_bob(gpus=1))
    assert follow(world) == ["17"]
    assert world.has(key) == Allocation(before.workers - 1, 1)


def test_a_waiting_elastic_job_of_higher_priority_comes_first(world: World) -> None:
    first = filled(world)
    world.manager.yields = Yields.ALWAYS
    second = world.submit(max_workers=1, max_ps=1)
    world.tick(1.0)
    world.beat()
    world.manager.add(job_of_bob(priority=50, gpus=7))  # of 8 GPUs, one is left for the minimum size of either job
    assert follow(world, 6, 60.0) == []
    assert (world.has(first).workers, world.has(second).workers) == (7, 1)


def test_a_job_held_by_its_user_gives_the_room_back(world: World) -> None:
    key = filled(world)
    world.manager.reasons = {"17": "limit"}
    world.manager.add(job_of_bob())
    follow(world, 5)
    assert world.has(key) == (5, 1)
    world.manager.reasons = {"17": "JobHeldUser"}
    world.manager.queue["17"] = structs.replace(world.manager.queue["17"], priority=0)
    world.manager.priorities["17"] = 0
    follow(world, 3, world.slot_seconds)
    assert world.has(key) == (8, 1)


def test_an_incomplete_listing_changes_nothing(world: World) -> None:
    key = filled(world)
    world.manager.add(job_of_bob())
    world.manager.incomplete = ("torn record",)
    follow(world, 3, world.slot_seconds)
    assert world.has(key) == (8, 1)
    world.manager.incomplete = ()
    world.manager.reasons = {"17": "limit"}
    follow(world)
    assert world.has(key) == (5, 1)
    world.manager.incomplete = ("torn record",)
    slot = world.state.slot
    follow(world, 1, world.slot_seconds)
    assert world.state.slot == slot + 1  # decided once, on what the listing may lack
    assert world.has(key) == (5, 1)
    world.manager.incomplete = ()
    follow(world, 2)
    assert world.has(key) == (5, 1)


def test_a_job_whose_coordinator_is_silent_keeps_its_tasks(world: World) -> None:
    key = filled(world)
    for _ in range(12):
        world.tick(10.0)
    world.manager.add(job_of_bob())
    for _ in range(5):
        world.tick(10.0)
        assert world.manager.schedule() == []
    assert world.has(key) == (8, 1)


def test_tasks_that_wait_for_the_limit_themselves_make_room_as_well(world: World) -> None:
    key = filled(world)
    world.manager.shown = {LAB: {"gpu": 12}}  # more than Slurm allows
    follow(world, 2, world.slot_seconds)
    assert world.has(key, state=TaskState.ASKED) == (4, 0)
    world.manager.shown = {}
    world.manager.add(job_of_bob())
    assert follow(world) == ["17"]
    assert world.has(key) == (5, 1)
    assert world.has(key, state=TaskState.ASKED) == (0, 0)


def test_a_job_that_may_not_grow_into_kept_room_is_told_so() -> None:
    world = build(slot_seconds=100.0)
    key = filled(world)
    world.manager.reasons = {"17": "limit"}
    world.manager.add(job_of_bob())
    follow(world, 4, 30.0)
    report = world.tick(30.0)
    (entry,) = (entry for entry in report.decision.jobs if entry.job == key)
    assert entry.binding_reason.constraint is Constraint.LIMIT
    assert f"{LAB}, beside what waiting jobs of others need" in entry.binding_reason.text


def test_jobs_of_ever_new_demands_that_do_not_start_keep_no_room_for_ever(world: World) -> None:
    key = filled(world)
    world.manager.reasons = {str(number): "limit" for number in range(40)}
    smaller = 0
    for number in range(40):
        world.manager.add(replace_memory(job_of_bob(str(number), gpus=1, priority=9000 - number), number))
        follow(world, 10, 30.0)
        smaller += world.has(key) != (8, 1)
    assert smaller <= 20


def replace_memory(claim: Claim, memory: int) -> Claim:
    demand = Resources.of(cpu=1, gpu=claim.demand.get("gpu"), memory=memory)
    return Claim(handle=claim.handle, user=claim.user, priority=claim.priority, nodes=1, demand=demand)
