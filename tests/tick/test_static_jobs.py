"""Looking on while another scheduler is in charge: whole ticks on a cluster in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tick.world import World

from dl2d.core.cluster import TaskState
from dl2d.core.daemon_mode import Mode
from dl2d.core.decision import Constraint
from dl2d.core.jobs import NOTHING, Allocation, Architecture, JobKey, JobState, Owner, Role
from dl2d.core.resource_manager import RmJobState, StaticJob
from dl2d.core.resources import Resources
from dl2d.policies.fifo import Fifo
from dl2d.testing.builders import make_nodes

R = RmJobState
EVE = Owner("eve", 1007, 1007, partition="gpu")
HOUR = 3600


@pytest.fixture(params=[Mode.OBSERVE, Mode.SHADOW])
def world(build, request: pytest.FixtureRequest) -> World:
    return build(mode=request.param)


def a_static(*places: str, workers: int = 3, ps: int = 0, started: float = 0.0, hours: float = 24) -> StaticJob:
    return StaticJob(
        name="bert-large", model="bert", owner=EVE, workers=workers, ps=ps, task=Resources.of(cpu=2, gpu=1),
        nodes=places, limit=hours * HOUR, started=started,
    )  # fmt: skip


def seen(world: World, handle: str, state: RmJobState, static: StaticJob, reason: str = "") -> JobKey:
    submitted = 999_000
    world.manager.set_static(handle, static, state, submitted=submitted, reason=reason)
    return JobKey("test", handle, submitted)


def nothing_was_done(world: World) -> bool:
    return world.manager.submitted == [] and world.manager.stopped == []


def test_a_users_job_is_recorded_from_waiting_to_its_end(world: World) -> None:
    key = seen(world, "7", R.PENDING, a_static(), "Resources")
    report = world.tick()
    (entry,) = report.decision.jobs
    assert (entry.job, entry.allocation, entry.previous) == (key, NOTHING, NOTHING)
    assert entry.reason.constraint is Constraint.OBSERVED
    assert entry.reason.text == "observed: memory 1 gave nothing yet: Resources"
    assert (report.decision.policy, report.decision.policy_version) == ("observed", "memory 1")
    job = world.job(key)
    assert (job.state, job.static, job.owner, job.request.model) == (JobState.READY, True, EVE, "bert")

    seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2", started=world.now + 4))
    report = world.tick()
    (entry,) = report.decision.jobs
    assert report.decided  # before the slot is over: somebody was given something
    assert (entry.allocation, entry.previous) == (Allocation(3, 0), NOTHING)
    assert entry.reason.text == "observed: what memory 1 gave, on n1, n2"
    assert [(task.role, task.node, task.state, task.handle) for task in report.snapshot.tasks] == [
        (Role.WORKER, "n1", TaskState.CONFIRMED, "7"),
        (Role.WORKER, "n1", TaskState.CONFIRMED, "7"),
        (Role.WORKER, "n2", TaskState.CONFIRMED, "7"),
    ]
    assert {node.name: node.used.get("gpu") for node in report.snapshot.nodes} == {"n1": 2, "n2": 1, "n3": 0, "n4": 0}
    assert world.job(key).started_at == world.now - 6
    assert not world.tick().decided

    world.now += 2 * HOUR
    (shown,) = world.tick().snapshot.jobs
    assert shown.progress.epoch == pytest.approx((world.now - world.job(key).started_at) / HOUR)
    assert (shown.request.epochs, shown.progress.samples_per_second, shown.progress.loss) == (24, None, None)

    world.manager.end("7", R.DONE)
    report = world.tick()
    assert report.decision.jobs == ()
    job = world.job(key)
    assert (job.state, job.end_reason, job.ended_at) == (JobState.FINISHED, "done", world.now)
    assert world.store.tasks(live=True) == ()
    assert {task.state for task in world.store.tasks(live=False, job=key)} == {TaskState.RELEASED}
    assert nothing_was_done(world)


@pytest.mark.parametrize(
    ("state", "ends"),
    [(R.FAILED, JobState.FAILED), (R.CANCELLED, JobState.CANCELLED), (R.LOST, JobState.LOST)],
)
def test_how_it_ended(world: World, state: RmJobState, ends: JobState) -> None:
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2"))
    world.tick()
    world.manager.end("7", state, "so it was")
    world.tick()
    job = world.job(key)
    assert (job.state, job.end_reason) == (ends, "so it was")


def test_one_that_is_not_listed_any_more_is_lost(world: World) -> None:
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2"))
    world.tick()
    world.manager.forget(["7"])
    world.tick(60)
    assert world.job(key).state is JobState.LOST
    assert world.store.tasks(live=True) == ()


def test_a_number_that_is_given_again_is_another_job(world: World) -> None:
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2"))
    world.tick()
    world.manager.set_static("7", a_static("n3", workers=1), R.RUNNING, submitted=999_500)
    world.tick()
    assert world.job(key).state is JobState.LOST
    assert world.job(key).end_reason == "was requeued, or its number was given again"
    assert world.has(key) == NOTHING
    assert world.has(JobKey("test", "7", 999_500)) == Allocation(1, 0)


def test_a_job_that_the_scheduler_changes_is_followed(world: World) -> None:
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2"))
    world.tick()
    seen(world, "7", R.RUNNING, a_static("n1", "n2", workers=2))
    report = world.tick()
    assert report.decided
    assert world.has(key) == Allocation(2, 0)
    assert sorted(task.node for task in world.store.tasks(live=True)) == ["n1", "n2"]
    seen(world, "7", R.PENDING, a_static(workers=2), "requeued")
    world.tick()
    assert world.has(key) == NOTHING
    assert world.job(key).state is JobState.RUNNING
    assert nothing_was_done(world)


def test_what_it_would_have_asked_for(world: World) -> None:
    plain = world.job(_ticked(world, seen(world, "7", R.PENDING, a_static(hours=36)))).request
    assert (plain.architecture, plain.min_workers, plain.max_workers, plain.max_ps) == (
        Architecture.ALLREDUCE,
        1,
        16,
        0,
    )
    assert (plain.epochs, plain.steps_per_epoch, plain.samples_per_epoch) == (36, 3600, None)
    served = world.job(_ticked(world, seen(world, "8", R.PENDING, a_static(workers=20, ps=2)))).request
    assert (served.architecture, served.max_workers, served.min_ps, served.max_ps) == (Architecture.PS, 20, 1, 16)
    assert served.ps == served.worker == Resources.of(cpu=2, gpu=1)


def _ticked(world: World, key: JobKey) -> JobKey:
    world.tick()
    return key


def test_a_daemon_that_starts_again_goes_on(world: World) -> None:
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2"))
    world.tick()
    world.state = replace(type(world.state)(), slot=world.store.last_slot_number())
    report = world.tick()
    assert [(entry.job, entry.allocation, entry.previous) for entry in report.decision.jobs] == [
        (key, Allocation(3, 0), Allocation(3, 0))
    ]
    assert len(world.store.tasks(live=False)) == 3


def test_a_slot_is_read_back_as_it_was(world: World) -> None:
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2"))
    report = world.tick()
    slot = world.store.slot(1)
    assert slot is not None
    assert (slot.snapshot, slot.decision) == (report.snapshot, report.decision)
    assert world.store.decisions(key)[0].policy == "observed"
    if world.mode is Mode.OBSERVE:
        assert (slot.proposed, slot.shadow) == (slot.decision, None)
    else:
        assert slot.shadow is not None
        assert {slot.proposed.policy, slot.shadow.policy} == {"drf"}


def test_elastic_jobs_go_on_as_they_are(world: World) -> None:
    world.mode, watching = Mode.LIVE, world.mode
    key = world.submit(max_workers=2, max_ps=1)
    world.settle()
    had, started, stopped = world.has(key), len(world.manager.submitted), list(world.manager.stopped)
    assert had == Allocation(2, 1)
    world.mode = watching
    for _ in range(3):
        report = world.tick(400)
        world.beat()
    assert [(entry.job, entry.allocation) for entry in report.decision.jobs] == [(key, had)]
    # Something that live mode would stop is let be, and nothing is started for a job that comes.
    world.submit()
    world.tick(400)
    assert (len(world.manager.submitted), world.manager.stopped) == (started, stopped)
    world.manager.end(world.store.tasks(live=True)[0].handle, R.FAILED, "fell over")
    world.tick(400)
    assert world.has(key) != had
    assert (len(world.manager.submitted), world.manager.stopped) == (started, stopped)


def test_in_live_mode_they_are_what_others_hold(build) -> None:
    world = build(cluster_nodes=make_nodes(1, cpu=9, gpu=4), mode=Mode.OBSERVE)
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", workers=2))
    world.tick()
    world.mode = Mode.LIVE
    seen(world, "8", R.RUNNING, a_static("n1", workers=1))
    ours = world.submit(max_workers=4, max_ps=1)
    world.settle()
    report = world.tick()
    assert [entry.job for entry in report.decision.jobs] == [ours]
    assert report.decision.policy == "drf"
    assert world.has(ours) == Allocation(1, 1)  # which takes three of 9 CPUs, the others six
    assert world.store.job(JobKey("test", "8", 999_000)) is None
    assert world.manager.stopped == []
    world.manager.end("7", R.DONE)
    world.tick(400)
    world.settle()
    assert world.job(key).state is JobState.FINISHED
    assert world.has(ours) == Allocation(3, 1)


def test_shadow_decides_for_them_as_if_they_were_elastic(build) -> None:
    world = build(mode=Mode.SHADOW, policy=Fifo())
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2"))
    waiting = seen(world, "8", R.PENDING, a_static(workers=6))
    world.tick()
    slot = world.store.slot(1)
    assert slot is not None
    assert slot.decision.allocations() == {key: Allocation(3, 0), waiting: NOTHING}
    assert slot.shadow is not None
    # 8 GPUs in all: the first in the queue is as large as the cluster, but for what is not its to take.
    assert slot.shadow.allocations() == {key: Allocation(8, 0), waiting: NOTHING}
    assert {entry.previous for entry in slot.shadow.jobs if entry.job == key} == {Allocation(3, 0)}
    assert slot.plan.starts == slot.plan.stops == ()
    assert nothing_was_done(world)
