"""Versions of a policy that learns, from the command line; and what is told of one that cannot be used."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from cli.conftest import Dl2d, write_config
from daemon_process import free_port

from dl2d.policies.checkpoint import Checkpoint, write_checkpoint
from dl2d.policies.dl2 import shipped


@pytest.fixture
def config(dl2d: Dl2d, tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    config = write_config(tmp_path, policy={"name": "dl2"}, api={"port": free_port()})
    assert dl2d("db", "upgrade", "-c", config).status == 0
    return config


def checkpoint(folder: Path, number: int) -> Path:
    base = shipped().checkpoint
    scorer = np.asarray(base.weights["scorer"]) + number
    made = Checkpoint(policy="dl2", weights={**base.weights, "scorer": scorer}, settings=base.settings, training={})
    write_checkpoint(made, folder / f"c{number}")
    return folder / f"c{number}"


def test_promote_list_and_roll_back(dl2d: Dl2d, config: Path, tmp_path: Path) -> None:
    one, two = (
        dl2d("policy", "promote", checkpoint(tmp_path, number), "--json", "-c", config).json for number in (1, 2)
    )
    assert (one["state"], two["state"]) == ("live", "live")
    shutil.rmtree(tmp_path / "c1")  # a version is a copy
    ran = dl2d("policy", "rollback", "--reason", "slower", "-c", config)
    assert ran.out == f"dl2 version {one['digest'][:12]} decides from the next interval on ({one['origin']})\n"
    shown = dl2d("policy", "list", "--json", "-c", config).json
    assert {each["digest"]: each["state"] for each in shown["versions"]} == {
        one["digest"]: "live", two["digest"]: "retired"
    }  # fmt: skip
    assert [(each["reason"], each["rollback"]) for each in shown["changes"] if each["after"] == "live"] == [
        ("slower", True), ("promoted by hand", False), ("promoted by hand", False)
    ]  # fmt: skip
    (decides,) = [each for each in shown["policy"] if each["charge"] == "decides"]
    assert decides["version"] == f"{one['digest'][:12]} slot_seconds=300.0"
    ran = dl2d("policy", "rollback", "-c", config)
    assert ran.status == 1
    assert "is the first: there is none before it" in ran.err
    assert dl2d("policy", "promote", two["digest"][:6].upper(), "-c", config).status == 0


def test_what_cannot_be_promoted(dl2d: Dl2d, config: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for what, words in (
        ("abcdef", "'abcdef' is no version of dl2 and no folder"),
        (str(tmp_path / "empty"), "is no checkpoint"),
        ("", "is no checkpoint"),
    ):
        ran = dl2d("policy", "promote", what, "-c", config)
        assert ran.status == 1
        assert words in ran.err
    assert dl2d("policy", "list", "--json", "-c", config).json["versions"] == []
    config = write_config(tmp_path, policy={"name": "drf"})
    ran = dl2d("policy", "rollback", "-c", config)
    assert ran.status == 2
    assert "policy.name: 'drf' learns nothing, so it has no versions" in ran.err


def findings(dl2d: Dl2d, config: Path) -> dict[str, tuple[bool, str]]:
    return {
        each["item"]: (each["good"], each["text"]) for each in dl2d("check", "--json", "-c", config).json["findings"]
    }


def test_check_tells_of_a_checkpoint_that_cannot_be_read(dl2d: Dl2d, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 1)
    here = {"api": {"port": free_port()}}
    config = write_config(
        tmp_path, policy={"name": "dl2", "checkpoint": str(folder), "settings": {"optimism": 1}}, **here
    )
    good, text = findings(dl2d, config)["policy.checkpoint"]
    assert good
    assert text.endswith(" optimism=1.0 slot_seconds=300.0")
    (folder / "weights.safetensors").write_bytes(b"x")
    good, text = findings(dl2d, config)["policy.checkpoint"]
    assert (good, "is damaged" in text) == (False, True)
    config = write_config(tmp_path, policy={"name": "dl2", "settings": {"speed": 1}}, **here)
    good, text = findings(dl2d, config)["policy.settings"]
    assert not good
    assert (
        text == "policy.settings.speed: policy 'dl2' has no such setting; it has optimism, resize_seconds, slot_seconds"
    )
    config = write_config(tmp_path, policy={"name": "drf"}, learning={"enabled": True}, **here)
    assert findings(dl2d, config)["learning.enabled"] == (
        False, "policy 'drf' does not learn from a site; set policy.name: dl2"
    )  # fmt: skip


def test_check_tells_of_a_live_version_that_is_gone(dl2d: Dl2d, config: Path, tmp_path: Path) -> None:
    promoted = dl2d("policy", "promote", checkpoint(tmp_path, 1), "--json", "-c", config).json
    good, text = findings(dl2d, config)["live version"]
    assert good
    assert text.startswith(f"dl2 version {promoted['digest'][:12]} slot_seconds=300.0, checkpoint ")
    shutil.rmtree(promoted["folder"])
    good, text = findings(dl2d, config)["live version"]
    assert (good, "is no checkpoint" in text) == (False, True)


def test_a_twin_needs_a_store_with_days(dl2d: Dl2d, config: Path, tmp_path: Path) -> None:
    ran = dl2d("train", "--twin", "-c", config, "-o", tmp_path / "out")
    assert ran.status == 2
    assert "the twin: jobs whose speeds were measured came on 0 days" in ran.err
    ran = dl2d("train", "--twin", "--store", f"sqlite:///{tmp_path}/none.sqlite", "-o", tmp_path / "out")
    assert ran.status == 1
    assert "there is no store at" in ran.err
    assert dl2d("train", "--twin", "-w", "generator:dl2", "-c", config).status == 2
    assert not (tmp_path / "out").exists()
