"""Job-aware exploration (section 4.3 of the paper): jobs in a poor state are given what they lack, now and then."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dl2d.simulation.vectorized.library import Floats, Ints


def mending(workers: Ints, ps: Ints, masks: NDArray[np.int8], ratio: float) -> Ints:
    """The action that mends the first job in a poor state that can be mended.

    Poor are: several workers and no PS, several PSs and no worker, or more than ``ratio`` times as many of one as of
    the other. A job that can have no PS is never short of one, for the mask forbids it.

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
    wants_worker = (ps >= 2) & (ps > ratio * workers) & choices[:, :, 0]
    wants_ps = (workers >= 2) & (workers > ratio * ps) & choices[:, :, 1]
    poor = wants_worker | wants_ps
    first = poor.argmax(axis=1)
    rows = np.arange(len(workers))
    action: Ints = np.where(poor.any(axis=1), 3 * first + wants_ps[rows, first], -1)
    return action


def explored(actions: Ints, chances: Floats, mends: Ints, epsilon: float, draws: Floats) -> tuple[Ints, Floats]:
    """Actions with some replaced by mending ones, and the probability with which each was then taken.

    The policy is asked with probability 1 - epsilon in a poor state, so what was taken is drawn from a mixture.

    Parameters
    ----------
    actions, chances
        What the policy drew, and all of its probabilities; shapes (N,), (N, 3J + 1).
    mends
        See ``mending``.
    draws
        Uniform in [0, 1), shape (N,).
    """
    poor = mends >= 0
    taken: Ints = np.where(poor & (draws < epsilon), mends, actions)
    own: Floats = chances[np.arange(len(taken)), taken].astype(np.float64)
    mixed: Floats = np.where(poor, (1.0 - epsilon) * own + epsilon * (taken == mends), own)
    return taken, mixed
