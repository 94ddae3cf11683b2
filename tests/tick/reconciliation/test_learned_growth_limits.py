"""Whole ticks in which the resource manager lets a job grow no further, by a limit that it does not list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from msgspec import structs
from tick.scripted_manager import ScriptedManager
from tick.world import World

from dl2d.core.cluster import TaskState
from dl2d.core.decision import Constraint
from dl2d.core.jobs import JobKey, JobState, Role
from dl2d.core.resource_manager import GrowthLimit, RmJobState, TaskSpec
from dl2d.core.resources import Resources


class LimitedManager(ScriptedManager):
    """Workers beyond so many wait for a limit."""

    max_workers = 2

    def submit(self, task: TaskSpec) -> str:
        handle = super().submit(task)
        running = [job for job in self.live() if job.state is RmJobState.RUNNING and "worker" in job.tag]
        if task.role is Role.WORKER and len(running) > self.max_workers:
            self._change(handle, RmJobState.PENDING, "QOSGrpGRES")
            anchors = frozenset(job.handle for job in self.live() if job.tag.endswith("anchor"))
            job = next(job for job in self.live() if job.handle == handle)
            limit = GrowthLimit(anchors, {"gpu": 0.0}, "QOS high has no more")
            self.put(structs.replace(job, limit=limit), ())
        return handle


@pytest.fixture
def world() -> Iterator[World]:
    made = World(slot_seconds=60.0, url="")
    made.manager = made.coordinator._manager = LimitedManager(made.cluster_nodes, lambda: made.now)
    yield made
    made.close()


def test_a_limit_that_tasks_wait_for_keeps_the_job_from_growing_for_a_while(world: World) -> None:
    manager = world.manager
    assert isinstance(manager, LimitedManager)
    key = world.ready(ps=Resources.of(cpu=1))
    reasons: set[str] = set()
    for _ in range(60):
        report = world.tick(10.0)
        world.beat()
        entry = report.decision.jobs[0]
        if entry.binding_reason.constraint is Constraint.LIMIT:
            reasons.add(entry.binding_reason.text)
    workers = [task for task in world.tasks(key) if task.role is Role.WORKER]
    assert sum(task.state is TaskState.CONFIRMED for task in workers) == 2
    assert reasons
    assert all("QOS high has no more" in reason for reason in reasons)
    assert world.store.guard_state().learned_limits.keys() == {"QOS high has no more"}
    # Ten minutes: tried at once, and after one, two and four minutes.
    asked = [spec for spec in manager.submitted if spec.role is Role.WORKER]
    assert len(asked) <= 2 + 4 * 2
    manager.max_workers = 100
    world.settle(70, 10.0)
    assert len([task for task in world.tasks(key) if task.role is Role.WORKER]) == 4


class FewTasks(ScriptedManager):
    """Runs no more than so many tasks at once, workers first; the others wait for a limit."""

    max_tasks = 2
    #: Why all tasks that wait do so, in place of the limit.
    reason = ""

    def submit(self, task: TaskSpec) -> str:
        self.pending = task.role is not Role.COORDINATOR
        return super().submit(task)

    def schedule(self) -> None:
        anchors = frozenset(job.handle for job in self.live() if job.tag.endswith("anchor"))
        tasks = [job for job in self.live() if job.handle not in anchors]
        free = self.max_tasks - sum(job.state is RmJobState.RUNNING for job in tasks)
        waiting = sorted((job for job in tasks if job.state is RmJobState.PENDING), key=lambda job: "ps" in job.tag)
        for number, job in enumerate(waiting):
            if self.reason:
                changed = structs.replace(self._entries[job.handle].job, limit=None, reason=self.reason)
                self.put(changed, self._entries[job.handle].held)
            elif number < free:
                self._change(job.handle, RmJobState.RUNNING, "")
            else:
                self._change(job.handle, RmJobState.PENDING, "QOSGrpJobsLimit")
                limit = GrowthLimit(anchors, {"gpu": 0.0, "cpu": 0.0}, "QOS high has no more jobs")
                self.put(structs.replace(self._entries[job.handle].job, limit=limit), self._entries[job.handle].held)


@pytest.mark.parametrize(("max_tasks", "states"), [(2, ["running", "ready"]), (1, ["ready", "ready"])])
def test_jobs_of_which_a_limit_lets_a_part_start_give_it_back(world: World, max_tasks: int, states: list[str]) -> None:
    """Otherwise each would keep its worker, and neither would ever have room for the server that it needs, too."""
    manager = FewTasks(world.cluster_nodes, lambda: world.now)
    manager.max_tasks = max_tasks
    world.manager = world.coordinator._manager = manager
    keys = [world.submit(max_workers=1, max_ps=1) for _ in range(2)]
    for _ in range(60):
        world.tick(15.0)
        manager.schedule()
        world.beat()
    assert [str(world.job(key).state) for key in keys] == states
    idle = [key for key in keys if world.job(key).state is JobState.READY]
    assert not any(task.state is TaskState.CONFIRMED for key in idle for task in world.tasks(key))


def ticks_and_schedules(world: World, count: int, seconds: float = 15.0) -> None:
    assert isinstance(world.manager, FewTasks)
    for _ in range(count):
        world.tick(seconds)
        world.manager.schedule()
        world.beat()


def a_job_that_lost_its_workers(world: World) -> tuple[JobKey, FewTasks]:
    """A limit leaves it the server alone, and it has asked for two workers."""
    world.manager = world.coordinator._manager = manager = FewTasks(world.cluster_nodes, lambda: world.now)
    manager.max_tasks = 3
    key = world.submit(max_workers=2, max_ps=1)
    ticks_and_schedules(world, 4)
    assert (world.job(key).state, world.has(key)) == (JobState.RUNNING, (2, 1))
    for job in manager.live():
        if "worker" in job.tag:
            manager.end(job.handle, RmJobState.LOST, "NODE_FAIL")
    manager.max_tasks = 1
    ticks_and_schedules(world, 2)
    return key, manager


def test_what_a_running_job_lacks_of_its_minimum_size_waits_for_a_limit_in_the_queue(world: World) -> None:
    """Otherwise it would be withdrawn and submitted again without end, and never be the first of those that wait."""
    key, manager = a_job_that_lost_its_workers(world)
    ticks = partial(ticks_and_schedules, world)
    needed, other = [task.id for task in world.tasks(key) if task.role is Role.WORKER]
    ticks(30)
    present = {task.id for task in world.tasks(key)}
    assert needed in present
    assert other not in present
    before = len(manager.submitted)
    ticks(130, 55.0)
    # Two hours in which the limit stays full: in each a task of the floor, and another one after ever longer delays.
    assert len(manager.submitted) - before <= 2 + 5
    manager.max_tasks = 3
    ticks(2)
    assert (world.job(key).state, world.has(key)[0] >= 1) == (JobState.RUNNING, True)
    manager.max_tasks = 2
    ticks(2)
    assert world.has(key) == (1, 1)


@pytest.mark.parametrize(
    ("reason", "missed"), [("Resources", 0.0), ("Priority", 900.0)], ids=["", "no tick for a quarter of an hour"]
)
def test_a_task_that_has_waited_for_a_limit_has_its_usual_time_when_the_limit_has_room_again(
    world: World, reason: str, missed: float
) -> None:
    key, manager = a_job_that_lost_its_workers(world)
    needed = next(task.id for task in world.tasks(key) if task.role is Role.WORKER)
    ticks_and_schedules(world, 20, 60.0)
    world.timeouts = replace(world.timeouts, start_seconds=300.0)
    manager.reason = reason
    manager.schedule()
    ticks_and_schedules(world, 1, 15.0 + missed)
    ticks_and_schedules(world, 19)
    assert needed in {task.id for task in world.tasks(key)}
    ticks_and_schedules(world, 3)
    assert needed not in {task.id for task in world.tasks(key)}  # it has not waited for the limit for 300 s


def test_a_task_for_which_a_limit_has_room_now_and_then_is_kept_for_an_hour(world: World) -> None:
    key, manager = a_job_that_lost_its_workers(world)
    needed = next(task.id for task in world.tasks(key) if task.role is Role.WORKER)
    began = world.now
    while needed in {task.id for task in world.tasks(key)} and world.now < began + 7200.0:
        manager.reason = "" if manager.reason else "Priority"
        ticks_and_schedules(world, 5, 60.0)
    assert 3500.0 < world.now - began < 3600.0 + world.timeouts.start_seconds
