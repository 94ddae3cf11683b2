"""A wheel built from the checkout works alone, in an empty virtual environment."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml
from free_ports import free_port

CHECKOUT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, CHECKOUT]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the programs of an environment that has the wheel and what it requires, without extras."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    subprocess.run(
        # Little of what is installed is run: most of it need not be compiled.
        [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", wheel],
        check=True, timeout=800, cwd=folder,
    )  # fmt: skip
    return folder / "bin"


def run(program: Path, *arguments: str, cwd: Path, check: bool = True) -> str:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV", "DL2"))
    }
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, cwd=cwd, env=environment, timeout=200, check=False
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_everything_is_inside(installed: Path, tmp_path: Path) -> None:
    config = tmp_path / "dl2d.yaml"
    sample = run(installed / "dl2d", "config", cwd=tmp_path)
    settings = yaml.safe_load(sample)
    settings["state_dir"] = str(tmp_path / "state")
    settings["resource_manager"] = {"name": "local"}
    config.write_text(yaml.safe_dump(settings))
    (tmp_path / "state").mkdir(mode=0o700)

    assert "Usage: dl2d" in run(installed / "dl2d", "--help", cwd=tmp_path)
    run(installed / "dl2d", "db", "upgrade", "--config", str(config), cwd=tmp_path)
    said = json.loads(run(installed / "dl2d", "db", "current", "--json", "--config", str(config), cwd=tmp_path))
    assert said["current"] == said["head"] != ""
    run(installed / "dl2d", "check", "--config", str(config), cwd=tmp_path)
    assert "[Service]" in run(installed / "dl2d", "unit", cwd=tmp_path)
    code = """
import importlib.metadata as m, json
print(json.dumps({group: [p.name for p in m.entry_points(group=group) if p.load()]
    for group in ("dl2d.resource_managers", "dl2d.policies", "dl2d.placements")}))
"""
    found = json.loads(run(installed / "python", "-c", code, cwd=tmp_path))
    assert found["dl2d.resource_managers"] == ["local", "slurm", "yarn"]
    assert set(found["dl2d.policies"]) >= {"fifo", "drf", "srtf", "optimus", "optimus-loss", "lookahead", "dl2"}


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_daemon_schedules_by_the_default_policy(installed: Path, tmp_path: Path) -> None:
    port = free_port()
    state = {"state_dir": str(tmp_path / "state"), "resource_manager": {"name": "local"}, "api": {"port": port}}
    config = tmp_path / "dl2d.yaml"
    config.write_text(yaml.safe_dump({**state, "schedule": {"poll_seconds": 0.5, "slot_seconds": 5}}))
    job = tmp_path / "job.yaml"
    demand = "worker: {cpu: 1}, ps: {cpu: 1}"
    job.write_text(f"{{name: job, model: other, epochs: 9, steps_per_epoch: 9, {demand}, command: sleep 900}}")

    def said(*command: str) -> Any:
        return json.loads(run(installed / "dl2d", *command, "--json", "--config", str(config), cwd=tmp_path))

    with subprocess.Popen([installed / "dl2d", "run", "--config", config], cwd=tmp_path) as daemon:
        try:
            deadline = time.monotonic() + 100
            while not answers(port):
                assert daemon.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
            run(installed / "dl2d", "submit", str(job), "--config", str(config), cwd=tmp_path)
            while not any(slot["changed"] for slot in said("history")["slots"]):
                assert time.monotonic() < deadline
                time.sleep(0.5)
            run(installed / "dl2d", "cancel", "job", "--config", str(config), cwd=tmp_path)
            while said("status")["jobs"]:
                assert time.monotonic() < deadline
                time.sleep(0.5)
        finally:
            daemon.terminate()
        assert daemon.wait(timeout=60) == 0
    assert {slot["policy"] for slot in said("history")["slots"]} == {"dl2"}


def test_what_needs_an_extra_says_so(installed: Path, tmp_path: Path) -> None:
    packages = json.loads(run(installed / "pip", "list", "--format=json", cwd=tmp_path))
    names = {package["name"].lower() for package in packages}
    assert names.isdisjoint({"torch", "matplotlib", "scikit-learn", "gymnasium", "ray"})
    ran = subprocess.run([installed / "dl2d", "demo"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ran.returncode == 1
    assert ran.stderr.endswith("pip install 'dl2d[demo]'\n")


def test_a_job_runs_from_it_without_a_cluster(installed: Path, tmp_path: Path) -> None:
    """PyTorch and scikit-learn are those of this environment, which the new one looks at last: a job brings its own."""
    site = run(installed / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
    own = Path(site.strip()) / "job.pth"
    own.write_text("".join(f"{folder}\n" for folder in sys.path if folder.endswith("site-packages")))
    code = "from dl2d.config.settings import shipped; print(shipped('examples/train_digits.py'))"
    example = run(installed / "python", "-c", code, cwd=tmp_path).strip()
    command = [str(installed / "python"), example, "--model", "small", "--epochs", "1", "--out", str(tmp_path / "w.pt")]
    try:
        run(installed / "dl2-run", "--workers", "2", "--servers", "1", *command, cwd=tmp_path)
    finally:
        own.unlink()
    assert (tmp_path / "w.pt").stat().st_size > 0
