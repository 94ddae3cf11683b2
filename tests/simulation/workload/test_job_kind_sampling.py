from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dl2d.cli.train.options_of_train_commands import training_workloads
from dl2d.core.errors import WorkloadError
from dl2d.simulation.workload.generators import generate
from dl2d.simulation.workload.job_kind_sampling import KindsSettings, draw_kinds
from dl2d.simulation.workload.workload_file import CapacityChange, NodeGroup, Workload, read_workload, write_workload
from dl2d.simulation.workload.workload_source_by_name import load_source

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
        with pytest.raises(WorkloadError, match="nodes: cannot be set where the file has several groups of nodes"):
            draw_kinds(given, KindsSettings(nodes=3), np.random.default_rng(0), where="x")
        assert draw_kinds(given, KindsSettings(), np.random.default_rng(0), where="x").cluster == given.cluster
    large = replace(known, jobs=tuple(replace(job, min_workers=3) for job in known.jobs))
    with pytest.raises(WorkloadError, match="has no room for 3 tasks"):
        draw_kinds(large, KindsSettings(nodes=1), np.random.default_rng(0), where="x")
