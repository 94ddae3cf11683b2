"""The daemon's life as a process: signals, reloads, the service manager, a second one, a full disk."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import httpx2
import pytest
from cli.test_policy import a_network
from local_cluster import LocalCluster
from migrated import sqlite_store
from self_signed import self_signed
from store.samples import a_job
from structlog.testing import capture_logs

from dl2d import plugins
from dl2d.cli import main
from dl2d.config.settings import Settings
from dl2d.core.errors import AlreadyRunning, Dl2dError, PluginError, StoreUnavailable, Waiting
from dl2d.core.jobs import JobState, Progress
from dl2d.core.policy_registry import Version, VersionState
from dl2d.core.store import JobChange
from dl2d.daemon import loop
from dl2d.daemon.loop import Daemon
from dl2d.local.manager import LocalManager
from dl2d.policies.dl2.policy import with_checkpoint
from dl2d.store.sql_store import SqlStore
from dl2d.tick.policy_check.policy_failures import PolicyFailures
from dl2d.tick.record_slot import Report
from pslite.launch.daemon_connection.daemon_address_file import DaemonAddress, find_address, read_address


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[LocalCluster]:
    """Not started yet."""
    cluster = LocalCluster(tmp_path)
    yield cluster
    cluster.__exit__(None, None, None)


SMALL: dict[str, Any] = {"epochs": 10, "max_workers": 2, "max_ps": 1}


def refused(cluster: LocalCluster) -> tuple[int, str]:
    """Exit status and words of a daemon that does not come up, in this process."""
    said, root = io.StringIO(), logging.getLogger()
    handlers = root.handlers[:]
    try:
        with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ended:
            main.run(["run", "--config", str(cluster.config)])
    finally:
        root.handlers[:] = handlers
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.getvalue()


class TestStart:
    def test_a_second_daemon_on_the_store_is_refused_and_the_first_goes_on(self, cluster: LocalCluster) -> None:
        assert cluster.process is not None
        slot = cluster.store.last_slot_number()
        cluster.settings["api"]["port"] = 0  # type: ignore[index]
        cluster.write()
        status, said = refused(cluster)
        assert status == 1
        assert f"held by another daemon (process {cluster.process.pid} on {socket.gethostname()})" in said
        assert "stop it first, or start this one with --standby; only for another cluster set another store.url" in said
        assert cluster.answers()
        cluster.wait_until(lambda: cluster.store.last_slot_number() > slot, "the first one goes on deciding")

    def test_a_taken_port_is_named(self, waiting: LocalCluster) -> None:
        with socket.create_server(("127.0.0.1", waiting.port)):
            status, said = refused(waiting)
        assert status == 2
        assert f"api.host=127.0.0.1 api.port={waiting.port}: Address already in use" in said

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"colour": "red"}, "colour: unknown key"),
            ({"schedule": {"poll_seconds": 0}}, "schedule.poll_seconds: "),
            ({"policy": {"name": "drff"}}, "policy.name: 'drff' is not installed; installed are "),
            ({"policy": {"fallback": "x"}}, "policy.fallback: 'x' is not installed"),
            ({"placement": "x"}, "placement: 'x' is not installed; installed are best_fit, load_balance"),
            ({"resource_manager": {"name": "pbs"}}, "resource_manager.name: 'pbs' is not installed"),
            ({"resource_manager": {"name": "local", "local": {"nodes": []}}}, "local.nodes: expected a list"),
            (
                {"mode": "canary", "policy": {"name": "drf", "fallback": "drf"}},
                "policy.fallback: mode canary compares it with policy.name=drf; name another policy",
            ),
            ({"canary": {"partition": "a", "account": "b"}}, "canary.partition, canary.account: set at most one"),
            ({"canary": {"share": 1}}, "canary.share: "),
            (
                {"mode": "canary", "policy": {"name": "srtf"}, "store": {"keep_jobs_days": 3}},
                "store.keep_jobs_days: must be at least canary.max_days=14, or 0",
            ),
            ({"mode": "watch"}, "mode: expected one of canary, live, observe, shadow, got 'watch'"),
            ({"api": {"heartbeat_seconds": 30}}, "jobs.silent_seconds: must be at least three times"),
        ],
    )  # fmt: skip
    def test_a_bad_configuration_is_refused_by_its_key(self, waiting: LocalCluster, change: Any, words: str) -> None:
        waiting.settings.update(change)
        waiting.write()
        status, said = refused(waiting)
        assert status == 2
        assert words in said

    def test_a_key_file_that_others_may_read_is_refused(self, waiting: LocalCluster) -> None:
        waiting.state_dir.mkdir()
        secret = waiting.state_dir / "secret"
        secret.write_bytes(b"x" * 32)
        secret.chmod(0o640)
        status, said = refused(waiting)
        assert status == 2
        assert f"{secret} has mode 0640: only its owner may read it; run chmod 600 and restart" in said

    def test_a_folder_that_everybody_may_write_is_refused(self, waiting: LocalCluster) -> None:
        """Whoever exchanges the key in it can show any credential."""
        waiting.state_dir.mkdir()
        waiting.state_dir.chmod(0o777)
        status, said = refused(waiting)
        assert status == 2
        assert f"state_dir: {waiting.state_dir} is writable for all users (mode 0777)" in said

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
    def test_a_key_that_belongs_to_somebody_else_is_refused(self, waiting: LocalCluster) -> None:
        waiting.state_dir.mkdir()
        secret = waiting.state_dir / "secret"
        secret.write_bytes(b"x" * 32)
        secret.chmod(0o600)
        os.chown(secret, 12345, -1)
        status, said = refused(waiting)
        assert status == 2
        assert f"{secret} belongs to uid 12345, which knows the key" in said


class TestSignals:
    def test_what_can_be_reloaded_is_taken_what_cannot_is_refused_by_name(self, cluster: LocalCluster) -> None:
        assert cluster.process is not None

        def decided_by() -> str:
            return cluster.store.slots(limit=1)[0].policy

        cluster.wait_until(lambda: cluster.store.slots(limit=1), "a slot is decided")
        assert decided_by() == "drf"
        cluster.settings["policy"] = {"name": "fifo"}
        cluster.settings["log"] = {"level": "debug"}
        cluster.write()
        cluster.hang_up()
        cluster.wait_until(lambda: decided_by() == "fifo", "the new policy decides")

        cluster.settings["policy"] = {"name": "no-such-policy"}
        cluster.write()
        cluster.hang_up()
        cluster.wait_until(lambda: "policy.name: 'no-such-policy' is not installed" in cluster.said(), "it is refused")
        cluster.settings["policy"] = {"name": "drf"}
        cluster.settings["store"] = {"progress_seconds": 1}
        cluster.settings["api"]["heartbeat_seconds"] = 1  # type: ignore[index]
        cluster.write()
        cluster.hang_up()
        cluster.wait_until(
            lambda: "store, api can only be changed by a restart; nothing was changed" in cluster.said(), "so is that"
        )
        refused = "the last reload was refused: store, api can only be changed by a restart; nothing was changed"
        cluster.wait_until(
            lambda: refused in httpx2.get(f"{cluster.url}/v1/health").json()["problems"], "commands are told"
        )
        cluster.config.write_text("schedule: [")
        cluster.hang_up()
        cluster.wait_until(lambda: "is not YAML" in cluster.said(), "and that")
        cluster.config.write_text("log: {level: 2024-99-99}")
        cluster.hang_up()
        cluster.wait_until(lambda: "month must be in 1..12" in cluster.said(), "and what no YAML parser expects")
        slot = cluster.store.last_slot_number()
        cluster.wait_until(lambda: cluster.store.last_slot_number() > slot, "it goes on deciding")
        assert decided_by() == "fifo"

    def test_a_reload_changes_the_mode_and_jobs_train_on_as_they_are(
        self, cluster: LocalCluster, tmp_path: Path
    ) -> None:
        gate = tmp_path / "hold-job"
        gate.touch()
        job = cluster.train("observed", "--step-seconds", "0.02", gate=gate, **SMALL)
        cluster.wait_until(lambda: cluster.confirmed(job).workers == 2, "it trains")
        cluster.settings["mode"] = "observe"
        cluster.write()
        cluster.hang_up()
        cluster.wait_until(lambda: cluster.store.slots(limit=1)[0].policy == "observed", "it looks on")
        refused = cluster.post("/v1/jobs", {"request": {}, "argv": ["true"], "cwd": "/"})
        assert (refused.status_code, "it starts no jobs" in refused.text) == (409, True)
        entry = cluster.store.decisions(job, limit=1)[0]
        assert entry.decided.allocation == cluster.confirmed(job)
        cluster.settings["mode"] = "live"
        cluster.write()
        cluster.hang_up()
        cluster.wait_until(lambda: len(cluster.store.mode_changes()) == 3, "it is in charge again")
        gate.unlink()
        cluster.wait_for_end(job)
        changes = [(each.before, each.after, each.reason) for each in cluster.store.mode_changes()[::-1]]
        assert changes == [(None, "live", "start"), ("live", "observe", "reload"), ("observe", "live", "reload")]
        assert cluster.job(job).state is JobState.FINISHED
        assert cluster.stop() == 0
        assert '"event": "stopped"' in cluster.said()

    def test_the_file_by_which_jobs_find_it_is_written_at_the_start_and_by_a_reload(
        self, waiting: LocalCluster, tmp_path: Path
    ) -> None:
        file = tmp_path / "shared" / "dl2d" / "job-api.json"
        waiting.settings["api"]["address_file"] = str(file)  # type: ignore[index]
        waiting.write()
        before = os.umask(0o077)
        try:
            waiting.start()
        finally:
            os.umask(before)
        written = DaemonAddress(url=waiting.url, cluster="local", host=socket.gethostname(), uid=os.geteuid())
        assert find_address([file]) == (file, written)
        assert [path.stat().st_mode & 0o777 for path in (file, file.parent, file.parents[1])] == [0o644, 0o755, 0o755]
        file.unlink()
        waiting.hang_up()
        waiting.wait_until(file.exists, "it is written again")
        assert read_address(file) == written
        assert waiting.stop() == 0
        assert file.exists(), "jobs that start meanwhile wait for the next daemon"

    def test_a_file_that_cannot_be_written_keeps_no_daemon_from_its_work(
        self, waiting: LocalCluster, tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        waiting.settings["api"]["address_file"] = str(tmp_path / "file" / "job-api.json")  # type: ignore[index]
        waiting.write()
        waiting.start()
        assert "the address file cannot be written" in waiting.said()

    def test_sigint_stops_it_too(self, cluster: LocalCluster) -> None:
        assert cluster.process is not None
        cluster.process.send_signal(2)
        assert cluster.process.wait(timeout=30) == 0


def test_the_service_manager_hears_ready_alive_reloading_stopping(waiting: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(path))
        channel.settimeout(60)
        waiting.env |= {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "600000"}

        def heard(word: str) -> list[str]:
            """Words up to the one that is waited for."""
            words: list[str] = []
            while word not in words:
                words += channel.recv(4096).decode().splitlines()
            return words

        waiting.start()
        assert any(word.startswith("STATUS=slot ") for word in heard("READY=1"))
        heard("WATCHDOG=1")
        heard("WATCHDOG=1")
        waiting.hang_up()
        assert any(word.startswith("MONOTONIC_USEC=") for word in heard("RELOADING=1"))
        heard("READY=1")
        assert waiting.stop() == 0
        heard("STOPPING=1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_full_disk_stops_decisions_but_no_job_and_passes(waiting: LocalCluster, tmp_path: Path) -> None:
    disk, gate = tmp_path / "state", tmp_path / "hold-job"
    disk.mkdir()
    gate.touch()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "dl2d-test", str(disk)],
        capture_output=True, check=False, text=True,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        waiting.start()
        job = waiting.train("mine", "--optimizer", "momentum", "--step-seconds", "0.02", gate=gate, **SMALL)
        waiting.wait_for_size(job, 2, 1)
        ballast = disk / "ballast"
        fill(ballast)
        before = {process.pid for process in waiting.processes()}
        waiting.wait_until(lambda: "the disk is full; free some space" in waiting.said(), "it is told what to do")
        assert waiting.answers()
        refusal = waiting.post("/v1/jobs", {"request": _request("late"), "argv": ["true"], "cwd": "/", "env": {}})
        assert refusal.status_code == 503
        assert "the disk is full" in refusal.json()["error"]
        assert {process.pid for process in waiting.processes()} == before  # nothing was started, nothing stopped
        ballast.unlink()
        version = waiting.job(job).progress.version
        waiting.wait_until(
            lambda: waiting.job(job).progress.version > version or waiting.job(job).state.ended,
            "its word is kept again",
        )
        gate.unlink()
        ended = waiting.ended(job)
        assert (ended.state, ended.digest) == (
            JobState.FINISHED,
            waiting.static_digest("--optimizer", "momentum", epochs=10),
        )
        assert [found.request.name for found in waiting.store.jobs(live=False)] == ["mine"]
        assert waiting.stop() == 0
    finally:
        waiting.__exit__(None, None, None)
        subprocess.run(["umount", str(disk)], check=True)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        with pytest.raises(OSError, match="No space left"):  # noqa: PT012
            while True:
                os.write(descriptor, b"x" * 4096)
    finally:
        os.close(descriptor)


def _request(name: str) -> dict[str, object]:
    return {"model": "other", "epochs": 1, "samples_per_epoch": 1, "worker": {"cpu": 1}, "name": name}


# The loop itself, in this process.


class Running:
    """A daemon in a thread of its own, on a store in memory."""

    def __init__(
        self, folder: Path, store: SqlStore | None = None, api: dict[str, object] | None = None, *,
        policy: str = "", slot_seconds: float = 300.0, **options: Any,
    ) -> None:  # fmt: skip
        settings = Settings.model_validate(
            {
                "state_dir": folder / "state",
                "api": {"port": 0, **(api or {})},
                "schedule": {"poll_seconds": 60, "slot_seconds": slot_seconds},
                "policy": {"name": "dl2-original", "checkpoint": policy} if policy else {},
                "resource_manager": {"name": "local", "local": {"cluster": "here"}},
            }
        )
        self.error: Dl2dError | None = None
        self.daemon = Daemon(settings, store or SqlStore("sqlite://"), **options)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.daemon.run()
        except Dl2dError as error:
            self.error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.daemon.stop()
        self._thread.join(timeout=30)
        self.daemon.__exit__(None, None, None)
        assert not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Counts ticks; holds one back while ``gate`` is cleared; lets one fail with ``error``."""
    real = loop.tick
    state: dict[str, Any] = {"begun": 0, "gate": threading.Event(), "error": None}
    state["gate"].set()

    def counted(*arguments: Any) -> Any:
        state["begun"] += 1
        state["context"] = arguments[0]
        assert state["gate"].wait(timeout=30)
        if state["error"] is not None:
            raise state["error"]
        return real(*arguments)

    monkeypatch.setattr(loop, "tick", counted)
    yield state
    state["gate"].set()


def until(true: Any, what: str) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_ticks_ask_a_resource_manager_with_accounting_how_jobs_ended(
    tmp_path: Path, ticks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Running(tmp_path):
        until(lambda: ticks["begun"] == 1, "the first tick")
    assert ticks["context"].final_states(["1"]) == ()
    asked: list[str] = []
    monkeypatch.setattr(LocalManager, "final_states", lambda _, handles: asked.extend(handles) or (), raising=False)
    with Running(tmp_path):
        until(lambda: ticks["begun"] == 2, "a tick with another manager")
    assert ticks["context"].final_states(["1"]) == ()
    assert asked == ["1"]


def test_a_slow_first_tick_is_not_ended_by_the_service_manager(
    tmp_path: Path, ticks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where slurmctld is slow, it takes longer than TimeoutStartSec, and than WatchdogSec of a standby."""
    path = tmp_path / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    monkeypatch.setenv("WATCHDOG_USEC", "30000")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(path))
        channel.settimeout(30)
        ticks["gate"].clear()
        with Running(tmp_path):
            heard = [channel.recv(4096).decode().splitlines() for _ in range(4)]
            ticks["gate"].set()
            until(lambda: channel.recv(4096).startswith(b"READY=1"), "it is ready after the tick")
    starting, alive = ["EXTEND_TIMEOUT_USEC=600000000", "STATUS=starting"], ["WATCHDOG=1", "STATUS=starting"]
    assert heard == [starting, starting, alive, alive]


def test_a_wish_that_comes_during_a_tick_is_granted_after_it(tmp_path: Path, ticks: dict[str, Any]) -> None:
    with Running(tmp_path) as running:
        until(lambda: ticks["begun"] == 1, "the first tick")
        ticks["gate"].clear()
        running.daemon.wake()
        until(lambda: ticks["begun"] == 2, "the tick that was wished for, an interval being a minute")
        for _ in range(5):
            running.daemon.wake()
        ticks["gate"].set()
        until(lambda: ticks["begun"] == 3, "one more for all five")


@pytest.mark.parametrize("error", [StoreUnavailable("the disk is full"), ZeroDivisionError("a mistake of ours")])
def test_a_tick_that_fails_is_logged_and_the_next_one_comes(
    tmp_path: Path, ticks: dict[str, Any], error: Exception
) -> None:
    with Running(tmp_path) as running, capture_logs() as logs:
        until(lambda: ticks["begun"] == 1, "the first tick")
        ticks["error"] = error
        running.daemon.wake()
        until(lambda: any(entry["event"].startswith("tick failed") for entry in logs), "it is logged")
        ticks["error"] = None
        running.daemon.wake()
        until(lambda: ticks["begun"] >= 3, "the next tick")


def test_a_tick_that_has_to_wait_is_no_failure(tmp_path: Path, ticks: dict[str, Any]) -> None:
    with Running(tmp_path) as running, capture_logs() as logs:
        until(lambda: ticks["begun"] == 1, "the first tick")
        ticks["error"] = Waiting("containers have not reported")
        running.daemon.wake()
        until(
            lambda: any(
                entry["event"] == "tick skipped until the resource manager may be asked again" for entry in logs
            ),
            "it is logged",
        )
        assert not [entry for entry in logs if entry["log_level"] in ("warning", "error")]
        ticks["error"] = None
        running.daemon.wake()
        until(lambda: ticks["begun"] >= 3, "the next tick")


def test_rows_that_are_too_old_are_deleted_soon_after_the_start(tmp_path: Path) -> None:
    store = SqlStore("sqlite://", progress_seconds=0)
    store.add_job(job := a_job())
    store.report_progress(job.key, Progress(at=1.0))
    store.change_job(job.key, JobChange(state=JobState.FINISHED), 2.0)
    with Running(tmp_path, store):
        until(lambda: not store.jobs(live=False), "the job, which ended in 1970, is deleted")


def test_a_clock_that_is_wrong_by_years_at_the_start_makes_no_row_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite_store(tmp_path / "dl2d.sqlite")
    times: list[float] = []
    monkeypatch.setattr(loop, "prune", lambda _store, _keep, clock, _stop: times.append(clock()))
    for now in (1e9, 2e9):
        with Running(tmp_path, SqlStore(f"sqlite:///{tmp_path}/dl2d.sqlite"), clock=lambda now=now: now):
            until(lambda: times and times[-1], "old rows are looked for")
        assert times.pop() - 1e9 < 60


def test_a_certificate_that_jobs_refuse_is_a_warning_and_a_problem(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path, "127.0.0.1")
    api = {"certificate": certificate, "certificate_key": key}
    with capture_logs() as logs, Running(tmp_path, api={**api, "advertise": "https://head:8910"}) as running:
        problems = running.daemon._health.status().problems
    assert problems[0].startswith(f"jobs, which reach the daemon as head, refuse {certificate}: Hostname mismatch")
    assert [each["problem"] for each in logs if each["event"] == "jobs refuse the certificate"] == [*problems]
    with Running(tmp_path, api=api) as running:
        assert running.daemon._health.status().problems == ()


def test_where_the_live_version_is_gone_the_fallback_decides_and_health_says_so(
    tmp_path: Path, ticks: dict[str, Any]
) -> None:
    store = SqlStore("sqlite://")
    gone = Version(policy="dl2", digest="ab" * 32, folder=str(tmp_path / "gone"), origin="a test", at=1.0)
    store.registry.add_version(gone)
    store.registry.change("dl2", gone.digest, VersionState.LIVE, at=2.0, by="ann", reason="a test")
    with Running(tmp_path, store) as running:
        until(lambda: running.daemon._health.status().problems, "it is told")
        (problem,) = running.daemon._health.status().problems
    assert problem.startswith(
        "policy dl2 version abababababab is set aside and the fallback decides: it cannot be used (`dl2d check` and "
    )
    assert str(tmp_path) not in problem
    deciders = ticks["context"].deciders
    assert deciders.policy.name == deciders.fallback.name


def test_a_first_version_whose_decisions_fail_is_set_aside_and_health_says_so(
    tmp_path: Path, ticks: dict[str, Any]
) -> None:
    failures = PolicyFailures(consecutive=5, cause="policy dl2 failed: overflow", recent=(True,) * 5)
    report = cast("Report", SimpleNamespace(decided=True, policy_failures=failures))
    with Running(tmp_path) as running:
        until(lambda: ticks["begun"] == 1, "the first tick")
        assert ticks["context"].withdrawn is None
        for _ in range(2):
            running.daemon._withdraw_if_failing(report)
        until(lambda: running.daemon._health.status().problems, "it is told")
        (problem,) = running.daemon._health.status().problems
        changes = running.daemon._store.registry.changes("dl2")
    digits = with_checkpoint().checkpoint.digest[:12]
    assert problem == (
        f"policy dl2 version {digits} is set aside and the fallback decides: it failed, and no other version can take "
        "its place: 5 consecutive decisions failed, the last one: policy dl2 failed: overflow; promote another (dl2d "
        "policy promote), or reload to try it again"
    )
    assert ticks["context"].withdrawn is not None
    assert len(changes) == 2  # it went live, and the remark


def test_intervals_of_another_length_than_in_training_are_logged_at_the_start(tmp_path: Path) -> None:
    network = a_network(tmp_path, 5)  # trained with 300 s
    for seconds, lines in ((60.0, 1), (300.0, 0)):
        with capture_logs() as logs, Running(tmp_path, policy=str(network), slot_seconds=seconds):
            pass
        assert [each["event"] for each in logs].count("intervals of another length than in training") == lines


def test_a_lost_lease_ends_the_daemon(tmp_path: Path, ticks: dict[str, Any]) -> None:
    with Running(tmp_path) as running:
        until(lambda: ticks["begun"] == 1, "the first tick")
        ticks["error"] = AlreadyRunning("the store was taken over by another daemon")
        running.daemon.wake()
        running.join()
        assert isinstance(running.error, AlreadyRunning)


def test_a_job_api_that_dies_ends_the_daemon(tmp_path: Path, ticks: dict[str, Any]) -> None:
    with Running(tmp_path) as running:
        until(lambda: ticks["begun"] == 1, "the first tick")
        running.daemon._server._server.should_exit = True  # type: ignore[union-attr]
        until(lambda: not running.daemon._server.alive, "the API has ended")
        running.daemon.wake()
        running.join()
        assert "the job API has stopped unexpectedly" in str(running.error)


class TestPlugins:
    def point(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
        """Install a distribution with a policy called ``mine``, as a site would."""
        (tmp_path / "site_policy.py").write_text(source)
        info = tmp_path / "site_policy-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: site-policy\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[dl2d.policies]\nmine = site_policy:Mine\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "site_policy", raising=False)

    @pytest.mark.parametrize(
        "source", ["import no_such_module_at_all", "raise SystemExit(3)", "class Other: ...", "this is not Python"]
    )
    def test_one_that_cannot_be_loaded_is_reported_and_the_others_count(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
    ) -> None:
        self.point(tmp_path, monkeypatch, source)
        with capture_logs() as logs:
            found = plugins.available(plugins.POLICIES)
        assert {"drf", "fifo"} <= set(found)
        assert "mine" not in found
        assert [entry["name"] for entry in logs if entry["event"] == "plug-in cannot be loaded"] == ["mine"]
        with pytest.raises(PluginError, match=r"^policy\.name: 'mine' is not installed; installed are .*drf, fifo"):
            plugins.load_policy("mine")

    def test_one_that_cannot_be_made_says_why(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.point(tmp_path, monkeypatch, "class Mine:\n    def __init__(self): raise OSError('no weights')\n")
        with pytest.raises(PluginError, match=r"^policy\.name: plug-in 'mine' cannot be made: OSError: no weights$"):
            plugins.load_policy("mine")
