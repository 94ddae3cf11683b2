"""The real daemon on the local resource manager, with real training processes, for tests; nothing is left behind."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from daemon_process import DaemonProcess

from dl2d.cli.daemon_access.job_api_client import DaemonClient
from dl2d.config.settings import load_settings
from dl2d.core.cluster import Task
from dl2d.core.errors import Dl2dError
from dl2d.core.jobs import Job, JobKey
from dl2d.local.manager import HANDLE_VARIABLE, create
from pslite.testing import run_local

WORKER = Path(__file__).parent / "pslite" / "numpy_worker.py"
#: Equal bits need equal kernels on both sides, and small tests need no threads.
KERNELS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
REQUEST = {
    "model": "other",
    "epochs": 60,
    "samples_per_epoch": 203,
    "batch": 20,
    "worker": {"cpu": 2},
    "ps": {"cpu": 1},
}


class LocalCluster(DaemonProcess):
    """Four nodes of 4 CPU by declaration. At the end every task is killed, however the test went."""

    def __init__(self, directory: Path, settings: Mapping[str, Any] | None = None) -> None:
        env = {**os.environ, **KERNELS}
        self.local_dir = directory / "local"
        super().__init__(
            directory,
            {
                "resource_manager": {
                    "name": "local",
                    "local": {
                        "state_dir": str(self.local_dir),
                        "nodes": [{"name": "n", "count": 4, "resources": {"cpu": 4}}],
                    },
                },
                "schedule": {"poll_seconds": 0.5, "slot_seconds": 3},
                "jobs": {"drain_seconds": 20, "end_seconds": 3, "grace_seconds": 2, "unseen_seconds": 5},
                **(settings or {}),
            },
            env=env,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._end_tasks()

    def _end_tasks(self) -> None:
        if not self.local_dir.exists():
            return
        try:
            manager = create({"state_dir": str(self.local_dir)}, clock=time.time)
        except Dl2dError as error:
            raise AssertionError(f"cannot clean up: {error}") from error
        try:
            deadline = time.monotonic() + 30
            while live := [job.identity for job in manager.listing().jobs if not job.state.ended]:
                assert time.monotonic() < deadline, f"tasks are still there: {live}"
                manager.stop(live, 0)
                time.sleep(0.1)
        finally:
            manager.close()
        assert self.processes() == []

    def clear(self) -> None:
        """Start the daemon if it does not run, and cancel what jobs are left."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        with DaemonClient(load_settings(self.config)) as daemon:
            for job in self.store.jobs(live=True):
                daemon.cancel(job.key.slug)
        self.wait_until(lambda: not self.processes(), "no task is left")

    def train(
        self, name: str, *arguments: str, epochs: int = 60, gate: Path | None = None, **changes: object
    ) -> JobKey:
        """Submit a training job that must be accepted; an epoch has 11 steps. It does not end while `gate` is there."""
        request = {**REQUEST, "name": name, "epochs": epochs, **changes}
        held = {"PSLITE_PACE_FILE": str(gate)} if gate else {}
        return self.submit(
            request, [sys.executable, str(WORKER), "--epochs", str(epochs), *arguments], **KERNELS, **held
        )

    def static_digest(self, *arguments: str, epochs: int = 60) -> str:
        """Digest of the same training with one worker and one server that never change."""
        return _static_digest(arguments, epochs)

    def processes(self) -> list[psutil.Process]:
        """Processes of tasks of this cluster: those whose handle has a record here."""
        handles = {path.stem for path in (self.local_dir / "tasks").glob("*.json")}
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(HANDLE_VARIABLE) in handles and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def processes_of(self, key: JobKey) -> list[psutil.Process]:
        """Processes of one job, its coordinator included."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("DL2_JOB") == key.slug:
                    found.append(process)
        return found

    def process_of(self, task: Task, command: str) -> psutil.Process:
        """The process below a task's ``dl2-run`` whose command line holds ``command``."""
        for process in self.processes():
            words = process.cmdline()
            mine = process.environ()[HANDLE_VARIABLE] == task.handle
            if mine and any(command in word for word in words) and not any("dl2-run" in word for word in words):
                return process
        raise AssertionError(f"{task.id} has no process that runs {command}")

    def task(self, key: JobKey, name: str) -> Task:
        return next(task for task in self.tasks(key) if task.id == name)

    def ended(self, key: JobKey) -> Job:
        """The job, once it has ended and nothing of it is left."""
        self.wait_for_end(key)
        self.wait_until(lambda: not self.tasks(key, live=True), "its tasks are released")
        self.wait_until(lambda: not self.processes_of(key), "no process of it is left", timeout=30)
        return self.job(key)

    def hang_up(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

    def logged(self, event: str) -> bool:
        return f'"event": "{event}"' in self.log.read_text()


@functools.cache
def _static_digest(arguments: tuple[str, ...], epochs: int) -> str:
    command = [sys.executable, str(WORKER), "--epochs", str(epochs), *arguments]
    result = run_local(command, environ={**os.environ, **KERNELS})
    assert result.digest, result.reason
    return result.digest
