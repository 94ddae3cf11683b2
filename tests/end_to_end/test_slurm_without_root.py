"""Elastic jobs of ordinary users under a daemon that is SlurmUser: it submits through slurmrestd or pyslurm."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from slurm_cluster import SlurmCluster, User, why_no_pyslurm, why_no_slurmrestd

from dl2d.core.jobs import JobState
from pslite.launch.daemon_connection.daemon_address_file import default_file

WORKER = Path(__file__).parent.parent / "pslite" / "numpy_worker.py"

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_slurmrestd()), reason=why_no_slurmrestd()),
]


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=2, slurmrestd=True) as cluster:
        yield cluster


@pytest.fixture
def alice(cluster: SlurmCluster) -> User:
    user = cluster.add_user("alice")
    cluster.add_python(user)
    for path in (WORKER, WORKER.with_name("regression.py")):
        (user.home / path.name).write_text(path.read_text())
    return user


@pytest.fixture(params=["rest", "pyslurm"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backend that ``auto`` takes by the settings of the daemon."""
    if request.param == "pyslurm" and (reason := why_no_pyslurm()):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def daemon(cluster: SlurmCluster, alice: User, backend: str) -> Iterator[DaemonProcess]:
    user = cluster.slurm_user
    assert user is not None
    folder = cluster.directory / "daemon"
    folder.mkdir()
    os.chown(folder, user.uid, user.gid)
    # That of the installation, in a folder that root gives the account.
    address_file = default_file(str(cluster.prefix))
    subprocess.run(["install", "-d", "-o", str(user.uid), address_file.parent], check=True)
    by = {
        "rest": {"slurmrestd": f"unix:{cluster.slurmrestd_socket}"},
        "pyslurm": {"pyslurm_python": str(cluster.pyslurm_python)},
    }
    manager = cluster.resource_manager(**by[backend])
    settings = {"resource_manager": manager, "api": {"address_file": str(address_file)}}
    daemon = DaemonProcess(folder, settings, env=cluster.env(user))
    daemon.program = folder / "dl2d"
    become = f"setpriv --reuid={user.uid} --regid={user.gid} --clear-groups"
    daemon.program.write_text(f'#!/bin/sh\nexec {become} {cluster.prefix}/bin/dl2d "$@"\n')
    daemon.program.chmod(0o755)
    with daemon:
        yield daemon


def test_jobs_of_another_user_grow_and_end_and_check_says_how(
    cluster: SlurmCluster, alice: User, daemon: DaemonProcess, backend: str
) -> None:
    check = subprocess.run(
        [str(daemon.program), "check", "--config", str(daemon.config)],
        capture_output=True, text=True, check=False, env=daemon.env,
    )  # fmt: skip
    assert f"{backend}: the daemon is not root" in check.stdout, check.stdout + check.stderr
    gate = alice.home / "hold-job"
    gate.touch()
    script = f"""#!/bin/sh
#SBATCH -c 1 --mem=50
#DL2 model=other samples_per_epoch=203 batch=20 epochs=60 max_workers=3 max_ps=1
#DL2 worker=cpu:2,memory:200 ps=cpu:1,memory:100
export PSLITE_PACE_FILE={gate}
exec dl2-run python "$HOME/numpy_worker.py" --epochs 60
"""
    job = cluster.submit_as(alice, script)
    daemon.wait_until(lambda: daemon.store.find_jobs(job), f"job {job} is registered", timeout=90)
    key = daemon.store.find_jobs(job)[0].key
    daemon.wait_for_size(key, 3, 1, timeout=90)
    users = set(cluster.run("squeue", "-h", "-o", "%u").stdout.split())
    assert users == {alice.name}
    gate.unlink()
    daemon.wait_for_end(key, timeout=240)
    daemon.wait_until_empty()
    assert daemon.job(key).state is JobState.FINISHED
    cluster.wait_until(lambda: not cluster.running(), "the batch script has ended, too")
