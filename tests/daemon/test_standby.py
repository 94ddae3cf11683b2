"""Two daemons on one store: a leader that stands still or ends, and a standby that takes over."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from daemon_process import DaemonProcess
from migrated import sqlite_store
from store.conftest import kept_postgres_url, kept_url, postgres
from structlog.testing import capture_logs

from dl2d.core.errors import AlreadyRunning, StoreUnavailable
from dl2d.daemon.standby import LeaseKeeper, lease_seconds, renewal_seconds, wait_for_lease
from dl2d.daemon.systemd import ServiceManager
from dl2d.store.sql_store import SqlStore

__all__ = ["kept_postgres_url", "kept_url", "postgres"]


@pytest.fixture
def pair(tmp_path: Path, kept_url: str) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    """A leader, and the daemon of another machine that is to be its standby."""
    leader, standby = (
        DaemonProcess(
            tmp_path / name,
            {
                "resource_manager": {"name": "local"},
                "store": {"url": kept_url},
                "schedule": {"poll_seconds": 0.5, "slot_seconds": 1},
            },
        )
        for name in ("leader", "standby")
        if not (tmp_path / name).mkdir()  # type: ignore[func-returns-value]
    )
    standby.arguments = ["--standby"]
    with leader:
        yield leader, standby
        if standby.process is not None:
            standby.process.terminate()
            standby.process.wait(timeout=30)


def _wait_as_standby(standby: DaemonProcess, folder: Path) -> None:
    """Start the standby, and wait until it tells the service manager that it is one."""
    path = folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(path))
        channel.settimeout(60)
        standby.env |= {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "600000"}
        standby.process = standby.spawn()
        words = channel.recv(4096).decode().splitlines()
        assert words[0] == "READY=1"
        assert words[1].startswith("STATUS=standby: waits for the lease held by process ")
        assert channel.recv(4096).decode().splitlines()[0] == "WATCHDOG=1"


@pytest.mark.parametrize(
    "kept_url",
    ["file", pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.slow, pytest.mark.nightly])],
    indirect=True,
)
def test_a_leader_that_stands_still_loses_the_lease_and_can_write_nothing_when_it_wakes(
    pair: tuple[DaemonProcess, DaemonProcess], kept_url: str, tmp_path: Path
) -> None:
    leader, standby = pair
    _wait_as_standby(standby, tmp_path)
    assert leader.process is not None
    with closing(SqlStore(kept_url)) as store:
        first = store.lease_sign()
        assert first is not None
        os.kill(leader.process.pid, signal.SIGSTOP)
        standby.wait_until(standby.answers, "the standby serves")
        sign = store.lease_sign()
        assert sign is not None
        assert standby.process is not None
        assert (sign.term, sign.holder.split()[1]) == (first.term + 1, str(standby.process.pid))
        slots = store.last_slot_number()
        os.kill(leader.process.pid, signal.SIGCONT)
        assert leader.process.wait(timeout=60) == 1
        assert "was taken over by another daemon" in leader.said()
        standby.wait_until(lambda: store.last_slot_number() > slots + 1, "the standby decides")
        after = store.lease_sign()
        assert after is not None
        assert (after.term, after.holder) == (sign.term, sign.holder)
    assert "tick failed" not in standby.said(1000)


@pytest.mark.slow
def test_a_leader_that_ends_is_followed_at_once(
    pair: tuple[DaemonProcess, DaemonProcess], tmp_path: Path, kept_url: str
) -> None:
    leader, standby = pair
    _wait_as_standby(standby, tmp_path)
    leader.kill()
    standby.wait_until(standby.answers, "the standby serves")
    with closing(SqlStore(kept_url)) as store:
        sign = store.lease_sign()
        assert sign is not None
        assert sign.term == 2
    assert standby.stop() == 0


@pytest.mark.slow
def test_a_standby_that_takes_over_has_the_configuration_of_now(
    pair: tuple[DaemonProcess, DaemonProcess], tmp_path: Path, kept_url: str
) -> None:
    """It may have waited for days. A reload, which an administrator sends to both, does not end it."""
    leader, standby = pair
    _wait_as_standby(standby, tmp_path)
    standby.settings["policy"] = {"name": "fifo"}
    standby.write()
    assert standby.process is not None
    standby.process.send_signal(signal.SIGHUP)
    leader.kill()
    standby.wait_until(standby.answers, "the standby serves")
    with closing(SqlStore(kept_url)) as store:
        standby.wait_until(lambda: store.slots(limit=1)[0].policy == "fifo", "the new policy decides")


def test_a_holder_renews_its_lease_in_time_for_a_standby_with_a_shorter_interval() -> None:
    """Their configurations may differ for a while, as after a reload of one of them."""
    intervals = (0.1, 1.0, 15.0, 3600.0)
    assert max(map(renewal_seconds, intervals)) < 0.5 * min(map(lease_seconds, intervals))


@pytest.mark.slow
def test_a_standby_that_is_told_to_end_ends(pair: tuple[DaemonProcess, DaemonProcess], tmp_path: Path) -> None:
    leader, standby = pair
    _wait_as_standby(standby, tmp_path)
    assert standby.stop() == 0
    assert leader.answers()


def test_a_standby_gives_a_sign_of_life_in_time_however_rarely_the_holder_renews(tmp_path: Path) -> None:
    path, url = tmp_path / "notify", sqlite_store(tmp_path / "store.sqlite")
    stop = threading.Event()
    with (
        closing(SqlStore(url)) as holder,
        closing(SqlStore(url)) as standby,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel,
        ThreadPoolExecutor(1) as beside,
    ):
        channel.bind(str(path))
        channel.settimeout(20)
        holder.acquire("a\nREADY=1")
        service = ServiceManager({"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "30000"})
        waited = beside.submit(wait_for_lease, standby, "b", 3600.0, service, stop)
        try:
            words = [channel.recv(4096).decode() for _ in range(4)]
        finally:
            stop.set()
        assert not waited.result()
    status = "STATUS=standby: waits for the lease held by a\\nREADY=1"
    assert words == [f"READY=1\n{status}", *[f"WATCHDOG=1\n{status}"] * 3]


def test_a_lease_that_cannot_be_renewed_is_logged_once():
    full, lost = StoreUnavailable("the disk is full"), threading.Event()
    store = Mock(spec=SqlStore)
    store.renew_lease.side_effect = [full, full, full, None, None, full, full, AlreadyRunning("taken")]
    with capture_logs() as logs, closing(LeaseKeeper(store, 0.001, lambda _: lost.set())):
        assert lost.wait(timeout=60)
    not_renewed = ("the lease was not renewed", "the disk is full")
    assert [(line["event"], line.get("error", "")) for line in logs] == [
        not_renewed,
        ("the lease is renewed again", ""),
        not_renewed,
    ]
