"""Elastic jobs on a private YARN: the daemon as a process, services with real training processes, real kills."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import yarn_cluster
from daemon_process import DaemonProcess
from local_cluster import KERNELS, REQUEST, WORKER, _static_digest

from dl2d.core.cluster import TaskState
from dl2d.core.jobs import JobKey, JobState
from dl2d.daemon.credentials import load_credentials

pytestmark = [
    pytest.mark.slow,
    pytest.mark.yarn,
    pytest.mark.skipif(bool(yarn_cluster.why_not()), reason=yarn_cluster.why_not() or "YARN is there"),
]
FAST = ("--optimizer", "momentum", "--step-seconds", "0.02")
DEMAND = {"worker": {"cpu": 2, "memory": 256}, "ps": {"cpu": 1, "memory": 256}}


class YarnDaemon(DaemonProcess):
    """The daemon on a private YARN of two nodes of 8 CPU."""

    def __init__(self, directory: Path, yarn: yarn_cluster.YarnCluster) -> None:
        self.yarn = yarn
        section = {
            "addresses": [yarn.address],
            "user": yarn.user,
            "report_seconds": 0.3,
            "coordinator_memory_mib": 256,
            "default_memory_mib": 256,
        }
        super().__init__(
            directory,
            {
                "resource_manager": {"name": "yarn", "yarn": section},
                "schedule": {"poll_seconds": 0.5, "slot_seconds": 3},
                "jobs": {"drain_seconds": 20, "end_seconds": 10, "grace_seconds": 2, "unseen_seconds": 10,
                         "start_seconds": 60},
            },
            env={**os.environ, **KERNELS},
        )  # fmt: skip

    def train(self, name: str, *arguments: str, epochs: int, gate: Path | None = None, **changes: object) -> JobKey:
        """Submit a training of the job file of the local cluster; it does not end while ``gate`` is there."""
        held = {"PSLITE_PACE_FILE": str(gate)} if gate else {}
        request = {**REQUEST, **DEMAND, "name": name, "epochs": epochs, **changes}
        command = [sys.executable, str(WORKER), "--epochs", str(epochs), *arguments]
        return self.submit(request, command, **KERNELS, **held)

    def start(self) -> None:
        """Start it and wait until a tick has listed the cluster: containers have a second to report."""
        super().start()
        self.wait_until(self.ticks, "a tick is complete")

    def ticks(self) -> bool:
        return httpx2.get(f"{self.url}/v1/health", timeout=5).json()["last_tick_seconds"] is not None

    def cancel(self, key: JobKey) -> None:
        credential = load_credentials(self.state_dir / "secret", create=False).for_submission()
        answer = httpx2.delete(
            f"{self.url}/v1/jobs/{key.slug}", headers={"Authorization": f"Bearer {credential}"}, timeout=20
        )
        assert answer.status_code == 200, answer.text

    def service(self, key: JobKey) -> httpx2.Response:
        """What YARN says of a job's service."""
        url = f"{self.yarn.address}/app/v1/services/dl2-{key.id}-{key.submitted}"
        return httpx2.get(url, params={"user.name": self.yarn.user}, timeout=20, trust_env=False)

    def apps(self) -> list[dict[str, Any]]:
        answer = httpx2.get(
            f"{self.yarn.address}/ws/v1/cluster/apps", params={"user.name": self.yarn.user}, timeout=20, trust_env=False
        )
        return answer.json()["apps"].get("app", [])

    def containers(self, key: JobKey) -> Counter[str]:
        """Number of the service's containers in each state."""
        components = self.service(key).json()["components"]
        return Counter(container["state"] for component in components for container in component["containers"])

    def processes_of(self, key: JobKey, *words: str) -> list[psutil.Process]:
        """Living processes of a job's containers whose command line holds all words."""
        found = []
        for process in self.yarn.container_processes():
            try:
                if process.environ().get("DL2_JOB") == key.slug and all(
                    any(word in part for part in process.cmdline()) for word in words
                ):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def wait_until_gone(self, key: JobKey) -> None:
        """Nothing of the job is left on the cluster: no process, no service, no name that is taken."""
        self.wait_until(lambda: not self.processes_of(key), "no process of the job is left", timeout=90)
        self.wait_until(lambda: self.service(key).status_code == 404, "its name is free", timeout=90, every=0.5)


@pytest.fixture(scope="module")
def yarn() -> Iterator[yarn_cluster.YarnCluster]:
    with yarn_cluster.YarnCluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture
def daemon(yarn: yarn_cluster.YarnCluster, tmp_path: Path) -> Iterator[YarnDaemon]:
    with YarnDaemon(tmp_path, yarn) as daemon:
        yield daemon
        for job in daemon.store.jobs(live=True):
            daemon.cancel(job.key)
        daemon.wait_until(lambda: not yarn_tasks(daemon), "no container of a job is left", timeout=90)


def yarn_tasks(daemon: YarnDaemon) -> list[psutil.Process]:
    return [process for job in daemon.store.jobs(live=False) for process in daemon.processes_of(job.key)]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "something-is-still-to-be-done"
    path.touch()
    return path


def test_two_jobs_share_the_cluster_and_end_with_the_weights_of_a_static_run(daemon: YarnDaemon, gate: Path) -> None:
    first = daemon.train("first", *FAST, epochs=20, gate=gate, max_workers=3, max_ps=2)
    daemon.wait_until(lambda: daemon.confirmed(first) == (3, 2), "the first job has all it may have")
    second = daemon.train("second", *FAST, epochs=15, gate=gate, max_workers=3, max_ps=2)
    daemon.wait_until(lambda: daemon.confirmed(second).workers >= 1, "the second job trains")
    daemon.wait_until(lambda: daemon.confirmed(first).workers < 3, "the first job has shrunk")
    gate.unlink()
    daemon.wait_for_end(first, second, timeout=180)
    for key, epochs in ((first, 20), (second, 15)):
        job = daemon.job(key)
        assert (job.state, job.end_reason) == (JobState.FINISHED, "did all epochs")
        assert job.digest == _static_digest(("--optimizer", "momentum"), epochs)
    plans = daemon.store.runtime_plans(first)
    assert any(plan.removed for plan in plans)
    assert any(plan.added for plan in plans)
    daemon.wait_until_empty()
    for key in (first, second):
        daemon.wait_until_gone(key)
        assert {task.state for task in daemon.tasks(key)} == {TaskState.RELEASED}
    finals = [each["finalStatus"] for each in daemon.apps() if each["name"].startswith(f"dl2-{first.id}-")]
    assert finals == ["SUCCEEDED"]


def test_a_worker_that_is_killed_is_replaced(daemon: YarnDaemon, gate: Path) -> None:
    key = daemon.train("killed", *FAST, epochs=12, gate=gate, max_workers=2, max_ps=1)
    daemon.wait_until(lambda: daemon.confirmed(key) == (2, 1), "both workers train")
    victim = next(task for task in daemon.tasks(key, live=True) if task.id.startswith("worker"))
    processes = [each for each in daemon.processes_of(key, str(WORKER)) if each.environ().get("DL2_TASK") == victim.id]
    for process in processes:
        process.kill()
    daemon.wait_until(lambda: victim.id not in {task.id for task in daemon.tasks(key, live=True)}, "it has failed")
    daemon.wait_until(lambda: daemon.confirmed(key) == (2, 1), "another one has its place")
    gate.unlink()
    daemon.wait_for_end(key, timeout=120)
    assert daemon.job(key).digest == _static_digest(("--optimizer", "momentum"), 12)
    daemon.wait_until_gone(key)


def test_the_daemon_and_the_services_master_are_killed_and_the_job_goes_on(daemon: YarnDaemon, gate: Path) -> None:
    key = daemon.train("kept", *FAST, epochs=12, gate=gate, max_workers=2, max_ps=1)
    daemon.wait_until(lambda: daemon.confirmed(key) == (2, 1), "the job trains")
    # A master that is started again releases containers of which its registry has no address yet.
    daemon.wait_until(lambda: daemon.containers(key) == {"READY": 4}, "YARN knows all containers' addresses")
    before = {task.id for task in daemon.tasks(key, live=True)}
    daemon.kill()
    application = daemon.service(key).json()["id"].removeprefix("application_")
    masters = [
        process
        for process in daemon.yarn.container_processes()
        if process.name() == "java" and application in process.environ().get("CONTAINER_ID", "")
    ]
    assert len(masters) == 1
    masters[0].kill()
    daemon.start()
    settled = time.time() + 5
    daemon.wait_until(lambda: time.time() > settled and daemon.confirmed(key) == (2, 1), "the job goes on")
    assert {task.id for task in daemon.tasks(key, live=True)} == before
    gate.unlink()
    daemon.wait_for_end(key, timeout=120)
    assert daemon.job(key).state is JobState.FINISHED
    assert daemon.job(key).digest == _static_digest(("--optimizer", "momentum"), 12)
    daemon.wait_until_gone(key)


def test_a_job_that_is_cancelled_leaves_nothing(daemon: YarnDaemon, gate: Path) -> None:
    key = daemon.train("cancelled", *FAST, epochs=12, gate=gate, max_workers=2, max_ps=1)
    daemon.wait_until(lambda: daemon.confirmed(key) == (2, 1), "the job trains")
    daemon.cancel(key)
    daemon.wait_until_empty()
    daemon.wait_until_gone(key)
