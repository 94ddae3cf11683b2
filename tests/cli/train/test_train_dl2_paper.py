from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from policies.dl2_paper.test_policy import a_checkpoint

from dl2d.cli.train import train_dl2_paper
from dl2d.learning.dl2_paper.rollout import SampleCollector
from dl2d.learning.dl2_paper.samples import Samples
from dl2d.learning.dl2_paper.settings import Settings
from dl2d.policies.common.checkpoint import write_checkpoint

MODELS = {"workers": [[10.0 * w / p for w in range(1, 5)] for p in range(1, 5)]}


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    return a_workload_file(tmp_path)


def a_workload_file(tmp_path: Path) -> Path:
    """Thirty jobs that want workers and hardly any PSs, with room for all."""
    jobs = [
        {"id": str(number), "model": "workers", "submit_slot": number // 3, "epochs": 60.0, "samples_per_epoch": 100.0,
         "worker": {"cpu": 1}, "ps": {"cpu": 1}, "max_workers": 4, "max_ps": 4}
        for number in range(1, 31)
    ]  # fmt: skip
    speeds = {name: {"table": table} for name, table in MODELS.items()}
    cluster = [{"count": 20, "resources": {"cpu": 8}}]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"slot_seconds": 100, "cluster": cluster, "speeds": speeds, "jobs": jobs}))
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of a network that learns little, within a second or two."""
    settings = replace(
        Settings(), clusters=8, samples=128, minibatch=64, validate_every=1, supervised_updates=5, hidden=16
    )  # fmt: skip
    monkeypatch.setattr(train_dl2_paper, "DEFAULTS", settings)


def test_what_was_trained_is_simulated(dl2d, workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(Settings(), clusters=8, samples=256, minibatch=64, supervised_updates=40, hidden=64)
    monkeypatch.setattr(train_dl2_paper, "DEFAULTS", few)
    ran = dl2d(
        "train", "--design", "dl2-original", "-w", workload, "-o", tmp_path / "out", "--iterations", "1", "--json"
    )
    assert ran.status == 0, ran.err
    checkpoint = tmp_path / "out" / "checkpoint"
    assert ran.json["checkpoint"] == str(checkpoint)
    assert ran.json["history"][0]["phase"] == "imitation"
    ran = dl2d(
        "simulate", "-w", workload, "--preset", "dl2-paper", "-p", "dl2-original", "--checkpoint", checkpoint, "--json"
    )
    assert ran.status == 0, ran.err
    # Jobs with four of both take six slots, and with four workers and a PS a slot and a half.
    assert 1.5 <= ran.json["policies"]["dl2-original"]["avg_jct_slots"] <= 12


def test_a_checkpoint_is_asked_for(dl2d, workload: Path) -> None:
    ran = dl2d("simulate", "-w", workload, "-p", "dl2-original")
    assert ran.status == 1
    assert "dl2-original: name a checkpoint; dl2d train --design dl2-original makes one" in ran.err


@pytest.mark.usefixtures("quick")
def test_a_teacher_is_named_and_an_analytical_model_learned_on(dl2d, workload: Path, tmp_path: Path) -> None:
    ran = dl2d(
        "train", "--design", "dl2-original", "-w", workload, "-o", tmp_path / "out", "--iterations", "1", "--teacher",
        "optimus", "--offline",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    assert "against drf" in ran.out
    assert "against optimus-true" in ran.out
    page = (tmp_path / "out" / "report.md").read_text()
    assert "Learned on an analytical model of speeds" in page
    assert "- teacher: optimus" in page


@pytest.mark.usefixtures("quick")
def test_a_network_that_leaves_jobs_waiting_is_not_written(dl2d, workload: Path, tmp_path: Path) -> None:
    start = a_checkpoint(0, network="shared", first_bundles=False)
    # It ends its decision before anything else.
    void = {"policy.void.bias": np.full(1, 1000.0, dtype=np.float32)}
    write_checkpoint(replace(start, weights={**start.weights, **void}), tmp_path / "start")
    ran = dl2d(
        "train", "--design", "dl2-original", "-w", workload, "-o", tmp_path / "out", "--iterations", "0",
        "--no-compare", "--start", tmp_path / "start",
    )  # fmt: skip
    assert ran.status == 1
    assert "leaves 30 of 30 jobs waiting on an idle cluster in a replay of validation workload 1" in ran.err
    assert not (tmp_path / "out" / "checkpoint").exists()


@pytest.mark.usefixtures("quick")
def test_it_is_stopped_and_goes_on(dl2d, workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second stretch; then the same command leads to what it would have led to."""
    command = ["train", "--design", "dl2-original", "-w", workload, "--iterations", "3", "--no-compare", "--json", "-o"]
    whole = dl2d(*command, tmp_path / "whole")
    assert whole.status == 0, whole.err
    collect, calls = SampleCollector.collect, iter(range(100))

    def interrupted(*arguments: Any) -> Samples:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return collect(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(SampleCollector, "collect", interrupted)
        stopped = dl2d(*command, tmp_path / "parts")
    assert stopped.status == 130
    assert "to continue from the state in " in stopped.err
    further = dl2d(*command, tmp_path / "parts", "--resume")
    assert further.status == 0, further.err
    assert further.json["digest"] == whole.json["digest"]
    assert further.json["history"] == whole.json["history"]
