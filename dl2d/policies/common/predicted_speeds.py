"""What changing a job's size costs it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import NOTHING, Allocation

#: Share of a slot that is left of it at least.
_LEAST = 0.01


def stays(rates: NDArray[np.float64], held: Allocation) -> bool:
    """Whether a job has a size that it may keep, one of those in ``rates[ps, workers]``."""
    return held != NOTHING and held.ps < rates.shape[0] and held.workers < rates.shape[1]


def in_next_slot(rates: NDArray[np.float64], held: Allocation, lost: float) -> NDArray[np.float64]:
    """Samples per second over a slot in which a change of size costs this share of it.

    So a job's size is changed only where that pays within a slot: ``lost`` also stands for what cannot be counted, the
    place that a job gives up and what others lose when its tasks come to lie among theirs.

    Parameters
    ----------
    rates
        ``rates[ps, workers]``.
    held
        What it has now; where it has nothing that it may keep, all sizes are new and nothing is changed.
    """
    if not lost or not stays(rates, held):
        return rates
    slowed: NDArray[np.float64] = rates * max(1.0 - lost, _LEAST)
    slowed[held.ps, held.workers] = rates[held.ps, held.workers]
    return slowed
