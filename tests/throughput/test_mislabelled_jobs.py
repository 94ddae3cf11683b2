"""Jobs that are not what their users say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from policies.snapshots import a_job, a_snapshot, ask, cluster
from throughput.test_gaussian_process import SMOOTH, SPREAD, a_request, fitted, of_model, told

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Decision
from dl2d.core.jobs import Allocation, Job
from dl2d.core.measured_speeds_and_losses import JobSpeeds, MeasuredSpeeds, SpeedPoint
from dl2d.policies.lookahead import Lookahead
from dl2d.throughput.mislabelled_jobs import PredictedAs, Relabelling

KNOWN = [of_model(name, model, SPREAD) for name, model in SMOOTH.items()]
TRUE = {name: model.grid(16, 16) for name, model in SMOOTH.items()}


def job_of(number: int, model: str, **changes: Any) -> Job:
    return a_job(number, model=model, max_workers=16, max_ps=16, **changes)


def own(*said: tuple[tuple[int, int], float]) -> tuple[SpeedPoint, ...]:
    return tuple(SpeedPoint(Allocation(*size), speed, 1, 1, 5.0, 5.0) for size, speed in said)


def labels(jobs: list[Job], shown: dict[int, tuple[SpeedPoint, ...]], known: Any = KNOWN) -> list[PredictedAs]:
    snapshot = with_speeds(jobs, shown, known)
    found = Relabelling(snapshot, fitted(known))
    return [found.of(job) for job in jobs]


def with_speeds(jobs: list[Job], shown: dict[int, tuple[SpeedPoint, ...]], known: Any = KNOWN) -> Snapshot:
    told_of = tuple(JobSpeeds(jobs[number].key, points) for number, points in shown.items())
    return structs.replace(a_snapshot(jobs, cluster(40, cpu=8, gpu=8)), speeds=tuple(known), job_speeds=told_of)


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.15])
def test_a_job_that_trains_as_its_kind_does_is_of_it(factor: float) -> None:
    job = job_of(1, "a")
    shown = {0: own(((4, 4), factor * TRUE["a"][4, 4]), ((8, 2), factor * TRUE["a"][2, 8]))}
    assert labels([job], shown) == [PredictedAs(job.request)]
    assert labels([job], {}) == [PredictedAs(job.request)]


@pytest.mark.parametrize(("times", "strange"), [(3, True), (4, False)])
def test_one_slow_slot_of_five_says_nothing_of_what_a_job_is(times: int, strange: bool) -> None:
    job = job_of(1, "a")
    usual, slow = own(((4, 4), TRUE["a"][4, 4]), ((8, 2), 0.5 * TRUE["a"][2, 8]))
    [shown] = labels([job], {0: (usual._replace(measurements=times), slow)})
    assert (shown != PredictedAs(job.request)) is strange


def test_a_job_with_the_speeds_of_another_kind_is_taken_as_of_that_kind() -> None:
    jobs = [job_of(1, "a"), job_of(2, "a")]
    [first, second] = labels(jobs, {1: own(((4, 4), TRUE["b"][4, 4]))})
    assert first == PredictedAs(jobs[0].request)
    assert second == PredictedAs(replace(jobs[1].request, model="b"))


def test_a_job_like_no_other_is_believed_what_it_showed_and_the_shape_that_all_share() -> None:
    job = job_of(1, "a")
    said = own(((4, 4), 100 * TRUE["a"].max()))
    [shown] = labels([job], {0: said})
    assert shown == PredictedAs(
        job.request, (SpeedPoint(Allocation(4, 4), said[0].samples_per_second, 1),), of_known_kind=False
    )
    belief = fitted(KNOWN)
    grid = belief.predict_speeds(shown.request, own_measurements=shown.own_measurements)
    assert grid[4, 4] == pytest.approx(said[0].samples_per_second, rel=0.05)
    new = belief.predict_speeds(a_request("new"))
    alike = np.corrcoef(np.log(grid[1:, 1:]).ravel(), np.log(new[1:, 1:]).ravel())[0, 1]
    assert alike > 0.9
    # Its kind is believed what it was.
    np.testing.assert_array_equal(belief.predict_speeds(job.request), fitted(KNOWN).predict_speeds(job.request))


def test_a_size_at_which_a_job_stood_still_is_a_hole_for_it_alone() -> None:
    jobs = [job_of(1, "a"), job_of(2, "a")]
    [first, second] = labels(jobs, {0: own(((4, 4), 0.0), ((2, 2), TRUE["a"][2, 2]))})
    belief = fitted(KNOWN)
    with_hole = belief.predict_speeds(first.request, own_measurements=first.own_measurements)
    assert with_hole[4, 4] == 0
    whole = belief.predict_speeds(second.request, own_measurements=second.own_measurements)
    np.testing.assert_array_equal(np.delete(with_hole.ravel(), 4 * 17 + 4), np.delete(whole.ravel(), 4 * 17 + 4))
    assert whole[4, 4] > 0


def test_lookahead_gives_a_mislabelled_job_what_is_best_for_what_it_is() -> None:
    fast = {(w, p): 10.0 + (w, p == 1)[0] * (p == 1) for w in range(1, 5) for p in range(1, 5)} | {(4, 1): 30.0}
    slow = {(w, p): 1.0 for w in range(1, 5) for p in range(1, 5)} | {(1, 4): 3.0}
    known = (told("fast", fast, 16), told("slow", slow, 16))
    jobs = [a_job(number, model="fast", samples_per_epoch=1000) for number in (1, 2)]

    def given(shown: dict[int, tuple[SpeedPoint, ...]]) -> Decision:
        return ask(Lookahead(), with_speeds(jobs, shown, known))

    assert [entry.allocation for entry in given({}).jobs] == [(4, 1), (4, 1)]
    [first, second] = given({1: own(((4, 1), 1.0))}).jobs
    assert (first.allocation, second.allocation) == ((4, 1), (1, 4))


def test_what_two_jobs_showed_far_from_all_else_is_doubted_until_another_shows_it() -> None:
    sizes = [(w, p) for w in (1, 2, 4, 8, 16) for p in (1, 2, 4, 8, 16)]
    seen = of_model("m", SMOOTH["a"], sizes)
    true = SMOOTH["a"].samples_per_second(4, 4)

    def believed(jobs: int) -> float:
        points = [
            each._replace(samples_per_second=20 * true, jobs=jobs, measurements=1)
            if each.allocation == (4, 4)
            else each
            for each in seen.points
        ]
        return float(fitted([MeasuredSpeeds(seen.kind, tuple(points))]).predict_speeds(a_request("m"))[4, 4])

    assert believed(1) == pytest.approx(true, rel=0.3)
    assert believed(2) == pytest.approx(true, rel=0.3)
    assert believed(3) > 10 * true
    assert believed(0) > 10 * true
