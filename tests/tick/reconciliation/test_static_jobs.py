"""Looking on while another scheduler is in charge: whole ticks on a cluster in memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from sqlalchemy import text
from tick.world import World

from dl2d.core.cluster import NodeState, TaskState
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.decision import Constraint
from dl2d.core.errors import StoreError
from dl2d.core.jobs import NOTHING, Allocation, Architecture, JobKey, JobState, Owner, Role
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.resource_manager import Claim, EligibleNodes, RmJobState, StaticJob
from dl2d.core.resources import Resources
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.fifo import Fifo
from dl2d.testing import make_nodes
from dl2d.tick.reconciliation import static_jobs

R = RmJobState
EVE = Owner("eve", 1007, 1007, partition="gpu")
HOUR = 3600


@pytest.fixture(params=[Mode.OBSERVE, Mode.SHADOW])
def world(build, request: pytest.FixtureRequest) -> World:
    return build(mode=request.param, url="sqlite://")


def a_static(*places: str, workers: int = 3, ps: int = 0, started: float = 0.0, hours: float = 24) -> StaticJob:
    return StaticJob(
        name="bert-large", model="bert", owner=EVE, workers=workers, ps=ps, task=Resources.of(cpu=2, gpu=1),
        nodes=places, limit=hours * HOUR, started=started,
    )  # fmt: skip


def seen(world: World, handle: str, state: RmJobState, static: StaticJob, reason: str = "", **more: Any) -> JobKey:
    submitted = 999_000
    world.manager.set_static(handle, static, state, submitted=submitted, reason=reason, **more)
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
    assert job.request.asked_size == Allocation(3, 0)

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
    ended = world.now
    report = world.tick()
    assert report.decision.jobs == ()
    job = world.job(key)
    assert (job.state, job.end_reason, job.ended_at) == (JobState.FINISHED, "done", ended)
    assert world.tasks() == ()
    assert {task.state for task in world.store.tasks(live=False, job=key)} == {TaskState.RELEASED}
    assert nothing_was_done(world)


@pytest.mark.parametrize(
    ("state", "ends", "cause"),
    [
        (R.FAILED, JobState.FAILED, "failed"),
        (R.TIME_LIMIT, JobState.FAILED, "time-limit"),
        (R.OUT_OF_MEMORY, JobState.FAILED, "out-of-memory"),
        (R.CANCELLED, JobState.CANCELLED, "cancelled"),
        (R.LOST, JobState.LOST, "node-lost"),
    ],
)
def test_how_it_ended(world: World, state: RmJobState, ends: JobState, cause: str) -> None:
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2"))
    world.tick()
    world.manager.end("7", state, "so it was")
    world.tick()
    job = world.job(key)
    assert (job.state, job.end_reason) == (ends, "so it was")
    with world.store._database.reading("asking") as connection:
        assert connection.execute(text("SELECT end_cause FROM jobs")).scalar_one() == cause


def test_one_that_is_not_listed_any_more_is_lost(world: World) -> None:
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2"))
    world.tick()
    world.manager.forget(["7"])
    for _ in range(2):
        world.tick(60)
        assert world.has(key) == Allocation(3, 0)
    world.tick(60)
    assert world.job(key).state is JobState.LOST
    assert world.tasks() == ()


def test_a_number_that_is_given_again_is_another_job(world: World) -> None:
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2"))
    world.tick()
    world.manager.set_static("7", a_static("n3", workers=1), R.RUNNING, submitted=999_500)
    world.tick()
    assert world.job(key).state is JobState.LOST
    assert world.job(key).end_reason == "its id was given to another job"
    assert world.has(key) == NOTHING
    assert world.has(JobKey("test", "7", 999_500)) == Allocation(1, 0)


def test_a_job_that_the_scheduler_changes_is_followed(world: World) -> None:
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2"))
    world.tick()
    seen(world, "7", R.RUNNING, a_static("n1", "n2", workers=2))
    report = world.tick()
    assert report.decided
    assert world.has(key) == Allocation(2, 0)
    assert sorted(task.node for task in world.tasks()) == ["n1", "n2"]
    seen(world, "7", R.PENDING, a_static(workers=2), "requeued")
    world.tick()
    assert world.has(key) == NOTHING
    assert world.job(key).state is JobState.RUNNING
    assert nothing_was_done(world)


def test_the_size_of_a_job_stays_where_the_listing_is_incomplete(world: World) -> None:
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2"))
    world.tick()
    world.manager.incomplete = ("its nodes are cut off",)
    seen(world, "7", R.RUNNING, a_static("n1", workers=1))
    for _ in range(2):
        report = world.tick()
        assert world.has(key) == Allocation(3, 0)
        assert report.decision.jobs[0].allocation == Allocation(3, 0)
    world.manager.incomplete = ()
    world.tick()
    assert world.has(key) == Allocation(1, 0)


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
    key = world.settled(max_workers=2, max_ps=1)
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
    world.manager.end(world.tasks()[0].handle, R.FAILED, "fell over")
    world.tick(400)
    assert world.has(key) != had
    assert (len(world.manager.submitted), world.manager.stopped) == (started, stopped)


def test_in_live_mode_they_are_what_others_hold(build) -> None:
    world = build(cluster_nodes=make_nodes(1, cpu=9, gpu=4), mode=Mode.OBSERVE, url="sqlite://")
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", workers=2))
    world.tick()
    world.mode = Mode.LIVE
    seen(world, "8", R.RUNNING, a_static("n1", workers=1))
    ours = world.settled(max_workers=4, max_ps=1)
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
    world = build(mode=Mode.SHADOW, policy=Fifo(), url="sqlite://")
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


def test_what_a_job_waits_for_and_holds_is_counted_once(build) -> None:
    """The resource manager lists a waiting job among those that claim room, and of a running one what all of it holds.

    Neither keeps a policy from giving these jobs what they have or ask for.
    """
    world = build(mode=Mode.SHADOW, policy=Fifo(), url="sqlite://")
    task = Resources.of(cpu=2, gpu=1)
    running = seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2"))
    waiting = seen(world, "8", R.PENDING, a_static(workers=2), "Resources")
    claim = Claim(handle="8", user="eve", priority=100, nodes=2, demand=task * 2, whole=True)
    foreign = Claim(handle="9", user="bob", priority=50, nodes=1, demand=task, eligible=frozenset({"n4"}))
    world.manager.claims = [claim, foreign]
    report = world.tick()
    assert {each.room for each in report.snapshot.tasks} == {task}
    assert [each.handle for each in report.snapshot.grants] == ["9"]
    slot = world.store.slot(1)
    assert slot is not None
    assert slot.shadow is not None
    # 8 GPUs in all, one of which is claimed: fifo serves one job after the other.
    assert slot.shadow.allocations() == {running: Allocation(7, 0), waiting: NOTHING}
    world.manager.end("7", R.DONE)
    world.tick(30)
    slot = world.store.slot(2)
    assert slot is not None
    assert slot.shadow is not None
    assert slot.shadow.allocations() == {waiting: Allocation(7, 0)}


def test_no_policy_starts_a_job_that_the_scheduler_would_not_start_whatever_is_free(build) -> None:
    world = build(mode=Mode.SHADOW, policy=Fifo(), url="sqlite://")
    held = seen(world, "7", R.PENDING, a_static(workers=2), "JobHeldUser")
    bound = seen(world, "8", R.PENDING, a_static(workers=2), "Resources")
    world.manager.eligible = {
        "7": EligibleNodes(frozenset(), "not started now: JobHeldUser"),
        "8": EligibleNodes(frozenset({"n1"}), "partition small"),
    }
    report = world.tick()
    slot = world.store.slot(1)
    assert slot is not None
    assert slot.shadow is not None
    assert slot.shadow.allocations() == {held: NOTHING, bound: Allocation(2, 0)}
    # What the cluster has is recorded, although neither may use it.
    assert {node.state for node in report.snapshot.nodes} == {NodeState.UP}
    # The scheduler's reasons change again and again within a slot.
    world.manager.eligible["7"] = EligibleNodes(frozenset(), "not started now: Dependency")
    assert not world.tick().decided


def test_tasks_are_shown_where_their_nodes_are_used(build) -> None:
    """Of a job on several nodes it is known how many tasks it has, and not where: here three and one."""
    world = build(
        mode=Mode.SHADOW, policy=Fifo(), url="sqlite://", cluster_nodes=make_nodes(2, cpu=8, gpu=3, memory=64)
    )
    spread, task = a_static("n1", "n1", "n2", "n2", workers=4), Resources.of(cpu=2, gpu=1)
    jobs = [seen(world, "7", R.RUNNING, spread), seen(world, "8", R.RUNNING, a_static("n2", "n2", workers=2))]
    (listed,) = [job for job in world.manager.live() if job.handle == "7"]
    world.manager.put(listed, (("n1", task * 3), ("n2", task)))
    snapshot = world.tick().snapshot
    assert Counter((task.job, task.node) for task in snapshot.tasks) == {
        (jobs[0], "n1"): 3, (jobs[0], "n2"): 1, (jobs[1], "n2"): 2,
    }  # fmt: skip
    packing = Packing.for_decision(snapshot.nodes, snapshot.tasks, LoadBalance())
    assert [packing.fits(job, snapshot.held()[job.key]) for job in snapshot.jobs] == [True, True]
    # A job of less than its tasks would hold, on full nodes.
    seen(world, "9", R.RUNNING, a_static("n1", "n1", "n2", workers=3))
    (listed,) = [job for job in world.manager.live() if job.handle == "9"]
    world.manager.put(listed, (("n1", Resources.of(cpu=2)), ("n2", Resources.of(cpu=2))))
    snapshot = world.tick().snapshot
    packing = Packing.for_decision(snapshot.nodes, snapshot.tasks, LoadBalance())
    assert [packing.add(job, snapshot.held()[job.key]) for job in snapshot.jobs] == [None, None, None]


def test_no_decision_is_about_a_job_that_is_ending(build) -> None:
    """Slurm lists the nodes where it has not ended yet: its tasks do not move there, and its room is used by others."""
    world = build(mode=Mode.SHADOW, policy=Fifo(), url="sqlite://")
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2"))
    world.tick()
    seen(world, "7", R.ENDING, a_static("n2", "n2", "n2"))
    snapshot = world.tick().snapshot
    assert (snapshot.jobs, snapshot.tasks) == ((), ())
    assert {node.name: node.used.get("gpu") for node in snapshot.nodes if node.used.thousandths} == {"n2": 3}
    assert [(task.node, task.id) for task in world.store.tasks(live=False, job=key)] == [
        ("n1", "worker-0"), ("n1", "worker-1"), ("n2", "worker-2"),
    ]  # fmt: skip
    world.manager.end("7", R.DONE)
    world.tick()
    assert world.job(key).state is JobState.FINISHED


def rows(world: World, query: str) -> list[tuple[Any, ...]]:
    with world.store._database.reading("test") as connection:
        return [tuple(row) for row in connection.execute(text(query))]


JOB_ROWS = "SELECT id, state, submitted, started_at, ended_at, workers, ps, end_reason FROM jobs ORDER BY number"
TASK_ROWS = """
    SELECT jobs.id, tasks.state, tasks.node, tasks.granted_at, tasks.ended_at
    FROM tasks JOIN jobs ON jobs.number = tasks.job_number ORDER BY jobs.number, tasks.ordinal
"""


def test_a_job_that_came_and_went_between_two_ticks_is_recorded_once(world: World) -> None:
    world.tick()
    now = world.now
    static = a_static("n1", "n2", workers=2, started=now + 3)
    seen(world, "7", R.DONE, static, ended=now + 9.0)
    seen(world, "8", R.FAILED, static, "FAILED, exit status 3", ended=now + 7.0)
    seen(world, "9", R.CANCELLED, a_static(), "CANCELLED", ended=now + 5.0)  # while it waited
    for _ in range(3):
        assert world.tick(30).decision.jobs == ()
    assert rows(world, JOB_ROWS) == [
        ("9", "cancelled", 999_000, None, now + 5, 0, 0, "CANCELLED"),
        ("8", "failed", 999_000, now + 3, now + 7, 2, 0, "FAILED, exit status 3"),
        ("7", "finished", 999_000, now + 3, now + 9, 2, 0, "done"),
    ]
    assert rows(world, TASK_ROWS) == [
        (job, "released", node, now + 3, ended)
        for job, ended in (("8", now + 7), ("7", now + 9))
        for node in ("n1", "n2")
    ]
    assert rows(world, "SELECT end_cause FROM jobs ORDER BY number") == [("cancelled",), ("failed",), ("",)]
    assert nothing_was_done(world)


def test_ends_that_come_together_have_their_own_times(world: World) -> None:
    begin = world.now
    for number in range(4):
        seen(world, str(number), R.RUNNING, a_static("n1", workers=1, started=begin - number))
    world.tick()
    for number in range(3):
        seen(world, str(number), R.DONE, a_static("n1", workers=1, started=begin - number), ended=begin + 12 + number)
    world.manager.end("3", R.DONE)
    seen(world, "3", R.DONE, a_static("n1", workers=1))  # when, its manager does not say
    world.tick(25)
    assert rows(world, "SELECT started_at, ended_at FROM jobs ORDER BY id") == [
        *((begin - number, begin + 12 + number) for number in range(3)), (begin - 3, world.now)
    ]  # fmt: skip
    assert rows(world, "SELECT granted_at, ended_at FROM tasks ORDER BY granted_at DESC") == [
        *((begin - number, begin + 12 + number) for number in range(3)), (begin - 3, world.now)
    ]  # fmt: skip


def test_a_job_that_waited_and_has_run_in_between(world: World) -> None:
    key = seen(world, "7", R.PENDING, a_static())
    world.tick()
    began = world.now + 4
    seen(world, "7", R.LOST, a_static("n1", "n1", "n2", started=began), "NODE_FAIL", ended=began + 30)
    world.tick(60)
    job = world.job(key)
    assert (job.state, job.started_at, job.ended_at) == (JobState.LOST, began, began + 30)
    assert (job.progress.workers, len(rows(world, TASK_ROWS))) == (3, 3)
    assert {row[3:] for row in rows(world, TASK_ROWS)} == {(began, began + 30)}


def test_starts_and_ends_are_no_resizes_and_hours_are_no_epochs(world: World) -> None:
    seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2"))
    world.tick()
    world.manager.end("7", R.DONE)
    world.tick()
    assert world.store.resizes() == ()
    assert rows(world, "SELECT * FROM resize_log") == []
    assert rows(world, "SELECT epochs, epochs_done, workers FROM job_completion") == [(None, None, 3)]


def test_tasks_of_an_array_are_jobs_under_the_ids_that_users_know(world: World) -> None:
    waiting = [seen(world, "12", R.PENDING, a_static(), f"why {task}", array_id=f"12_{task}") for task in (3, 4)]
    # In a manager each of its waiting tasks is a record; the one in memory has one for each handle.
    entries = world.manager._entries
    entries["12 again"] = replace(entries["12"])
    entries["12"].job = structs.replace(entries["12"].job, array_id="12_3", reason="why 3")
    assert [key.id for key in waiting] == ["12", "12"]
    keys = [JobKey("test", f"12_{task}", 999_000) for task in (3, 4)]
    report = world.tick()
    assert [entry.job for entry in report.decision.jobs] == keys
    assert [entry.reason.text.rpartition(": ")[2] for entry in report.decision.jobs] == ["why 3", "why 4"]
    # The first one runs, under a handle of its own.
    del entries["12"]
    seen(world, "13", R.RUNNING, a_static("n1", workers=1, started=world.now), array_id="12_3")
    world.tick()
    assert (world.has(keys[0]), world.has(keys[1])) == (Allocation(1, 0), NOTHING)
    assert {task.handle for task in world.tasks()} == {"13"}
    assert world.job(keys[0]).anchor == "13"
    world.manager.end("13", R.DONE)
    world.tick()
    # The other is not taken for it when it is not listed any more.
    world.manager.forget(["13"])
    world.tick(600)
    assert [world.job(key).state for key in keys] == [JobState.FINISHED, JobState.READY]
    assert len(rows(world, JOB_ROWS)) == 2


def test_an_end_may_still_come_from_the_accounting(world: World) -> None:
    key = seen(world, "7", R.RUNNING, a_static("n1", "n1", "n2", started=world.now))
    world.tick()
    looked, began = world.now, world.now - 10
    world.manager.forget(["7"])
    world.manager.ended_until = looked
    for _ in range(3):
        world.tick(600)
        assert world.job(key).state is JobState.RUNNING
    assert world.manager.asked_since == [None, looked, looked, looked]
    seen(world, "7", R.DONE, a_static("n1", "n1", "n2", started=began), ended=looked + 40)
    world.manager.ended_until = world.now
    world.tick()
    assert (world.job(key).state, world.job(key).ended_at) == (JobState.FINISHED, looked + 40)
    world.tick()
    assert world.manager.asked_since[-1] == world.manager.ended_until


def test_a_tick_records_some_unseen_jobs_and_the_next_ones_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_jobs, "MAX_NEW_ENDED", 2)
    world.tick()
    begin = world.now
    for number in range(5):
        seen(world, str(number), R.DONE, a_static("n1", workers=1, started=begin), ended=begin + 10 - number)
    known = []
    for _ in range(4):
        world.tick(20)
        known.append([row[0] for row in rows(world, "SELECT id FROM jobs ORDER BY ended_at")])
    assert known == [["4", "3"], ["4", "3", "2", "1"], ["4", "3", "2", "1", "0"], ["4", "3", "2", "1", "0"]]
    assert world.manager.asked_since[-4:] == [begin, begin + 8, begin + 10, begin + 60]


WRITES = ("add_job", "ask_tasks", "change_tasks", "change_job", "report_progress")


def test_a_tick_that_is_interrupted_at_any_write_loses_and_doubles_nothing(build) -> None:
    def run(fails_at: int, after: bool) -> tuple[bool, list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        world = build(mode=Mode.OBSERVE, url="sqlite://")
        seen(world, "1", R.PENDING, a_static(workers=2))
        seen(world, "2", R.RUNNING, a_static("n1", "n2", workers=2, started=world.now))
        world.tick()
        begin = world.now
        seen(world, "1", R.DONE, a_static("n1", "n1", workers=2, started=begin + 1), ended=begin + 5)
        seen(world, "2", R.FAILED, a_static("n1", "n2", workers=2, started=begin - 10), "broke", ended=begin + 6)
        seen(world, "3", R.DONE, a_static("n3", workers=1, started=begin + 2), ended=begin + 7)
        seen(world, "4", R.RUNNING, a_static("n4", workers=1, started=begin + 3))
        writes = 0

        def interrupted(write):
            def call(*args: object) -> object:
                nonlocal writes
                writes += 1
                if writes == fails_at and not after:
                    raise StoreError("before")
                result = write(*args)
                if writes == fails_at:
                    raise StoreError("after")
                return result

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in WRITES:
                patch.setattr(world.store, name, interrupted(getattr(world.store, name)))
            try:
                world.tick(20)
                failed = False
            except StoreError:
                failed = True
        world.tick(0)
        world.tick(0)
        return failed, rows(world, JOB_ROWS), rows(world, TASK_ROWS)

    undisturbed = run(0, after=False)
    assert not undisturbed[0]
    assert len(undisturbed[1]) == 4
    assert len(undisturbed[2]) == 6
    count = 0
    for after in (False, True):
        for fails_at in range(1, 100):
            failed, jobs, tasks = run(fails_at, after)
            assert (sorted(jobs), sorted(tasks)) == (sorted(undisturbed[1]), sorted(undisturbed[2])), (fails_at, after)
            if not failed:
                break
            count += 1
    assert count > 20
