from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
import yaml
from experiments.runners import quick, spoiled

from dl2d.core.errors import PluginError, WorkloadError
from dl2d.experiments import provenance
from dl2d.experiments.definition import Experiment, read_experiment
from dl2d.experiments.provenance import code_digest, environment
from dl2d.experiments.run_experiment import (
    ExperimentError,
    begin_run,
    check_experiment,
    read_run,
    read_series,
    run_cells,
)
from dl2d.experiments.run_simulation import Cell, Finished, Runner, attempt, replay_cell

JOB = {
    "id": "1", "model": "m", "submit_slot": 0, "epochs": 5.0, "samples_per_epoch": 100.0,
    "worker": {"cpu": 2, "gpu": 4}, "ps": {"cpu": 2}, "max_workers": 2, "max_ps": 2,
}  # fmt: skip
WORKLOAD = {
    "slot_seconds": 100,
    "cluster": [{"count": 1, "resources": {"cpu": 8, "gpu": 8}}],
    "speeds": {"m": {"table": [[1.0, 2.0], [1.0, 2.0]]}},
    "jobs": [JOB],
}


class Here:
    """Runs cells in this process, in an order of its own; stops where it is told to."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.ran: list[int] = []
        self.closed = False

    def map(self, runner: Runner, cells: Sequence[Cell]) -> Generator[Finished]:
        try:
            for cell in reversed(cells):
                if len(self.ran) == self.stop_after:
                    raise KeyboardInterrupt
                self.ran.append(cell.number)
                yield attempt(runner, cell)
        finally:
            self.closed = True


def experiment(folder: Path, **changes: object) -> Experiment:
    folder.mkdir(exist_ok=True)
    content = {
        "name": "mine", "version": 1, "description": "x",
        "workloads": ["generator:dl2?jobs=2", "generator:poisson?jobs=2"],
        "policies": ["drf", "fifo"], "seeds": 2, **changes,
    }  # fmt: skip
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return read_experiment(path)


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def test_a_run_leaves_everything_that_it_takes_to_run_it_again(tmp_path: Path) -> None:
    given = experiment(tmp_path / "a")
    done = run_cells(begin_run(given, tmp_path / "out"), Here(), runner=quick)
    assert not done.missing
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "cells", "definition.yaml", "environment.json", "results.json", "series", "timings.json",
    ]  # fmt: skip
    found = results(tmp_path / "out")
    assert (found["experiment"], found["version"], found["digest"]) == ("mine", "1", done.digest)
    assert [(each["workload"], each["policy"], each["seed"]) for each in found["cells"]] == [
        (case, policy, seed)
        for case in ("dl2?jobs=2", "poisson?jobs=2")
        for policy in ("drf", "fifo")
        for seed in (0, 1)
    ]
    assert found["cells"][3]["avg_jct"] == 6.0
    again = run_cells(
        begin_run(read_experiment(tmp_path / "out/definition.yaml"), tmp_path / "b"), Here(), runner=quick
    )
    assert again.digest == done.digest
    for name in ("results.json", "definition.yaml"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_a_cell_is_the_simulators_own_result(tmp_path: Path) -> None:
    # The job does 2 samples/s with two workers: 500 samples take 250 s, two slots and a half.
    (tmp_path / "jobs.json").write_text(json.dumps(WORKLOAD))
    given = experiment(tmp_path, workloads=["jobs.json"], policies=["drf"], seeds=1)
    done = run_cells(begin_run(given, tmp_path / "out"), Here())
    cell = results(tmp_path / "out")["cells"][0]
    assert (cell["avg_jct"], cell["avg_jct_plain"], cell["makespan"], cell["bound"]) == (2.5, 3.0, 2.5, 2.5)
    assert cell["jobs"] == {"1": 2.5}
    assert cell["utilisation"]["gpu"] == 1.0
    assert cell["resizes"] == 0
    assert cell["slot_seconds"] == 100.0
    series = read_series(done, done.cells[0])
    assert (series.slots, series.workers) == ((0, 1, 2), (2, 2, 2))
    assert [jobs["1"].workers for jobs in series.allocations] == [2, 2, 2]
    timing = json.loads((tmp_path / "out/timings.json").read_text())["cells"][0]
    assert timing["decisions"] == 3
    assert 0 < timing["p50_ms"] <= timing["p99_ms"] <= timing["seconds"] * 1e3


def test_only_what_is_missing_is_run_after_a_stop(tmp_path: Path) -> None:
    given = experiment(tmp_path)
    whole = run_cells(begin_run(given, tmp_path / "whole"), Here(), runner=quick)
    stopped = Here(stop_after=3)
    with pytest.raises(KeyboardInterrupt):
        run_cells(begin_run(given, tmp_path / "out"), stopped, runner=quick)
    assert stopped.closed
    assert not (tmp_path / "out/results.json").exists()
    assert len(read_run(tmp_path / "out").finished) == 3
    later = Here()
    run_cells(begin_run(given, tmp_path / "out", resume=True), later, runner=quick)
    assert sorted(later.ran + stopped.ran) == list(range(8))
    assert (tmp_path / "out/results.json").read_bytes() == (whole.folder / "results.json").read_bytes()


def test_cells_that_are_gone_or_spoiled_or_failed_are_run_again(tmp_path: Path) -> None:
    given = experiment(tmp_path)
    first = run_cells(begin_run(given, tmp_path / "out"), Here(), runner=spoiled)
    assert [(each.case, each.seed, each.error) for each in first.failures] == [
        ("dl2?jobs=2", 1, "cannot decide"), ("poisson?jobs=2", 1, "cannot decide"),
    ]  # fmt: skip
    assert [each.get("error") for each in results(tmp_path / "out")["cells"]][2:4] == [None, "cannot decide"]
    cells = sorted((tmp_path / "out/cells").iterdir())
    assert [path.name for path in cells[:3]] == [
        "0000-dl2-jobs-2-drf-0.json", "0001-dl2-jobs-2-drf-1.json", "0002-dl2-jobs-2-fifo-0.json",
    ]  # fmt: skip
    cells[0].unlink()
    cells[1].write_text(cells[1].read_text()[:-30])
    later = Here()
    second = run_cells(begin_run(given, tmp_path / "out", resume=True), later, runner=quick)
    assert sorted(later.ran) == [0, 1, 3, 7]
    assert not second.missing
    assert not any("error" in each for each in results(tmp_path / "out")["cells"])


def test_files_go_along_with_the_run(tmp_path: Path) -> None:
    for name, epochs in (("a", 5.0), ("b", 7.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "jobs.json").write_text(json.dumps({**WORKLOAD, "jobs": [{**JOB, "epochs": epochs}]}))
    (tmp_path / "log.csv").write_text("job_id,submission_time,duration,num_gpu\nj1,0,3000,2\nj2,900,3000,2\n")
    sources = [
        {"name": "one", "source": "a/jobs.json"}, {"name": "two", "source": "b/jobs.json"},
        {"name": "one again", "source": "./a/jobs.json"}, "itp:log.csv?jobs=2",
    ]  # fmt: skip
    given = experiment(tmp_path, workloads=sources, policies=["drf"], seeds=1)
    notes = check_experiment(given)
    assert notes[0] == "one"
    assert notes[3].startswith("itp:log.csv?jobs=2: itp:log.csv: 2 rows, 2 jobs")
    run_cells(begin_run(given, tmp_path / "out"), Here(), runner=replay_cell)
    stored = yaml.safe_load((tmp_path / "out/definition.yaml").read_text())
    assert [each["source"] for each in stored["workloads"]] == [
        "inputs/jobs.json", "inputs/2-jobs.json", "inputs/jobs.json", "itp:inputs/log.csv?jobs=2",
    ]  # fmt: skip
    assert [cell["avg_jct"] for cell in results(tmp_path / "out")["cells"]][:3] == [2.5, 3.75, 2.5]
    # The folder is complete in itself: it may be moved, and what it was made of may go.
    (tmp_path / "out").rename(tmp_path / "moved")
    for path in ("a/jobs.json", "b/jobs.json", "log.csv"):
        (tmp_path / path).unlink()
    again = read_experiment(tmp_path / "moved/definition.yaml")
    run_cells(begin_run(again, tmp_path / "again"), Here())
    assert (tmp_path / "again/results.json").read_bytes() == (tmp_path / "moved/results.json").read_bytes()


def test_folders_with_something_else_are_left_alone(tmp_path: Path) -> None:
    given = experiment(tmp_path / "a")
    out = tmp_path / "out"
    begin_run(given, out)
    with pytest.raises(ExperimentError, match="out has a run already; --resume goes on with it"):
        begin_run(given, out)
    with pytest.raises(ExperimentError, match="out has another experiment, mine version 1 with digest"):
        begin_run(experiment(tmp_path / "a", seeds=3), out, resume=True)
    assert len(begin_run(given, out, resume=True).missing) == 8
    with pytest.raises(ExperimentError, match="a is not empty and has no run"):
        begin_run(given, tmp_path / "a", resume=True)
    with pytest.raises(ExperimentError, match=r"mine\.yaml"):
        begin_run(given, tmp_path / "a/mine.yaml")
    with pytest.raises(ExperimentError, match=re.escape(f"{tmp_path}/gone has no run of an experiment")):
        read_run(tmp_path / "gone")


def test_errors_do_not_tell_where_the_folder_lies(tmp_path: Path) -> None:
    (tmp_path / "jobs.json").write_text(json.dumps(WORKLOAD))
    given = experiment(tmp_path, workloads=["jobs.json"], policies=["drf"], seeds=1)
    run = begin_run(given, tmp_path / "out")
    (tmp_path / "out/inputs/jobs.json").write_text("{}")
    with pytest.raises(ExperimentError, match="has another experiment"):
        begin_run(given, tmp_path / "out", resume=True)
    run_cells(run, Here())
    assert results(tmp_path / "out")["cells"][0]["error"].startswith("inputs/jobs.json: slot_seconds: missing")


def test_policies_and_workloads_are_tried_before_anything_is_run(tmp_path: Path) -> None:
    with pytest.raises(
        PluginError, match=r"experiment mine, workload dl2\?jobs=2: there is no 'dfr' \(did you mean drf"
    ):
        check_experiment(experiment(tmp_path, policies=["dfr"]))
    with pytest.raises(WorkloadError, match="generator:dl3: generator: there is no 'dl3'"):
        check_experiment(experiment(tmp_path, workloads=["generator:dl3"]))
    with pytest.raises(WorkloadError, match="'sacc' is no kind of source"):
        check_experiment(experiment(tmp_path, workloads=["sacc:x.csv"]))
    with pytest.raises(WorkloadError, match=r"workload poisson: with\.speed_nois: there is no .* mean speed_noise"):
        check_experiment(experiment(tmp_path, workloads=[{"source": "generator:poisson", "with": {"speed_nois": 0.1}}]))
    with pytest.raises(PluginError, match="'nowhere' is not installed"):
        check_experiment(experiment(tmp_path, placement="nowhere"))


def test_options_have_their_effect(tmp_path: Path) -> None:
    source = "generator:dl2?jobs=5&longest_slots=9"
    cases = [
        {"name": "ideal", "source": source},
        {"name": "slow to start", "source": source, "with": {"start_seconds": 600}},
        {"name": "realistic", "source": source, "preset": "realistic"},
    ]
    given = experiment(tmp_path, workloads=cases, policies=["drf"], seeds=1)
    run_cells(begin_run(given, tmp_path / "out"), Here())
    ideal, slow, realistic = (cell["avg_jct"] for cell in results(tmp_path / "out")["cells"])
    assert ideal < slow
    assert realistic not in (ideal, slow)


def test_the_limit_on_slots_is_kept(tmp_path: Path) -> None:
    given = experiment(tmp_path, workloads=["generator:dl2?jobs=2"], policies=["drf"], seeds=1, most_slots=2)
    done = run_cells(begin_run(given, tmp_path / "out"), Here())
    assert "jobs have not ended after 2 slots" in done.failures[0].error


def test_the_environment_says_what_results_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment()
    assert found["code"] == code_digest()
    assert found["libraries"]["numpy"]
    assert found["cpus"] == os.cpu_count()
    assert json.loads(json.dumps(found)) == found
    monkeypatch.setenv("PATH", "/nowhere")
    assert environment()["revision"] is None
    assert environment()["modified"] is None


def test_cells_of_two_states_of_the_code_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = experiment(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_cells(begin_run(given, tmp_path / "out"), Here(stop_after=3), runner=quick)
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("1\n")
    monkeypatch.setattr(provenance, "_PACKAGE", package)
    done = run_cells(begin_run(given, tmp_path / "out", resume=True), Here(), runner=quick)
    assert done.codes == 2
