"""One job file, unchanged, under the local manager, Slurm and YARN: elastic PyTorch jobs with equal final weights."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import slurm_cluster
import yaml
import yarn_cluster
from daemon_process import BIN, DaemonProcess
from local_cluster import KERNELS, LocalCluster
from slurm_cluster import SlurmCluster
from yarn_daemon import YarnDaemon

from dl2d.core.cluster import Task, TaskState
from dl2d.core.jobs import NOTHING, Allocation, JobState
from pslite.testing import run_local

SCRIPT = Path(__file__).parents[1] / "pslite" / "torch_worker.py"
EPOCHS = 30

pytestmark = pytest.mark.slow

#: Submits a job file in the folder of the job; returns the job's id.
Submit = Callable[[str], str]
#: A daemon, the folder of the jobs that are submitted to it, and how.
Site = tuple[DaemonProcess, Path, Submit]


def job_file(gate: Path, **more: object) -> str:
    request = {
        "model": "other", "epochs": EPOCHS, "samples_per_epoch": 110, "batch": 20, "max_workers": 3,
        "worker": {"cpu": 2, "memory": "256M"}, "ps": {"cpu": 1, "memory": "256M"},
        "command": f"python {SCRIPT.name} --epochs {EPOCHS}",
        # It does not end while something is still to be done to it.
        "env": {**KERNELS, "PSLITE_PACE_FILE": str(gate)},
    }  # fmt: skip
    return yaml.safe_dump({**request, **more})


@functools.cache
def static_digest(architecture: str) -> str:
    """Digest of the training with one worker that never changes."""
    environment = {**os.environ, **KERNELS, "DL2_ARCHITECTURE": architecture}
    command = [sys.executable, str(SCRIPT), "--epochs", str(EPOCHS)]
    result = run_local(command, servers=int(architecture == "ps"), environ=environment)
    assert result.digest, result.reason
    return result.digest


def submit_to_daemon(daemon: DaemonProcess, folder: Path, file: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dl2d.cli", "submit", file, "--json", "-c", str(daemon.config)], cwd=folder,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return str(json.loads(done.stdout)["id"])


@contextmanager
def local(directory: Path) -> Iterator[Site]:
    nodes = [{"name": "n", "count": 3, "resources": {"cpu": 4, "memory": "4G"}}]
    manager = {"name": "local", "local": {"state_dir": str(directory / "local"), "nodes": nodes}}
    with LocalCluster(directory, {"resource_manager": manager}) as daemon:
        yield daemon, directory, functools.partial(submit_to_daemon, daemon, directory)


@contextmanager
def slurm(directory: Path) -> Iterator[Site]:
    with SlurmCluster(nodes=3, cpus=4) as cluster:
        alice = cluster.add_user("alice")
        cluster.add_python(alice)
        manager = cluster.resource_manager()
        with DaemonProcess(directory, {"resource_manager": manager}) as daemon:
            config = alice.home / "dl2d.yaml"
            config.write_text(yaml.safe_dump({"resource_manager": manager, "api": {"advertise": daemon.url}}))
            command = ("python", "-m", "dl2d.cli", "submit", "--json", "-c", str(config))
            yield daemon, alice.home, lambda file: str(json.loads(cluster.run(*command, file, user=alice).stdout)["id"])
            cluster.wait_until(lambda: cluster.running() == [], "the scripts end after their jobs")
            assert {job.owner.user for job in daemon.store.jobs(live=False)} == {alice.name}
            outputs = [path.stat() for path in alice.home.glob("**/*.out")]
            assert len(outputs) > 4
            assert {(each.st_uid, each.st_gid) for each in outputs} == {(alice.uid, alice.gid)}


@contextmanager
def yarn(directory: Path) -> Iterator[Site]:
    with (
        yarn_cluster.YarnCluster(nodes=3, vcores=5) as cluster,
        YarnDaemon(directory, cluster) as daemon,
    ):
        yield daemon, directory, functools.partial(submit_to_daemon, daemon, directory)
        nodes = {f"localhost:{cluster.port_of(name)}" for name in cluster.node_managers}
        for job in daemon.store.jobs(live=False):
            assert {task.node for task in daemon.tasks(job.key)} <= nodes
            daemon.wait_until_gone(job.key)
        assert {app["finalStatus"] for app in daemon.apps()} == {"SUCCEEDED"}
    assert cluster.container_processes() == []


@pytest.mark.parametrize(
    "site_of",
    [
        pytest.param(local, marks=pytest.mark.nightly),
        pytest.param(
            slurm,
            marks=[
                pytest.mark.slurm,
                pytest.mark.skipif(bool(slurm_cluster.why_not()), reason=slurm_cluster.why_not() or "Slurm is there"),
            ],
        ),
        pytest.param(
            yarn,
            marks=[
                pytest.mark.yarn,
                pytest.mark.nightly,
                pytest.mark.skipif(bool(yarn_cluster.why_not()), reason=yarn_cluster.why_not() or "YARN is there"),
            ],
        ),
    ],
)
def test_the_same_job_file_trains_the_same_weights_under_every_resource_manager(
    site_of: Callable[[Path], AbstractContextManager[Site]], tmp_path: Path
) -> None:
    with site_of(tmp_path) as (daemon, folder, submit):
        gate = folder / "hold-job"
        gate.touch()
        shutil.copy(SCRIPT, folder)
        (folder / "servers.yaml").write_text(job_file(gate, name="servers", max_ps=2))
        (folder / "allreduce.yaml").write_text(job_file(gate, name="allreduce", architecture="allreduce"))
        digests = train_both(daemon, submit, gate)
    assert digests == {"servers": static_digest("ps"), "allreduce": static_digest("allreduce")}


def train_both(daemon: DaemonProcess, submit: Submit, gate: Path) -> dict[str, str | None]:
    """Let a job with servers grow, and shrink for an all-reduce job; returns the digests of their final weights."""
    keys = {}
    for file in ("servers", "allreduce"):
        number = submit(f"{file}.yaml")
        daemon.wait_until(lambda number=number: daemon.store.find_jobs(number), f"{file} is known", timeout=120)
        keys[file] = daemon.store.find_jobs(number)[0].key
        if file == "servers":
            daemon.wait_until(
                lambda: daemon.confirmed(keys["servers"]) == Allocation(3, 2), "it has all it may have", timeout=150
            )
    first, second = keys["servers"], keys["allreduce"]
    daemon.wait_until(lambda: daemon.confirmed(second).workers > 0, "the second job trains", timeout=150)
    daemon.wait_until(lambda: daemon.confirmed(first).workers < 3, "the first job has shrunk", timeout=150)
    gate.unlink()
    daemon.wait_for_end(first, second, timeout=240)
    daemon.wait_until(
        lambda: not any(daemon.store.tasks(live=True, job=key) for key in (first, second)), "all tasks are released"
    )
    for key in (first, second):
        job = daemon.job(key)
        assert (job.state, job.end_reason) == (JobState.FINISHED, "did all epochs")
        decided = [entry.decided.allocation for entry in daemon.store.decisions(key)]
        assert set(decided) - {NOTHING}, f"no decision for {key} is in the store"
        assert all(entry.decided.reason.text for entry in daemon.store.decisions(key))
        for resize in daemon.store.resizes(key):
            states = [event.state for event in resize.events]
            if resize.direction == "grow":
                assert states[0] is TaskState.ASKED, resize
            else:
                assert states[-1] is TaskState.RELEASED, resize
    assert Allocation(3, 2) in [entry.decided.allocation for entry in daemon.store.decisions(first)]
    plans = daemon.store.runtime_plans(first)
    assert any(plan.added for plan in plans)
    assert any(plan.removed for plan in plans)
    daemon.wait_until_empty()
    left: list[Task] = [task for key in (first, second) for task in daemon.tasks(key)]
    assert {task.state for task in left} == {TaskState.RELEASED}
    return {name: daemon.job(key).digest for name, key in keys.items()}
