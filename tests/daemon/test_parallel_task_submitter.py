"""Starts are submitted in parallel, within a number, and nobody waits for them but the tick."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from daemon.api.api_world import ApiWorld

from dl2d.core.cluster import TaskState
from dl2d.core.errors import AlreadyRunning, Dl2dError, Rejected, StoreUnavailable, Unavailable
from dl2d.core.jobs import JobKey, Owner
from dl2d.core.resource_manager import StartAllowance, TaskSpec
from dl2d.daemon.parallel_task_submitter import ParallelTaskSubmitter
from dl2d.policies.fifo import Fifo
from dl2d.testing import OWNER, make_job, make_nodes
from dl2d.tick.tick_context import Context

SECONDS = 30.0


class Gate:
    """Calls that stop until they are let through, counted."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.changed = threading.Condition()
        self.inside = self.most = self.calls = 0

    def __call__(self) -> None:
        with self.changed:
            self.calls += 1
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.changed.notify_all()
        assert self.open.wait(SECONDS)
        with self.changed:
            self.inside -= 1

    def wait_for(self, inside: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.inside >= inside, SECONDS)


@pytest.fixture
def world() -> Iterator[ApiWorld]:
    world = ApiWorld(cluster_nodes=make_nodes(8), policy=Fifo(), parallel_submits=3)
    yield world
    world.close()


def test_the_api_answers_while_starts_are_submitted(world: ApiWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations and heartbeats; and never are more calls under way than the manager allows."""
    keys = [world.submit() for _ in range(2)]
    world.tick(1.0)
    world.beat()
    world.add_anchor()
    gate, submit, one_at_a_time = Gate(), world.manager.submit, threading.Lock()

    def submit_slowly(task: TaskSpec) -> str:
        gate()
        with one_at_a_time:  # the manager in memory is not made for threads
            return submit(task)

    monkeypatch.setattr(world.manager, "submit", submit_slowly)
    with ThreadPoolExecutor(1) as thread:
        ticking = thread.submit(world.tick)
        try:
            gate.wait_for(3)
            asked = world.tasks()
            assert {task.handle for task in asked} == {""}, "they are persisted before they are submitted"
            assert world.register().status_code == 200
            assert world.heartbeat(keys[0]).status_code == 200
            assert not ticking.done()
        finally:
            gate.open.set()
        report = ticking.result(SECONDS)
    assert gate.most == 3
    assert gate.calls == len(report.plan.starts) == len(report.outcome.started) > 3
    running = {job.tag: job.handle for job in world.manager.live()}
    assert len(asked) == gate.calls
    handles = {task.tag: task.handle for task in world.tasks()}
    assert handles == {task.tag: running[task.tag] for task in asked}


def test_a_manager_that_is_called_by_one_thread_only_still_lets_requests_between(
    world: ApiWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = ApiWorld(cluster_nodes=make_nodes(8), policy=Fifo(), parallel_submits=0)
    alone.ready()
    calls, inside = alone.manager.submit, threading.Lock()

    def submit(task: TaskSpec) -> str:
        assert inside.acquire(blocking=False), "one call at a time"
        assert alone.access.lock.locked()
        try:
            return calls(task)
        finally:
            inside.release()

    monkeypatch.setattr(alone.manager, "submit", submit)
    report = alone.tick()
    assert len(report.outcome.started) == len(report.plan.starts) > 1
    assert not alone.access.lock.locked()
    alone.close()


def test_no_further_batch_is_submitted_once_the_manager_allows_no_start(
    world: ApiWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ready(max_workers=8)
    world.submitter.batch = 2
    allowances = iter([100, 100, 0])

    def limited(make: object = world.context) -> Context:
        return replace(make(), start_allowance=lambda: StartAllowance(next(allowances), "overloaded"))  # type: ignore[operator]

    monkeypatch.setattr(world, "context", limited)
    report = world.tick(1.0)
    assert len(report.outcome.started) == 4 < len(report.plan.starts)
    assert len(world.tasks()) == 4


def test_starts_that_a_tick_has_no_time_for_are_left_to_the_next(
    world: ApiWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not asked for, so that nothing counts as never started; the decision stays the same."""
    key = world.ready(max_workers=8)
    seconds = iter(range(1000))
    world.submitter.batch = 2

    def hurried(make: object = world.context) -> Context:
        return replace(make(), timer=lambda: float(next(seconds)), submit_seconds=2.0)  # type: ignore[operator]

    monkeypatch.setattr(world, "context", hurried)
    first = world.tick(1.0)
    assert 0 < len(first.outcome.started) < len(first.plan.starts)
    assert len(world.tasks()) == len(first.outcome.started)
    for _ in range(8):
        report = world.tick(1.0)
        assert not report.decided
    assert report.plan.starts == ()
    assert {task.state for task in world.store.tasks(live=False, job=key)} <= {TaskState.ASKED, TaskState.GRANTED}
    assert len(world.tasks()) == len(first.plan.starts)


def test_a_user_whose_starts_are_not_answered_keeps_nobody_else_waiting(
    world: ApiWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the name service does not know a user: of theirs a few are tried in each tick, after all others."""
    unknown, known, other_user = world.submit(max_workers=6), JobKey("test", "99", int(world.now)), Owner("bob", 7, 7)
    world.store.add_job(replace(make_job(99, submitted=known.submitted, max_workers=6), key=known, owner=other_user))
    world.tick(1.0)
    world.beat()
    submit, one_at_a_time, tried = world.manager.submit, threading.Lock(), list[str]()

    def submit_unless_unknown(task: TaskSpec) -> str:
        with one_at_a_time:
            tried.append(task.owner.user)
            if task.owner == OWNER and not answers:
                raise Unavailable("no answer")
            return submit(task)

    monkeypatch.setattr(world.manager, "submit", submit_unless_unknown)
    answers = False
    world.tick()
    assert other_user.user not in tried
    tried.clear()
    report = world.tick()
    assert list(dict.fromkeys(tried)) == [other_user.user, OWNER.user]
    assert tried.count(OWNER.user) <= 2
    assert len(report.outcome.started) == tried.count(other_user.user) >= 6
    answers = True
    world.tick()
    tried.clear()
    world.tick()
    assert tried.count(OWNER.user) > 2
    assert {task.job for task in world.tasks()} == {unknown, known}


class _Spec(str):
    __slots__ = ()
    owner = OWNER


def _specs(count: int) -> list[TaskSpec]:
    return [_Spec(f"task {number}") for number in range(count)]  # type: ignore[misc]


def test_after_the_first_that_is_not_answered_none_is_submitted() -> None:
    def submit(task: TaskSpec) -> str:
        if task == "task 1":  # type: ignore[comparison-overlap]
            raise Rejected("no")
        if task == "task 2":
            raise Unavailable("away")
        return f"handle of {task}"

    pool = ParallelTaskSubmitter(submit, 1)
    first, refused, away, *others = pool.submit(_specs(5))
    pool.close()
    assert first == "handle of task 0"
    assert (type(refused), type(away)) == (Rejected, Unavailable)
    assert others == [None, None]


def test_a_call_that_hangs_takes_its_thread_and_nothing_else() -> None:
    gate = Gate()

    def submit(task: TaskSpec) -> str:
        if task == "task 0":  # type: ignore[comparison-overlap]
            gate()
        return str(task)

    pool = ParallelTaskSubmitter(submit, 1, answer_seconds=0.05)
    hanging, left = pool.submit(_specs(2))
    assert isinstance(hanging, Unavailable)
    assert "did not answer the request to start it within 0.05 s" in str(hanging)
    assert left is None
    again, *others = pool.submit(_specs(2))
    assert isinstance(again, Unavailable)
    assert "1 earlier starts have no answer" in str(again)
    assert others == [None]
    gate.open.set()
    (hung,) = pool._hanging
    assert hung.result(SECONDS) == "task 0"
    assert pool.submit(_specs(3)[1:]) == ["task 1", "task 2"]
    pool.close()


def test_a_start_that_ends_unexpectedly_fails_its_task_alone(world: ApiWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    key = world.ready(max_workers=3)
    submit, one_at_a_time = world.manager.submit, threading.Lock()

    def broken(task: TaskSpec) -> str:
        with one_at_a_time:
            if task.name == "worker-1":
                raise KeyError("a bug of a plug-in")
            return submit(task)

    monkeypatch.setattr(world.manager, "submit", broken)
    report = world.tick()
    assert len(report.outcome.started) == len(report.plan.starts) - 1 > 0
    (failure,) = report.outcome.failures
    assert "its start ended unexpectedly, the daemon's log says where" in failure.error
    assert "KeyError('a bug of a plug-in')" in failure.error
    (failed,) = (task for task in world.store.tasks(live=False, job=key) if task.state is TaskState.FAILED)
    assert (failed.id, failed.note) == ("worker-1", failure.error)
    assert len(world.tasks()) == len(report.outcome.started)


@pytest.mark.parametrize(
    "error", [StoreUnavailable("the disk is full"), AlreadyRunning("another daemon has the lease")]
)
def test_an_error_that_is_not_about_a_task_ends_the_tick(
    world: ApiWorld, monkeypatch: pytest.MonkeyPatch, error: Dl2dError
) -> None:
    world.ready(max_workers=3)

    def stopped(_: TaskSpec) -> str:
        raise error

    monkeypatch.setattr(world.manager, "submit", stopped)
    with pytest.raises(type(error), match=str(error)):
        world.tick()
