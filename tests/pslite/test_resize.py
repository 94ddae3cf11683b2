"""Whole jobs as real processes: any schedule of resizes gives the weights of the static run."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from pslite_jobs import PATIENT, command, static_digest

from pslite.coordinator import Settings
from pslite.testing import Resize, run_local


@pytest.mark.parametrize(
    "options",
    [
        ("--optimizer", "sgd"), ("--optimizer", "momentum"), ("--optimizer", "adam"),
        ("--optimizer", "scheduled", "--clip", "0.3"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_same_bits_as_the_static_run(options, tmp_path):
    schedule = [
        Resize(5, workers=2, servers=3),
        Resize(10, workers=2, servers=2),
        Resize(15, workers=5, servers=2),
        Resize(20, workers=1, servers=2, oldest=True),
    ]
    log = tmp_path / "samples"
    result = run_local(command(*options, "--log", str(log)), workers=2, servers=1, schedule=schedule, settings=PATIENT)
    assert result.state == "finished", result.log
    assert [(p.workers, p.servers) for p in result.plans] == [(2, 1), (2, 3), (2, 2), (5, 2), (1, 2)]
    assert result.digest == static_digest(*options)
    assert set(result.exit_codes.values()) == {0}
    firsts = [p.first_version for p in result.plans]
    assert firsts == sorted(set(firsts))
    assert result.plans[1].moved_bytes > 0
    assert result.plans[3].moved_bytes == 0  # only workers came
    # ten epochs of 203 samples, over eight workers that came and went: each sample once in each
    used = Counter(
        (line.split()[0], index)
        for path in tmp_path.iterdir()
        for line in path.read_text().splitlines()
        for index in line.split()[1:]
    )
    assert used == Counter((str(e), str(i)) for e in range(10) for i in range(203))


def test_several_changes_in_one_plan_and_changes_during_a_plan():
    schedule = [
        Resize(5, workers=3, servers=3, oldest=True),
        Resize(6, workers=1, servers=3, wait=False, oldest=True),
        Resize(6, workers=4, servers=1, wait=False, oldest=True),
        Resize(30, workers=2, servers=2, oldest=True),
    ]
    result = run_local(command("--optimizer", "momentum"), workers=2, servers=2, schedule=schedule, settings=PATIENT)
    assert result.state == "finished", result.log
    assert result.digest == static_digest("--optimizer", "momentum")
    # the three changes that come almost at once merge
    assert 2 <= len(result.plans) - 1 <= 4
    assert (result.plans[-1].workers, result.plans[-1].servers) == (2, 2)
    mixed = result.plans[-1]
    assert {t.split("-")[0] for t in mixed.removed} == {"worker"}
    assert {t.split("-")[0] for t in mixed.added} == {"ps"}


def test_last_batch_smaller_than_the_shards():
    options = ("--samples", "45", "--batch", "20", "--epochs", "30", "--optimizer", "nesterov")
    result = run_local(command(*options), workers=3, servers=2, schedule=[Resize(10, 5, 1)], settings=PATIENT)
    assert result.state == "finished", result.log
    assert result.digest == static_digest(*options)


def test_fast_mode_equals_the_static_run_to_a_hundred_thousandth(tmp_path):
    options = ("--mode", "fast", "--optimizer", "momentum")
    static, elastic = tmp_path / "static.npy", tmp_path / "elastic.npy"
    assert static_digest(*options, "--save", str(static))
    result = run_local(
        command(*options, "--save", str(elastic)),
        workers=2,
        servers=1,
        schedule=[Resize(5, 5, 3), Resize(20, 1, 2)],
        settings=PATIENT,
    )
    assert result.state == "finished", result.log
    a, b = np.load(static), np.load(elastic)
    assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)


def test_more_tasks_than_can_be_used_wait():
    options = ("--shards", "2", "--epochs", "5")
    result = run_local(command(*options), workers=3, servers=1, paced=False)
    assert result.state == "finished", result.log
    assert result.digest == static_digest(*options)
    assert result.plans[0].workers == 2
    assert any("can use no more" in line for line in result.log)
    assert set(result.exit_codes.values()) == {0}


def test_the_stop_and_notify_way_gives_the_same_weights():
    result = run_local(
        command("--optimizer", "adam"),
        workers=2,
        servers=1,
        schedule=[Resize(5, 2, 3), Resize(20, 3, 1, oldest=True)],
        settings=Settings(grace=60.0, start=60.0, settle=60.0, handoff="stop", balance="even"),
    )
    assert result.state == "finished", result.log
    assert result.digest == static_digest("--optimizer", "adam")
    assert min(result.suspensions_ms) > 0


def test_a_change_at_the_very_end_is_dropped_cleanly():
    # the newcomers can hardly be ready before the last version; either way the job must end well
    result = run_local(
        command("--epochs", "3", "--step-seconds", "0.01"),
        workers=1,
        servers=1,
        schedule=[Resize(25, 3, 2)],
        settings=Settings(grace=60.0, start=60.0, settle=0.0, balance="even"),
        paced=False,
    )
    assert result.state == "finished", result.log
    assert result.digest == static_digest("--epochs", "3")
    assert result.exit_codes["worker-0"] == result.exit_codes["ps-0"] == 0


def test_a_job_lives_on_long_after_a_resize():
    """Connections between servers end with a plan; that must not be taken for a death (noticed after three seconds)."""
    result = run_local(
        command("--epochs", "40", "--step-seconds", "0.01"),
        workers=1,
        servers=1,
        schedule=[Resize(3, 1, 3), Resize(6, 2, 1)],
        settings=PATIENT,
    )
    assert result.state == "finished", result.log
    assert result.digest == static_digest("--epochs", "40")
