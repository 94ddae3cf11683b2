"""A wheel built from the checkout works alone, in an empty virtual environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

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
    """Folder with the programs of an environment that has the wheel and what it requires, nothing else."""
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
    assert found["dl2d.resource_managers"] == ["local", "slurm"]
    assert set(found["dl2d.policies"]) >= {"fifo", "drf", "srtf", "optimus", "optimus-loss", "lookahead", "dl2"}
    from_web = "from dl2d.config.files import shipped; print(shipped('web/templates/timeline.html').read_text()[:15])"
    assert "<!doctype html>" in run(installed / "python", "-c", from_web, cwd=tmp_path).lower()


def test_a_job_runs_from_it_without_a_cluster(installed: Path, tmp_path: Path) -> None:
    code = "from dl2d.config.files import shipped; print(shipped('examples/train_digits.py'))"
    example = run(installed / "python", "-c", code, cwd=tmp_path).strip()
    command = [str(installed / "python"), example, "--model", "small", "--epochs", "1", "--out", str(tmp_path / "w.pt")]
    run(installed / "dl2-run", "--workers", "2", "--servers", "1", *command, cwd=tmp_path)
    assert (tmp_path / "w.pt").stat().st_size > 0
