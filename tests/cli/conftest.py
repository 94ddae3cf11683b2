from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from migrated import sqlite_store
from tick.world import World

from dl2d.cli import main
from dl2d.cli.policy_trials import trial_on_recorded_days
from dl2d.core.jobs import JobKey
from dl2d.learning.site_records import split_of_recorded_days
from dl2d.learning.site_records.split_of_recorded_days import split_history


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Dl2d = Callable[..., Ran]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DL2D_CONFIG", "DL2D_POLICY__NAME", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def dl2d(capfd: pytest.CaptureFixture[str]) -> Dl2d:
    """Runs the command line as the console script does, and says how it ended."""

    def run(*arguments: str | Path) -> Ran:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.run([str(argument) for argument in arguments])
        said = capfd.readouterr()
        return Ran(int(ended.value.code or 0), said.out, said.err)

    return run


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of recorded days few workloads are made, to train on and to compare on: most of the time goes into these."""
    monkeypatch.setattr(trial_on_recorded_days, "split_history", partial(split_history, draws=4, tests=4))
    monkeypatch.setattr(split_of_recorded_days, "_MAX_VALIDATION_DAYS", 1)
    monkeypatch.setattr(split_of_recorded_days, "_MAX_DRAWS", 2)


@dataclass(frozen=True)
class Recorded:
    """A store in which three jobs were scheduled by real ticks, and the configuration that leads to it."""

    config: Path
    world: World
    first: JobKey
    second: JobKey
    waiting: JobKey


def store_url(folder: Path) -> str:
    """URL of the store to which the configuration in a folder leads; the folder of its file is there."""
    state = folder / "state"
    state.mkdir(mode=0o700, exist_ok=True)
    return f"sqlite:///{state}/dl2d.sqlite"


def new_store(folder: Path) -> str:
    """URL of a new store with the present schema in the place that ``store_url`` names."""
    return sqlite_store(Path(store_url(folder).removeprefix("sqlite:///")))


def write_config(folder: Path, **sections: object) -> Path:
    store_url(folder)
    file = folder / "dl2d.yaml"
    file.write_text(yaml.safe_dump({"state_dir": str(folder / "state"), **sections}))
    return file


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    """First took what there was, second made it shrink, the last one is too large for any node."""
    config = write_config(tmp_path)
    world = World(url=store_url(tmp_path))
    with closing(world):
        first = world.submit(name="first", model="vgg-16", max_workers=6)
        world.tick(1.0)
        world.beat()
        world.settle()
        second = world.settled(name="second", max_workers=4)
        waiting = world.submit(name="[bold]huge[/bold]", min_workers=16, max_workers=16)
        world.settle(4)
        world.beat(
            first,
            version=120,
            total_versions=320,
            epoch=3.75,
            loss=0.25,
            steps_per_second=12.5,
            plans=[
                {
                    "number": 2, "first_version": 77, "workers": 6, "servers": 4, "added": ["worker-1"],
                    "moved_bytes": 4_000_000, "prepare_ms": 20.0, "move_ms": 3.5,
                    "suspension_ms": {"p50": 0.125, "max": 1.75}, "longest_step_ms": 95.2, "median_step_ms": 30,
                }
            ],
        )  # fmt: skip
        yield Recorded(config, world, first, second, waiting)
