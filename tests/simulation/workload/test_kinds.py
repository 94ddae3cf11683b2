from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from experiments.test_run import Here

from dl2d.cli.train_options import training_workloads
from dl2d.core.errors import WorkloadError
from dl2d.experiments.definition import Experiment, digest, files_of, find_experiment, read_experiment
from dl2d.experiments.report import write_report
from dl2d.experiments.results import summarise
from dl2d.experiments.run import begin_run, read_run, run_cells
from dl2d.experiments.variants import names_kinds, on_kinds
from dl2d.simulation.workload.format import CapacityChange, NodeGroup, Workload, read_workload, write_workload
from dl2d.simulation.workload.generators import generate
from dl2d.simulation.workload.kinds import KindsSettings, draw_kinds
from dl2d.simulation.workload.sources import load_source

MEASURED = Path(__file__).parents[4] / "shared" / "data" / "dl2" / "config_speed.csv"
FASTER = {"table": [[1.0, 2.0, 2.2], [2.0, 4.0, 4.4]]}
SLOWER = {"table": [[3.0, 2.0, 1.0], [5.0, 4.0, 2.0]]}


def kinds(speeds: dict[str, Any], *, nodes: int = 4, seconds: float = 1200.0, most: int = 2) -> Workload:
    """Of each model one job, and a second one that nothing is drawn from."""
    base = {
        "declared_epochs": 40.0, "samples_per_epoch": 100.0, "worker": {"cpu": 2, "gpu": 4}, "ps": {"cpu": 2},
        "max_workers": most + 1, "max_ps": most,
    }  # fmt: skip
    jobs = [
        {**base, "id": f"{number}", "model": model, "submit_slot": 7 * second, "epochs": 30.0 + number}
        for second in (0, 1)
        for number, model in enumerate(sorted(speeds), start=1 + second * len(speeds))
    ]
    cluster = [{"count": nodes, "resources": {"cpu": 8, "gpu": 8}}]
    return read_workload({"slot_seconds": seconds, "cluster": cluster, "speeds": speeds, "jobs": jobs})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_workload(kinds({"a": FASTER, "b": SLOWER}), tmp_path / "mine.json")
    return tmp_path / "mine.json"


def test_jobs_are_like_the_first_of_their_model_and_come_as_those_of_the_generator(file: Path) -> None:
    known = read_workload(file)
    drawn = load_source(f"kinds:{file}?jobs=40&cap=2", seed=3)
    firsts = {job.model: job for job in known.jobs if job.submit_slot == 0}
    for job in drawn.workload.jobs:
        assert job == replace(firsts[job.model], id=job.id, submit_slot=job.submit_slot)
    assert Counter(job.model for job in drawn.workload.jobs) == {"a": 20, "b": 20}
    usual = generate("dl2", {"jobs": "40", "cap": "2"}, np.random.default_rng(3))
    assert [job.submit_slot for job in drawn.workload.jobs] == [job.submit_slot for job in usual.jobs]
    assert (drawn.workload.cluster, drawn.workload.speeds) == (known.cluster, known.speeds)
    assert drawn.note == "kinds:mine.json: 2 kinds, 40 jobs, 4 nodes"


def test_seeds_decide_and_the_number_of_nodes_changes_nothing_else(file: Path) -> None:
    one, again, other = (load_source(f"kinds:{file}?nodes=9", seed=seed).workload for seed in (1, 1, 2))
    assert one == again != other
    assert len(one.nodes()) == 9
    assert one.jobs == load_source(f"kinds:{file}", seed=1).workload.jobs
    assert other == load_source(f"kinds:{file}?nodes=9&seed=2", seed=1).workload


def test_training_draws_from_them(file: Path) -> None:
    train_on, look_at = training_workloads([f"kinds:{file}?jobs=30"], [], 0, 4)
    drawn = [workload.jobs for workload in (*train_on, *look_at)]
    assert len(drawn) == len(set(drawn)) == 5


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("kinds:FILE?node=4", "mine.json?node=4: node: there is no such option (did you mean nodes?)"),
        ("kinds:FILE?jobs=0", "jobs: expected a number from 1 to"),
        ("kinds:FILE?nodes=few", "nodes: expected a whole number, got 'few'"),
        ("kinds:gone.json?jobs=3", "gone.json: cannot be read"),
        ("kinds:?jobs=3", "kinds:?jobs=3: no workload file is named whose kinds of jobs are drawn from: kinds:FILE"),
    ],
)
def test_what_cannot_be_drawn_is_told(file: Path, source: str, words: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(words)):
        load_source(source.replace("FILE", str(file)))


def test_another_number_of_nodes_must_mean_something_and_hold_the_jobs() -> None:
    known = kinds({"a": FASTER})
    (group,) = known.cluster
    mixed = replace(known, cluster=(group, NodeGroup(1, group.resources, "big")))
    leaving = replace(known, capacity_changes=(CapacityChange(slot=3, name="node", up=2),))
    for given in (mixed, leaving):
        with pytest.raises(WorkloadError, match="nodes: the file has several groups of nodes, or changes of them"):
            draw_kinds(given, KindsSettings(nodes=3), np.random.default_rng(0), where="x")
        assert draw_kinds(given, KindsSettings(), np.random.default_rng(0), where="x").cluster == given.cluster
    large = replace(known, jobs=tuple(replace(job, min_workers=3) for job in known.jobs))
    with pytest.raises(WorkloadError, match="has no room for 3 tasks"):
        draw_kinds(large, KindsSettings(nodes=1), np.random.default_rng(0), where="x")


POLICIES = [
    "drf",
    {"name": "dl2", "training": {}, "tune": {"optimism": [0, 1], "placement": ["load_balance", "optimus"]}},
]
TRAINING = {
    "design": "jumps", "sources": ["kinds:mine.json?jobs=4"], "draws": 2,
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
@pytest.mark.skipif(not MEASURED.exists(), reason="DL2's own measurements are not in shared/ beside this checkout")
def test_on_dl2s_measured_speeds_dl2_is_below_those_that_are_told_them(tmp_path: Path) -> None:
    measured(tmp_path / "mine.json")
    given = small(on_kinds(find_experiment("realistic-kinds"), str(tmp_path / "mine.json")))
    run = run_cells(begin_run(given, tmp_path / "out"), Here())
    assert not run.failures, run.failures[0].trace
    (found,) = summarise(run)
    times = {each.policy: each.jct.mean for each in found.policies}
    assert times["dl2"] < 0.97 * min(times["optimus-true"], times["lookahead-true"]) < 0.9 * times["drf"]
