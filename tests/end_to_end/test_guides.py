"""Guides followed literally: the commands of a page in one shell, from its first to its last."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from daemon_process import DaemonProcess, free_port
from slurm_cluster import SlurmCluster, User, why_not

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
    script = "\n".join(
        ["set -e", *steps, "until dl2d check | grep -q 'runs at'; do sleep 0.2; done", follow, stop, "wait"]
    )
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


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=2) as cluster:
        yield cluster


@pytest.mark.slurm
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm is there")
def test_the_first_job_on_slurm(cluster: SlurmCluster, tmp_path: Path) -> None:
    blocks = section("slurm.md", "Install")
    settings = yaml.safe_load(next(text for language, text in blocks if language == "yaml"))
    job = next(text for language, text in blocks if "#DL2" in text)
    export = next(text for language, text in blocks if "DL2_DAEMON" in text)
    alice: User = cluster.add_user("alice")
    cluster.add_python(alice)
    (alice.home / "train_digits.py").write_text((ROOT / "examples" / "train_digits.py").read_text())
    slurm = {"slurm_conf": str(cluster.conf), "munge_socket": str(cluster.munge_socket)}
    with DaemonProcess(tmp_path, {"resource_manager": {**settings["resource_manager"], "slurm": slurm}}) as daemon:
        variable = re.search(r"export (DL2_DAEMON=)\S+'", export)
        assert variable is not None
        script = job.replace("#!/bin/sh\n", "", 1)
        directives, command = script.rsplit("\n", 2)[0], script.rsplit("\n", 2)[1]
        batch = f"#!/bin/sh\n{directives}\nexport {variable[1]}{daemon.url}\n{command}\n"
        number = cluster.submit_as(alice, batch)
        daemon.wait_until(lambda: daemon.store.find_jobs(number), "the job is registered", timeout=120)
        key = daemon.store.find_jobs(number)[0].key
        daemon.wait_for_end(key, timeout=240)
        assert daemon.job(key).state == "finished", daemon.job(key).end_reason
