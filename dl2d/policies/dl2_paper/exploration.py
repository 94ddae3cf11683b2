"""Job-aware exploration (Peng et al., arXiv 1909.06040, section 4.3): poor states are corrected now and then."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dl2d.core.array_types import Floats, Ints
from dl2d.policies.dl2_paper.sizing_state import Batch

#: Ratio of workers to PSs, or of PSs to workers, beyond which a state is poor: the paper's.
_MAX_RATIO: Final = 10.0


def correcting_actions(workers: Ints, ps: Ints, masks: NDArray[Any]) -> Ints:
    """The action that corrects the first job in a poor state that has an allowed one.

    Poor are: several workers and no PS, several PSs and no worker, or more than ten times as many of one as of
    the other. A job that can have no PS is never short of one, since the mask forbids it.

    Parameters
    ----------
    workers, ps
        Of the jobs of the window, shape (N, J).
    masks
        Shape (N, 3J + 1).

    Returns
    -------
    Ints
        Shape (N,); -1 where no state is poor.
    """
    choices = masks[:, :-1].reshape(*workers.shape, 3) != 0
    wants_worker = (ps >= 2) & (ps > _MAX_RATIO * workers) & choices[:, :, 0]
    wants_ps = (workers >= 2) & (workers > _MAX_RATIO * ps) & choices[:, :, 1]
    poor = wants_worker | wants_ps
    first = poor.argmax(axis=1)
    rows = np.arange(len(workers))
    action: Ints = np.where(poor.any(axis=1), 3 * first + wants_ps[rows, first], -1)
    return action


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


def correcting_action(batch: Batch) -> int:
    """The action that corrects a poor state of a batch; -1 where none is poor, or nothing can be done about it."""
    sizes, mask = batch.sizes(), batch.mask()
    return int(correcting_actions(sizes[None, :, 0], sizes[None, :, 1], mask[None])[0])
