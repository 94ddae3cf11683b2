"""What holds whatever the order in which the tick and the job API write."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event
from store.samples import a_job, a_slot, starts

from dl2d.core.cluster import TaskState
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.jobs import Allocation, JobState, Progress
from dl2d.core.plan_of_starts_and_stops import Outcome
from dl2d.core.store import JobChange, Slot, TaskChange
from dl2d.store.sql_store import SqlStore

# The store may be shared by examples, because each makes a job of its own.
_EXAMPLES = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
_TASKS = 3
_STEPS = st.tuples(st.integers(0, _TASKS - 1), st.sampled_from(TaskState))


@_EXAMPLES
@given(batches=st.lists(st.lists(_STEPS, max_size=8), max_size=8))
def test_tasks_only_move_forward(store, batches):
    store.add_job(job := a_job(store.next_job_id("main")))
    store.ask_tasks(starts(job, workers=_TASKS), 0.0)
    states = [TaskState.ASKED] * _TASKS
    history = [[(TaskState.ASKED, 0.0)] for _ in states]
    for at, batch in enumerate(batches, start=1):
        moved = set()
        for number, state in batch:
            if state.rank > states[number].rank:
                states[number] = state
                history[number].append((state, float(at)))
                moved.add(f"worker-{number}")
        changes = [TaskChange(job.key, f"worker-{number}", state) for number, state in batch]
        assert {task.id for task in store.change_tasks(changes, float(at))} == moved
    tasks = store.tasks(live=False, job=job.key)
    assert [task.state for task in tasks] == states
    assert [task.since for task in tasks] == [passed[-1][1] for passed in history]
    assert {task.id for task in store.tasks(live=True, job=job.key)} == {
        task.id for task in tasks if not task.state.ended
    }
    resizes = {(resize.task, resize.direction): resize.events for resize in store.resizes(job.key)}
    for number, passed in enumerate(history):
        grown = resizes.pop((f"worker-{number}", "grow"))
        shrunk = resizes.pop((f"worker-{number}", "shrink"), ())
        assert [(event.state, event.at) for event in grown + shrunk] == passed
    assert not resizes


@_EXAMPLES
@given(states=st.lists(st.sampled_from(JobState), max_size=8))
def test_jobs_only_move_forward(any_store, states):
    # The store is the same in every example, and not each one gives ids.
    any_store.add_job(job := a_job(len(any_store.jobs(live=False)) + 1))
    order = {JobState.SUBMITTED: 0, JobState.READY: 1, JobState.RUNNING: 2}
    now, started, ended = JobState.SUBMITTED, None, None
    for at, state in enumerate(states, start=1):
        if not now.ended and order.get(state, 3) > order[now]:
            now = state
            started = float(at) if state is JobState.RUNNING else started
            ended = float(at) if state.ended else None
        got = any_store.change_job(job.key, JobChange(state=state), float(at))
        assert (got.state, got.started_at, got.ended_at) == (now, started, ended)
        assert any_store.job(job.key) == got


_TEXT = st.text(max_size=30)
_COUNTS = st.builds(Allocation, st.integers(0, 10**6), st.integers(0, 10**6))
_REASONS = st.builds(Reason, st.sampled_from(Constraint), _TEXT.filter(lambda text: "\0" not in text))
_FINITE = st.floats(allow_nan=False, allow_infinity=False)


@_EXAMPLES
@given(data=st.data())
def test_any_slot_comes_back_equal(store, data):
    jobs = [a_job(store.next_job_id("main")) for _ in range(data.draw(st.integers(0, 3)))]
    for job in jobs:
        store.add_job(job)

    def decision() -> Decision:
        decided = (
            JobDecision(job.key, data.draw(_COUNTS), data.draw(_REASONS), data.draw(_COUNTS), (), data.draw(guarded))
            for job in jobs
        )
        return Decision("drf", data.draw(_TEXT.filter(lambda text: "\0" not in text)), tuple(decided))

    guarded = st.lists(_REASONS, max_size=2).map(tuple)
    sample = a_slot(store.last_slot_number() + 1, tuple(jobs))
    slot = Slot(
        number=sample.number,
        at=data.draw(_FINITE),
        snapshot=sample.snapshot,
        proposed=decision(),
        decision=decision(),
        plan=sample.plan,
        outcome=Outcome(started=tuple(data.draw(st.lists(_TEXT, max_size=4)))),
        inputs_hash="00",
        seed=data.draw(st.integers(0, 2**128)),
        seconds=data.draw(_FINITE),
    )
    store.record_slot(slot)
    assert store.slot(slot.number) == slot
    assert [store.decisions(job.key)[0].decided for job in jobs] == list(slot.decision.jobs)


def _at_once(*works: Callable[[], None]) -> None:
    """Run works in threads that begin together; the first error of any is raised."""
    barrier = threading.Barrier(len(works), timeout=30)
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            barrier.wait()
            work()
        except BaseException as error:  # noqa: BLE001 (raised below, in the test's thread)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    first=st.lists(st.lists(_STEPS, min_size=1, max_size=4), min_size=5, max_size=12),
    second=st.lists(st.lists(_STEPS, min_size=1, max_size=4), min_size=5, max_size=12),
)
def test_two_writers_move_each_task_through_each_state_once(store, first, second):
    store.add_job(job := a_job(store.next_job_id("main")))
    store.ask_tasks(starts(job, workers=_TASKS), 0.0)
    moves: list[tuple[str, TaskState]] = []

    def write(batches: list[list[tuple[int, TaskState]]]) -> None:
        for batch in batches:
            changes = [TaskChange(job.key, f"worker-{number}", state) for number, state in batch]
            moves.extend((task.id, task.state) for task in store.change_tasks(changes, 1.0))

    _at_once(lambda: write(first), lambda: write(second))
    assert max(Counter(moves).values(), default=1) == 1
    wanted = Counter({f"worker-{number}": 0 for number in range(_TASKS)})
    for number, state in [step for batch in first + second for step in batch]:
        wanted[f"worker-{number}"] = max(wanted[f"worker-{number}"], state.rank)
    assert {task.id: task.state.rank for task in store.tasks(live=False, job=job.key)} == wanted
    for resize in store.resizes(job.key):
        ranks = [event.state.rank for event in resize.events]
        assert ranks == sorted(set(ranks))


def test_many_threads_on_one_store(store):
    """Everything that the tick and the API do, at once: nothing is lost, doubled, or refused."""
    store.add_job(job := a_job(store.next_job_id("main")))
    ids: list[str] = []
    tasks: list[str] = []

    def ask() -> None:
        for at in range(10):
            tasks.extend(task.id for task in store.ask_tasks(starts(job, workers=2), float(at)))

    def number() -> None:
        ids.extend(store.next_job_id("main") for _ in range(10))

    def report() -> None:
        for at in range(10):
            store.report_progress(job.key, Progress(at=float(at), version=at))
            assert store.job(job.key) is not None

    def record() -> None:
        for slot in range(1, 11):
            store.record_slot(a_slot(slot, (job,)))

    _at_once(ask, ask, number, number, report, report, record)
    assert sorted(tasks) == sorted(f"worker-{ordinal}" for ordinal in range(40))
    assert sorted(ids, key=int) == [str(given) for given in range(2, 22)]
    assert store.last_slot_number() == 10
    assert len(store.decisions(job.key)) == 10


def test_two_stores_on_one_database(kept_url):
    with closing(SqlStore(kept_url)) as one, closing(SqlStore(kept_url)) as two:
        ids: list[str] = []
        _at_once(
            *(lambda store=store: ids.extend(store.next_job_id("main") for _ in range(20)) for store in (one, two))
        )
        assert len(set(ids)) == 40
        one.add_job(job := a_job())
        assert two.job(job.key) == job


def test_two_stores_that_read_before_they_write(kept_url):
    """As the daemon and a command line would: neither is refused, and neither overwrites what the other decided."""
    with closing(SqlStore(kept_url)) as one, closing(SqlStore(kept_url)) as two:
        jobs = [a_job(number) for number in range(25)]
        for job in jobs:
            one.add_job(job)
        told: list[set[JobState]] = [set() for _ in jobs]

        def end(store: SqlStore, state: JobState) -> None:
            for number, job in enumerate(jobs):
                store.report_progress(job.key, Progress(at=1.0))
                told[number].add(store.change_job(job.key, JobChange(state=state), 2.0).state)

        _at_once(lambda: end(one, JobState.FINISHED), lambda: end(two, JobState.FAILED))
        assert told == [{job.state} for job in one.jobs(live=False)]


@pytest.mark.parametrize("call", ["ask_tasks", "change_tasks", "record_slot", "jobs", "tasks", "resizes", "slot"])
def test_statements_do_not_grow_with_the_batch(store, call):
    statements: list[str] = []
    event.listen(store._database.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    counts = []
    for size in (2, 150):
        jobs = tuple(a_job(store.next_job_id("main")) for _ in range(size))
        for job in jobs:
            store.add_job(job)
        asked = [start for job in jobs for start in starts(job, ps=1)]
        tasks = store.ask_tasks(asked, 1.0)
        slot = a_slot(size, jobs, tasks)
        store.record_slot(slot)
        work = {
            "ask_tasks": lambda asked=asked: store.ask_tasks(asked, 2.0),
            "change_tasks": lambda tasks=tasks: store.change_tasks(
                [TaskChange(task.job, task.id, TaskState.DRAINING) for task in tasks], 3.0
            ),
            "record_slot": lambda slot=slot, jobs=jobs: store.record_slot(a_slot(slot.number + 1, jobs)),
            "jobs": lambda: store.jobs(live=True),
            "tasks": lambda: store.tasks(live=True),
            "resizes": store.resizes,
            "slot": lambda slot=slot: store.slot(slot.number),
        }
        statements.clear()
        work[call]()
        counts.append(len(statements))
    assert counts[0] == counts[1] <= 8
