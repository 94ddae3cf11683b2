"""Speeds that were measured elsewhere, put to the level that they have on this cluster."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from dl2d.core.measured import FAR, TrainingKind
from dl2d.throughput.observations import SPEED, Bools, Floats, Ints, Table

#: Sizes that have to tell.
_LEAST: Final = 3
#: Part of the sizes that may tell otherwise.
_OTHERWISE: Final = 0.25
#: Levels are rounded to this, so that what follows from them need not be worked out anew for nothing.
_STEP: Final = 0.02


def levels(measured: Table, expected: Floats, known: Bools) -> dict[TrainingKind, float]:
    """Logarithms by which kinds are faster here than expected, of those that are by more than 28 %.

    The median of the sizes that are known, or of all where those are too few, if three of four tell so. Other hardware,
    or another unit, makes all sizes of a kind faster or slower alike. Without this, those that were measured here would
    look better, or worse, than all others.

    Parameters
    ----------
    expected
        Samples per second of each point, shape (n,); 0 where nothing is expected.
    known
        Whether the kind is known at that size, shape (n,).
    """
    speeds, count = measured.rows[:, SPEED], len(measured.kinds)
    told = (speeds > 0) & (expected > 0)
    apart = np.log(np.divide(speeds, expected, where=told, out=np.ones_like(speeds)))

    def number(which: Bools) -> Ints:
        return np.bincount(measured.kind_of[which], minlength=count)

    enough = (number(told & known) >= _LEAST)[measured.kind_of]
    told &= known | ~enough
    many, off = number(told), number(told & (np.abs(apart) > FAR))
    found = {}
    # The median is far off only where half of them are.
    for place in np.flatnonzero((many >= _LEAST) & (2 * off >= many)).tolist():
        far = apart[told & (measured.kind_of == place)].tolist()
        level = statistics.median(far)
        if _quantile([each if level > 0 else -each for each in far], _OTHERWISE) > FAR:
            found[measured.kinds[place]] = round(level / _STEP) * _STEP
    return found


def _quantile(values: Iterable[float], part: float) -> float:
    """As numpy's, which takes far longer for a few values."""
    inside = sorted(values)
    place = part * (len(inside) - 1)
    before = int(place)
    low, high = inside[before], inside[min(before + 1, len(inside) - 1)]
    along = place - before
    return low + (high - low) * along if along < 0.5 else high - (high - low) * (1 - along)


def at_level(known: Table, faster: Mapping[TrainingKind, float]) -> Table:
    """Speeds, those of some kinds as much faster as the logarithms say."""
    rows = known.rows.copy()
    rows[:, SPEED] *= np.exp([faster.get(kind, 0.0) for kind in known.kinds])[known.kind_of]
    return replace(known, rows=rows)
