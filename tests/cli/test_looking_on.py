"""status, why and history where another scheduler is in charge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli.conftest import Dl2d, store_url, write_config
from observed_site import ForeignScheduler
from tick.world import World

from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.jobs import JobKey


@dataclass(frozen=True)
class Watched:
    config: Path
    world: World


@pytest.fixture(params=[Mode.OBSERVE, Mode.SHADOW])
def watched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Watched]:
    """One job of a user's runs for ten minutes, one waits."""
    config = write_config(tmp_path)
    world = World(url=store_url(tmp_path), mode=request.param)
    with closing(world):
        world.store.enter_mode(Mode.LIVE, at=world.now - 5, by="process 7 on head", reason="start")
        world.store.enter_mode(world.mode, at=world.now, by="process 7 on head", reason="reload")
        scheduler = ForeignScheduler(world)
        for model in ("bert", "resnet-50"):
            scheduler.submit(model, 7200.0)
        for _ in range(3):
            scheduler.go_on()
            world.tick(300)
        yield Watched(config, world)


def test_status_says_so_and_shows_hours(dl2d: Dl2d, watched: Watched) -> None:
    ran = dl2d("status", "-c", watched.config)
    lines = ran.out.splitlines()
    assert lines[0].startswith(f"mode {watched.world.mode}: dl2d ")
    assert lines[0].endswith("and starts and stops no task")
    assert lines[2].split()[:7] == ["1", "bert-1", "eve", "bert", "running", "6", "0"]
    assert lines[2].split()[8] == "h"
    assert "observed: what memory 1 gave, on n1, n2, n3" in lines[2]
    assert "observed: memory 1 gave nothing yet: Resources" in lines[3]
    shown = dl2d("status", "--json", "-c", watched.config).json
    assert shown["mode"] == watched.world.mode
    assert [(job["static"], job["epoch_is"]) for job in shown["jobs"]] == [(True, "hour"), (True, "hour")]


def test_history_has_the_modes_and_who_decided(dl2d: Dl2d, watched: Watched) -> None:
    shown = dl2d("history", "--json", "-c", watched.config).json
    assert [(each["before"], each["after"], each["reason"]) for each in shown["modes"]] == [
        (None, "live", "start"), ("live", str(watched.world.mode), "reload")
    ]  # fmt: skip
    assert {slot["policy"] for slot in shown["slots"]} == {"observed"}
    assert shown["slots"][0]["changed"] == 1
    ran = dl2d("history", "-c", watched.config)
    assert "modes" in ran.out
    assert "process 7 on head" in ran.out
    changes = dl2d("history", "--job", "1", "--json", "-c", watched.config).json["decisions"]
    assert [(each["previous"]["workers"], each["allocation"]["workers"]) for each in changes] == [(0, 6)]


def test_why_tells_what_was_done_and_what_would_have_been(dl2d: Dl2d, watched: Watched) -> None:
    ran = dl2d("why", "1", "-c", watched.config)
    assert "policy       observed version memory 1" in ran.out
    assert "constraint   observed: what memory 1 gave" in ran.out
    shown = dl2d("why", "1", "--json", "-c", watched.config).json["decisions"][0]
    assert shown["allocation"] == {"workers": 6, "ps": 0}
    if watched.world.mode is Mode.OBSERVE:
        assert "shadow" not in ran.out
        assert "shadow" not in shown
        return
    assert "decision of dl2d, not carried out" in ran.out
    assert "policy       drf version" in ran.out
    assert shown["shadow"]["policy"] == "drf"
    assert shown["shadow"]["reason"]["text"]
    assert watched.world.manager.submitted == []


def test_what_was_recorded_comes_out_again(dl2d: Dl2d, watched: Watched) -> None:
    ran = dl2d("why", "1", "--all", "--recompute", "--json", "-c", watched.config)
    assert ran.status == 0, ran.out + ran.err
    said = [each["recomputed"]["text"] for each in ran.json["decisions"]]
    if watched.world.mode is Mode.OBSERVE:
        assert set(said) == {"another scheduler decided; the recorded tasks agree with the recorded decision"}
    else:
        assert all("with drf version" in text and "the same, bit for bit" in text for text in said)


def test_a_job_that_has_ended_keeps_its_hours(dl2d: Dl2d, watched: Watched) -> None:
    world = watched.world
    world.manager.end("1")
    world.tick(60)
    found = world.store.job(JobKey("test", "1", 1_000_000))
    assert found is not None
    assert found.ended_at == world.now - 60
    shown = dl2d("status", "1", "--json", "-c", watched.config).json["jobs"][0]
    assert (shown["state"], shown["epochs"]) == ("finished", 4.0)
    assert shown["epoch"] == pytest.approx((found.ended_at - found.started_at) / 3600)
