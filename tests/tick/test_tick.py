from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from structlog.testing import capture_logs
from tick.scripted_manager import ScriptedManager
from tick.world import IgnoresLimits, World

from dl2d.core.cluster import NodeState, Snapshot, Task, TaskState
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.decision import Constraint, Decision, Reason
from dl2d.core.errors import AlreadyRunning, Denied, Rejected, Unavailable
from dl2d.core.jobs import NOTHING, Allocation, Durability, JobKey, JobState, Progress, Role
from dl2d.core.json_codec import encode
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.plan_of_starts_and_stops import Start
from dl2d.core.resize_guard_state import GuardState
from dl2d.core.resource_manager import EligibleNodes, GrowthLimit, RmJobState, RmListing, StartAllowance
from dl2d.core.resources import Resources
from dl2d.core.store import JobChange, TaskChange
from dl2d.daemon.health_and_metrics import Health
from dl2d.daemon.log_lines_of_ticks import TickLog
from dl2d.plugins import load_policy
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.policies.optimus import Optimus
from dl2d.testing import make_nodes
from dl2d.tick.decision.decide import decide
from dl2d.tick.record_slot import Report, inputs_hash
from dl2d.tick.tick_context import GuardRules, Timeouts
from dl2d.tick.tick_state import TickState


@pytest.fixture
def world(build) -> World:
    return build()


def reason(report, key):
    return next(entry for entry in report.decision.jobs if entry.job == key)


def test_a_job_gets_its_anchor_then_its_bundles_then_trains(world: World) -> None:
    job = world.submit()
    world.tick()
    anchor = world.manager.submitted[0]
    assert (anchor.role, anchor.demand, anchor.launch.argv) == (
        Role.COORDINATOR,
        Resources(),
        ("dl2-run", "python", "train.py"),
    )
    environment = dict(anchor.launch.env)
    assert environment["DL2_ROLE"] == "coordinator"
    assert environment["DL2_CREDENTIAL"] != environment["DL2_TOKEN"]
    assert environment["PATH"] == "/usr/bin"
    assert environment["DL2_DAEMON_UID"] == "64"
    assert world.job(job).state is JobState.SUBMITTED

    world.beat(job)
    report = world.tick()
    assert reason(report, job).allocation == (4, 4)
    assert reason(report, job).reason.constraint is Constraint.SATISFIED
    assert len(report.plan.starts) == 8
    tasks = [task for task in world.manager.submitted if task.role is not Role.COORDINATOR]
    assert {dict(task.launch.env)["DL2_TASK"] for task in tasks} == {
        f"{r}-{n}" for r in ("worker", "ps") for n in range(4)
    }

    world.settle()
    assert world.has(job) == (4, 4)
    assert world.job(job).state is JobState.RUNNING


def test_tasks_learn_from_the_job_file_that_servers_keep_replicas(world: World) -> None:
    jobs = {world.submit(max_workers=1, max_ps=2, durability=each): each for each in Durability}
    world.settle()
    told = {task.job: dict(task.launch.env).get("DL2_DURABILITY") for task in world.manager.submitted if task.node}
    assert told == {job: "durable" if each is Durability.DURABLE else None for job, each in jobs.items()}


def test_a_second_job_shrinks_the_first_and_gives_the_room_back_when_it_ends(world: World) -> None:
    first = world.settled(max_workers=8, max_ps=8)
    assert world.has(first) == (8, 8)
    second = world.settled(max_workers=8, max_ps=8)
    assert (world.has(first), world.has(second)) == ((4, 4), (4, 4))
    world.beat(second, state="finished", result={"digest": "abc"})
    world.settle(20)
    assert world.has(first) == (8, 8)
    ended = world.job(second)
    assert (ended.state, ended.digest) == (JobState.FINISHED, "abc")
    assert world.tasks(second) == ()


def test_room_is_given_only_when_the_manager_says_that_it_is_free(world: World) -> None:
    first = world.settled(max_workers=8, max_ps=8)
    second = world.submit()
    world.tick()
    world.coordinator.beat(second, world.now)
    report = world.tick()
    assert len(report.plan.stops) == 8
    assert [start for start in report.plan.starts if start.job == second] == []
    waiting = [item for item in report.plan.deferred if item.job == second]
    assert waiting
    assert waiting[0].shortfalls[0].resource == "gpu"
    world.coordinator.beat(first, world.now)
    report = world.tick()
    assert len([start for start in report.plan.starts if start.job == second]) == 8
    assert not report.decided  # carrying on with the standing decision, not a new one


def test_every_resize_keeps_all_its_states_with_their_times(build) -> None:
    world = build(url="sqlite://")
    job = world.ready(max_workers=1, max_ps=1)
    world.tick()
    world.tick()
    world.settle()
    world.beat(job, state="finished")
    world.settle(15)
    by_direction = {(resize.task, resize.direction): resize for resize in world.store.resizes(job)}
    grown = [event.state for event in by_direction["worker-0", "grow"].events]
    assert grown == [TaskState.ASKED, TaskState.GRANTED, TaskState.CONFIRMED]
    shrunk = [event.state for event in by_direction["worker-0", "shrink"].events]
    assert shrunk[0] is TaskState.DRAINING
    assert shrunk[-1] is TaskState.RELEASED
    times = [event.at for resize in by_direction.values() for event in resize.events]
    assert min(times) > 1_000_000


def test_a_recorded_slot_is_recomputed_bit_for_bit(build) -> None:
    world = build(url="sqlite://")
    world.submit(max_workers=3)
    world.submit(worker=Resources.of(cpu=4), max_workers=5)
    world.settle()
    for number in range(1, world.store.last_slot_number() + 1):
        slot = world.store.slot(number)
        assert slot is not None
        deciders = world.context().deciders
        assert decide(slot.snapshot, deciders, slot.seed) == slot.proposed
        policy, placement = deciders.policy, deciders.placement
        hashed = inputs_hash(slot.snapshot, policy.name, policy.version, placement.name, slot.seed)
        assert hashed == slot.inputs_hash
        assert b"train.py" not in repr(slot).encode()  # commands and environments are not recorded


@pytest.mark.parametrize(
    ("change", "constraint", "words"),
    [
        ({"worker": Resources.of(gpu=3)}, Constraint.INFEASIBLE, "gpu: wanted 3, had 2"),
        ({"max_workers": 99, "max_ps": 1}, Constraint.CAPACITY, "gpu: wanted 1, had 0"),
        (
            {"worker": Resources.of(cpu=6), "ps": Resources.of(cpu=5), "max_workers": 99},
            Constraint.FRAGMENTED,
            "cpu: wanted",
        ),
        ({"max_workers": 1, "max_ps": 1}, Constraint.SATISFIED, "1w+1ps"),
    ],
)
def test_a_reason_names_the_binding_constraint_with_amounts(world: World, change, constraint, words) -> None:
    job = world.ready(**change)
    entry = reason(world.tick(), job)
    assert entry.reason.constraint is constraint
    assert words in entry.reason.text


def test_a_task_that_dies_is_recorded_and_asks_for_a_new_decision(build) -> None:
    world = build(url="sqlite://")
    job = world.ready()
    world.tick()
    handle = world.manager.handle_of(f"dl2:{job.slug}:worker-0")
    world.manager.end(handle, RmJobState.FAILED, "exit status 3")
    report = world.tick()
    failed = [task for task in world.store.tasks(live=False, job=job) if task.state is TaskState.FAILED]
    assert [(task.id, task.note) for task in failed] == [("worker-0", "exit status 3")]
    assert report.decided
    entry = reason(report, job)
    (why,) = entry.guarded
    text = "1 attempt in a row to start its tasks failed, the last: worker-0: exit status 3; "
    assert why == Reason(Constraint.BACKOFF, text + "the next one comes 10 s after it")
    assert report.plan.starts == ()
    report = world.tick()
    assert report.decided
    assert [start.role for start in report.plan.starts] == [Role.WORKER]
    assert f"dl2:{job.slug}:worker-4" in {task.tag for task in world.manager.submitted}  # ids are never used again


def test_tasks_that_keep_dying_before_they_join_end_the_job(build) -> None:
    world = build(timeouts=Timeouts(start_failures=3))
    job = world.ready(max_workers=1, max_ps=1)
    began = world.now
    started: list[float] = []
    for _ in range(9):
        world.tick()
        for rm_job in world.manager.live():
            if ":worker-" in rm_job.tag:
                started.append(world.now - began)
                world.manager.end(rm_job.handle, RmJobState.FAILED, "exit status 1: no module named x")
    # A failure is seen at the next tick, 10 s after the start; then it waits 10 s, and 20 s after the second one.
    assert started == [10.0, 30.0, 60.0]
    ended = world.job(job)
    assert ended.state is JobState.FAILED
    assert "no module named x" in ended.end_reason
    world.settle(15)
    assert world.manager.live() == ()


def test_tasks_of_one_attempt_that_die_in_different_ticks_are_one_failure(build) -> None:
    world = build(timeouts=Timeouts(start_failures=3))
    job = world.ready(max_workers=1, max_ps=1)
    began, started = world.now, []
    for _ in range(9):
        report = world.tick()
        started += [(world.now - began, len(report.plan.starts))] if report.plan.starts else []
        # The worker ends before the parameter server.
        for rm_job in sorted(world.manager.live(), key=lambda each: each.tag, reverse=True)[:1]:
            if ":anchor" not in rm_job.tag:
                world.manager.end(rm_job.handle, RmJobState.FAILED, "exit status 1")
    assert started == [(10.0, 2), (30.0, 2), (60.0, 2)]
    assert world.job(job).state is JobState.FAILED


def test_waiting_tasks_that_the_manager_loses_again_and_again_delay_the_next_and_do_not_soon_end_the_job(build) -> None:
    """A queue is full, and the manager forgets what waits, as YARN's does at each restart of the daemon."""
    world = build(timeouts=Timeouts(unseen_listings=1, unseen_seconds=0.0, start_failures=3))
    job = world.ready(max_workers=1, max_ps=1)
    world.manager.pending = True
    began, starts, why = world.now, [], None
    for _ in range(400):
        waiting = [rm_job.handle for rm_job in world.manager.live() if ":anchor" not in rm_job.tag]
        world.manager.unlisted.update(waiting)
        report = world.tick()
        starts += [world.now - began] if report.plan.starts else []
        why = next(iter(reason(report, job).guarded), why)
        world.beat()
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    # The loss is seen 10 s after the start, and the delay doubles up to 600 s.
    assert gaps == [20.0, 30.0, 50.0, 90.0, 170.0, 330.0, 610.0, 610.0, 610.0, 610.0, 610.0]
    assert world.job(job).state is JobState.READY
    assert why.constraint is Constraint.BACKOFF
    assert "is not listed any more" in why.text
    world.manager.pending = False
    world.manager.unlisted.clear()
    world.settle(3)
    world.settle(70, 10.0)
    assert world.has(job) == (1, 1)
    assert world.store.guard_state().start_failures == {}


def test_a_job_whose_nodes_fail_whenever_its_tasks_start_ends_after_ten_times_as_many_attempts(build) -> None:
    world = build(timeouts=Timeouts(start_failures=1, start_seconds=5000, silent_seconds=5000))
    job = world.ready(max_workers=1, max_ps=1)
    attempts = 0
    while world.job(job).state is JobState.READY:
        world.tick(650.0)
        tasks = [rm_job for rm_job in world.manager.live() if ":anchor" not in rm_job.tag]
        attempts += bool(tasks)
        for rm_job in tasks:
            world.manager.end(rm_job.handle, RmJobState.LOST, "NODE_FAIL")
        world.beat()
    assert attempts == 10
    assert world.job(job).state is JobState.FAILED


def test_tasks_that_are_preempted_again_and_again_never_end_the_job(build) -> None:
    world = build(timeouts=Timeouts(start_failures=1, start_seconds=5000, silent_seconds=5000))
    job = world.ready(max_workers=1, max_ps=1)
    starts, why = 0, None
    for _ in range(80):
        report = world.tick(350.0)
        starts += bool(report.plan.starts)
        why = next(iter(reason(report, job).guarded), why)
        for rm_job in world.manager.live():
            if ":anchor" not in rm_job.tag:
                world.manager.end(rm_job.handle, RmJobState.PREEMPTED, "for a job of higher priority")
        world.beat()
    assert starts >= 25  # at most once in 600 s
    assert world.job(job).state is JobState.READY
    assert why.constraint is Constraint.BACKOFF
    assert "for a job of higher priority" in why.text
    world.settle(70, 10.0)
    assert world.has(job) == (1, 1)
    assert world.store.guard_state().start_failures == {}


def test_the_reason_of_what_ended_with_an_error_has_the_place_of_its_output(build) -> None:
    """As of a task on whose node there is no dl2-run, so that nobody reports its last lines."""
    world = build(timeouts=Timeouts(start_failures=1), output="{cwd}/dl2-{id}/{name}.out", url="sqlite://")
    job, other = world.submit(max_workers=1, max_ps=1), world.submit(max_workers=1, max_ps=1)
    world.tick()
    world.beat()
    world.tick()
    for rm_job in world.manager.live():
        if rm_job.tag in (f"dl2:{job.slug}:worker-0", f"dl2:{other.slug}:anchor"):
            world.manager.end(rm_job.handle, RmJobState.FAILED, "exit status 127")
    for _ in range(2):
        world.tick()
    said = "exit status 127; its output: /home/ann/dl2-{}/{}.out"
    assert world.job(job).end_reason == (
        "1 attempt in a row to start its tasks failed; the last: worker-0: " + said.format(1, "worker-0")
    )
    assert world.job(other).end_reason == "its coordinator ended: " + said.format(2, "anchor")
    assert {task.note for task in world.store.tasks(live=False, job=job)} >= {said.format(1, "worker-0")}


def test_starts_that_the_manager_refuses_are_tried_again_less_and_less_often(build) -> None:
    world = build(timeouts=Timeouts(start_failures=1))
    job = world.ready(max_workers=2, max_ps=2)
    world.manager.refuse = Rejected("sbatch", said="Job violates accounting/QOS policy")
    began, starts, why = world.now, [], None
    for _ in range(200):
        report = world.tick()
        starts += [world.now - began] if report.plan.starts else []
        why = next(iter(reason(report, job).guarded), why)
        world.beat()
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert gaps == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0]
    assert why.constraint is Constraint.BACKOFF
    assert "start worker-16 on n1: sbatch: Job violates accounting/QOS policy; the next one comes 600 s" in why.text
    assert world.job(job).state is JobState.READY
    world.manager.refuse = None
    world.settle(70, 10.0)
    assert world.has(job) == (2, 2)
    assert world.store.guard_state().start_failures == {}


def test_a_job_that_trains_and_whose_new_workers_die_asks_for_them_less_and_less_often_and_trains_on(build) -> None:
    """As on a node whose GPU is broken."""
    world = build(timeouts=Timeouts(start_failures=2))
    job = world.ready(max_workers=1, max_ps=1)
    world.settle()
    request = replace(world.job(job).request, max_workers=2)
    world.store.change_job(job, JobChange(request=request), world.now)
    began, starts = world.now, []
    for _ in range(120):
        report = world.tick()
        starts += [world.now - began] if report.plan.starts else []
        for rm_job in world.manager.live():
            if ":worker-" in rm_job.tag and not rm_job.tag.endswith(":worker-0"):
                world.manager.end(rm_job.handle, RmJobState.FAILED, "exit status 1: no CUDA device")
        world.beat()
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert gaps == [20.0, 30.0, 50.0, 90.0, 170.0, 330.0]
    assert (world.job(job).state, world.has(job)) == (JobState.RUNNING, (1, 1))
    world.settle(65, 10.0)
    assert world.has(job) == (2, 1)
    assert world.store.guard_state().start_failures == {}


@pytest.mark.parametrize("state", [RmJobState.CANCELLED, RmJobState.LOST])
def test_tasks_that_are_preempted_before_they_join_delay_the_next_and_do_not_soon_end_the_job(build, state) -> None:
    world = build(timeouts=Timeouts(start_failures=3))
    job = world.ready(max_workers=1, max_ps=1)
    began, starts = world.now, []
    for _ in range(30):
        starts += [world.now - began] if world.tick().plan.starts else []
        for rm_job in world.manager.live():
            if ":anchor" not in rm_job.tag:
                world.manager.end(rm_job.handle, state, "preempted")
        world.beat()
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert gaps == [20.0, 30.0, 50.0, 90.0]
    assert world.job(job).state is JobState.READY


def test_a_task_that_ran_and_is_not_listed_any_more_is_a_failed_start(build) -> None:
    world = build(timeouts=Timeouts(unseen_listings=1, unseen_seconds=0.0, start_failures=1))
    job = world.ready(max_workers=1, max_ps=1)
    world.tick()
    world.tick(1.0)  # seen running
    world.manager.unlisted.update(rm_job.handle for rm_job in world.manager.live() if ":worker-" in rm_job.tag)
    world.tick()
    world.tick()
    assert world.job(job).state is JobState.FAILED


def test_an_anchor_that_ends_takes_its_tasks_along(world: World) -> None:
    job = world.settled()
    world.manager.end(world.manager.handle_of(f"dl2:{job.slug}:anchor"), RmJobState.FAILED, "signal 9")
    for _ in range(20):
        world.tick(1.0)
    ended = world.job(job)
    assert (ended.state, ended.end_reason) == (JobState.FAILED, "its coordinator ended: signal 9")
    assert world.manager.live() == ()


def test_how_tasks_and_anchors_ended_that_are_not_listed_any_more_is_asked_of_the_resource_manager(build) -> None:
    """As after a time in which the daemon was away, and the resource manager has forgotten what ended meanwhile."""
    world = build(url="sqlite://")
    key = world.ready()
    world.settle()
    (worker, *_) = (task for task in world.tasks() if task.role is Role.WORKER)
    listed = {job.handle: job for job in world.manager.listing().jobs}
    anchor = world.job(key).anchor
    world.accounted = [
        structs.replace(listed[worker.handle], state=RmJobState.FAILED, reason="FAILED, exit status 3", tag=""),
        structs.replace(listed[anchor], state=RmJobState.DONE),
    ]
    world.manager.unlisted = set(listed)
    world.now += 1000  # the coordinator does not call any more
    for _ in range(2):
        world.tick(15.0)
    assert world.asked_states == []
    world.tick(15.0)
    assert {worker.handle, anchor} <= set(world.asked_states)
    job = world.job(key)
    assert (job.state, job.end_reason) == (JobState.FINISHED, "its coordinator ended: done")
    (gone,) = (task for task in world.store.tasks(live=False) if task.tag == worker.tag)
    assert (gone.state, gone.note) == (TaskState.RELEASED, "FAILED, exit status 3")


@pytest.mark.parametrize("late", ["does not answer", "says that the job runs"])
@pytest.mark.parametrize("told", [True, False])
def test_how_an_anchor_ended_is_asked_again_for_ten_minutes(build, late: str, told: bool) -> None:
    """Accounting comes back later than the resource manager, as when a machine starts that has both."""
    world = build(url="sqlite://")
    key = world.ready()
    world.settle()
    listed = {job.handle: job for job in world.manager.listing().jobs}
    anchor = listed[world.job(key).anchor]
    if late == "does not answer":
        world.no_accounting = Unavailable("sacct failed", said="Connection refused")
    else:
        world.accounted = [anchor]
    world.manager.unlisted = set(listed)
    world.now += 1000
    for _ in range(36):
        world.tick(15.0)
    assert not world.job(key).state.ended
    assert len(world.tasks(key)) == len(listed) - 1
    assert world.asked_states.count(anchor.handle) == 9  # once a minute
    if told:
        world.no_accounting, world.accounted = None, [structs.replace(anchor, state=RmJobState.DONE)]
    for _ in range(6):
        world.tick(15.0)
    job = world.job(key)
    assert job.state is (JobState.FINISHED if told else JobState.LOST)
    assert world.tasks(key) == ()


@pytest.mark.parametrize("error", [None, Unavailable("sacct does not answer")])
def test_what_the_resource_manager_knows_nothing_of_is_lost(build, error) -> None:
    world = build()
    world.no_accounting = error
    key = world.ready()
    other = structs.replace(world.manager.listing().jobs[0], submitted=17, state=RmJobState.DONE, tag="")
    world.accounted = [other]  # the id was given to another job
    world.manager.unlisted = {world.job(key).anchor}
    world.now += 1000
    for _ in range(3 if error is None else 42):
        world.tick(15.0)
    assert (world.job(key).state, world.job(key).end_reason) == (
        JobState.LOST,
        "its coordinator is not listed any more",
    )


@pytest.mark.parametrize("policy", [Drf(), Fifo(), Optimus()], ids=lambda policy: policy.name)
def test_while_a_node_is_not_listed_its_tasks_and_all_others_run_on(build, monkeypatch, policy) -> None:
    world = build(policy=policy, slot_seconds=1.0)
    job = world.settled(max_workers=16, max_ps=4)
    before = world.tasks(job)
    node = before[-1].node
    listing = world.manager.listing

    def listing_without_node(*arguments: Any, **more: Any) -> RmListing:
        found = listing(*arguments, **more)
        return replace(found, nodes=tuple(each for each in found.nodes if each.name != node))

    monkeypatch.setattr(world.manager, "listing", listing_without_node)
    for _ in range(5):
        report = world.tick()
        world.beat()
    (shown,) = (each for each in report.snapshot.nodes if each.name == node)
    assert (shown.state, shown.capacity, shown.remark) == (NodeState.DRAINING, shown.used, "not listed")
    assert world.tasks(job) == before
    world.manager.unlisted = {task.handle for task in before if task.node == node}
    for _ in range(10):
        report = world.tick()
        world.beat()
    assert node not in {each.name for each in report.snapshot.nodes}
    assert node not in world.nodes_of(job)


def test_an_anchor_whose_coordinator_calls_while_the_listing_is_read_is_not_lost(world: World) -> None:
    """Of a slow listing each call is later than the time at which the listing was asked for."""
    key = world.ready()
    world.manager.unlisted = {world.job(key).anchor}
    for _ in range(6):
        world.store.report_progress(key, Progress(at=world.now + 17.0))
        world.tick(15.0)
    assert world.job(key).state is JobState.READY


@pytest.mark.parametrize(
    ("accounting", "state", "after"),
    [("says how it ended", JobState.FAILED, 600), ("knows nothing", JobState.LOST, 600),
     ("says that it runs", JobState.LOST, 1200), ("does not answer", JobState.LOST, 1200)],
)  # fmt: skip
def test_a_job_whose_anchor_is_gone_gets_no_tasks_and_ends_although_its_coordinator_calls(
    build, accounting: str, state: JobState, after: float
) -> None:
    """Its coordinator was started outside of its batch job, which has ended while no tick looked."""
    world = build(url="sqlite://")
    key = world.settled(max_workers=2, max_ps=1)
    anchor = next(job for job in world.manager.listing().jobs if job.handle == world.job(key).anchor)
    if accounting == "says how it ended":
        world.accounted = [structs.replace(anchor, state=RmJobState.FAILED, reason="TIMEOUT")]
    elif accounting == "says that it runs":
        world.accounted = [anchor]
    elif accounting == "does not answer":
        world.no_accounting = Unavailable("sacct failed", said="Connection refused")
    world.manager.unlisted = {anchor.handle}
    submitted, left = len(world.manager.submitted), {task.id for task in world.tasks(key)}
    missing_since = world.now + 10.0
    while not world.job(key).state.ended and world.now < missing_since + 3600:
        world.tick()
        world.beat()
        if world.now == missing_since + 100:
            gone = next(task for task in world.tasks(key) if task.role is Role.WORKER)
            world.manager.end(gone.handle, RmJobState.CANCELLED, "preempted")
            left.remove(gone.id)
        elif world.now == missing_since + 300:
            assert {task.id for task in world.tasks(key)} == left
    assert world.job(key).state is state
    assert world.now - missing_since == after
    assert len(world.manager.submitted) == submitted
    for _ in range(4):
        world.tick()
    assert world.tasks(key) == ()


def test_an_anchor_that_is_listed_again_goes_on(build) -> None:
    world = build()
    key = world.settled(max_workers=2, max_ps=1)
    world.manager.unlisted = {world.job(key).anchor}
    for _ in range(50):
        world.tick()
        world.beat()
    for reason in ((), ("torn record",)):
        world.manager.incomplete = reason
        world.manager.unlisted = set() if not reason else {world.job(key).anchor}
        for _ in range(100):
            world.tick()
            world.beat()
    assert (world.job(key).state, world.has(key)) == (JobState.RUNNING, (2, 1))
    assert world.asked_states == []


def test_a_refused_start_is_a_failure_and_a_manager_that_does_not_answer_is_not_asked_again(build) -> None:
    world = build(url="sqlite://")  # the store in memory drops tasks that have ended
    job = world.ready()
    world.manager.refuse = Rejected("sbatch", said="Invalid account")
    report = world.tick()
    assert [failure.error for failure in report.outcome.failures] == ["sbatch: Invalid account"] * 8
    assert [task.state for task in world.store.tasks(live=False, job=job)] == [TaskState.FAILED] * 8
    world.manager.refuse = Unavailable("sbatch", said="timed out")
    assert len(world.tick().outcome.failures) == 1
    (unanswered,) = world.tasks(job)
    assert unanswered.state is TaskState.ASKED
    notes = Counter(task.note for task in world.store.tasks(live=False, job=job))
    assert notes["not submitted: the resource manager did not answer for another task"] == 7


def test_a_job_that_the_manager_refuses_to_stop_does_not_end_ticks(build, monkeypatch) -> None:
    world = build()
    key = world.ready()
    world.settle()
    world.store.change_job(key, JobChange(state=JobState.CANCELLED), world.now)
    asked = []

    def refuse(jobs, grace):
        asked.append(len(jobs))
        raise Denied("scancel", said="Access/permission denied")

    monkeypatch.setattr(world.manager, "stop", refuse)
    other = world.ready()
    for _ in range(3):
        world.tick(1.0)
    assert len(asked) == 1
    world.tick(100.0)
    assert len(asked) == 2
    assert world.job(other).state is JobState.READY
    assert [task for task in world.tasks() if task.job == other]


def test_what_a_tick_has_found_is_not_lost_when_the_manager_does_not_answer_a_stop(build, monkeypatch) -> None:
    """It is written before: the tasks and jobs whose changes it follows from have changed in the store."""
    world = build()
    cancelled = world.settled(max_workers=1, max_ps=1)
    key = world.ready(max_workers=1, max_ps=1)
    world.tick(1.0)
    world.manager.end(world.manager.handle_of(f"dl2:{key.slug}:worker-0"), RmJobState.FAILED, "exit status 1")
    world.store.change_job(cancelled, JobChange(state=JobState.CANCELLED), world.now)

    def not_answered(jobs, grace):
        raise Unavailable("scancel did not answer within 30 s")

    with monkeypatch.context() as patched:
        patched.setattr(world.manager, "stop", not_answered)
        with pytest.raises(Unavailable):
            world.tick(1.0)
    world.tick(1.0)
    failures = world.store.guard_state().start_failures[key]
    assert (failures.own, failures.last.startswith("worker-0")) == (1, True)
    assert world.manager.stopped


def test_a_manager_that_does_not_answer_is_asked_for_one_anchor_in_a_tick(build, monkeypatch) -> None:
    world = build()
    keys = [world.submit() for _ in range(3)]
    world.manager.refuse = Unavailable("no process can be started")
    asked: list[str] = []
    submit = world.manager.submit
    monkeypatch.setattr(world.manager, "submit", lambda task: (asked.append(task.job.id), submit(task))[1])
    world.tick()
    world.tick()
    assert asked == ["1", "2"]
    world.manager.refuse = None
    world.tick()
    assert [bool(world.job(key).anchor) for key in keys] == [True] * 3


def test_an_anchor_whose_start_is_never_answered_keeps_no_others_waiting(build, monkeypatch) -> None:
    world = build()
    keys = [world.submit() for _ in range(5)]
    submit = world.manager.submit

    def unless_stuck(task):
        if task.job in (keys[0], keys[1]):
            raise Unavailable("sbatch did not answer within 30 s")
        return submit(task)

    monkeypatch.setattr(world.manager, "submit", unless_stuck)
    for _ in range(3):
        world.tick()
    assert [bool(world.job(key).anchor) for key in keys] == [False, False, True, True, True]


def start_fails_unexpectedly(
    world: World, monkeypatch, key, *, times: int, after_start: bool = False, error: Exception | None = None
) -> list[float]:
    """The next starts of a job's anchor end with an error, by default of a plug-in; returns when they are tried."""
    submit, tried = world.manager.submit, []

    def broken(task):
        if task.job != key:
            return submit(task)
        tried.append(world.now)
        if len(tried) <= times:
            if after_start:
                submit(task)
            raise error or KeyError("a bug of a plug-in")
        return submit(task)

    monkeypatch.setattr(world.manager, "submit", broken)
    return tried


def test_an_anchor_whose_start_ends_unexpectedly_is_started_again_less_and_less_often(build, monkeypatch) -> None:
    world = build(timeouts=Timeouts(start_failures=3))
    failed, other = (world.submit(max_workers=1, max_ps=1) for _ in range(2))
    tried = start_fails_unexpectedly(world, monkeypatch, failed, times=2)
    began = world.now
    world.tick()
    assert world.job(other).anchor
    assert world.job(failed).state is JobState.SUBMITTED
    why = "its coordinator was not started, and will be tried again: its start ended unexpectedly, the daemon's log"
    assert world.job(failed).end_reason.startswith(why)
    assert "KeyError('a bug of a plug-in')" in world.job(failed).end_reason
    for _ in range(4):
        world.tick(5.0)
        world.tick(5.0)
    assert [at - began for at in tried] == [10.0, 20.0, 40.0]
    assert (world.job(failed).state, world.job(failed).end_reason) == (JobState.SUBMITTED, "")
    assert world.job(failed).anchor
    assert world.store.guard_state().start_failures == {}
    world.beat()
    world.settle()
    assert world.has(failed) == (1, 1)


def test_a_job_whose_anchor_cannot_be_started_fails_by_the_rule_of_failed_attempts(build, monkeypatch) -> None:
    world = build(timeouts=Timeouts(start_failures=3), url="sqlite://")
    failed, other = world.submit(), world.submit()
    tried = start_fails_unexpectedly(world, monkeypatch, failed, times=9)
    for _ in range(12):
        world.tick()
    assert len(tried) == 3
    ended = world.job(failed)
    assert ended.state is JobState.FAILED
    assert ended.end_reason.startswith("3 attempts in a row to start its coordinator failed; the last: its start ended")
    assert not world.job(other).state.ended


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError()])
def test_a_passing_fault_of_the_daemons_machine_ends_no_waiting_job(build, monkeypatch, error) -> None:
    world = build(timeouts=Timeouts(start_failures=3))
    key = world.submit()
    tried = start_fails_unexpectedly(world, monkeypatch, key, times=4, error=error)
    began = world.now
    for _ in range(16):
        world.tick()
    assert [at - began for at in tried] == [10.0, 20.0, 40.0, 80.0, 160.0]
    assert world.job(key).anchor


@pytest.mark.parametrize("limit", [1, 3])
def test_an_anchor_that_runs_although_its_start_ended_unexpectedly_is_not_started_twice(
    build, monkeypatch, limit
) -> None:
    world = build(timeouts=Timeouts(start_failures=limit))
    key = world.submit(max_workers=1, max_ps=1)
    tried = start_fails_unexpectedly(world, monkeypatch, key, times=9, after_start=True)
    world.tick()
    assert not world.job(key).anchor
    world.tick(1.0)
    assert world.job(key).anchor
    assert world.store.guard_state().start_failures == {}
    monkeypatch.undo()
    world.settle(8)
    assert len(tried) == 1
    assert world.has(key) == (1, 1)


def test_a_coordinator_that_calls_before_its_start_ends_unexpectedly_has_not_been_ended(build, monkeypatch) -> None:
    world = build()
    key = world.submit(max_workers=1, max_ps=1)
    submit = world.manager.submit

    def broken(task):
        submit(task)
        world.beat()
        raise KeyError("a bug of a plug-in")

    monkeypatch.setattr(world.manager, "submit", broken)
    world.tick()
    assert (world.job(key).state, world.job(key).coordinator_end) == (JobState.READY, "")
    monkeypatch.undo()
    world.settle()
    assert world.has(key) == (1, 1)


def test_an_anchor_whose_command_cannot_be_made_keeps_no_others_waiting(build) -> None:
    world = build()
    broken, other = world.submit(), world.submit()
    world.store.change_job(broken, JobChange(launch=structs.replace(world.job(broken).launch, argv=())), world.now)
    world.tick()
    assert (world.job(broken).state, world.job(broken).anchor) == (JobState.SUBMITTED, "")
    assert "IndexError" in world.job(broken).end_reason
    assert world.job(other).anchor


def test_anchors_of_their_users_are_stopped_however_many_jobs_are_cancelled_at_once(build) -> None:
    world = build()
    keys = [world.submit() for _ in range(230)]
    world.tick()
    for entry in world.manager._entries.values():
        entry.job = structs.replace(entry.job, tag="", submitted=keys[0].submitted)  # as sbatch starts them
    for key in keys:
        world.store.change_job(key, JobChange(state=JobState.CANCELLED, end_reason="by its user"), world.now)
    world.tick()
    assert not world.manager.live()


def test_the_start_of_many_anchors_ends_in_time(build, monkeypatch) -> None:
    world = build(submit_seconds=15.0)
    keys = [world.submit() for _ in range(5)]
    submit = world.manager.submit

    def slowly(task):
        world.elapsed += 6
        return submit(task)

    monkeypatch.setattr(world.manager, "submit", slowly)
    started = []
    for _ in range(2):
        world.tick()
        started.append(sum(bool(world.job(key).anchor) for key in keys))
    assert started == [3, 5]


def test_starts_that_are_not_allowed_yet_are_deferred_with_the_reason(build) -> None:
    world = build(start_allowance=lambda: StartAllowance(1, "Slurm is overloaded"))
    job = world.ready(max_workers=2, max_ps=1)
    report = world.tick()
    assert len(report.outcome.started) == len(report.plan.starts) == 1
    assert sum(item.count for item in report.plan.deferred) == 2
    assert {(item.job, item.postponed, item.nearest) for item in report.plan.deferred} == {
        (job, "Slurm is overloaded", "")
    }
    world.tick()
    world.tick()
    assert world.tasks(job)[-1].handle
    assert len(world.tasks(job)) == 3


def test_a_lost_answer_is_found_again_by_its_tag(build, world: World) -> None:
    """The daemon dies between sbatch and writing down what it answered."""
    job = world.ready(max_workers=1, max_ps=1)
    world.tick()
    before = world.tasks(job)
    # As if only the asking had been persisted: same marks in the manager, no handles in the store.
    fresh = build()
    fresh.now, fresh.manager = world.now, world.manager
    fresh.store.add_job(replace(world.job(job), anchor=""))
    fresh.store.change_job(job, JobChange(state=JobState.READY), fresh.now)
    fresh.store.ask_tasks([Start(task.job, task.role, task.node, task.demand) for task in before], fresh.now)
    count = len(world.manager.submitted)
    fresh.tick(1.0)
    assert len(world.manager.submitted) == count  # nothing doubled
    assert [task.handle for task in fresh.store.tasks(live=True, job=job)] == [task.handle for task in before]


def test_a_start_that_never_reached_the_manager_is_given_up(build) -> None:
    world = build(url="sqlite://")
    job = world.ready(max_workers=1, max_ps=1)
    world.manager.refuse = Unavailable("timed out")
    world.tick()
    world.manager.refuse = None
    for _ in range(3):
        world.tick(20.0)
    notes = {task.note for task in world.store.tasks(live=False, job=job) if task.state is TaskState.FAILED}
    assert "was never started" in notes
    world.settle()
    assert world.has(job) == (1, 1)


def test_what_another_stores_daemon_started_is_left_alone(build, world: World) -> None:
    other = build()
    other.manager, other.coordinator._manager = world.manager, world.manager
    job = other.submit(max_workers=1, max_ps=1)
    other.settle()
    running = world.manager.live()
    world.now += 3600
    report = world.tick()
    assert world.manager.live() == running
    assert [remark.partition(" ")[0] for remark in report.stray_remarks] == [rm_job.handle for rm_job in running]
    assert job is not None
    health = Health(lambda: world.now)
    health.completed(report)
    (problem,) = health.status().problems
    assert problem.startswith(
        "this database does not know 3 running tasks of 1 user with tags of this cluster: another "
    )
    assert b"dl2d_unknown_tasks 3.0" in health.metrics()
    tick_log = TickLog()
    with capture_logs() as logs:
        tick_log.write(report, 0.0)
        tick_log.write(report, 0.0)
    assert [(entry["users"], entry["count"]) for entry in logs if "users" in entry] == [(["ann"], 3)]
    health.completed(
        replace(report, unknown_tasks={}, remarks=("7 of user eve is not stopped (call 555 now)", "8 of user eve, too"))
    )
    (problem,) = health.status().problems
    assert problem == "not stopped: 2 jobs of the resource manager that should end; the daemon's log says why"


def test_a_drained_node_gets_nothing_new_and_keeps_what_it_has(world: World) -> None:
    job = world.settled(max_workers=8, max_ps=1)
    used = world.nodes_of(job)
    assert used == {"n1", "n2", "n3", "n4"}
    world.manager.set_node(structs.replace(make_nodes(4)[0], state=NodeState.DRAINING))
    later = world.settled(worker=Resources.of(cpu=1), ps=Resources.of(cpu=1))
    assert "n1" not in world.nodes_of(later)


class Broken(Drf):
    name = "broken"

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        raise ZeroDivisionError("NaN in the weights")


def test_a_policy_that_fails_is_replaced_by_the_fallback_which_says_so(build) -> None:
    world = build(policy=Broken())
    job = world.ready()
    report = world.tick()
    assert report.decision.policy == "fifo"
    entry = reason(report, job)
    assert entry.allocation == (4, 4)
    assert entry.guarded[0].constraint is Constraint.FALLBACK
    assert "broken" in entry.guarded[0].text


def test_consecutive_failures_of_a_version_are_counted_and_shown_until_a_decision_succeeds(build) -> None:
    broken = Broken()
    world = build(policy=broken)
    health = Health(lambda: world.now)
    world.tick(300.0)
    assert world.tick(300.0).policy_failures.consecutive == 0  # nothing was asked of it: there are no jobs
    world.ready()
    counts = []
    for _ in range(3):
        world.beat()
        health.completed(report := world.tick(300.0))
        counts.append(report.policy_failures.consecutive)
    assert counts == [1, 2, 3]
    (problem,) = health.status().problems
    assert problem.startswith("the fallback made the last 3 decisions: policy broken failed: ZeroDivisionError: NaN")
    broken.decide = Drf().decide
    world.beat()
    health.completed(report := world.tick(300.0))
    assert (report.policy_failures.consecutive, health.status().problems) == (0, ())


@pytest.mark.parametrize(
    ("rules", "want", "constraint"),
    [
        (GuardRules(per_user=Resources.of(gpu=5)), [(4, 4), (1, 1)], Constraint.LIMIT),
        (GuardRules(per_user=Resources.of(gpu=4)), [(3, 3), (1, 1)], Constraint.LIMIT),
        (GuardRules(churn=8), [(4, 4), NOTHING], Constraint.CHURN),
    ],
)
def test_the_guard_changes_a_decision_and_says_why(build, rules, want, constraint) -> None:
    world = build(policy=IgnoresLimits(), rules=rules)
    keys = [world.submit(), world.submit()]
    world.tick()
    world.beat()
    report = world.tick()
    assert [report.decision.allocations()[key] for key in keys] == want
    assert reason(report, keys[1]).guarded[0].constraint is constraint


def test_a_job_gets_its_minimum_size_of_a_share_of_the_cluster_that_another_job_has_and_the_share_is_kept(
    build,
) -> None:
    world = build(policy=IgnoresLimits())
    share = 4.0

    def tick() -> Report:
        listed = [job for job in world.manager.listing().jobs if job.state.holds_resources]
        demands = {task.handle: task.demand for task in world.tasks()}
        used = sum(demands[job.handle].get("gpu") for job in listed if job.handle in demands)
        anchors = frozenset(job.anchor for job in world.store.jobs(live=True))
        limit = GrowthLimit(anchors, {"gpu": share - used}, "elastic jobs may hold 50 %", enforced=False)
        world.manager.growth_limits = (limit,)
        report = world.tick(5.0)
        assert sum(task.demand.get("gpu") for task in world.tasks()) <= share
        world.beat()
        return report

    first = world.ready(max_workers=16, max_ps=1)
    for _ in range(6):
        tick()
    assert world.has(first) == (4, 1)
    second = world.ready(max_workers=16, max_ps=1)
    for _ in range(8):
        report = tick()
    assert (world.has(first), world.has(second)) == ((3, 1), (1, 1))
    assert reason(report, first).guarded[-1].text.endswith(f"yields to the minimum size 1w+1ps of job {second.id}")
    world.slot_seconds = 1.0
    for _ in range(8):
        tick()
        assert (world.has(first), world.has(second)) == ((3, 1), (1, 1))


def test_cool_down_holds_a_job_at_its_size(build) -> None:
    world = build(rules=GuardRules(cooldown_down=60.0))
    first = world.settled(max_workers=8, max_ps=8)
    world.submit(max_workers=8, max_ps=8)
    world.tick(1.0)
    world.beat()
    entry = reason(world.tick(1.0), first)
    assert entry.allocation == (8, 8)
    assert entry.guarded[0].constraint is Constraint.COOLDOWN
    world.slot_seconds = 10.0
    world.now += 60.0
    world.settle()
    assert world.has(first) == (4, 4)


@settings(max_examples=5)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),  # slot of arrival
            st.integers(1, 4),  # cpu of a worker
            st.integers(0, 2),  # gpu of a worker
            st.integers(1, 6),  # most workers
            st.integers(2, 12),  # ticks of training
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([Drf(), Fifo()]),
)
def test_capacity_is_never_exceeded_and_every_job_that_can_run_ends(arrivals, policy) -> None:
    world = World(cluster_nodes=make_nodes(3), policy=policy, url="")
    try:
        keys, left = {}, {}
        for round_number in range(240):
            for number, (slot, cpu, gpu, most, length) in enumerate(arrivals):
                if slot == round_number:
                    keys[number] = world.submit(worker=Resources.of(cpu=cpu, gpu=gpu), max_workers=most, max_ps=most)
                    left[keys[number]] = length
            world.tick(1.0)
            for node in world.manager.listing().nodes:
                assert node.used.fits_in(node.capacity), node
            for job in world.store.jobs(live=True):
                if world.has(job.key).workers:
                    left[job.key] -= 1
                world.beat(job.key, state="finished" if left[job.key] <= 0 else "")
            if len(keys) == len(arrivals) and not world.store.jobs(live=True) and not world.manager.live():
                break  # nothing can come any more
        assert all(world.job(key).state is JobState.FINISHED for key in keys.values())
        assert world.manager.live() == () or world.settle(20) or world.manager.live() == ()
    finally:
        world.close()


def test_packing_takes_up_incumbents_where_they_are(world: World) -> None:
    job = world.settled(max_workers=2, max_ps=1)
    tasks = world.tasks(job)
    report = world.tick(400.0)
    assert report.decided
    assert report.plan.starts == report.plan.stops == ()
    assert world.tasks(job)[0].node == tasks[0].node


def test_a_daemon_that_was_away_gives_coordinators_the_time_to_drain_anew(world: World) -> None:
    first = world.settled(max_workers=8, max_ps=8)
    world.submit(max_workers=8, max_ps=8)
    world.tick(1.0)
    world.coordinator.beat(world.store.jobs(live=True)[1].key, world.now)  # the first is not told
    world.tick(1.0)
    draining = {task.handle for task in world.tasks(first) if task.state is TaskState.DRAINING}
    assert draining
    world.state = TickState(slot=world.state.slot)  # a new daemon
    world.tick(3600.0)
    assert not draining & set(world.manager.stopped)
    world.tick(world.timeouts.drain_seconds + 1)  # still nobody told it
    assert not draining & set(world.manager.stopped)
    world.beat()
    assert world.has(first, state=TaskState.CONFIRMED) == (4, 4)


def test_a_clock_set_back_does_not_make_a_silent_coordinator_one_that_was_told_to_drain(world: World) -> None:
    """Its last call is in the future until the clock has caught up; the task may hold weights of the job."""
    job = world.settled()
    leaving = world.tasks(job)[-1]
    world.store.change_tasks([TaskChange(job, leaving.id, TaskState.DRAINING)], world.now)
    world.now -= 3600.0
    for _ in range(20):
        world.tick(10.0)
    assert leaving.handle not in world.manager.stopped
    for _ in range(8):
        world.store.report_progress(job, Progress(at=world.now))
        world.tick(10.0)
    assert leaving.handle in world.manager.stopped


def test_a_coordinator_that_knows_and_does_not_drain_loses_the_task(world: World) -> None:
    first = world.settled(max_workers=8, max_ps=8)
    world.submit(max_workers=8, max_ps=8)
    second = world.store.jobs(live=True)[1].key
    world.tick(1.0)
    world.coordinator.beat(second, world.now)
    world.tick(1.0)
    draining = {task.handle for task in world.tasks(first) if task.state is TaskState.DRAINING}
    for _ in range(8):
        world.store.report_progress(first, Progress(at=world.now))  # it calls and does nothing
        world.tick(10.0)
    assert draining <= set(world.manager.stopped)


@pytest.mark.parametrize("why", ["its coordinator was ended", "its training is done"])
def test_tasks_that_end_with_their_job_are_not_replaced(world: World, why: str) -> None:
    """The decision in force is of the time when the job still had them."""
    key = world.ready()
    world.tick()
    world.beat()
    world.tick()
    if why == "its training is done":
        world.ending = [key]
    else:
        world.store.change_job(key, JobChange(end_reason="its coordinator got SIGTERM"), world.now)
    world.tick()
    tasks = [task for task in world.tasks(key) if task.state.wanted]
    assert len(tasks) > 1
    before = len(world.manager.submitted)
    for task in tasks:
        world.manager.end(task.handle, RmJobState.DONE)
        assert world.tick().plan.starts == ()
    assert len(world.manager.submitted) == before


def test_a_silent_job_keeps_what_it_has_until_it_calls_again(world: World) -> None:
    first = world.settled(max_workers=8, max_ps=8)
    with capture_logs() as logs:
        world.tick(61.0)
        second = world.submit(max_workers=8, max_ps=8)
        for _ in range(3):
            world.tick(10.0)
            world.coordinator.beat(second, world.now)
        report = world.tick(10.0)
    assert [entry["job"] for entry in logs if entry["event"] == "coordinator is silent"] == [first.id]
    entry = reason(report, first)
    assert (entry.previous, entry.allocation) == ((8, 8), (8, 8))
    # The decision was made when the second job's coordinator had called, 20 s ago.
    assert [(why.constraint, why.text) for why in entry.guarded] == [
        (Constraint.SILENT, "its coordinator had not reported for 81 s: allocation unchanged meanwhile")
    ]
    assert (world.has(first), world.has(second)) == ((8, 8), NOTHING)
    world.settle()
    assert (world.has(first), world.has(second)) == ((4, 4), (4, 4))


def test_no_task_starts_after_a_silence_until_the_coordinator_has_reported_twice(world: World) -> None:
    """Its job may have finished meanwhile, and the first heartbeat may have been under way since before that."""
    key = world.settled()
    for task in world.tasks(key):
        world.manager.end(task.handle, RmJobState.DONE)
    world.tick(61.0)
    before = len(world.manager.submitted)
    world.after_gap = [key]
    for _ in range(3):
        world.beat()
        world.tick()
    assert len(world.manager.submitted) == before
    world.after_gap = []
    world.beat()
    world.tick()
    assert len(world.manager.submitted) > before


def test_a_clock_that_is_set_back_does_not_keep_a_decision_standing(world: World) -> None:
    world.submit()
    world.settle()
    assert not world.tick(1.0).decided
    assert world.tick(-7200.0).decided
    assert not world.tick(1.0).decided


def test_growth_keeps_to_the_limits_listed_at_the_decision_until_the_slot_ends(world: World) -> None:
    job = world.ready(max_workers=8, max_ps=8)
    world.manager.growth_limits = (GrowthLimit(frozenset({world.job(job).anchor}), {"gpu": 2.0}, "QOS small"),)
    world.settle()
    assert world.has(job).workers == 2
    world.manager.growth_limits = ()
    assert not world.tick(1.0).decided
    world.tick(world.slot_seconds)
    world.settle()
    assert world.has(job).workers == 8


def test_what_waits_for_room_is_recorded_with_the_slot(build) -> None:
    world = build(url="sqlite://")
    world.submit(max_workers=8, max_ps=8)
    world.settle()
    second = world.submit(max_workers=8, max_ps=8)
    world.tick(1.0)
    world.coordinator.beat(second, world.now)
    assert world.tick(1.0).decided
    slot = world.store.slot(world.store.last_slot_number())
    assert slot is not None
    waiting = [item for item in slot.plan.deferred if item.job == second]
    assert [(item.role, item.count) for item in waiting] == [(Role.WORKER, 4)]
    assert waiting[0].shortfalls[0].resource == "gpu"


def test_cool_downs_failures_and_stops_are_remembered_over_a_restart(build) -> None:
    world = build(rules=GuardRules(cooldown_up=1000.0, churn=50), timeouts=Timeouts(drain_seconds=5.0))
    key = world.settled(max_workers=8, max_ps=8)
    other = world.submit(max_workers=8, max_ps=8)  # the first job shrinks
    world.settle()
    world.beat(other, state="finished")
    world.manager.end(world.manager.handle_of(f"dl2:{other.slug}:anchor"), RmJobState.DONE, "")
    world.settle()
    memory = world.store.guard_state()
    assert memory.resized_at[key] > 0
    assert memory.started_at
    # The daemon starts again: when the job shrank is known, although the tasks that left are not live any more.
    world.state = TickState(slot=world.store.last_slot_number())
    report = world.tick()
    entry = reason(report, key)
    assert (entry.allocation, [why.constraint for why in entry.guarded]) == ((4, 4), [Constraint.COOLDOWN])


def test_a_cool_down_counts_from_resizes_that_happened_not_from_decisions(world: World) -> None:
    """A job that was to grow and whose start the resource manager refused was not resized."""
    world.rules = GuardRules(cooldown_up=1000.0, backoff=0.0)
    key = world.ready(max_workers=2, max_ps=2)
    world.manager.refuse = Rejected("sbatch", said="Invalid account")
    assert reason(world.tick(), key).allocation == (2, 2)
    assert world.store.guard_state().resized_at == {}
    world.manager.refuse = None
    world.settle()
    confirmed = max(task.since for task in world.tasks(key))
    assert world.store.guard_state().resized_at == {key: confirmed}


def test_a_daemon_that_lost_its_lease_submits_and_stops_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still between a write to the store and the call of the resource manager."""
    key = world.settled(max_workers=2, max_ps=2)
    world.beat(key, state="finished")
    waiting = world.submit()
    stopped: list[object] = []
    monkeypatch.setattr(world.manager, "stop", lambda *given: stopped.append(given))
    submitted = len(world.manager.submitted)

    def lost() -> None:
        raise AlreadyRunning("the store was taken over by another daemon")

    monkeypatch.setattr(world.store, "check_lease", lost)
    allowed = world.allowed
    assert allowed
    for seconds in (1.0, 100.0):
        with pytest.raises(AlreadyRunning):
            world.tick(seconds)
    assert (world.manager.submitted[submitted:], stopped, world.allowed) == ([], [], allowed)
    monkeypatch.undo()
    world.settle()
    assert world.has(waiting) != NOTHING


@pytest.mark.parametrize("mode", Mode)
def test_containers_may_be_changed_in_the_modes_that_act(world: World, mode: Mode) -> None:
    world.mode = mode
    world.tick()
    assert world.allowed == mode.acts


def test_churn_is_counted_for_a_slot_not_for_each_decision_in_it(world: World) -> None:
    world.rules = GuardRules(churn=4)
    first = world.ready(max_workers=2, max_ps=2)
    world.tick(1.0)
    world.beat(first)
    second = world.ready(max_workers=2, max_ps=2)
    report = world.tick(1.0)
    assert report.decided
    entry = reason(report, second)
    assert (entry.allocation, [why.constraint for why in entry.guarded]) == (NOTHING, [Constraint.CHURN])
    world.now += world.slot_seconds
    world.beat()
    entry = reason(world.tick(1.0), second)
    assert (entry.allocation, entry.guarded) == ((2, 2), ())


def test_nothing_is_carried_on_of_jobs_that_are_gone(world: World) -> None:
    for _ in range(5):
        key = world.settled(max_workers=2, max_ps=1)
        world.manager.end(world.manager.handle_of(f"dl2:{key.slug}:worker-0"), RmJobState.FAILED, "exit status 1")
        world.settle()
        world.beat(key, state="finished")
        world.settle(15)
    world.tick(400.0)
    state = world.state
    assert (world.store.guard_state(), state.reconcile_history.calling_since) == (GuardState(), {})


def test_equal_worlds_have_equal_histories(build) -> None:
    """A tick depends on what it is given alone: no clock of its own, nothing hidden."""

    def history() -> bytes:
        world = build(url="sqlite://")
        first = world.settled(max_workers=8, max_ps=8)
        world.submit(worker=Resources.of(cpu=3), max_workers=5)
        world.settle()
        world.beat(first, state="finished")
        world.settle(10)
        slots = [world.store.slot(number) for number in range(1, world.store.last_slot_number() + 1)]
        return encode([slots, world.store.jobs(live=False), world.store.resizes()])

    assert history() == history()


def test_a_policy_that_measures_learns_from_what_coordinators_say(build) -> None:
    """Optimus samples a new kind at several sizes, a slot each, and then runs it at the best: two workers, one PS."""
    world = build(policy=Optimus(), slot_seconds=10.0, url="sqlite://")
    job = world.submit()
    sizes = set()
    for _ in range(40):
        world.tick(5.0)
        now = world.has(job)
        sizes.add(now)
        rate = 100.0 / (1.0 / max(now.workers, 1) + 0.3 * now.workers + 0.1 * now.ps)
        world.beat(job, samples_per_second=rate if min(now) > 0 else None)
    assert len(sizes) > 4
    assert any(size.workers != size.ps for size in sizes)
    assert world.has(job) == Allocation(2, 1)
    slot = world.store.slot(world.store.last_slot_number())
    assert slot is not None
    [measured] = slot.snapshot.speeds
    assert len(measured.points) > 4
    deciders = world.context().deciders
    assert decide(slot.snapshot, deciders, slot.seed) == slot.proposed


def test_no_task_is_started_for_an_anchor_that_is_ending_and_the_job_has_the_anchors_end(build) -> None:
    """Its coordinator is dead, so that tasks fail at once; the resource manager may clean up for minutes."""
    world = build(url="sqlite://")
    key = world.ready(max_workers=3)
    anchor = world.job(key).anchor
    world.tick()
    world.manager._change(anchor, RmJobState.ENDING, "")
    submitted = len(world.manager.submitted)
    for _ in range(10):
        for task in world.tasks(key):
            world.manager.end(task.handle, RmJobState.FAILED, "exit status 1")
        world.tick(5.0)
    assert len(world.manager.submitted) == submitted
    assert not world.job(key).state.ended
    world.manager.end(anchor, RmJobState.FAILED, "OUT_OF_MEMORY")
    world.tick(5.0)
    job = world.job(key)
    assert (job.state, job.end_reason) == (JobState.FAILED, "its coordinator ended: OUT_OF_MEMORY")


@pytest.mark.parametrize("policy", ["fifo", "srtf", "drf", "dl2"])
def test_a_job_that_may_start_nothing_where_it_runs_leaves_the_room_there_to_others(build, policy: str) -> None:
    world = build(policy=load_policy(policy), cluster_nodes=make_nodes(1, cpu=16, gpu=4), url="sqlite://")
    closed = world.settled(max_workers=2, max_ps=1)
    anchor = world.job(closed).anchor
    world.manager.eligible = {anchor: EligibleNodes(frozenset(), "gpu is down")}
    world.manager.end(world.tasks(closed)[0].handle, RmJobState.FAILED, "exit status 1")
    world.tick(5.0)
    other = world.submit(min_workers=3, max_workers=3, max_ps=1)
    world.settle(6)
    assert world.has(closed).workers == 1
    assert world.has(other) == (3, 1)


@pytest.mark.parametrize("policy", ["dl2", "lookahead", "drf", "tetris"])
@pytest.mark.parametrize("closed", ["draining", "not eligible", "not eligible for one", "not listed"])
def test_tasks_stay_on_nodes_that_take_no_new_tasks(build, policy: str, closed: str) -> None:
    """Nodes do not answer for a while, a partition was set down or a maintenance announced, or no node is listed."""

    class Closed(ScriptedManager):
        def listing(self, ended_since: float | None = None, tasks: Collection[Task] | None = None) -> RmListing:
            listing = super().listing(ended_since, tasks)
            if closed == "draining":
                nodes = [structs.replace(node, state=NodeState.DRAINING) for node in listing.nodes]
                return replace(listing, nodes=tuple(nodes))
            if closed == "not listed":
                return replace(listing, nodes=())
            anchors = [job.handle for job in listing.jobs if job.tag.endswith("anchor")]
            anchors = anchors[:1] if closed == "not eligible for one" else anchors
            return replace(listing, eligible_nodes=dict.fromkeys(anchors, EligibleNodes(frozenset(), "gpu is down")))

    world = build(policy=load_policy(policy), url="sqlite://")
    keys = [world.submit(), world.submit()]
    world.settle(10)
    before = [world.has(key) for key in keys]
    assert before == [(4, 4), (4, 4)]
    world.manager.__class__ = Closed
    for number in range(20):
        assert world.tick(5.0).plan.stops == ()
        world.beat()
        if number == 5 and closed != "not eligible for one":
            world.submit()  # it may not start there either, so nothing is taken away for it
    assert [world.has(key) for key in keys] == before


def _drained(world: World, jobs: tuple[JobKey, JobKey]) -> None:
    for node in world.manager.nodes:
        world.manager.set_node(structs.replace(node, used=Resources(), state=NodeState.DRAINING))
    (server,) = (task for task in world.tasks(jobs[0]) if task.role is Role.PS)
    world.manager.end(server.handle, RmJobState.FAILED, "OUT_OF_MEMORY")


def _all_nodes_reserved(world: World, jobs: tuple[JobKey, JobKey]) -> None:
    """No task may start before the maintenance, and all tasks of a job are lost."""
    nowhere = EligibleNodes(frozenset(), "not those of reservation maint")
    world.manager.eligible = {world.job(key).anchor: nowhere for key in jobs}
    for task in world.tasks(jobs[0]):
        world.manager.end(task.handle, RmJobState.LOST, "NODE_FAIL")


def _only_node_of_a_job_down(world: World, jobs: tuple[JobKey, JobKey]) -> None:
    (node,) = (node for node in world.manager.nodes if node.name == "n1")
    world.manager.set_node(structs.replace(node, used=Resources(), state=NodeState.DOWN))


@pytest.mark.parametrize("happens", [_drained, _all_nodes_reserved, _only_node_of_a_job_down])
def test_no_task_ends_for_a_floor_that_no_node_could_hold(build, happens) -> None:
    world = build(cluster_nodes=make_nodes(3, cpu=8), slot_seconds=60.0)
    small: dict[str, Any] = {"worker": Resources.of(cpu=1), "ps": Resources.of(cpu=1), "max_ps": 1}
    jobs = world.submit(min_workers=3, max_workers=7, **small), world.submit(max_workers=30, **small)
    world.tick()
    world.manager.eligible = {world.job(jobs[0]).anchor: EligibleNodes(frozenset({"n1"}), "feature a")}
    world.settle(10)
    lost_node = "n1" if happens is _only_node_of_a_job_down else ""
    before = {task.id for task in world.tasks(jobs[1]) if task.node != lost_node}
    assert (len(before) >= 15, world.nodes_of(jobs[0])) == (True, {"n1"})
    happens(world, jobs)
    for _ in range(20):
        report = world.tick(20.0)
        assert report.plan.stops == ()
        world.beat()
    assert {task.id for task in world.tasks(jobs[1])} == before
    (entry, _) = report.slot_decision.in_force.jobs
    (why,) = entry.guarded
    assert (why.constraint, why.gave_way) == (Constraint.CAPACITY, Constraint.FLOOR)
    assert why.text.startswith("it has fewer tasks than its floor 3w+1ps for now: ")


@pytest.mark.parametrize("policy", ["fifo", "srtf", "drf", "tetris", "optimus", "lookahead", "dl2"])
def test_a_job_without_room_for_a_lost_server_keeps_its_tasks_and_so_do_others_while_all_nodes_are_drained(
    build, policy: str
) -> None:
    world = build(policy=load_policy(policy), cluster_nodes=make_nodes(3, cpu=8), slot_seconds=60.0)
    small: dict[str, Any] = {"worker": Resources.of(cpu=1), "ps": Resources.of(cpu=1), "max_ps": 2}
    jobs = [world.submit(max_workers=6, **small), world.submit(max_workers=12, **small)]
    world.settle(10)
    for node in world.manager.nodes:
        world.manager.set_node(structs.replace(node, used=Resources(), state=NodeState.DRAINING))
    server = next(task for task in world.tasks(jobs[0]) if task.role is Role.PS)
    before = set(world.tasks()) - {server}
    world.manager.end(server.handle, RmJobState.FAILED, "OUT_OF_MEMORY")
    for _ in range(8):
        assert world.tick(20.0).plan.stops == ()
        world.beat()
    assert set(world.tasks()) == before


@pytest.mark.parametrize("policy", ["fifo", "srtf", "drf", "tetris", "optimus", "lookahead", "dl2"])
def test_no_task_ends_for_what_a_job_lacks_of_its_floor_that_has_room_only_without_the_floors_of_others(
    build, policy: str
) -> None:
    """A node of the first job is lost; the second, on the third node, cannot give up enough for a large worker."""
    world = build(policy=load_policy(policy), cluster_nodes=make_nodes(3, cpu=8, gpu=0), slot_seconds=60.0)
    servers: dict[str, Any] = {"ps": Resources.of(cpu=1), "max_ps": 1}
    first = world.submit(worker=Resources.of(cpu=7), min_workers=2, max_workers=2, **servers)
    world.settle(10)
    second = world.submit(worker=Resources.of(cpu=1), min_workers=2, max_workers=6, **servers)
    world.settle(10, 8.0)
    before = world.has(second)
    assert world.has(first) == (2, 1)
    lost = next(task.node for task in world.tasks(first) if task.role is Role.WORKER)
    (node,) = (node for node in world.manager.nodes if node.name == lost)
    world.manager.set_node(structs.replace(node, used=Resources(), state=NodeState.DOWN))
    for _ in range(8):
        assert world.tick(20.0).plan.stops == ()
        world.beat()
    assert world.has(first)[0] == 1
    assert world.has(second)[1] == before[1]


def test_a_job_whose_anchor_is_suspended_gets_no_tasks_and_avoids_no_nodes(world: World) -> None:
    key = world.settled()
    before = {task.id for task in world.tasks(key)}
    anchor = next(job for job in world.manager.live() if job.handle == world.job(key).anchor)
    world.manager.put(structs.replace(anchor, not_executing=True), ())
    says = "its coordinator is suspended, or its nodes are being prepared: "
    assert reason(world.tick(), key).binding_reason.text.startswith(says)
    for task in world.tasks(key):  # they hear nothing of their coordinator
        world.manager.end(task.handle, RmJobState.FAILED, "FAILED, exit status 1")
    for _ in range(5):
        report = world.tick()
    assert not world.tasks(key)
    assert reason(report, key).guarded[0].text.startswith(says)
    assert not world.store.guard_state().avoided_nodes
    world.manager.put(anchor, ())
    world.settle()
    assert world.has(key) != (0, 0)
    assert before.isdisjoint({task.id for task in world.tasks(key)})
