from __future__ import annotations

import pytest

from dl2d.core.measured_speeds_and_losses import MAX_LOSSES, LossCurve, LossPoint


@pytest.mark.parametrize("total", [0, 1, 2, 31, 32, 33, 64, 127, 128, 129, 255, 256, 257, 1000, 4097, 100_000])
def test_a_curve_keeps_few_points_and_gives_them_evenly_spread(total: int) -> None:
    """As many as there would be of all reports, and each near to where it would be then."""
    curve = LossCurve()
    for number in range(total):
        curve = curve.added(LossPoint(float(number), 1 / (1 + number)))
        assert len(curve.points) <= 4 * MAX_LOSSES
    distance = -(-total // MAX_LOSSES) or 1
    exact = [*range(total - 1, -1, -distance)][::-1]
    given = [point.epoch for point in curve.thinned()]
    assert len(given) == len(set(given)) == len(exact) <= MAX_LOSSES
    assert given[-1:] == exact[-1:]
    off = max((abs(ours - theirs) for ours, theirs in zip(given, exact, strict=True)), default=0)
    assert off <= (0 if total <= 4 * MAX_LOSSES else distance / 4)
