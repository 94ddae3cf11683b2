"""Experiments on the kinds of jobs in a user's file."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from experiments.test_run_experiment import Here
from simulation.workload.test_job_kind_sampling import FASTER, SLOWER, kinds

from dl2d.core.errors import WorkloadError
from dl2d.experiments.definition import Experiment, digest, files_of, find_experiment, read_experiment
from dl2d.experiments.report import write_report
from dl2d.experiments.run_experiment import begin_run, read_run, run_cells
from dl2d.experiments.tables_of_results import summarise
from dl2d.experiments.variants_of_definition import names_kinds, on_kinds
from dl2d.simulation.workload.workload_file import write_workload

MEASURED = Path(__file__).parents[3] / "shared" / "data" / "dl2" / "config_speed.csv"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_workload(kinds({"a": FASTER, "b": SLOWER}), tmp_path / "mine.json")
    return tmp_path / "mine.json"


POLICIES = [
    "drf",
    {"name": "dl2", "training": {}, "tune": {"optimism": [0, 1], "placement": ["load_balance", "optimus"]}},
]
TRAINING = {
    "design": "dl2", "sources": ["kinds:mine.json?jobs=4"], "draws": 2,
    "settings": {"iterations": 2, "every": 1, "rounds": 1, "explored": 2, "batch": 2},
}  # fmt: skip


def definition(folder: Path) -> Path:
    """Two clusters of the same kinds; the file lies beside it."""
    content = {
        "name": "mine", "version": 1, "description": "x", "training": TRAINING, "preset": "realistic",
        "workloads": [
            {"name": "few", "source": "kinds:mine.json?jobs=4&nodes=2"},
            {"name": "more", "source": "kinds:mine.json?jobs=4"},
        ],
        "policies": POLICIES, "seeds": 2, "trainings": 1,
    }  # fmt: skip
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_what_is_trained_may_be_tuned_for_each_workload_and_is_trained_once(file: Path, tmp_path: Path) -> None:
    given = read_experiment(definition(tmp_path))
    run = run_cells(begin_run(given, tmp_path / "out"), Here())
    assert not run.failures, run.failures[0].trace
    made = [each for _, each in run.preparations if each is not None]
    assert [(each.entrant, each.case, len(each.tries)) for each in made] == [("dl2", "few", 4), ("dl2", "more", 4)]
    assert made[0].checkpoint == made[1].checkpoint != ""
    assert len(list((tmp_path / "out/prepared").glob("*/checkpoint"))) == 1
    assert all(each.chosen == min(each.tries, key=lambda one: one.jct or 0).chosen for each in made)
    assert "optimism" in write_report(run)[0].read_text()


def test_a_run_has_the_file_in_its_folder_and_its_content_decides(file: Path, tmp_path: Path) -> None:
    path = definition(tmp_path)
    given = read_experiment(path)
    assert files_of(given) == (str(file),)
    begun = begin_run(given, tmp_path / "out")
    assert begun.digest == digest(given)
    write_workload(kinds({"a": FASTER, "b": FASTER}), file)
    assert digest(read_experiment(path)) != begun.digest
    assert read_run(tmp_path / "out").digest == begun.digest
    assert (tmp_path / "out/inputs/mine.json").exists()


def test_the_shipped_one_waits_for_a_file(file: Path) -> None:
    shipped = find_experiment("realistic-kinds")
    assert not names_kinds(shipped)
    assert files_of(shipped) == ()
    named = on_kinds(shipped, str(file))
    assert names_kinds(named)
    assert files_of(named) == (str(file),)
    assert next(case.source(0) for case in named.cases) == f"kinds:{file}?nodes=24"
    with pytest.raises(WorkloadError, match="smoke: draws nothing from the kinds of jobs in a file"):
        on_kinds(find_experiment("smoke"), str(file))


def measured(path: Path) -> None:
    """The tables as they are, failed runs too; a job takes 3 to 15 slots on one worker and one PS."""
    points: dict[str, list[list[float]]] = {}
    with MEASURED.open() as rows:
        for row in csv.DictReader(rows):
            size = [int(row["num_ps"]), int(row["num_workers"])]
            points.setdefault(row["model"], []).append([*size, float(row["total_speed_samples_per_s"])])
    alone = {model: speed for model, given in points.items() for ps, workers, speed in given if ps == workers == 1}
    given = kinds({model: {"points": given} for model, given in points.items()}, most=15)
    jobs = tuple(
        replace(job, epochs=epochs, declared_epochs=epochs)
        for place, job in enumerate(given.jobs)
        for epochs in [(3 + 12 * (place % len(points)) / len(points)) * alone[job.model] * 12.0]
    )
    write_workload(replace(given, jobs=jobs), path)


def small(experiment: Experiment) -> Experiment:
    """24 nodes, three workloads, little training, and nothing tuned."""
    dl2 = experiment.participant("dl2")
    assert dl2.training is not None
    less = replace(dl2.training, draws=6, settings={"iterations": 5, "rounds": 4, "explored": 6, "batch": 4})
    own = replace(dl2, training=less, tune={}, placement="optimus", settings={"resize_seconds": 600})
    others = (
        replace(experiment.participant(name), tune={}, placement="optimus")
        for name in ("drf", "optimus-true", "lookahead-true")
    )
    return replace(experiment, cases=experiment.cases[:1], seeds=(0, 1, 2), participants=(own, *others))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(not MEASURED.exists(), reason="DL2's own measurements are not in shared/ beside this checkout")
def test_on_dl2s_measured_speeds_dl2_is_below_those_that_are_told_them(tmp_path: Path) -> None:
    measured(tmp_path / "mine.json")
    given = small(on_kinds(find_experiment("realistic-kinds"), str(tmp_path / "mine.json")))
    run = run_cells(begin_run(given, tmp_path / "out"), Here())
    assert not run.failures, run.failures[0].trace
    (found,) = summarise(run)
    times = {each.policy: each.jct.mean for each in found.policies}
    assert times["dl2"] < 0.97 * min(times["optimus-true"], times["lookahead-true"]) < 0.9 * times["drf"]
