"""status, shadow, why, history and check in mode canary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from cli.conftest import Dl2d, store_url, write_config
from tick.decision.test_canary_decision import CanaryWorld

from dl2d.cli import canary_summary
from dl2d.core.cluster import Snapshot
from dl2d.core.daemon_mode_and_canary import CanaryState, Mode
from dl2d.core.decision import Decision
from dl2d.core.packing.bin_packing import Packing
from dl2d.policies.drf import Drf


class Failing(Drf):
    """A policy that raises an error."""

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        raise ArithmeticError("no weights")


@pytest.fixture
def tried(tmp_path: Path) -> Iterator[tuple[Path, CanaryWorld]]:
    config = write_config(tmp_path)
    known = yaml.safe_load(config.read_text()) or {}
    known |= {"mode": "canary", "policy": {"name": "drf", "fallback": "fifo"}, "canary": {"account": "new"}}
    config.write_text(yaml.safe_dump(known))
    with closing(CanaryWorld(policy=Drf(), mode=Mode.CANARY, url=store_url(tmp_path))) as world:
        world.store.enter_mode(Mode.CANARY, at=world.now, by="process 7 on head", reason="start")
        world.begin()
        world.add("new")
        world.add("old")
        world.settle()
        yield config, world


def test_status_and_shadow_say_who_decides_on_which_jobs(
    dl2d: Dl2d, tried: tuple[Path, CanaryWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, world = tried
    monkeypatch.setattr(canary_summary, "time", SimpleNamespace(time=lambda: world.now))
    sentence = f"canary 1: drf version {Drf().version} decides on jobs of account new, fifo on the others; nothing can"
    lines = dl2d("status", "-c", config).out.splitlines()
    assert lines[0] == "mode canary: the policy decides on some of the jobs, the fallback on the others"
    assert lines[1].startswith(sentence)
    assert dl2d("shadow", "-c", config).out.startswith(sentence)
    for command in ("status", "shadow"):
        shown = dl2d(command, "--json", "-c", config).json["canary"]
        assert (shown["number"], shown["state"], shown["account"]) == (1, "running", "new")
        assert shown["comparison"]["change"] is None


def test_why_names_the_policy_of_the_jobs_group_and_recomputes_both(
    dl2d: Dl2d, tried: tuple[Path, CanaryWorld]
) -> None:
    config, world = tried
    for job, policy in (("1", "drf"), ("2", "fifo")):
        ran = dl2d("why", job, "--recompute", "--json", "-c", config)
        (found,) = ran.json["decisions"]
        assert found["policy"] == policy
        assert found["recomputed"]["same"], found["recomputed"]["text"]
        assert ran.status == 0
        last = str(world.store.last_slot_number())
        assert dl2d("why", job, "--slot", last, "--json", "-c", config).json["decisions"][0]["policy"] == policy
    slots = dl2d("history", "--json", "-c", config).json["slots"]
    assert slots[-1]["policy"] == "canary"


def test_a_slot_in_which_the_policy_failed_is_recomputed_with_the_fallback_that_decided(
    dl2d: Dl2d, tried: tuple[Path, CanaryWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, world = tried
    with monkeypatch.context() as patch:
        patch.setattr(world, "policy", Failing())
        world.beat()
        world.tick(400.0)
    number = world.store.last_slot_number()
    slot = world.store.slot(number)
    assert slot is not None
    assert (slot.proposed.policy, "no weights" in slot.proposed.fallback_cause) == ("fifo", True)
    for job in ("1", "2"):
        ran = dl2d("why", job, "--slot", str(number), "--recompute", "--json", "-c", config)
        (found,) = ran.json["decisions"]
        assert found["policy"] == "fifo"
        assert found["recomputed"]["same"], found["recomputed"]["text"]
        assert "(the fallback, because drf had failed)" in found["recomputed"]["text"]
        assert ran.status == 0


def test_the_views_name_the_policy_of_each_job(dl2d: Dl2d, tried: tuple[Path, CanaryWorld]) -> None:
    config, _ = tried
    query = "SELECT DISTINCT job_id, policy FROM decision_history ORDER BY job_id"
    shown = dl2d("sql", query, "--json", "-c", config).json
    assert shown == [{"job_id": "1", "policy": "drf"}, {"job_id": "2", "policy": "fifo"}]


def test_check_and_policy_list_report_a_policy_that_was_withdrawn(dl2d: Dl2d, tried: tuple[Path, CanaryWorld]) -> None:
    config, world = tried

    def finding() -> dict[str, object]:
        findings = dl2d("check", "--json", "-c", config).json["findings"]
        return next(each for each in findings if each["item"] == "canary")

    assert finding()["good"]
    world.store.keep_canary(
        replace(world.canary, state=CanaryState.WITHDRAWN, reason="surely slower than fifo", ended_at=world.now)
    )
    found = finding()
    assert not found["good"]
    listed = dl2d("policy", "list", "-c", config).out
    assert "the fallback made the last decision: policy drf was withdrawn (canary 1): surely slower than fifo" in listed
    assert found["text"] == (
        f"canary 1 withdrawn: fifo decides on all jobs in place of drf version {Drf().version}; surely slower than fifo"
    )
