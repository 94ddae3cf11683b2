"""The commands as a whole: exit statuses, help, version, what is in charge."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import yaml
from cli.conftest import Dl2d, store_url, write_config
from observed_site import ForeignScheduler
from tick.world import World

from dl2d import __version__
from dl2d.cli import main
from dl2d.config.settings import load_settings
from dl2d.core.cluster import Snapshot
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.decision import Decision
from dl2d.core.packing.bin_packing import Packing
from dl2d.policies.fifo import Fifo


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


@pytest.mark.parametrize("mode", [Mode.LIVE, Mode.SHADOW])
def test_policy_list_says_that_the_fallback_decides_while_the_policy_fails(dl2d: Dl2d, tmp_path: Path, mode: Mode):
    config = write_config(tmp_path, mode=str(mode), policy={"name": "fifo", "fallback": "drf"})

    def charges() -> dict[str, str]:
        shown = dl2d("policy", "list", "--json", "-c", config).json["policy"]
        return {each["name"]: each["charge"] for each in shown if each["charge"]}

    policy = Breaks()
    with closing(World(url=store_url(tmp_path), policy=policy, mode=mode)) as world:
        if mode is Mode.LIVE:
            world.submit()
            world.settle()
        else:
            ForeignScheduler(world).submit("bert", 7200.0)
        world.tick(300)
        assert charges() == {"drf": "decides", "fifo": "fails"}
        text = dl2d("policy", "list", "-c", config).out
        assert "the fallback made the last decision: " in text
        assert "out of order" in text
        policy.broken = False
        world.tick(300)
        assert charges() == {"drf": "fallback", "fifo": "decides"}


class Breaks(Fifo):
    """A policy that raises until it is repaired."""

    broken = True

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        if self.broken:
            raise ValueError("out of order")
        return super().decide(snapshot, packing, rng)


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
