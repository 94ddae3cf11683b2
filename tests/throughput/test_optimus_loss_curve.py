from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dl2d.core.measured_speeds_and_losses import LossPoint
from dl2d.throughput.optimus_loss_curve import LossFit, fit_losses


def fit_loss(points: list[LossPoint]) -> LossFit | None:
    return fit_losses([points])[0]


def loss_at(fit: LossFit, epoch: float) -> float:
    """Loss after so many epochs, as a fraction of the largest."""
    return 1 / (fit.slope * epoch + fit.offset) + fit.asymptote


def curve(slope: float, offset: float, asymptote: float, epochs) -> list[LossPoint]:
    return [LossPoint(epoch, 1 / (slope * epoch + offset) + asymptote) for epoch in epochs]


@pytest.mark.parametrize(
    ("slope", "offset", "asymptote"),
    [(0.5, 0.25, 0.3), (0.5, 0.25, 0.0), (0.01, 2.0, 0.05), (3.0, 0.1, 4.0), (1.0, 0.0, 0.1)],
)
def test_an_exact_curve_comes_back(slope, offset, asymptote) -> None:
    points = curve(slope, offset, asymptote, range(1, 31))
    fit = fit_loss(points)
    assert fit is not None
    # Losses are fractions of the largest one: 1 / (largest x (slope x epoch + offset)) + asymptote / largest.
    largest = points[0].loss
    assert (fit.slope, fit.offset, fit.asymptote) == pytest.approx(
        (slope * largest, offset * largest, asymptote / largest), rel=1e-5, abs=1e-6
    )
    assert loss_at(fit, 100) * largest == pytest.approx(1 / (slope * 100 + offset) + asymptote, rel=1e-6)


@pytest.mark.parametrize("outlier", [60, 0.1])
def test_a_loss_outside_the_range_of_its_neighbours_counts_as_their_mean(outlier) -> None:
    points = [LossPoint(epoch, loss) for epoch, loss in enumerate([9.5, 8, 7, outlier, 5, 4, 3])]
    mean = LossPoint(3, (8 + 7 + 5 + 4) / 4)
    assert fit_loss(points) == fit_loss([*points[:3], mean, *points[4:]]) is not None


def test_one_spike_does_not_move_the_curve_far() -> None:
    points = curve(0.5, 0.25, 0.3, range(1, 31))
    spiked = [*points[:14], LossPoint(15, 50.0), *points[15:]]
    clean, fit = fit_loss(points), fit_loss(spiked)
    assert clean is not None
    assert fit is not None
    assert fit.settling_epoch(1e-3) == pytest.approx(clean.settling_epoch(1e-3), abs=2)


def test_where_it_settles_by_hand() -> None:
    """Loss 1/(k + 1) falls by 1/((k + 1)(k + 2)) in the epoch after k: below 0.1 for the first time at 1/(3 x 4)."""
    fit = fit_loss(curve(1.0, 1.0, 0.0, range(20)))
    assert fit is not None
    assert fit.settling_epoch(0.1) == 2
    assert fit.settling_epoch(1 / 11) == 2
    assert fit.settling_epoch(1 / 13) == 3
    assert fit.settling_epoch(2.0) == 0


def test_many_jobs_are_fitted_as_each_alone() -> None:
    asymptotes = [0.0, 0.1, 0.5, 2.0] * 40
    curves = [curve(1.0, 0.1 * (n % 3), asymptote, range(1, 4 + n % 29)) for n, asymptote in enumerate(asymptotes)]
    curves[5] = curves[5][:2]
    fits = fit_losses(curves)
    assert fits[5] is None
    for points, fit in zip(curves, fits, strict=True):
        alone = fit_loss(points)
        assert (fit is None) == (alone is None)
        if fit is not None:
            for epoch in range(1, 50):
                assert loss_at(fit, epoch) == pytest.approx(loss_at(alone, epoch), rel=1e-7)
            assert fit.settling_epoch(0.01) == pytest.approx(alone.settling_epoch(0.01), abs=1)


@pytest.mark.parametrize(
    "losses",
    [
        [],
        [3.0, 2.0],
        [2.0, 2.0, 2.0, 2.0],
        [1.0, 2.0, 3.0, 4.0],
        [3.0, math.nan, 1.0],
        [3.0, 2.0, math.inf],
        [3.0, 2.0, -1.0],
        [0.0, 0.0, 0.0],
        [1.0, 1.0, 3e5],
    ],
)
def test_losses_that_say_nothing_give_no_curve(losses) -> None:
    assert fit_loss([LossPoint(epoch, loss) for epoch, loss in enumerate(losses)]) is None


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(1e-6, 1e6)), min_size=3, max_size=32, unique_by=lambda p: p[0]),
    st.floats(1e-6, 0.5),
)
# The last outweighs all others.
@example([(1, 1), (3, 307727.9375), (0.5, 1)], 0.5)
def test_whatever_the_losses_a_curve_falls_and_settles_just_then(points, threshold) -> None:
    fit = fit_loss([LossPoint(*point) for point in sorted(points)])
    if fit is None:
        return
    assert fit.slope > 0
    assert fit.offset >= 0
    assert 0 <= fit.asymptote < 1
    epoch = fit.settling_epoch(threshold)
    step = lambda at: 1 / (fit.slope * at + fit.offset) - 1 / (fit.slope * (at + 1) + fit.offset)
    assert step(epoch) < threshold * (1 + 1e-6)
    if epoch > 1 or (epoch == 1 and fit.offset > 0):
        assert step(epoch - 1) > threshold * (1 - 1e-6)
