"""The daemon on a private YARN: jobs of its own, and services of other users."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import psutil
import yarn_cluster
from daemon_process import DaemonProcess
from local_cluster import KERNELS, REQUEST, WORKER

from dl2d.core.jobs import JobKey
from dl2d.daemon.key_and_address_files import load_credentials

FAST = ("--optimizer", "momentum", "--step-seconds", "0.02")
DEMAND = {"worker": {"cpu": 2, "memory": 256}, "ps": {"cpu": 1, "memory": 256}}


class YarnDaemon(DaemonProcess):
    """The daemon on a private YARN of three nodes of 6 CPU."""

    def __init__(self, directory: Path, yarn: yarn_cluster.YarnCluster, *, mode: str = "live", **more: object) -> None:
        self.yarn = yarn
        section = {
            "addresses": list(yarn.addresses.values()),
            "user": yarn.user,
            "report_seconds": 0.3,
            "coordinator_memory_mib": 256,
            "default_memory_mib": 256,
            **more,
        }
        super().__init__(
            directory,
            {
                "mode": mode,
                "resource_manager": {"name": "yarn", "yarn": section},
                # A container starts within a slot: until it reports, its room counts twice.
                "schedule": {"poll_seconds": 0.5, "slot_seconds": 5},
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

    def wait_until(self, true: Callable[[], object], what: str, *, timeout: float = 150, every: float = 0.1) -> None:
        """Wait, longer than elsewhere: on a busy machine each Java process takes half a minute to start."""
        super().wait_until(true, what, timeout=timeout, every=every)

    def ticks(self) -> bool:
        return httpx2.get(f"{self.url}/v1/health", timeout=5).json()["last_tick_seconds"] is not None

    def cancel(self, key: JobKey) -> None:
        credential = load_credentials(self.state_dir / "secret", create=False).for_submission()
        answer = httpx2.delete(
            f"{self.url}/v1/jobs/{key.slug}", headers={"Authorization": f"Bearer {credential}"}, timeout=20
        )
        assert answer.status_code == 200, answer.text

    def post_plain(self, name: str, user: str, *, queue: str = "default", containers: int, **demand: int) -> str:
        """A user posts a service that knows nothing of dl2d; returns its application's id without the prefix."""
        gpu = {"yarn.io/gpu": {"value": demand.get("gpu", 0), "unit": ""}}
        resource = {"cpus": demand.get("cpu", 1), "memory": str(demand.get("memory", 64)), "additional": gpu}
        component = {
            "name": "main", "number_of_containers": containers, "launch_command": "exec sleep 600", "resource": resource
        }  # fmt: skip
        content = {"name": name, "version": "1", "queue": queue, "components": [component]}
        answer = self._services("POST", "", user, content)
        assert answer.status_code == 202, answer.text
        return answer.json()["diagnostics"].rpartition("application_")[2]

    def flex_plain(self, name: str, user: str, containers: int) -> None:
        """A user changes the size of such a service."""
        component = {"name": "main", "number_of_containers": containers}
        answer = self._services("PUT", f"/{name}", user, {"state": "FLEX", "components": [component]})
        assert answer.status_code == 202, answer.text

    def delete_plain(self, name: str, user: str) -> None:
        """A user ends such a service."""
        answer = self._services("DELETE", f"/{name}", user, None)
        assert answer.status_code == 200, answer.text

    def _services(self, method: str, path: str, user: str, content: object) -> httpx2.Response:
        url, identity = f"{self.yarn.address}/app/v1/services{path}", {"user.name": self.yarn.user, "doAs": user}
        return httpx2.request(method, url, params=identity, json=content, timeout=30, trust_env=False)

    def service(self, key: JobKey, name: str = "") -> httpx2.Response:
        """What YARN says of a job's service."""
        url = f"{self.yarn.address}/app/v1/services/{name or f'dl2-{key.id}-{key.submitted}'}"
        return self._get(url)

    def apps(self) -> list[dict[str, Any]]:
        return self._get(f"{self.yarn.address}/ws/v1/cluster/apps").json()["apps"].get("app", [])

    def _get(self, url: str) -> httpx2.Response:
        identity = {"user.name": self.yarn.user}
        return httpx2.get(url, params=identity, timeout=20, trust_env=False, follow_redirects=True)

    def containers(self, key: JobKey) -> Counter[str]:
        """Number of the service's containers in each state."""
        components = self.service(key).json().get("components", [])
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

    def masters(self, key: JobKey) -> list[psutil.Process]:
        """The living application master of a job's service."""
        application = self.service(key).json()["id"].removeprefix("application_")
        return [
            process
            for process in self.yarn.container_processes()
            if process.name() == "java" and application in process.environ().get("CONTAINER_ID", "")
        ]

    def dl2d(self, *arguments: str, cwd: Path) -> str:
        """Output of a command with the daemon's configuration."""
        done = subprocess.run(
            [sys.executable, "-m", "dl2d.cli", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120,
            check=False, env={**self.env, "DL2D_CONFIG": str(self.config)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def wait_until_gone(self, key: JobKey, name: str = "") -> None:
        """Nothing of the job is left on the cluster: no process, no service, no name that is taken."""
        self.wait_until(lambda: not self.processes_of(key), "no process of the job is left", timeout=90)
        self.wait_until(lambda: self.service(key, name).status_code == 404, "its name is free", timeout=90, every=0.5)
