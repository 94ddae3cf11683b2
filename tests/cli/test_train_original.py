from __future__ import annotations

import json
from pathlib import Path

import pytest

MODELS = {"workers": [[10.0 * w / p for w in range(1, 5)] for p in range(1, 5)]}


@pytest.fixture
def workload(tmp_path: Path) -> Path:
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


def test_what_was_trained_is_simulated(dl2d, workload: Path, tmp_path: Path) -> None:
    ran = dl2d("train", "--design", "original", "-w", workload, "-o", tmp_path / "out", "--iterations", "1", "--json")
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
    assert "dl2-original: name a checkpoint; dl2d train --design original makes one" in ran.err
