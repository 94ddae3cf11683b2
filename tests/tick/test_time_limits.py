"""Whole ticks in which tasks reach their time limit in the resource manager before their job does."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
from msgspec import structs
from tick.fake_coordinator import PromptCoordinator
from tick.scripted_manager import ScriptedManager
from tick.world import World

from dl2d.core.backoff_after_failed_starts import StartFailures
from dl2d.core.cluster import Task, TaskState
from dl2d.core.jobs import Allocation, JobKey, Role
from dl2d.core.resource_manager import GrowthLimit, RmJobState, RmListing
from dl2d.core.resources import Resources
from dl2d.core.store import TaskChange
from dl2d.testing import make_nodes
from dl2d.tick.tick_context import GuardRules


def limit(world: World, seconds: float, *, of: Callable[[str], bool]) -> None:
    """Give each listed job that is chosen by its tag a time limit so many seconds from now, unless it has one."""
    for job in world.manager.live():
        if of(job.tag) and not job.time_limit_at:
            entry = world.manager._entries[job.handle]
            entry.job = structs.replace(job, time_limit_at=world.now + seconds)


def is_anchor(tag: str) -> bool:
    return tag.endswith("anchor")


def run(world: World, key: JobKey, seconds: float, *, task_limit: float, every: float = 60.0) -> list[Allocation]:
    """Ticks in which tasks end at their limits; what the job had confirmed after each."""
    had = []
    for _ in range(int(seconds / every)):
        world.tick(every)
        limit(world, task_limit, of=lambda tag: not is_anchor(tag))
        for job in world.manager.live():
            if job.time_limit_at and job.time_limit_at <= world.now:
                world.manager.end(job.handle, RmJobState.FAILED, "TIMEOUT")
        world.beat()
        had.append(world.has(key))
    return had


@pytest.mark.parametrize(
    ("max_workers", "nodes", "least", "per_user"),
    [
        (1, 4, 1, {}),
        (4, 4, 4, {}),
        (4, 2, 1, {}),
        (1, 4, 1, {"gpu": 1, "cpu": 3}),
        (4, 4, 1, {"gpu": 4, "cpu": 9}),
    ],
    ids=["one", "room for all", "no room", "full limit, one", "full limit"],
)
def test_tasks_are_replaced_before_their_time_limit_ends_them(
    build, max_workers: int, nodes: int, least: int, per_user: dict[str, int]
) -> None:
    rules = GuardRules(per_user=Resources.of(**per_user))
    world = build(cluster_nodes=make_nodes(nodes), url="sqlite://", rules=rules)
    key = world.ready(max_workers=max_workers, max_ps=1)
    limit(world, 100_000, of=is_anchor)
    had = run(world, key, 7200, task_limit=1800)
    tasks = world.store.tasks(live=False, job=key)
    assert not [task.id for task in tasks if task.state is TaskState.FAILED]
    assert min(had[5:], key=sum) >= Allocation(least, 1)
    assert 4 <= len([task for task in tasks if task.role is Role.PS]) <= 6


def test_tasks_that_end_with_their_anchor_are_not_replaced(build) -> None:
    world = build(url="sqlite://")
    key = world.ready()
    limit(world, 1000, of=is_anchor)
    run(world, key, 980, task_limit=990)
    assert {task.number for task in world.store.tasks(live=False, job=key)} == {0, 1, 2, 3}


@pytest.mark.parametrize(("left", "starts"), [(130.0, 2), (119.0, 0), (-30.0, 0)])
def test_no_task_is_started_shortly_before_the_time_limit_of_its_anchor(build, left: float, starts: int) -> None:
    world = build(url="sqlite://")
    key = world.settled(max_workers=1, max_ps=1)
    limit(world, left + 10, of=is_anchor)
    for task in world.tasks(key):
        world.manager.end(task.handle, RmJobState.TIME_LIMIT, "TIMEOUT")
    report = world.tick(10.0)
    assert len(report.plan.starts) == starts
    (entry,) = report.slot_decision.in_force.jobs
    said = "its coordinator reaches its time limit in less than 2 minutes"
    assert any(said in reason.text for reason in entry.guarded) is (not starts)


@pytest.mark.parametrize("ahead", [7200.0, -7200.0])
def test_a_clock_that_differs_from_the_resource_managers_replaces_no_task_too_early_or_late(
    build, ahead: float
) -> None:
    class Slow(ScriptedManager):
        def listing(self, ended_since: float | None = None, tasks: Collection[Task] | None = None) -> RmListing:
            listing = super().listing(ended_since, tasks)
            jobs = (
                structs.replace(job, time_limit_at=job.time_limit_at and job.time_limit_at - ahead)
                for job in listing.jobs
            )
            return replace(listing, at=world.now, jobs=tuple(jobs))

    world = build(url="sqlite://")
    world.manager = Slow(world.cluster_nodes, lambda: world.now - ahead)
    world.coordinator = PromptCoordinator(world.store, world.manager)
    key = world.ready(max_workers=1, max_ps=1)
    limit(world, 100_000, of=is_anchor)
    run(world, key, 3600, task_limit=1800)
    tasks = world.store.tasks(live=False, job=key)
    assert not [task.id for task in tasks if task.state is TaskState.FAILED]
    assert 4 <= len(tasks) <= 8


def test_a_task_whose_time_is_short_is_not_replaced_all_the_time(build) -> None:
    world = build(url="sqlite://")
    key = world.ready(max_workers=1, max_ps=1)
    limit(world, 100_000, of=is_anchor)
    run(world, key, 1200, task_limit=240, every=20.0)
    assert len(world.store.tasks(live=False, job=key)) <= 2 * 8


def test_the_only_server_is_replaced_before_its_time_limit_although_growth_of_its_job_backs_off(build) -> None:
    world = build(cluster_nodes=make_nodes(2), url="sqlite://")
    key = world.settled(max_workers=1, max_ps=1)
    limit(world, 100_000, of=is_anchor)
    limit(world, 250, of=lambda tag: not is_anchor(tag))
    failures = {key: StartFailures(last="worker-7: no", at=world.now, only_delaying=8)}
    world.store.keep_guard_state(replace(world.store.guard_state(), start_failures=failures))
    for _ in range(12):
        world.tick(20.0)
        for job in world.manager.live():
            if job.time_limit_at and job.time_limit_at <= world.now:
                world.manager.end(job.handle, RmJobState.FAILED, "TIMEOUT")
        world.beat()
    assert world.has(key) == (1, 1)
    assert not [task.id for task in world.store.tasks(live=False, job=key) if task.state is TaskState.FAILED]


class Undying(ScriptedManager):
    """Some tasks cannot be stopped, as those of Slurm that are COMPLETING for hours."""

    undying = ""

    def end(self, handle: str, *how: object, **more: object) -> None:
        if handle != self.undying:
            super().end(handle, *how, **more)


def test_the_only_server_is_replaced_before_its_time_limit_although_another_one_that_left_does_not_end(build) -> None:
    world = build(cluster_nodes=make_nodes(2), url="sqlite://")
    world.manager = world.coordinator._manager = Undying(world.cluster_nodes, lambda: world.now)
    key = world.settled(max_workers=1, max_ps=2)
    limit(world, 100_000, of=is_anchor)
    limit(world, 1200, of=lambda tag: not is_anchor(tag))
    left = [task for task in world.tasks(key) if task.role is Role.PS][-1]
    world.manager.undying = left.handle
    for state in (TaskState.DRAINING, TaskState.DRAINED):
        world.store.change_tasks([TaskChange(key, left.id, state)], world.now)
    limits = (GrowthLimit(frozenset({world.job(key).anchor}), {"cpu": 0.0}, "QOS high has no more"),)
    world.manager.growth_limits = limits
    assert world.has(key) == (1, 1)
    sizes = run(world, key, 1500, task_limit=100_000, every=15.0)
    assert set(sizes[-5:]) == {(1, 1)}
    assert not [task.id for task in world.store.tasks(live=False, job=key) if task.state is TaskState.FAILED]
