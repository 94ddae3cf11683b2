"""One job of a kind at a time explores sizes with uncertain speed."""

from __future__ import annotations

import pytest
from msgspec import structs
from policies.dl2.checkpoints import policy
from policies.snapshots import given
from throughput.test_gaussian_process import SMOOTH, SPREAD, of_model
from throughput.test_mislabelled_jobs import KNOWN, TRUE, job_of, own, with_speeds

from dl2d.core.jobs import Job
from dl2d.core.measured_speeds_and_losses import SpeedPoint
from dl2d.policies.dl2.policy import Dl2
from dl2d.policies.dl2.speed_predictions import exploring_jobs
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.mislabelled_jobs import Relabelling
from dl2d.throughput.training_data import by_kind

A = own(((4, 4), TRUE["a"][4, 4]))
B = own(((4, 4), TRUE["b"][4, 4]))
STILL = own(((4, 4), 0.0))
STRANGE = own(((4, 4), 100 * TRUE["a"].max()))


def numbers(jobs: list[Job], shown: dict[int, tuple[SpeedPoint, ...]]) -> set[int]:
    snapshot = with_speeds(jobs, shown)
    exploring = exploring_jobs(snapshot, Relabelling(snapshot, GaussianProcess(by_kind(KNOWN))))
    return {number for number, job in enumerate(jobs) if job.key in exploring}


def test_of_each_kind_the_confirmed_job_with_most_work_left_explores() -> None:
    jobs = [job_of(number, model, epochs=epochs) for number, (model, epochs) in enumerate([
        ("a", 5), ("a", 9), ("b", 3), ("b", 2), ("b", 3), ("a", 7)])]  # fmt: skip
    assert numbers(jobs, {0: A, 1: A, 2: B, 3: B, 4: B, 5: A}) == {1, 2}


@pytest.mark.parametrize("other", [None, STILL, B, STRANGE])
def test_a_job_that_is_not_confirmed_neither_explores_nor_counts(other: tuple[SpeedPoint, ...] | None) -> None:
    jobs = [job_of(number, "a", epochs=epochs) for number, epochs in enumerate([1, 9, 2, 1])]
    new = {} if other is None else {1: other}
    assert numbers(jobs, {0: A, **new, 2: A, 3: A}) == {2}
    assert numbers(jobs, {0: A, **new, 2: A}) == set()


def test_an_exploring_job_has_twice_the_optimism_unless_that_is_0() -> None:
    seen = of_model("b", SMOOTH["b"], SPREAD)
    jobs = [job_of(1, "b", epochs=900), job_of(2, "b", epochs=1000), job_of(3, "b", epochs=800)]
    all_ = with_speeds(jobs, dict.fromkeys(range(3), B), [seen])
    [other, explores, another] = given(policy(), all_)
    assert explores != other == another
    nothing_confirmed = structs.replace(all_, job_speeds=())
    assert given(policy(), nothing_confirmed) == [other] * 3
    assert given(Dl2(policy().checkpoint, optimism=1.0), nothing_confirmed) == [explores] * 3
    assert len(set(given(Dl2(policy().checkpoint, optimism=0.0), all_))) == 1
