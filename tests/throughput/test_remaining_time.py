from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from policies.snapshots import a_job, a_snapshot, ask, cluster

from dl2d.core.jobs import Allocation, Job, Progress
from dl2d.plugins import FactoryArguments, load_policy
from dl2d.throughput.remaining_time import (
    epochs_left,
    epochs_left_of_all,
    ranks_by_remaining_time,
    remaining_seconds,
    samples_left,
    speeds_or_means,
)


@pytest.mark.parametrize(
    ("done", "left"),
    [(0.0, 10.0), (4.0, 6.0), (9.99, 0.1), (10.0, 0.1), (10.05, 0.1), (11.0, 11.0), (10_000.0, 10_000.0)],
)
def test_a_job_that_has_done_more_than_it_declared_has_as_much_left_as_it_has_done(done: float, left: float) -> None:
    job = replace(a_job(1, epochs=10.0, samples_per_epoch=50.0), progress=Progress(epoch=done))
    assert samples_left(job) == pytest.approx(50.0 * left)


def test_epochs_of_the_script_count_where_they_are_more_than_the_declared_ones() -> None:
    job = a_job(1, epochs=0.001, samples_per_epoch=50.0)
    progress = Progress(version=20, total_versions=1000, epoch=2.0)
    assert samples_left(replace(job, progress=progress)) == pytest.approx(50.0 * 98.0)
    declared_more = replace(job, request=replace(job.request, epochs=200.0), progress=progress)
    assert samples_left(declared_more) == pytest.approx(50.0 * 198.0)


@pytest.mark.parametrize("name", ["dl2", "srtf", "tetris", "optimus", "lookahead", "drf"])
def test_who_declares_less_work_than_there_is_gets_no_more_once_it_is_done(name: str) -> None:
    policy, nodes, held = (
        load_policy(name, given=FactoryArguments(checkpoint=None)),
        cluster(2, cpu=16),
        Allocation(1, 1),
    )
    progress = Progress(at=1.0, epoch=50.0, samples_per_second=100.0, workers=1, ps=1)
    request = {"model": "vgg-16", "epochs": 100.0, "samples_per_epoch": 100_000.0, "max_workers": 8, "max_ps": 8}
    jobs = [replace(a_job(n, **request, worker=a_job(n).request.ps * 2), progress=progress) for n in range(5)]

    def has_last(epochs: float) -> Allocation:
        last = replace(jobs[-1], request=replace(jobs[-1].request, epochs=epochs))
        return ask(policy, a_snapshot([*jobs[:-1], last], nodes, dict.fromkeys(range(5), held))).jobs[-1].allocation

    assert has_last(0.001) == has_last(100.0)


def test_remaining_time_is_at_the_last_speed_else_at_that_of_others_of_the_type() -> None:
    def a(number: int, model: str, speed: float | None) -> Job:
        job = a_job(number, model=model, epochs=10.0, samples_per_epoch=60.0)
        return replace(job, progress=Progress(epoch=5.0, samples_per_second=speed))

    jobs = [a(1, "x", 10.0), a(2, "x", 30.0), a(3, "x", None), a(4, "y", 0.0), a(5, "z", float("nan"))]
    assert list(remaining_seconds(a_snapshot(jobs, cluster(1))).values()) == pytest.approx([30, 10, 15, 15, 15])
    assert list(remaining_seconds(a_snapshot(jobs[2:], cluster(1))).values()) == [300.0, 300.0, 300.0]
    unreported = replace(a(6, "x", None), static=True, address="", progress=Progress(epoch=5.0))
    assert list(remaining_seconds(a_snapshot([*jobs[:2], unreported], cluster(1))).values())[-1] == 300.0


def test_speeds_and_places_are_those_of_the_jobs_own_cluster() -> None:
    clusters, types = np.array([0, 0, 0, 3, 3]), np.array([0, 1, 1, 1, 0])
    speeds = speeds_or_means(np.array([0.0, 4.0, 8.0, 0.0, 2.0]), types, clusters)
    assert speeds.tolist() == [6.0, 4.0, 8.0, 2.0, 2.0]
    assert ranks_by_remaining_time(np.array([5.0, 1.0, 5.0, 2.0, 1.0]), clusters).tolist() == [1, 0, 2, 1, 0]
    assert ranks_by_remaining_time(np.zeros(0), np.zeros(0, dtype=np.int64)).tolist() == []
    declared, done = np.full(4, 10.0), np.array([0.0, 9.99, 10.05, 11.0])
    assert epochs_left_of_all(declared, done).tolist() == [epochs_left(10.0, each) for each in done.tolist()]
