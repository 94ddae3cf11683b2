from __future__ import annotations

import math
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dl2d.core.errors import WorkloadError
from dl2d.simulation.speeds.model_profiles import load_profile, profile_names
from dl2d.simulation.workload.generators import GENERATORS, generate
from dl2d.simulation.workload.workload_file import Workload, read_workload, write_workload


def made(name: str, seed: int = 1, **settings: object) -> Workload:
    return generate(name, {key: str(value) for key, value in settings.items()}, np.random.default_rng(seed))


def seconds_at(workload: Workload, job, tasks: int) -> float:
    return job.epochs * job.samples_per_epoch / workload.speeds[job.model].samples_per_second(tasks, tasks)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_gives_the_same_bytes_and_another_seed_others(name: str, tmp_path: Path) -> None:
    files = []
    for index, seed in enumerate((7, 7, 8)):
        path = tmp_path / f"{index}.json"
        write_workload(made(name, seed), path)
        files.append(path.read_bytes())
    assert files[0] == files[1] != files[2]
    assert read_workload(tmp_path / "0.json") == made(name, 7)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("architecture", ["ps", "allreduce"])
def test_settings_are_followed(name: str, architecture: str) -> None:
    workload = made(name, jobs=25, nodes=5, node="cpu:32,gpu:4", slot_seconds=600, architecture=architecture,
                    models="bert,vgg-16")  # fmt: skip
    assert len(workload.jobs) == 25
    assert workload.slot_seconds == 600
    assert [(group.count, group.resources.as_dict()) for group in workload.cluster] == [(5, {"cpu": 32, "gpu": 4})]
    assert {job.model for job in workload.jobs} == {"bert", "vgg-16"}
    assert {str(job.architecture) for job in workload.jobs} == {architecture}
    slots = [job.submit_slot for job in workload.jobs]
    assert slots == sorted(slots)
    assert slots[0] == 0


def test_dl2_caps_arrivals_and_fixes_the_length_of_each_type() -> None:
    workload = made("dl2", jobs=500, cap=3, longest_slots=22)
    arrivals = Counter(job.submit_slot for job in workload.jobs)
    assert max(arrivals.values()) == 3
    assert min(arrivals.values()) >= 1
    lengths = {model: {job.epochs for job in workload.jobs if job.model == model} for model in profile_names()}
    assert all(len(epochs) == 1 for epochs in lengths.values())
    one_worker = {job.model: seconds_at(workload, job, 1) / 1200 for job in workload.jobs}
    assert [one_worker[name] for name in sorted(one_worker)] == pytest.approx([2 * k for k in range(1, 12)])
    assert {(job.max_workers, job.max_ps) for job in workload.jobs} == {(16, 16)}


def test_dl2_starts_its_list_at_one_of_five_offsets() -> None:
    firsts = {tuple(job.submit_slot for job in made("dl2", seed, jobs=100, cap=10).jobs) for seed in range(40)}
    assert len(firsts) == 5


@pytest.mark.parametrize("name", ["poisson", "diurnal", "bursty", "heavy-tailed"])
def test_the_mean_rate_is_as_asked(name: str) -> None:
    workload = made(name, jobs=20_000, rate=2.0)
    # The deviation of the span is below 1 % but for bursts: 600 periods of them make 6 %.
    assert 20_000 / workload.jobs[-1].submit_slot == pytest.approx(2.0, rel=0.2 if name == "bursty" else 0.05)


def per_slot(workload: Workload) -> list[int]:
    counts = Counter(job.submit_slot for job in workload.jobs)
    return [counts[slot] for slot in range(workload.jobs[-1].submit_slot)]


def dispersion(workload: Workload) -> float:
    counts = per_slot(workload)
    return statistics.variance(counts) / statistics.mean(counts)


def test_poisson_arrivals_vary_as_poisson_and_bursts_by_far_more() -> None:
    assert dispersion(made("poisson", jobs=20_000)) == pytest.approx(1.0, abs=0.1)
    assert dispersion(made("bursty", jobs=20_000)) > 2.0


def test_diurnal_arrivals_follow_the_day() -> None:
    workload = made("diurnal", jobs=50_000, slot_seconds=3600, rate=50, amplitude=0.6, peak_hour=14)
    hours = np.zeros(24)
    days = workload.jobs[-1].submit_slot // 24
    for job in workload.jobs:
        if job.submit_slot < days * 24:
            hours[job.submit_slot % 24] += 1
    angles = 2 * np.pi * (np.arange(24) + 0.5) / 24
    first = 2 * np.mean(hours / hours.mean() * np.exp(1j * angles))
    assert abs(first) == pytest.approx(0.6, abs=0.05)
    assert np.angle(first) / (2 * np.pi) * 24 % 24 == pytest.approx(14, abs=0.4)


@pytest.mark.parametrize(
    ("name", "settings", "median", "deviation"),
    [
        ("poisson", {}, 8267, 1.21),
        ("heavy-tailed", {"longest_seconds": 1e9}, 889, 2.16),
        ("heavy-tailed", {"law": "pareto", "alpha": 2.0, "median_seconds": 10_000}, 10_000, 0.5),
    ],
)
def test_lengths_have_the_median_and_deviation_asked_for(name, settings, median, deviation) -> None:
    workload = made(name, jobs=10_000, most_gpus=1, stretch=1, **settings)
    logs = np.log([seconds_at(workload, job, 1) for job in workload.jobs])
    assert math.exp(np.median(logs)) == pytest.approx(median, rel=0.1)
    assert logs.std() == pytest.approx(deviation, rel=0.06)


def test_sizes_are_drawn_from_the_fitted_shares() -> None:
    workload = made("poisson", jobs=10_000, stretch=1)
    sizes = Counter(job.max_workers for job in workload.jobs)
    assert set(sizes) == {1, 2, 4, 8, 16}
    assert sizes[1] / 10_000 == pytest.approx(0.837, abs=0.02)
    assert sizes[8] / 10_000 == pytest.approx(0.102, abs=0.02)
    assert all(load_profile(job.model).worker.get("gpu") for job in workload.jobs)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("nonsense", {}, "there is no 'nonsense'"),
        ("poison", {}, "did you mean poisson"),
        ("poisson", {"rat": 1}, "did you mean rate"),
        ("poisson", {"rate": 0}, "rate"),
        ("poisson", {"rate": "nan"}, "rate"),
        ("poisson", {"rate": 1e-5, "jobs": 200_000}, "rate"),
        ("poisson", {"jobs": 0}, "jobs"),
        ("poisson", {"jobs": 1.5}, "whole number"),
        ("poisson", {"models": "bert,other"}, "other"),
        ("poisson", {"node": "gpu"}, "node"),
        ("poisson", {"node": "gpu:8"}, "no job can be used: larger than the cluster"),
        ("poisson", {"slot_seconds": -1}, "slot_seconds"),
        ("poisson", {"architecture": "tree"}, "architecture"),
        ("diurnal", {"amplitude": 1.1}, "amplitude"),
        ("heavy-tailed", {"law": "normal"}, "law"),
        ("dl2", {"cap": 0}, "cap"),
    ],
)
def test_bad_settings_are_told(name: str, settings: dict[str, object], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        made(name, **settings)
