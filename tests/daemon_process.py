"""The real daemon as a process of its own, for tests: started, killed, restarted, asked."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import yaml
from free_ports import free_port

from dl2d.cli.daemon_access.job_api_client import daemon_trust
from dl2d.config.settings import load_settings
from dl2d.core.cluster import Task, TaskState
from dl2d.core.jobs import Allocation, Job, JobKey, Role
from dl2d.daemon.key_and_address_files import load_credentials
from dl2d.store.sql_store import SqlStore

BIN = Path(sys.executable).parent


class DaemonProcess:
    """``dl2d run`` on a configuration in ``directory``. As a context it is started, and at the end ended for sure."""

    def __init__(self, directory: Path, settings: Mapping[str, Any], *, env: Mapping[str, str] | None = None) -> None:
        self.directory = directory
        self.port = free_port()
        self.state_dir = directory / "state"
        self.config = directory / "dl2d.yaml"
        self.log = directory / "daemon.log"
        self.env = dict(os.environ if env is None else env)
        self.program = BIN / "dl2d"
        #: Further arguments of ``dl2d run``.
        self.arguments: list[str] = []
        self.settings: dict[str, Any] = {
            "state_dir": str(self.state_dir),
            "schedule": {"poll_seconds": 0.5, "slot_seconds": 5},
            "store": {"progress_seconds": 0.2},
            # Where nothing is known of a model yet, what drf gives can be told beforehand.
            "policy": {"name": "drf"},
            **settings,
            "api": {"port": self.port, "heartbeat_seconds": 0.3, **settings.get("api", {})},
        }
        if self.settings.get("resource_manager", {}).get("name") == "slurm":
            # Not in the installation of the tests.
            self.settings["api"].setdefault("address_file", str(directory / "job-api.json"))
        self.write()
        self.process: subprocess.Popen[bytes] | None = None
        self._store: SqlStore | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is not None:
            self._store.close()
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def write(self) -> None:
        """Write the settings to the configuration file."""
        self.config.write_text(yaml.safe_dump(self.settings))

    def spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [str(self.program), "run", "--config", str(self.config), *self.arguments],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.env, start_new_session=True,
            )  # fmt: skip

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.process = self.spawn()
        self.wait_until(self.answers, "the daemon answers")

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}:\n{self.said()}"
        try:
            return httpx2.get(f"{self.url}/v1/health", timeout=2, verify=self._trust()).status_code == 200
        except httpx2.TransportError:
            return False

    def kill(self) -> None:
        """As a crash: no word, no clean-up."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """As a service manager: SIGTERM; returns the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=30)

    @property
    def url(self) -> str:
        scheme = "https" if self.settings["api"].get("certificate") else "http"
        return f"{scheme}://127.0.0.1:{self.port}"

    @property
    def store(self) -> SqlStore:
        if self._store is None:
            self._store = SqlStore(self.store_url)
        return self._store

    @property
    def store_url(self) -> str:
        """URL of the store that the settings name."""
        url: str = self.settings["store"].get("url") or f"sqlite:///{self.state_dir / 'dl2d.sqlite'}"
        return url

    def said(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def post(self, path: str, body: object, *, credential: str | None = None) -> httpx2.Response:
        if credential is None:
            credential = load_credentials(self.state_dir / "secret", create=False).for_submission()
        headers = {"Authorization": f"Bearer {credential}"}
        return httpx2.post(f"{self.url}{path}", json=body, headers=headers, timeout=20, verify=self._trust())

    def _trust(self) -> ssl.SSLContext | bool:
        return daemon_trust(load_settings(self.config))

    def submit(self, request: Mapping[str, object], argv: list[str], **env: str) -> JobKey:
        """Submit a job that must be accepted."""
        environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **env}
        body = {"request": request, "argv": argv, "cwd": str(self.directory), "env": environment}
        answer = self.post("/v1/jobs", body)
        assert answer.status_code == 200, answer.text
        return JobKey.from_slug(answer.json()["job"])

    def job(self, key: JobKey) -> Job:
        job = self.store.job(key)
        assert job is not None, key
        return job

    def confirmed(self, key: JobKey) -> Allocation:
        """Tasks that take part in the training."""
        tasks = [task for task in self.store.tasks(live=True, job=key) if task.state is TaskState.CONFIRMED]
        return Allocation(*(sum(task.role is role for task in tasks) for role in (Role.WORKER, Role.PS)))

    def tasks(self, key: JobKey, *, live: bool = False) -> tuple[Task, ...]:
        return self.store.tasks(live=live, job=key)

    def wait_until(self, true: Callable[[], object], what: str, *, timeout: float = 60, every: float = 0.1) -> None:
        deadline = time.monotonic() + timeout
        while not true():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout:g} s: {what}\n{self.said()}\n{self._outputs()}")
            time.sleep(every)

    def wait_for_size(self, key: JobKey, workers: int, ps: int, **limit: float) -> None:
        """Wait until so many tasks take part in the training."""
        what = f"job {key.slug} has {workers} workers and {ps} servers"
        self.wait_until(lambda: self.confirmed(key) == (workers, ps), what, **limit)

    def wait_for_end(self, *keys: JobKey, timeout: float = 120) -> None:
        self.wait_until(lambda: all(self.job(key).state.ended for key in keys), "the jobs end", timeout=timeout)

    def wait_until_empty(self, *, timeout: float = 60) -> None:
        """Nothing of any job is left."""
        self.wait_until(lambda: not self.store.tasks(live=True), "all tasks are released", timeout=timeout)

    def _outputs(self) -> str:
        paths = sorted(self.directory.rglob("*.log")) + sorted(self.directory.rglob("*.out"))
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            for path in paths
            if path != self.log
        )
