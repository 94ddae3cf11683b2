from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from sqlalchemy import text
from store.samples import a_job

from dl2d.core.errors import AlreadyRunning, SchemaOutdated, StoreUnavailable
from dl2d.core.store import LeaseSign
from dl2d.daemon.standby import wait_for_lease
from dl2d.daemon.systemd import ServiceManager
from dl2d.store import schema_version
from dl2d.store.connections_and_transactions import Database, StoreLocation
from dl2d.store.sql_store import SqlStore

_HOLD = """
import sys
from dl2d.store.sql_store import SqlStore
store = SqlStore(sys.argv[1])
store.acquire(sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""
_SECONDS = 20


@contextmanager
def _holder(url: str, name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lease."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, url, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def _acquired_in_time(store: SqlStore, holder: str) -> None:
    """A server may notice a moment later that a holder's connection is gone."""
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            return store.acquire(holder)
        except AlreadyRunning:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def test_one_daemon_at_a_time(kept_url):
    with closing(SqlStore(kept_url)) as first, closing(SqlStore(kept_url)) as second:
        first.acquire("head1, pid 41")
        first.acquire("head1, pid 41")
        with pytest.raises(AlreadyRunning, match="held by another daemon \\(head1, pid 41\\); stop it first"):
            second.acquire("head2, pid 42")
        first.add_job(a_job())
        first.close()
        second.acquire("head2, pid 42")
        second.add_job(a_job(2))
        assert len(second.jobs(live=True)) == 2


def test_the_holder_of_a_killed_daemon_is_forgotten(kept_url):
    with closing(SqlStore(kept_url)) as store, _holder(kept_url, "head1, pid 4711") as process:
        with pytest.raises(AlreadyRunning, match="head1, pid 4711"):
            store.acquire("me")
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(_SECONDS) == -signal.SIGKILL
        _acquired_in_time(store, "me")
        store.add_job(a_job())


def test_a_lease_in_memory_guards_nothing():
    with closing(SqlStore("sqlite://")) as one, closing(SqlStore("sqlite://")) as two:
        one.acquire("a")
        two.acquire("b")


def test_the_holder_stands_in_the_table(kept_url):
    for term, holder in enumerate(("first", "second"), start=1):
        with closing(SqlStore(kept_url)) as store:
            store.acquire(holder)
            with store._database.reading("test") as connection:
                assert connection.execute(text("SELECT holder, term FROM lease")).all() == [(holder, term)]


def test_a_silent_holder_loses_the_lease_and_can_write_no_more(kept_url):
    """Its process stands still: the lock is still its own, so the term decides."""
    with closing(SqlStore(kept_url)) as first, closing(SqlStore(kept_url)) as second:
        assert second.lease_sign() is None
        first.acquire("first")
        sign = second.lease_sign()
        assert sign == LeaseSign("first", 1, 0)
        first.renew_lease()
        with pytest.raises(AlreadyRunning, match="which is alive"):
            second.acquire("second", silent=sign)
        sign = second.lease_sign()
        assert sign == LeaseSign("first", 1, 1)
        first.check_lease()
        second.acquire("second", silent=sign)
        for attempt in (lambda: first.add_job(a_job()), first.check_lease, first.renew_lease,
                        lambda: first.registry.begin_run("dl2", 1.0)):  # fmt: skip
            with pytest.raises(AlreadyRunning, match=r"another daemon \(second\)"):
                attempt()
        second.add_job(a_job(2))
        second.check_lease()
        first.close()
        second.renew_lease()  # and takes the lock that has become free
        with closing(SqlStore(kept_url)) as third, pytest.raises(AlreadyRunning, match="held by another daemon"):
            third.acquire("third")
        second.add_job(a_job(3))
        assert [job.key.id for job in second.jobs(live=True)] == ["2", "3"]


def test_a_store_has_one_lease_by_whatever_link_it_is_reached(tmp_path):
    schema_version.upgrade(f"sqlite:///{tmp_path}/dl2d.sqlite")
    (tmp_path / "link.sqlite").symlink_to(tmp_path / "dl2d.sqlite")
    with (
        closing(SqlStore(f"sqlite:///{tmp_path}/dl2d.sqlite")) as first,
        closing(SqlStore(f"sqlite:///{tmp_path}/link.sqlite")) as second,
    ):
        first.acquire("process 1")
        with pytest.raises(AlreadyRunning, match="process 1"):
            second.acquire("process 2")
        first.check_lease()


@contextmanager
def _at_revision(url: str, revision: str) -> Iterator[None]:
    """The store, with a schema of which its table says that it is another one."""
    with closing(Database(StoreLocation.parse(url))) as database:
        said = text(f"UPDATE {schema_version.VERSION_TABLE} SET version_num = :revision")
        with database.writing("travelling") as connection:
            connection.execute(said, {"revision": revision})
        yield
        with database.writing("travelling back") as connection:
            connection.execute(said, {"revision": schema_version.head()})


def test_the_schema_is_not_upgraded_under_a_daemon(kept_url):
    with closing(SqlStore(kept_url)) as store:
        store.acquire("head1, pid 41")
        with _at_revision(kept_url, "0018"):
            with pytest.raises(AlreadyRunning, match="stop it before the schema is upgraded"):
                schema_version.upgrade(kept_url)
            assert schema_version.current(kept_url) == "0018"
            store.add_job(a_job())


@pytest.mark.parametrize("revision", ["0018", "9999"])
def test_a_store_of_another_version_is_not_taken_over(kept_url, revision):
    """A standby may have waited since before the upgrade, with the code of then."""
    with closing(SqlStore(kept_url)) as store:
        with _at_revision(kept_url, revision):
            for call in (lambda: store.acquire("head1, pid 41"), store.lease_sign):
                with pytest.raises(SchemaOutdated, match=revision):
                    call()
            with pytest.raises(SchemaOutdated):
                wait_for_lease(store, "head1, pid 41", 1.0, ServiceManager({}), threading.Event())
        store.acquire("head1, pid 41")


def test_the_lock_file_cannot_be_made(tmp_path):
    url = f"sqlite:///{tmp_path}/dl2d.sqlite"
    schema_version.upgrade(url)
    (tmp_path / "elsewhere").touch()
    (tmp_path / "dl2d.sqlite.lock").symlink_to(tmp_path / "elsewhere")
    with closing(SqlStore(url)) as store, pytest.raises(StoreUnavailable, match=r"dl2d\.sqlite\.lock"):
        store.acquire("me")


@pytest.mark.postgres
def test_a_daemon_that_lost_its_lease_can_write_no_more(postgres_url):
    """The server ends the holder's lock connection (a failover, a firewall): the next daemon fences the first out."""
    schema_version.upgrade(postgres_url)
    with closing(SqlStore(postgres_url)) as first, closing(SqlStore(postgres_url)) as second:
        first.acquire("first")
        first.add_job(a_job())
        with second._database.engine.begin() as connection:
            ended = text("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
            assert connection.execute(ended).all() == [(True,)]
        _acquired_in_time(second, "second")
        for _ in range(2):
            with pytest.raises(AlreadyRunning, match=r"another daemon \(second\)"):
                first.add_job(a_job(2))
        second.add_job(a_job(3))
        assert [job.key.id for job in first.jobs(live=True)] == ["1", "3"]
