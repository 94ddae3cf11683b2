from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml
from experiments.test_run_experiment import Here

from dl2d.core.errors import ConfigError, PluginError, WorkloadError
from dl2d.experiments.definition import Experiment, read_experiment
from dl2d.experiments.participant_training import only
from dl2d.experiments.report import summary_json, write_report
from dl2d.experiments.run_experiment import Run, begin_run, check_experiment, run_cells
from dl2d.experiments.run_simulation import Cell, Finished, Runner, prepare_cell
from dl2d.experiments.tables_of_results import curves, findings, summarise
from dl2d.simulation.workload.workload_source_by_name import load_source

SOURCE = "generator:dl2?jobs=4&nodes=3&longest_slots=6"
TRAINING = {
    "design": "dl2-original", "sources": [SOURCE], "draws": 2,
    "settings": {
        "iterations": 2, "validate_every": 1, "supervised_updates": 5, "clusters": 4, "samples": 64, "minibatch": 32,
        "window": 4, "hidden": 8,
    },
}  # fmt: skip
CLAIM = {
    "policy": "learns", "against": "drf", "change": -44.1, "says": "DL2 is faster.", "source": "arXiv:1909.06040",
    "why": "Four jobs are not sixty.",
}  # fmt: skip


def experiment(folder: Path, **changes: object) -> Experiment:
    content = {
        "name": "mine", "version": 1, "description": "x", "training": TRAINING,
        "workloads": [{"name": "small", "source": SOURCE, "preset": "dl2-paper"}],
        "policies": ["drf", {"name": "learns", "training": {}}], "seeds": 4, "trainings": 2, "claims": [CLAIM],
        **changes,
    }  # fmt: skip
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return read_experiment(path)


class Counting(Here):
    """Tells preparations from cells."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[tuple[str, int]] = []

    def map(self, runner: Runner, cells: Sequence[Cell]) -> Generator[Finished]:
        if runner is prepare_cell:
            self.prepared += [(cell.policy, cell.preparation.seed) for cell in cells]
        yield from super().map(runner, cells)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Counting, Path]:
    folder = tmp_path_factory.mktemp("trained")
    executor = Counting()
    run = run_cells(begin_run(experiment(folder), folder / "out"), executor)
    assert not run.failures, run.failures[0].trace
    return run, executor, folder


def test_what_is_trained_is_trained_once_for_all_its_cells(trained: tuple[Run, Counting, Path]) -> None:
    run, executor, _ = trained
    assert sorted(executor.prepared) == [("learns", 0), ("learns", 1)]
    assert len(executor.ran) == 2 + 8
    written = json.loads((run.folder / "results.json").read_text())
    assert [(each["entrant"], each["seed"]) for each in written["prepared"]] == [("learns", 0), ("learns", 1)]
    digests = {each["checkpoint"] for each in written["prepared"]}
    assert len(digests) == 2
    for wanted, made in run.preparations:
        record = json.loads((wanted.folder(run.folder / "prepared") / "checkpoint/checkpoint.json").read_text())
        assert record["digest"] == made.checkpoint
        assert run.seconds(wanted) > 0


def test_curves_go_from_nothing_over_imitation_to_the_end(trained: tuple[Run, Counting, Path]) -> None:
    run, _, _ = trained
    # Five updates of imitation, then two rounds of two epochs of 64 // 32 gradient steps.
    assert [[look.step for look in made.curve] for _, made in run.preparations] == [[0, 5, 9, 13]] * 2
    curve = curves(run)[0]
    assert (curve.participant, curve.unit, curve.best.count) == ("learns", "gradient steps", 2)
    first = [made.curve[0].jct / made.reference - 1 for _, made in run.preparations]
    assert curve.points[0][1].mean == pytest.approx(sum(first) / 2)
    assert curve.best.mean <= min(value.mean for _, value in curve.points)


def test_a_run_that_goes_on_does_not_train_again(trained: tuple[Run, Counting, Path]) -> None:
    run, _, folder = trained
    results = (run.folder / "results.json").read_bytes()
    for path in list((run.folder / "cells").iterdir())[:3]:
        path.unlink()
    later = Counting()
    run_cells(begin_run(experiment(folder), run.folder, resume=True), later)
    assert (later.prepared, len(later.ran)) == ([], 3)
    assert (run.folder / "results.json").read_bytes() == results


def test_the_report_says_how_far_it_is_from_what_was_published_and_why(trained: tuple[Run, Counting, Path]) -> None:
    run, _, _ = trained
    finding = findings(run, summarise(run))[0]
    times = {
        policy: [run.finished[cell.number].result.avg_jct for cell in run.cells if cell.policy == policy]
        for policy in ("drf", "learns")
    }
    shares = [own / drf - 1 for own, drf in zip(times["learns"], times["drf"], strict=True)]
    assert finding.measured.mean == pytest.approx(sum(shares) / 4)
    assert finding.distance == pytest.approx(100 * sum(shares) / 4 + 44.1)
    bounds = [run.finished[cell.number].result.bound for cell in run.cells if cell.policy == "drf"]
    possible = [bound / drf - 1 for bound, drf in zip(bounds, times["drf"], strict=True)]
    assert finding.possible.mean == pytest.approx(sum(possible) / 4)
    markdown, html = (path.read_text() for path in write_report(run))
    assert ET.fromstring(html).tag == "html"
    for text in (markdown, html):
        for words in ("Four jobs are not sixty.", "DL2 is faster. (-44.1 %)", "arXiv:1909.06040", "13 gradient steps"):
            assert words in text
    assert f"{finding.distance:+.1f}"[:4] in markdown
    assert (run.folder / "plots/learning.png").is_file()
    told = summary_json(run)["claims"][0]
    assert (told["published_percent"], told["distance_points"]) == (-44.1, finding.distance)


def test_the_same_again_gives_the_same_bytes(trained: tuple[Run, Counting, Path], tmp_path: Path) -> None:
    run, _, _ = trained
    again = run_cells(begin_run(read_experiment(run.folder / "definition.yaml"), tmp_path / "again"), Here())
    assert (again.folder / "results.json").read_bytes() == (run.folder / "results.json").read_bytes()


def test_other_designs_and_what_went_before(tmp_path: Path) -> None:
    quick = {"iterations": 1, "every": 1, "rounds": 1, "explored": 2, "batch": 2}
    small = {**TRAINING["settings"], "iterations": 1}
    given = experiment(
        tmp_path, seeds=1, claims=[{**CLAIM, "policy": "imitates"}],
        policies=[
            "drf",
            {"name": "imitates", "training": {"settings": {"iterations": 0}}},
            {"name": "offline", "training": {"offline": True, "settings": {"iterations": 1}}},
            {"name": "goes on", "training": {"before": {**small, "types": 2}}},
            {"name": "jumps", "training": {"design": "dl2", "settings": quick}},
        ],
    )  # fmt: skip
    run = run_cells(begin_run(given, tmp_path / "out"), Here())
    assert not run.failures, run.failures[0].trace
    steps = {made.entrant: [look.step for look in made.curve] for _, made in run.preparations}
    # Shorter imitations, of a quarter and so on; and what went before counts.
    assert steps == {"imitates": [0, 1, 2, 5], "offline": [0, 5, 9], "goes on": [9, 13, 17], "jumps": [0, 1]}
    # Learned on a formula, tried on the truth.
    offline, imitates = (next(made for _, made in run.preparations if made.entrant == name)
                         for name in ("offline", "imitates"))  # fmt: skip
    assert offline.reference != imitates.reference


def test_tuning_chooses_on_workloads_of_its_own(tmp_path: Path) -> None:
    tune = {"shortness": [0, 4], "placement": ["load_balance", "best_fit"]}
    cases = [{"name": "small", "source": "generator:dl2?jobs=6&nodes=2&longest_slots=9", "preset": "realistic"}]
    given = experiment(
        tmp_path, workloads=cases, policies=["drf", {"name": "tetris", "tune": tune}], seeds=1, claims=[CLAIM | {
            "policy": "tetris"}],
    )  # fmt: skip
    executor = Counting()
    run = run_cells(begin_run(given, tmp_path / "out"), executor)
    assert not run.failures, run.failures[0].trace
    assert executor.prepared == [("tetris", 0)]
    made = run.preparations[0][1]
    assert (made.case, len(made.tries)) == ("small", 4)
    best = min(made.tries, key=lambda each: each.jct)
    assert made.chosen == best.chosen
    markdown, _ = write_report(run)
    assert f"shortness {best.chosen['shortness']}, placement {best.chosen['placement']}" in markdown.read_text()


def test_what_cannot_be_prepared_costs_its_own_cells_alone(tmp_path: Path) -> None:
    # Of one job in each workload, not all are of the first type.
    settings = {"supervised_updates": 5, "iterations": 0, "window": 4}
    sources = ["generator:dl2?jobs=1&nodes=1&longest_slots=1"]
    training = {"design": "dl2-original", "sources": sources, "draws": 1, "types": 1, "settings": settings}
    given = experiment(tmp_path, training=training, seeds=1)
    run = run_cells(begin_run(given, tmp_path / "out"), Here())
    assert [(each.policy, each.error.split(":")[0]) for each in run.failures] == [("learns", "could not be prepared")]
    assert len(run.missing) == 1
    assert "could not be prepared" in write_report(run)[0].read_text()


def test_types_that_are_left_out_are_not_learned_from() -> None:
    workloads = [load_source(SOURCE, seed=seed).workload for seed in range(3)]
    models = sorted({job.model for workload in workloads for job in workload.jobs})
    kept = only(workloads, models[:1])
    assert {job.model for workload in kept for job in workload.jobs} == {models[0]}
    with pytest.raises(WorkloadError, match="types: no job is of nothing"):
        only(workloads, ["nothing"])


def test_participants_are_tried_before_anything_is_run(tmp_path: Path) -> None:
    bad = {"name": "x", "policy": "tetris", "tune": {"shortnes": [1]}}
    plain = {"workloads": [SOURCE], "claims": [CLAIM | {"policy": "x"}]}
    with pytest.raises(ConfigError, match="shortnes: policy 'tetris' has no such setting"):
        check_experiment(experiment(tmp_path, policies=["drf", bad], **plain))
    for changes, words in (
        ({"policy": "drf", "placement": "nowhere"}, "'nowhere' is not installed"),
        (
            {"policy": "optimus-true", "settings": {"sample_sizes": 2}},
            "optimus-true takes no settings under these rules",
        ),
    ):
        with pytest.raises(PluginError, match=words):
            check_experiment(experiment(tmp_path, policies=["drf", {"name": "x", **changes}], **plain))
