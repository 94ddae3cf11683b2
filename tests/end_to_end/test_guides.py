"""Guides followed literally: the commands of a page in one shell, from its first to its last."""

from __future__ import annotations

import getpass
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
import yarn_cluster
from daemon_process import DaemonProcess, free_port
from slurm_cluster import SlurmCluster, User, why_not

from dl2d.cli.job_file import JobFile
from dl2d.core.job_request import RequestRules

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def section(page: str, heading: str) -> list[tuple[str, str]]:
    """Language and text of the code blocks under a heading of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    body = re.split(rf"^## {re.escape(heading)}$", text, flags=re.MULTILINE)[1]
    body = re.split(r"^## ", body, flags=re.MULTILINE)[0]
    return re.findall(r"^```(\w+)\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)


def test_a_job_on_one_machine(tmp_path: Path) -> None:
    install, follow, stop = (text for language, text in section("users-guide.md", "Try it on one machine"))
    # What is installed here is tested; tests/packaging builds and installs the wheel.
    steps = [line for line in install.splitlines() if not line.startswith(("python3 -m venv", "venv/bin/pip"))]
    assert len(install.splitlines()) - len(steps) == 2
    script = "\n".join(["set -e", *steps, follow, stop, "wait"])
    script = script.replace("$PWD/venv/bin", str(Path(sys.executable).parent))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "DL2D_API__PORT": str(free_port())}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    log = (tmp_path / "trial" / "daemon.log").read_text()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{log}"
    checked, _, rest = done.stdout.partition("submitted job")
    assert {line.split()[0] for line in checked.splitlines() if line} == {"ok"}
    assert "finished" in rest
    assert list((tmp_path / "trial" / "state" / "local" / "output").glob("*/worker-0.log"))


def job_of_the_yarn_guide(folder: Path) -> Path:
    """The job file of the guide to YARN, beside its training script."""
    text = next(text for _, text in section("yarn.md", "Install") if "train_digits.py" in text and "epochs" in text)
    (folder / "train_digits.py").write_text((ROOT / "examples" / "train_digits.py").read_text())
    file = folder / "job.yaml"
    file.write_text(text.replace("/opt/dl2d/bin/python", sys.executable))
    return file


@pytest.mark.yarn
@pytest.mark.skipif(bool(yarn_cluster.why_not()), reason=yarn_cluster.why_not() or "YARN is there")
def test_the_first_job_on_yarn(tmp_path: Path) -> None:
    settings, certificate, *commands = (text for language, text in section("yarn.md", "Install")[1:])
    job_of_the_yarn_guide(tmp_path)
    check, start, _, submit = commands
    assert start.count("systemctl") == 2
    certificate = certificate.replace("DNS:head.cluster", "IP:127.0.0.1")
    for there, here in (("/opt/dl2d/daemon.pem", "daemon.pem"), ("/etc/dl2d/key.pem", "key.pem")):
        settings, certificate = (text.replace(there, str(tmp_path / here)) for text in (settings, certificate))
    user, port = getpass.getuser(), free_port()
    proxy = {f"hadoop.proxyuser.{user}.hosts": "127.0.0.1", f"hadoop.proxyuser.{user}.users": "*"}
    page = (ROOT / "docs" / "yarn.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `(yarn\.[^`]+)`(?: \([^)]*\))? \| `([^`]+)`", page, re.MULTILINE))
    assert table["yarn.nodemanager.sleep-delay-before-sigkill.ms"] == "5000"
    with yarn_cluster.YarnCluster(nodes=1, core=proxy, properties=table) as cluster:
        (tmp_path / "dl2d.yaml").write_text(
            settings.replace("/opt/dl2d/bin", str(Path(sys.executable).parent))
            .replace("http://rm1:8088", cluster.address)
            .replace("https://head.cluster:8910", f"https://127.0.0.1:{port}")
            .replace("user: dl2d ", f"user: {user} ")
        )
        steps = [
            "set -e",
            certificate,
            check,
            "echo END",
            "dl2d run & until dl2d status; do sleep 0.5; done",
            submit.replace("--watch", ""),
        ]
        steps += ["until dl2d status --all | grep -q finished; do sleep 3; done", "dl2d history", "kill %1", "wait"]
        bin_folder = str(Path(sys.executable).parent)
        script = (
            "\n".join(steps)
            .replace("/opt/dl2d/bin/", f"{bin_folder}/")
            .replace("until dl2d", f"until {bin_folder}/dl2d")
        )
        environment = {
            "PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(tmp_path), "DL2D_CONFIG": str(tmp_path / "dl2d.yaml"),
            "DL2D_API__PORT": str(port), "DL2D_STATE_DIR": str(tmp_path / "state"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    checked = done.stdout.partition("END")[0]
    assert {line.split()[0] for line in checked.splitlines() if line} == {"ok"}
    assert "Services REST interface answers" in checked


@pytest.mark.nightly
def test_the_job_file_of_the_yarn_guide_runs_on_this_machine(tmp_path: Path) -> None:
    file = job_of_the_yarn_guide(tmp_path)
    nodes = [{"name": "n", "count": 2, "resources": {"cpu": 4, "memory": "8G"}}]
    local = {"name": "local", "local": {"state_dir": str(tmp_path / "local"), "nodes": nodes}}
    with DaemonProcess(tmp_path, {"resource_manager": local}) as daemon:
        command = [sys.executable, "-m", "dl2d.cli", "submit", "--wait", "-c", str(daemon.config), str(file)]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr + daemon.said()


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=2) as cluster:
        yield cluster


@pytest.mark.slurm
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm is there")
def test_the_first_job_on_slurm(cluster: SlurmCluster, tmp_path: Path) -> None:
    blocks = section("slurm.md", "Install")
    _, settings, certificate, check, start, probe, job = (text for _, text in blocks)
    assert start.count("systemctl") == 2
    alice: User = cluster.add_user("alice")
    cluster.add_python(alice)
    (alice.home / "train_digits.py").write_text((ROOT / "examples" / "train_digits.py").read_text())

    def here(text: str) -> str:
        places = {"/opt/dl2d": cluster.prefix, "/etc/dl2d": cluster.directory, "alice": alice.name}
        for there, place in {**places, "head.cluster": socket.gethostname()}.items():
            text = text.replace(there, str(place))
        return text

    def follow(commands: str, **env: str) -> str:
        return cluster.run("sh", "-ec", here(commands), env=env, timeout=180).stdout

    def assert_all_good(commands: str) -> str:
        said = follow(commands, DL2D_CONFIG=str(daemon.config))
        assert {line.split()[0] for line in said.splitlines()} == {"ok"}, said
        return said

    follow(certificate)
    given = yaml.safe_load(here(settings))
    assert given["resource_manager"]["slurm"] == {"partition": "gpu"}
    private = {
        "partition": cluster.partition, "slurm_conf": str(cluster.conf), "munge_socket": str(cluster.munge_socket)
    }  # fmt: skip
    daemon = DaemonProcess(
        tmp_path, {"resource_manager": {"name": "slurm", "slurm": private}, "api": {**given["api"], "address_file": ""}}
    )
    daemon.program = cluster.prefix / "bin" / "dl2d"
    daemon.settings["api"]["advertise"] = f"https://{socket.gethostname()}:{daemon.port}"
    daemon.write()
    assert "the daemon writes it when it starts" in assert_all_good(check)
    with daemon:
        said = assert_all_good(probe)
        assert f"is of user {alice.name}" in said
        assert re.search(r"probe: certificate +verified", said)
        number = cluster.submit_as(alice, job)
        daemon.wait_until(lambda: daemon.store.find_jobs(number), "the job is registered", timeout=120)
        key = daemon.store.find_jobs(number)[0].key
        daemon.wait_for_end(key, timeout=240)
        assert daemon.job(key).state == "finished", daemon.job(key).end_reason


@pytest.mark.nightly
@pytest.mark.slurm
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm is there")
def test_the_job_file_of_the_yarn_guide_runs_on_slurm(cluster: SlurmCluster, tmp_path: Path) -> None:
    alice: User = cluster.add_user("alice")
    cluster.add_python(alice)
    job = JobFile.read(job_of_the_yarn_guide(alice.home), RequestRules(), {"command": ["python", "train_digits.py"]})
    slurm = {"name": "slurm", "slurm": {"slurm_conf": str(cluster.conf), "munge_socket": str(cluster.munge_socket)}}
    with DaemonProcess(tmp_path, {"resource_manager": slurm}) as daemon:
        lines = job.as_batch_script(alice.home).splitlines()
        number = cluster.submit_as(alice, "\n".join([lines[0], f"export DL2_DAEMON={daemon.url}", *lines[1:], ""]))
        daemon.wait_until(lambda: daemon.store.find_jobs(number), "the job is registered", timeout=120)
        key = daemon.store.find_jobs(number)[0].key
        daemon.wait_for_end(key, timeout=240)
        assert daemon.job(key).state == "finished", daemon.job(key).end_reason
