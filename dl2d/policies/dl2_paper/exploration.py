"""Exploration of the paper's policy: poor states are corrected now and then, and some jobs run at a drawn size.

The first is the paper's (Peng et al., arXiv 1909.06040, section 4.3). It changes nothing where a job has a few tasks at
most, and speeds are known at the sizes only that the previous scheduler gave: so a cluster has the second too.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dl2d.core.array_types import Floats, Ints
from dl2d.core.jobs import Allocation, Job

#: Ratio of workers to PSs, or of PSs to workers, beyond which a state is poor: the paper's.
_MAX_RATIO = 10.0
#: Bytes of a digest that make one draw.
_DRAW_BYTES = 8


def correcting_actions(sizes: Ints, masks: NDArray[Any]) -> Ints:
    """The action that corrects the first job in a poor state that has an allowed one.

    Poor are: several workers and no PS, several PSs and no worker, or more than ten times as many of one as of
    the other. A job that can have no PS is never short of one, since the mask forbids it.

    Parameters
    ----------
    sizes
        Workers and PSs of the jobs of the window, shape (N, J, 2).
    masks
        Shape (N, 3J + 1).

    Returns
    -------
    Ints
        Shape (N,); -1 where no state is poor.
    """
    workers, ps = sizes[:, :, 0], sizes[:, :, 1]
    choices = masks[:, :-1].reshape(*workers.shape, 3) != 0
    wants_worker = (ps >= 2) & (ps > _MAX_RATIO * workers) & choices[:, :, 0]
    wants_ps = (workers >= 2) & (workers > _MAX_RATIO * ps) & choices[:, :, 1]
    poor = wants_worker | wants_ps
    first = poor.argmax(axis=1)
    rows = np.arange(len(workers))
    return np.where(poor.any(axis=1), 3 * first + wants_ps[rows, first], -1)


def explored(actions: Ints, chances: Floats, corrections: Ints, epsilon: float, draws: Floats) -> tuple[Ints, Floats]:
    """Actions with some replaced by correcting ones, and the probability with which each was then taken.

    In a poor state the correcting action is taken with probability epsilon, else the policy's.

    Parameters
    ----------
    actions, chances
        What the policy drew, and all of its probabilities; shapes (N,), (N, 3J + 1).
    corrections
        See ``correcting_actions``.
    draws
        Uniform in [0, 1), shape (N,).
    """
    poor = corrections >= 0
    taken: Ints = np.where(poor & (draws < epsilon), corrections, actions)
    own: Floats = chances[np.arange(len(taken)), taken].astype(np.float64)
    mixed: Floats = np.where(poor, (1.0 - epsilon) * own + epsilon * (taken == corrections), own)
    return taken, mixed


def drawn_size(job: Job, slot: int, epsilon: float) -> Allocation | None:
    """Random size within a job's bounds with probability ``epsilon``, at which it runs in a slot; otherwise None.

    The random numbers are a hash of the slot and the job's id, so that the result can be computed again afterwards, to
    tell which actions were the policy's.
    """
    request, least = job.request, job.request.min_size
    if not epsilon or job.static:
        return None
    digest = hashlib.sha256(f"{slot}:{job.key.id}".encode()).digest()
    explores, workers, ps = (
        int.from_bytes(digest[start : start + _DRAW_BYTES], "big") / 256**_DRAW_BYTES
        for start in range(0, 3 * _DRAW_BYTES, _DRAW_BYTES)
    )
    if explores >= epsilon:
        return None
    drawn = least.workers + int(workers * (request.max_workers - least.workers + 1))
    return Allocation(
        max(request.largest_allowed(drawn), least.workers), least.ps + int(ps * (request.max_ps - least.ps + 1))
    )
