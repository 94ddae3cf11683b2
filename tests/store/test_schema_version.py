from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text
from store.samples import a_job, a_slot, starts

import dl2d
from dl2d.core.cluster import TaskState
from dl2d.core.daemon_mode_and_canary import Canary
from dl2d.core.decision import Constraint, Decider, Reason
from dl2d.core.errors import SchemaOutdated, StoreError, StoreUnavailable
from dl2d.core.jobs import FailureCause, JobState
from dl2d.core.policy_registry import Trial, Version
from dl2d.core.store import JobChange, TaskChange
from dl2d.store import schema_version
from dl2d.store.connections_and_transactions import Database, StoreLocation
from dl2d.store.sql_store import SqlStore
from dl2d.store.tables.row_mapping import Base


@pytest.fixture
def opened(empty_url: str):
    database = Database(StoreLocation.parse(empty_url))
    yield database
    database.close()


def test_from_empty_to_head_and_again(empty_url):
    assert schema_version.current(empty_url) is None
    schema_version.upgrade(empty_url)
    assert schema_version.current(empty_url) == schema_version.head()
    with closing(SqlStore(empty_url)) as store:
        store.add_job(job := a_job())
    schema_version.upgrade(empty_url)
    with closing(SqlStore(empty_url)) as store:
        assert store.jobs(live=True) == (job,)


def test_migrations_and_models_agree(empty_url, opened):
    schema_version.upgrade(empty_url)
    with opened.engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={"compare_type": True, "compare_server_default": True, "version_table": schema_version.VERSION_TABLE},
        )
        assert compare_metadata(context, Base.metadata) == []


def test_a_store_that_was_never_set_up(empty_url):
    with pytest.raises(SchemaOutdated, match="dl2d db upgrade"):
        SqlStore(empty_url)
    assert schema_version.current(empty_url) is None


def test_an_empty_file(tmp_path):
    (tmp_path / "x.sqlite").touch()
    with pytest.raises(SchemaOutdated, match=r"is empty; start the daemon \(dl2d run\), or run `dl2d db upgrade`"):
        SqlStore(f"sqlite:///{tmp_path}/x.sqlite")


def test_opening_makes_no_file(tmp_path):
    with pytest.raises(SchemaOutdated, match="no store at"):
        SqlStore(f"sqlite:///{tmp_path}/x.sqlite")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("revision", "problem"), [("9999", "a newer dl2d wrote it"), ("0005", "it is from before the first release")]
)
def test_an_unknown_schema_is_refused(empty_url, opened, revision, problem):
    schema_version.upgrade(empty_url)
    with opened.writing("travelling") as connection:
        connection.execute(text(f"UPDATE {schema_version.VERSION_TABLE} SET version_num = '{revision}'"))
    for work in (SqlStore, schema_version.upgrade):
        with pytest.raises(SchemaOutdated, match=rf"{revision}, which this dl2d .* {problem}"):
            work(empty_url)
    assert schema_version.current(empty_url) == revision


def test_upgrades_at_once(empty_url):
    script = "import sys; from dl2d.store import schema_version; print(schema_version.head(), flush=True); "
    script += "sys.stdin.read(); schema_version.upgrade(sys.argv[1])"
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([sys.executable, "-c", script, empty_url], stdin=pipe, stdout=pipe, stderr=pipe)
        for _ in range(2)
    ]
    try:
        assert [process.stdout.readline() for process in processes] == [f"{schema_version.head()}\n".encode()] * 2
        for process in processes:
            process.stdin.close()
        said = [process.stderr.read().decode() for process in processes]
        assert [process.wait(60) for process in processes] == [0] * 2, said
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()
    SqlStore(empty_url).close()


def test_logging_is_left_alone(empty_url):
    ours = logging.getLogger("dl2d.test_schema")
    root = logging.getLogger()
    before = (list(root.handlers), root.level, ours.disabled)
    schema_version.upgrade(empty_url)
    assert (list(root.handlers), root.level, ours.disabled) == before


def test_the_file_is_for_its_owner_alone(tmp_path):
    schema_version.upgrade(f"sqlite:///{tmp_path}/x.sqlite")
    with closing(SqlStore(f"sqlite:///{tmp_path}/x.sqlite")) as store:
        store.add_job(a_job())
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert set(modes) >= {"x.sqlite", "x.sqlite-wal"}
    assert set(modes.values()) == {0o600}


def test_an_installation_brings_its_migrations(tmp_path):
    """As in a wheel: the package alone, with the migrations inside, away from the checkout."""
    source = Path(dl2d.__file__).parent
    shutil.copytree(source, tmp_path / "dl2d", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(source.parent / "db" / "migrations", tmp_path / "dl2d" / "store" / "migrations", dirs_exist_ok=True)
    script = "import dl2d, sys; from dl2d.store import schema_version; schema_version.upgrade(sys.argv[1]); "
    script += "print(dl2d.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", script, f"sqlite:///{tmp_path}/x.sqlite"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/dl2d/__init__.py\n"), done.stderr
    assert schema_version.current(f"sqlite:///{tmp_path}/x.sqlite") == schema_version.head()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into any folder")
def test_a_folder_that_may_not_be_looked_into(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    for work in (SqlStore, schema_version.current, schema_version.upgrade):
        with pytest.raises(StoreUnavailable, match="folder"):
            work(f"sqlite:///{tmp_path}/closed/x.sqlite")


def test_odd_folder_names(tmp_path):
    folder = tmp_path / "100% odd ü"
    folder.mkdir()
    schema_version.upgrade(f"sqlite:///{folder}/x.sqlite")
    SqlStore(f"sqlite:///{folder}/x.sqlite").close()


def test_views_for_people(kept_url):
    with closing(SqlStore(kept_url)) as store:
        store.add_job(job := a_job(12))
        store.ask_tasks(starts(job), 10.0)
        store.change_tasks([TaskChange(job.key, "worker-0", TaskState.GRANTED)], 12.0)
        store.change_tasks([TaskChange(job.key, "worker-0", TaskState.CONFIRMED)], 13.5)
        slot = a_slot(3, (job,), store.tasks(live=True))
        store.record_slot(replace(slot, shadow=slot.proposed))
        cause = FailureCause.NODE_LOST
        store.change_tasks([TaskChange(job.key, "worker-0", TaskState.FAILED, note="n1 died", cause=cause)], 20.0)
        failed = JobChange(state=JobState.LOST, end_reason="its node failed", cause=FailureCause.NODE_LOST)
        store.change_job(job.key, failed, 21.0)
        with store._database.reading("test") as connection:

            def ask(query: str) -> list[tuple[object, ...]]:
                return [tuple(row) for row in connection.execute(text(query))]

            assert ask(
                "SELECT slot, job, previous_workers, workers, binding_constraint, reason, fallback "
                "FROM decision_history WHERE job_id = '12'"
            ) == [(3, job.key.slug, 1, 2, "capacity", "no gpu left for a third worker of digits-12", "")]
            assert ask("SELECT policy, policy_version, workers, given_workers, compared FROM shadow_decisions") == [
                ("drf", "1", 2, 2, "same")
            ]
            assert ask("SELECT direction, granted_seconds, seconds FROM resize_log ORDER BY direction") == [
                ("grow", 2.0, 3.5), ("shrink", None, 0.0),
            ]  # fmt: skip
            assert ask("SELECT resource, capacity, used, held FROM slot_resources ORDER BY resource") == [
                ("cpu", 8.0, 0.1, 2.0), ("gpu", 2.0, 0.0, 0.5),
            ]  # fmt: skip
            assert ask("SELECT what, cause, failures, example FROM failures_by_cause ORDER BY what") == [
                ("job", "node-lost", 1, "its node failed"), ("task", "node-lost", 1, "n1 died"),
            ]  # fmt: skip
            (usage,) = ask("SELECT user_name, account, tasks, task_hours, cpu_hours, gpu_hours FROM user_usage")
            hours = 8.0 / 3600
            assert usage == (
                "ada",
                "physics",
                1,
                pytest.approx(hours),
                pytest.approx(2 * hours),
                pytest.approx(hours / 2),
            )
            assert ask("SELECT epochs, max_workers, worker_demand FROM jobs") == [
                (90.0, 16, '{"cpu":2,"gpu":0.5,"memory":4096}')
            ]


def test_a_slot_names_the_version_that_decided_and_why_the_fallback_did(kept_url):
    with closing(SqlStore(kept_url)) as store:
        store.add_job(job := a_job(12))
        version = Version(policy="dl2", digest="c" * 64, folder="/x", origin="test", at=1.0)
        store.registry.add_version(version)
        learned, fallback = (a_slot(number, (job,)) for number in (1, 2))
        decided = replace(learned.decision, policy="dl2", policy_version=f"{'c' * 12} slot_seconds=300.0")
        store.record_slot(replace(learned, proposed=decided, decision=decided))
        late = Reason(Constraint.FALLBACK, "policy dl2 failed: it took 9.0 s")
        entries = tuple(entry.changed_by(entry.allocation, late) for entry in fallback.proposed.jobs)
        store.record_slot(replace(fallback, proposed=replace(fallback.proposed, jobs=entries)))
        with store._database.reading("test") as connection:
            rows = connection.execute(text("SELECT version_number, fallback FROM slots ORDER BY number")).all()
    assert [tuple(row) for row in rows] == [(1, ""), (None, "policy dl2 failed: it took 9.0 s")]


def test_versions_are_referred_to_wherever_they_are_named(kept_url):
    digest, named = "c" * 64, f"{'c' * 12} slot_seconds=300.0"
    with closing(SqlStore(kept_url)) as store:
        store.add_job(job := a_job(12))
        registry = store.registry
        registry.add_version(Version(policy="dl2", digest=digest, folder="/x", origin="test", at=1.0))
        registry.add_version(Version(policy="dl2", digest="d" * 64, folder="/y", origin="test", at=1.0, parent=digest))
        registry.add_trial(
            Trial(at=2.0, policy="dl2", candidate="d" * 64, current="site-scheduler", days=(), cases=(), change=None,
                  low=None, high=None, passed=False, reason="test")
        )  # fmt: skip
        canary = Canary(policy="dl2", version=named, fallback="drf", share=0.5, partition="", account="", began_at=1.0)
        store.keep_canary(canary)
        slot = a_slot(1, (job,))
        shadow = replace(slot.decision, policy="dl2", policy_version=named)
        jobs = tuple(replace(each, by=Decider("dl2", named)) for each in slot.decision.jobs)
        decided = replace(slot.decision, policy="canary", jobs=jobs)
        store.record_slot(replace(slot, proposed=decided, decision=decided, shadow=shadow))
        with store._database.reading("test") as connection:

            def ask(query: str) -> list[tuple[object, ...]]:
                return [tuple(row) for row in connection.execute(text(query))]

            assert ask("SELECT parent_number FROM policy_versions ORDER BY number") == [(None,), (1,)]
            assert ask("SELECT candidate_number, current_number FROM policy_trials") == [(2, None)]
            assert ask("SELECT version_number FROM canaries") == [(1,)]
            assert ask("SELECT version_number, shadow_version_number FROM slots") == [(None, 1)]
            assert ask("SELECT version_number FROM decision_history") == [(1,)]
            assert ask("SELECT version_number FROM shadow_decisions") == [(1,)]


def test_readers_may_read_all_but_secrets(postgres_url):
    schema_version.upgrade(postgres_url)
    SqlStore(postgres_url).close()
    with closing(Database(StoreLocation.parse(postgres_url))) as database:
        with database.writing("making a role") as connection:
            connection.execute(text('CREATE ROLE "an analyst"'))
        try:
            schema_version.grant_reading(postgres_url, "an analyst")

            def read(query: str) -> None:
                with database.writing("reading as another role") as connection:
                    connection.execute(text('SET LOCAL ROLE "an analyst"'))
                    connection.execute(text(query))

            read("SELECT * FROM waiting_now")
            read("SELECT number, request FROM jobs")
            with pytest.raises(StoreError, match="permission denied"):
                read("SELECT launch FROM jobs")
        finally:
            with database.writing("dropping a role") as connection:
                connection.execute(text('DROP OWNED BY "an analyst"'))
                connection.execute(text('DROP ROLE "an analyst"'))


def test_an_sqlite_file_has_no_roles(tmp_path):
    with pytest.raises(StoreError, match="has no roles: give the file to a group that may read it"):
        schema_version.grant_reading(f"sqlite:///{tmp_path}/x.sqlite", "analyst")
