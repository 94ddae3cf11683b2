"""The commands as a whole: exit statuses, help, version, what is in charge."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cli.conftest import Dl2d, write_config

from dl2d import __version__
from dl2d.cli import main
from dl2d.config.settings import load_settings


def test_version(dl2d: Dl2d):
    ran = dl2d("--version")
    assert (ran.status, ran.out) == (0, f"dl2d {__version__}\n")


def test_help_names_every_command(dl2d: Dl2d):
    ran = dl2d("--help")
    assert ran.status == 0
    assert all(f" {command} " in ran.out for command in main.COMMANDS)


@pytest.mark.parametrize("arguments", [["nonsense"], ["status", "--nonsense"], ["why"], ["history", "-n", "0"]])
def test_wrong_use(dl2d: Dl2d, arguments: list[str]):
    assert dl2d(*arguments).status == 2


def test_config_prints_a_sample_that_loads(dl2d: Dl2d, tmp_path: Path):
    ran = dl2d("config")
    assert ran.status == 0
    file = tmp_path / "dl2d.yaml"
    file.write_text(ran.out)
    load_settings(file)


def test_policy_list(dl2d: Dl2d, tmp_path: Path):
    config = write_config(tmp_path, policy={"name": "fifo", "fallback": "drf"})
    shown = dl2d("policy", "list", "--json", "-c", config).json
    policies = {each["name"]: each["charge"] for each in shown["policy"]}
    assert policies.keys() >= {"drf", "fifo", "optimus", "srtf", "tetris"}
    assert {name: charge for name, charge in policies.items() if charge} == {"drf": "fallback", "fifo": "decides"}
    assert {each["name"]: each["charge"] for each in shown["placement"]} == {
        "best_fit": None,
        "load_balance": "places",
        "optimus": None,
    }
    text = dl2d("policy", "list", "-c", config).out
    line = next(line for line in text.splitlines() if " fifo " in line)
    assert line.split()[:4] == ["policy", "fifo", "1", "decides"]


def test_db(dl2d: Dl2d, tmp_path: Path):
    config = write_config(tmp_path, store={"url": f"sqlite:///{tmp_path}/x.sqlite"})
    assert dl2d("db", "current", "--json", "-c", config).json["current"] is None
    assert dl2d("db", "upgrade", "-c", config).out.startswith("schema created: revision ")
    assert dl2d("db", "upgrade", "-c", config).out.startswith("schema is up to date: revision ")
    shown = dl2d("db", "current", "--json", "-c", config).json
    assert shown["current"] == shown["head"]


def test_as_a_module_and_into_a_closed_pipe(tmp_path: Path):
    """As a process of its own, for a reader that goes away."""
    done = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -m dl2d.cli config | head -n 1"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("# Configuration of dl2d")
    assert "Traceback" not in done.stderr
    assert yaml.safe_load(done.stdout) is None
