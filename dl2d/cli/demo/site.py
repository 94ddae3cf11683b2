"""The demo's cluster: a temporary folder, a configuration, and the real daemon as a process of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
import yaml

from dl2d.cli.daemon_client import DaemonClient
from dl2d.cli.demo.script import Act, Script
from dl2d.cli.submit import job_environment
from dl2d.config.settings import Settings, load_settings
from dl2d.core.errors import AlreadyRunning, Dl2dError
from dl2d.core.jobs import Job, JobKey
from dl2d.daemon.loop import manager_settings
from dl2d.plugins import load_manager
from dl2d.store.sql import SqlStore

NODES = 4
NODE = {"cpu": 8, "gpu": 2}
_START_SECONDS = 60.0
_STOP_SECONDS = 15.0
_GRACE_SECONDS = 3.0
_LOOK_SECONDS = 0.1


class DemoFailed(Dl2dError):
    """The demo could not be played to its end."""


class Site:
    """Use as a context: at its end the daemon and everything that ran for its jobs have ended, whatever happened.

    Parameters
    ----------
    keep
        Whether the folder stays.

    Raises
    ------
    DemoFailed
        The daemon does not start; repeats what it said.
    """

    def __init__(self, script: Script, *, keep: bool) -> None:
        self._script = script
        self._keep = keep
        self._opened = ExitStack()
        #: Handles of tasks that had to be killed at the end; None before the end.
        self.left_over: int | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="dl2d-demo-"))
            stack.callback(self._remove)
            self.settings = self._write()
            daemon = self._start()
            stack.callback(self._clear)
            stack.callback(self._stop, daemon)
            self._wait(daemon)
            self.store = SqlStore(self.settings.store_url)
            stack.callback(self.store.close)
            self._opened = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def submit(self, act: Act) -> JobKey:
        """Hand a job in, over HTTP as ``dl2d submit`` does."""
        environment = job_environment(os.environ, {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})
        with DaemonClient(self.settings) as daemon:
            answer = daemon.submit(act.request(), act.command(), str(self.folder), environment)
        return JobKey.from_slug(answer["job"])

    def job(self, key: JobKey) -> Job:
        """The job as the store has it now."""
        job = self.store.job(key)
        if job is None:
            raise DemoFailed(f"job {key.slug} vanished from the store")
        return job

    def check(self) -> None:
        """Raises ``DemoFailed`` if the daemon has ended."""
        if self._daemon.poll() is not None:
            raise DemoFailed(f"the daemon ended with status {self._daemon.returncode}:\n{self.said()}")

    def wait_until_empty(self) -> None:
        """Wait until the store has no live task; the daemon reaps what ended jobs leave."""
        deadline = time.monotonic() + _STOP_SECONDS
        while self.store.tasks(live=True) and time.monotonic() < deadline:
            self.check()
            time.sleep(_LOOK_SECONDS)

    def said(self, lines: int = 20) -> str:
        """The end of the daemon's log."""
        return _tail(self._log, lines)

    def output_of(self, key: JobKey, lines: int = 12) -> str:
        """The end of what each task of a job printed."""
        found = sorted((self.settings.state_dir / "local" / "output" / key.slug).glob("*.log"))
        return "\n".join(f"--- {path.stem}\n{_tail(path, lines)}" for path in found)

    def _write(self) -> Settings:
        settings = {
            "state_dir": str(self.folder / "state"),
            "store": {"progress_seconds": 1.0},
            "resource_manager": {
                "name": "local",
                "local": {"cluster": "demo", "nodes": [{"name": "node", "count": NODES, "resources": NODE}]},
            },
            "policy": {"name": "drf"},
            "schedule": {"poll_seconds": self._script.poll_seconds, "slot_seconds": self._script.slot_seconds},
            "api": {"port": _free_port(), "heartbeat_seconds": self._script.heartbeat_seconds},
            "jobs": {
                "models": sorted({act.model_type for act in self._script.acts}),
                "drain_seconds": 30,
                "end_seconds": 5,
                "grace_seconds": 3,
            },
            "log": {"format": "console"},
        }
        path = self.folder / "dl2d.yaml"
        path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        return load_settings(path)

    def _start(self) -> subprocess.Popen[bytes]:
        self._log = self.folder / "daemon.log"
        command = [sys.executable, "-m", "dl2d.cli", "run", "--config", str(self.folder / "dl2d.yaml")]
        # A variable for some other daemon must not reach into this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("DL2D_", "DL2_"))}
        with self._log.open("ab") as log:
            # In a session of its own, so that Ctrl-C reaches us alone and we end it in order.
            self._daemon = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        return self._daemon

    def _wait(self, daemon: subprocess.Popen[bytes]) -> None:
        url = f"http://127.0.0.1:{self.settings.api.port}/v1/health"
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            self.check()
            try:
                if httpx2.get(url, timeout=2, trust_env=False).is_success:
                    return
            except httpx2.TransportError:
                pass
            time.sleep(_LOOK_SECONDS)
        raise DemoFailed(f"the daemon (process {daemon.pid}) does not answer:\n{self.said()}")

    def _stop(self, daemon: subprocess.Popen[bytes]) -> None:
        if daemon.poll() is None:
            daemon.terminate()
            try:
                daemon.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _clear(self) -> None:
        """End what the jobs still run. The resource manager knows its processes; the daemon must have let go of it."""
        try:
            manager = load_manager("local", manager_settings(self.settings), time.time)
        except AlreadyRunning as error:
            raise DemoFailed(f"the daemon still holds its tasks: {error}") from error
        try:
            handles = [job.handle for job in manager.snapshot().jobs if not job.state.ended]
            self.left_over = len(handles)
            manager.stop(handles, _GRACE_SECONDS)
            deadline = time.monotonic() + _GRACE_SECONDS + _STOP_SECONDS
            while handles and time.monotonic() < deadline:
                handles = [job.handle for job in manager.snapshot().jobs if not job.state.ended]
                time.sleep(_LOOK_SECONDS)
        finally:
            manager.close()
        if handles:
            raise DemoFailed(f"{len(handles)} tasks do not end; see {self.folder}")

    def _remove(self) -> None:
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(path: Path, lines: int) -> str:
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"({path.name}: {error.strerror})"
