from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dl2d.core.errors import WorkloadError
from dl2d.simulation.workload.generators import generate
from dl2d.simulation.workload.trace_readers import TraceSettings, read_trace
from dl2d.simulation.workload.workload_file import write_workload
from dl2d.simulation.workload.workload_source_by_name import load_source

LOG = "job_id,submission_time,duration,num_gpu\n" + "".join(f"j{n},{n * 600},{n * 100},2\n" for n in range(1, 31))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    path.write_text(LOG)
    return path


def test_a_generator_with_and_without_settings() -> None:
    assert load_source("generator:dl2", seed=3).workload == generate("dl2", {}, np.random.default_rng(3))
    sourced = load_source("generator:poisson?jobs=7&rate=0.5&models=bert%2Cvgg-16&node=cpu:64,gpu:8", seed=3)
    settings = {"jobs": "7", "rate": "0.5", "models": "bert,vgg-16"}
    assert sourced.workload == generate("poisson", settings, np.random.default_rng(3))
    assert "7 jobs, 12 nodes" in sourced.note


def test_a_seed_among_the_settings_goes_before(log: Path) -> None:
    for source in ("generator:poisson", f"itp:{log}"):
        drawn = [load_source(text, seed=seed).workload for text, seed in ((source, 5), (f"{source}?seed=5", 1))]
        assert drawn[0] == drawn[1]
        assert load_source(source, seed=1).workload != drawn[0]


def test_a_log_with_and_without_settings(log: Path) -> None:
    assert load_source(f"itp:{log}", seed=2).workload == read_trace("itp", log, TraceSettings(), seed=2).workload
    sourced = load_source(f"itp:{log}?jobs=4&slot_seconds=60")
    assert len(sourced.workload.jobs) == 4
    assert sourced.workload.slot_seconds == 60
    assert sourced.note.startswith("itp:log.csv: 30 rows, 4 jobs")
    assert "beyond the number of jobs asked for (26)" in sourced.note


def test_files_with_odd_names(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    workload = load_source("generator:dl2").workload
    for name in ("plain.json", "my:jobs.json", "itp:jobs.json"):
        write_workload(workload, name)
    assert load_source("plain.json").workload == load_source("my:jobs.json").workload == workload
    assert load_source("./itp:jobs.json").workload == workload
    log.rename("what?.csv")
    assert len(load_source("itp:what?.csv").workload.jobs) == 30
    assert len(load_source("itp:what?.csv?jobs=3").workload.jobs) == 3


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("generator:dl3", "generator:dl3: generator: there is no 'dl3' (did you mean dl2?)"),
        ("generator:", "there is no ''"),
        ("generator:dl2?jobs=x", "generator:dl2?jobs=x: jobs: expected a whole number, got 'x'"),
        ("generator:dl2?jobs=1&jobs=2", "jobs: is given twice"),
        ("generator:dl2?jobs=1&cap", "cap: expected key=value"),
        ("generator:dl2?seed=-1", "seed: expected a whole number"),
        ("generator:dl2?seed=²", "seed: expected a whole number"),
        ("generator:dl2?seed=9999999999999999999", "seed: expected a whole number from 0 to 9223372036854775807, got"),
        ("sacc:jobs.csv", "'sacc' is no kind of source (did you mean sacct?)"),
        ("sacct:gone.csv", "gone.csv: cannot be read"),
        ("itp:gone.csv?cap=3", "cap: there is no such option"),
        ("gone.json", "gone.json: cannot be read"),
        ("", "cannot be read"),
        ("a\0b", "cannot be read"),
        ("ab:\0", "no such file"),
    ],
)
def test_wrong_sources_are_told(source: str, words: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(words)):
        load_source(source)
