"""What happens when the database cannot: clear errors, nothing half kept, and on again when it can."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import traceback
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import event, text
from store.samples import a_job, a_slot, starts

from dl2d.core.cluster import TaskState
from dl2d.core.errors import AlreadyRunning, SchemaOutdated, StoreError, StoreUnavailable
from dl2d.core.jobs import Job, JobState, Launch, Progress
from dl2d.core.store import JobChange, TaskChange
from dl2d.store import connections_and_transactions, schema_version
from dl2d.store.sql_store import SqlStore


@pytest.fixture(params=["memory", "file"])
def sqlite_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    url = "sqlite://" if request.param == "memory" else f"sqlite:///{tmp_path}/dl2d.sqlite"
    schema_version.upgrade(url)
    with closing(SqlStore(url)) as store:
        yield store


def _fill(store: SqlStore, job: Job) -> int:
    """Record slots until the disk is full; returns the number of the slot that was refused."""
    for number in range(1, 100_000):
        try:
            store.record_slot(a_slot(number, (job,)))
        except StoreUnavailable as full:
            if "the disk is full" not in str(full) and "whether it is full" not in str(full):
                raise
            return number
    pytest.fail("the disk never filled up")


class TestFullDisk:
    def test_every_write_fails_whole_and_works_again(self, sqlite_store):
        store = sqlite_store
        store.add_job(job := a_job())
        tasks = store.ask_tasks(starts(job, workers=2), 1.0)
        pages = 1

        def limit(connection: object) -> None:
            # A limit below the present size means the present size.
            connection.connection.execute(f"PRAGMA max_page_count = {pages}")

        event.listen(store._database.engine, "begin", limit)
        refused = _fill(store, job)
        before = (store.jobs(live=False), store.tasks(live=False), store.resizes(), store.slots(limit=10**6))
        big = "x" * 100_000
        for write in (
            lambda: store.add_job(a_job(2, name=big)),
            lambda: store.ask_tasks(starts(job, workers=500), 2.0),
            lambda: store.change_tasks([TaskChange(job.key, "worker-0", TaskState.GRANTED, note=big)], 2.0),
            lambda: store.record_slot(a_slot(refused, (job,) * 1)),
        ):
            with pytest.raises(StoreUnavailable, match="the disk is full; free some space"):
                write()
        assert (store.jobs(live=False), store.tasks(live=False), store.resizes(), store.slots(limit=10**6)) == before
        assert store.tasks(live=True) == tasks
        pages = 1_000_000
        store.record_slot(slot := a_slot(refused, (job,)))
        assert store.slot(refused) == slot
        store.change_tasks([TaskChange(job.key, "worker-0", TaskState.GRANTED, note=big)], 3.0)
        assert store.tasks(live=True)[0].note == big

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
    def test_a_real_small_disk(self, tmp_path):
        disk = tmp_path / "disk"
        disk.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "dl2d-test", str(disk)], capture_output=True, check=False
        )
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
        try:
            ballast = disk / "ballast"
            ballast.write_bytes(b"x" * 700_000)
            url = f"sqlite:///{disk}/dl2d.sqlite"
            schema_version.upgrade(url)
            with closing(SqlStore(url)) as store:
                store.acquire("test")
                store.add_job(job := a_job())
                refused = _fill(store, job)
                assert store.last_slot_number() == refused - 1
                ballast.unlink()
                store.record_slot(slot := a_slot(refused, (job,)))
                assert store.slot(refused) == slot
            with closing(SqlStore(url)) as store:
                assert store.slot(refused) == slot
        finally:
            subprocess.run(["umount", str(disk)], check=True)

    @pytest.mark.postgres
    def test_postgresql_says_that_its_disk_is_full(self, postgres_url):
        schema_version.upgrade(postgres_url)
        with closing(SqlStore(postgres_url)) as store:
            store.add_job(job := a_job())
            # The server's own error, raised where the server would: while a decision is inserted.
            _execute(
                store,
                """CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS
                   $$ BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100';
                   END $$""",
                "CREATE TRIGGER full_disk BEFORE INSERT ON decisions FOR EACH ROW EXECUTE FUNCTION full_disk()",
            )
            with pytest.raises(StoreUnavailable, match="disk of PostgreSQL is full; free some space"):
                store.record_slot(a_slot(1, (job,)))
            assert store.last_slot_number() == 0
            _execute(store, "DROP TRIGGER full_disk ON decisions")
            store.record_slot(a_slot(1, (job,)))
            assert store.last_slot_number() == 1


def _execute(store: SqlStore, *statements: str) -> None:
    with store._database.engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def test_a_lock_held_by_another_program(tmp_path, monkeypatch):
    monkeypatch.setattr(connections_and_transactions, "LOCK_SECONDS", 0.05)
    path = tmp_path / "dl2d.sqlite"
    schema_version.upgrade(f"sqlite:///{path}")
    with closing(SqlStore(f"sqlite:///{path}")) as store, closing(sqlite3.connect(path, isolation_level=None)) as shell:
        shell.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="another program holds the database's lock"):
            store.add_job(a_job())
        assert store.jobs(live=True) == ()  # Readers do not wait for a writer.
        shell.execute("ROLLBACK")
        store.add_job(a_job())


@pytest.mark.postgres
def test_a_lock_held_in_postgresql(postgres_url, monkeypatch):
    monkeypatch.setattr(connections_and_transactions, "LOCK_SECONDS", 0.05)
    schema_version.upgrade(postgres_url)
    with closing(SqlStore(postgres_url)) as store, closing(SqlStore(postgres_url)) as shell:
        store.add_job(job := a_job())
        with shell._database.engine.begin() as connection:
            connection.execute(text("LOCK TABLE jobs IN EXCLUSIVE MODE"))
            with pytest.raises(StoreUnavailable, match="another program holds a lock"):
                store.report_progress(job.key, Progress(at=1.0))
        store.report_progress(job.key, Progress(at=1.0))


@pytest.mark.postgres
def test_an_outage_of_postgresql(postgres):
    with postgres.database() as url:
        schema_version.upgrade(url)
        with closing(SqlStore(url)) as store:
            store.acquire("the first")
            store.add_job(job := a_job())
            postgres.pause()
            try:
                with pytest.raises(StoreUnavailable):
                    store.jobs(live=True)
                with pytest.raises(StoreUnavailable):
                    store.record_slot(a_slot(1, (job,)))
            finally:
                postgres.resume()
            store.record_slot(a_slot(1, (job,)))
            assert store.last_slot_number() == 1
            with closing(SqlStore(url)) as second, pytest.raises(AlreadyRunning, match=r"\(the first\)"):
                second.acquire("the second")


@pytest.mark.postgres
def test_a_server_that_has_lost_its_power_is_noticed_within_half_a_minute(postgres):
    """Nobody resets its connections, and the kernel would send again for a quarter of an hour."""
    with postgres.database() as url:
        schema_version.upgrade(url)
        with closing(SqlStore(url)) as store, store._database.reading("test") as connection:
            options = connection.connection.driver_connection.info.get_parameters()
    idle, interval, count = (int(options[f"keepalives_{name}"]) for name in ("idle", "interval", "count"))
    assert idle + interval * count <= 30
    assert 0 < int(options["tcp_user_timeout"]) <= 30_000


@pytest.mark.postgres
def test_closing_while_postgresql_is_away(postgres):
    with postgres.database() as url:
        schema_version.upgrade(url)
        store = SqlStore(url)
        store.acquire("me")
        postgres.pause()
        try:
            store.close()
        finally:
            postgres.resume()


def test_a_file_that_is_no_database(tmp_path):
    path = tmp_path / "dl2d.sqlite"
    path.write_text("this is a letter to my aunt" * 100)
    for work in (schema_version.upgrade, schema_version.current, SqlStore):
        with pytest.raises(StoreError, match="not an SQLite database"):
            work(f"sqlite:///{path}")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-9], "cut short"),
        (lambda data: data[:40] + bytes(9) + data[49:], "slot 1 cannot be read"),
        (lambda _: b'{"at": "noon"}', "slot 1 cannot be read"),
    ],
)
def test_a_damaged_slot(store, damage, said):
    store.add_job(job := a_job())
    store.record_slot(a_slot(1, (job,)))
    with store._database.writing("damaging") as connection:
        whole = connection.execute(text("SELECT snapshot FROM slots")).scalar_one()
        connection.execute(text("UPDATE slots SET snapshot = :junk"), {"junk": damage(bytes(whole))})
    with pytest.raises(StoreError, match=said):
        store.slot(1)


def test_a_table_that_is_gone(empty_url):
    schema_version.upgrade(empty_url)
    with closing(SqlStore(empty_url)) as store:
        _execute(store, "DROP VIEW resize_log", "DROP TABLE resize_events")
        with pytest.raises(SchemaOutdated, match="dl2d db upgrade"):
            store.resizes()


def test_a_file_that_is_removed_or_replaced_while_it_is_open(tmp_path):
    """What is written to a file without a name is lost with the process: a job that was accepted, too."""
    file, away = tmp_path / "dl2d.sqlite", tmp_path / "away.sqlite"
    schema_version.upgrade(f"sqlite:///{file}")
    with closing(SqlStore(f"sqlite:///{file}")) as store:
        store.add_job(a_job())
        file.rename(away)
        for call in (lambda: store.add_job(a_job(2)), lambda: store.jobs(live=True)):
            with pytest.raises(StoreUnavailable, match=r"dl2d\.sqlite was removed while this process had it open"):
                call()
        assert not file.exists()
        away.rename(file)
        store.add_job(a_job(2))
        assert len(store.jobs(live=True)) == 2
        away.write_bytes(file.read_bytes())
        away.replace(file)
        with pytest.raises(StoreUnavailable, match="was replaced by another file"):
            store.jobs(live=True)


@pytest.mark.parametrize(("suffix", "words"), [("-wal", "do not kill it"), ("-shm", "kill it")])
def test_a_write_ahead_log_or_its_index_that_is_removed_while_it_is_open(tmp_path, suffix, words):
    """What is written to the log is lost if the process is killed, and kept if it ends by itself.

    Without the index it would overwrite what others write, also when it ends.
    """
    url = f"sqlite:///{tmp_path}/dl2d.sqlite"
    schema_version.upgrade(url)
    with closing(SqlStore(url)) as store:
        store.add_job(a_job())
        store.add_job(a_job(2))
        (tmp_path / f"dl2d.sqlite{suffix}").unlink()
        for call in (lambda: store.add_job(a_job(3)), lambda: store.jobs(live=True)):
            with pytest.raises(StoreUnavailable, match=rf"dl2d\.sqlite{suffix} was removed .* {words}"):
                call()
    with closing(SqlStore(url)) as store:
        assert len(store.jobs(live=True)) == 2


def test_a_write_ahead_log_that_sqlite_itself_removes_between_two_connections(tmp_path):
    url = f"sqlite:///{tmp_path}/dl2d.sqlite"
    schema_version.upgrade(url)
    with closing(SqlStore(url)) as store:
        for number in range(1, 4):
            store.add_job(a_job(number))
            store._database.engine.dispose()
            assert not (tmp_path / "dl2d.sqlite-wal").exists()
        assert len(store.jobs(live=True)) == 3


def test_a_folder_that_is_missing(tmp_path):
    with pytest.raises(StoreUnavailable, match="check that its folder exists"):
        schema_version.upgrade(f"sqlite:///{tmp_path}/no/dl2d.sqlite")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "dl2d.sqlite",
        "not a url hunter2",
        "mysql://dl2d:hunter2@db/dl2d",
        "postgresql+asyncpg://dl2d:hunter2@db/dl2d",
        "postgresql://dl2d:hunter2@db:port/dl2d",
        "sqlite:///file:/x?mode=ro&uri=true&password=hunter2",
    ],
)
def test_urls_that_are_refused(url):
    for work in (SqlStore, schema_version.upgrade, schema_version.current):
        with pytest.raises(StoreError, match="write sqlite:////") as refused:
            work(url)
        assert "hunter2" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "url", ["postgresql://u:hunter2@127.0.0.1:1/x", "postgres://u@/x?host=/nowhere&password=hunter2"]
)
def test_nobody_answers_and_the_password_stays_secret(url):
    for work in (SqlStore, schema_version.upgrade, schema_version.current):
        with pytest.raises(StoreUnavailable, match="did not answer") as refused:
            work(url)
        assert "hunter2" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("url", ["postgresql://u:hunter2@h/x", "postgresql://u@h/x?password=hunter2"])
def test_a_driver_that_repeats_the_password_is_not_repeated(url):
    place = connections_and_transactions.StoreLocation.parse(url)
    with pytest.raises(StoreError) as refused, connections_and_transactions.translated(place, "opening"):
        raise sqlite3.OperationalError("bad option in 'user=u password=hunter2'")
    assert str(refused.value).endswith("(bad option in 'user=u password=***')")


@pytest.mark.postgres
def test_a_database_that_does_not_exist(postgres):
    with pytest.raises(StoreUnavailable, match="does not exist"):
        SqlStore(postgres.url("nowhere"))


def test_no_page_of_the_file_keeps_the_environment_of_a_job_that_has_ended(tmp_path: Path):
    marker = "/data/of-nobody-else"
    job = a_job()
    launch = Launch(job.launch.argv, job.launch.cwd, tuple((f"A{number}", marker * 40) for number in range(40)))
    file = tmp_path / "dl2d.sqlite"
    url = f"sqlite:///{file}"
    schema_version.upgrade(url)
    with closing(SqlStore(url)) as store:
        store.add_job(replace(job, launch=launch))
        store.change_job(job.key, JobChange(state=JobState.CANCELLED), 1.0)
    assert marker.encode() not in file.read_bytes()
    assert not file.with_name(f"{file.name}-wal").exists()
