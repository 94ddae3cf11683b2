"""A database that an earlier version wrote is upgraded and read.

``database_0006.sql`` is what ``sqlite3 FILE .dump`` gives of a store with a few records of each kind, written by the
version whose schema was 0006.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import MetaData, Table, create_engine, insert, text
from store.samples import a_job, a_slot, starts

from dl2d.core.cluster import TaskState
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.jobs import Allocation, JobState, Progress
from dl2d.core.measured_speeds_and_losses import LossPoint, TrainingKind
from dl2d.core.policy_registry import RunState, TrialCase, VersionState
from dl2d.core.store import JobChange
from dl2d.store import schema_version
from dl2d.store.connections_and_transactions import Database, StoreLocation
from dl2d.store.sql_store import SqlStore

_T0 = 1_700_000_000
_DUMP = Path(__file__).with_name("database_0006.sql")


@pytest.fixture(params=["file", pytest.param("postgresql", marks=pytest.mark.postgres)])
def old_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with schema 0006 and its records."""
    file = tmp_path / "old.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(_DUMP.read_text())
    url = f"sqlite:///{file}"
    return url if request.param == "file" else _in_postgresql(url, request.getfixturevalue("postgres_url"))


def _in_postgresql(source: str, target: str) -> str:
    database = Database(StoreLocation.parse(target))
    with create_engine(source).connect() as old, database.writing("making an old database") as connection:
        config = schema_version._config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0006")
        tables = MetaData()
        tables.reflect(connection)
        for table in tables.sorted_tables:
            rows = [dict(row._mapping) for row in old.execute(table.select())]
            if rows and table.name != schema_version.VERSION_TABLE:
                connection.execute(insert(table), rows)
        for view in old.execute(text("SELECT sql FROM sqlite_master WHERE type = 'view'")).scalars():
            connection.execute(text(view))
        connection.execute(text("GRANT SELECT ON decision_history TO PUBLIC"))
    database.close()
    return target


@pytest.fixture
def store(old_url: str) -> Iterator[SqlStore]:
    assert schema_version.current(old_url) == "0006"
    schema_version.upgrade(old_url)
    with closing(SqlStore(old_url)) as store:
        yield store


def test_jobs_and_tasks(store: SqlStore) -> None:
    failed, running, static = store.jobs(live=False)
    assert store.jobs(live=True) == (running, static)
    assert (failed.state, failed.ended_at, failed.end_reason) == (
        JobState.FAILED, _T0 + 92.0, "its worker ran out of memory",
    )  # fmt: skip
    assert static == a_job(3, static=True)
    assert (running.request, running.launch, running.address) == (a_job(2).request, a_job(2).launch, "n1:5000")
    assert running.launch.env
    assert failed.launch == running.launch.without_environment()
    tasks = store.tasks(live=True)
    assert [(task.id, task.state) for task in tasks] == [
        ("worker-0", TaskState.CONFIRMED), ("worker-1", TaskState.DRAINING), ("ps-0", TaskState.CONFIRMED),
    ]  # fmt: skip
    assert tasks[0].demand == a_job(2).request.worker
    with store._database.reading("test") as connection:
        epochs = connection.execute(text("SELECT epoch FROM jobs ORDER BY number")).scalars().all()
        requests = connection.execute(text("SELECT request, worker_demand, ps_demand FROM jobs")).all()
    assert [epoch is None for epoch in epochs] == [False, False, True]  # nobody reports that of the static job
    for request, worker, ps in requests:
        read = json.loads(request)
        assert (read["worker"], read["ps"]) == (json.loads(worker), json.loads(ps))
        assert read["worker"] == {"cpu": 2, "gpu": 0.5, "memory": 4096}
    (grown,) = store.resizes(failed.key)
    assert [(event.state, event.at, event.note) for event in grown.events] == [
        (TaskState.ASKED, _T0 + 1.0, ""), (TaskState.FAILED, _T0 + 91.0, "oom"),
    ]  # fmt: skip


def test_what_coordinators_reported(store: SqlStore) -> None:
    running = a_job(2)
    series = store.series(running.key)
    assert [point.version for point in series] == list(range(8))
    assert series[-1] == Progress(
        at=_T0 + 80.0, version=7, total_versions=99, epoch=3.5, loss=0.125, steps_per_second=2.0,
        samples_per_second=256.0, workers=1, ps=1,
    )  # fmt: skip
    first, second = store.task_reports(running.key)
    assert (first.memory, first.slowdown, first.slowdown_reason) == (900.0, 2.5, "waits for ps-0")
    assert (second.cause, second.how) == ("out-of-memory", "killed by signal 9")
    (plan,) = store.runtime_plans(running.key)
    assert (plan.added, plan.moved_bytes, plan.suspension_max_ms) == (("worker-0", "worker-1", "ps-0"), 4096, 0.75)
    (measured,) = store.speeds([TrainingKind.of(running.request)])
    assert [(point.allocation, point.measurements) for point in measured.points] == [
        (Allocation(1, 1), 2), (Allocation(2, 1), 6),
    ]  # fmt: skip
    store.report_progress(running.key, Progress(at=_T0 + 100.0, samples_per_second=260.0, workers=1, ps=1))
    assert store.speeds([TrainingKind.of(running.request)])[0].points[0].measurements == 3


def test_speeds_and_losses_of_live_jobs_are_those_of_their_progress(store: SqlStore) -> None:
    running = a_job(2)
    (speeds,), (losses,) = store.job_speeds([running.key]), store.losses([running.key])
    series = store.series(running.key)
    assert losses.points == tuple(LossPoint(point.epoch, point.loss) for point in series if point.loss is not None)
    for point in speeds.points:
        measured = [each for each in series if Allocation(each.workers, each.ps) == point.allocation]
        assert point.samples_per_second == sum(each.samples_per_second or 0.0 for each in measured) / len(measured)
        assert (point.measurements, point.first_measured, point.last_measured) == (
            len(measured),
            measured[0].at,
            measured[-1].at,
        )
    assert len(speeds.points) == 2
    store.report_progress(running.key, Progress(at=_T0 + 100.0, loss=0.1, samples_per_second=260.0, workers=1, ps=1))
    assert store.job_speeds([running.key])[0].points[0].measurements == speeds.points[0].measurements + 1
    assert len(store.losses([running.key])[0].points) == len(losses.points) + 1


def test_slots(store: SqlStore) -> None:
    assert store.last_slot_number() == 3
    slots = [store.slot(number) for number in (1, 2, 3)]
    jobs, tasks = slots[0].snapshot.jobs, slots[0].snapshot.tasks
    assert slots[:2] == [a_slot(1, jobs, tasks), a_slot(2, jobs, tasks, guarded=True)]
    assert slots[2].shadow == a_slot(3, jobs, tasks, guarded=True).decision
    with store._database.reading("test") as connection:
        given = text("SELECT given_workers, given_ps FROM shadow_allocations WHERE slot = 3 ORDER BY job_number")
        sizes = connection.execute(given).all()
    assert sizes == [each.allocation for each in slots[2].decision.jobs]
    assert any(any(size) for size in sizes)
    newest = store.decisions(a_job(2).key)[0]
    assert (newest.slot, newest.decided) == (3, slots[2].decision.jobs[0])
    assert [summary.changed for summary in store.slots()] == [2, 0, 2]


def test_who_decided(old_url: str) -> None:
    """Slots say by which version and why by the fallback, as far as their policy and decision tell."""
    guard = '[{"constraint":"fallback","text":"policy dl2 failed: no answer"}]'
    late = f'{{"policy":"drf","policy_version":"1","jobs":[{{"guarded":{guard}}}]}}'.encode()
    database = Database(StoreLocation.parse(old_url))
    with database.writing("making older slots") as connection:
        slots = Table("slots", MetaData(), autoload_with=connection)
        like = dict(connection.execute(slots.select().where(slots.c.number == 1)).one()._mapping)
        for number, changes in (
            (4, {"policy": "dl2", "policy_version": "a" * 12}),
            (5, {"policy": "dl2", "policy_version": "c" * 12}),  # a version that is not known
            (6, {"proposed": late}),
        ):
            connection.execute(insert(slots), like | {"number": number} | changes)
    database.close()
    schema_version.upgrade(old_url)
    with closing(SqlStore(old_url)) as store, store._database.reading("test") as connection:
        found = connection.execute(text("SELECT version_number, fallback FROM slots ORDER BY number")).all()
    assert found == [(None, "")] * 3 + [(1, ""), (None, ""), (None, "policy dl2 failed: no answer")]


def test_modes_and_policies(store: SqlStore) -> None:
    assert [change.after for change in store.mode_changes()] == [Mode.LIVE, Mode.OBSERVE]
    registry = store.registry
    assert [(version.digest[0], version.state) for version in registry.versions()] == [
        ("b", VersionState.RETIRED), ("a", VersionState.LIVE),
    ]  # fmt: skip
    assert registry.versions()[0].metrics == {"jct": [1.25, None]}
    assert [(change.digest[0], change.replaced[:1], change.rollback) for change in registry.changes()] == [
        ("a", "b", True), ("b", "", False), ("b", "a", False), ("a", "", False), ("a", "", False),
    ]  # fmt: skip
    with store._database.reading("test") as connection:
        named = connection.execute(
            text(
                "SELECT t.candidate, v.digest, t.current, w.digest FROM policy_trials AS t "
                "JOIN policy_versions AS v ON v.number = t.candidate_number "
                "LEFT JOIN policy_versions AS w ON w.number = t.current_number"
            )
        ).all()
    assert [row[0] == row[1] and row[2] == row[3] for row in named] == [True]
    (trial,) = registry.trials()
    assert (trial.cases, trial.change, trial.high) == ((TrialCase("2023-11-14", 1.5, 2.5),), -0.4, None)
    assert [run.state for run in registry.runs()] == [RunState.RUNNING, RunState.FINISHED]


def test_the_daemon_goes_on_with_it(store: SqlStore) -> None:
    store.acquire("head1, pid 42")
    running = a_job(2)
    assert [task.id for task in store.ask_tasks(starts(running), _T0 + 200.0)] == ["worker-2"]
    assert store.next_job_id("local") == "3"
    store.record_slot(a_slot(4, store.jobs(live=True), store.tasks(live=True)))
    ended = store.change_job(running.key, JobChange(state=JobState.FINISHED), _T0 + 300.0)
    assert (ended.state, len(store.jobs(live=True)), store.last_slot_number()) == (JobState.FINISHED, 1, 4)


def test_views_have_the_new_names_and_the_old_readers(store: SqlStore) -> None:
    with store._database.reading("test") as connection:
        query = text("SELECT job_id, binding_constraint, guard FROM decision_history WHERE slot = 2 ORDER BY job_id")
        assert connection.execute(query).all() == [
            ("2", "capacity", "resized 3 s ago"), ("3", "capacity", "resized 3 s ago"),
        ]  # fmt: skip
        assert len(connection.execute(text("SELECT * FROM resize_log")).all()) == 5
        if connection.dialect.name == "postgresql":
            granted = text("SELECT count(*) FROM information_schema.role_table_grants WHERE grantee = 'PUBLIC' "
                           "AND table_name = 'decision_history'")  # fmt: skip
            assert connection.execute(granted).scalar_one() == 1


def test_its_history(store: SqlStore) -> None:
    history = store.history(_T0 - 10.0, _T0 + 1000.0)
    assert [job.key.id for job in history.jobs] == ["1", "2"]
    assert history.starts == (3.0, 3.0, 3.0)
    assert len(history.cluster_states) == 1


def test_a_daemon_from_before_the_upgrade_can_write_no_more(store: SqlStore) -> None:
    sign = store.lease_sign()
    assert sign is not None
    assert sign.term == 2  # it was 1: what a daemon that stood still during the upgrade holds
