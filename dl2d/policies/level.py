"""Speeds that were measured elsewhere, put to the level that they have on this cluster."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Allocation
from dl2d.core.measured import FAR, MeasuredSpeeds, TrainingKind

#: Sizes that have to tell.
_LEAST: Final = 3
#: Part of the sizes that may tell otherwise.
_OTHERWISE: Final = 0.25
#: Levels are rounded to this, so that what follows from them need not be worked out anew for nothing.
_STEP: Final = 0.02


def levels(
    measured: Iterable[MeasuredSpeeds],
    known: Mapping[TrainingKind, Collection[Allocation]],
    expected: Mapping[TrainingKind, NDArray[np.float64]],
) -> dict[TrainingKind, float]:
    """Logarithms by which kinds are faster here than expected, of those that are by more than 28 %.

    The median of the sizes that are known, or of all where those are too few, if three of four tell so. Other hardware,
    or another unit, makes all sizes of a kind faster or slower alike. Without this, those that were measured here would
    look better, or worse, than all others.

    Parameters
    ----------
    known
        Sizes that are known of each kind.
    expected
        Samples per second, as ``KnownSpeeds.grid`` has them.
    """
    found = {}
    for speeds in measured:
        if speeds.kind not in expected:
            continue
        there = expected[speeds.kind].tolist()
        most_ps, most_workers = len(there), len(there[0])
        apart = []
        for (workers, ps), speed, *_ in speeds.points:
            row = ps if most_ps > 1 else 0
            usual = there[row][workers] if row < most_ps and workers < most_workers else 0.0
            if speed > 0 and usual > 0:
                apart.append(((workers, ps), math.log(speed / usual)))
        sizes = known.get(speeds.kind, ())
        both = [far for size, far in apart if size in sizes]
        off = both if len(both) >= _LEAST else [far for _, far in apart]
        # The median is far off only where half of them are.
        if len(off) < _LEAST or 2 * len([far for far in off if abs(far) > FAR]) < len(off):
            continue
        level = statistics.median(off)
        if _quantile([far if level > 0 else -far for far in off], _OTHERWISE) > FAR:
            found[speeds.kind] = round(level / _STEP) * _STEP
    return found


def _quantile(values: Iterable[float], part: float) -> float:
    """As numpy's, which takes far longer for a few values."""
    inside = sorted(values)
    place = part * (len(inside) - 1)
    before = int(place)
    low, high = inside[before], inside[min(before + 1, len(inside) - 1)]
    along = place - before
    return low + (high - low) * along if along < 0.5 else high - (high - low) * (1 - along)


def at_level(known: Iterable[MeasuredSpeeds], faster: Mapping[TrainingKind, float]) -> tuple[MeasuredSpeeds, ...]:
    """Speeds, those of some kinds as much faster as the logarithms say."""
    return tuple(
        MeasuredSpeeds(
            speeds.kind,
            tuple(
                point._replace(samples_per_second=point.samples_per_second * math.exp(faster[speeds.kind]))
                for point in speeds.points
            ),
        )
        if speeds.kind in faster
        else speeds
        for speeds in known
    )
