"""Modes, and what is kept of jobs that another scheduler runs; on each database."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs
from sqlalchemy import text
from store.samples import a_job, a_slot, starts

from dl2d.core.backoff_after_failed_starts import StartFailures
from dl2d.core.cluster import TaskState
from dl2d.core.daemon_mode_and_canary import Mode, ModeChange
from dl2d.core.jobs import NO_LAUNCH, JobState, Progress
from dl2d.core.resize_guard_state import GuardState
from dl2d.core.resources import NO_RESOURCES
from dl2d.core.store import JobChange, TaskChange
from dl2d.store.sql_store import SqlStore


def test_the_guards_memory_is_replaced_as_a_whole(store: SqlStore) -> None:
    key = a_job().key
    assert store.guard_state() == GuardState()
    for memory in (
        GuardState(
            resized_at={key: 5.25}, started_at={"dl2:main.1.5:worker-0": 5.0},
            start_failures={key: StartFailures(2, "worker-0: exit status 1", 4.5)}, stops_asked={"17": 3.0},
        ),
        GuardState(),
    ):  # fmt: skip
        store.keep_guard_state(memory)
        assert store.guard_state() == memory


def test_a_damaged_memory_counts_as_none_and_is_logged_once(
    store: SqlStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.keep_guard_state(GuardState(stops_asked={"17": 3.0}))
    with store._database.writing("test") as connection:
        connection.execute(text("UPDATE guard_memory SET memory = '{\"stops_asked'"))
    for _ in range(2):
        assert store.guard_state() == GuardState()
    assert capsys.readouterr().out.count("guard_state_lost") == 1


def test_every_change_of_mode_is_kept_and_no_change_is_none(store: SqlStore) -> None:
    assert store.mode_changes() == ()
    entered = [
        store.enter_mode(mode, at=float(at), by="process 7", reason=reason)
        for at, (mode, reason) in enumerate(
            [(Mode.OBSERVE, "start"), (Mode.OBSERVE, "start"), (Mode.SHADOW, "reload"), (Mode.LIVE, "reload")]
        )
    ]
    assert entered == [
        ModeChange(0.0, None, Mode.OBSERVE, "process 7", "start"),
        None,
        ModeChange(2.0, Mode.OBSERVE, Mode.SHADOW, "process 7", "reload"),
        ModeChange(3.0, Mode.SHADOW, Mode.LIVE, "process 7", "reload"),
    ]
    assert store.mode_changes() == tuple(change for change in reversed(entered) if change)
    assert store.mode_changes(limit=1) == (entered[-1],)


def test_a_slot_keeps_what_dl2d_would_have_done(store: SqlStore) -> None:
    job = a_job(1)
    store.add_job(job)
    plain, guarded = a_slot(1, (job,)), a_slot(2, (job,), guarded=True)
    shadow = replace(guarded, decision=plain.decision, shadow=guarded.decision)
    for slot in (plain, shadow):
        store.record_slot(slot)
    assert (store.slot(1), store.slot(2)) == (plain, shadow)


def test_a_job_is_static_or_not_and_may_declare_later_what_it_asks_for(store: SqlStore) -> None:
    elastic, static = a_job(1), a_job(2, static=True)
    for job in (elastic, static):
        store.add_job(job)
    assert [job.static for job in store.jobs(live=True)] == [False, True]
    request = replace(static.request, name="declared", model="bert", epochs=3.0)
    changed = store.change_job(static.key, JobChange(request=request), 5.0)
    assert changed == replace(static, request=request)
    assert store.find_jobs("declared") == (replace(changed, launch=NO_LAUNCH),)


def test_history_leaves_out_jobs_of_which_only_the_time_is_known(store: SqlStore) -> None:
    begin = 1_000_000
    elastic = a_job(1, submitted=begin, progress=Progress(epoch=1.5))
    unreported = a_job(2, submitted=begin, static=True)
    reported = a_job(3, submitted=begin, static=True, address="n1:1")
    jobs = (elastic, unreported, reported)
    for job in jobs:
        store.add_job(job)
        store.ask_tasks(starts(job), begin + 1)
        store.change_tasks([TaskChange(job.key, "worker-0", TaskState.CONFIRMED)], begin + 1 + len(job.address))
    tasks = store.tasks(live=True)
    slot = a_slot(1, jobs, tasks)
    node = replace_used(slot.snapshot.nodes[0], tasks)
    store.record_slot(
        replace(slot, at=begin + 2.0, snapshot=structs.replace(slot.snapshot, nodes=(node,), tasks=tasks))
    )
    history = store.history(begin, begin + 100)
    assert [job.key.id for job in history.jobs] == ["1", "3"]
    with store._database.reading("a test") as connection:
        epochs = dict(connection.exec_driver_sql("SELECT id, epoch FROM jobs").all())
    assert [epochs[key] is None for key in ("1", "2", "3")] == [False, True, False]
    (state,) = history.cluster_states
    assert set(state.epochs) == {elastic.key, reported.key}
    assert state.nodes[0].used == tasks[0].demand  # what the job that is left out holds is others'
    store.change_job(unreported.key, JobChange(state=JobState.RUNNING), begin + 1.0)
    with_it = store.history(begin, begin + 3601, unreported=True)
    assert [job.key.id for job in with_it.jobs] == ["1", "2", "3"]
    assert with_it.jobs[1].progress.epoch == pytest.approx(1.0)  # the hours that it has run
    assert (with_it.cluster_states[0].nodes[0].used, len(with_it.cluster_states[0].epochs)) == (NO_RESOURCES, 3)
    assert history.starts == (0.0,)  # of the elastic one: nobody asked for the others


def replace_used(node, tasks):
    used = sum((task.demand for task in tasks), NO_RESOURCES)
    return type(node)(node.name, node.capacity, used)
