"""Schedulers to imitate that need no recording: what they would do at each single decision of a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from dl2d.simulation.library import Floats, Ints
from dl2d.simulation.windows import Windows

_WORKER, _BUNDLE = 0, 2


#: Says what to do next in each cluster: actions, shape (N,), 0 to 3J; 3J, void, where the batch has enough.
Teacher = Callable[[Windows], Ints]


def drf(windows: Windows) -> Ints:
    """DRF of preset ``dl2-paper``: the job with the least dominant share gets a bundle, until one has no room."""
    clusters = windows.clusters
    rows, jobs = np.arange(clusters.count)[:, None], np.maximum(windows.window, 0)
    demand = clusters.demand[rows, jobs]
    sizes = clusters.sizes[rows, jobs]
    held = (sizes[..., None] * demand).sum(axis=2)
    shares: Floats = (held / np.maximum(clusters.capacity, 1)[:, None, :]).max(axis=2)
    return _next(windows, shares)


def fifo(windows: Windows) -> Ints:
    """FIFO of preset ``dl2-paper``: jobs are served whole in submit order, until a bundle has no room."""
    return _next(windows, np.zeros(windows.window.shape))


def _next(windows: Windows, keys: Floats) -> Ints:
    """A bundle for the job with the least key that may grow, the first of equals; all-reduce jobs get a worker."""
    clusters = windows.clusters
    rows, jobs = np.arange(clusters.count)[:, None], np.maximum(windows.window, 0)
    sizes, most = clusters.sizes[rows, jobs], clusters.most[rows, jobs]
    lone = most[:, :, 1] == 0
    grows = (windows.window >= 0) & (sizes[:, :, 0] < most[:, :, 0]) & (lone | (sizes[:, :, 1] < most[:, :, 1]))
    column = np.where(grows, keys, np.inf).argmin(axis=1)
    row = np.arange(clusters.count)
    wanted = 3 * column + np.where(lone[row, column], _WORKER, _BUNDLE)
    fits = grows.any(axis=1) & (windows.mask()[row, wanted] != 0)
    actions: Ints = np.where(fits, wanted, 3 * windows.jobs)
    return actions


#: Teachers that need no recording.
QUICK: Final[Mapping[str, Teacher]] = {"drf": drf, "fifo": fifo}

#: Policies that leave some jobs without tasks while others are served whole: a first bundle for every job, which is not
#: theirs, would change them.
SERVE_WHOLE: Final = frozenset({"fifo", "srtf", "tetris"})
#: Policies of preset ``dl2-paper`` that can be imitated.
TEACHERS: Final = ("drf", "fifo", "srtf", "tetris", "optimus", "lookahead")
