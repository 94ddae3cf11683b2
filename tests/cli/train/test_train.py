"""``dl2d train`` and what ``dl2d simulate`` does with what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.conftest import Dl2d

WORKLOAD = {
    "slot_seconds": 60,
    "cluster": [{"count": 3, "resources": {"cpu": 8}}],
    "speeds": {"m": {"formula": "ps-sync", "theta": [0.05, 0.01, 0.02, 0.001, 0.002], "batch": 32}},
    "jobs": [
        {
            "id": str(number), "model": "m", "submit_slot": number // 2, "epochs": 3.0 + number,
            "samples_per_epoch": 2000.0, "worker": {"cpu": 2}, "ps": {"cpu": 1}, "min_workers": 0, "max_workers": 4,
            "max_ps": 4,
        }
        for number in range(5)
    ],
}  # fmt: skip


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps(WORKLOAD))
    return file


def test_train_then_simulate(dl2d: Dl2d, tmp_path: Path, workload: Path) -> None:
    out = tmp_path / "out"
    arguments = ["train", "-w", workload, "-o", out, "--json"]
    first = dl2d(*arguments, "--iterations", "1")
    assert first.status == 0, first.err
    assert first.json["iterations"] == 1
    assert set(first.json["baselines_jct_slots"]) == {"drf", "optimus-true", "lookahead-true"}
    assert {"report.md", "curves.png", "state.npz", "checkpoint"} == {file.name for file in out.iterdir()}
    assert "| dl2, best weights |" in (out / "report.md").read_text()
    further = dl2d(*arguments, "--iterations", "2", "--resume", "--no-compare")
    assert further.json["iterations"] == 2
    ran = dl2d("simulate", "-w", workload, "-p", "dl2", "--checkpoint", out, "--preset", "dl2-paper", "--json")
    assert ran.status == 0, ran.err
    assert set(ran.json["policies"]["dl2"]["jobs"]) == {job["id"] for job in WORKLOAD["jobs"]}


def test_wrong_use(dl2d: Dl2d, tmp_path: Path, workload: Path) -> None:
    assert dl2d("train", "-w", tmp_path / "*.nothing", "-o", tmp_path / "out").status == 2
    none = dl2d("train", "-w", workload, "-o", tmp_path / "out", "--resume", "--no-compare")
    assert none.status == 1
    assert "cannot resume" in none.err
    ran = dl2d("simulate", "-w", workload, "-p", "dl2", "--checkpoint", tmp_path)
    assert ran.status == 1
    assert "is not a checkpoint" in ran.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-w {} --teacher drf", "--teacher cannot be used with --design dl2"),
        ("-w {} --offline --start x", "--start, --offline cannot be used with --design dl2"),
        ("-w {} --gate --days 3", "--days, --gate cannot be used with --design dl2"),
        (
            "-w {} --design jumps --teacher drf",
            "--teacher cannot be used with --design dl2",
        ),  # its former name
        ("-w {} --design original --hidden 4", "--hidden cannot be used with --design dl2-original"),
        ("-w {} --design dl3", "expected one of dl2, dl2-original, got"),
        ("-w {} --design dl2-original --hidden 4", "--hidden cannot be used with --design dl2-original"),
        ("-w {} --design dl2-original -c dl2d.yaml", "--config cannot be used with --design dl2-original"),
        ("-w {} --design dl2-original --teacher drf --start x", "--teacher and --start cannot be used together"),
        ("--twin -w {}", "--workload cannot be used with --twin"),
        ("--twin --design dl2-original --start x", "--start cannot be used with --twin"),
        ("--twin --design dl2 --resume", "--resume cannot be used with --twin"),
        ("--twin --no-compare --hidden 0", "--hidden, --compare cannot be used with --twin"),
        ("-w {} --draws 4", "--draws needs a generator"),
        ("--design dl2-original -o x supervised", "write options after the command, `dl2d train supervised"),
        ("--twin --store sqlite:///x -c none.yaml", "none.yaml does not exist"),
        ("", "give one or more workloads to train on"),
    ],
)
def test_an_option_that_does_not_apply_is_refused(dl2d: Dl2d, arguments: str, words: str, workload: Path) -> None:
    ran = dl2d("train", *arguments.format(workload).split())
    assert ran.status == 2
    assert words in " ".join(ran.err.replace("│", " ").split())
