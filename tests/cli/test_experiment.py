from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import psutil
import pytest
import yaml

from dl2d.experiments import report
from dl2d.experiments.definition import builtin_names, digest, find_experiment
from dl2d.simulation.workload.workload_file import write_workload
from dl2d.simulation.workload.workload_source_by_name import load_source

TINY = {
    "name": "tiny", "version": 1, "description": "One small workload.",
    "workloads": ["generator:dl2?jobs=3&longest_slots=4"], "policies": ["drf", "fifo"], "seeds": 1,
}  # fmt: skip


#: Two processes are tried by others: each takes more CPU time to begin than its simulations do.
ALONE = ("--jobs", "1")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without plots: drawing them takes most of the time of so small an experiment."""
    monkeypatch.setattr(report, "draw_plots", lambda *_: ())


@pytest.mark.slow
def test_smoke_is_the_same_with_one_process_and_two_and_when_run_again(dl2d, tmp_path: Path) -> None:
    two = tmp_path / "two"
    ran = dl2d("experiment", "run", "smoke", "--out", two, "--jobs", 2)
    assert ran.status == 0, ran.err
    assert [line.split()[0] for line in ran.out.splitlines()[:2]] == ["WORKLOAD", "dl2"]
    assert str(two / "report.html") in ran.out
    assert "dl2: generator:dl2" in ran.err
    assert sorted(path.name for path in two.iterdir()) == [
        "cells", "definition.yaml", "environment.json", "plots", "report.html", "report.md", "results.json",
        "series", "timings.json",
    ]  # fmt: skip
    text = (two / "report.md").read_text()
    for policy in find_experiment("smoke").policies:
        assert f"| {policy} |" in text
    assert digest(find_experiment("smoke")) in text
    ET.fromstring((two / "report.html").read_text())
    # The very command of the report, here with one process.
    command = shlex.split(re.search(r"```sh\n(.*)\n```", text)[1])
    assert command[0] == "dl2d"
    again = dl2d(*command[1:], *ALONE)
    assert again.status == 0, again.err
    assert (tmp_path / "two-again/results.json").read_bytes() == (two / "results.json").read_bytes()


@pytest.mark.usefixtures("no_pictures")
def test_resume_runs_what_is_missing(dl2d, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert dl2d("experiment", "run", tiny, *ALONE, "--out", out).status == 0
    before = (out / "results.json").read_bytes()
    cells = sorted((out / "cells").iterdir())
    cells[0].unlink()
    kept = cells[1].stat().st_mtime_ns
    refused = dl2d("experiment", "run", tiny, *ALONE, "--out", out)
    assert refused.status == 1
    assert "has a run already; --resume goes on with it" in refused.err
    assert not cells[0].exists()
    resumed = dl2d("experiment", "run", tiny, *ALONE, "--out", out, "--resume")
    assert resumed.status == 0, resumed.err
    assert cells[0].exists()
    assert cells[1].stat().st_mtime_ns == kept
    assert json.loads((out / "timings.json").read_text())["last_run"]["cells"] == 1
    assert (out / "results.json").read_bytes() == before


@pytest.mark.usefixtures("no_pictures")
def test_a_failing_simulation_is_told_and_the_others_are_kept(dl2d, tiny: Path, tmp_path: Path) -> None:
    workloads = ["generator:dl2?jobs=2&longest_slots=2", "generator:dl2?jobs=3&longest_slots=500"]
    tiny.write_text(yaml.safe_dump({**TINY, "workloads": workloads, "policies": ["drf"], "most_slots": 20}))
    ran = dl2d("experiment", "run", tiny, *ALONE, "--out", tmp_path / "out", "--json")
    assert ran.status == 1
    assert "failed: dl2?jobs=3&longest_slots=500, drf, seed 0:" in ran.err
    assert "1 of 2 simulations have no result" in ran.err
    assert [each["workload"] for each in ran.json["failed"]] == ["dl2?jobs=3&longest_slots=500"]
    assert "jobs have not ended after 20 slots" in ran.json["failed"][0]["error"]
    assert list(ran.json["workloads"]) == ["dl2?jobs=2&longest_slots=2"]
    cells = json.loads((tmp_path / "out/results.json").read_text())["cells"]
    assert ["error" in cell for cell in cells] == [False, True]
    assert "jobs have not ended after 20 slots" in (tmp_path / "out/report.md").read_text()


@pytest.mark.usefixtures("no_pictures")
def test_policies_and_seeds_may_be_others(dl2d, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = dl2d("experiment", "run", tiny, *ALONE, "--out", out, "--policy", "srtf", "--seeds", "3,5", "--json")
    assert ran.status == 0, ran.err
    assert ran.json["version"] == "1+changed"
    assert ran.json["cells"] == 2
    assert ran.json["workloads"]["dl2?jobs=3&longest_slots=4"]["policies"]["srtf"]["avg_jct_slots"]["seeds"] == 2
    stored = yaml.safe_load((out / "definition.yaml").read_text())
    assert (stored["policies"], stored["seeds"], stored["baseline"]) == (["srtf"], [3, 5], "srtf")


@pytest.mark.usefixtures("no_pictures")
def test_ones_own_workloads_take_the_place_of_the_definitions(dl2d, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for number in range(3):
        workload = load_source("generator:dl2?jobs=3&longest_slots=4", seed=number).workload
        write_workload(workload, tmp_path / f"logs/{number}.json")
    out = tmp_path / "out"
    ran = dl2d("experiment", "run", tiny, *ALONE, "--out", out, "--workload", tmp_path / "logs/*.json", "--json")
    assert ran.status == 0, ran.err
    assert ran.json["version"] == "1+changed"
    # Nothing is trained: all three are tested on, one for each seed.
    assert ran.json["workloads"]["files"]["policies"]["drf"]["avg_jct_slots"]["seeds"] == 3
    assert sorted(path.name for path in (out / "inputs").iterdir()) == ["0.json", "1.json", "2.json"]
    found = [cell["avg_jct"] for cell in json.loads((out / "results.json").read_text())["cells"]][:3]
    assert len(set(found)) == 3
    none = dl2d("experiment", "run", tiny, "--out", tmp_path / "none", "--workload", tmp_path / "no/*.json")
    assert none.status == 2
    assert "no file matches" in none.err


@pytest.mark.usefixtures("no_pictures")
def test_kinds_of_jobs_of_ones_own_are_named_by_an_option(dl2d, tiny: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    write_workload(load_source("generator:dl2?jobs=6&longest_slots=4&nodes=2", seed=1).workload, mine)
    lacking = dl2d("experiment", "run", "realistic-kinds", "--out", tmp_path / "out")
    assert lacking.status == 2
    assert "realistic-kinds draws jobs from a workload file of yours; give it with --kinds FILE" in lacking.err
    assert not (tmp_path / "out").exists()
    refused = dl2d("experiment", "run", tiny, "--kinds", mine, "--out", tmp_path / "out")
    assert refused.status == 2
    assert "draws nothing from the kinds of jobs in a file" in refused.err
    workloads = [{"name": "own", "source": "kinds:?jobs=3"}, "generator:dl2?jobs=2&longest_slots=2"]
    tiny.write_text(yaml.safe_dump({**TINY, "workloads": workloads}))
    ran = dl2d("experiment", "run", tiny, *ALONE, "--kinds", mine, "--out", tmp_path / "out", "--json")
    assert ran.status == 0, ran.err
    assert list(ran.json["workloads"]) == ["own", "dl2?jobs=2&longest_slots=2"]
    assert "kinds:inputs/mine.json?jobs=3" in (tmp_path / "out/definition.yaml").read_text()


@pytest.mark.usefixtures("no_pictures")
def test_scales(dl2d, tiny: Path, tmp_path: Path) -> None:
    refused = dl2d("experiment", "run", tiny, "--out", tmp_path / "out", "--scale", "quick")
    assert refused.status == 2
    assert "tiny: quick: this experiment has one scale only" in refused.err
    tiny.write_text(yaml.safe_dump({**TINY, "seeds": 3, "quick": {"seeds": 1}}))
    ran = dl2d("experiment", "run", tiny, *ALONE, "--out", tmp_path / "out", "--scale", "quick", "--json")
    assert ran.status == 0, ran.err
    assert (ran.json["version"], ran.json["cells"]) == ("1+quick", 2)


def test_the_report_can_be_written_again(dl2d, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert dl2d("experiment", "run", tiny, *ALONE, "--out", out).status == 0
    before = (out / "report.md").read_bytes()
    (out / "report.md").unlink()
    ran = dl2d("experiment", "report", out)
    assert ran.status == 0, ran.err
    assert (out / "report.md").read_bytes() == before
    min((out / "cells").iterdir()).unlink()
    ran = dl2d("experiment", "report", out, "--json")
    assert ran.status == 1
    assert "1 of 2 simulations have no result" in ran.err


def test_what_ships_is_listed_and_shown(dl2d, tmp_path: Path) -> None:
    listed = dl2d("experiment", "list", "--json").json
    assert [each["name"] for each in listed] == list(builtin_names())
    table = dl2d("experiment", "list").out
    for each in listed:
        assert each["digest"][:12] in table
        assert each["description"] in table
    shown = dl2d("experiment", "show", "smoke")
    assert shown.status == 0
    assert digest(find_experiment("smoke")) in shown.out
    own = tmp_path / "own.yaml"
    own.write_text(shown.out)
    assert find_experiment(str(own)) == find_experiment("smoke")
    assert dl2d("experiment", "show", "smoke", "--json").json["seeds"] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "smok"], "smok: there is no such experiment (did you mean smoke?)"),
        (["run", "gone.yaml"], "gone.yaml: cannot be read"),
        (["show", "smok"], "did you mean smoke?"),
        (["run", "smoke", "--seeds", "x"], "--seeds: expected how many"),
        (["run", "smoke", "--seeds", "1,1"], "--seeds: expected how many"),
        (["run", "smoke", "--seeds", "0"], "--seeds: expected how many"),
        (["run", "smoke", "--policy", "dfr"], "experiment smoke, workload dl2: there is no 'dfr' (did you mean drf?)"),
        (["run", "smoke", "--jobs", "0"], "--jobs"),
        (["run", "smoke", "--executor", "slurm"], "slurm"),
        (["run", "smoke", "--executor", "ray", "--jobs", "2"], "--jobs cannot be used with --executor ray"),
    ],
)
def test_wrong_use_is_told_and_ends_with_status_2(
    dl2d, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = dl2d("experiment", *arguments)
    assert ran.status == 2
    assert words in ran.err
    assert not list(tmp_path.iterdir())


def test_mistakes_in_a_definition_name_file_and_key(dl2d, tiny: Path) -> None:
    tiny.write_text(yaml.safe_dump({**TINY, "polices": ["drf"], "policies": None}))
    ran = dl2d("experiment", "run", tiny)
    assert ran.status == 2
    assert f"{tiny}: polices: unknown key (did you mean policies?)" in ran.err


def test_without_ray_it_is_said_how_to_install_it(dl2d, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    ran = dl2d("experiment", "run", tiny, "--executor", "ray")
    assert ran.status == 1
    assert "pip install 'dl2d[ray]'" in ran.err


def test_a_folder_without_a_run_is_told(dl2d, tmp_path: Path) -> None:
    ran = dl2d("experiment", "report", tmp_path)
    assert ran.status == 1
    assert "has no run of an experiment" in ran.err


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    """As from a terminal: the interrupt goes to the whole process group."""
    path, out = tmp_path / "long.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump({**TINY, "policies": ["drf"], "seeds": 1000}))
    command = [sys.executable, "-m", "dl2d.cli", "experiment", "run", str(path), "--out", str(out), "--jobs", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        while process.poll() is None and not list((out / "cells").glob("*.json")):
            time.sleep(0.01)
        started = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "of 1000 simulations are finished and kept" in err
    assert "Traceback" not in err
    kept = len(list((out / "cells").glob("[0-9]*.json")))
    assert kept >= 1
    assert f"stopped: {kept} of 1000" in err
    assert len(started) >= 2
    while any(map(goes_on, started)):
        time.sleep(0.01)


def goes_on(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
