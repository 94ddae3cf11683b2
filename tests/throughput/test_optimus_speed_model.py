from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl2d.core.jobs import Allocation, Architecture, Consistency
from dl2d.core.measured_speeds_and_losses import SpeedPoint, TrainingKind
from dl2d.simulation.speeds.speed_models import AllReduce, PsAsync, PsSync, SpeedModel
from dl2d.throughput.optimus_speed_model import adds_information, fit_speed, number_of_terms

SYNC = TrainingKind("m", Architecture.PS, Consistency.SYNC)
ASYNC = TrainingKind("m", Architecture.PS, Consistency.ASYNC)
RING = TrainingKind("m", Architecture.ALLREDUCE, Consistency.SYNC)
SPREAD = [(1, 1), (16, 16), (1, 16), (16, 1), (4, 4)]


def measured(model: SpeedModel, sizes) -> list[SpeedPoint]:
    return [SpeedPoint(Allocation(w, p), model.samples_per_second(w, p), 1) for w, p in sizes]


@pytest.mark.parametrize(
    "theta",
    [
        (0.02, 0.1, 0.3, 0.005, 0.01),
        (0.02, 0.0, 0.3, 0.0, 0.01),
        (0.0, 0.0, 0.3, 0.0, 0.0),
        (1e-6, 5.0, 0.0, 1e-4, 0.0),
    ],
)
def test_synchronous_coefficients_come_back_from_five_exact_sizes(theta) -> None:
    """Seconds per sample: the paper's coefficients over the batch, but for that of computing, which is per sample."""
    fit = fit_speed(SYNC, measured(PsSync(theta, 32), SPREAD))
    assert fit is not None
    want = [theta[0], *(number / 32 for number in theta[1:])]
    assert fit.theta == pytest.approx(want, rel=1e-7, abs=1e-12)
    assert min(fit.theta) >= 0
    assert fit.grid(9, 7) == pytest.approx(PsSync(theta, 32).grid(9, 7), rel=1e-7)


@pytest.mark.parametrize("theta", [(0.2, 0.1, 0.03, 0.004), (0.2, 0.0, 0.03, 0.0), (0.2, 0.0, 0.0, 0.0)])
def test_asynchronous_coefficients_come_back_from_four_exact_sizes(theta) -> None:
    """Terms are in the order 1/w, 1/p, 1, p/w: the paper's a, b, c, d over the worker's batch."""
    fit = fit_speed(ASYNC, measured(PsAsync(theta, 8), SPREAD[:4]))
    assert fit is not None
    assert fit.theta == pytest.approx([number / 8 for number in theta], rel=1e-7, abs=1e-12)
    assert fit.grid(9, 7) == pytest.approx(PsAsync(theta, 8).grid(9, 7), rel=1e-7)


@pytest.mark.parametrize(("overhead", "latency"), [(0.0, 0.0), (0.1, 0.001), (0.0, 0.02)])
def test_a_ring_comes_back_from_three_exact_sizes(overhead, latency) -> None:
    ring = AllReduce(
        batch=256, compute=0.002, model_bytes=1e8, bandwidth=1e9, latency=latency, overhead=overhead
    )  # fmt: skip
    fit = fit_speed(RING, measured(ring, [(1, 0), (4, 0), (16, 0)]))
    assert fit is not None
    assert fit.grid(20, 0) == pytest.approx(ring.grid(20, 0), rel=1e-9)


def test_errors_count_by_their_part_of_the_speed_not_by_their_size() -> None:
    """One term, 1/w: two sizes a factor 100 apart, each 10 % off to its side. Absolute errors would follow the slow."""
    points = [SpeedPoint(Allocation(w, 1), speed, 1) for w, speed in ((1, 0.9), (100, 110.0))]
    rows = [point.samples_per_second / point.allocation.workers for point in points]  # 0.9 and 1.1 samples/s a worker
    best = sum(rows) / sum(row * row for row in rows)
    fit = fit_speed(RING, [*points, SpeedPoint(Allocation(10, 1), 10 / best, 1)])
    assert fit is not None
    assert fit.theta[0] == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("kind", [SYNC, ASYNC, RING])
def test_too_few_sizes_give_no_fit(kind) -> None:
    few = [SpeedPoint(Allocation(count, 1), 1.0, 1) for count in range(1, number_of_terms(kind))]
    assert fit_speed(kind, few) is None


def test_runs_that_failed_do_not_count() -> None:
    points = measured(PsSync((0.02, 0.1, 0.3, 0.005, 0.01), 32), SPREAD)
    failed = [SpeedPoint(Allocation(2, 3), 0.0, 1), SpeedPoint(Allocation(3, 3), math.inf, 1)]
    assert fit_speed(SYNC, [*points, *failed]) == fit_speed(SYNC, points)
    assert fit_speed(SYNC, [*points[:4], *failed]) is None


@given(st.lists(st.floats(1e-3, 1e4), min_size=5, max_size=25))
def test_whatever_was_measured_the_fitted_speeds_are_speeds(speeds) -> None:
    sizes = [Allocation(w, p) for w in (1, 2, 3, 5, 8) for p in (1, 2, 4, 7, 16)]
    fit = fit_speed(SYNC, [SpeedPoint(size, speed, 1) for size, speed in zip(sizes, speeds, strict=False)])
    assert fit is not None
    grid = fit.grid(16, 16)
    assert np.isfinite(grid).all()
    assert (grid[1:, 1:] > 0).all()
    assert not grid[0].any()
    assert not grid[:, 0].any()


def test_as_many_servers_as_workers_never_tell_what_their_ratio_costs() -> None:
    equal = [Allocation(count, count) for count in range(1, 9)]
    new = [Allocation(9, 9), Allocation(2, 1), Allocation(1, 2)]
    assert adds_information(SYNC, equal, new).tolist() == [False, True, True]
    # With a size of either sort everything is told: w, p and w/p.
    assert adds_information(SYNC, [*equal, Allocation(2, 1), Allocation(1, 4)], [Allocation(5, 3)]).tolist() == [False]
